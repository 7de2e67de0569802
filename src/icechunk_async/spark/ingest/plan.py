"""Decide where each file goes in the output; pure."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, Literal

import cftime
import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.spark.ingest.catalog import CATALOG
from icechunk_async.spark.ingest.scan import attributes_of, chunk_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from icechunk_async.spark.ingest.catalog import Catalog, Entry
    from icechunk_async.spark.ingest.scan import Document, Scanned, ScannedArray

    type Mode = Literal["append", "overwrite"]

__all__ = [
    "Answered",
    "Placed",
    "Plan",
    "Template",
    "check_apart",
    "groups_of",
    "plan_concat",
    "plan_groups",
    "to_units",
]


def groups_of(
    root: str,
    locations: Sequence[str],
    group_of: Callable[[str], str] | None,
    others: Iterable[Entry],
) -> dict[str, str]:
    """Return the group of each file.

    Args:
        root: the group of the output.
        locations: the files.
        group_of: returns the group for a file, relative to `root`.
        others: files that were ingested before and stay.

    Raises:
        InvalidInputError: a group is the root or contains the catalog, or see `check_apart`.
    """
    found = {it: check_path(f"{root}/{(group_of or _stem)(it).strip('/')}") for it in locations}
    catalog = check_path(f"{root}/{CATALOG}")
    for location, path in found.items():
        if path == root or catalog in (path, *ancestors(path)):
            raise InvalidInputError(f"{location!r} cannot become the group {path!r}.")
    kept = [(it.location, it.group) for it in others if it.location not in found]
    check_apart([*kept, *found.items()])
    return found


def check_apart(groups: Iterable[tuple[str, str]]) -> None:
    """Check that groups are disjoint: replacing an outer one would delete an inner one.

    Args:
        groups: files, and the path of each one's group.

    Raises:
        InvalidInputError: two groups are the same, or one is inside of the other.
    """
    taken: dict[str, str] = {}
    for location, group in groups:
        path = check_path(group)
        if path in taken:
            raise _refused(location, path, taken[path], path)
        taken[path] = location
    for path, location in taken.items():
        # By ancestors, not by pairs: a million groups would make 10**12 of these.
        outer = next((it for it in ancestors(path) if it in taken), None)
        if outer is not None:
            raise _refused(location, path, taken[outer], outer)


def _refused(location: str, path: str, other: str, outer: str) -> InvalidInputError:
    return InvalidInputError(
        f"{location!r} and {other!r} would be the groups {path!r} and {outer!r}, one within the "
        "other or the same, so that neither could be replaced alone. Nothing was changed. Give "
        "group_of= that keeps them apart."
    )


def _stem(location: str) -> str:
    name = location.rstrip("/").rpartition("/")[2]
    return name.rpartition(".")[0] or name


_DECODING: Final = (
    *("units", "calendar", "scale_factor", "add_offset"),
    *("_FillValue", "missing_value", "_Unsigned"),
)
"""Attributes that change the meaning of stored numbers."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a task for one file."""

    stamp: str | None
    reason: str | None
    """Why it could not be scanned, or None."""
    scanned: Scanned | None
    """Its contents; None if it is unchanged or could not be scanned."""
    milliseconds: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A file of the output, and its place."""

    location: str
    stamp: str
    group: str
    start: int
    count: int
    scanned: Scanned | None
    """Its contents; None if its earlier references stay."""
    old: Entry | None
    """Its earlier entry, if it was ingested before."""


@dataclass(slots=True)
class Plan:
    """The decisions of one ingest."""

    placed: list[Placed] = field(default_factory=list[Placed])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Files that cannot be part of the output, and the reasons."""
    removed: list[Entry] = field(default_factory=list["Entry"])
    """Files of the output that are not listed any more."""
    moved: list[str] = field(default_factory=list[str])
    """Unchanged files that must be scanned again, since their place changes."""
    template: Template | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether the output does not change."""
        return not self.removed and all(it.scanned is None for it in self.placed)


def order_of(catalog: Catalog, files: Sequence[str], mode: Mode) -> list[str]:
    """Return the files of the output, in order."""
    if mode == "overwrite":
        return list(files)
    return list(dict.fromkeys([*(it.location for it in catalog.entries), *files]))


def _removed(catalog: Catalog, order: Sequence[str]) -> list[Entry]:
    kept = set(order)
    return [it for it in catalog.entries if it.location not in kept]


@dataclass(frozen=True, slots=True)
class Template:
    """The metadata that all concatenated files share."""

    dim: str
    documents: Mapping[str, Document]
    loaded: frozenset[str]

    @classmethod
    def of(cls, scanned: Scanned, dim: str) -> Template:
        """Return the template that a file defines."""
        loaded = {path for path, it in scanned.arrays.items() if it.values is not None}
        documents = {path: it.document for path, it in scanned.arrays.items()}
        return cls(dim, documents, frozenset(loaded))

    def axis(self, path: str) -> int | None:
        """Return the axis of an array along which files are concatenated, or None."""
        names: list[str | None] = self.documents[path].get("dimension_names") or []
        return names.index(self.dim) if self.dim in names else None

    def concatenated(self) -> dict[str, int]:
        """Return the paths of concatenated arrays, and the axis of each."""
        found = {path: self.axis(path) for path in self.documents}
        return {path: axis for path, axis in found.items() if axis is not None}

    def misfit(self, scanned: Scanned) -> str | None:
        """Return why a file does not fit the others, or None if it does."""
        if missing := self.documents.keys() - scanned.arrays.keys():
            return f"it has no array {min(missing)!r}, which the others have"
        if more := scanned.arrays.keys() - self.documents.keys():
            return f"it has an array {min(more)!r}, which the others do not have"
        for path, array in scanned.arrays.items():
            why = self._array_misfit(path, array)
            if why is not None:
                return f"its array {path!r} {why}"
        return None

    def _array_misfit(self, path: str, array: ScannedArray) -> str | None:
        mine, theirs = self.documents[path], array.document
        axis = self.axis(path)
        shapes = [list(it["shape"]) for it in (mine, theirs)]
        if len(shapes[0]) != len(shapes[1]):
            return f"has {len(shapes[1])} axes, not {len(shapes[0])}"
        if axis is not None:
            for it in shapes:
                # Lengths along the dimension of concatenation may differ.
                it[axis] = 0
        if shapes[0] != shapes[1]:
            return f"has the shape {theirs['shape']}, and the others have {mine['shape']}"
        for name in ("data_type", "dimension_names"):
            if mine.get(name) != theirs.get(name):
                return f"has the {name} {theirs.get(name)!r}, not {mine.get(name)!r}"
        if axis is None or (array.values is not None) != (path in self.loaded):
            return None if axis is None else "is copied, and was not in other files, or vice versa"
        return _decoding_misfit(mine, theirs, is_loaded=path in self.loaded)


def _decoding_misfit(mine: Document, theirs: Document, *, is_loaded: bool) -> str | None:
    """Return why chunks of one file would be misread with the metadata of another, or None."""
    for name in () if is_loaded else ("codecs", "fill_value", "chunk_grid"):
        if mine.get(name) != theirs.get(name):
            return f"has other {name} than the others: {theirs.get(name)!r}, not {mine.get(name)!r}"
    both = [attributes_of(mine), attributes_of(theirs)]
    for name in _DECODING:
        first, second = (it.get(name) for it in both)
        # Copied times are converted by `to_units`. Referred ones are numbers in files, which nobody
        # rewrites.
        is_time = name == "units" and " since " in f"{first}" and " since " in f"{second}"
        if first == second or (is_loaded and is_time):
            continue
        advice = " Name it in load=, so that it is copied" if is_time else ""
        return f"has {name} {second!r}, not {first!r}, so its numbers mean something else{advice}"
    return None


def to_units(array: ScannedArray, document: Document) -> Any:
    """Return the values of a copied array in the units of the others.

    Raises:
        InvalidInputError: the array's type cannot hold them.
    """
    values: Any = array.values
    mine, theirs = attributes_of(document), attributes_of(array.document)
    if mine.get("units") == theirs.get("units"):
        return values
    calendar = mine.get("calendar", "standard")
    # By cftime, not by NumPy: models have calendars of 360 days, and years that nanoseconds lack.
    moments = cftime.num2date(values, theirs["units"], calendar)
    converted = np.asarray(cftime.date2num(moments, mine["units"], calendar))
    # Half an hour in whole hours would be rounded to another moment.
    if values.dtype.kind in "iu" and not np.array_equal(converted, np.round(converted)):
        raise InvalidInputError(
            f"its times are in {theirs['units']!r}, and are not whole numbers of "
            f"{mine['units']!r}, the units of the others"
        )
    return converted.astype(values.dtype)


def plan_concat(
    catalog: Catalog,
    files: Sequence[str],
    answers: Mapping[str, Answered],
    *,
    dim: str,
    group: str,
    mode: Mode,
    existing: Template | None,
) -> Plan:
    """Decide where each file goes along the dimension of concatenation.

    Args:
        catalog: the files ingested so far.
        files: the files to ingest, in order.
        answers: results of tasks, by location.
        dim: the dimension.
        group: the group of the output.
        mode: whether `files` are the whole output, or come after earlier files.
        existing: the arrays of earlier ingests, if there are any.

    Raises:
        InvalidInputError: a file that cannot be read now would have to be moved.
    """
    plan = Plan()
    order = order_of(catalog, files, mode)
    plan.removed = _removed(catalog, order)
    stay = existing is not None and any(
        _stays(catalog, answers, location) for location in order if location in catalog.by_location
    )
    # The arrays that are there count while any file keeps its references to them. If all files come
    # anew, the first of them says what the arrays are.
    plan.template = existing if stay else _first(order, answers, dim)
    # Where the next file begins. A refused file takes no place, unless it was ingested before: then
    # its old references keep theirs.
    start = 0
    for location in order:
        old, answer = catalog.by_location.get(location), answers.get(location)
        scanned, why = None, None
        count = 0
        if answer is not None:
            scanned, why = answer.scanned, answer.reason
        if scanned is not None:
            assert plan.template is not None  # a scanned file defines one
            count, why = _fit(plan.template, scanned, start)
            scanned = scanned if why is None else None
        if why is not None:
            plan.refused[location] = why
        if scanned is not None and answer is not None:
            stamp = answer.stamp or ""
            plan.placed.append(Placed(location, stamp, group, start, count, scanned, old))
        elif old is not None:
            count = old.count
            # Its references are at the old place, or in arrays that are replaced. They cannot be
            # moved without what a scan finds: shapes, inline chunks, copied values.
            if old.start != start or plan.template is not existing:
                if why is not None:
                    raise _stuck(location, why)
                plan.moved.append(location)
            plan.placed.append(Placed(location, old.stamp, group, start, count, None, old))
        start += count if scanned is not None or old is not None else 0
    return plan


def _stuck(location: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{location!r} was ingested before and would have to be written anew with the others, but "
        f"cannot be read: {why} Nothing was changed. Repair it, or leave it out with "
        "mode='overwrite'."
    )


def _fit(template: Template, scanned: Scanned, start: int) -> tuple[int, str | None]:
    """Return the length of a file, or why it cannot begin at an index."""
    why = template.misfit(scanned)
    if why is not None:
        return 0, f"It does not fit the others: {why}."
    count, why = _count(template, scanned)
    why = why or _misaligned(template, start)
    return count, None if why is None else f"It cannot be concatenated: {why}."


def _stays(catalog: Catalog, answers: Mapping[str, Answered], location: str) -> bool:
    answer = answers.get(location)
    return location in catalog.by_location and (answer is None or answer.scanned is None)


def _first(order: Iterable[str], answers: Mapping[str, Answered], dim: str) -> Template | None:
    for location in order:
        answer = answers.get(location)
        if answer is not None and answer.scanned is not None:
            template = Template.of(answer.scanned, dim)
            if template.concatenated():
                return template
    return Template(dim, {}, frozenset())


def _count(template: Template, scanned: Scanned) -> tuple[int, str | None]:
    """Return the length of a file, or why it is not known."""
    lengths = {
        scanned.arrays[path].shape[axis]
        for path, axis in template.concatenated().items()
        if path in scanned.arrays and axis < len(scanned.arrays[path].shape)
    }
    if not lengths:
        return 0, f"none of its arrays has the dimension {template.dim!r}"
    if len(lengths) > 1:
        return 0, f"its arrays have {sorted(lengths)} steps of {template.dim!r}"
    return lengths.pop(), None


def _misaligned(template: Template, start: int) -> str | None:
    """Return why no file can begin at an index, or None; copied arrays can begin anywhere."""
    for path, axis in template.concatenated().items():
        if path not in template.loaded:
            chunk = chunk_shape(template.documents[path])[axis]
            # References name whole chunks: a file that begins within one would share it with the
            # file before.
            if start % chunk:
                return (
                    f"it would begin at {start} along {template.dim!r}, inside of a chunk of "
                    f"{path!r} (chunks of {chunk}), since the files before it end there"
                )
    return None


def plan_groups(
    catalog: Catalog,
    files: Sequence[str],
    answers: Mapping[str, Answered],
    groups: Mapping[str, str],
    *,
    mode: Mode,
) -> Plan:
    """Decide which group each file becomes.

    Raises:
        InvalidInputError: a file that cannot be read now stays in a group that is the same as
            another file's, inside of it, or around it.
    """
    plan = Plan()
    order = order_of(catalog, files, mode)
    plan.removed = _removed(catalog, order)
    for location in order:
        old, answer = catalog.by_location.get(location), answers.get(location)
        group = groups.get(location) or (old.group if old is not None else "")
        is_same = answer is not None and answer.scanned is None and answer.reason is None
        if is_same and old is not None and old.group != group:
            plan.moved.append(location)
        if answer is not None and answer.scanned is not None:
            plan.placed.append(
                Placed(location, answer.stamp or "", group, 0, 0, answer.scanned, old)
            )
        elif old is not None:
            plan.placed.append(Placed(location, old.stamp, old.group, 0, 0, None, old))
    # Files that move are scanned first, and the plan is made again, which checks it then.
    if not plan.moved:
        check_apart((it.location, it.group) for it in plan.placed)
    return plan


def with_shape(document: Document, axis: int, size: int) -> Document:
    """Return metadata with another length along an axis."""
    shape = list(document["shape"])
    shape[axis] = size
    return {**document, "shape": shape}

"""Differences of values: the cells of arrays that differ between two snapshots, and by how much."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html import escape
from itertools import batched, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import zarr.api.asynchronous as za

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.engine.versions.feed import ChunkChanges, NodeChange
from icechunk_async.engine.versions.pictures import ChangeMap, draw_changes, html_image
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.format.paths import check_selection, is_within
from icechunk_async.format.zarr_document import same_chunk_format

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Iterator,
        Sequence,
    )

    import numpy.typing as npt
    import xarray
    from zarr import AsyncArray

    from icechunk_async.engine.versions.feed import Change
    from icechunk_async.session import Session

__all__ = ["CellChanges", "ValueDiff", "cell_changes", "value_diffs"]

_CONCURRENT_CHUNKS: Final = 16
_FIRST: Final = 10
_MAPS: Final = 64
"""The most arrays of which a map is kept, a megabyte each."""
_NUMBERS: Final = "biuf"


@dataclass(frozen=True, slots=True)
class CellChanges:
    """Cells of one array whose values differ, as columns; row ``i`` of each is about one cell."""

    path: str
    """Of the array, after the change."""
    indices: npt.NDArray[np.int64]
    """Where they are in the array, ``(n, rank)``, those of one chunk together."""
    before: npt.NDArray[Any]
    """Their values before, ``(n,)``; the fill value where there was no chunk."""
    after: npt.NDArray[Any]
    """Their values after, ``(n,)``."""

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.indices)

    def to_xarray(self) -> xarray.Dataset:
        """Return a dataset with a row for each cell, along the dimension ``cell``.

        It has ``before`` and ``after``, ``change`` for numbers (after minus before, float64), and
        the coordinates ``axis_0``, ``axis_1`` and so on: where the cell is in the array.

        Raises:
            MissingDriverError: xarray is not installed.
        """
        try:
            import xarray  # noqa: PLC0415 -- optional
        except ModuleNotFoundError as error:
            raise MissingDriverError(
                "A dataset needs xarray, which is not installed. Install it with: pip install "
                "'icechunk-async[xarray]'",
                module=error.name,
            ) from error
        columns: dict[str, Any] = {"before": ("cell", self.before), "after": ("cell", self.after)}
        steps = _steps(self)
        if steps is not None:
            columns["change"] = ("cell", steps)
        places = {f"axis_{axis}": ("cell", it) for axis, it in enumerate(self.indices.T)}
        return xarray.Dataset(columns, places, {"path": self.path})


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How the values of one array differ between two snapshots."""

    path: str
    """Of the array, after the change."""
    cells: int
    """Cells that the array has on both sides."""
    changed: int
    """Cells with another value. NaN is equal to NaN, and NaT to NaT."""
    chunks: int
    """Chunks that were read and compared; all others are the same objects."""
    min_change: float | None
    """The least difference, after minus before, in float64; None if no finite numbers differ."""
    max_change: float | None
    mean_change: float | None
    first: CellChanges
    """The first ten of the changed cells."""
    map: ChangeMap | None = field(default=None, compare=False, repr=False)
    """The changes as a map; None except for the first 64 arrays."""

    def picture(self, *, dark: bool = False) -> bytes:
        """Draw the changes over the last two axes, as PNG; over other axes the largest change.

        It blocks while it draws. Red is more than before, blue less. Cells that changed without
        a size are grey.

        Args:
            dark: light on dark.

        Raises:
            MissingDriverError: matplotlib is not installed.
        """
        shown = [] if self.map is None else [(self.title, self.map)]
        return draw_changes(shown, dark=dark)

    @property
    def title(self) -> str:
        """The path, and the number of changed cells."""
        return f"{self.path}: {self.changed:,} of {self.cells:,} cells changed ({self.share:.3%})"

    def _repr_html_(self) -> str:
        """Show in a notebook: the numbers, and the picture if matplotlib is installed."""
        sizes = (("least", self.min_change), ("mean", self.mean_change), ("most", self.max_change))
        numbers = "".join(
            f"<tr><td>{name} change</td><td>{size:+.6g}</td></tr>"
            for name, size in sizes
            if size is not None
        )
        drawn = "" if self.map is None else html_image(lambda it: self.picture(dark=it), self.title)
        return f"<b>{escape(self.title)}</b><table>{numbers}</table>{drawn}"

    @property
    def share(self) -> float:
        """The share of the cells that changed, 0 to 1."""
        return self.changed / self.cells if self.cells else 0.0


class _Pair(NamedTuple):
    """One array on both sides, and the chunks in which it may differ."""

    path: str
    old: AsyncArray[Any]
    new: AsyncArray[Any]
    coords: npt.NDArray[np.uint32] | None
    """None: all of the grid, since bytes mean other values than before."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The cells that both sides have."""
        sizes = zip(self.old.shape, self.new.shape, strict=True)
        return tuple(min(pair) for pair in sizes)


@dataclass(slots=True)
class _Tally:
    """The changed cells of one array that were found so far."""

    pair: _Pair
    map: ChangeMap | None = None
    chunks: int = 0
    changed: int = 0
    compared: int = 0
    """Changes that can be subtracted."""
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    first: list[CellChanges] = field(default_factory=list[CellChanges])

    def add(self, cells: CellChanges) -> None:
        """Count a chunk that was compared, with its changed cells."""
        self.chunks += 1
        if self.changed < _FIRST and len(cells):
            self.first.append(cells)
        self.changed += len(cells)
        steps = _steps(cells)
        if self.map is not None and len(cells):
            self.map.add(cells.indices, steps)
        if steps is None:
            return
        steps = steps[np.isfinite(steps)]
        if len(steps):
            self.compared += len(steps)
            self.total += float(steps.sum())
            self.least = min(self.least, float(steps.min()))
            self.most = max(self.most, float(steps.max()))

    def outcome(self) -> ValueDiff:
        """Return the whole."""
        path, array, some = self.pair.path, self.pair.new, self.compared > 0
        return ValueDiff(
            path,
            math.prod(self.pair.shape),
            self.changed,
            self.chunks,
            self.least if some else None,
            self.most if some else None,
            self.total / self.compared if some else None,
            _joined(path, array, self.first),
            self.map,
        )


async def cell_changes(
    before: Session, after: Session, changes: AsyncIterator[Change], paths: Collection[str] | None
) -> AsyncGenerator[CellChanges]:
    """Iterate over the cells that differ; see `Repository.changed_cells`."""
    async for pair in _pairs(before, after, changes, paths):
        async for cells in _cells(pair):
            if len(cells):
                yield cells


async def value_diffs(
    before: Session,
    after: Session,
    changes: AsyncIterator[Change],
    paths: Collection[str] | None,
    see: Callable[[tuple[int, ...], CellChanges], None] | None = None,
) -> list[ValueDiff]:
    """Compare the values of the arrays that both sides have; see `Repository.diff_values`.

    ``see`` is called with the shape of an array and the cells of each of its chunks that differ.
    """
    tallies: dict[str, _Tally] = {}
    async for pair in _pairs(before, after, changes, paths):
        tally = tallies.get(pair.path)
        if tally is None:
            kept = ChangeMap.empty(pair.shape) if len(tallies) < _MAPS else None
            tally = tallies[pair.path] = _Tally(pair, kept)
        async for cells in _cells(pair):
            tally.add(cells)
            if see is not None:
                see(pair.new.shape, cells)
    return [tally.outcome() for _, tally in sorted(tallies.items())]


def _steps(cells: CellChanges) -> npt.NDArray[np.float64] | None:
    """Return by how much cells changed; None if their values cannot be subtracted."""
    if cells.before.dtype.kind not in _NUMBERS or cells.after.dtype.kind not in _NUMBERS:
        return None
    with np.errstate(invalid="ignore"):  # of infinities
        return cells.after.astype(np.float64) - cells.before.astype(np.float64)


async def _pairs(
    before: Session, after: Session, changes: AsyncIterator[Change], paths: Collection[str] | None
) -> AsyncGenerator[_Pair]:
    """Open the arrays that a feed is about, on both sides, once for each batch of chunks."""
    tops = None if paths is None else check_selection(paths)
    whole: set[str] = set()
    async for change in changes:
        wanted = tops is None or any(is_within(change.path, top) for top in tops)
        if not wanted or change.path in whole:
            continue  # not asked for, or compared already
        origin = before.workspace.base.nodes.path_of(change.node_id)
        if origin is None or after.workspace.base.nodes.path_of(change.node_id) is None:
            continue  # it is new or gone: there is nothing to compare it with
        if isinstance(change, NodeChange):
            assert change.before is not None  # since both sides have it
            assert change.after is not None
            if not change.is_array or same_chunk_format(change.before, change.after):
                continue  # if values differ, the chunks do
            whole.add(change.path)
        coords = change.coords if isinstance(change, ChunkChanges) else None
        pair = await _open_both(before, after, origin, change.path, coords)
        if pair is not None:
            yield pair


async def _open_both(
    before: Session,
    after: Session,
    old_path: str,
    path: str,
    coords: npt.NDArray[np.uint32] | None,
) -> _Pair | None:
    """Open an array on both sides; None if its values cannot be compared cell by cell."""
    _check_grid(before, old_path)
    _check_grid(after, path)
    old, new = await gather(_open(before, old_path), _open(after, path))
    comparable = old.dtype == new.dtype or (
        old.dtype.kind in _NUMBERS and new.dtype.kind in _NUMBERS
    )
    if old.ndim != new.ndim or not comparable:
        return None
    return _Pair(path, old, new, coords)


async def _open(session: Session, path: str) -> AsyncArray[Any]:
    return await za.open_array(  # pyright: ignore[reportUnknownMemberType]
        store=session.store, path=path.strip("/"), mode="r"
    )


async def _cells(pair: _Pair) -> AsyncGenerator[CellChanges]:
    """Compare chunk by chunk, several at a time; yield what differs in each."""

    async def compare(box: tuple[slice, ...]) -> CellChanges:
        one, other = await gather(pair.old.getitem(box), pair.new.getitem(box))
        one, other = np.asarray(one), np.asarray(other)
        differs = ~_equal(one, other)
        corner = np.array([part.start for part in box], np.int64)
        places = np.argwhere(differs).astype(np.int64) + corner
        return CellChanges(pair.path, places, one[differs], other[differs])

    for some in batched(_boxes(pair), _CONCURRENT_CHUNKS):
        for cells in await bounded_map(compare, some, limit=_CONCURRENT_CHUNKS):
            yield cells


def _boxes(pair: _Pair) -> Iterator[tuple[slice, ...]]:
    """Return the cells of each chunk that may differ, as far as both sides have them."""
    new, shape = pair.new, pair.shape
    sizes = new.chunks if new.shards is None else new.shards
    places: Iterator[Sequence[int]]
    if pair.coords is None:
        axes = zip(shape, sizes, strict=True)
        places = product(*(range(-(-length // size)) for length, size in axes))
    else:
        places = iter(pair.coords.tolist())
    for place in places:
        box = tuple(
            slice(at * size, min((at + 1) * size, stop))
            for at, size, stop in zip(place, sizes, shape, strict=True)
        )
        if all(part.start < part.stop for part in box):
            yield box


def _check_grid(session: Session, path: str) -> None:
    """Refuse an array whose grid is not regular, before Zarr does with another advice."""
    node = session.workspace.node(path)
    grid: Any = {} if node is None else json.loads(node.user_data)["chunk_grid"]
    if grid.get("name") != "regular":
        raise InvalidInputError(
            f"Values of {path!r} cannot be compared: its chunk grid is {grid.get('name')!r}, and "
            "only regular ones are supported. Name the other arrays with paths=."
        )


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Compare values; NaN and NaT are equal to themselves."""
    same = np.asarray(one == other, np.bool_)
    if one.dtype.kind in "fc" and other.dtype.kind in "fc":
        return same | (np.isnan(one) & np.isnan(other))
    if one.dtype.kind in "mM":
        return same | (np.isnat(one) & np.isnat(other))
    return same


def _joined(path: str, array: AsyncArray[Any], parts: list[CellChanges]) -> CellChanges:
    """Return the first few of some changed cells."""
    if not parts:
        nothing = np.empty(0, array.dtype)
        return CellChanges(path, np.empty((0, array.ndim), np.int64), nothing, nothing)
    columns = (
        np.concatenate([getattr(it, name) for it in parts])[:_FIRST]
        for name in ("indices", "before", "after")
    )
    return CellChanges(path, *columns)

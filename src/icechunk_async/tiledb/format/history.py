"""Decide by the times in their names which fragments, conditions and schemas are seen; pure.

Since version 5 of a fragment its name is ``__<t1>_<t2>_<32 hexadecimal digits>_<version>``, where
the times are milliseconds since 1970. Older fragments, schemas and metadata have no version.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.tiledb.format.conditions import Condition

__all__ = [
    "ALL_TIME",
    "NAMELESS_VERSION",
    "Commits",
    "Deletion",
    "TimedName",
    "Visible",
    "Window",
    "parse_name",
    "schema_at",
    "visible",
]

NAMELESS_VERSION: Final = 4
"""The version of a fragment whose name has none."""
_NAME: Final = re.compile(r"__(\d{1,20})_(\d{1,20})_([0-9a-f]{32})(?:_(\d{1,9}))?")
_OLD_NAME: Final = re.compile(r"__([0-9a-f]{32})_(\d{1,20})(?:_(\d{1,20}))?")
_OLD_VERSION: Final = 2
_PARTIAL_SINCE: Final = 15
"""From this version on fragments that were consolidated may keep the times of their cells."""
_FOLDER_SINCE: Final = 12
"""From this version on a folder holds all fragments."""
LEGACY_SCHEMA: Final = "__array_schema.tdb"


@dataclass(frozen=True, slots=True)
class TimedName:
    """A name with the time, or the range of times, of what it names."""

    text: str
    start: int
    """Milliseconds since 1970."""
    end: int
    """The same, or later where several writes were consolidated."""
    version: int | None
    """Format version, where the name has one."""

    @property
    def key(self) -> tuple[int, str]:
        """A key that sorts names by the order of writing."""
        # Within a millisecond the digits decide: in recent releases they begin with a counter of
        # the process. Of two processes in one millisecond nobody knows who was first.
        return self.start, self.text

    def is_within(self, start: int, end: int) -> bool:
        """Return whether all of it was written in a range of times, both ends included."""
        return start <= self.start and self.end <= end

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether some of it was written in a range of times, both ends included."""
        return self.start <= end and start <= self.end


def parse_name(text: str) -> TimedName | None:
    """Return the parts of a name; None if it has another form."""
    match = _NAME.fullmatch(text)
    if match is not None:
        version = None if match[4] is None else int(match[4])
        return TimedName(text, int(match[1]), int(match[2]), version)
    match = _OLD_NAME.fullmatch(text)
    if match is not None:
        # TileDB takes the last number for both times.
        end = int(match[3] or match[2])
        return TimedName(text, end, end, _OLD_VERSION)
    return None


@dataclass(frozen=True, slots=True)
class Window:
    """A range of times in milliseconds since 1970, both ends included."""

    start: int = 0
    end: int = (1 << 64) - 1


ALL_TIME: Final = Window()


@dataclass(frozen=True, slots=True)
class Commits:
    """The commits of an array, found by listing and in files."""

    committed: frozenset[str]
    """Names of committed fragments, without their folder and suffix."""
    vacuumed: Mapping[str, Sequence[str]] = field(default_factory=dict[str, "Sequence[str]"])
    """By the name of a fragment those that it replaces."""
    conditions: Mapping[str, Condition | None] = field(
        default_factory=dict[str, "Condition | None"]
    )
    """Delete conditions by the name of their file; None if it was not read yet."""
    updates: frozenset[str] = frozenset()
    """Names of files with update conditions."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A delete condition that holds for cells written until its time."""

    name: str
    """The name of its file."""
    time: int


@dataclass(frozen=True, slots=True)
class Visible:
    """Fragments and deletions that a reader sees."""

    fragments: tuple[TimedName, ...]
    """In the order of writing: later ones win."""
    deletions: tuple[Deletion, ...]


def fragment_folder(name: TimedName) -> str:
    """Return the path of a fragment in its array."""
    version = NAMELESS_VERSION if name.version is None else name.version
    return f"__fragments/{name.text}" if version >= _FOLDER_SINCE else name.text


def visible(commits: Commits, window: Window, *, is_sparse: bool) -> Visible:
    """Decide which fragments and delete conditions hold in a range of times.

    A fragment is seen if all of it was written in the range. Of sparse arrays also fragments that
    were partly written in it are seen, whose cells have times. A vacuum file that was written in
    the range hides the fragments that it lists, so before the end of a consolidation the original
    fragments are seen.

    Raises:
        UnsupportedFeatureError: there are update conditions in the range.
    """
    hidden: set[str] = set()
    for name, replaced in commits.vacuumed.items():
        timed = parse_name(name)
        if timed is not None and _is_seen(timed, window, is_sparse=is_sparse):
            hidden.update(replaced)
    found = [
        timed
        for timed in map(parse_name, commits.committed - hidden)
        if timed is not None and _is_seen(timed, window, is_sparse=is_sparse)
    ]
    deletions: list[Deletion] = []
    for file in (*commits.conditions, *commits.updates):
        timed = parse_name(file.rpartition(".")[0])
        if timed is None or not timed.is_within(window.start, window.end):
            continue
        # TileDB ignores these when it reads. Old values shown for current
        # ones would be worse than none.
        if file in commits.updates:
            raise UnsupportedFeatureError(
                f"The TileDB array has an update condition, {file!r}, and these are not supported. "
                "Read the array at an earlier time.",
                feature="update conditions",
            )
        deletions.append(Deletion(file, timed.start))
    found.sort(key=lambda it: it.key)
    deletions.sort(key=lambda it: (it.time, it.name))
    return Visible(tuple(found), tuple(deletions))


def _is_seen(name: TimedName, window: Window, *, is_sparse: bool) -> bool:
    if name.is_within(window.start, window.end):
        return True
    partial = is_sparse and (name.version or 0) >= _PARTIAL_SINCE
    return partial and name.overlaps(window.start, window.end)


def schema_at(names: Iterable[str], end: int) -> str | None:
    """Return the file of the schema that holds at a time; None if there is no schema.

    It is the last one written until then, or the first one at all.
    """
    timed = sorted(
        (it for it in map(parse_name, names) if it is not None),
        key=lambda it: (it.start, it.end, it.text),
    )
    # From before version 10, so older than every file in the folder of schemas.
    legacy = [LEGACY_SCHEMA] if LEGACY_SCHEMA in set(names) else []
    known = [*legacy, *(it.text for it in timed)]
    until = [*legacy, *(it.text for it in timed if it.end <= end)]
    return until[-1] if until else (known[0] if known else None)

"""The snapshots of a repo info file as columns, and those of a history as pages of columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from icechunk_async._runtime.clock import EPOCH, from_us
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.splicing import Spans
from icechunk_async.format.id_set import format_ids
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.columns import decode_flexbuffers
from icechunk_async.format.json.metadata import read_items
from icechunk_async.format.repo_info.snapshot_info import NO_PARENT, SnapshotInfo, no_such_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes, Positions
    from icechunk_async.format.flatbuffers.reading import Tables, Vectors
    from icechunk_async.format.json.metadata import JSON, RawMetadata

    type Page = list[SnapshotInfo] | SnapshotPage
    """Some of a history: few entries, or many of a file."""

__all__ = [
    "SnapshotColumns",
    "SnapshotPage",
    "dates_of",
    "items_of",
    "logs_of",
    "messages_of",
    "metadata_of",
    "times_of",
]

_ID_BYTES: Final = SnapshotId.size_bytes
_LAST_SLOT: Final = 5
_LAST_US: Final = 250_000_000_000_000_000
"""A time in the year 9892."""


class SnapshotColumns:
    """The SnapshotInfo tables of a file, in its order."""

    def __init__(self, tables: Tables) -> None:
        """Look at all tables of the file."""
        self.tables = tables

    @cached_property
    def ids(self) -> Bytes:
        """The ids in the order of the file, ``(n, 12)``."""
        return np.ascontiguousarray(self.tables.struct(0, _ID_BYTES, field="id"))

    @cached_property
    def parents(self) -> list[int]:
        """The place of each entry's parent; -1 for none.

        Raises:
            FormatError: one is outside of the file.
        """
        found: list[int] = self.parent_column.tolist()
        return found

    @cached_property
    def parent_column(self) -> npt.NDArray[np.int64]:
        """As `parents`."""
        # An absent offset is 0, the first snapshot; no parent is -1.
        parents = self.tables.scalar(1, 4).astype("<i4").astype(np.int64)
        if ((parents < NO_PARENT) | (parents >= len(self.tables))).any():
            raise no_such_parent()
        return parents

    @cached_property
    def order(self) -> npt.NDArray[np.int64] | None:
        """The rows in ascending order of their ids; None if that is the order of the file.

        Raises:
            FormatError: two ids are equal.
        """
        words = self.ids.view(">u4").astype(np.uint64)
        high, low = words[:, 0] << np.uint64(32) | words[:, 1], words[:, 2]
        order = None
        if not _are_ascending(high, low):
            # Two numbers of 64 and 32 bits: NumPy sorts them several times as fast as bytes of
            # length twelve.
            order = np.lexsort((low, high))
            if not _are_ascending(high[order], low[order]):
                raise FormatError("A repo info file lists a snapshot twice.")
        return order

    def places(self, snapshot_ids: Sequence[bytes]) -> list[int]:
        """Return, for each id, the first place in ascending order whose id is not lower."""
        # As texts of a fixed length, which NumPy compares as bytes; it ignores NULs at the end, and
        # all have the same length.
        ids = (self.ids if self.order is None else self.ids[self.order]).view(f"S{_ID_BYTES}")
        wanted = np.array(snapshot_ids, f"S{_ID_BYTES}")
        found: list[int] = np.searchsorted(ids[:, 0], wanted).tolist()
        return found

    def find_each(self, snapshot_ids: Sequence[bytes]) -> list[int | None]:
        """Return the row of each id, None for those that are missing; there is an entry."""
        # An id above all others has no row; the last one is compared in its place, and differs.
        places = np.minimum(self.places(snapshot_ids), len(self.ids) - 1)
        rows = places if self.order is None else self.order[places]
        found = SnapshotId.many(self.ids[rows].tobytes())
        each = zip(rows.tolist(), found, snapshot_ids, strict=True)
        return [row if bytes(it) == wanted else None for row, it, wanted in each]

    def older_than(self, moment_us: int) -> list[SnapshotId]:
        """Return the ids of entries that have a parent and were written before a moment."""
        times = self.tables.scalar(2, 8)
        # A moment before the epoch would wrap round to one in the far future, and make all old.
        old = times < np.uint64(max(0, moment_us))
        return SnapshotId.many(self.ids[old & (self.parent_column != NO_PARENT)].tobytes())

    def children_of(self, rows: Sequence[int]) -> list[int]:
        """Return the entries whose parent is in one of some rows, except those rows."""
        chosen = np.zeros(len(self.tables), bool)
        chosen[list(rows)] = True
        parents = self.parent_column
        # -1 looks up the last row, which the first condition takes back.
        found = (parents != NO_PARENT) & chosen[parents] & ~chosen
        children: list[int] = np.flatnonzero(found).tolist()
        return children

    def some(
        self, rows: Sequence[int]
    ) -> tuple[list[SnapshotId], list[SnapshotId | None], list[int], list[str]]:
        """Return ids, parents, times and messages of entries.

        Raises:
            FormatError: one of them is damaged.
        """
        tables = self.some_tables(rows)
        return (
            self.some_ids(rows),
            self._parent_ids(rows),
            tables.scalar(2, 8).tolist(),
            tables.strings(3, required="message"),
        )

    def more(self, rows: Sequence[int]) -> tuple[list[RawMetadata], list[tuple[SnapshotId, ...]]]:
        """Return properties and pruned logs of entries; as `some`."""
        tables = self.some_tables(rows)
        return items_of(tables), logs_of(tables)

    def some_tables(self, rows: Sequence[int]) -> Tables:
        """Return the tables of entries."""
        return self.tables.select(np.array(rows, np.int64))

    def some_ids(self, rows: Sequence[int]) -> list[SnapshotId]:
        """Return the ids of entries."""
        return SnapshotId.many(self.ids[rows].tobytes())

    def id(self, row: int) -> SnapshotId:
        """Return the id of an entry."""
        return SnapshotId(self.ids[row].tobytes())

    def some_id_texts(self, rows: Sequence[int]) -> list[str]:
        """Return the ids of entries as text."""
        return format_ids(self.ids[rows])

    def _parent_ids(self, rows: Sequence[int]) -> list[SnapshotId | None]:
        parents = [self.parents[row] for row in rows]
        found: list[SnapshotId | None] = [*SnapshotId.many(self.ids[parents].tobytes())]
        if NO_PARENT in parents:  # which has looked up the last one
            found = [
                None if parent == NO_PARENT else it
                for parent, it in zip(parents, found, strict=True)
            ]
        return found

    @cached_property
    def parent_fields(self) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Where the entries name their parent, and whether they do; none does for the first."""
        return self.tables.find(1, 4)

    @cached_property
    def layout(self) -> _Layout:
        """Where the entries lie in the file, checked.

        Raises:
            FormatError: one of them is damaged.
        """
        return _Layout(self.tables, vtables=True)

    @cached_property
    def bare_spans(self) -> Spans:
        """Where the entries lie without their vtables, which they may share."""
        return _Layout(self.tables, vtables=False).spans


def times_of(tables: Tables) -> list[int]:
    """Return the times of entries; as `SnapshotColumns.some`."""
    found: list[int] = tables.scalar(2, 8).tolist()
    return found


def dates_of(tables: Tables) -> list[datetime]:
    """Return the times of entries as `from_us` does; as `SnapshotColumns.some`."""
    times = tables.scalar(2, 8)
    # A hostile time has 64 bits, and dates end with the year 9999.
    if int(times.max()) <= _LAST_US:
        # NumPy makes the differences in a twentieth of the time that the interpreter takes.
        return [EPOCH + it for it in times.astype("m8[us]").tolist()]
    return list(map(from_us, times.tolist()))


def messages_of(tables: Tables) -> list[str]:
    """Return the messages of entries; as `SnapshotColumns.some`."""
    return tables.strings(3, required="message")


def items_of(tables: Tables) -> list[RawMetadata]:
    """Return the properties of entries as stored; as `SnapshotColumns.some`."""
    items = tables.vector(4, 4, 4)
    return _slices(read_items(items.tables()), items.counts)


def metadata_of(tables: Tables) -> list[dict[str, JSON]]:
    """Return the properties of entries; as `SnapshotColumns.some`."""
    vectors = tables.vector(4, 4, 4)
    items = vectors.tables()
    names = items.vector(0, 1, 1, required="name")
    values = decode_flexbuffers(items.vector(1, 1, 1, required="value"))
    common = _common_names(names, vectors.counts)
    if common is None:
        pairs = tuple(zip(names.decode(), values, strict=True))
        return list(map(dict, _slices(pairs, vectors.counts)))
    found: list[dict[str, JSON]] = [{} for _ in range(len(tables))]
    for at, name in enumerate(common):
        for properties, value in zip(found, values[at :: len(common)], strict=True):
            properties[name] = value
    return found


def _common_names(names: Vectors, counts: Positions) -> list[str] | None:
    """Return the names that all rows have, in this order; None if they differ."""
    width = counts.item(0)
    if (counts != width).any():  # first: one long row would make a column of each of its names
        return None
    columns = (names.select(np.arange(at, len(names), width)) for at in range(width))
    if any(it.changes()[1:].any() for it in columns):
        return None
    return names.select(np.arange(width)).decode()


def logs_of(tables: Tables) -> list[tuple[SnapshotId, ...]]:
    """Return the pruned logs of entries; as `SnapshotColumns.some`."""
    pruned = tables.vector(5, _ID_BYTES, 1)
    return _slices(tuple(SnapshotId.many(pruned.structs().tobytes())), pruned.counts)


class _Layout:
    """Where entries lie in their file, with all that they refer to."""

    def __init__(self, tables: Tables, *, vtables: bool) -> None:
        self.spans = Spans(tables, vtables=vtables)
        messages = tables.vector(3, 1, 1, required="message")
        messages.check_text()
        # Everything that the table refers to, apart from the table: where they overlap, the
        # parent's number could not be replaced without changing something else.
        below = Spans.of(messages, ended=True)
        vectors = tables.vector(4, 4, 4)
        below.cover(vectors)
        items = vectors.tables()
        of_items = Spans(items, vtables=vtables)
        names = items.vector(0, 1, 1, required="name")
        names.check_text()
        of_items.cover(names, ended=True)
        of_items.cover(items.vector(1, 1, 1, required="value"))
        below.cover_items(vectors.counts, of_items)
        below.cover(tables.vector(_LAST_SLOT, _ID_BYTES, 1))
        self.foreign = tables.reaches(_LAST_SLOT + 1).copy()
        """Entries that are not copied: with fields that this version does not know, or such that
        a parent cannot be replaced without another change."""
        self.foreign[np.repeat(np.arange(len(tables)), vectors.counts)[items.reaches(2)]] = True
        self.foreign |= Spans(tables, vtables=False).overlap(below) | _are_entangled(tables)
        self.spans.cover_tables(np.arange(len(tables)), below)
        self.are_blocks = self.spans.are_blocks


def _are_entangled(tables: Tables) -> npt.NDArray[np.bool_]:
    """Return which entries keep their parent where something else of the table is."""
    parents, present = tables.find(1, 4)
    _, vtable_sizes = tables.sizes()
    found = parents < tables.positions + 4
    # Two ranges overlap if each begins before the other ends.
    found |= (parents < tables.vtable_places + vtable_sizes) & (tables.vtable_places < parents + 4)
    for slot, size in ((0, _ID_BYTES), (2, 8), (3, 4), (4, 4), (_LAST_SLOT, 4)):
        places, there = tables.find(slot, size)
        found |= there & (parents < places + size) & (places < parents + 4)
    return found & present


def _are_ascending(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> bool:
    less = (high[:-1] < high[1:]) | ((high[:-1] == high[1:]) & (low[:-1] < low[1:]))
    return bool(less.all())


def _slices[T](values: tuple[T, ...], counts: Positions) -> list[tuple[T, ...]]:
    """Return the values of each row, which follow one another; ``counts`` says how many."""
    if not values:
        return [()] * len(counts)
    if (counts == counts[0]).all():
        return list(zip(*[iter(values)] * counts.item(0), strict=True))
    ends: list[int] = np.cumsum(counts).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class SnapshotPage(Sequence[SnapshotInfo]):
    """Entries of a file that follow one another in a history: columns, each decoded when asked for.

    Two threads may decode one at once, with equal results.
    """

    def __init__(self, columns: SnapshotColumns, rows: list[int], last_parent: int) -> None:
        """Stand for the entries of some rows, each the parent of the one before.

        Args:
            columns: of the file.
            rows: theirs; at least one.
            last_parent: the row of the parent of the last one; -1 for none.
        """
        self._columns = columns
        self._rows = rows
        self._last_parent = last_parent

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int, /) -> SnapshotInfo: ...

    @overload
    def __getitem__(self, index: slice, /) -> list[SnapshotInfo]: ...

    def __getitem__(self, index: int | slice, /) -> SnapshotInfo | list[SnapshotInfo]:
        """Return an entry, or some of them; new objects each time."""
        found = range(len(self._rows))[index]
        if isinstance(found, int):
            return SnapshotInfo.on_page(self, found)
        return [SnapshotInfo.on_page(self, it) for it in found]

    def __iter__(self) -> Iterator[SnapshotInfo]:
        """Iterate over the entries."""
        return map(SnapshotInfo.on_page, repeat(self), range(len(self._rows)))

    @cached_property
    def _tables(self) -> Tables:
        return self._columns.some_tables(self._rows)

    @cached_property
    def id(self) -> list[SnapshotId]:
        """The id of each."""
        return self._columns.some_ids(self._rows)

    @cached_property
    def parent_id(self) -> list[SnapshotId | None]:
        """The id of each one's parent; None for none."""
        last = self._last_parent
        return [*self.id[1:], None if last == NO_PARENT else self._columns.id(last)]

    @cached_property
    def id_texts(self) -> list[str]:
        """The id of each as text, all at once; quicker than one by one."""
        return self._columns.some_id_texts(self._rows)

    @cached_property
    def parent_id_texts(self) -> list[str | None]:
        """The id of each one's parent as text; None for none."""
        # Ids are not decoded for it if only their text was asked for.
        last = self.parent_id[-1] if "parent_id" in self.__dict__ else None
        if last is None and self._last_parent != NO_PARENT:
            last = self._columns.id(self._last_parent)
        return [*self.id_texts[1:], None if last is None else str(last)]

    @cached_property
    def flushed_at(self) -> list[int]:
        """The time of each, microseconds since the epoch."""
        return times_of(self._tables)

    def written_at(self) -> list[datetime]:
        """Return the times as `SnapshotInfo.written_at`; quicker than one by one."""
        return dates_of(self._tables)

    @cached_property
    def message(self) -> list[str]:
        """The message of each.

        Raises:
            FormatError: one of them is damaged; also other columns.
        """
        return messages_of(self._tables)

    @cached_property
    def raw_metadata(self) -> list[RawMetadata]:
        """The properties of each as stored."""
        return items_of(self._tables)

    @cached_property
    def pruned_ancestor_logs(self) -> list[tuple[SnapshotId, ...]]:
        """Snapshots that expired between each one and its parent."""
        return logs_of(self._tables)

    def decode_metadata(self) -> list[dict[str, JSON]]:
        """Return the properties of each, all new and decoded at once."""
        if self._last_parent != NO_PARENT or len(self) == 1:
            return metadata_of(self._tables)
        # The first snapshot of a history has other properties than commits have, or none. Those of
        # the commits, which have the same names as a rule, are decoded without it.
        last = len(self) - 1
        others, first = self._tables.select(np.arange(last)), self._tables.select(np.array([last]))
        return metadata_of(others) + metadata_of(first)

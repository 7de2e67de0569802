"""The snapshots of a repo info file, in which an entry is found without decoding the others."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.reading import TableList
from icechunk_async.format.flatbuffers.splicing import Spans
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import read_items
from icechunk_async.format.repo_info.snapshots import BLOCK, FEW, NO_PARENT, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Buffer, Bytes, Positions
    from icechunk_async.format.flatbuffers.reading import Tables, Vectors
    from icechunk_async.format.json.metadata import RawMetadata

__all__ = ["EntryBlock", "SnapshotTable"]

_ID_BYTES: Final = SnapshotId.size_bytes
_LAST_SLOT: Final = 5


class EntryBlock:
    """Entries of a file that are decoded together when one of them is looked at."""

    def __init__(self, stored: SnapshotTable, rows: list[int]) -> None:
        """Stand for the entries of some rows."""
        self._stored = stored
        self._rows = rows
        self.infos = SnapshotInfo.in_block(self, len(rows))

    def fill(self) -> None:
        """Decode what all look at. Two threads may do that at once, with equal results."""
        columns = self._stored.columns(self._rows)
        for info, snapshot_id, parent_id, time, message in zip(self.infos, *columns, strict=True):
            values = info.__dict__
            values["id"], values["parent_id"] = snapshot_id, parent_id
            values["flushed_at"], values["message"] = time, message

    def fill_more(self) -> None:
        """Decode what few look at."""
        columns = self._stored.more_columns(self._rows)
        for info, items, logs in zip(self.infos, *columns, strict=True):
            values = info.__dict__
            values["raw_metadata"], values["pruned_ancestor_logs"] = items, logs


class SnapshotTable(TableList):
    """The SnapshotInfo tables of a file.

    A lookup halves the file's list, which is sorted by id; a parent is named by its place in it.
    """

    def __init__(self, buffer: Buffer, entries: Vectors) -> None:
        """Look at the vector of entries; as `TableList`."""
        super().__init__(buffer, entries)
        self._known: dict[int, SnapshotInfo] = {}

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
        if ((parents < NO_PARENT) | (parents >= self._count)).any():
            raise _no_such_parent()
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
            order = np.lexsort((low, high))
            if not _are_ascending(high[order], low[order]):
                raise FormatError("A repo info file lists a snapshot twice.")
        return order

    def id(self, row: int) -> bytes:
        """Return the id of an entry."""
        return self._row(row).struct(0, _ID_BYTES, field="id")

    @cached_property
    def _rows_in_order(self) -> Sequence[int]:
        return range(self._count) if self.order is None else self.order.tolist()

    def place(self, snapshot_id: bytes) -> int:
        """Return the first place, in ascending order of ids, whose id is not lower."""
        return bisect_left(self._rows_in_order, snapshot_id, key=self.id)

    def places(self, snapshot_ids: Sequence[bytes]) -> list[int]:
        """Return `place` of several, from the columns: no entry is read."""
        # As texts of a fixed length, which NumPy compares as bytes; it ignores NULs at the end, and
        # all have the same length.
        ids = (self.ids if self.order is None else self.ids[self.order]).view(f"S{_ID_BYTES}")
        wanted = np.array(snapshot_ids, f"S{_ID_BYTES}")
        found: list[int] = np.searchsorted(ids[:, 0], wanted).tolist()
        return found

    def find(self, snapshot_id: SnapshotId) -> int | None:
        """Return the row of an entry.

        Cost: the logarithm of their number; in proportion to it for the first id that is not found.
        """
        wanted: bytes = snapshot_id
        if "order" not in self.__dict__:
            row = bisect_left(range(self._count), wanted, key=self.id)
            if row < self._count and self.id(row) == wanted:
                return row
        place = self.place(wanted)
        if place == self._count:
            return None
        row = self._rows_in_order[place]
        return row if self.id(row) == wanted else None

    def info(self, row: int) -> SnapshotInfo:
        """Return an entry, the same object each time.

        Raises:
            FormatError: it is damaged.
        """
        found = self._known.get(row)
        if found is None:
            found = self._known[row] = self._decode(row)
        return found

    def _decode(self, row: int) -> SnapshotInfo:
        entry = self._row(row)
        parent = self.parent(row)
        items = [
            (it.text(0, required="name"), it.raw(1, required="value")) for it in entry.tables(4)
        ]
        logs = entry.structs(5, _ID_BYTES, 1)
        self._reader.note_bytes(sum(len(value) for _, value in items))
        return SnapshotInfo(
            SnapshotId(entry.struct(0, _ID_BYTES, field="id")),
            None if parent == NO_PARENT else SnapshotId(self.id(parent)),
            entry.number(2, 8),
            entry.text(3, required="message"),
            tuple(items),
            tuple(SnapshotId.many(logs)),
        )

    def parent(self, row: int) -> int:
        """Return the row of an entry's parent; -1 for none."""
        if "parents" in self.__dict__:
            return self.parents[row]
        number = self._row(row).number(1, 4)
        parent = number - (1 << 32) if number >> 31 else number
        if not NO_PARENT <= parent < self._count:
            raise _no_such_parent()
        return parent

    def infos(self, rows: Sequence[int]) -> Iterator[SnapshotInfo]:
        """Iterate over entries; many are decoded together."""
        if len(rows) < FEW:
            yield from map(self.info, rows)
            return
        for first in range(0, len(rows), BLOCK):
            some = rows[first : first + BLOCK]
            yield from map(SnapshotInfo, *self.columns(some), *self.more_columns(some))

    def columns(
        self, rows: Sequence[int]
    ) -> tuple[list[SnapshotId], list[SnapshotId | None], list[int], list[str]]:
        """Return ids, parents, times and messages of entries.

        Raises:
            FormatError: one of them is damaged.
        """
        tables = self.tables.select(np.array(rows, np.int64))
        return (
            SnapshotId.many(self.ids[rows].tobytes()),
            self._parent_ids(rows),
            tables.scalar(2, 8).tolist(),
            tables.strings(3, required="message"),
        )

    def more_columns(
        self, rows: Sequence[int]
    ) -> tuple[list[RawMetadata], list[tuple[SnapshotId, ...]]]:
        """Return properties and pruned logs of entries; as `columns`."""
        tables = self.tables.select(np.array(rows, np.int64))
        items, pruned = tables.vector(4, 4, 4), tables.vector(5, _ID_BYTES, 1)
        logs = SnapshotId.many(pruned.structs().tobytes())
        return (
            _slices(read_items(items.tables()), items.counts),
            _slices(tuple(logs), pruned.counts),
        )

    def _parent_ids(self, rows: Sequence[int]) -> list[SnapshotId | None]:
        parents = [self.parents[row] for row in rows]
        found: list[SnapshotId | None] = [*SnapshotId.many(self.ids[parents].tobytes())]
        if NO_PARENT in parents:  # which has looked up the last one
            found = [
                None if parent == NO_PARENT else it
                for parent, it in zip(parents, found, strict=True)
            ]
        return found

    def lazily(self, rows: list[int]) -> list[SnapshotInfo]:
        """Return entries that are decoded when one of them is looked at."""
        return [self.info(row) for row in rows] if len(rows) < FEW else EntryBlock(self, rows).infos

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


class _Layout:
    """Where entries lie in their file, with all that they refer to."""

    def __init__(self, tables: Tables, *, vtables: bool) -> None:
        self.spans = Spans(tables, vtables=vtables)
        messages = tables.vector(3, 1, 1, required="message")
        messages.check_text()
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


def _are_entangled(tables: Tables) -> npt.NDArray[np.bool_]:
    """Return which entries keep their parent where something else of the table is."""
    parents, present = tables.find(1, 4)
    _, vtable_sizes = tables.sizes()
    found = parents < tables.positions + 4
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
    ends: list[int] = np.cumsum(counts).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _no_such_parent() -> FormatError:
    return FormatError("A snapshot has a parent outside of the repo info file.")

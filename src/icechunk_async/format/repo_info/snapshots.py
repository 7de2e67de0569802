"""The snapshots that a repo info lists, by id: those of a file, with some added or left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from icechunk_async._runtime.clock import from_us
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.splicing import (
    FEWEST_COPIED,
    NewTable,
    Source,
    Spans,
    place_before,
    weave,
)
from icechunk_async.format.flatbuffers.writing import (
    REF,
    Shape,
    blob,
    joined,
    long_vector,
    string,
    structs,
    table,
    vector,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import decode_items, encode_items

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from datetime import datetime

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Buffer, Bytes, Positions
    from icechunk_async.format.flatbuffers.reading import Tables, Vectors
    from icechunk_async.format.flatbuffers.single import Row
    from icechunk_async.format.flatbuffers.writing import Block, Long
    from icechunk_async.format.json.metadata import JSON

    type RawMetadata = tuple[tuple[str, bytes], ...]

__all__ = [
    "SnapshotInfo",
    "SnapshotTable",
    "Snapshots",
    "decode_items_of",
    "encode_items_of",
    "encode_snapshots",
]

_SPEC: Final = 2
_NO_PARENT: Final = -1
_SNAPSHOT: Final = Shape("12s", "i", "Q", REF, REF, REF)
_ITEM: Final = Shape(REF, REF)
_ID_BYTES: Final = SnapshotId.size_bytes
_LAST_SLOT: Final = 5
_FEW: Final = 32
"""For fewer entries columns cost more than one after the other."""
_BLOCK: Final = 1024
"""Entries decoded at a time where all are asked for."""
_NAMES: Final = ("id", "parent_id", "flushed_at", "message")
_MORE_NAMES: Final = ("raw_metadata", "pruned_ancestor_logs")


@dataclass(frozen=True, eq=False)
class SnapshotInfo:
    """A snapshot's place in history."""

    id: SnapshotId
    parent_id: SnapshotId | None
    """None for a root."""
    flushed_at: int
    """Microseconds since the epoch."""
    message: str
    raw_metadata: RawMetadata = field(default_factory=tuple[tuple[str, bytes], ...], repr=False)
    """The commit's properties as stored, so that rewriting the file carries them verbatim."""
    pruned_ancestor_logs: tuple[SnapshotId, ...] = field(default_factory=tuple[SnapshotId, ...])
    """Snapshots that expired between this one and its parent; their logs are kept."""

    @classmethod
    def in_block(cls, block: _Block, count: int) -> list[Self]:
        """Return entries that are decoded together when one of them is looked at."""
        new, infos = object.__new__, list[Self]()
        for _ in range(count):
            info = new(cls)
            info.__dict__["_block"] = block
            infos.append(info)
        return infos

    if not TYPE_CHECKING:  # checkers are to see the fields alone

        def __getattr__(self, name: str) -> Any:
            """Return a field that is not decoded yet."""
            block = self.__dict__.get("_block")
            if block is not None and name in _NAMES:
                block.fill()
            elif block is not None and name in _MORE_NAMES:
                block.fill_more()
            if name in self.__dict__:  # perhaps another thread has decoded it
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        """Compare all fields."""
        return isinstance(other, SnapshotInfo) and self._values() == other._values()

    def __hash__(self) -> int:
        """Hash all fields."""
        return hash(self._values())

    def __reduce__(self) -> tuple[type[SnapshotInfo], tuple[object, ...]]:
        """Pickle the fields alone."""
        return SnapshotInfo, self._values()

    def _values(self) -> tuple[object, ...]:
        return (
            self.id, self.parent_id, self.flushed_at, self.message, self.raw_metadata,
            self.pruned_ancestor_logs,
        )  # fmt: skip

    @property
    def written_at(self) -> datetime:
        """When the snapshot was made, by its writer's clock; aware, UTC."""
        return from_us(self.flushed_at)

    @cached_property
    def metadata(self) -> dict[str, JSON]:
        """The commit's properties."""
        return decode_items(list(self.raw_metadata), _SPEC)

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block | None]:
        """Message, properties and logs as written; kept, since commits may write them again."""
        pruned = None
        if self.pruned_ancestor_logs:  # an empty list is never written
            pruned = structs(b"".join(self.pruned_ancestor_logs), _ID_BYTES)
        return string(self.message), encode_items_of(self.raw_metadata), pruned

    @classmethod
    def of(
        cls,
        snapshot_id: SnapshotId,
        parent_id: SnapshotId | None,
        flushed_at: int,
        message: str,
        metadata: Mapping[str, JSON],
    ) -> SnapshotInfo:
        """Encode ``metadata`` and make an entry."""
        raw = tuple(encode_items(metadata, _SPEC))
        return cls(snapshot_id, parent_id, flushed_at, message, raw)


class _Block:
    """Entries of a file that are decoded together when one of them is looked at."""

    def __init__(self, stored: SnapshotTable, rows: list[int]) -> None:
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


class SnapshotTable:
    """The SnapshotInfo tables of a file.

    A lookup halves the file's list, which is sorted by id; a parent is named by its place in it.
    """

    def __init__(self, buffer: Buffer, entries: Vectors) -> None:
        """Look at the vector of entries, which is the only row of ``entries``.

        Raises:
            FormatError: it cannot be that of a genuine file.
        """
        from icechunk_async.format.flatbuffers.single import Reader  # noqa: PLC0415 -- loaded when it is used

        self.buffer = buffer
        self._entries = entries
        entries.check_tables()
        self._first, self._count = entries.starts.item(), entries.counts.item()
        self._reader = Reader(buffer)
        self._known: dict[int, SnapshotInfo] = {}

    def __len__(self) -> int:
        """Count the entries."""
        return self._count

    @cached_property
    def tables(self) -> Tables:
        """All entries, to be read by columns."""
        return self._entries.tables()

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
        if ((parents < _NO_PARENT) | (parents >= self._count)).any():
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

    def _row(self, row: int) -> Row:
        return self._reader.item(self._first, row)

    def id(self, row: int) -> bytes:
        """Return the id of an entry."""
        return self._row(row).struct(0, _ID_BYTES, field="id")

    @cached_property
    def _rows_in_order(self) -> Sequence[int]:
        return range(self._count) if self.order is None else self.order.tolist()

    def place(self, snapshot_id: bytes) -> int:
        """Return the first place, in ascending order of ids, whose id is not lower."""
        return bisect_left(self._rows_in_order, snapshot_id, key=self.id)

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
            None if parent == _NO_PARENT else SnapshotId(self.id(parent)),
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
        if not _NO_PARENT <= parent < self._count:
            raise _no_such_parent()
        return parent

    def infos(self, rows: Sequence[int]) -> Iterator[SnapshotInfo]:
        """Iterate over entries; many are decoded together."""
        if len(rows) < _FEW:
            yield from map(self.info, rows)
            return
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
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
            _slices(decode_items_of(items.tables()), items.counts),
            _slices(tuple(logs), pruned.counts),
        )

    def _parent_ids(self, rows: Sequence[int]) -> list[SnapshotId | None]:
        parents = [self.parents[row] for row in rows]
        found: list[SnapshotId | None] = [*SnapshotId.many(self.ids[parents].tobytes())]
        if _NO_PARENT in parents:  # which has looked up the last one
            found = [
                None if parent == _NO_PARENT else it
                for parent, it in zip(parents, found, strict=True)
            ]
        return found

    def lazily(self, rows: list[int]) -> list[SnapshotInfo]:
        """Return entries that are decoded when one of them is looked at."""
        return [self.info(row) for row in rows] if len(rows) < _FEW else _Block(self, rows).infos

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


class Snapshots(Mapping[SnapshotId, SnapshotInfo]):
    """The snapshots that a repo info lists. Entries are decoded when they are asked for."""

    def __init__(self, infos: Iterable[SnapshotInfo] = ()) -> None:
        """Hold these entries; each id once."""
        self._table: SnapshotTable | None = None
        self._put = {info.id: info for info in infos}
        """Entries that are not, or no longer, those of the file."""
        self._covered: dict[SnapshotId, int] = {}
        """Entries of the file that do not count, with their rows."""

    @classmethod
    def from_table(cls, stored: SnapshotTable) -> Self:
        """Hold the entries of a file."""
        return cls._on_top(stored, {}, {})

    @classmethod
    def _on_top(
        cls,
        stored: SnapshotTable | None,
        put: dict[SnapshotId, SnapshotInfo],
        covered: dict[SnapshotId, int],
    ) -> Self:
        snapshots = cls()
        snapshots._table, snapshots._put, snapshots._covered = stored, put, covered
        return snapshots

    @classmethod
    def of(cls, infos: Mapping[SnapshotId, SnapshotInfo]) -> Snapshots:
        """Return the entries of any mapping."""
        return infos if isinstance(infos, Snapshots) else cls(infos.values())

    def edited(self, put: Iterable[SnapshotInfo], gone: Collection[SnapshotId] = ()) -> Self:
        """Return these entries with some added or replaced, and others left out.

        Cost: time in proportion to the changes since the file was written.
        """
        stored, new, left_out = self._table, {info.id: info for info in put}, set(gone)
        covered = dict(self._covered)
        if stored is not None:
            for snapshot_id in (*left_out, *new):
                row = None if snapshot_id in covered else stored.find(snapshot_id)
                if row is not None:
                    covered[snapshot_id] = row
        kept = {it: info for it, info in self._put.items() if it not in left_out}
        return self._on_top(stored, kept | new, covered)

    @property
    def table(self) -> SnapshotTable | None:
        """The file below; None if all entries were given as such."""
        return self._table

    @property
    def put(self) -> Mapping[SnapshotId, SnapshotInfo]:
        """The entries that lie on top of the file."""
        return self._put

    @property
    def covered(self) -> Mapping[SnapshotId, int]:
        """Those entries of the file that do not count any more, with their rows."""
        return self._covered

    @property
    def is_light(self) -> bool:
        """Whether so little lies on top of the file that it would not pay to read a newer one."""
        stored = 0 if self._table is None else len(self._table)
        return len(self._put) + len(self._covered) <= max(_FEW, isqrt(stored // _FEW))

    def __getitem__(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return an entry; raise KeyError if it is missing."""
        info = self.get(snapshot_id)
        if info is None:
            raise KeyError(snapshot_id)
        return info

    @overload
    def get(self, snapshot_id: SnapshotId, /) -> SnapshotInfo | None: ...

    @overload
    def get[T](self, snapshot_id: SnapshotId, /, default: SnapshotInfo | T) -> SnapshotInfo | T: ...

    def get(self, snapshot_id: SnapshotId, /, default: Any = None) -> Any:
        """Return an entry, or the default; faster than through an exception."""
        info = self._put.get(snapshot_id)
        if info is not None:
            return info
        row = self._find(snapshot_id)
        return default if row is None or self._table is None else self._table.info(row)

    def _find(self, snapshot_id: SnapshotId) -> int | None:
        if self._table is None or snapshot_id in self._covered:
            return None
        return self._table.find(snapshot_id)

    def __contains__(self, snapshot_id: object) -> bool:
        """Return whether a snapshot is listed."""
        if snapshot_id in self._put:
            return True
        return isinstance(snapshot_id, SnapshotId) and self._find(snapshot_id) is not None

    def _rows(self) -> list[int]:
        """Return the rows of the file that count, in ascending order of their ids."""
        if self._table is None:
            return []
        covered, order = set(self._covered.values()), self._table.order
        rows = range(len(self._table)) if order is None else order.tolist()
        return [row for row in rows if row not in covered]

    def __iter__(self) -> Iterator[SnapshotId]:
        """Iterate over ids: those of the file, then those on top of it."""
        if self._table is not None:
            yield from SnapshotId.many(self._table.ids[self._rows()].tobytes())
        yield from self._put

    def __len__(self) -> int:
        """Count the entries."""
        stored = 0 if self._table is None else len(self._table)
        return stored - len(self._covered) + len(self._put)

    def values(self) -> ValuesView[SnapshotInfo]:
        """Return the entries, in the order of `__iter__`; they are decoded together."""
        return _Infos(self)

    def items(self) -> ItemsView[SnapshotId, SnapshotInfo]:
        """Return ids and entries; as `values`."""
        return _Items(self)

    def infos(self) -> Iterator[SnapshotInfo]:
        """Iterate over the entries; as `values`."""
        if self._table is not None:
            yield from self._table.infos(self._rows())
        yield from self._put.values()

    def ancestry(self, snapshot_id: SnapshotId) -> Iterator[SnapshotInfo]:
        """Iterate from a listed snapshot to its root; as `ancestry_pages`."""
        return chain.from_iterable(self.ancestry_pages(snapshot_id))

    def ancestry_pages(self, snapshot_id: SnapshotId) -> Iterator[list[SnapshotInfo]]:
        """Iterate from a listed snapshot to its root, several at a time.

        The first pages are short. Entries are decoded when they are looked at.

        Raises:
            KeyError: it is not listed, or one of its ancestors is not.
            FormatError: the parents form a circle.
        """
        left = len(self)
        wanted: SnapshotId | None = snapshot_id
        while wanted is not None:
            info = self._put.get(wanted)
            if info is not None:
                if left == 0:
                    raise _circle(snapshot_id)
                left -= 1
                yield [info]
                wanted = info.parent_id
                continue
            row = self._find(wanted)
            if row is None or self._table is None:
                raise KeyError(wanted)
            wanted = None
            size = 4
            while row != _NO_PARENT and wanted is None:
                rows, row, wanted = self._line(self._table, row, size)
                if len(rows) > left:
                    raise _circle(snapshot_id)
                left -= len(rows)
                yield self._table.lazily(rows)
                size = min(2 * size, _BLOCK)

    def _line(
        self, stored: SnapshotTable, row: int, most: int
    ) -> tuple[list[int], int, SnapshotId | None]:
        """Return the next rows of a line of ancestors, the row after them, or the id on top."""
        covered = set(self._covered.values())
        rows: list[int] = []
        parent = stored.parent if most < _FEW else stored.parents.__getitem__
        while row != _NO_PARENT and len(rows) < most:
            if row in covered:
                return rows, row, SnapshotId(stored.id(row))
            rows.append(row)
            row = parent(row)
        return rows, row, None


def _circle(snapshot_id: SnapshotId) -> FormatError:
    return FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")


class _Infos(ValuesView[SnapshotInfo]):
    _mapping: Snapshots

    def __iter__(self) -> Iterator[SnapshotInfo]:
        return self._mapping.infos()


class _Items(ItemsView[SnapshotId, SnapshotInfo]):
    _mapping: Snapshots

    def __iter__(self) -> Iterator[tuple[SnapshotId, SnapshotInfo]]:
        return ((info.id, info) for info in self._mapping.infos())


class _Numbering:
    """The place of each snapshot in the list that is about to be written."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._stored = stored = snapshots.table
        self.put = sorted(snapshots.put)
        count = 0 if stored is None else len(stored)
        covered = np.zeros(count, bool)
        places = [0] * len(self.put) if stored is None else [stored.place(it) for it in self.put]
        order = None if stored is None else stored.order
        self.places = places
        """Before which of the old ones each new one goes."""
        self.covered = covered
        covered[list(snapshots.covered.values())] = True
        by_place = covered if order is None else covered[order]
        before = np.cumsum(~by_place) - ~by_place
        new_before = np.searchsorted(places, np.arange(count), side="right")
        numbers = before + new_before
        before = np.concatenate([before, [count - int(by_place.sum())]])
        self.of_put = {
            it: int(before[place]) + index
            for index, (it, place) in enumerate(zip(self.put, places, strict=True))
        }
        self.numbers = np.empty(count, np.int64)
        """Of each row of the file; -2 for those that are gone."""
        self.numbers[slice(None) if order is None else order] = numbers
        self.numbers[covered] = -2
        for it, row in snapshots.covered.items():
            self.numbers[row] = self.of_put.get(it, -2)

    def of(self, snapshot_id: SnapshotId) -> int:
        """Return the place of a snapshot; raise KeyError if it is not listed."""
        found = self.of_put.get(snapshot_id)
        if found is None:
            row = None if self._stored is None else self._stored.find(snapshot_id)
            found = -2 if row is None else int(self.numbers[row])
        if found < 0:
            raise KeyError(snapshot_id)
        return found


def encode_snapshots(
    snapshots: Snapshots,
) -> tuple[Block | tuple[Long, int], Callable[[SnapshotId], int]]:
    """Build the vector of snapshots, and return the place of each by its id.

    Entries of the file below are copied, with other numbers for their parents.

    Raises:
        FormatError: one of them is damaged.
    """
    numbering = _Numbering(snapshots)
    spliced = _spliced(snapshots, numbering)
    if spliced is not None:
        return spliced, numbering.of
    infos = sorted(snapshots.values(), key=lambda info: info.id)
    return vector([_encode(info, numbering) for info in infos]), numbering.of


def _spliced(snapshots: Snapshots, numbering: _Numbering) -> tuple[Long, int] | None:
    stored = snapshots.table
    if stored is None or len(stored) - len(snapshots.covered) < FEWEST_COPIED:
        return None
    layout, gone = stored.layout, numbering.covered.copy()
    parents = stored.parent_column
    wanted = np.where(parents == _NO_PARENT, _NO_PARENT, numbering.numbers[parents])
    if (wanted[~gone] < _NO_PARENT).any():
        raise KeyError("the parent of a snapshot")
    fields, present = stored.tables.find(1, 4)
    # An absent number is 0, and there is no room for another one.
    anew = ~gone & (layout.foreign | (~present & (wanted != 0)))
    gone |= anew
    infos = [stored.info(row) for row in np.flatnonzero(anew).tolist()]
    places = dict(zip(numbering.put, numbering.places, strict=True))
    places.update((it.id, stored.place(it.id)) for it in infos)
    infos = sorted([*infos, *snapshots.put.values()], key=lambda info: info.id)
    new = [NewTable(places[it.id], *_encode(it, numbering)) for it in infos]
    source = Source(stored.buffer.payload, stored.tables.positions, layout.spans)
    if stored.order is None and layout.spans.are_blocks:
        spliced = weave(source, gone, new)
    else:
        order = np.arange(len(gone)) if stored.order is None else stored.order
        if not _are_apart(stored, fields[~gone & present]):
            return None
        found = place_before(source, stored.bare_spans, order, gone, new)
        if found is None:
            return None
        spliced = found
    changed = ~gone & present & (wanted != parents)
    data = joined(spliced.parts)
    at = (fields + spliced.shifts)[changed]
    data.view("<i4")[at >> 2] = wanted[changed]
    return long_vector(spliced.positions, [memoryview(data)])


def _are_apart(stored: SnapshotTable, parents: Positions) -> bool:
    """Return whether words at some places may be replaced, and nothing else be changed by it.

    Entries of other writers may share things.
    """
    bare = stored.bare_spans
    order = np.argsort(bare.low, kind="stable")
    if (bare.low[order][1:] < bare.high[order][:-1]).any():
        return False
    parents = np.sort(parents)
    properties = stored.tables.vector(4, 4, 4).tables()
    return not any(_are_in_vtables(parents, it) for it in (stored.tables, properties))


def _are_in_vtables(words: Positions, tables: Tables) -> bool:
    """Return whether one of some words, in ascending order, has bytes in common with a vtable."""
    _, sizes = tables.sizes()
    following = np.searchsorted(words, tables.vtable_places - 3)
    there = following < len(words)
    ends = (tables.vtable_places + sizes)[there]
    return bool((words[following[there]] < ends).any())


def _encode(info: SnapshotInfo, numbering: _Numbering) -> Block:
    parent = _NO_PARENT
    if info.parent_id is not None:
        number = numbering.of_put.get(info.parent_id)
        parent = numbering.of(info.parent_id) if number is None else number
    return table(_SNAPSHOT, bytes(info.id), parent, info.flushed_at, *info.blocks)


def decode_items_of(tables: Tables) -> RawMetadata:
    """Read MetadataItem tables; values stay encoded."""
    names = tables.strings(0, required="name")
    values = tables.vector(1, 1, 1, required="value").bytes()
    return tuple(zip(names, values, strict=True))


def encode_items_of(items: RawMetadata) -> Block:
    """Build MetadataItem tables of stored items."""
    return vector([table(_ITEM, string(name), blob(value)) for name, value in items])

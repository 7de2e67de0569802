"""The snapshots that a repo info lists, by id: those of a file, with some added or left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView, Mapping, ValuesView
from functools import cached_property
from itertools import chain, repeat
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, Self, overload

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.checks import FEW, columns_pay
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import read_each
from icechunk_async.format.repo_info.snapshot_info import NO_PARENT, SnapshotInfo, no_such_parent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from icechunk_async.format.repo_info.snapshot_columns import Page, SnapshotColumns

__all__ = ["SnapshotTable", "Snapshots"]

_ID_BYTES: Final = SnapshotId.size_bytes
_BLOCK: Final = 1024
"""Entries decoded at a time where all are asked for."""
_FIRST_PAGES: Final = (4, 12, 1024)
"""Entries of a history handed on at a time: most callers stop after a few, which are decoded one by
one. Others want all, as fast as they come, and each page by columns has fixed costs."""
_LONGEST_PAGE: Final = 4096


class SnapshotTable(TableList):
    """The SnapshotInfo tables of a file.

    A lookup halves the file's list, which is sorted by id; a parent is named by its place in it.
    """

    def __init__(self, payload: memoryview, first: int, count: int) -> None:
        """Look at the vector of entries; as `TableList`."""
        super().__init__(payload, first, count)
        self._known: dict[int, SnapshotInfo] = {}
        self._parents: dict[int, int] = {}
        """Of the entries that were looked at one by one: short histories are, each time."""
        self._last_found: tuple[bytes, int] = b"", 0

    @cached_property
    def columns(self) -> SnapshotColumns:
        """All entries as columns."""
        from icechunk_async.format.repo_info.snapshot_columns import SnapshotColumns  # noqa: PLC0415 -- needs NumPy

        return SnapshotColumns(self.tables)

    def _has_column(self, name: str) -> bool:
        """Return whether a column was decoded already."""
        return "columns" in self.__dict__ and name in self.columns.__dict__

    @cached_property
    def _raw_ids(self) -> memoryview:
        return memoryview(self.columns.ids).cast("B")

    def id(self, row: int) -> bytes:
        """Return the id of an entry."""
        if self._has_column("ids"):
            return bytes(self._raw_ids[_ID_BYTES * row : _ID_BYTES * (row + 1)])
        return self._row(row).struct(0, _ID_BYTES, field="id")

    @cached_property
    def _rows_in_order(self) -> Sequence[int]:
        order = self.columns.order
        return range(self._count) if order is None else order.tolist()

    def place(self, snapshot_id: bytes) -> int:
        """Return the first place, in ascending order of ids, whose id is not lower."""
        return bisect_left(self._rows_in_order, snapshot_id, key=self.id)

    def find(self, snapshot_id: SnapshotId) -> int | None:
        """Return the row of an entry.

        Cost: the logarithm of their number; in proportion to it for the first id that is not found.
        """
        wanted: bytes = snapshot_id
        last, row = self._last_found
        if wanted == last:  # the tip of a branch, as a rule
            return row
        # Lists are sorted by contract, which nothing enforces. What is not found where it should be
        # is looked up once more, in an order that is computed.
        if not self._has_column("order"):
            row = bisect_left(range(self._count), wanted, key=self.id)
            if row < self._count and self.id(row) == wanted:
                # One tuple, replaced as a whole: another thread sees an id and its row, or those
                # before.
                self._last_found = wanted, row
                return row
        place = self.place(wanted)
        if place == self._count:
            return None
        row = self._rows_in_order[place]
        return row if self.id(row) == wanted else None

    def find_each(self, snapshot_ids: Sequence[SnapshotId]) -> list[int | None]:
        """Return as `find` for several; many are looked up together."""
        if columns_pay(len(snapshot_ids)) and self._count:
            return self.columns.find_each(snapshot_ids)
        return list(map(self.find, snapshot_ids))

    def info(self, row: int) -> SnapshotInfo:
        """Return an entry, the same object each time.

        Raises:
            FormatError: it is damaged.
        """
        found = self._known.get(row)
        if found is None:
            # Two threads may decode it, with equal results. Which object stays does not matter.
            found = self._known[row] = self._decode(row)
        return found

    def _decode(self, row: int) -> SnapshotInfo:
        entry = self._row(row)
        parent = self.parent(row)
        items = read_each(entry.tables(4))
        logs = entry.structs(5, _ID_BYTES, 1)
        return SnapshotInfo(
            SnapshotId(entry.struct(0, _ID_BYTES, field="id")),
            None if parent == NO_PARENT else SnapshotId(self.id(parent)),
            entry.number(2, 8),
            entry.text(3, required="message"),
            items,
            tuple(SnapshotId.many(logs)),
        )

    def parent(self, row: int) -> int:
        """Return the row of an entry's parent; -1 for none."""
        found = self._parents.get(row)
        if found is not None:
            return found
        if self._has_column("parents"):
            return self.columns.parents[row]
        # An absent number is 0, which is the first entry: that there is no parent is always stored.
        number = self._row(row).number(1, 4)
        parent = number - (1 << 32) if number >> 31 else number
        if not NO_PARENT <= parent < self._count:
            raise no_such_parent()
        self._parents[row] = parent
        return parent

    def infos(self, rows: Sequence[int]) -> Iterator[SnapshotInfo]:
        """Iterate over entries; many are decoded together."""
        if not columns_pay(len(rows)):
            yield from map(self.info, rows)
            return
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
            yield from map(SnapshotInfo, *self.columns.some(some), *self.columns.more(some))

    def lazily(self, rows: list[int], last_parent: int) -> Page:
        """Return entries that are decoded when one of them is looked at; as `SnapshotPage`."""
        if columns_pay(len(rows)):
            from icechunk_async.format.repo_info.snapshot_columns import SnapshotPage  # noqa: PLC0415 -- needs NumPy

            return SnapshotPage(self.columns, rows, last_parent)
        return [self.info(row) for row in rows]


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
            wanted = [it for it in left_out | new.keys() if it not in covered]
            rows = zip(wanted, stored.find_each(wanted), strict=True)
            covered |= {it: row for it, row in rows if row is not None}
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
        # Every change copies what lies on top, and reading anew costs in proportion to the file.
        stored = 0 if self._table is None else len(self._table)
        return len(self._put) + len(self._covered) <= max(FEW, isqrt(stored // FEW))

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

    def among(self, snapshot_ids: Collection[SnapshotId]) -> set[SnapshotId]:
        """Return the ids that are listed; quicker than one by one."""
        found = {it for it in snapshot_ids if it in self._put}
        if self._table is not None:
            left = [it for it in snapshot_ids if it not in found and it not in self._covered]
            rows = zip(left, self._table.find_each(left), strict=True)
            found |= {it for it, row in rows if row is not None}
        return found

    def older_than(self, moment_us: int) -> set[SnapshotId]:
        """Return the ids of the entries that have a parent and were written before a moment."""
        infos: Iterable[SnapshotInfo] = self._put.values()
        found: set[SnapshotId] = set()
        if self._table is not None and columns_pay(len(self._table)):
            found.update(self._table.columns.older_than(moment_us))
            found.difference_update(self._covered)
        else:
            infos = self.infos()
        found.update(
            it.id for it in infos if it.parent_id is not None and it.flushed_at < moment_us
        )
        return found

    def children_of(self, parents: Collection[SnapshotId]) -> list[SnapshotInfo]:
        """Return the entries whose parent is among some, and which are not among them."""
        infos: Iterable[SnapshotInfo] = self._put.values()
        found: list[SnapshotInfo] = []
        if self._table is not None and columns_pay(len(self._table)):
            rows = [it for it in self._table.find_each([*parents]) if it is not None]
            covered = set(self._covered.values())
            found = [
                self._table.info(row)
                for row in self._table.columns.children_of(rows)
                if row not in covered
            ]
        else:
            infos = self.infos()
        found += [it for it in infos if it.parent_id in parents and it.id not in parents]
        return found

    def __contains__(self, snapshot_id: object) -> bool:
        """Return whether a snapshot is listed."""
        if snapshot_id in self._put:
            return True
        return isinstance(snapshot_id, SnapshotId) and self._find(snapshot_id) is not None

    def _rows(self) -> list[int]:
        """Return the rows of the file that count, in ascending order of their ids."""
        if self._table is None:
            return []
        covered, order = set(self._covered.values()), self._table.columns.order
        rows = range(len(self._table)) if order is None else order.tolist()
        return [row for row in rows if row not in covered]

    def __iter__(self) -> Iterator[SnapshotId]:
        """Iterate over ids: those of the file, then those on top of it."""
        if self._table is not None:
            yield from SnapshotId.many(self._table.columns.ids[self._rows()].tobytes())
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

    def ancestry_pages(self, snapshot_id: SnapshotId, *, whole: bool = False) -> Iterator[Page]:
        """Iterate from a listed snapshot to its root, several at a time.

        The first pages are short, unless the whole line is wanted. Entries are decoded when they
        are looked at.

        Raises:
            KeyError: it is not listed, or one of its ancestors is not.
            FormatError: the parents form a circle.
        """
        # Parents are places in a list, which a damaged file can make a circle of. A history is no
        # longer than the list, so count instead of remembering every snapshot.
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
            for size in chain(() if whole else _FIRST_PAGES, repeat(_LONGEST_PAGE)):
                rows, row, wanted = self._line(self._table, row, size)
                # Before the page is handed on, so that a circle ends after one round at the most.
                if len(rows) > left:
                    raise _circle(snapshot_id)
                left -= len(rows)
                if rows:
                    yield self._table.lazily(rows, row)
                if row == NO_PARENT or wanted is not None:
                    break

    def _line(
        self, stored: SnapshotTable, row: int, most: int
    ) -> tuple[list[int], int, SnapshotId | None]:
        """Return the next rows of a line of ancestors, the row after them, or the id on top."""
        covered = set(self._covered.values())
        rows: list[int] = []
        # The plain case first, with nothing in the loop but a list: long histories pass here.
        by_columns = columns_pay(most)
        if by_columns and not covered:
            parents = stored.columns.parents
            for _ in repeat(None, most):
                rows.append(row)
                row = parents[row]
                if row < 0:
                    break
            return rows, row, None
        parent = stored.columns.parents.__getitem__ if by_columns else stored.parent
        while row != NO_PARENT and len(rows) < most:
            # What lies on top may have another parent than the entry of the file, so the line
            # continues there.
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

"""The snapshots of a repo info file, in which an entry is found without decoding the others."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Final

from icechunk_async.format.flatbuffers.checks import columns_pay
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import read_each
from icechunk_async.format.repo_info.snapshots import BLOCK, NO_PARENT, SnapshotInfo, no_such_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from icechunk_async.format.repo_info.snapshot_columns import Page, SnapshotColumns

__all__ = ["SnapshotTable"]

_ID_BYTES: Final = SnapshotId.size_bytes


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
        for first in range(0, len(rows), BLOCK):
            some = rows[first : first + BLOCK]
            yield from map(SnapshotInfo, *self.columns.some(some), *self.columns.more(some))

    def lazily(self, rows: list[int], last_parent: int) -> Page:
        """Return entries that are decoded when one of them is looked at; as `SnapshotPage`."""
        if columns_pay(len(rows)):
            from icechunk_async.format.repo_info.snapshot_columns import SnapshotPage  # noqa: PLC0415 -- needs NumPy

            return SnapshotPage(self, rows, last_parent)
        return [self.info(row) for row in rows]

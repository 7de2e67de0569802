"""The newest part of the operations log: that of a file, with entries on top and without others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self, cast, overload

from icechunk_async.format.flatbuffers.checks import FEW, columns_pay
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.operations_log import Update, decode_update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.flatbuffers.splicing import Spans
    from icechunk_async.format.repo_info.log_columns import UpdateSpans

__all__ = ["LogTable", "OperationsLog"]

_BLOCK: Final = 1024


class LogTable(TableList):
    """The Update tables of a file, newest first."""

    def __init__(self, payload: memoryview, first: int, count: int) -> None:
        """Look at the vector of entries; as `TableList`."""
        super().__init__(payload, first, count)
        self._known: dict[int, Update] = {}

    def update(self, row: int) -> Update:
        """Return one entry, the same object each time.

        Raises:
            FormatError: it is damaged, or of a kind that this library does not know.
        """
        found = self._known.get(row)
        if found is None:
            found = self._known[row] = decode_update(self._row(row))
        return found

    def updates(self, first: int, stop: int) -> Iterator[Update]:
        """Iterate over entries; the first ones one by one, and then many together."""
        # Most callers look at the newest entries and stop.
        singly = first + FEW if columns_pay(stop - first) else stop
        for row in range(first, min(stop, singly)):
            yield self.update(row)
        if singly < stop:
            from icechunk_async.format.repo_info import log_columns  # noqa: PLC0415 -- needs NumPy

            for start in range(singly, stop, _BLOCK):
                some = self.entries.span(start, min(start + _BLOCK, stop)).tables()
                yield from log_columns.decode_updates(some)

    def next_backup(self, first: int, stop: int) -> int | None:
        """Return the first of some entries that names a backup."""
        if first >= stop:
            return None
        # Mostly it is the very next one, since only entries that a migration made up name none.
        if self._row(first).has(3):
            return first
        rows = self.tables.has(3)[first:stop].nonzero()[0]
        return first + rows.item(0) if len(rows) else None

    def backups(self, first: int, stop: int) -> list[str]:
        """Return the backups that entries name; an empty text for those that name none."""
        return self.entries.span(first, stop).tables().strings(3)

    @cached_property
    def layout(self) -> UpdateSpans:
        """Where the entries lie in the file, checked.

        Raises:
            FormatError: one of them is damaged, or of a kind that this library does not know.
        """
        from icechunk_async.format.repo_info.log_columns import UpdateSpans  # noqa: PLC0415 -- needs NumPy

        return UpdateSpans(self.tables, vtables=True)

    @cached_property
    def bare_spans(self) -> Spans:
        """Where the entries lie without their vtables, which they may share."""
        from icechunk_async.format.repo_info.log_columns import UpdateSpans  # noqa: PLC0415 -- needs NumPy

        return UpdateSpans(self.tables, vtables=False).spans


class OperationsLog(Sequence[Update]):
    """The newest part of the operations log, newest first; entries are decoded when asked for."""

    def __init__(self, updates: Sequence[Update] = ()) -> None:
        """Hold these entries."""
        self._new = tuple(updates)
        # The entry is kept beside its bytes, so that its identity cannot become that of another
        # one.
        self.written: dict[int, tuple[Update, Block]] = {}
        """Entries with their bytes, by identity; an entry that is held here keeps its identity."""
        self._table: LogTable | None = None
        self._first = self._stop = 0
        """Which entries of the file follow the new ones."""

    @classmethod
    def from_table(cls, stored: LogTable) -> Self:
        """Hold the entries of a file."""
        return cls._of((), stored, 0, len(stored))

    @classmethod
    def _of(cls, new: Sequence[Update], stored: LogTable | None, first: int, stop: int) -> Self:
        log = cls(new)
        log._table, log._first, log._stop = stored, first, stop
        return log

    def _with(self, new: Sequence[Update], first: int, stop: int) -> Self:
        log = self._of(new, self._table, first, stop)
        log.written = self.written
        return log

    @classmethod
    def of(cls, updates: Sequence[Update]) -> OperationsLog:
        """Return the entries of any sequence."""
        return updates if isinstance(updates, OperationsLog) else cls(updates)

    def with_newest(self, *newest: Update, instead: int) -> Self:
        """Return the log with entries in place of some that were newest so far."""
        # The entry that was newest gets the name of its backup, so it comes back as another one.
        kept = self._new[instead:]
        skipped = max(0, instead - len(self._new))
        return self._with((*newest, *kept), self._first + skipped, self._stop)

    def cut(self, most: int) -> tuple[Self, str | None]:
        """Return no more than ``most`` of the newest entries, and the backup that continues them.

        More, where the next entry names no backup; None if all entries stay.
        """
        # An entry names the backup in which it is the newest, so the log can be cut only before one
        # that does. Entries that a migration made up name none.
        for place in range(most, len(self._new)):
            if self._new[place].backup_path is not None:
                return self.head(place), self._new[place].backup_path
        row = self._first + max(0, most - len(self._new))
        if self._table is None or (next_row := self._table.next_backup(row, self._stop)) is None:
            return self, None
        path = self._table.update(next_row).backup_path
        return self.head(len(self._new) + next_row - self._first), path

    def head(self, count: int) -> Self:
        """Return the newest entries."""
        new = self._new[:count]
        stop = min(self._stop, self._first + count - len(new))
        return self._with(new, self._first, stop)

    @property
    def new(self) -> tuple[Update, ...]:
        """The entries that lie on top of the file."""
        return self._new

    @property
    def stored(self) -> tuple[LogTable | None, int, int]:
        """The file below, and the first and the last row of it that follow the new entries."""
        return self._table, self._first, self._stop

    @property
    def is_light(self) -> bool:
        """Whether so little lies on top of the file that it would not pay to read a newer one."""
        return len(self._new) <= FEW

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._new) + self._stop - self._first

    @overload
    def __getitem__(self, index: int) -> Update: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Update]: ...

    def __getitem__(self, index: int | slice) -> Update | Sequence[Update]:
        """Return one entry, or some of them."""
        if isinstance(index, slice):
            return tuple([self[place] for place in range(*index.indices(len(self)))])
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        if place < len(self._new):
            return self._new[place]
        assert self._table is not None
        return self._table.update(self._first + place - len(self._new))

    def __iter__(self) -> Iterator[Update]:
        """Iterate over the entries, newest first."""
        yield from self._new
        if self._table is not None:
            yield from self._table.updates(self._first, self._stop)

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of entries."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(cast("Sequence[object]", other))

    __hash__ = None  # type: ignore[assignment]

    def backups(self) -> set[str | None]:
        """Return the names of all backups that entries name."""
        found = {update.backup_path for update in self._new}
        if self._table is not None:
            found.update(self._table.backups(self._first, self._stop))
        return found

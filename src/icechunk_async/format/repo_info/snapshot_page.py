"""Entries of a repo info file in the order of a history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, overload

from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.repo_info import snapshot_columns as columns
from icechunk_async.format.repo_info.snapshots import NO_PARENT, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.json.metadata import JSON, RawMetadata
    from icechunk_async.format.repo_info.snapshot_table import SnapshotTable

    type Page = list[SnapshotInfo] | SnapshotPage
    """Some of a history: few entries, or many of a file."""

__all__ = ["SnapshotPage"]


class SnapshotPage(Sequence[SnapshotInfo]):
    """Entries of a file that follow one another in a history: columns, each decoded when asked for.

    Two threads may decode one at once, with equal results.
    """

    def __init__(self, stored: SnapshotTable, rows: list[int], last_parent: int) -> None:
        """Stand for the entries of some rows, each the parent of the one before.

        Args:
            stored: the file.
            rows: theirs; at least one.
            last_parent: the row of the parent of the last one; -1 for none.
        """
        self._stored = stored
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
        return self._stored.columns.some_tables(self._rows)

    @cached_property
    def id(self) -> list[SnapshotId]:
        """The id of each."""
        return self._stored.columns.some_ids(self._rows)

    @cached_property
    def parent_id(self) -> list[SnapshotId | None]:
        """The id of each one's parent; None for none."""
        last = self._last_parent
        return [*self.id[1:], None if last == NO_PARENT else SnapshotId(self._stored.id(last))]

    @cached_property
    def id_texts(self) -> list[str]:
        """The id of each as text, all at once; quicker than one by one."""
        return self._stored.columns.some_id_texts(self._rows)

    @cached_property
    def parent_id_texts(self) -> list[str | None]:
        """The id of each one's parent as text; None for none."""
        last = self.parent_id[-1] if "parent_id" in self.__dict__ else None
        if last is None and self._last_parent != NO_PARENT:
            last = SnapshotId(self._stored.id(self._last_parent))
        return [*self.id_texts[1:], None if last is None else str(last)]

    @cached_property
    def flushed_at(self) -> list[int]:
        """The time of each, microseconds since the epoch."""
        return columns.times_of(self._tables)

    def written_at(self) -> list[datetime]:
        """Return the times as `SnapshotInfo.written_at`; quicker than one by one."""
        return columns.dates_of(self._tables)

    @cached_property
    def message(self) -> list[str]:
        """The message of each.

        Raises:
            FormatError: one of them is damaged; also other columns.
        """
        return columns.messages_of(self._tables)

    @cached_property
    def raw_metadata(self) -> list[RawMetadata]:
        """The properties of each as stored."""
        return columns.items_of(self._tables)

    @cached_property
    def pruned_ancestor_logs(self) -> list[tuple[SnapshotId, ...]]:
        """Snapshots that expired between each one and its parent."""
        return columns.logs_of(self._tables)

    def decode_metadata(self) -> list[dict[str, JSON]]:
        """Return the properties of each, all new and decoded at once."""
        return columns.metadata_of(self._tables)

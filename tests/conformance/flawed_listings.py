"""Storages that spoil listings; each breaks one promise."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import unquote

from icechunk_async.storage import (
    CommonPrefix,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    ObjectInfo,
    Version,
)
from tests.conformance.flawed import Delimiter, Flawed, breaks, turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from icechunk_async_memory import MemoryStorage

_NOW = datetime.now(UTC)
_PAGE = 1000


def _name(entry: ListEntry) -> str:
    return entry.key if isinstance(entry, ObjectInfo) else entry.prefix


class _Rearranged(Flawed):
    """Base of storages that spoil a whole listing at once."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List what `spoil` makes of the listing."""
        found = self.inner.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        for entry in self.spoil([entry async for entry in found]):
            yield entry

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Return other entries."""
        return entries


@breaks("test_an_empty_storage_lists_nothing")
class ListsTheRoot(_Rearranged):
    """Lists a placeholder for the folder itself."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Add the folder."""
        return entries or [ObjectInfo(".keep", 0, _NOW)]


@breaks("test_a_listing_shows_a_finished_put")
class ListsWithDelay(Flawed):
    """Shows an object when the next one in its folder is written."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._last: dict[str, str] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Remember what is not shown yet."""
        version = await self.inner.put(key, data, if_version=if_version)
        self._last[key.rpartition("/")[0]] = key
        return version

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Leave out the last one."""
        async for entry in self.inner.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            if _name(entry) not in self._last.values():
                yield entry


@breaks("test_a_listing_leaves_out_deleted_objects")
class ListsDeletedObjects(_Rearranged):
    """Shows an object for a while after it was deleted."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._deleted: list[str] = []

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Remember what was deleted."""
        wanted = list(keys)
        self._deleted += wanted
        return await self.inner.delete(wanted)

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Add what was deleted."""
        return sorted([*entries, *(ObjectInfo(key, 1, _NOW) for key in self._deleted)], key=_name)


@breaks("test_a_listing_leaves_out_deleted_objects")
class ListsEmptyFolders(Flawed):
    """Shows folders that were made for objects that are gone."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without any."""
        super().__init__(inner)
        self._folders: set[str] = set()

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Remember the folder."""
        self._folders.add(key.partition("/")[0] + "/")
        return await self.inner.put(key, data, if_version=if_version)

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List the folders, also empty ones."""
        if delimiter:
            for folder in sorted(self._folders):
                yield CommonPrefix(folder)
        else:
            async for entry in self.inner.list_prefix(prefix, start_after=start_after):
                yield entry


@breaks("test_a_listing_tells_size_and_time")
class ListsFirstSizes(_Rearranged):
    """Shows sizes from an index that is not kept up to date."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin with an empty index."""
        super().__init__(inner)
        self._sizes: dict[str, int] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Note the first size."""
        self._sizes.setdefault(key, len(data))
        return await self.inner.put(key, data, if_version=if_version)

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Return sizes from the index."""
        return [
            replace(entry, size_bytes=self._sizes[entry.key])
            if isinstance(entry, ObjectInfo)
            else entry
            for entry in entries
        ]


@breaks("test_a_listing_tells_size_and_time")
class ListsLocalTimes(_Rearranged):
    """Shows times without a zone."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Take the zone away."""
        return [
            replace(entry, last_modified=entry.last_modified.replace(tzinfo=None))
            if isinstance(entry, ObjectInfo)
            else entry
            for entry in entries
        ]


@breaks("test_keys_are_listed_in_the_order_of_their_bytes")
class OrdersByUtf16(_Rearranged):
    """Orders as Java and JavaScript do."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Order by code units."""
        return sorted(entries, key=lambda entry: _name(entry).encode("utf-16-be"))


@breaks("test_keys_are_listed_in_the_order_of_their_bytes")
class OrdersByFolder(_Rearranged):
    """Walks folders in the order of their names."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Order by segments."""
        return sorted(entries, key=lambda entry: _name(entry).split("/"))


@breaks("test_many_keys_are_listed_once_and_in_order")
class RepeatsEntriesBetweenPages(_Rearranged):
    """Begins a page with the last entry of the page before."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Repeat entries."""
        pages = [entries[max(0, at - 1) : at + _PAGE] for at in range(0, len(entries), _PAGE)]
        return [entry for page in pages for entry in page]


@breaks("test_many_keys_are_listed_once_and_in_order")
class EndsAfterOnePage(_Rearranged):
    """Does not ask for the second page."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Leave out the rest."""
        return entries[:_PAGE]


@breaks("test_a_prefix_is_a_plain_string")
class TakesPrefixesForFolders(Flawed):
    """Lists what is in a folder of that name."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """End every prefix with a slash."""
        folder = prefix if not prefix or prefix.endswith("/") else prefix + "/"
        async for entry in self.inner.list_prefix(
            folder, start_after=start_after, delimiter=delimiter
        ):
            yield entry


@breaks("test_a_prefix_of_no_key_lists_nothing")
class RepairsPrefixes(Flawed):
    """Lists what a prefix may have meant."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Strip what looks wrong."""
        async for entry in self.inner.list_prefix(
            prefix.lstrip("/."), start_after=start_after, delimiter=delimiter
        ):
            yield entry


@breaks("test_a_prefix_is_not_a_pattern")
class TakesPrefixesForPatterns(Flawed):
    """Hands the prefix to a shell."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List what matches."""
        async for entry in self.inner.list_prefix(start_after=start_after, delimiter=delimiter):
            if fnmatchcase(_name(entry), unquote(prefix) + "*"):
                yield entry


@breaks("test_a_delimiter_groups_what_lies_deeper")
class ListsGroupsLast(_Rearranged):
    """Yields a page's objects, then its groups, as services send them."""

    def spoil(self, entries: list[ListEntry]) -> Sequence[ListEntry]:
        """Order by type."""
        return sorted(entries, key=lambda entry: isinstance(entry, CommonPrefix))


@breaks("test_a_delimiter_groups_below_a_prefix", "test_groups_below_a_prefix_start_after_a_string")
class GroupsAtTheFirstSlash(Flawed):
    """Counts slashes from the beginning of the key."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Group by the first segment."""
        seen: set[str] = set()
        async for entry in self.inner.list_prefix(prefix, start_after=start_after):
            head, slash, _ = _name(entry).partition("/")
            if not delimiter or not slash:
                yield entry
            elif head not in seen:
                seen.add(head)
                yield CommonPrefix(head + "/")


@breaks("test_a_group_of_many_keys_is_listed_once")
class RepeatsGroupsOnEachPage(Flawed):
    """Forgets between two pages which groups it has answered."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Return a group for every page that it is on."""
        last = None
        number = 0
        async for entry in self.inner.list_prefix(prefix, start_after=start_after):
            number += 1
            if number % _PAGE == 0:
                last = None
            head, slash, _ = _name(entry)[len(prefix) :].partition("/")
            if not delimiter or not slash:
                yield entry
            elif head != last:
                last = head
                yield CommonPrefix(prefix + head + "/")


@breaks(
    "test_keys_that_stay_are_listed_once_while_others_change",
    "test_objects_can_be_deleted_while_they_are_listed",
)
class PagesByNumber(Flawed):
    """Goes on at the n-th entry, which is another one when something was deleted."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Count entries."""
        at = 0
        while True:
            entries = self.inner.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
            page = [entry async for entry in entries][at : at + 100]
            await turn()
            for entry in page:
                yield entry
            if not page:
                return
            at += len(page)


@breaks("test_listings_can_be_read_side_by_side")
class HasOneCursor(Flawed):
    """Keeps the place in the listing in the handle."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin at the beginning."""
        super().__init__(inner)
        self._at = 0

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Go on where the last listing was."""
        entries = self.inner.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        found = [entry async for entry in entries]
        self._at = 0
        while self._at < len(found):
            self._at += 1
            yield found[self._at - 1]


@breaks("test_a_listing_can_be_left_half_way")
class FetchesPagesAhead(Flawed):
    """Starts a task for the next page, and leaves it to itself."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without tasks."""
        super().__init__(inner)
        self._ahead: set[asyncio.Task[None]] = set()

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Fetch ahead."""
        task = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        self._ahead.add(task)
        async for entry in self.inner.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            yield entry
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def close(self) -> None:
        """End the tasks, at last."""
        for task in self._ahead:
            task.cancel()


# -- continuations


@breaks(
    "test_a_listing_starts_after_a_key_that_is_there",
    "test_a_listing_can_be_continued_after_every_key",
)
class StartsAtTheKey(Flawed):
    """Takes the start in."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List what is not less."""
        async for entry in self.inner.list_prefix(prefix, delimiter=delimiter):
            if start_after is None or _name(entry) >= start_after:
                yield entry


@breaks("test_a_listing_starts_after_a_string_that_is_no_key")
class LooksForTheStart(Flawed):
    """Skips entries until it meets the start."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List what comes after that very key."""
        found = not start_after
        async for entry in self.inner.list_prefix(prefix, delimiter=delimiter):
            if found:
                yield entry
            found = found or _name(entry) == start_after


@breaks("test_a_listing_starts_after_a_key_within_a_prefix")
class StartsRelativeToThePrefix(Flawed):
    """Takes the start for a name below the prefix."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Join prefix and start."""
        start = None if start_after is None else prefix + start_after
        async for entry in self.inner.list_prefix(prefix, start_after=start, delimiter=delimiter):
            yield entry


@breaks("test_a_listing_can_be_continued_after_every_key")
class ContinuesIgnoringCase(Flawed):
    """Compares keys as some databases do."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Compare without regard to case."""
        async for entry in self.inner.list_prefix(prefix, delimiter=delimiter):
            if start_after is None or _name(entry).casefold() > start_after.casefold():
                yield entry


@breaks("test_a_long_listing_can_be_continued")
class ForgetsTheStartAfterOnePage(Flawed):
    """Sends the start with the first request only."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Begin again after a page."""
        number = 0
        async for entry in self.inner.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            number += 1
            if start_after is not None and number == _PAGE:
                async for repeated in self.inner.list_prefix(prefix, delimiter=delimiter):
                    yield repeated
                return
            yield entry


@breaks(
    "test_groups_that_are_not_greater_are_left_out",
    "test_groups_below_a_prefix_start_after_a_string",
)
class StartsWithinGroups(Flawed):
    """Yields a group if any key in it is greater."""

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Filter keys before they are grouped."""
        seen: set[str] = set()
        async for entry in self.inner.list_prefix(prefix, start_after=start_after):
            head, slash, _ = _name(entry)[len(prefix) :].partition("/")
            if not delimiter or not slash:
                yield entry
            elif head not in seen:
                seen.add(head)
                yield CommonPrefix(prefix + head + "/")

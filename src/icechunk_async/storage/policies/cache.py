"""The cache: immutable objects kept in memory and on disk.

The engine decides which keys are immutable: a key for which ``immutable`` returns True never holds
two different sequences of bytes. It may be deleted.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import anyio.to_thread

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.storage.ending import Ending
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async.storage.policies.memory_cache import MemoryTier, fits, part_name
from icechunk_async.storage.protocol import Retrieved, check_key, slice_range

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable

    from icechunk_async.storage.policies.disk_cache import DiskTier
    from icechunk_async.storage.protocol import (
        Capabilities,
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        StorageDescription,
        Version,
    )

__all__ = ["CacheOptions", "CacheStatistics", "Cached"]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes and location of a cache; plain data.

    Raises:
        InvalidInputError: a size is negative.
    """

    memory_bytes: int = 256 * 1024 * 1024
    """The maximum memory that one handle uses for objects; 0 for none."""
    directory: str | os.PathLike[str] | None = None
    """A directory that keeps objects for later and for other processes, or None. It is created if
    missing; other users must not be able to write to it."""
    disk_bytes: int = 10 * 1024 * 1024 * 1024
    """The maximum size of all files in ``directory``, of all repositories together."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("memory_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise InvalidInputError(
                    f"A cache cannot have {name}={getattr(self, name)}. Use 0 for none, or more."
                )


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counts of a cache. Only reads of immutable objects count."""

    memory_hits: int = 0
    """Reads served from memory."""
    disk_hits: int = 0
    """Reads served from disk."""
    misses: int = 0
    """Reads passed on to the storage."""
    hit_bytes: int = 0
    """Bytes served from memory or disk."""
    missed_bytes: int = 0
    """Bytes read from the storage."""
    memory_bytes: int = 0
    """Bytes that the memory tier holds now."""


class Cached:
    """A storage that caches reads of immutable objects.

    Contracts are those of `Storage`, with one exception: an immutable object that another handle
    deleted may still be read here. Objects of other keys, and all operations but reading, are
    passed on.

    Entries are whole objects and single ranges of packed ones, as requested. A whole object also
    serves its ranges. Writes are not cached, because writers seldom read what they wrote. A storage
    that other processes do not share (``capabilities.shared``) is kept in memory only: its URL does
    not say which objects it holds.

    Cost: a read from memory does not wait. The disk is accessed on a thread, once for each read
        that misses memory, and once more to keep the reply of the storage.
    """

    def __init__(
        self, storage: Storage, options: CacheOptions, *, immutable: Callable[[str], bool]
    ) -> None:
        """Wrap ``storage``. Nothing is read or made yet."""
        self._storage = storage
        self._immutable = immutable
        self._memory = MemoryTier(options.memory_bytes)
        self._disk: DiskTier | None = None
        if options.directory is not None and options.disk_bytes and storage.capabilities.shared:
            from icechunk_async.storage.policies.disk_cache import (  # noqa: PLC0415 -- with OpenSSL
                DiskTier,
            )

            place = _place(storage.description)
            self._disk = DiskTier(options.directory, options.disk_bytes, place)
        self._lock = threading.Lock()  # held over no await
        self._statistics = CacheStatistics()
        self._deleting = 0
        self._deletions = 0
        self._closed: Ending | None = None

    @property
    def statistics(self) -> CacheStatistics:
        """The counts of the cache so far."""
        with self._lock:
            return replace(self._statistics, memory_bytes=self._memory.held_bytes)

    @property
    def storage(self) -> Storage:
        """The storage without the cache, for those who must see what is stored."""
        return self._storage

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped storage."""
        return self._storage.capabilities

    @property
    def description(self) -> StorageDescription:
        """That of the wrapped storage."""
        return self._storage.description

    def close(self) -> None:
        """Drop the memory tier, and refuse further use."""
        with self._lock:
            self._closed = Ending()
            self._memory.clear()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        if not self._immutable(key):
            return await self._storage.get(key, byte_range)
        if isinstance(byte_range, PlacedRange):  # an entry must not share the caller's buffer
            byte_range = byte_range.unplaced()
        check_key(key)
        self._check_open()
        # The whole object first: it serves any range of itself.
        requests: list[RangeRequest] = (
            [None] if part_name(byte_range) == "all" else [None, byte_range]
        )
        for request in requests:
            if found := self._memory.get(key, request):
                return self._count(_part(found, request, byte_range), memory_hits=1)
        deletions = self._deletions
        if self._disk is not None:
            kept = await anyio.to_thread.run_sync(_first_on_disk, self._disk, key, requests)
            if kept is not None:
                request, found = kept
                self._keep_in_memory(key, request, found, deletions)
                return self._count(_part(found, request, byte_range), disk_hits=1)
        found = await self._storage.get(key, byte_range)
        await self._keep(key, byte_range, found, deletions)
        return self._count(found, misses=1)

    async def _keep(
        self, key: str, request: RangeRequest, found: Retrieved, deletions: int
    ) -> None:
        if len(found.data) == found.size_bytes:
            request = None  # the range covers the whole object
        # A backend that returns too few bytes must not do so for ever.
        if not fits(request, found):
            return
        if not isinstance(found.data, bytes):  # it may be a small part of a large buffer
            found = replace(found, data=bytes(found.data))
        self._keep_in_memory(key, request, found, deletions)
        if self._disk is not None and self._right_since(deletions):
            disk = self._disk
            await anyio.to_thread.run_sync(
                lambda: disk.write(
                    key, request, found, still_right=lambda: self._right_since(deletions)
                )
            )

    def _keep_in_memory(
        self, key: str, request: RangeRequest, found: Retrieved, deletions: int
    ) -> None:
        # Atomic with respect to deletions on other threads, which count under the lock before they
        # drop.
        with self._lock:
            if not self._closed and self._right_since(deletions):
                self._memory.put(key, request, found)

    def _right_since(self, deletions: int) -> bool:
        """Return whether no deletion has started since ``deletions`` were counted."""
        return self._deletions == deletions and not self._deleting

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await self._storage.get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        return await self._storage.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects, also from the cache."""
        doomed = list(keys)
        kept = [check_key(key) for key in doomed if self._immutable(key)]
        if not kept:
            return await self._storage.delete(doomed)
        with self._lock:
            self._deletions += 1
            self._deleting += 1
        try:
            # First: when the objects are gone, nothing that can be cancelled is left to do. What
            # is read from now on is not kept.
            self._memory.drop(kept)
            if self._disk is not None:
                await anyio.to_thread.run_sync(self._disk.drop, kept)
            return await self._storage.delete(doomed)
        finally:
            with self._lock:
                self._deletions += 1
                self._deleting -= 1

    async def forget(self, keys: Iterable[str]) -> None:
        """Drop objects from the cache, and read them from the storage when they are wanted."""
        doomed = [check_key(key) for key in keys]
        self._memory.drop(doomed)
        if self._disk is not None:
            await anyio.to_thread.run_sync(self._disk.drop, doomed)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects."""
        entries = self._storage.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async with closing(entries):
            async for entry in entries:
                yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        return await self._storage.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        await self._storage.sync()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.error(f"A cache of {self.description.url!r}")

    def _count(
        self, answer: Retrieved, *, memory_hits: int = 0, disk_hits: int = 0, misses: int = 0
    ) -> Retrieved:
        size = len(answer.data)
        result = "memory" if memory_hits else "disk" if disk_hits else "miss"
        telemetry.add("cache.reads", 1, result=result)
        with self._lock:
            before = self._statistics
            self._statistics = CacheStatistics(
                before.memory_hits + memory_hits,
                before.disk_hits + disk_hits,
                before.misses + misses,
                before.hit_bytes + (0 if misses else size),
                before.missed_bytes + (size if misses else 0),
            )
        return answer


def _first_on_disk(
    disk: DiskTier, key: str, requests: list[RangeRequest]
) -> tuple[RangeRequest, Retrieved] | None:
    for request in requests:
        found = disk.read(key, request)
        if found is not None:
            return request, found
    return None


def _part(found: Retrieved, kept: RangeRequest, asked: RangeRequest) -> Retrieved:
    """Return a range cut from an entry, which is that very range or the whole object."""
    if kept is not None:
        return found
    start, stop = slice_range(asked, found.size_bytes)
    if stop - start == found.size_bytes:
        return found
    return replace(found, data=memoryview(found.data)[start:stop])


def _place(description: StorageDescription) -> str:
    """Return the identity of a storage: its URL, and the server if one is named.

    Other options are left out, since some are secrets and some change (tokens).
    """
    # Two servers may have buckets of one name: entries of one must not serve the other.
    named = (description.options.get(name) for name in ("endpoint_url", "endpoint"))
    servers = [urlsplit(it).netloc.rpartition("@")[2] for it in named if isinstance(it, str)]
    return "\0".join([description.url, *servers])

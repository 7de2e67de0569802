"""Moving objects from one storage to another: what listings show to be missing, or by name.

If both storages are of one service, the service copies, and no byte passes through this process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, cast

import anyio

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.upkeep.copying.contents import SAME_IN_ALL
from icechunk_async.engine.upkeep.sweep import object_name, pages
from icechunk_async.errors import ObjectNotFoundError, StorageClosedError, StorageError
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import ChunkId
from icechunk_async.storage import ByteRange, ObjectInfo, Version
from icechunk_async.storage.extensions import CopiesFrom
from icechunk_async.storage.policies.wrapping import PassingStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.storage import Retrieved, Storage

__all__ = ["ByService", "Transfer"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 32
_BYTES_AT_ONCE: Final = 256 << 20
# 8 MiB: as many as are read at a time fit into memory.
_PIECE_BYTES: Final = _BYTES_AT_ONCE // _AT_ONCE
_NAMES: Final = 10_000
_REFUSALS: Final = 10
"""Copies that a service may refuse before it is not asked any more."""


class ByService(PassingStorage):
    """A destination whose ``copy`` takes objects from another storage of the same service.

    It has the shape of a storage so that policies can be put around it.
    """

    def __init__(self, destination: Storage, source: Storage) -> None:
        """Use `between`."""
        super().__init__(destination)
        self._origin = source

    @classmethod
    def between(cls, source: object, destination: Storage) -> ByService | None:
        """Return the way to copy between two backends; None if there is no service to do it."""
        if isinstance(destination, CopiesFrom) and source is not None:
            origin = cast("Storage", source)
            if destination.copies_from(origin):
                return cls(destination, origin)
        return None

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object of the other storage; it keeps its key, and ``target`` is not used."""
        del target, if_version
        assert isinstance(self.wrapped, CopiesFrom)
        await self.wrapped.copy_from(self._origin, source)
        return _UNKNOWN


_UNKNOWN: Final = Version("")
"""The version of a copy; nobody asks for it."""


class Transfer:
    """Copies objects under their names, and counts."""

    def __init__(
        self,
        source: Storage,
        destination: Storage,
        progress: ProgressCallback,
        service: Storage | None = None,
    ) -> None:
        """Begin with none; ``service`` is a `ByService` with its policies, if there is one."""
        self._source = source
        self._service = service
        self._refusals = 0
        self._destination = destination
        self._progress = progress
        self._large = anyio.Lock()
        """Held by the one object in memory that is larger than a piece."""
        self.copied = 0
        self.by_service = 0
        self.bytes_copied = 0
        self.skipped = 0

    def count(self, size_bytes: int) -> None:
        """Count an object that was written."""
        self.copied += 1
        self.bytes_copied += size_bytes

    async def by_listing(
        self, folder: str, only: IdSet | None = None, *, again: bool = False
    ) -> bool:
        """Copy what a listing of the destination lacks; memory: 256 MiB, or one object.

        Args:
            folder: the folder, with its slash.
            only: ids of the objects to copy; None: all.
            again: also copy what is there already.

        Returns:
            Whether all that was listed could be read, and all of ``only`` was listed.
        """
        whole = True
        done = seen = 0
        batches = self._missing(folder, only, again=again)
        async with closing(batches):
            async for skipped, objects in batches:
                for batch in _batches(objects):
                    found = await bounded_map(self._copy_listed, batch, limit=_AT_ONCE)
                    whole = whole and all(found)
                self.skipped += skipped
                done += skipped + len(objects)
                seen += skipped + len(objects)
                self._progress(Progress(f"copying {folder.rstrip('/')}", done))
        return whole and (only is None or seen == len(only))

    async def by_id(self, folder: str, ids: IdSet) -> bool:
        """Copy objects without looking whether they are there; return whether all could be read.

        Memory: 256 MiB, or one object if that is larger.
        """
        rows = ids.ids()
        whole = True
        for start in range(0, len(rows), _NAMES):
            keys = [f"{folder}{ChunkId(row.tobytes())}" for row in rows[start : start + _NAMES]]
            whole = await self.by_key(keys) and whole
            done = min(start + _NAMES, len(rows))
            self._progress(Progress(f"copying {folder.rstrip('/')}", done, len(rows)))
        return whole

    async def by_key(self, keys: Iterable[str]) -> bool:
        """Copy some objects as `by_id`."""
        return all(await bounded_map(self._copy_named, keys, limit=_AT_ONCE))

    async def _by_service(self, key: str) -> bool:
        """Let the service copy an object; return False if it does not, for whatever reason."""
        if self._service is None:
            return False
        try:
            await self._service.copy(key, key)
        except StorageClosedError:
            raise
        except (StorageError, ObjectNotFoundError) as error:
            _log.debug("%r is read and written, for the service did not copy it: %s", key, error)
            self._refusals += 1
            if self._refusals >= _REFUSALS:
                self._service = None
            return False
        self.copied += 1
        self.by_service += 1
        return True

    async def _copy_listed(self, it: ObjectInfo) -> bool:
        if await self._by_service(it.key):
            return True
        try:
            found = await self._source.get(it.key)
        except ObjectNotFoundError:
            return False
        await self._store(it.key, found)
        return True

    async def _copy_named(self, key: str) -> bool:
        if await self._by_service(key):
            return True
        try:
            # No listing said how large it is. A range tells that, and most objects end in it.
            found = await self._source.get(key, ByteRange(0, _PIECE_BYTES))
            if found.size_bytes <= _PIECE_BYTES:
                await self._store(key, found)
                return True
            # One at a time: two of several GiB would not fit.
            async with self._large:
                await self._store(key, await self._source.get(key))
        except ObjectNotFoundError:
            return False
        return True

    async def _store(self, key: str, found: Retrieved) -> None:
        # A server that ends early must not leave half an object under a name that is never written
        # again.
        if len(found.data) != found.size_bytes:
            raise StorageError(
                f"{key!r} has {found.size_bytes} bytes, and {len(found.data)} were read. "
                "Nothing that refers to it was copied."
            )
        await self._destination.put(key, found.data)
        self.count(len(found.data))

    async def _missing(
        self, folder: str, only: IdSet | None, *, again: bool
    ) -> AsyncIterator[tuple[int, list[ObjectInfo]]]:
        """Compare two listings, both sorted, page by page of the source.

        Yield how many objects are there already, and those that are to be copied.
        """
        listed = self._destination.list_prefix(folder)
        async with closing(listed):
            there = await anext(listed, None)
            async for page in pages(self._source, folder):
                chosen = page if only is None else _among(page, only)
                wanted: list[ObjectInfo] = []
                for it in chosen:
                    # Listings are in the order of UTF-8, which differs from that of text.
                    key = it.key.encode()
                    while isinstance(there, ObjectInfo) and there.key.encode() < key:
                        there = await anext(listed, None)
                    present = (
                        isinstance(there, ObjectInfo)
                        and there.key == it.key
                        # A copy by other means that was cut off leaves short ones.
                        and there.size_bytes == it.size_bytes
                    )
                    if not present or again or it.key in SAME_IN_ALL:
                        wanted.append(it)
                yield len(chosen) - len(wanted), wanted


def _among(page: list[ObjectInfo], only: IdSet) -> list[ObjectInfo]:
    ids, valid = parse_ids([object_name(it.key) for it in page])
    chosen = valid & only.contains(ids)
    return [it for it, is_chosen in zip(page, chosen.tolist(), strict=True) if is_chosen]


def _batches(objects: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    """Divide objects into lists that fit into memory."""
    batch: list[ObjectInfo] = []
    size_bytes = 0
    for it in objects:
        if batch and size_bytes + it.size_bytes > _BYTES_AT_ONCE:
            yield batch
            batch, size_bytes = [], 0
        batch.append(it)
        size_bytes += it.size_bytes
    if batch:
        yield batch

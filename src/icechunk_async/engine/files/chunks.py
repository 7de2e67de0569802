"""Chunk objects: read parts of them, and store each chunk in a new one.

There are two implementations of one small surface. `ChunkFiles` awaits the storage with all its
policies; `BlockingChunkFiles` answers on the calling thread, for backends that can (memory, local
disks), because Zarr's synchronous store methods run on worker threads without an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.storage import ByteRange
from icechunk_async.storage.extensions import ByteReads

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.storage import BlockingStorage, Data, Retrieved, Storage

    type ByteRead = Callable[[str, int, int], bytes | memoryview | None]

__all__ = ["BlockingChunkFiles", "ChunkFiles"]


class ChunkFiles:
    """Chunk objects on an event loop."""

    def __init__(self, storage: Storage, layout: Layout, at_once: ByteRead | None = None) -> None:
        """Use ``storage``.

        Args:
            storage: where the objects are.
            layout: names them.
            at_once: asked first; returns bytes if that takes no waiting, else None.
        """
        self.storage = storage
        self._key = layout.names.chunk
        self._id_bytes = layout.id_bytes
        self._at_once = at_once

    async def read(self, chunk_id: ChunkId, start: int, stop: int) -> bytes | memoryview:
        """Return bytes ``[start, stop)`` of a chunk object.

        Raises:
            FormatError: the object is missing or too short.

        Cost: one request; none for bytes that the backend has in memory.
        """
        key = self._key(chunk_id)
        if self._at_once is not None:
            data = self._at_once(key, start, stop)
            if data is not None:
                return data
        try:
            retrieved = await self.storage.get(key, ByteRange(start, stop))
        except ObjectNotFoundError as error:
            raise _missing(key) from error
        return _checked(key, retrieved, start, stop)

    async def read_again(self, chunk_id: ChunkId, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a chunk object from the storage, past all caches; as `read`."""
        from icechunk_async.storage.policies.cache import Cached  # noqa: PLC0415 -- on use

        # Without this a copy that is damaged in the cache would be compared again, and found
        # damaged again.
        if isinstance(self.storage, Cached):
            await self.storage.forget([self._key(chunk_id)])
        return await self.read(chunk_id, start, stop)

    async def store(self, data: Data) -> NativeChunk:
        """Store a chunk that nothing refers to yet.

        Cancellation: an object that nothing refers to may exist.
        """
        # The name is random, so no condition is needed, and a retry after a lost reply writes the
        # same bytes to the same key.
        chunk_id = ChunkId.random(self._id_bytes)
        await self.storage.put(self._key(chunk_id), data)
        return NativeChunk(chunk_id, 0, len(data))


class BlockingChunkFiles:
    """Chunk objects on the calling thread. Usable from any thread."""

    def __init__(self, storage: BlockingStorage, layout: Layout) -> None:
        """Use ``storage``; ``layout`` names the objects."""
        self.storage = storage
        self._key = layout.names.chunk
        self._id_bytes = layout.id_bytes
        self._read_bytes = storage.read_bytes if isinstance(storage, ByteReads) else None

    def read(self, chunk_id: ChunkId, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a chunk object; as `ChunkFiles.read`."""
        key = self._key(chunk_id)
        if self._read_bytes is not None:
            data = self._read_bytes(key, start, stop)
            if data is not None:
                return data
        try:
            retrieved = self.storage.get_blocking(key, ByteRange(start, stop))
        except ObjectNotFoundError as error:
            raise _missing(key) from error
        return _checked(key, retrieved, start, stop)

    def store(self, data: Data) -> NativeChunk:
        """Store a chunk; as `ChunkFiles.store`."""
        chunk_id = ChunkId.random(self._id_bytes)
        self.storage.put_blocking(self._key(chunk_id), data)
        return NativeChunk(chunk_id, 0, len(data))


def _missing(key: str) -> FormatError:
    return FormatError(
        f"A manifest refers to {key!r}, which is missing. The repository is damaged, or "
        "this snapshot expired and was collected."
    )


def _checked(key: str, retrieved: Retrieved, start: int, stop: int) -> bytes | memoryview:
    # Storages cut a range at the end of the object instead of refusing it.
    if len(retrieved.data) != stop - start:
        raise FormatError(
            f"{key!r} is truncated: bytes {start} to {stop} were asked for, and it has "
            f"{retrieved.size_bytes}. The repository is damaged."
        )
    return retrieved.data

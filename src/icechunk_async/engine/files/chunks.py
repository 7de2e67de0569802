"""Chunk objects: read parts of them and store chunks, in objects of their own or in packs.

Zarr's synchronous store methods run on worker threads. Where a storage can answer on the calling
thread, the same coroutines that serve asynchronous callers run to their end in one step; there
is no second implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from icechunk_async.errors import (
    FormatError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.layout import chunk_key
from icechunk_async.format.manifest.refs import NativeChunk
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.storage import BlockingStorage, Data, RangeRequest, Retrieved, Version

__all__ = [
    "AssetStorage",
    "DirectStorage",
    "read_native",
    "run_directly",
    "store_native",
    "store_packs",
]


class AssetStorage(Protocol):
    """The part of a storage that files written once need."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        ...

    async def put(self, key: str, data: Data) -> Version:
        """Write one whole object."""
        ...

    async def sync(self) -> None:
        """Return when all that was written is durable."""
        ...


class DirectStorage:
    """The reading and writing half of a storage, answering on the calling thread."""

    def __init__(self, storage: BlockingStorage) -> None:
        """Wrap ``storage``."""
        self._storage = storage

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it, without ever waiting."""
        return self._storage.get_blocking(key, byte_range)

    async def put(self, key: str, data: Data) -> Version:
        """Write one whole object, without ever waiting."""
        return self._storage.put_blocking(key, data)

    async def sync(self) -> None:
        """Do nothing: who publishes syncs the storage itself, which knows what this half wrote."""


def run_directly[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that awaits nothing that waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine that must not wait did")


async def read_native(
    storage: AssetStorage, packs: Packs | None, chunk_id: ChunkId, start: int, stop: int
) -> bytes | memoryview:
    """Return bytes of a chunk object, or of a pack that is not stored yet.

    Raises:
        FormatError: the object is missing or too short.
    """
    unstored = None if packs is None else packs.read(chunk_id, start, stop)
    if unstored is not None:
        return unstored
    key = chunk_key(chunk_id)
    try:
        retrieved = await storage.get(key, ByteRange(start, stop))
    except ObjectNotFoundError as error:
        raise FormatError(
            f"A manifest refers to {key!r}, which is missing. The repository is damaged, or "
            "this snapshot expired and was collected."
        ) from error
    if len(retrieved.data) != stop - start:
        raise FormatError(
            f"{key!r} is truncated: bytes {start} to {stop} were asked for, and it has "
            f"{retrieved.size_bytes}. The repository is damaged."
        )
    return retrieved.data


async def store_native(
    storage: AssetStorage, packs: Packs | None, data: Data, *, direct: bool
) -> NativeChunk:
    """Store a chunk that nothing refers to yet, or give it a place in a pack.

    Cancellation: an object that nothing refers to may exist.
    """
    if packs is not None and packs.takes(len(data)):
        return await packs.add(data, storage, direct=direct)
    chunk_id = ChunkId.random()
    await storage.put(chunk_key(chunk_id), data)
    return NativeChunk(chunk_id, 0, len(data))


async def store_packs(storage: AssetStorage, packs: Packs | None) -> None:
    """Return when every chunk that was written before the call is in the storage.

    Raises:
        StorageUnavailableError: some may not be. They stay in memory, and can be stored again.

    Cancellation: likewise.
    """
    if packs is None or packs.are_stored:
        return
    try:
        await packs.store_all(storage)
    except OutcomeUnknownError as error:  # about an object that nothing refers to yet
        raise StorageUnavailableError(
            f"A chunk object may not be stored: {error} Nothing was published and no change was "
            "lost; try again."
        ) from error

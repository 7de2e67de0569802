"""Upload no bytes twice: chunks that are there already, and equal chunks of one session.

A chunk whose bytes are those of the chunk at the same place makes no change. Equal chunks that a
session stores share an object, which the session finds again by a digest. Objects keep random
names: what nothing refers to is garbage, and no later writer can come back to it.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.engine.files.manifests import offload
from icechunk_async.errors import FormatError, IcechunkError
from icechunk_async.format.crc import sum_of
from icechunk_async.format.id_set import IdSet
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from icechunk_async.engine.files.assets import BlockingFiles
    from icechunk_async.engine.tree.blocking import BlockingChunks
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.storage import Data

__all__ = ["MAX_REMEMBERED", "Deduplication"]

MAX_REMEMBERED: Final = 50_000
"""The most objects that a session finds again by their bytes, about 23 MB; those that were not used
for longest are forgotten, and stored once more if their bytes come again."""
_LOCKS: Final = 64


class Deduplication:
    """The bytes that one session stored, as far as it remembers them.

    Usable from several tasks, threads and event loops at the same time.
    """

    def __init__(self) -> None:
        """Begin with a session that stored nothing."""
        self._stored: WeightedCache[bytes, NativeChunk] = WeightedCache(MAX_REMEMBERED)
        self._flights: SingleFlight[bytes, NativeChunk] = SingleFlight()
        # A thread that stores a chunk holds the lock of its digest, and waits for no other writer.
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._lost = IdSet()

    def forget(self, lost: Ids) -> None:
        """Refer to objects no more that a collection deleted or is deleting, nor to any so far."""
        # A writer that found an entry just before, and sets its reference after this, is found out:
        # the commit that called this is refused, and the next one looks for all chunks again.
        self._lost.add(lost)
        self._stored = WeightedCache(MAX_REMEMBERED)

    async def is_there(
        self, workspace: Workspace, path: str, coords: Coordinates, data: Data
    ) -> bool:
        """Return whether a chunk has these bytes already, as the session sees it.

        What cannot be read counts as different, so that writing it again mends it.

        Raises:
            StorageError: the storage of the repository failed.

        Cost: that of finding the reference. If the lengths and the sums, as far as known, are
        equal, one request to read the chunk; with sums, the array's manifest is decoded whole.
        """
        handle = await workspace.find_chunk(path, coords)
        if handle is None:
            return False
        ref = handle.ref
        decided = self._decided(ref, data)
        if decided is None and _lacks_sum(workspace, ref):
            decided = self._decided(await _with_sum(workspace, path, coords, ref), data)
        if decided is not None:
            return decided
        try:
            found = await workspace.read_chunk(path, coords)
        except IcechunkError as error:
            return _cannot_be_read(ref, error)
        return found is not None and _same(found, data)

    def is_there_blocking(
        self, chunks: BlockingChunks, path: str, coords: Coordinates, data: Data
    ) -> bool:
        """Return whether a chunk has these bytes already, on the calling thread; as `is_there`."""
        ref = chunks.find(path, coords)
        if ref is None:
            return False
        decided = self._decided(ref, data)
        if decided is None and _lacks_sum(chunks.workspace, ref):
            found = _with_sum_blocking(chunks.workspace, chunks.files, path, coords, ref)
            decided = self._decided(found, data)
        if decided is not None:
            return decided
        try:
            there = chunks.read(path, coords)
        except IcechunkError as error:
            return _cannot_be_read(ref, error)
        return there is not None and _same(there, data)

    def _decided(self, ref: ChunkRef, data: Data) -> bool | None:
        """Return whether a reference has these bytes; None: only reading them tells."""
        if isinstance(ref, InlineChunk):
            return _same(ref.data, data)
        if ref.length != len(data):
            return False
        if isinstance(ref, VirtualChunk):
            return None
        # A sum of 32 bits tells that bytes differ, and not that they are equal.
        differs = ref.sum != 0 and ref.sum != sum_of(data)
        return False if differs or self._is_lost(ref) else None

    def _is_lost(self, ref: NativeChunk) -> bool:
        lost = self._lost
        return len(lost) > 0 and bool(
            lost.contains(np.frombuffer(ref.chunk_id, np.uint8).reshape(1, -1))[0]
        )

    async def store(
        self, data: Data, store: Callable[[Data], Coroutine[Any, Any, NativeChunk]]
    ) -> NativeChunk:
        """Return where bytes are, after storing them unless this session did so before.

        Errors and cancellation: as ``store``, but of equal chunks at once all get the error, and
        the first is stored for as long as one waits for it.
        """
        digest = await offload(lambda: _digest(data), size_bytes=len(data))

        # Remembered before the flight ends, so that a task that comes in between finds the bytes in
        # one of the two, and never stores them again.
        async def stored() -> NativeChunk:
            ref = await store(data)
            self._stored.put(digest, ref, 1)
            return ref

        found = self._stored.get(digest)
        return found if found is not None else await self._flights.run(digest, stored)

    def store_blocking(self, data: Data, store: Callable[[Data], NativeChunk]) -> NativeChunk:
        """Return where bytes are, on the calling thread; as `store`."""
        digest = _digest(data)
        with self._locks[digest[0] % _LOCKS]:
            found = self._stored.get(digest)
            if found is None:
                found = store(data)
                self._stored.put(digest, found, 1)
            return found


def _digest(data: Data) -> bytes:
    return hashlib.sha256(data).digest()


def _same(some: Data, others: Data) -> bool:
    # Views compare item by item unless they are bytes, arrays do not.
    return len(some) == len(others) and np.array_equal(
        np.frombuffer(some, np.uint8), np.frombuffer(others, np.uint8)
    )


def _cannot_be_read(ref: ChunkRef, error: IcechunkError) -> bool:
    """Return that a chunk differs, or raise the error if it is not one of that chunk alone."""
    # A storage that fails must not make all chunks look different: a bad minute would upload
    # everything.
    if isinstance(ref, VirtualChunk) or isinstance(error, FormatError):
        return False
    raise error


def _lacks_sum(workspace: Workspace, ref: ChunkRef) -> bool:
    return isinstance(ref, NativeChunk) and not ref.sum and workspace.assets.keeps_sums


async def _with_sum(
    workspace: Workspace, path: str, coords: Coordinates, ref: ChunkRef
) -> ChunkRef:
    """Return a reference with its sum, if it is in the base and that is known; else unchanged."""
    base = workspace.in_base(path)
    if base is not None:
        for info in base.candidates(coords):
            found = await workspace.assets.manifests.find_with_sum(
                info.id, info.size_bytes, base.node.id, coords
            )
            if found is not None:
                return found if _are_one(found, ref) else ref
    return ref


def _with_sum_blocking(
    workspace: Workspace, files: BlockingFiles, path: str, coords: Coordinates, ref: ChunkRef
) -> ChunkRef:
    """Return a reference with its sum on the calling thread; as `_with_sum`."""
    base = workspace.in_base(path)
    if base is not None:
        for info in base.candidates(coords):
            found = files.manifests.find_with_sum(
                info.id, info.size_bytes, base.node.id, coords, workspace.assets.sums
            )
            if found is not None:
                return found if _are_one(found, ref) else ref
    return ref


def _are_one(found: ChunkRef, ref: ChunkRef) -> bool:
    """Return whether two references are of one place; the session may have set another."""
    return (
        isinstance(found, NativeChunk)
        and isinstance(ref, NativeChunk)
        and (found.chunk_id, found.offset, found.length) == (ref.chunk_id, ref.offset, ref.length)
    )

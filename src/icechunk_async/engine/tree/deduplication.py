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
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.manifest.chunk import ChunkRef
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
        self,
        ref: ChunkRef,
        data: Data,
        *,
        with_sum: Callable[[], Awaitable[ChunkRef | None]] | None,
        read: Callable[[], Awaitable[Data | None]],
    ) -> bool:
        """Return whether a chunk has these bytes already, as the session sees it.

        What cannot be read counts as different, so that writing it again mends it.

        Args:
            ref: the chunk at the place.
            data: the bytes.
            with_sum: finds the chunk in the base with its sum, if that is known. None: no sums are
                kept.
            read: reads the chunk.

        Raises:
            StorageError: the storage of the repository failed.

        Cost: none if the lengths or the sums, as far as known, differ; else that of reading the
        chunk, and before it, for a chunk without a sum, that of ``with_sum``.
        """
        decided = self._decided(ref, data)
        if decided is None and with_sum is not None and _lacks_sum(ref):
            decided = self._decided(_if_one(await with_sum(), ref), data)
        if decided is not None:
            return decided
        try:
            found = await read()
        except IcechunkError as error:
            return _cannot_be_read(ref, error)
        return found is not None and _same(found, data)

    def is_there_blocking(
        self,
        ref: ChunkRef,
        data: Data,
        *,
        with_sum: Callable[[], ChunkRef | None] | None,
        read: Callable[[], Data | None],
    ) -> bool:
        """Return whether a chunk has these bytes already, on the calling thread; as `is_there`."""
        decided = self._decided(ref, data)
        if decided is None and with_sum is not None and _lacks_sum(ref):
            decided = self._decided(_if_one(with_sum(), ref), data)
        if decided is not None:
            return decided
        try:
            found = read()
        except IcechunkError as error:
            return _cannot_be_read(ref, error)
        return found is not None and _same(found, data)

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


def _lacks_sum(ref: ChunkRef) -> bool:
    return isinstance(ref, NativeChunk) and not ref.sum


def _if_one(found: ChunkRef | None, ref: ChunkRef) -> ChunkRef:
    """Return a reference that was found if it is of the same place; else the other one.

    The session may have set another one than the base has.
    """
    return found if found is not None and _are_one(found, ref) else ref


def _are_one(found: ChunkRef, ref: ChunkRef) -> bool:
    """Return whether two references are of one place."""
    return (
        isinstance(found, NativeChunk)
        and isinstance(ref, NativeChunk)
        and (found.chunk_id, found.offset, found.length) == (ref.chunk_id, ref.offset, ref.length)
    )

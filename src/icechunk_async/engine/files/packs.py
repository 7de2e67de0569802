"""Pack small chunks of one session into shared objects.

A chunk gets its place in a pack when it is written, and is read from memory until the pack is
stored. The writer whose chunk does not fit stores the full pack first, so writers are held back to
the speed of the storage. Packs whose storing failed or was cancelled stay here, and the next writer
stores them first; a commit stores what is left before anything that refers to it.

A chunk object has no header (spec, "Chunks"): a pack is its chunks, one after the other.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import NativeChunk

if TYPE_CHECKING:
    from collections.abc import Generator

    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.storage import BlockingStorage, Data

__all__ = ["MAX_UNSTORED", "Packs"]

MAX_UNSTORED: Final = 6
"""Packs in memory at a time, beyond which writers wait. Writers on threads without an event loop
store one each, so their number is the bound."""


class _Pack:
    """Chunks, one after the other, in memory."""

    __slots__ = ("_buffer", "id", "size_bytes")

    def __init__(self, capacity: int, id_bytes: int) -> None:
        self.id = ChunkId.random(id_bytes)
        self.size_bytes = 0
        self._buffer = memoryview(np.empty(capacity, np.uint8))  # untouched pages take no memory

    def append(self, data: Data) -> NativeChunk | None:
        """Copy a chunk to the end; None if there is no room."""
        start, length = self.size_bytes, len(data)
        if start + length > len(self._buffer):
            return None
        self._buffer[start : start + length] = data
        self.size_bytes = start + length
        return NativeChunk(self.id, start, length)

    def data(self, start: int = 0, stop: int | None = None) -> memoryview:
        return self._buffer[start : self.size_bytes if stop is None else stop]


class ObjectWriter(Protocol):
    """The part of a storage that packs need."""

    async def put(self, key: str, data: Data) -> object:
        """Write one whole object."""
        ...


class Packs:
    """The packs of one session that are not stored yet.

    Usable from several tasks, threads and event loops at the same time.
    """

    def __init__(self, packing: Packing, layout: Layout) -> None:
        """Begin with none; ``layout`` names the objects."""
        self._packing = packing
        self._layout = layout
        self._key = layout.names.chunk
        # Held over no await. Reentrant because the garbage collector may end a suspended task of a
        # closed loop on the thread that holds the lock, and that task takes it, too.
        self._lock = threading.RLock()
        self._kept: dict[ChunkId, _Pack] = {}
        """All packs: the open one, those that wait, those that are being stored."""
        self._open: _Pack | None = None
        self._waiting: list[_Pack] = []
        """Closed, and not being stored at present."""
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def another(self) -> Packs:
        """Return packs of the same setting for another session."""
        return Packs(self._packing, self._layout)

    @property
    def count(self) -> int:
        """The number of packs in memory."""
        return len(self._kept)

    @property
    def are_stored(self) -> bool:
        """Whether every chunk that was added is in the storage."""
        return not self._kept

    def takes(self, size_bytes: int) -> bool:
        """Return whether a chunk of this length is packed."""
        return size_bytes <= self._packing.max_chunk_bytes

    def read(self, chunk_id: ChunkId, start: int, stop: int) -> bytes | None:
        """Return bytes of a pack; None if it was stored already."""
        pack = self._kept.get(chunk_id)
        # A copy, because a view would keep the whole pack in memory as long as the chunk.
        return None if pack is None else bytes(pack.data(start, stop))

    async def add(self, data: Data, storage: ObjectWriter) -> NativeChunk:
        """Give a chunk its place, and perhaps store a pack that became full.

        Args:
            data: the chunk; it is copied.
            storage: where packs go.

        Raises:
            StorageError: a pack could not be stored. It stays here; the chunk was not added.

        Cancellation: as after an error.
        """
        while True:
            with self._lock:
                ref, full = self._place(data, limit=MAX_UNSTORED)
                turn = self._sleep() if ref is None and full is None else None
            if turn is not None:
                await turn
            elif full is not None:
                with self._storing(full):
                    await storage.put(self._key(full.id), full.data())
            if ref is not None:
                return ref

    def add_blocking(self, data: Data, storage: BlockingStorage) -> NativeChunk:
        """Give a chunk its place without an event loop, never waiting for others; as `add`."""
        while True:
            with self._lock:
                ref, full = self._place(data, limit=None)
            if full is not None:
                with self._storing(full):
                    storage.put_blocking(self._key(full.id), full.data())
            if ref is not None:
                return ref

    def _place(self, data: Data, *, limit: int | None) -> tuple[NativeChunk | None, _Pack | None]:
        """Return the place of a chunk, and the pack that its writer has to store; the lock is held.

        Neither if ``limit`` packs are in memory, so that the writer has to wait.
        """
        ref = None if self._waiting or self._open is None else self._open.append(data)
        if ref is not None:
            return ref, None
        # A pack whose storing failed goes first: nothing that refers to it can be committed before,
        # and it holds memory.
        if self._waiting:
            return None, self._waiting.pop()
        if limit is None or len(self._kept) < limit:
            full, ref = self._open, self._begin(data)
            return ref, full
        return None, None

    def _begin(self, data: Data) -> NativeChunk:
        """Open another pack with its first chunk; the lock is held."""
        self._open = pack = _Pack(self._packing.target_bytes, self._layout.id_bytes)
        self._kept[pack.id] = pack
        ref = pack.append(data)
        assert ref is not None  # no longer than a pack: takes() was asked
        return ref

    async def store_all(self, storage: ObjectWriter) -> None:
        """Return when every chunk that was added before the call is in the storage.

        Raises:
            StorageError: some is not. Every pack that is not stored stays here.

        Cancellation: as after an error.
        """
        with self._lock:
            if self._open is not None:
                self._waiting.append(self._open)
                self._open = None
            # Those that others add from now on belong to changes after this call.
            wanted = set(self._kept)

        async def store_some(_: int) -> None:
            while (pack := self._take(wanted)) is not None:
                with self._storing(pack):
                    await storage.put(self._key(pack.id), pack.data())

        while True:
            with self._lock:
                wanted &= self._kept.keys()
                if not wanted:
                    return
                # The rest is being stored by writers; its end, also a failure, wakes us to look
                # again.
                mine = sum(pack.id in wanted for pack in self._waiting)
                turn = None if mine else self._sleep()  # another task stores the rest
            if turn is not None:
                await turn
            else:
                await bounded_map(store_some, range(mine), limit=MAX_UNSTORED)

    def _take(self, wanted: set[ChunkId]) -> _Pack | None:
        with self._lock:
            for place, pack in enumerate(self._waiting):
                if pack.id in wanted:
                    return self._waiting.pop(place)
        return None

    @contextmanager
    def _storing(self, pack: _Pack) -> Generator[None]:
        """Store a pack that was taken in the block; if that may have failed, it waits again.

        Storing it twice does no harm: its bytes and its key stay the same.
        """
        try:
            yield
        except BaseException:
            with self._lock:
                self._waiting.append(pack)
            raise
        else:
            with self._lock:
                # Only now: until the storage has it, its chunks are read from memory.
                del self._kept[pack.id]
        finally:
            self._wake()

    def _sleep(self) -> asyncio.Future[None]:
        """Return a future that ends when some pack was stored or could not be; the lock is held."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._sleepers.append((loop, turn))
        return turn

    def _wake(self) -> None:
        with self._lock:
            sleepers, self._sleepers = self._sleepers, []
        for loop, turn in sleepers:
            with suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(_end, turn)


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)

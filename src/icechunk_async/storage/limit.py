"""One budget of concurrent requests, shared by everything that an opened repository does."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from icechunk_async._concurrency import closing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

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

__all__ = ["Budget", "Limited"]


class Budget:
    """At most ``limit`` holders at a time, first come first served, on any event loops.

    asyncio's own semaphores belong to one loop; Zarr reads and writes on a loop of its own.
    """

    def __init__(self, limit: int) -> None:
        """Begin with every place free."""
        if limit < 1:
            raise ValueError(f"a budget needs at least one place, not {limit}")
        self._free = limit
        self._lock = threading.Lock()  # held over no await
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncGenerator[None]:
        """Hold one place for the length of the block; wait for it if there is none.

        Cancellation: no place is held, none is lost.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            turn = loop.create_future()
            entry = (loop, turn)
            self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                waiting = entry in self._waiting
                if waiting:
                    self._waiting.remove(entry)
            if not waiting:  # the place was already handed over: pass it on
                self._release()
            raise

    def _release(self) -> None:
        """Hand the place to the next in line, or set it free."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                loop, turn = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_resolve, turn)
            except RuntimeError:  # that loop has ended, and its waiters with it
                continue
            return


def _resolve(turn: asyncio.Future[None]) -> None:
    # A cancelled waiter passes its place on by itself, see Budget._acquire.
    if not turn.done():
        turn.set_result(None)


class Limited:
    """A storage whose requests each take a place of a budget.

    Contracts are those of :class:`~icechunk_async.storage.Storage`. A call that waits for its
    place and is cancelled has no effect.
    """

    def __init__(self, storage: Storage, budget: Budget) -> None:
        """Wrap ``storage``; several wrappers may share one budget."""
        self._storage = storage
        self._budget = budget

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped storage."""
        return self._storage.capabilities

    @property
    def description(self) -> StorageDescription:
        """That of the wrapped storage."""
        return self._storage.description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        async with self._budget.place():
            return await self._storage.get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        async with self._budget.place():
            return await self._storage.get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        async with self._budget.place():
            return await self._storage.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects."""
        async with self._budget.place():
            return await self._storage.delete(keys)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; a place is held only while the next entry is fetched."""
        entries = self._storage.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async with closing(entries):
            while True:
                async with self._budget.place():
                    try:
                        entry = await anext(entries)
                    except StopAsyncIteration:
                        return
                yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        async with self._budget.place():
            return await self._storage.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        async with self._budget.place():
            await self._storage.sync()

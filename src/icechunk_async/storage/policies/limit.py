"""One budget of concurrent requests, shared by all operations of an open repository.

The budget adapts: it shrinks when the store cannot keep up and grows back as the store answers.
It is fair: waiting requests are served by start-time fair queueing, so that a small read does not
wait behind a bulk transfer, and the bulk transfer is not starved either.
"""

from __future__ import annotations

import asyncio
import threading
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Literal, Self

from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    NameResolutionError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import ByteRange, SuffixRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Iterable
    from types import TracebackType

    from icechunk_async.storage.protocol import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = ["Budget", "Limited"]

_SHRINK: Final = 0.7
_SMALL_BYTES: Final = 1 << 18
"""A request of this size or less takes about as long as an empty one."""
_BYTES_PER_COST: Final = 1 << 16
"""Bytes that can be transferred in the latency of one request, roughly."""
_MAX_FLOWS: Final = 64
"""Flows that are queued separately; all others share one."""


@dataclass(slots=True)
class _Waiter:
    """A waiting request; ordered by start tag, then by arrival."""

    order: tuple[float, int]
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None]
    granted: bool = False
    gone: bool = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class Budget:
    """At most ``limit`` holders at a time, on any event loops, fewer while the store is busy.

    A semaphore of asyncio belongs to one loop, and Zarr runs a separate one.
    """

    def __init__(self, limit: int) -> None:
        """Start with every place free; there are at most ``limit`` and at least one."""
        if limit < 1:
            raise ValueError(f"a budget needs at least one place, not {limit}")
        self._maximum = limit
        self._limit = float(limit)
        self._held = 0
        self._shrinks = 0
        self._lock = threading.Lock()  # held over no await
        self._heap: list[_Waiter] = []
        self._waiting = 0  # those in the heap that are not gone
        self._arrivals = 0
        self._reached = 0.0  # start tag of the last waiter that was served
        self._ends: dict[Hashable, float] = {}  # by flow: where its next start tag may begin

    @property
    def limit(self) -> int:
        """The current number of places."""
        return int(self._limit)

    def place(self, kind: str = "", key: str = "", size_bytes: int = 0) -> _Place:
        """Hold one place for the length of an ``async with`` block; wait until one is free.

        Waiting requests get equal shares by kind of request, first segment of the key, and size
        class; within a share the order is first come, first served.

        Args:
            kind: such as reading.
            key: of the object.
            size_bytes: to be transferred, as far as that is known.

        An error that leaves the block is a sign of the store's load, see `_Place.learn`.

        Cancellation: no place is held, none is lost.
        """
        return _Place(self, kind, key, size_bytes)

    def acquire_at_once(self) -> int | None:
        """Take a place as `acquire` does, or return None if none is free."""
        with self._lock:
            if not self._has_room():
                return None
            self._held += 1
            return self._shrinks

    async def acquire(self, flow: Hashable, cost: float) -> int:
        """Wait for a place; return how often the budget had shrunk by then.

        Args:
            flow: which share of the budget the request belongs to.
            cost: how much of it the request uses, in small requests.
        """
        with self._lock:
            if self._has_room():
                self._held += 1
                return self._shrinks
            waiter = self._enqueue(flow, cost)
        try:
            await waiter.turn
        except BaseException:  # cancelled, or thrown away with its loop
            with self._lock:
                waiter.gone = True
                if not waiter.granted:
                    self._waiting -= 1
                    self._tidy()
            if waiter.granted:  # the place was already handed over: pass it on
                self.release()
            raise
        return self._shrinks

    def release(self, shrinks: int = 0, *, overloaded: bool | None = None) -> None:
        """Give a place back, and hand free ones to those who wait.

        Args:
            shrinks: the number that `acquire` returned.
            overloaded: whether the store could not keep up with this request; None where
                nothing was learned.
        """
        with self._lock:
            if overloaded:
                # Requests that ran when the budget shrank tell of the load before it.
                if shrinks == self._shrinks:
                    self._shrinks += 1
                    self._limit = max(1.0, self._limit * _SHRINK)
            elif overloaded is False and self._held >= int(self._limit) < self._maximum:
                # One more place for each round of answers, and only if all places were needed.
                self._limit += 1 / self._limit  # stays below the next integer after the maximum
            self._held -= 1
            if not self._waiting:
                return
            ready = self._grant()
        while ready:
            waiter = ready.pop()
            try:
                _wake(waiter)
            except RuntimeError:  # that loop has ended, and its waiters with it
                with self._lock:
                    self._held -= 1
                    ready += self._grant()

    def _has_room(self) -> bool:
        return self._waiting == 0 and self._held < int(self._limit)

    def _enqueue(self, flow: Hashable, cost: float) -> _Waiter:
        loop = asyncio.get_running_loop()
        if flow not in self._ends and len(self._ends) >= _MAX_FLOWS:
            # A flow served up to here starts like a new one. Otherwise an endless supply of new
            # flows would starve the old ones.
            self._ends = {it: end for it, end in self._ends.items() if end > self._reached}
            if len(self._ends) >= _MAX_FLOWS:
                flow = None
        start = max(self._reached, self._ends.get(flow, 0.0))
        self._ends[flow] = start + cost
        self._arrivals += 1
        waiter = _Waiter((start, self._arrivals), loop, loop.create_future())
        heappush(self._heap, waiter)
        self._waiting += 1
        return waiter

    def _grant(self) -> list[_Waiter]:
        """Remove the next waiters from the queue; their places count as held."""
        ready: list[_Waiter] = []
        while self._waiting and self._held < int(self._limit):
            waiter = heappop(self._heap)
            if waiter.gone:
                continue
            self._reached = waiter.order[0]
            waiter.granted = True
            self._waiting -= 1
            self._held += 1
            ready.append(waiter)
        self._tidy()
        return ready

    def _tidy(self) -> None:
        """Drop cancelled waiters before they outnumber the waiting ones."""
        if self._waiting == 0:
            self._heap.clear()
            self._ends.clear()
            self._reached = 0.0
        elif len(self._heap) > 2 * self._waiting + 8:
            self._heap = [waiter for waiter in self._heap if not waiter.gone]
            heapify(self._heap)
        if len(self._ends) > 2 * self._waiting + 64:
            # A flow that was served up to here starts like a new one.
            self._ends = {flow: end for flow, end in self._ends.items() if end > self._reached}


class _Place:
    """A place of a budget, while the block runs."""

    __slots__ = ("_budget", "_key", "_kind", "_overloaded", "_shrinks", "_size")

    def __init__(self, budget: Budget, kind: str, key: str, size_bytes: int) -> None:
        self._budget = budget
        self._kind = kind
        self._key = key
        self._size = size_bytes
        self._shrinks = 0
        self._overloaded: bool | None = False

    async def __aenter__(self) -> Self:
        shrinks = self._budget.acquire_at_once()
        if shrinks is None:  # only those who wait need to be told apart
            flow = (self._kind, self._key.partition("/")[0], self._size > _SMALL_BYTES)
            shrinks = await self._budget.acquire(flow, 1 + self._size / _BYTES_PER_COST)
        self._shrinks = shrinks
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.learn(error)
        self._budget.release(self._shrinks, overloaded=self._overloaded)

    def learn(self, error: BaseException) -> None:
        """Classify an error: the store is too busy, is fine, or nothing was learned."""
        told = _tells_overload(error)
        if told is not False:
            self._overloaded = told


def _tells_overload(error: BaseException) -> bool | None:
    """Return whether an error means that the store is too busy; None if it says nothing."""
    if isinstance(error, (asyncio.CancelledError, NameResolutionError)):
        return None
    return isinstance(error, (StorageUnavailableError, OutcomeUnknownError))


def _wake(waiter: _Waiter) -> None:
    # A cancelled waiter passes its place on by itself, see Budget.acquire.
    if asyncio._get_running_loop() is waiter.loop:  # noqa: SLF001 -- does not raise
        _resolve(waiter.turn)
    else:
        waiter.loop.call_soon_threadsafe(_resolve, waiter.turn)


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Limited(PassingStorage):
    """A storage whose requests each take a place of a budget.

    Requests that wait are fair to each other by kind: reading or writing, the first segment of
    the key, and whether the request is small or large.

    Contracts are those of `Storage`. A call that waits for its place and is cancelled has no
    effect. A request counts as a sign of overload where the store was unavailable or did not
    answer, but not where its name could not be resolved.
    """

    def __init__(self, storage: Storage, budget: Budget) -> None:
        """Wrap ``storage``; several wrappers may share one budget."""
        super().__init__(storage)
        self._budget = budget

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        budget = self._budget
        shrinks = budget.acquire_at_once()
        if shrinks is None:
            async with budget.place("read", key, _asked_bytes(byte_range)):
                return await self.wrapped.get(key, byte_range)
        overloaded: bool | None = False
        try:  # as the block above does, without its cost: most reads find a place
            return await self.wrapped.get(key, byte_range)
        except BaseException as error:
            overloaded = _tells_overload(error)
            raise
        finally:
            budget.release(shrinks, overloaded=overloaded)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        async with self._budget.place("read", key, 0):
            return await self.wrapped.get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        size_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        async with self._budget.place("write", key, size_bytes):
            return await self.wrapped.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects."""
        doomed = list(keys)
        async with self._budget.place("delete", "", 0) as place:
            failures = await self.wrapped.delete(doomed)
            for failure in failures:
                place.learn(failure.error)
            return failures

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; a place is held only while the next entry is fetched."""
        entries = self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async with closing(entries):
            while True:
                async with self._budget.place("list", prefix, 0):
                    try:
                        entry = await anext(entries)
                    except StopAsyncIteration:
                        return
                yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        async with self._budget.place("write", target, 0):
            return await self.wrapped.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        async with self._budget.place("write", "", 0):
            await self.wrapped.sync()


def _asked_bytes(byte_range: RangeRequest) -> int:
    """Return the number of bytes requested; 0 if only the store knows it."""
    match byte_range:
        case ByteRange(start, int(stop)):
            return stop - start
        case SuffixRange(length):
            return length
        case _:
            return 0

"""The only module that starts tasks: bounded, structured, with plain errors.

Failures leave these functions as themselves, never as an ``ExceptionGroup``; where several
tasks failed at once the first is raised and carries a note about the others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sized
from contextlib import asynccontextmanager
from dataclasses import field
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Self, cast, overload
from weakref import WeakKeyDictionary

import anyio

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
    )
    from contextlib import AbstractAsyncContextManager

__all__ = [
    "AnyLoopLock",
    "Background",
    "Held",
    "Outlasting",
    "SingleFlight",
    "bounded_map",
    "closing",
    "error_of_others",
    "first_of_two",
    "gather",
    "start",
]

_log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.01


@asynccontextmanager
async def _task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """Run a task group whose failure is one plain exception."""
    # Not one of anyio: it takes nearly twice as long, and 16 ms when a process first makes one.
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        leaves = list(_leaves(failures))
        first = next((leaf for leaf in leaves if not isinstance(leaf, Exception)), leaves[0])
        # Several tasks may have waited for the same thing, and raise one error.
        others = [repr(leaf) for leaf in leaves if leaf is not first]
        if others:
            shown = ", ".join(others)[:1000]
            first.add_note(f"{len(others)} more concurrent failures: {shown}")
        # Keep the cause that the failing code gave, and drop the group from the chain.
        raise first from first.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", member))
        else:
            yield member


def start[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task on the running event loop; its first step is done before this returns.

    So work that has to wait for nothing, as where a local disk has a file in memory, has ended by
    then: without a turn of the loop, of which each takes as long as reading a small file.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


async def bounded_map[T, R](
    fn: Callable[[T], Awaitable[R]], items: Iterable[T], *, limit: int
) -> list[R]:
    """Await ``fn`` of every item, at most ``limit`` at a time; results keep the items' order.

    ``limit`` workers share one iterator, so a million items cost no million tasks, and a lazy
    iterable is consumed only as fast as its items are used.

    Raises:
        The first error of ``fn``; the other calls are cancelled and waited for.

    Cancellation: every running call is cancelled and waited for.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if isinstance(items, Sized):
        limit = min(limit, len(items))
    if limit <= 1:  # nothing to overlap: no task is needed
        return [await fn(item) for item in items]
    results: dict[int, R] = {}
    pending = iter(enumerate(items))

    ended_early = False

    async def worker() -> None:
        nonlocal ended_early
        try:
            for index, item in pending:  # shared: each item goes to one worker
                if ended_early:
                    return
                results[index] = await fn(item)
        except asyncio.CancelledError:
            ended_early = True
            raise

    async with _task_group() as group:
        workers = [group.create_task(worker()) for _ in range(limit)]
    for it in workers:
        # A group takes a task that ended as cancelled for one that is done. Nobody cancelled these,
        # and the items of one that ended so have no results: raise, in place of leaving them out.
        it.result()
    return [results[index] for index in sorted(results)]


@asynccontextmanager
async def closing(iterator: AsyncIterator[Any]) -> AsyncGenerator[None]:
    """Close an iterator with the block, so that one left half-way leaves nothing behind."""
    try:
        yield
    finally:
        close = getattr(iterator, "aclose", None)  # generators have it, other iterators need not
        if close is not None:
            await close()


@overload
async def gather[A, B](first: Awaitable[A], second: Awaitable[B], /) -> tuple[A, B]: ...
@overload
async def gather[A, B, C](
    first: Awaitable[A], second: Awaitable[B], third: Awaitable[C], /
) -> tuple[A, B, C]: ...
@overload
async def gather(*awaitables: Awaitable[Any]) -> tuple[Any, ...]: ...
async def gather(*awaitables: Awaitable[Any]) -> tuple[Any, ...]:
    """Await a handful of different things concurrently and return their results in order.

    Raises:
        The first error; the others are cancelled and waited for.

    Cancellation: all are cancelled and waited for.
    """
    if not awaitables:
        return ()
    # The caller would only wait, so it does the first itself: a task fewer, which a small commit
    # notices. The others are started before, and begin in the same turn of the loop. Their tasks
    # are of the coroutines themselves: one that is cancelled before it began is closed then.
    async with _task_group() as group:
        others = [group.create_task(_coroutine_of(it)) for it in awaitables[1:]]
        first = await awaitables[0]
    return (first, *(it.result() for it in others))


async def first_of_two[R](
    call: Callable[[], Awaitable[R]], *, after_seconds: float, again: Callable[[], bool]
) -> tuple[R, bool]:
    """Await ``call()``; if it takes long, start it once more and return the first success.

    Args:
        call: what to do; it must not matter that it is done twice.
        after_seconds: when it takes long.
        again: asked then whether to start it once more.

    Returns:
        The result, and whether it is the second one's.

    Raises:
        What the first raised, if the second was not started or failed as well.

    Cancellation: both are cancelled. Neither runs when this returns, however it ends.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[R]] = [loop.create_task(_as_coroutine(call))]
    try:
        await asyncio.wait(tasks, timeout=after_seconds)
        if not tasks[0].done() and again():
            tasks.append(loop.create_task(_as_coroutine(call)))
        running = set(tasks)
        while running:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for number, task in enumerate(tasks):
                if task.done() and not task.cancelled() and task.exception() is None:
                    return task.result(), number > 0
        return tasks[0].result(), False
    finally:
        running = {task for task in tasks if not task.done()}
        for task in running:
            task.cancel()
        if running:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(running)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # mark as seen


class AnyLoopLock:
    """A lock for tasks of any event loops, as an ``async with`` block; those of asyncio are of one.

    Who waits looks every ten milliseconds, in no order, so it is for what is rarely contended.
    """

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.Lock()  # held over awaits, so only ever tried, never waited for

    async def __aenter__(self) -> None:
        """Wait for the lock, and hold it. Cancellation: no effect."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 -- perhaps another loop's
            await anyio.sleep(_POLL_SECONDS)

    async def __aexit__(self, *failure: object) -> None:
        """Release the lock."""
        self._lock.release()


class Background:
    """Work in the background for the length of an ``async with`` block.

    It belongs to the event loop that runs the block. Work offered from another loop is not
    started, so offer only work that may be left undone.
    """

    def __init__(self) -> None:
        """Begin nothing."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Accept work from now on."""
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Accept no more work, cancel what still runs, and wait for it."""
        self._loop = None
        running = set(self._tasks)
        for task in running:
            task.cancel()
        if running:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(running)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin work and return at once; what it raises is logged."""
        if self._loop is None or self._loop is not asyncio.get_running_loop():
            return
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.warning("work in the background failed", exc_info=failure)


class Held[T]:
    """A context manager that a task keeps entered until `close`, or until its event loop ends.

    Entering and leaving happen in that one task, so the task that opened it may end. Left to
    itself, an asynchronous generator is closed piece by piece in any order when its loop ends; a
    task is cancelled then, and leaves as it entered.
    """

    def __init__(
        self, manager: AbstractAsyncContextManager[T], abandoned: Callable[[], object]
    ) -> None:
        """Enter nothing yet; ``abandoned`` is called if the event loop ends before `close`."""
        self._manager = manager
        self._abandoned = abandoned
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> T:
        """Enter the context manager and return its value; once.

        Raises:
            What entering raised.

        Cancellation: entering is cancelled and waited for; nothing stays open.
        """
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[T] = loop.create_future()
        self._task = loop.create_task(self._hold(entered))
        _held.add(self._task)  # the loop itself refers to its tasks weakly
        self._task.add_done_callback(_held.discard)
        try:
            return await asyncio.shield(entered)
        except asyncio.CancelledError:
            self._leave.set()  # it may have been entered already
            self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])
            raise

    async def _hold(self, entered: asyncio.Future[T]) -> None:
        try:
            async with self._manager as value:
                entered.set_result(value)
                await self._leave.wait()
        except asyncio.CancelledError:
            if not entered.done():
                entered.cancel()
            elif not self._leave.is_set():
                self._abandoned()
            raise
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)
            entered.exception()  # mark as seen: the opener may have been cancelled

    async def close(self) -> None:
        """Leave the context manager and wait for it; afterwards, do nothing.

        Raises:
            What leaving raised, to the first caller.

        Cancellation: leaving is not cancelled.
        """
        self._leave.set()
        if self._task is not None and not self._task.done():
            await asyncio.shield(self._task)


_held: Final[set[asyncio.Task[None]]] = set()
"""The tasks of what is held open."""


class Outlasting:
    """Calls that continue when their waiters are cancelled, until `settle`.

    A server may carry out a request late, after its connection was closed half-way. Code that
    removes what the request wrote must wait for its end first.
    """

    def __init__(self) -> None:
        """Run nothing yet."""
        self._tasks: dict[asyncio.Task[Any], str] = {}

    async def run[T](self, name: str, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call.

        Raises:
            What the call raised.

        Cancellation: the call continues.
        """
        task = asyncio.get_running_loop().create_task(call)
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # mark as seen: nobody may wait for it any more

    async def settle(self, seconds: float) -> tuple[str, ...]:
        """Wait for the calls that still run; return the names of those that had to be cancelled.

        Args:
            seconds: the time to wait before they are cancelled.

        Cancellation: the calls continue.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        late = dict(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        return tuple(sorted(late.values()))


@dataclass(slots=True)
class _Flight[V]:
    task: asyncio.Task[V]
    waiters: int = 0


@dataclass(slots=True)
class SingleFlight[K, V]:
    """Joins concurrent loads of the same key into one, separately on each event loop."""

    eager: bool = False
    """Whether a load begins before others have a turn: one that need not wait joins nobody, and
    costs no turn of the loop. Its result has to be kept, or the next would load it again."""
    _flights: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[K, _Flight[V]]] = field(
        default_factory=WeakKeyDictionary[asyncio.AbstractEventLoop, "dict[K, _Flight[V]]"]
    )

    async def run(self, key: K, load: Callable[[], Awaitable[V]]) -> V:
        """Return ``load()``, or the result of the load of ``key`` that already runs here.

        Raises:
            What ``load`` raised, to every waiter.

        Cancellation: a waiter leaves alone; the load is cancelled, and waited for, when its
        last waiter left.
        """
        loop = asyncio.get_running_loop()
        flights = self._flights.setdefault(loop, {})
        flight = flights.get(key)
        if flight is None:
            task = (
                start(_as_coroutine(load)) if self.eager else loop.create_task(_as_coroutine(load))
            )
            if task.done():
                return task.result()
            flight = flights[key] = _Flight(task)
            task.add_done_callback(lambda done: _forget(flights, key, done))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                _forget(flights, key, flight.task)  # nobody may join a load that is ending
                flight.task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([flight.task])


def error_of_others(error: BaseException) -> str:
    """Return the text of an error that code of others raised, such as a check or a hook.

    No error of theirs ends the method that called them: not ``SystemExit``, nor the outcomes of
    pytest, nor the cancellation of a task that they waited for. Call it while the error is handled.

    Raises:
        error: the task itself was cancelled, or the process interrupted.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        stopped = task is None or task.cancelling() > 0
    else:
        stopped = isinstance(error, KeyboardInterrupt | GeneratorExit)
    if stopped:
        raise error
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 -- its __str__ is code of others, too
        return f"{type(error).__name__}, which cannot be shown"


def _coroutine_of(awaitable: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    if isinstance(awaitable, CoroutineType):
        return cast("Coroutine[Any, Any, Any]", awaitable)

    async def wait() -> Any:
        return await awaitable

    return wait()


async def _as_coroutine[V](load: Callable[[], Awaitable[V]]) -> V:
    return await load()


def _forget[K, V](flights: dict[K, _Flight[V]], key: K, task: asyncio.Task[V]) -> None:
    if key in flights and flights[key].task is task:
        del flights[key]
    if task.done() and not task.cancelled():
        task.exception()  # mark as seen: every waiter may have been cancelled

"""One event loop on a separate thread, for callers that block or run another loop.

The thread starts with the first call and serves the whole process; a forked child starts another.
`run` also works where an event loop runs, as in a notebook: it blocks that loop, as any blocking
call does. `run_async` blocks no loop. `deadline` limits the time of all calls in a block.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import anyio

from icechunk_async._runtime.blocking.tracebacks import Shortened, managed
from icechunk_async._runtime.concurrency import start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from contextlib import AbstractAsyncContextManager

__all__ = [
    "at_exit",
    "blocking",
    "bounded",
    "deadline",
    "has_deadline",
    "is_here",
    "run",
    "run_async",
    "run_later",
]

_EXIT_SECONDS: Final = 5.0
_FORK_SECONDS: Final = 5.0
"""How long at most a fork waits for the end of a step of the loop, and the loop for the fork."""
_WAIT_SECONDS: Final = 0.5
_until: ContextVar[float | None] = ContextVar("icechunk_async_deadline", default=None)


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Limit the time of all calls of the facade in the block, with reads and writes of stores.

    When the time is over, a call is cancelled, ends, and raises `TimeoutError`; later calls in
    the block raise it at once. Of nested deadlines the earliest counts. A deadline does not
    concern other threads and tasks, unless they run in a copy of the context.

    A commit that is cut off may have been published. Commit the same session again to find out.
    """
    until = time.monotonic() + seconds
    outer = _until.get()
    token = _until.set(until if outer is None else min(outer, until))
    try:
        yield
    finally:
        _until.reset(token)


def has_deadline() -> bool:
    """Return whether a deadline is in force here."""
    return _until.get() is not None


async def bounded[T](work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until the deadline in force, if there is one.

    Raises:
        TimeoutError: the deadline passed; the work was cancelled and has ended.
    """
    until = _until.get()
    if until is None:
        return await work
    remaining = until - time.monotonic()
    if remaining <= 0:
        work.close()  # else Python warns that it was never awaited
        raise TimeoutError("The deadline had passed before the call began; nothing was done.")
    # Of asyncio, since it says whether it was this one that expired; a timeout of the work is the
    # work's error.
    scope = asyncio.timeout(remaining)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise  # a timeout of the work itself
        raise TimeoutError(
            "The deadline passed and the call was cancelled. What it changes may have been "
            "changed; read to find out, or commit the same session again."
        ) from error


class _Outcome[T]:
    """The result or error of a call, for one thread that waits for it.

    Each blocking call makes one, and a future of `concurrent.futures` takes several times as long.
    """

    __slots__ = ("_error", "_is_done", "_result", "_running")

    def __init__(self) -> None:
        self._is_done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._running = threading.Lock()  # held until the call has ended
        self._running.acquire()

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: T) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True
        self._running.release()

    def wait(self) -> None:
        """Block until the call has ended.

        A signal that arrives just before a thread begins to wait for a lock does not wake it, and
        Ctrl-C would take effect only after the call. Hence each wait has a time limit.
        """
        while not (self._is_done or self._running.acquire(timeout=_WAIT_SECONDS)):
            pass

    def result(self) -> T:
        """Return the result of a call that has ended, or raise its error."""
        try:
            if self._error is not None:
                raise self._error
            result: T = self._result
            return result
        finally:
            del self  # frames of the work, which an error holds, lead to this one


class _Call[T]:
    """One coroutine, run on the loop and waited for elsewhere."""

    def __init__(
        self, work: Coroutine[Any, Any, T], outcome: _Outcome[T] | concurrent.futures.Future[T]
    ) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self.outcome = outcome

    def start(self) -> None:
        """Begin, on the loop.

        The first step is done at once: a task that is cancelled before it never runs its code, and
        its caller would wait for the outcome for ever.
        """
        self._task = start(self._do())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # interrupted before the loop was told to start it
            self._give_up()

    async def _do(self) -> None:
        try:
            result = await bounded(self._work)
        except BaseException as error:  # noqa: BLE001 -- even an exit is the caller's, not the loop's
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
        finally:
            del self  # frames of the work, which an error holds, lead to this one

    def _give_up(self) -> None:
        """Settle the outcome of work that was cancelled before it began."""
        if not self.outcome.done():
            self._work.close()
            self.outcome.set_exception(asyncio.CancelledError())


class _Portal:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last_work: set[asyncio.Task[None]] = set()
        # A daemon, because the interpreter joins other threads before it runs what was registered
        # with `atexit`, and only that ends this one.
        self._thread = threading.Thread(
            target=self._serve, name="icechunk-async-portal", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        if self.is_here:
            work.close()
            raise RuntimeError(
                "A blocking call was made on the thread that has to carry it out. Await the "
                "asynchronous method instead."
            )
        outcome: _Outcome[T] = _Outcome()
        call = _Call(work, outcome)
        try:
            self._loop.call_soon_threadsafe(call.start)
            outcome.wait()
        except BaseException:  # Ctrl-C: the work must not continue unseen
            if not outcome.done():
                self._loop.call_soon_threadsafe(call.cancel)
                outcome.wait()
            raise
        return outcome.result()

    async def run_async[T](self, work: Coroutine[Any, Any, T]) -> T:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        call = _Call(work, outcome)
        settled = asyncio.wrap_future(outcome)
        self._loop.call_soon_threadsafe(call.start)
        try:
            # Shielded, or a cancellation here would mark the outcome as cancelled while the work
            # continues on its loop.
            return await asyncio.shield(settled)
        except asyncio.CancelledError:
            if not settled.done():
                self._loop.call_soon_threadsafe(call.cancel)
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([settled])
            settled.exception()  # mark as seen
            raise

    def hold(self) -> threading.Event | None:
        """Let the loop stand still between two steps, until the event that is returned is set."""
        if self.is_here:
            return None
        reached, released = threading.Event(), threading.Event()

        def stand() -> None:
            reached.set()
            released.wait(_FORK_SECONDS)

        try:
            self._loop.call_soon_threadsafe(stand)
        except RuntimeError:  # it was closed just now
            return None
        try:
            reached.wait(_FORK_SECONDS)
        except BaseException:  # an interrupt: nobody else would release the loop
            released.set()
            raise
        return released

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run without waiting, from any thread; the exit of the interpreter waits for it."""
        self._loop.call_soon_threadsafe(self._start_last_work, work)

    def _start_last_work(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._last_work.add(task)
        task.add_done_callback(self._last_work.discard)

    def stop(self) -> None:
        """End the thread: wait for closing, and cancel all other work."""
        if self._thread.is_alive():
            self.run(self._wind_up())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_EXIT_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    async def _wind_up(self) -> None:
        if self._last_work:
            await asyncio.wait(self._last_work, timeout=_EXIT_SECONDS)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_EXIT_SECONDS)
        for finish in _at_exit:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await finish()
        await self._loop.shutdown_asyncgens()


_at_exit: Final[list[Callable[[], Awaitable[None]]]] = []
_portal: _Portal | None = None
_starting = threading.Lock()
_held = threading.local()
"""Of each thread that forks: what releases the loop again."""
_ended = False


def _current() -> _Portal:
    global _portal  # noqa: PLW0603 -- one per process, by design
    with _starting:
        if _ended:
            raise RuntimeError(
                "The interpreter is exiting, and the thread of blocking calls has "
                "ended. Make this call before the program ends."
            )
        if _portal is None:
            _portal = _Portal()
            atexit.register(_stop)
        return _portal


def _stop() -> None:
    global _portal, _ended
    with _starting:
        portal, _portal, _ended = _portal, None, True
    if portal is not None:
        portal.stop()


def _hold_the_loop() -> None:
    """Wait until no step of the loop is under way.

    A child never gets a lock that the loop's thread holds in the moment of the fork, for example
    that of a module which it imports.
    """
    portal = _portal
    _held.release = None  # also if an error ends the wait, and not the fork
    if portal is not None:
        _held.release = portal.hold()


def _continue_in_parent() -> None:
    if (release := _held.release) is not None:
        release.set()


def _forget_in_child() -> None:
    """Forget the loop of the parent, whose thread does not exist here."""
    global _portal, _starting
    if _portal is not None:
        atexit.unregister(_stop)
    # A new lock: another thread of the parent may have held the old one at that moment.
    _portal, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_the_loop,
        after_in_parent=_continue_in_parent,
        after_in_child=_forget_in_child,
    )


def at_exit(finish: Callable[[], Awaitable[None]]) -> None:
    """Register work for the end of the process, after all calls were cancelled."""
    _at_exit.append(finish)


def is_here() -> bool:
    """Return whether this is the portal's thread, which must not wait for anybody's blocking call.

    Finalizers ask: they may run on any thread.
    """
    portal = _portal
    return portal is not None and portal.is_here


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the portal's loop, block until it is done, and return its result.

    Raises:
        TimeoutError: the deadline in force passed; the work was cancelled.
        Any error that the coroutine raises, as `tracebacks` shows it.

    An interrupt (Ctrl-C) cancels the coroutine and waits until it has cleaned up; a second one
    does not wait. Cost: a few thread switches.
    """
    try:
        portal = _current()
    except BaseException:
        work.close()
        raise
    with Shortened():
        return portal.run(work)


async def run_async[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the portal's loop, and await its result on any other loop.

    Raises: as `run`.

    Cancellation: the coroutine is cancelled, and waited for until it has cleaned up.
    """
    try:
        portal = _current()
    except BaseException:
        work.close()
        raise
    with Shortened():
        return await portal.run_async(work)


def run_later(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine without waiting for it; for finalizers, which may run on any thread.

    Nothing runs if the process has no portal.
    """
    portal = _portal
    if portal is None:
        work.close()
    else:
        portal.run_later(work)


@managed
def blocking[T](manager: AbstractAsyncContextManager[T]) -> Generator[T]:
    """Enter and leave an asynchronous context manager on the portal's loop; blocks."""
    entered = run(_enter(manager))
    try:
        yield entered
    except BaseException as error:
        if not run(_leave(manager, error)):
            raise
    else:
        run(_leave(manager, None))


async def _enter[T](manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave[T](manager: AbstractAsyncContextManager[T], error: BaseException | None) -> bool:
    if error is None:
        return bool(await manager.__aexit__(None, None, None))
    return bool(await manager.__aexit__(type(error), error, error.__traceback__))

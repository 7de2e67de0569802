"""One event loop on a thread of its own, for callers that block.

The thread starts with the first call and serves the whole process. A forked child starts its
own. A call works inside a running event loop too (it blocks that caller and its loop, as any
blocking call does), so notebooks need nothing special.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

__all__ = ["iterate", "run", "run_later"]

_EXIT_SECONDS: Final = 5.0


class _Call[T]:
    """One coroutine, run on the loop and waited for on another thread."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._work)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # interrupted before the loop was told to start it
            self._work.close()
            self.outcome.set_exception(asyncio.CancelledError())

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class _Portal:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last_work: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._serve, name="icechunk-async-portal", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run[T](self, work: Coroutine[Any, Any, T], timeout_seconds: float | None) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "A blocking call was made on the thread that would have to answer it. Await the "
                "asynchronous method instead."
            )
        call = _Call(work)
        try:
            self._loop.call_soon_threadsafe(call.start, self._loop)
            return call.outcome.result(timeout_seconds)
        except BaseException:
            # A timeout, Ctrl-C, or the work's own error: in no case does it go on unseen.
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.cancel)
                concurrent.futures.wait([call.outcome])
            raise

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run without waiting, from any thread; the interpreter's exit waits for it."""
        self._loop.call_soon_threadsafe(self._start_last_work, work)

    def _start_last_work(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._last_work.add(task)
        task.add_done_callback(self._last_work.discard)

    def stop(self) -> None:
        """End the thread: closing is waited for, and what else runs is cancelled."""
        if self._thread.is_alive():
            self.run(self._wind_up(), None)
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
        await self._loop.shutdown_asyncgens()


_portal: _Portal | None = None
_starting = threading.Lock()


def _current() -> _Portal:
    global _portal  # noqa: PLW0603 -- one per process, by design
    with _starting:
        if _portal is None:
            _portal = _Portal()
            atexit.register(_stop)
        return _portal


def _stop() -> None:
    global _portal
    portal, _portal = _portal, None
    if portal is not None:
        portal.stop()


def _forget_in_child() -> None:
    """Leave the parent's loop alone: its thread does not exist here."""
    global _portal, _starting
    if _portal is not None:
        atexit.unregister(_stop)
    _portal, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def run[T](work: Coroutine[Any, Any, T], *, timeout_seconds: float | None = None) -> T:
    """Run a coroutine on the portal's loop and answer its result.

    Raises:
        TimeoutError: it took longer than ``timeout_seconds``; it was cancelled.
        Whatever the coroutine raised.

    An interrupt (Ctrl-C) cancels the coroutine. Cost: a few thread switches.
    """
    return _current().run(work, timeout_seconds)


def run_later(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine without waiting for it; for finalizers, which may run on any thread.

    Where the process has no portal, or none any more, nothing is run.
    """
    portal = _portal
    if portal is None:
        work.close()
    else:
        portal.run_later(work)


def iterate[T](items: AsyncIterator[T]) -> Iterator[T]:
    """Iterate over an asynchronous iterator, one step at a time."""

    async def step() -> tuple[bool, T | None]:
        try:
            return True, await anext(items)
        except StopAsyncIteration:
            return False, None

    while True:
        more, item = run(step())
        if not more:
            return
        yield item  # type: ignore[misc]

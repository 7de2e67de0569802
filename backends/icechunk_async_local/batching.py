"""Blocking calls on a few threads, where the hop to a thread costs more than the call.

Calls made in one turn of an event loop travel together: the first schedules a flush for the end of
the turn, one job on a thread does many of them, and their results return in one callback. A thread
whose calls turn out to be slow asks for a second thread to share them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakKeyDictionary

from icechunk_async.errors import StorageClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from icechunk_async.storage import Data

__all__ = ["Helpers", "Lane", "Loan", "TakenBackError"]

_SLOW_CALL_SECONDS: Final = 0.0005
"""Calls that take longer wait for a device, so more threads finish sooner. Shorter ones only
compete for the interpreter: 64 small reads of cached files take twice as long on two threads as on
one."""


class _Call:
    __slots__ = ("error", "future", "result", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            self.error = error


class Lane:
    """A few threads and a queue of calls; usable from any number of event loops."""

    patience_seconds: ClassVar[float] = 0.003
    """A thread that has worked for this long hands over its results so far. Tests change it."""

    def __init__(self, name: str, threads: int) -> None:
        """Start nothing; threads start with the first calls."""
        self.executor: Final = ThreadPoolExecutor(threads, f"icechunk-{name}")
        # Loops append, threads take from the other end: each is one step of the interpreter, so
        # that neither needs a lock.
        self._waiting: deque[_Call] = deque()
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Call]]
        # Weak, because event loops come and go while the storage stays open.
        self._turns = WeakKeyDictionary()
        self._turns_lock = threading.Lock()  # held over no await
        self._closed = False
        self.used = False
        """Whether any call was made; if not, there is no thread to wait for."""

    async def run[R](self, work: Callable[[], R]) -> R:
        """Return ``work()``, called on a thread together with others of this turn.

        Raises:
            StorageClosedError: the lane was closed before the call began.

        Cancellation: ``work`` is not started, or runs to its end and its result is dropped.
        """
        result: R = await self._begin([work])[0].future
        return result

    async def run_each[R](self, works: Sequence[Callable[[], R]]) -> list[R]:
        """Call each of ``works`` as `run` does; return their results in order.

        Raises: as `run`, and the first error of any, when all have ended.

        Cancellation: those that did not begin are not started; results are dropped.
        """
        if not works:
            return []
        futures = [call.future for call in self._begin(works)]
        try:
            await asyncio.wait(futures)
        finally:
            for future in futures:
                future.cancel()  # if this wait was cancelled; else it has a result
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _begin(self, works: Iterable[Callable[[], Any]]) -> list[_Call]:
        """Let calls travel with others of this turn."""
        self.used = True
        loop = asyncio.get_running_loop()
        calls = [_Call(work, loop.create_future()) for work in works]
        with self._turns_lock:
            turn = self._turns.setdefault(loop, [])
        is_first = not turn
        turn += calls  # only this loop's thread uses the list
        if is_first:
            # Runs after every task that is ready now, so that their calls travel with these.
            loop.call_soon(self._flush, turn)
        return calls

    async def hop[R](self, work: Callable[[], R]) -> R:
        """Return ``work()``, called on a thread by itself: for work that may take long.

        Raises:
            StorageClosedError: the lane was closed before.

        Cancellation: ``work`` is not started, or runs to its end and its result is dropped.
        """
        from aiofiles.os import (  # type: ignore[import-untyped, unused-ignore] # noqa: PLC0415 -- slow
            wrap,
        )

        self.used = True
        try:
            result: R = await wrap(work)(executor=self.executor)
        except RuntimeError as error:
            if self._closed:
                raise _closed() from error
            raise
        return result

    async def run_alone[R](self, work: Callable[[], R]) -> R:
        """Return ``work()`` as `hop` does; for a write that the loop waits for with each commit.

        Raises:
            StorageClosedError: the lane was closed before.

        Cancellation: ``work`` is not started, or runs to its end and its result is dropped.
        """
        self.used = True
        call = _Call(work, asyncio.get_running_loop().create_future())
        try:
            # At once, not at the end of the turn: a conditional write is usually alone in its turn,
            # and syncs for longer than a queue of small calls should wait.
            self.executor.submit(_work_alone, call)
        except RuntimeError as error:
            if self._closed:
                raise _closed() from error
            raise
        result: R = await call.future
        return result

    def close(self) -> None:
        """Wait for running and waiting calls; no others start. May block."""
        self._closed = True
        self.executor.shutdown(wait=True)

    def _flush(self, turn: list[_Call]) -> None:
        calls = turn.copy()
        turn.clear()
        # A thread that is still at work may take these before the new job begins, which then finds
        # nothing to do.
        self._waiting.extend(calls)
        try:
            self.executor.submit(self._work)
        except RuntimeError as error:  # shut down
            self._refuse(calls, error)

    def _refuse(self, calls: list[_Call], cause: RuntimeError) -> None:
        refused: list[_Call] = []
        for call in calls:
            with suppress(ValueError):  # a thread that was still at work took it
                self._waiting.remove(call)
                call.error = _closed()
                call.error.__cause__ = cause
                refused.append(call)
        _settle(refused)

    def _work(self) -> None:
        """Run waiting calls until the queue is empty; runs on a thread."""
        done: list[_Call] = []
        began = time.monotonic()
        alone = True
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                break
            # Read on another thread than the loop's: a cancellation that comes now is noticed when
            # the result is delivered.
            if call.future.cancelled():
                continue
            call.do()
            done.append(call)
            elapsed = time.monotonic() - began
            if elapsed > self.patience_seconds:
                # On average over what was done, since one slow call may have waited for the
                # interpreter only.
                if alone and self._waiting and elapsed > _SLOW_CALL_SECONDS * len(done):
                    alone = False
                    with suppress(RuntimeError):  # shut down: this thread does them all
                        self.executor.submit(self._work)
                _hand_over(done)
                done = []
                began = time.monotonic()
        _hand_over(done)


def _work_alone(call: _Call) -> None:
    """Run one call; runs on a thread."""
    if not call.future.cancelled():
        call.do()
        _hand_over([call])


def _hand_over(done: list[_Call]) -> None:
    """Deliver results to their loops, with one callback for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
    for call in done:
        by_loop.setdefault(call.future.get_loop(), []).append(call)
    for loop, calls in by_loop.items():
        with suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(_settle, calls)


def _settle(calls: list[_Call]) -> None:
    for call in calls:
        if call.future.done():
            continue
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)


def _closed() -> StorageClosedError:
    return StorageClosedError(
        "The storage was closed while it was in use. Wait for its operations before the "
        "'async with' block ends."
    )


_LARGE_BYTES: Final = 1 << 16


def _is_array(owner: object) -> bool:
    """Return whether memory belongs to an array; nothing does as long as NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(owner, numpy.ndarray)


class Helpers:
    """Threads that help with work which the caller waits for; they start when they are needed.

    There are no futures: a commit lets all of its syncs be waited for at once, and a future
    for each would take as long as a sync. Threads do not keep the interpreter from its exit,
    which waits for those that they help.
    """

    def __init__(self, name: str, most: int) -> None:
        """Start nothing; at most ``most`` threads help."""
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def share(self, work: Callable[[], None], count: int) -> None:
        """Call ``work`` here and on up to ``count`` threads, and wait until all calls returned.

        Raises:
            What ``work`` raised here. What it raised on a thread only if it did not here.
        """
        count = self._start(min(count, self._most))
        failures: list[BaseException] = []
        left = count
        lock, ended = threading.Lock(), threading.Lock()

        def help_once() -> None:
            nonlocal left
            try:
                work()
            except BaseException as error:  # noqa: BLE001 -- raised where it is waited for
                failures.append(error)
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                ended.release()

        if count:
            ended.acquire()
        for _ in range(count):
            self._calls.put(help_once)
        try:
            work()
        finally:
            with ended:
                pass
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads, and wait for them. Nothing is shared any more."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join()

    def _start(self, count: int) -> int:
        """Start threads that are missing; return how many there are of those wanted."""
        with self._lock, suppress(RuntimeError):  # the interpreter exits and begins no threads
            while len(self._threads) < count:
                name = f"icechunk-{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return min(count, len(self._threads))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds is not to live until the next one


class TakenBackError(Exception):
    """The caller was cancelled and owns its buffer again; the result of the write is dropped."""


class Loan:
    """The buffer of a write, borrowed from a caller that awaits it."""

    __slots__ = ("_is_lent", "_taken_back", "data")

    def __init__(self, data: Data) -> None:
        """Borrow ``data`` if that is safe and worthwhile, else copy it.

        Only arrays are borrowed: while a view of a ``bytearray`` exists, its owner cannot resize
        it.
        """
        view = memoryview(data)
        is_fixed = type(view.obj) is bytes
        self._is_lent = view.nbytes >= _LARGE_BYTES and _is_array(view.obj)
        self._taken_back = False
        self.data = data if self._is_lent or is_fixed else bytes(data)

    def end(self) -> None:
        """End the loan; writes of copies and of immutable bytes may continue."""
        self._taken_back = self._is_lent

    def check(self) -> None:
        """Raise an error unless all bytes were read during the loan.

        Raises:
            TakenBackError: some bytes may have changed.
        """
        # `end` is called on the loop before the caller gets its buffer back, and this after the
        # last byte was read: if the flag is not set here, no byte was read too late.
        if self._taken_back:
            raise TakenBackError

"""The thread behind the blocking facade."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from icechunk_async._runtime.blocking import portal
from tests.helpers import counted_calls


async def _answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


class _Forever:
    """Runs until it is cancelled, and then takes a moment to clean up."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.cleaned_up = False

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.cleaned_up = True


def test_results_and_errors_come_back() -> None:
    """As from a plain call."""
    assert portal.run(_answer(42)) == 42

    async def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        portal.run(fail())


def test_a_call_takes_few_steps_on_the_thread_that_waits() -> None:
    """Each call of the facade is one, and a future of `concurrent.futures` would take longer."""
    portal.run(asyncio.sleep(0))
    with counted_calls() as calls:
        portal.run(asyncio.sleep(0))
    assert not {"Future.__init__", "Condition.__init__", "Condition.wait"} & set(calls)


def test_a_call_that_need_not_wait_takes_one_turn_of_the_loop() -> None:
    """It ends where it begins, and does not queue behind others once more."""
    portal.run(asyncio.sleep(0))
    order: list[str] = []

    async def work() -> None:
        order.append("work")

    async def queue_both() -> None:
        call.start()
        order.append("next")
        await asyncio.sleep(0)

    call = portal._Call(work(), portal._Outcome[None]())
    portal.run(queue_both())
    assert order == ["work", "next"]
    assert call.outcome.done()


def test_an_interrupt_cancels_the_call() -> None:
    """Ctrl-C reaches the coroutine, and the caller."""
    forever = _Forever()

    def interrupt() -> None:
        forever.began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        portal.run(forever.run())
    assert forever.cleaned_up


def test_an_interrupt_that_wakes_nobody_is_heard() -> None:
    """As one that comes just before the caller begins to wait: here another thread takes it."""
    forever = _Forever()

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        forever.began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            portal.run(forever.run())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert forever.cleaned_up


def test_a_timeout_of_the_work_is_told_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work may take longer than the caller waits at a time, and may end with a timeout itself."""
    monkeypatch.setattr(portal, "_WAIT_SECONDS", 0.001)

    async def late() -> None:
        await asyncio.sleep(0.02)
        raise TimeoutError("too late")

    with pytest.raises(TimeoutError, match="too late"):
        portal.run(late())


@pytest.mark.blocks_the_loop
async def test_a_call_works_inside_a_running_loop() -> None:
    """As in a notebook; it blocks that loop, and answers."""
    assert portal.run(_answer(7)) == 7


def test_a_call_on_the_portal_itself_is_refused() -> None:
    """It would wait for itself for ever."""

    async def nested() -> int:
        return portal.run(_answer(1))

    with pytest.raises(RuntimeError, match="Await the asynchronous method"):
        portal.run(nested())


def test_calls_from_many_threads_run_at_the_same_time() -> None:
    """One does not wait for another."""
    barrier = asyncio.Barrier(8)

    async def meet() -> int:
        return await barrier.wait()

    places: list[int] = []
    threads = [threading.Thread(target=lambda: places.append(portal.run(meet()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(places) == list(range(8))


def test_work_runs_in_the_context_of_its_caller() -> None:
    """So that spans join the caller's, and deadlines reach the loop."""
    number: ContextVar[int] = ContextVar("number", default=0)

    async def look() -> int:
        return number.get()

    number.set(7)
    assert portal.run(look()) == 7


def test_work_that_exits_ends_the_caller_and_not_the_loop() -> None:
    """A solver or a callback may call ``sys.exit``."""

    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        portal.run(leave())
    assert caught.value.code == 3
    assert portal.run(_answer(1)) == 1


async def test_awaiting_from_another_loop_blocks_nobody() -> None:
    """Other tasks of that loop keep running."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def wait_for_turns() -> str:
        while turns <= 3:  # noqa: ASYNC110 -- of another loop
            await asyncio.sleep(0.001)
        return threading.current_thread().name

    other = asyncio.create_task(turn())
    assert await portal.run_async(wait_for_turns()) == "icechunk-async-portal"
    other.cancel()


async def test_errors_reach_whoever_awaits() -> None:
    """As themselves."""

    async def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        await portal.run_async(fail())


async def test_a_cancelled_await_cancels_the_work_and_waits_for_it() -> None:
    """No work continues behind the caller's back."""
    forever = _Forever()
    task = asyncio.create_task(portal.run_async(forever.run()))
    await asyncio.to_thread(forever.began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert forever.cleaned_up


async def test_the_portal_itself_may_await() -> None:
    """Code that runs there, such as a solver, may use the awaited spellings."""

    async def outer() -> int:
        return await portal.run_async(_answer(5))

    assert await portal.run_async(outer()) == 5


def test_loops_that_come_and_go_share_the_portal() -> None:
    """As scripts do that call ``asyncio.run`` again and again."""
    for number in range(3):
        assert asyncio.run(portal.run_async(_answer(number))) == number


def test_a_fork_whose_wait_is_interrupted_leaves_the_portal_working(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python reports the error and forks; what runs after the fork finds nothing to let go."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def fork_from_a_new_thread() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(portal._Portal, "hold", interrupted)
            with pytest.raises(KeyboardInterrupt):
                portal._hold_the_loop()
        portal._continue_in_parent()

    assert portal.run(_answer(1)) == 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fork_from_a_new_thread).result()

"""The thread behind the blocking facade."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest

from icechunk_async.sync import portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


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


def test_a_call_that_times_out_is_cancelled_and_waited_for() -> None:
    """Nothing goes on behind the caller's back."""
    forever = _Forever()
    with pytest.raises(TimeoutError):
        portal.run(forever.run(), timeout_seconds=0.05)
    assert forever.cleaned_up


def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    """It is not mistaken for ours."""

    async def fail() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        portal.run(fail(), timeout_seconds=5)


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
    threads = [
        threading.Thread(target=lambda: places.append(portal.run(meet(), timeout_seconds=10)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(places) == list(range(8))


def test_iteration_goes_step_by_step() -> None:
    """No further than it was asked for."""
    made: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    iterator = portal.iterate(numbers())
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert made == [0, 1, 2]
    assert sum(1 for _ in portal.iterate(numbers())) == 1000


def _script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(text)],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


def test_a_forked_child_starts_its_own() -> None:
    """Also while the parent's thread is at work."""
    done = _script(
        """
        import asyncio, os, threading
        from icechunk_async.sync import portal

        async def answer():
            await asyncio.sleep(0.01)
            return 42

        async def busy():
            await asyncio.sleep(2)

        assert portal.run(answer()) == 42
        threading.Thread(target=lambda: portal.run(busy())).start()
        child = os.fork()
        if child == 0:
            os._exit(0 if portal.run(answer()) == 42 else 1)
        _, status = os.waitpid(child, 0)
        print("child:", os.waitstatus_to_exitcode(status))
        """
    )
    assert done.stdout == "child: 0\n", done.stderr


@pytest.mark.parametrize("place", ["memory://exit", "here"])
@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)"])
def test_the_interpreter_exits_cleanly_and_quickly(place: str, end: str, tmp_path: Path) -> None:
    """With repositories open and calls made; nothing is printed."""
    begin = time.perf_counter()
    url = place if "://" in place else (tmp_path / place).as_uri()
    done = _script(
        f"""
        from icechunk_async.sync import Repository
        repository = Repository.create({url!r})
        session = repository.writable_session("main")
        print(session.branch)
        {end}
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("main\n", "", 3 if end else 0)
    assert time.perf_counter() - begin < 30

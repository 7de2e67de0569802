"""The lock that no thread queues for."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime import locks as _brief_lock
from icechunk_async._runtime.locks import BriefLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

STEPS = 2000


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_one_thread_at_a_time_is_inside() -> None:
    """Also where they change places in the middle."""
    lock, inside, most = BriefLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(STEPS):
            with lock, lock:  # one that has it may take it again
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_an_error_inside_opens_it() -> None:
    """For other threads, too."""
    lock = BriefLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered.is_set()


def test_who_finds_it_taken_looks_again_and_never_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that queued would get the lock while it waits for the interpreter."""
    asked = list[dict[str, object]]()

    class Noting(BriefLock):
        def acquire(self, **how: Any) -> bool:
            asked.append(how)
            taken: bool = super().acquire(**how)
            return taken

    lock, pauses = Noting(), list[float]()
    taken, give_back = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            give_back.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            give_back.set()
            holder.join()

    monkeypatch.setattr(_brief_lock, "sleep", pause)
    with lock:
        assert len(pauses) == 20
    assert asked == [{"blocking": False}] * 23
    assert pauses == sorted(pauses)
    assert max(pauses) <= 0.001


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers of signals")
def test_an_interrupt_at_any_moment_leaves_it_open() -> None:
    """Else other threads would wait for ever, and this one would not notice."""
    lock, interrupts = BriefLock(), 0

    class Interrupted(Exception):  # noqa: N818
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        while interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4)
                while True:
                    with lock:
                        pass
            except Interrupted:
                interrupts += 1
                assert lock._recursion_count() == 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

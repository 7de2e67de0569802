"""A lock that threads hold for microseconds, and that none of them queues for."""

from __future__ import annotations

import threading
from time import sleep
from typing import Final

__all__ = ["BriefLock"]

_FIRST_PAUSE_SECONDS: Final = 0.00005
_LONGEST_PAUSE_SECONDS: Final = 0.001


class BriefLock:
    """Guards steps of Python that wait for nothing; reentrant, and fair only by chance.

    A thread that queues for a lock of ``threading`` gets it while another still runs Python, and
    has to wait for the interpreter with the lock in its hands. Then the other one queues in turn:
    once two threads have met, they change places at every step, which takes a hundred times as
    long as the step. Here who finds the lock taken looks again a little later, so only a thread
    that runs has it.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        """Begin open."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Take the lock, for this thread."""
        if not self._lock.acquire(blocking=False):
            self._wait()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._lock.release()

    def _wait(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._lock.acquire(blocking=False):
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

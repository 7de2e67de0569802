"""A lock that threads hold for microseconds, and that none of them queues for."""

from __future__ import annotations

import threading
from time import sleep  # by its name, so that tools which watch event loops take this for a lock
from typing import Any, Final

__all__ = ["BriefLock"]

_FIRST_PAUSE_SECONDS: Final = 0.00005
_LONGEST_PAUSE_SECONDS: Final = 0.001


# Types of the standard library say nothing of its class. Its methods are not written in Python, so
# no interrupt comes between giving the lock back and having given it back.
_RLock: Final[Any] = type(threading.RLock())


class BriefLock(_RLock):  # type: ignore[misc]
    """Guards short steps of Python, for use by ``with``; reentrant, and fair only by chance.

    A thread that queues for a lock of ``threading`` gets it while another still runs Python, and
    has to wait for the interpreter with the lock in its hands. Then the other one queues in turn:
    once two threads have met, they change places at every step, which takes a hundred times as
    long as the step. Here who finds the lock taken looks again a little later, so only a thread
    that runs has it.
    """

    __slots__ = ()

    def __enter__(self) -> bool:
        """Take the lock, for this thread; an interrupt leaves it as it was."""
        held = self._recursion_count()
        try:
            if not self.acquire(blocking=False):
                self._wait()
        except BaseException:  # perhaps just after it was taken, and nobody else would give it back
            if self._recursion_count() > held:
                self.release()
            raise
        return True

    def _wait(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self.acquire(blocking=False):
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

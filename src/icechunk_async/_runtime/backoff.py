"""How long to wait before trying again after somebody else was first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import anyio

from icechunk_async._runtime import clock

__all__ = ["Backoff", "Turns"]

_LOSSES_PER_TRY: Final = 4
"""Each time that so many more races were lost, pauses are up to one try longer."""
_LONGEST_TRIES: Final = 2
_SPARED: Final = 0.2
"""The part of a try that asks where the branch is."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with full jitter, so that losers of one race do not meet again."""

    max_tries: int = 100
    initial_ms: int = 50
    max_ms: int = 30_000
    immediate: int = 5
    """Tries that follow without waiting longer than ``initial_ms``."""

    async def wait(self, attempt: int) -> None:
        """Wait after the ``attempt``-th failure, counted from 1.

        Cancellation: no effect.
        """
        steps = max(0, attempt - self.immediate)
        limit_ms = min(self.max_ms, self.initial_ms * 2.0 ** min(steps, 30))
        await anyio.sleep(clock.uniform() * limit_ms / 1000)


class Turns:
    """Pauses of a writer that loses races for the end of a branch.

    They are in proportion to how long its last try took, which holds for a disk and for a service
    far away alike. While few compete, another try at once costs nobody anything. The more races
    were lost, the more writers there must be; each landing makes all those fail that try at that
    moment, so that pauses save work and delay nothing: others land meanwhile. They
    are bounded, so that nobody is left behind by those that came later.
    """

    def __init__(self) -> None:
        """Begin the first try, with no race lost."""
        self._losses = 0
        self._began = anyio.current_time()

    async def wait(self) -> bool:
        """Wait after a race was lost, and begin the next try; answer whether there was a pause.

        Cancellation: no effect.
        """
        spread = min(self._losses / _LOSSES_PER_TRY, _LONGEST_TRIES)
        self._losses += 1
        took = anyio.current_time() - self._began
        # A try that follows at once spares itself the question where the branch is now.
        pause = took * (clock.uniform() * spread - _SPARED)
        if pause > 0:
            await anyio.sleep(pause)
        self._began = anyio.current_time()
        return pause > 0

"""Pauses before another try, after another writer was first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import anyio

from icechunk_async._runtime import clock

__all__ = ["Backoff", "Turns"]

_LOSSES_PER_TRY: Final = 4
"""For each this many lost races, pauses become up to one try longer."""
_LONGEST_TRIES: Final = 2
_SPARED: Final = 0.2
"""The share of a try that is spent on asking where the branch is."""


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
    """Pauses of a writer that loses races for the tip of a branch.

    Pauses are proportional to the length of the last try, so they suit a disk and a remote service.
    While few writers compete, trying again at once costs the others nothing. Every lost race is a
    sign of more writers: each commit that lands makes all concurrent tries fail, so pauses save
    work and delay nothing. They are bounded, so that a writer does not fall behind later ones.
    """

    def __init__(self) -> None:
        """Begin the first try, with no race lost."""
        self._losses = 0
        self._began = anyio.current_time()

    async def wait(self) -> bool:
        """Wait after a race was lost, and begin the next try; return whether there was a pause.

        Cancellation: no effect.
        """
        spread = min(self._losses / _LOSSES_PER_TRY, _LONGEST_TRIES)
        self._losses += 1
        took = anyio.current_time() - self._began
        # A try that follows at once need not ask where the branch is now.
        pause = took * (clock.uniform() * spread - _SPARED)
        if pause > 0:
            await anyio.sleep(pause)
        self._began = anyio.current_time()
        return pause > 0

"""How long to wait before trying again after somebody else was first."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from icechunk_async import _clock

__all__ = ["Backoff"]


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
        await anyio.sleep(_clock.uniform() * limit_ms / 1000)

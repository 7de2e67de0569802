"""A storage that delays and counts its requests."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import anyio

from icechunk_async.testing.wrapping import WrappedStorage

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["LatencyStorage"]


class LatencyStorage(WrappedStorage):
    """Delays each request by a fixed time, or by a random time in a range.

    On a `VirtualTimeLoop` with ``seconds=1`` the time that an operation takes is the number of
    requests that had to follow one another.
    """

    def __init__(
        self, storage: Storage, *, seconds: float, jitter_seconds: float = 0.0, seed: int = 0
    ) -> None:
        """Delay by ``seconds`` plus up to ``jitter_seconds`` more, the same for each seed."""
        super().__init__(storage)
        self.seconds = seconds
        self._jitter = jitter_seconds
        self._random = random.Random(seed)  # noqa: S311 -- delays, not secrets
        self.requests: Counter[str] = Counter()
        """The number of requests of each operation."""
        self.log: list[tuple[str, str]] = []
        """Operations and keys in the order of the requests."""

    async def before(self, operation: str, key: str) -> None:
        """Count, and wait."""
        self.requests[operation] += 1
        self.log.append((operation, key))
        await anyio.sleep(self.seconds + self._jitter * self._random.random())

    def forget(self) -> None:
        """Count from zero again."""
        self.requests.clear()
        self.log.clear()

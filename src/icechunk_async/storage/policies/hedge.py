"""Hedged reads: a second request when the first takes unusually long.

A few requests to a large service take many times longer than the rest, for reasons that a second
request does not share. A job that reads a thousand objects at once waits for the slowest of them,
so cutting that tail shortens the whole job.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import first_of_two
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import ByteRange, SuffixRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.storage.protocol import RangeRequest, Retrieved, Storage

__all__ = ["HedgePolicy", "Hedged"]

# Small reads measure the latency of a service, large ones its bandwidth: one threshold for both
# would hedge every large read.
_SMALL_BYTES: Final = 1 << 18
_REMEMBERED: Final = 256
_EVERY: Final = 16
_MAX_CREDIT: Final = 10.0
"""Second requests that a calm period may save up. Without a bound, a service that becomes slow
after a long calm would receive thousands of extra requests at the worst moment."""


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """When a slow read is sent a second time, and how often at most.

    Pass it as ``Repository.open(..., hedge=HedgePolicy())``.
    """

    quantile: float = 0.95
    """Hedge a read that takes longer than this fraction of the recent reads of similar size."""
    max_share: float = 0.05
    """Second requests per read, at most. 0 disables hedging."""
    min_reads: int = 32
    """Reads to measure before the first one is hedged."""
    after_seconds: float | None = None
    """Hedge after this fixed delay instead of a measured one."""

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ValueError: a fraction, a count or the delay is out of range.
        """
        if not (0 < self.quantile < 1 and 0 <= self.max_share <= 1 and self.min_reads >= 1):
            raise ValueError(
                "A hedge policy needs 0 < quantile < 1, 0 <= max_share <= 1 and min_reads >= 1, "
                f"not {self}."
            )
        if self.after_seconds is not None and not self.after_seconds >= 0:
            raise ValueError(f"after_seconds must be at least 0 or None, not {self.after_seconds}.")


class _Latencies:
    """Durations of the recent reads of one size class."""

    def __init__(self, policy: HedgePolicy) -> None:
        self._policy = policy
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._since_update = 0
        self.patience_seconds: float | None = policy.after_seconds
        """Duration after which a read counts as slow; None until enough reads were measured."""

    def add(self, seconds: float) -> None:
        if self._policy.after_seconds is not None:
            return
        self._seconds.append(seconds)
        self._since_update += 1
        count = len(self._seconds)
        if count < self._policy.min_reads:
            return
        # Sorting on every read would cost more than the read of a cached object.
        if self.patience_seconds is None or self._since_update >= _EVERY:
            self._since_update = 0
            rank = min(count - 1, int(count * self._policy.quantile))
            self.patience_seconds = sorted(self._seconds)[rank]


class Hedged(PassingStorage):
    """A storage that repeats a read of an immutable object when the first request is slow.

    Contracts are those of `icechunk_async.storage.Storage`. The first success wins; the other
    request is cancelled and awaited. A read fails only if both requests fail. Objects that may
    change are read once, because the second reply could be older than the first. Writes,
    deletions, copies and listings are passed on unchanged.

    Cost: one task per read, and up to ``max_share`` additional requests.
    """

    def __init__(
        self,
        storage: Storage,
        immutable: Callable[[str], bool],
        policy: HedgePolicy | None = None,
    ) -> None:
        """Wrap ``storage``.

        Args:
            storage: the storage whose reads may be repeated.
            immutable: returns whether the object of a key is only ever written with the same
                bytes.
            policy: when to hedge, and how often; the defaults if None.
        """
        super().__init__(storage)
        self._immutable = immutable
        self._policy = policy or HedgePolicy()
        self._lock = threading.Lock()  # held over no await
        self._latencies = {small: _Latencies(self._policy) for small in (False, True)}
        # A fixed delay needs no measurements, so the very first slow read may be hedged.
        self._credit = 0.0 if self._policy.after_seconds is None else 1.0
        self.second_requests = 0
        """Number of second requests sent."""
        self.second_answers = 0
        """Number of second requests that finished first."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        if not self._immutable(key):
            return await self.wrapped.get(key, byte_range)
        if isinstance(byte_range, PlacedRange):  # two requests cannot fill one buffer
            byte_range = byte_range.unplaced()
        latencies = self._latencies[_is_small(byte_range)]
        with self._lock:
            self._credit = min(_MAX_CREDIT, self._credit + self._policy.max_share)
        now = asyncio.get_running_loop().time
        began = now()
        if latencies.patience_seconds is None:
            retrieved = await self.wrapped.get(key, byte_range)
        else:
            retrieved, second = await first_of_two(
                lambda: self.wrapped.get(key, byte_range),
                after_seconds=latencies.patience_seconds,
                again=self._spend_credit,
            )
            self.second_answers += second
        with self._lock:
            latencies.add(now() - began)
        return retrieved

    def _spend_credit(self) -> bool:
        """Return whether a second request may be sent, and count it."""
        with self._lock:
            if self._credit < 1 or self._policy.max_share == 0:
                return False
            self._credit -= 1
            self.second_requests += 1
            return True


def _is_small(byte_range: RangeRequest) -> bool:
    match byte_range:
        case ByteRange(start, int(stop)):
            return stop - start <= _SMALL_BYTES
        case SuffixRange(length):
            return length <= _SMALL_BYTES
        case _:
            return False

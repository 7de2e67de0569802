"""A second request where the first takes unusually long.

A few requests to a large service take many times longer than the others, for reasons that a
second request does not share. What is read a thousand times at once waits for the slowest.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import first_of_two
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import ByteRange, SuffixRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.storage.protocol import RangeRequest, Retrieved, Storage

__all__ = ["HedgePolicy", "Hedged"]

_SMALL_BYTES: Final = 1 << 18
_REMEMBERED: Final = 256
_EVERY: Final = 16
_SAVED: Final = 10.0
"""Second requests that a calm time may save for a busy one."""


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """When a read is sent once more, and how often at most."""

    quantile: float = 0.95
    """Send again what takes longer than this share of the recent reads of its kind."""
    max_share: float = 0.05
    """Second requests per read, at most."""
    min_reads: int = 32
    """Reads of a kind to learn from before any is sent again."""

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        if not (0 < self.quantile < 1 and 0 <= self.max_share <= 1 and self.min_reads >= 1):
            raise ValueError(f"shares between 0 and 1, and something to learn from, not {self}")


class _Recent:
    """How long the recent reads of one kind took."""

    def __init__(self, policy: HedgePolicy) -> None:
        self._policy = policy
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._since = 0
        self.patience: float | None = None
        """Seconds after which a read takes long; None while that is not known."""

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._since += 1
        count = len(self._seconds)
        if count >= self._policy.min_reads and (self.patience is None or self._since >= _EVERY):
            self._since = 0
            self.patience = sorted(self._seconds)[
                min(count - 1, int(count * self._policy.quantile))
            ]


class Hedged(PassingStorage):
    """A storage that asks again when a read of an immutable object takes unusually long.

    Contracts are those of :class:`~icechunk_async.storage.Storage`. The first success is the
    answer; the other request is cancelled and waited for. A read fails if both requests do. Small
    and large reads are timed apart. Mutable objects are always read once: the second answer could
    be older than the first.

    Cost: a task per read, and up to ``max_share`` more requests.
    """

    def __init__(
        self,
        storage: Storage,
        immutable: Callable[[str], bool],
        policy: HedgePolicy | None = None,
    ) -> None:
        """Wrap ``storage``.

        Args:
            storage: whose reads may be sent again.
            immutable: tells keys that are only ever written with the same bytes.
            policy: when, and how often.
        """
        super().__init__(storage)
        self._immutable = immutable
        self._policy = policy or HedgePolicy()
        self._lock = threading.Lock()  # held over no await
        self._recent = {small: _Recent(self._policy) for small in (False, True)}
        self._allowed = 0.0
        self.second_requests = 0
        """How many were sent."""
        self.second_answers = 0
        """How many of them answered first."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        if not self._immutable(key):
            return await self.wrapped.get(key, byte_range)
        if isinstance(byte_range, PlacedRange):  # two requests cannot fill one place
            byte_range = byte_range.unplaced()
        recent = self._recent[_is_small(byte_range)]
        with self._lock:
            self._allowed = min(_SAVED, self._allowed + self._policy.max_share)
        now = asyncio.get_running_loop().time
        began = now()
        if recent.patience is None:
            retrieved = await self.wrapped.get(key, byte_range)
        else:
            retrieved, second = await first_of_two(
                lambda: self.wrapped.get(key, byte_range),
                after_seconds=recent.patience,
                again=self._may_ask_again,
            )
            self.second_answers += second
        with self._lock:
            recent.add(now() - began)
        return retrieved

    def _may_ask_again(self) -> bool:
        with self._lock:
            if self._allowed < 1:
                return False
            self._allowed -= 1
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

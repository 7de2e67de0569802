"""Pauses before a try, where several writers want to change the same thing."""

from __future__ import annotations

from collections import deque
from typing import Final

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass

__all__ = ["Backoff", "Courtesy"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential, with full jitter, so that losers of one race do not meet again."""

    max_tries: int = 100
    initial_ms: int = 50
    max_ms: int = 30_000
    immediate: int = 5
    """Tries that follow without waiting longer than ``initial_ms``."""

    async def wait(self, attempt: int, longest_seconds: float | None = None) -> None:
        """Wait after the ``attempt``-th failure, counted from 1, but not longer than given.

        Cancellation: no effect.
        """
        # The power is bounded, or very many tries would overflow a float.
        steps = max(0, attempt - self.immediate)
        limit_ms = min(self.max_ms, self.initial_ms * 2.0 ** min(steps, 30))
        limit_seconds = limit_ms / 1000
        if longest_seconds is not None:
            limit_seconds = min(limit_seconds, longest_seconds)
        await anyio.sleep(clock.uniform() * limit_seconds)


_REMEMBERED: Final = 8
_SHARE: Final = 0.75
"""The pause for each change of others that is due before ours, in tries."""
_EARLY: Final = 0.75
"""A writer goes when it was overtaken by this share of what is usual: pauses are a guess, and while
all are too polite nothing lands."""
_LONGEST_TRIES: Final = 1.5
"""After a pause of this length a writer looks again, so that it does not wait for nobody."""
_CROWD: Final = 8
"""For each eight changes that overtook ours, writers without a lead spread over a try more."""
_SPARED: Final = 0.2
"""The share of a try that is spent on asking where the branch is."""
_FIRST_STREAK: Final = 4
_LONGEST_STREAK: Final = 64
_STALE_TRIES: Final = 100
_STALE_SECONDS: Final = 10.0


class Courtesy:
    """Decides how long a writer lets others go first, so that all wait about equally long.

    Writers race: one change lands, and all that were tried at the same time are tried again. Who
    has just landed needs a request less for the next try than the others, so it would win again and
    again. Therefore each change that landed tells by how many it was *overtaken*: how many landed
    between its beginning and its end. A writer that was overtaken by fewer than the recent winners
    has a lead, and pauses in proportion to it. One that was overtaken by more tries at once. Pauses
    are multiples of the length of a try, so they suit a disk and a remote service, and a
    writer that meets nobody makes none.

    Others may lose all races to a writer that lands one change after the other, and then nothing
    tells of them. So that one makes a pause now and then, ever more rarely while nobody comes.

    Of writers that wait equally long, all tries but one are in vain. They pause for a random time,
    the longer the more of them there must be; and the less, the more they are overdue.
    """

    def __init__(self) -> None:
        """Begin without having met anybody."""
        self._landed: deque[tuple[float, bool]] = deque(maxlen=_REMEMBERED)
        """By how many each of the last changes was overtaken, and whether it tells of a crowd."""
        self._try_seconds = 0.0
        self._streak = 0
        self._next_pause = _FIRST_STREAK
        self._changed_us = 0

    def saw(self, overtaken: int) -> None:
        """Note a change of another process that landed."""
        self._note(overtaken, crowd=overtaken > 0)
        self._streak, self._next_pause = 0, _FIRST_STREAK

    def landed(self, overtaken: int, by_others: int, try_seconds: float) -> None:
        """Note that a change of this process landed.

        Args:
            overtaken: by how many changes of all processes it was overtaken.
            by_others: by how many of them that are not of this process.
            try_seconds: the length of the last try.
        """
        self._note(overtaken, crowd=by_others > 0)
        self.lost(try_seconds)
        self._streak += 1

    def lost(self, try_seconds: float) -> None:
        """Note a try that others were quicker than; what they landed is told to `saw`."""
        self._try_seconds = max(try_seconds, (self._try_seconds + try_seconds) / 2)

    def nobody_came(self) -> None:
        """Note that no change landed during a pause: believe half of what is known."""
        self._landed = deque(
            ((count // 2, crowd and count > 1) for count, crowd in self._landed),
            maxlen=_REMEMBERED,
        )

    def _tries(self, overtaken: int, *, first: bool) -> float:
        """Return the length of a pause, in tries."""
        counts = [count for count, _ in self._landed]
        if not any(crowd for _, crowd in self._landed):
            return 0.0  # nobody was met
        usual = sum(counts) / len(counts)
        lead = _EARLY * usual + 1 - overtaken
        if lead > 0:
            return min(_SHARE * lead * (1 + clock.uniform()) / 2, _LONGEST_TRIES)
        if first:
            return 0.0
        overdue = (overtaken - usual) / (usual + 1)
        spread = min(overtaken / _CROWD, _LONGEST_TRIES) * max(0.0, 1 - overdue)
        # A try that follows at once need not ask where the branch is now.
        return max(0.0, clock.uniform() * spread - _SPARED)

    def pause(self, overtaken: int, *, first: bool) -> float:
        """Return for how many seconds to let others go first; 0 to try now.

        Args:
            overtaken: by how many changes ours was overtaken so far.
            first: whether it was not tried yet.
        """
        idle_seconds = (clock.elapsed_us() - self._changed_us) / 1e6
        if idle_seconds > max(_STALE_SECONDS, _STALE_TRIES * self._try_seconds):
            self._landed.clear()
        tries = self._tries(overtaken, first=first)
        if idle_seconds > 2 * self._try_seconds:
            self._streak = 0  # others had time
        if tries == 0 and first and self._streak >= self._next_pause:
            self._streak, self._next_pause = 0, min(2 * self._next_pause, _LONGEST_STREAK)
            tries = 1
        return tries * self._try_seconds

    def _note(self, overtaken: int, *, crowd: bool) -> None:
        self._landed.append((overtaken, crowd))
        self._changed_us = clock.elapsed_us()

"""Check what concurrent writers saw against the history of the repository.

Every commit carries a unique name. Afterwards the ancestry of a branch must hold each acknowledged
commit exactly once and no refused one, and a commit that started after another was acknowledged
must lie above it. (A list to which unique elements are appended, after the Elle checker by
Kingsbury and Alvaro.)
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["Attempt", "Outcome", "SeededClock", "find_anomalies"]


class SeededClock:
    """Time and random ids that are the same for each seed, on a loop of virtual time."""

    def __init__(self, seed: object) -> None:
        """Begin at some fixed day."""
        self._random = random.Random(f"clock {seed}")  # noqa: S311 - not secrets
        self._start_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        """Return the loop's time."""
        return self._start_us + self.elapsed_us()

    def elapsed_us(self) -> int:
        """Return the microseconds since the loop began."""
        return round(asyncio.get_running_loop().time() * 1e6)

    def random_bytes(self, size_bytes: int) -> bytes:
        """Return the next bytes of the seed."""
        return self._random.randbytes(size_bytes)


class Outcome(Enum):
    """The outcome of a commit as its writer saw it."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempted commit."""

    name: str
    """Unique; the commit's message."""
    branch: str
    began: float
    ended: float
    """Times by one clock."""
    outcome: Outcome


def find_anomalies(
    attempts: Iterable[Attempt],
    branch: str,
    newest_first: Sequence[str],
    *,
    dropped: Collection[str] = (),
) -> list[str]:
    """Return the faults of a branch, a sentence each; empty if it is correct.

    Args:
        attempts: every commit that was tried on any branch.
        branch: the branch to look at.
        newest_first: the messages along its ancestry.
        dropped: commits that were, or may have been, removed from the branch by a reset.
    """
    mine = {attempt.name: attempt for attempt in attempts if attempt.branch == branch}
    found = Counter(name for name in newest_first if name in mine)
    # By place from the oldest on: a later commit has the greater one.
    places = {name: place for place, name in enumerate(reversed(newest_first))}
    anomalies = [f"{name} is there {times} times" for name, times in found.items() if times > 1]
    for name, attempt in mine.items():
        is_lost = name not in found and name not in dropped
        if attempt.outcome is Outcome.ACKNOWLEDGED and is_lost:
            anomalies.append(f"{name} was acknowledged and is lost")
        # A commit of unknown outcome may be there or not, but once.
        if attempt.outcome is Outcome.REFUSED and name in found:
            anomalies.append(f"{name} was refused and is there")
    landed = [attempt for attempt in mine.values() if attempt.name in found]
    for earlier in landed:
        anomalies += [
            f"{later.name} began after {earlier.name} was acknowledged, and lies below it"
            for later in landed
            if earlier.outcome is Outcome.ACKNOWLEDGED
            # Commits that overlap may lie in any order; only one that began after the other was
            # acknowledged must be above it. Each pair is looked at: histories have hundreds of
            # commits.
            and later.began > earlier.ended
            and places[later.name] < places[earlier.name]
        ]
    return anomalies

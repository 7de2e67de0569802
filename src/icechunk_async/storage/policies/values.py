"""The options of the policies of a storage, as plain values.

A storage that answers without waiting needs these alone: there nothing is joined, hedged or
repeated.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from icechunk_async.storage.policies.hedge import HedgePolicy

__all__ = ["CoalescePolicy", "Policies", "RetryPolicy"]

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CoalescePolicy:
    """Limits for joining and splitting reads."""

    gap_bytes: int = 64 << 10
    """Ranges at most this far apart are read as one; the bytes between are dropped. Receiving them
    costs about as much as one more request."""
    part_bytes: int = 12 * _MIB
    """The longest joined range, and about the length of the parts of a split one."""
    max_parts: int = 18
    """Parts of one read at most; they are longer instead."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if a number is out of range."""
        if self.gap_bytes < 0 or self.part_bytes < 1 or self.max_parts < 1:
            raise ValueError(f"a gap of at least 0, parts of at least 1 and 1 of them, not {self}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of tries and the pauses between them.

    The pause after the n-th failure is random, up to ``initial_seconds * 2 ** (n - 1)`` and up to
    ``max_seconds``: clients that failed together do not come back together.
    """

    max_tries: int = 10
    """Tries in all, the first included."""
    initial_seconds: float = 0.1
    max_seconds: float = 180.0
    """The longest pause. A store that asks for a longer one is not asked again."""
    total_seconds: float | None = None
    """No try begins later than this after the first; a running one is not cut short."""


@dataclass(frozen=True, slots=True)
class Policies:
    """How requests to one storage are joined, hedged and repeated."""

    coalesce: CoalescePolicy = field(default_factory=CoalescePolicy)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    hedge: HedgePolicy | None = None
    """None: slow reads are not hedged."""

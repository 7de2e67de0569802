"""Positions at equal distances from each other, as those of records have.

What lies at them is read as one view of the buffer, without an index for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]
    type Places = Positions | Even

__all__ = ["FEWEST", "Even", "as_array", "evenly", "position_at"]

FEWEST: Final = 32
"""Of fewer positions an index for each takes no longer than finding out."""


@dataclass(frozen=True, slots=True)
class Even:
    """At least one position, and others ``step`` bytes apart, which is not 0."""

    start: int
    step: int
    count: int

    def __len__(self) -> int:
        """Count the positions."""
        return self.count

    def plus(self, distance: int) -> Even:
        """Answer as many positions, each so many bytes further on."""
        return Even(self.start + distance, self.step, self.count)

    def bounds(self) -> tuple[int, int]:
        """Answer the lowest and the highest position."""
        last = self.start + self.step * (self.count - 1)
        return (self.start, last) if self.step > 0 else (last, self.start)

    def at(self, index: int) -> int:
        """Answer one of the positions; ``index`` is not negative."""
        return self.start + self.step * index

    def array(self) -> Positions:
        """Answer the positions one by one."""
        stop = self.start + self.step * self.count
        return np.arange(self.start, stop, self.step, dtype=np.int64)


def evenly(positions: Positions) -> Places:
    """Answer what is the same as some positions: :class:`Even` if they are many, and that."""
    count = len(positions)
    if count < FEWEST:
        return positions
    start = positions.item(0)
    step = positions.item(1) - start
    # Most that are not are seen to be so by the last one alone.
    if step == 0 or positions.item(-1) - start != step * (count - 1):
        return positions
    if not (positions[1:] - positions[:-1] == step).all():
        return positions
    return Even(start, step, count)


def position_at(places: Places, index: int) -> int:
    """Answer one of some positions, at the same cost however many they are."""
    return places.at(index) if isinstance(places, Even) else places.item(index)


def as_array(places: Places) -> Positions:
    """Answer positions one by one."""
    return places.array() if isinstance(places, Even) else places

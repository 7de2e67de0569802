"""Plans that are too large for Spark's driver, refused before any work is done."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MOST_PARTITIONS", "few"]

MOST_PARTITIONS: Final = 1_000_000
"""The most partitions of a query: the driver keeps some 500 bytes of each, and Spark a task."""


def few[T](parts: Iterable[T], least: int = 0) -> list[T]:
    """Return the parts of a plan as a list.

    Args:
        parts: made while they are counted.
        least: how many there are at least, where that is known beforehand.

    Raises:
        InvalidInputError: there are more than a million.
    """
    found = [] if least > MOST_PARTITIONS else list(islice(parts, MOST_PARTITIONS + 1))
    if max(least, len(found)) <= MOST_PARTITIONS:
        return found
    raise InvalidInputError(
        f"The table would be read in {max(least, len(found))} partitions or more, and a query has "
        f"{MOST_PARTITIONS} at most: Spark's driver keeps each of them. Set the option "
        "'partition-bytes' to a larger number, so that a task reads more chunks, or read less with "
        "'where' and 'arrays'."
    )

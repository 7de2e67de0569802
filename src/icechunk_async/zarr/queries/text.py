"""Bounds of text: those of cells, and the least or greatest text of groups of chunks.

Stored bounds hold the beginning of a text, so the least and the greatest of all may be longer than
any of them. Chunks whose bounds were cut are read if theirs could be the one, and no others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.format.statistics import (
    HIGH_CUT,
    LOW_CUT,
    greatest_keys,
    text_bound,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.meaning import Mask

__all__ = ["ExtremeTexts", "set_bounds", "successor"]

_LAST: Final = "\U0010ffff"
_SURROGATES: Final = range(0xD800, 0xE000)


def set_bounds(rows: Rows, which: Any, low: str, high: str) -> None:
    """Set the bounds of some rows."""
    (rows["low"][which], low_cut), (rows["high"][which], high_cut) = map(text_bound, (low, high))
    rows["cut"][which] = LOW_CUT * low_cut | HIGH_CUT * high_cut


def successor(begin: str) -> str | None:
    """Return the least text that is greater than all that begin with this; None without any."""
    kept = begin.rstrip(_LAST)
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    if following in _SURROGATES:
        following = _SURROGATES.stop
    return kept[:-1] + chr(following)


class ExtremeTexts:
    """The least or the greatest text of each group of chunks. Memory: one text for each."""

    def __init__(
        self, groups: Sequence[npt.NDArray[np.integer[Any]]], chunks: int, *, least: bool
    ) -> None:
        """Begin without cells.

        Args:
            groups: chunks that belong together, by their places in a plan; each in one group.
            chunks: how many the plan has.
            least: whether to find the least, not the greatest.
        """
        self.found: npt.NDArray[Any] = np.full(len(groups), None, object)
        self._groups = groups
        self._group_of = np.zeros(chunks, np.int64)
        for number, group in enumerate(groups):
            self._group_of[group] = number
        self._least = least
        self._lock = threading.Lock()

    def settled(self, rows: Rows, known: Mask) -> Mask:
        """Return which chunks need not be read, and take the bounds of them that are whole.

        Args:
            rows: statistics of chunks.
            known: which of them are about all cells that count.
        """
        found = known.copy()
        for number, group in enumerate(self._groups):
            found[group] &= ~self._needed(number, rows[group], known[group])
        return found

    def _needed(self, number: int, rows: Rows, known: Mask) -> Mask:
        """Return which known chunks of a group must be read, and take whole bounds of others."""
        bounds = rows["low" if self._least else "high"]
        some = known & (rows["count"] > 0)
        is_cut = (rows["cut"] & (LOW_CUT if self._least else HIGH_CUT)) > 0
        exact = bounds[some & ~is_cut].tolist()
        begins = bounds[some & is_cut].tolist()
        if exact:
            self._take(number, text_of(min(exact) if self._least else max(exact)))
        if not begins:
            return np.zeros(len(rows), bool)
        if self._least:
            # The text of the least beginning is less than this; others are greater than theirs.
            could_be = bounds < min([*exact, _raised(min(begins))])
        else:
            could_be = greatest_keys(rows) > max([*exact, *begins])
        return np.asarray(some & is_cut & could_be, bool)

    def add(self, chunk: int, low: str, high: str) -> None:
        """Take the least and the greatest text of a chunk; from any thread."""
        self._take(int(self._group_of[chunk]), low if self._least else high)

    def _take(self, number: int, text: str) -> None:
        with self._lock:
            best = self.found[number]
            if best is None or (text < best if self._least else text > best):
                self.found[number] = text


def _raised(begin: bytes) -> bytes:
    """Return a key above those of all texts with a beginning."""
    return begin[: begin[-1]].ljust(len(begin), b"\xff")

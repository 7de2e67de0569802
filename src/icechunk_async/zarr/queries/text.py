"""Bounds of text: those of cells, and the least or greatest text of many chunks.

Stored bounds hold the beginning of a text, so the least and the greatest of all may be longer than
any of them. Chunks whose bounds were cut are read if theirs could be the one, and no others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.format.statistics import (
    HIGH_CUT,
    LOW_CUT,
    greatest_keys,
    text_bound,
    text_of,
)

if TYPE_CHECKING:
    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.meaning import Mask

__all__ = ["ExtremeText", "set_bounds", "successor"]

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


class ExtremeText:
    """The least or the greatest text of some cells. Memory: one text."""

    def __init__(self, *, least: bool) -> None:
        """Begin without cells."""
        self.found: str | None = None
        self._least = least
        self._lock = threading.Lock()

    def settled(self, rows: Rows, known: Mask) -> Mask:
        """Return which chunks need not be read, and take the bounds of them that are whole.

        Args:
            rows: statistics of chunks.
            known: which of them are about all cells that count.
        """
        bounds = rows["low" if self._least else "high"]
        some = known & (rows["count"] > 0)
        is_cut = (rows["cut"] & (LOW_CUT if self._least else HIGH_CUT)) > 0
        exact = bounds[some & ~is_cut].tolist()
        begins = bounds[some & is_cut].tolist()
        found = known.copy()
        if self._least:
            if exact:
                self.add(text_of(min(exact)))
            if begins:
                # The text of the least beginning is less than this; others are greater than theirs.
                limit = min([*exact, _raised(min(begins))])
                found &= ~(some & is_cut & (bounds < limit))
        else:
            if exact:
                self.add(text_of(max(exact)))
            if begins:
                limit = max([*exact, *begins])
                found &= ~(some & is_cut & (greatest_keys(rows) > limit))
        return found

    def add(self, text: str) -> None:
        """Take one more text; from any thread."""
        with self._lock:
            if self.found is None or (text < self.found if self._least else text > self.found):
                self.found = text


def _raised(begin: bytes) -> bytes:
    """Return a key above those of all texts with a beginning."""
    return begin[: begin[-1]].ljust(len(begin), b"\xff")

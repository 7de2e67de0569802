"""A mark of the rows of a batch by their coordinates, equal if these are; pure."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["BatchMark"]

_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BatchMark:
    """The number of rows, and the sum of hashes of their coordinates, in any order.

    A batch that is tried again has the rows that it had. Their values may differ, where a query
    computes them from the time of day.
    """

    rows: int = 0
    coordinates: int = 0

    @classmethod
    def of(cls, columns: Sequence[npt.NDArray[Any]]) -> BatchMark:
        """Return the mark of rows, given the column of each coordinate."""
        rows = len(columns[0]) if columns else 0
        hashes = np.zeros(rows, np.uint64)
        for column in columns:
            hashes = _mixed(hashes * np.uint64(31) + _words(column))
        return cls(rows, int(hashes.sum(dtype=np.uint64)))

    def __add__(self, other: BatchMark) -> BatchMark:
        """Return the mark of the rows of both."""
        return BatchMark(self.rows + other.rows, (self.coordinates + other.coordinates) & _WORD)

    def properties(self) -> dict[str, Any]:
        """Return the mark as a snapshot keeps it."""
        return {"rows": self.rows, "coordinates": f"{self.coordinates:016x}"}


def _words(column: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a word for each value; numbers that are equal have the same in every type."""
    if column.dtype.kind in "biuf":
        floats = column.astype(np.float64) + 0.0  # one zero
        return floats.view(np.uint64)
    if column.dtype.kind in "mM":
        return column.astype(f"{column.dtype.kind}8[us]").view(np.uint64)
    found, which = np.unique(column.astype(str), return_inverse=True)
    words = [int.from_bytes(blake2b(it.encode(), digest_size=8).digest()) for it in found.tolist()]
    return np.array(words, np.uint64)[which]


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return well mixed bits (the last steps of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

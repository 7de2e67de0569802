"""Finding rows of coordinates: by arithmetic where they fill a box, else by binary search."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

    type Coordinates = tuple[int, ...]

__all__ = ["RowIndex", "ascends", "rows_in"]


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Finds rows by coordinates: by arithmetic in a full box, else by binary search."""

    coords: npt.NDArray[np.uint32]
    low: Coordinates
    high: Coordinates
    """Last coordinate along each axis, inclusive."""
    strides: Coordinates
    ascending: bool
    full: bool
    """The rows are the whole box, in order."""
    keys: npt.NDArray[Any] | None = None
    """Row-major position of each row in the box; None if full, or if it needs over 63 bits."""

    @classmethod
    def of(cls, coords: npt.NDArray[np.uint32]) -> RowIndex:
        """Index the rows of a ``(n, rank)`` matrix."""
        count, rank = coords.shape
        if count == 0:
            return cls(coords, (0,) * rank, (0,) * rank, (0,) * rank, ascending=True, full=False)
        columns = [coords[:, axis] for axis in range(rank)]  # by far faster than along an axis
        low = tuple(int(column.min()) for column in columns)
        high = tuple(int(column.max()) for column in columns)
        strides = [1] * (rank + 1)
        for axis in reversed(range(rank)):
            strides[axis] = strides[axis + 1] * (high[axis] - low[axis] + 1)
        box = (low, high, tuple(strides[1:]))
        # The box has more places than a number has values, so rows are compared coordinate by
        # coordinate.
        if strides[0] >= 1 << 63:
            return cls(coords, *box, bool(ascends(coords).all()), full=False)
        keys = _keys(count, columns, low, strides)
        ascending = bool((keys[1:] > keys[:-1]).all())
        full = ascending and strides[0] == count
        return cls(coords, *box, ascending, full, None if full else keys)

    def find(self, coords: Coordinates) -> int | None:
        """Return the row of these coordinates; None if no row has them.

        No row has coordinates of another number of axes: files of other writers may hold
        references that do not fit their array.
        """
        if len(self.coords) == 0 or len(coords) != len(self.low):
            return None
        key = 0
        for value, low, high, stride in zip(coords, self.low, self.high, self.strides, strict=True):
            if not low <= value <= high:
                return None
            key += (value - low) * stride
        if self.full:
            return key
        if self.keys is not None:
            wanted: np.unsignedinteger[Any] = self.keys.dtype.type(key)  # else all are converted
            row = int(np.searchsorted(self.keys, wanted))
            return row if row < len(self.keys) and int(self.keys[row]) == key else None
        rows = range(len(self.coords))
        row = bisect.bisect_left(rows, coords, key=lambda at: tuple(self.coords[at].tolist()))
        found = row < len(rows) and tuple(self.coords[row].tolist()) == coords
        return row if found else None


def _keys(
    count: int, columns: list[npt.NDArray[np.uint32]], low: Coordinates, strides: list[int]
) -> npt.NDArray[Any]:
    """Return the row-major position of each row in a box that begins at ``low``."""
    number = np.dtype(np.uint32 if strides[0] < 1 << 32 else np.uint64)
    # The coordinates are the keys already.
    if len(columns) == 1 and low[0] == 0:
        return columns[0]
    keys: npt.NDArray[Any] = np.zeros(count, number)
    for column, first, stride in zip(columns, low, strides[1:], strict=True):
        steps = (column - np.uint32(first)).astype(number, copy=False)
        if stride > 1:
            steps *= number.type(stride)
        keys += steps
    return keys


def ascends(coords: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Return which rows, ``(n - 1,)``, are below the next one; works for any coordinates."""
    before, after = coords[:-1], coords[1:]
    if coords.shape[1] == 0:
        return np.zeros(len(before), bool)
    if coords.shape[1] == 1:
        return before[:, 0] < after[:, 0]
    first = (before != after).argmax(axis=1)[:, None]  # the axis that decides; 0 if equal
    found = np.take_along_axis(before, first, 1) < np.take_along_axis(after, first, 1)
    return found[:, 0]


def rows_in(rows: npt.NDArray[np.uint32], others: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Return which rows of a ``(n, rank)`` matrix are also rows of another."""
    if rows.shape[1] != others.shape[1]:
        return np.zeros(len(rows), bool)
    if len(rows) == 0 or len(others) == 0 or rows.shape[1] == 0:
        return np.full(len(rows), len(others) > 0)
    # As Python's numbers: the product of hostile sizes would wrap round in 64 bits.
    sizes = np.maximum(rows.max(axis=0), others.max(axis=0)).astype(object) + 1
    if np.prod(sizes) < 1 << 63:
        strides = np.array([np.prod(sizes[axis + 1 :]) for axis in range(len(sizes))], np.int64)
        return np.isin(rows.astype(np.int64) @ strides, others.astype(np.int64) @ strides)
    _, codes = np.unique(np.concatenate([rows, others]), axis=0, return_inverse=True)
    return np.isin(codes[: len(rows)], codes[len(rows) :])

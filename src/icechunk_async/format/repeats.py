"""Telling which of many byte strings are repeated by the next one, without making objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]
    type Mask = npt.NDArray[np.bool_]

__all__ = ["differ"]

_COMPARED_BYTES: Final = 1 << 20
"""So much is copied at a time to compare strings."""
_MIN_ROWS: Final = 64
"""From so many strings of one length on they are compared word by word, all at once."""


def differ(
    data: npt.NDArray[np.uint8], left: Positions, right: Positions, sizes: Positions
) -> Mask:
    """Answer which pairs of pieces of ``data`` differ.

    Args:
        data: the bytes.
        left: where the first piece of each pair begins.
        right: where the second begins.
        sizes: of both; all pieces lie in ``data``.

    Cost: in proportion to the bytes.
    """
    if len(sizes) and (sizes == sizes[0]).all():
        return _differ(data, left, right, int(sizes[0]))
    different = np.zeros(len(sizes), bool)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        different[rows] = _differ(data, left[rows], right[rows], size)
    return different


def _differ(data: npt.NDArray[np.uint8], left: Positions, right: Positions, size: int) -> Mask:
    """Answer which pairs of pieces of one size differ."""
    if size == 0:
        return np.zeros(len(left), bool)
    aligned = not int(np.bitwise_or.reduce(left) | np.bitwise_or.reduce(right)) & 3
    if not aligned or len(left) < _MIN_ROWS:
        return _differ_whole(data, left, right, size)
    different = np.zeros(len(left), bool)
    words = data[: len(data) & ~3].view("<u4")
    for word in range(size // 4):
        different |= words[(left >> 2) + word] != words[(right >> 2) + word]
    for byte in range(size & ~3, size):
        different |= data[left + byte] != data[right + byte]
    return different


def _differ_whole(data: npt.NDArray[Any], left: Positions, right: Positions, size: int) -> Mask:
    different = np.zeros(len(left), bool)
    windows = np.lib.stride_tricks.sliding_window_view(data, size)
    step = max(1, _COMPARED_BYTES // size)
    for first in range(0, len(left), step):
        some = slice(first, first + step)
        different[some] = (windows[left[some]] != windows[right[some]]).any(axis=1)
    return different

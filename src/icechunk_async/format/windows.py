"""Equally long pieces of a byte array, read and written many at a time.

NumPy copies an item of a type of its own in a third of the time that it takes for a row of as many
bytes, so a piece is made to look like one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    type Bytes = npt.NDArray[np.uint8]
    type Positions = npt.NDArray[np.int64]

__all__ = ["copy_of_rows", "put_rows"]


def copy_of_rows(data: Bytes, positions: Positions, size: int) -> Bytes:
    """Copy ``size`` bytes, at least one, from each position: ``(n, size)``.

    Args:
        data: bytes that lie together in memory.
        positions: where pieces begin; none is negative.
        size: of a piece.

    Raises:
        IndexError: a piece goes beyond the end.
    """
    return _windows(data, size)[positions].view(np.uint8).reshape(len(positions), size)


def put_rows(data: Bytes, positions: Positions, rows: Bytes) -> None:
    """Write rows of bytes, which lie together in memory, to a position each.

    Args and errors as :func:`copy_of_rows`.
    """
    size = rows.shape[1]
    _windows(data, size)[positions] = rows.view(f"V{size}")[:, 0]


def _windows(data: Bytes, size: int) -> npt.NDArray[Any]:
    """Look at the ``size`` bytes at every position as an item."""
    return np.ndarray((max(len(data) - size + 1, 0),), f"V{size}", data, strides=(1,))

"""Telling which of many byte strings are repeated by the next one, without making objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.format.windows import copy_of_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]
    type Mask = npt.NDArray[np.bool_]

__all__ = ["differ"]

_COMPARED_BYTES: Final = 1 << 20
"""So much is copied at a time to compare strings."""
_SMALL_BYTES: Final = 1 << 12


def differ(
    data: npt.NDArray[np.uint8], starts: Positions, rows: Positions, sizes: Positions
) -> Mask:
    """Answer which pieces of ``data`` differ from the piece before.

    Args:
        data: the bytes.
        starts: where all pieces begin.
        rows: those that are asked about, ascending, not the first. Each is of the size of the one
            before, and both lie in ``data``.
        sizes: theirs.

    Cost: in proportion to the bytes.
    """
    if (sizes == sizes[0]).all():
        return _differ(data, starts, rows, int(sizes[0]))
    different = np.zeros(len(sizes), bool)
    for size in _each(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        different[chosen] = _differ(data, starts, rows[chosen], size)
    return different


def _each(sizes: Positions) -> Positions:
    """Answer which sizes there are. Those of names are small, and counted sooner than sorted."""
    if sizes.max() > _SMALL_BYTES:
        return np.unique(sizes)
    return np.flatnonzero(np.bincount(sizes))


def _differ(data: npt.NDArray[np.uint8], starts: Positions, rows: Positions, size: int) -> Mask:
    """Answer which of some pieces, all of one size, differ from the one before."""
    different = np.zeros(len(rows), bool)
    step = max(1, _COMPARED_BYTES // max(size, 1))
    for first in range(0, len(rows) if size else 0, step):
        some = rows[first : first + step]
        near = starts[some[0] - 1 : some[-1] + 1]
        if len(near) <= 2 * len(some) and int(near.max()) + size + 8 <= len(data):
            pieces = _words(data, near, size)  # so that each is copied once
            found = _unequal(pieces[1:], pieces[:-1])[some - some[0]]
        else:
            pieces = _words(data, starts[np.concatenate([some, some - 1])], size)
            found = _unequal(pieces[: len(some)], pieces[len(some) :])
        different[first : first + step] = found
    return different


def _unequal(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Mask:
    """Answer which rows differ: column by column, since rows are short and many."""
    found: Mask = left[:, 0] != right[:, 0]
    for column in range(1, left.shape[1]):
        found |= left[:, column] != right[:, column]
    return found


def _words(data: npt.NDArray[np.uint8], starts: Positions, size: int) -> npt.NDArray[Any]:
    """Copy pieces of one size, each a row of 64-bit words; of bytes at the end of the data."""
    padded = size + -size % 8
    if int(starts.max()) + padded > len(data):
        return copy_of_rows(data, starts, size)
    pieces = copy_of_rows(data, starts, padded)
    pieces[:, size:] = 0
    return pieces.view(np.uint64)

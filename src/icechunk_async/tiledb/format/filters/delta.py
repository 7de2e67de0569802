"""Delta and double delta: sequences of differences, which wrap at the width of their type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["running_sum", "undelta", "undouble_delta"]

_MOST_BITS: Final = 63


def undelta(piece: memoryview, plain: int, dtype: np.dtype[Any]) -> memoryview:
    """Undo delta: a count, then the first value and the differences between neighbours.

    Args:
        piece: the stored bytes.
        plain: bytes of the values.
        dtype: type of the values, of integers.

    Raises:
        FormatError: the bytes are damaged, or a part of the values was dropped when they were
            written.
    """
    cursor = Cursor(piece, "delta stream")
    _check_count("delta", cursor.u64(), plain, dtype)
    found = running_sum(cursor.array(dtype, plain // dtype.itemsize))
    if cursor.remaining > dtype.itemsize:  # TileDB 2.16 wrote one value too many
        cursor.finish()
    return memoryview(found).cast("B")


def undouble_delta(piece: memoryview, plain: int, dtype: np.dtype[Any]) -> memoryview:
    """Undo double delta: differences of differences, in as few bits as the largest one takes.

    Args:
        piece: the stored bytes.
        plain: bytes of the values.
        dtype: type of the values, of integers.

    Raises:
        FormatError: as `undelta`.
    """
    cursor = Cursor(piece, "double delta stream")
    bits, number = cursor.u8(), cursor.u64()
    _check_count("double delta", number, plain, dtype)
    if bits >= dtype.itemsize * 8 - 1:
        raw = cursor.take(plain)
        cursor.finish()
        return raw
    found = np.zeros(number, np.int64)
    first = cursor.array(dtype, min(number, 2)).astype(np.int64)
    found[: len(first)] = first
    if number > 2:
        found[1] -= found[0]
        found[2:] = _signed_fields(cursor, bits, number - 2)
        np.cumsum(found[1:], out=found[1:])
        np.cumsum(found, out=found)
    cursor.finish()
    return memoryview(found.astype(dtype, copy=False)).cast("B")


def _signed_fields(cursor: Cursor, bits: int, number: int) -> npt.NDArray[np.int64]:
    """Read numbers of a sign bit and ``bits`` bits, packed from the highest bit of each word on."""
    if bits > _MOST_BITS - 1:
        raise cursor.damaged(f"its differences have {bits} bits")
    width = bits + 1
    words = cursor.array("<u8", -(-number * width // 64))
    places = np.arange(number, dtype=np.int64) * width
    index = places >> 6
    shift = (places & 63).astype(np.uint64)
    found = words[index] << shift
    # Some fields continue in the next word. A shift by 64 is undefined, so it is done in two.
    beyond = np.minimum(index + 1, len(words) - 1)
    found |= (words[beyond] >> np.uint64(1)) >> (np.uint64(63) - shift)
    found >>= np.uint64(64 - width)
    sizes = (found & np.uint64((1 << bits) - 1)).astype(np.int64)
    signed: npt.NDArray[np.int64] = np.where(found >> np.uint64(bits) != 0, -sizes, sizes)
    return signed


def running_sum(values: npt.NDArray[Any], axis: int = 0) -> npt.NDArray[Any]:
    """Return sums of integers along an axis, which wrap at the width of their type."""
    unsigned = values.view(f"<u{values.dtype.itemsize}")
    sums = np.cumsum(unsigned, axis=axis, dtype=unsigned.dtype)
    return sums.view(values.dtype)


def _check_count(name: str, number: int, plain: int, dtype: np.dtype[Any]) -> None:
    if number * dtype.itemsize != plain:
        raise FormatError(
            f"A tile of a TileDB array holds {number} values of {dtype.itemsize} bytes after "
            f"{name}, and {plain} bytes were written. TileDB itself drops what is no whole value, "
            f"where {name} follows another filter; such data cannot be recovered. Write the array "
            f"anew with {name} as the first filter."
        )

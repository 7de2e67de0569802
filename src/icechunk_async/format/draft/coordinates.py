"""Coordinates of chunks as bytes whose order is that of the coordinates.

The specification ("Chunk Coord Encoding") asks for a variable-length binary encoding that can be
sorted and used as a predicate, and does not say which. Here each coordinate is a variable-length
integer of SQLite 4, and those of a chunk follow one another:

=========================  =====  ================================================
coordinate                 bytes  which
=========================  =====  ================================================
0 to 240                   1      the coordinate
241 to 2287                2      241 + (n - 240) // 256, (n - 240) % 256
2288 to 67823              3      249, and n - 2288 in two bytes, big-endian
67824 to 16777215          4      250, and n in three bytes, big-endian
16777216 to 4294967295     5      251, and n in four bytes, big-endian
=========================  =====  ================================================

No integer's bytes begin those of another one, so the order of whole chunks is that of their
coordinates, too. Each has one encoding; others are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.manifest import MAX_RANK

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import Coordinates

    type Bytes = npt.NDArray[np.uint8]
    type Offsets = npt.NDArray[np.int64]

__all__ = ["decode_columns", "encode_columns", "encode_coords"]

_ONE, _TWO, _THREE, _FOUR = 240, 2287, 67823, (1 << 24) - 1
"""The greatest coordinates of one, two, three and four bytes."""
_SIZES: Final = np.ones(256, np.int64)
"""The number of bytes by the first one; 0 for those that begin no coordinate."""
_SIZES[241:249], _SIZES[249], _SIZES[250], _SIZES[251], _SIZES[252:] = 2, 3, 4, 5, 0


def encode_coords(coords: Coordinates) -> bytes:
    """Return the bytes of one chunk's coordinates; each must be below 2^32."""
    return b"".join(map(_encode, coords))


def _encode(number: int) -> bytes:
    if number <= _ONE:
        return bytes([number])
    if number <= _TWO:
        return bytes([241 + (number - 240 >> 8), number - 240 & 255])
    if number <= _THREE:
        return b"\xf9" + (number - 2288).to_bytes(2)
    if number <= _FOUR:
        return b"\xfa" + number.to_bytes(3)
    return b"\xfb" + number.to_bytes(4)


def encode_columns(coords: npt.NDArray[np.uint32]) -> tuple[Bytes, Offsets]:
    """Return the bytes of many chunks, ``(n, rank)``, and the ``n + 1`` places of their bounds."""
    numbers = coords.astype(np.int64)
    sizes = np.ones(numbers.shape, np.int64)
    for bound in (_ONE, _TWO, _THREE, _FOUR):
        sizes += numbers > bound
    # In the order of rows and then axes, which is that of the bytes.
    ends = np.cumsum(sizes.ravel()).reshape(sizes.shape)
    starts = ends - sizes
    bounds = np.zeros(len(coords) + 1, np.int64)
    np.cumsum(sizes.sum(axis=1), out=bounds[1:])
    data = np.empty(bounds[-1], np.uint8)
    for size in range(1, 6):
        chosen = sizes == size
        _put(data, starts[chosen], numbers[chosen], size)
    return data, bounds


def _put(data: Bytes, places: Offsets, numbers: npt.NDArray[np.int64], size: int) -> None:
    """Write numbers that take ``size`` bytes."""
    if size == 1:
        data[places] = numbers
        return
    if size == 2:
        # The first bytes of longer forms are greater than all of shorter ones, and what follows is
        # big-endian: comparing bytes compares numbers.
        data[places] = 241 + (numbers - 240 >> 8)
        numbers = numbers - 240
    else:
        data[places] = 246 + size
        if size == 3:
            numbers = numbers - 2288
    for place in range(1, size):
        data[places + place] = numbers >> 8 * (size - 1 - place) & 255


def decode_columns(data: Bytes, bounds: Offsets) -> list[tuple[Offsets, npt.NDArray[np.uint32]]]:
    """Return the coordinates of many chunks, by their number of axes.

    Args:
        data: the bytes.
        bounds: where each chunk's begin, and the end of the last; ascending, inside of ``data``.

    Returns:
        For each rank the rows that have it, ascending, and their coordinates, ``(n, rank)``.

    Raises:
        FormatError: bytes stand for no coordinates, or there are more than 64 axes.
    """
    places, ends = bounds[:-1].copy(), bounds[1:]
    ranks = np.zeros(len(places), np.int64)
    axes: list[tuple[Offsets, npt.NDArray[np.uint32]]] = []
    rows = np.flatnonzero(places < ends)
    # Axis by axis, of all chunks at once. Chunks whose bytes are used up have their rank.
    while len(rows):
        # Each round takes a byte of every chunk that is left; a hostile value of a megabyte would
        # take a million rounds.
        if len(axes) == MAX_RANK:
            raise FormatError(f"A manifest has chunks of more than {MAX_RANK} axes.")
        sizes = _SIZES[data[places[rows]]]
        # A number that is cut off would take bytes of the next chunk.
        if not sizes.all() or (places[rows] + sizes > ends[rows]).any():
            raise _damaged()
        axes.append((rows, _read(data, places[rows], sizes)))
        places[rows] += sizes
        ranks[rows] += 1
        rows = rows[places[rows] < ends[rows]]
    found: list[tuple[Offsets, npt.NDArray[np.uint32]]] = []
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        coords = np.empty((len(rows), rank), np.uint32)
        for axis, (there, numbers) in enumerate(axes[:rank]):
            # `there` are the rows that had this axis, ascending, and all of these rows are among
            # them.
            coords[:, axis] = numbers[np.searchsorted(there, rows)]
        found.append((rows, coords))
    return found


def _read(data: Bytes, places: Offsets, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return one number from each place."""
    numbers = data[places].astype(np.int64)
    for size in range(2, 6):
        rows = np.flatnonzero(sizes == size)
        if not len(rows):
            continue
        value: npt.NDArray[Any] = np.zeros(len(rows), np.int64)
        for place in range(1, size):
            value = value << 8 | data[places[rows] + place]
        if size == 2:
            value += 240 + (numbers[rows] - 241 << 8)
            # One encoding for each number: another one would hide a chunk from a search for its
            # bytes.
            if (value <= _ONE).any():
                raise _damaged()
        elif size == 3:
            value += 2288
        elif (value <= (_THREE if size == 4 else _FOUR)).any():
            raise _damaged()
        numbers[rows] = value
    return numbers.astype(np.uint32)


def _damaged() -> FormatError:
    return FormatError("A manifest has chunk coordinates that cannot be read.")

"""A FlatBuffer's bytes, seen as words of each size and checked before use.

Regularly spaced positions are read as one view of the buffer, without an index for each.

NumPy copies an item of a void type in less than half of the time of an equally long row of bytes,
so a piece is viewed as one such item.

The layout is that of the FlatBuffers "Internals" document. Positions are an array, or `Even` for
records of equal size; then the result may be a view of the buffer, without a copy.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.flatbuffers.checks import (
    MAX_SHARING,
    misaligned,
    outside,
    pointless,
    unfolded,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]
    type Places = Positions | Even
    type Bytes = npt.NDArray[np.uint8]

__all__ = [
    "FEWEST",
    "Buffer",
    "Even",
    "as_array",
    "copy_of_rows",
    "evenly",
    "position_at",
    "put_rows",
]


FEWEST: Final = 32
"""For fewer positions the check costs more than an index for each."""


@dataclass(frozen=True, slots=True)
class Even:
    """At least one position, and others ``step`` bytes apart, which is not 0."""

    start: int
    step: int
    count: int

    def __len__(self) -> int:
        """Count the positions."""
        return self.count

    def plus(self, distance: int) -> Even:
        """Return the positions, each moved by a number of bytes."""
        return Even(self.start + distance, self.step, self.count)

    def bounds(self) -> tuple[int, int]:
        """Return the lowest and the highest position."""
        last = self.start + self.step * (self.count - 1)
        return (self.start, last) if self.step > 0 else (last, self.start)

    def at(self, index: int) -> int:
        """Return one of the positions; ``index`` is not negative."""
        return self.start + self.step * index

    def array(self) -> Positions:
        """Return the positions one by one."""
        stop = self.start + self.step * self.count
        return np.arange(self.start, stop, self.step, dtype=np.int64)


def evenly(positions: Positions) -> Places:
    """Return ``positions`` as `Even` if they are many and evenly spaced, else unchanged."""
    count = len(positions)
    if count < FEWEST:
        return positions
    start = positions.item(0)
    step = positions.item(1) - start
    # Most uneven positions are detected by the last one alone.
    if step == 0 or positions.item(-1) - start != step * (count - 1):
        return positions
    if not (positions[1:] - positions[:-1] == step).all():
        return positions
    return Even(start, step, count)


def position_at(places: Places, index: int) -> int:
    """Return one of the positions, in constant time."""
    return places.at(index) if isinstance(places, Even) else places.item(index)


def as_array(places: Places) -> Positions:
    """Return positions one by one."""
    return places.array() if isinstance(places, Even) else places


def copy_of_rows(data: Bytes, positions: Positions, size: int) -> Bytes:
    """Copy ``size`` bytes, at least one, from each position: ``(n, size)``.

    Args:
        data: bytes that lie together in memory.
        positions: where pieces begin; none is negative.
        size: of a piece.

    Raises:
        IndexError: a piece goes beyond the end.
    """
    # NumPy refuses an index past the last window. A negative one it would count from the end, so
    # callers check that first.
    return _windows(data, size)[positions].view(np.uint8).reshape(len(positions), size)


def put_rows(data: Bytes, positions: Positions, rows: Bytes) -> None:
    """Write rows of bytes, which lie together in memory, to a position each.

    Args and errors as `copy_of_rows`.
    """
    size = rows.shape[1]
    _windows(data, size)[positions] = rows.view(f"V{size}")[:, 0]


def _windows(data: Bytes, size: int) -> npt.NDArray[Any]:
    """View the ``size`` bytes at every position as one item."""
    return np.ndarray((max(len(data) - size + 1, 0),), f"V{size}", data, strides=(1,))


_FEW_ROWS: Final = 3
"""Up to this count positions are checked one by one, which is faster in small files."""
_FEW_BYTES: Final = 1 << 10
"""Up to this size bytes are copied by index, which is faster than preparing windows."""


class Buffer:
    """A FlatBuffer's bytes, seen as words of each size."""

    def __init__(self, payload: bytes | memoryview) -> None:
        """Look at ``payload`` without copying it."""
        self.payload = memoryview(payload)
        self.size = len(self.payload)
        self.u8: Bytes = np.frombuffer(self.payload, np.uint8)
        self._words: dict[int, npt.NDArray[Any]] = {1: self.u8}
        for width, dtype in ((2, "<u2"), (4, "<u4"), (8, "<u8")):
            # The rest that is cut off here holds no aligned word.
            whole = self.size - self.size % width
            self._words[width] = np.frombuffer(self.payload[:whole], dtype)

    def check(self, positions: Places, size: Positions | int, align: int) -> None:
        """Check that ``size`` bytes at each position are in the buffer, and aligned."""
        if isinstance(positions, Even):
            if isinstance(size, int):
                self._check_even(positions, size, align)
                return
            positions = positions.array()
        count = len(positions)
        if count <= _FEW_ROWS:
            sizes = (size,) * count if isinstance(size, int) else size.tolist()
            for position, of_one in zip(positions.tolist(), sizes, strict=True):
                self.check_one(position, of_one, align)
            return
        # Vtables are found by signed distances, so a hostile position can be negative. Sums cannot
        # wrap round in 64 bits: positions, counts and sizes of items have at most 32, 32 and 6.
        # Reductions make no temporary arrays, which cost more than the looking.
        end = positions.max() + size if isinstance(size, int) else (positions + size).max()
        if not (positions.min() >= 0 and end <= self.size):
            raise outside()
        # A low bit that any position has is in the union of all.
        if align > 1 and int(np.bitwise_or.reduce(positions)) & (align - 1):
            raise misaligned()

    def _check_even(self, positions: Even, size: int, align: int) -> None:
        low, high = positions.bounds()
        if not 0 <= low <= high <= self.size - size:
            raise outside()
        # All positions are aligned if the first one and the step are.
        if (positions.start | positions.step) & (align - 1):
            raise misaligned()

    def check_one(self, position: int, size: int, align: int) -> None:
        """Check that ``size`` bytes at one position are in the buffer, and aligned."""
        if not 0 <= position <= self.size - size:
            raise outside()
        if position & (align - 1):
            raise misaligned()

    def shorts(self, position: int, count: int) -> tuple[int, ...]:
        """Read 16-bit words in a row: a vtable, or its first two."""
        self.check_one(position, 2 * count, 2)
        return struct.unpack_from(f"<{count}H", self.payload, position)

    def words(self, positions: Places, width: int) -> npt.NDArray[Any]:
        """Read one unsigned word of ``width`` bytes at each (checked) position; perhaps a view."""
        self.check(positions, width, width)
        return self._read(positions, width)

    def aligned_words(self, positions: Places, width: int) -> npt.NDArray[Any]:
        """Read words at positions that are known to be in the buffer."""
        if isinstance(positions, Even):
            self._check_even(positions, width, width)
        elif width > 1:
            bits = positions.item() if len(positions) == 1 else np.bitwise_or.reduce(positions)
            if int(bits) & (width - 1):
                raise misaligned()
        return self._read(positions, width)

    def _read(self, positions: Places, width: int) -> npt.NDArray[Any]:
        if isinstance(positions, Even):
            shape, strides = (positions.count,), (positions.step,)
            return np.ndarray(shape, f"<u{width}", self.payload, positions.start, strides)
        shift = width.bit_length() - 1
        if len(positions) == 1:  # a view, without the price of an index
            row = positions.item() >> shift
            return self._words[width][row : row + 1]
        words: npt.NDArray[Any] = self._words[width][positions >> shift]
        return words

    def rows(self, positions: Places, size: int) -> Bytes:
        """Return ``size`` bytes at each position, unaligned: ``(n, size)``; perhaps a view."""
        if len(positions) == 0:
            return np.empty((0, size), np.uint8)
        self.check(positions, size, 1)
        if isinstance(positions, Even):
            shape, strides = (positions.count, size), (positions.step, 1)
            return np.ndarray(shape, np.uint8, self.payload, positions.start, strides)
        if len(positions) * size <= _FEW_BYTES:
            few: Bytes = self.u8[positions[:, None] + np.arange(size)]
            return few
        return copy_of_rows(self.u8, positions, size)

    # The buffer of a seekable manifest overrides it, since its bytes may not have been fetched.
    def require(self, positions: Places, sizes: Positions | int) -> None:
        """Make sure that bytes known to be in the buffer are in memory: always, if it is whole."""

    def targets(self, positions: Places) -> Places:
        """Follow the 32-bit offset at each position."""
        distances = self.words(positions, 4)
        if isinstance(positions, Even):
            # Records that we write have equal distances to their parts, which then are even, too.
            distance = distances.item(0)
            if distance and (distances == distance).all():
                return positions.plus(distance)
        if not (distances.item() if len(distances) == 1 else distances.all()):
            raise pointless()
        targets: Positions = as_array(positions) + distances
        return targets

    def check_unfolded(self, size_bytes: int, sharing: int = MAX_SHARING) -> None:
        """Raise an error if contents unfold to more than ``sharing`` times the size of the file."""
        if size_bytes > sharing * self.size:
            raise unfolded(self.size, size_bytes)

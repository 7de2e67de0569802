"""Memory for large reads that is used again once nobody looks at what was read into it.

The system clears fresh memory page by page when it is written for the first time, which takes as
long as copying a file's bytes there out of the system's cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["MAX_BYTES", "MIN_BYTES", "borrow"]

MIN_BYTES: Final = 1 << 19
"""Shorter reads are given memory that the allocator has anyway."""
MAX_BYTES: Final = 1 << 21
_MOST_SPARE_BYTES: Final = 12 << 20
"""Of each size of blocks: as many of a megabyte as Zarr reads at a time, and two."""
_PAGE_BYTES: Final = 4096
"""Blocks begin where a page does. The allocator's begin 16 bytes later, and some processors take
twice as long to copy there from the system's cache, whose bytes begin with a page."""

_spare: Final[dict[int, list[memoryview]]] = {1 << 20: [], 1 << 21: []}
"""By size: who keeps what was read keeps at most twice as much memory."""


class _Loan:
    """A block of memory, given back when the last look at it ends."""

    __slots__ = ("_block", "_length")

    def __init__(self, block: memoryview, length: int) -> None:
        self._block: memoryview | None = block
        self._length = length

    def __buffer__(self, _flags: int) -> memoryview:
        if self._block is None:
            raise BufferError("This memory was given back.")
        return self._block[: self._length]

    def __release_buffer__(self, _view: memoryview) -> None:
        block, self._block = self._block, None
        if block is not None:
            spare = _spare[len(block)]
            if len(spare) < _MOST_SPARE_BYTES // len(block):
                spare.append(block)


def borrow(length: int) -> memoryview:
    """Answer memory to write into, with anything in it; any thread may ask.

    It goes back when this view and all that was made of it are gone, arrays included.

    Args:
        length: in bytes, from :data:`MIN_BYTES` to :data:`MAX_BYTES`.
    """
    size = next(it for it in _spare if it >= length)
    try:
        block = _spare[size].pop()
    except IndexError:
        fresh = np.empty(size + _PAGE_BYTES, np.uint8)
        start = -fresh.ctypes.data % _PAGE_BYTES
        block = memoryview(fresh)[start : start + size]
    return memoryview(_Loan(block, length))

"""Memory for large reads that is used again once nobody looks at what was read into it.

The system clears fresh memory page by page when it is written for the first time, which takes as
long as copying a file's bytes there out of the system's cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["MAX_BYTES", "MIN_BYTES", "borrow"]

MIN_BYTES: Final = 1 << 18
"""Shorter reads are given memory that the allocator has anyway."""
MAX_BYTES: Final = 2 << 20
_MOST_SPARE: Final = 12
"""As many chunks as Zarr reads at a time, and two; so much memory at most is kept."""

_PAGE_BYTES: Final = 4096
"""Blocks begin where a page does. The allocator's begin 16 bytes later, and many processors take
twice as long to copy there from the system's cache, whose bytes begin with a page."""

_spare: Final[list[memoryview]] = []


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
        if block is not None and len(_spare) < _MOST_SPARE:
            _spare.append(block)


def borrow(length: int) -> memoryview:
    """Answer memory to write into, with anything in it; any thread may ask.

    It goes back when this view and all that was made of it are gone, arrays included.
    """
    try:
        block = _spare.pop()
    except IndexError:
        fresh = np.empty(MAX_BYTES + _PAGE_BYTES, np.uint8)
        start = -fresh.ctypes.data % _PAGE_BYTES
        block = memoryview(fresh)[start : start + MAX_BYTES]
    return memoryview(_Loan(block, length))

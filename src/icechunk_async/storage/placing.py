"""Reading into memory that the caller made: parts of one object, put where they belong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from icechunk_async.storage.protocol import ByteRange

__all__ = ["PlacedRange", "room"]

_MOST_BYTES: Final = 256 << 20
"""The length of a read is somebody's word: beyond this, memory is used as bytes arrive."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRange(ByteRange):
    """A range with a known end, and where its bytes are wanted. Equal to the range alone.

    A storage may fill ``into`` and answer it as ``Retrieved.data``, if exactly so many bytes come;
    any other storage answers as always. Only one request at a time may fill it, and none after the
    read has returned or was cancelled.
    """

    into: memoryview = field(kw_only=True, repr=False)
    """Writable bytes, as many as the range has."""

    def __eq__(self, other: object) -> bool:
        """Compare what is asked for."""
        if not isinstance(other, ByteRange):
            return NotImplemented
        return (self.start, self.stop) == (other.start, other.stop)

    __hash__ = ByteRange.__hash__

    def unplaced(self) -> ByteRange:
        """Answer the range alone, for a request beside another one."""
        return ByteRange(self.start, self.stop)


def room(length: int) -> memoryview | None:
    """Answer memory for so many bytes, which takes none until it is filled; None for too many."""
    return memoryview(np.empty(length, np.uint8)) if length <= _MOST_BYTES else None

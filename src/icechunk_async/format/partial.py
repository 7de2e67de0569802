"""A FlatBuffer of which only a part is in memory; every read asks first whether its bytes are.

It has its full length, but only what was put there takes room: the system gives pages when they are
written to.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.format.buffer import Buffer
from icechunk_async.format.even import as_array
from icechunk_async.format.manifest_peek import PackedManifest

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.buffer import Bytes
    from icechunk_async.format.even import Places, Positions

__all__ = ["PartialBuffer", "PartialManifest"]


class PartialBuffer(Buffer, ABC):
    """Bytes some of which are here; what is found in them is handed out, and must not change.

    Attributes:
        data: the same, to be filled in.
    """

    def __init__(self, size_bytes: int) -> None:
        """Begin with nothing of so many bytes."""
        self.data = _untouched(size_bytes)
        super().__init__(memoryview(self.data).toreadonly())

    @abstractmethod
    def need(self, position: int, size: int) -> None:
        """Make sure that some bytes, which are in the buffer, are here; else raise."""

    def shorts(self, position: int, count: int) -> tuple[int, ...]:
        """Read 16-bit words in a row, all of which must be here."""
        self.check_one(position, 2 * count, 2)
        self.need(position, 2 * count)
        return super().shorts(position, count)

    def _read(self, positions: Places, width: int) -> npt.NDArray[Any]:
        self.require(positions, width)
        return super()._read(positions, width)

    def rows(self, positions: Places, size: int) -> Bytes:
        """Answer bytes at each position, all of which must be here."""
        self.check(positions, size, 1)
        self.require(positions, size)
        return super().rows(positions, size)

    def require(self, positions: Places, sizes: Positions | int) -> None:
        """Make sure that bytes known to be in the buffer are here."""
        found = as_array(positions)
        starts: list[int] = found.tolist()
        ends: list[int] = (found + sizes).tolist()
        for start, end in zip(starts, ends, strict=True):
            self.need(start, end - start)


class PartialManifest(PackedManifest):
    """The bytes of a manifest, some of them absent."""

    def __init__(self, buffer: PartialBuffer) -> None:
        """Look at the root, which must be here."""
        self._partial = buffer
        super().__init__(buffer)

    def _check(self, position: int, size: int) -> None:
        super()._check(position, size)
        self._partial.need(position, size)


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    """Answer zeros of which only what is written to takes memory, one small page at a time.

    NumPy asks for huge pages, of which a piece would touch one or two and fill a part.
    """
    pages = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that knows of none
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)

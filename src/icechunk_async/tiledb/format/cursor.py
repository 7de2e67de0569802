"""Read values from untrusted bytes, one after another and never beyond their end."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cursor", "text_of"]

_U8: Final = Struct("<B")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_F64: Final = Struct("<d")


class Cursor:
    """A position in bytes of a TileDB file; all numbers are little-endian."""

    __slots__ = ("_at", "_view", "_what")

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        """Begin at the first byte; messages call the bytes ``what``."""
        self._view = memoryview(data)
        self._at = 0
        self._what = what

    @property
    def position(self) -> int:
        """The number of bytes read so far."""
        return self._at

    @property
    def remaining(self) -> int:
        """The number of bytes not yet read."""
        return len(self._view) - self._at

    def damaged(self, why: str) -> FormatError:
        """Return the error for these bytes."""
        return FormatError(f"The {self._what} of a TileDB array is damaged: {why}.")

    def take(self, size: int) -> memoryview:
        """Return the next bytes.

        Raises:
            FormatError: there are fewer.
        """
        start = self._at
        if size > len(self._view) - start:
            raise self.damaged(
                f"{size} bytes should follow byte {start}, and only {self.remaining} do"
            )
        self._at = start + size
        return self._view[start : start + size]

    def rest(self) -> memoryview:
        """Return all bytes that were not read."""
        return self.take(self.remaining)

    def _number(self, struct: Struct) -> Any:
        (value,) = struct.unpack(self.take(struct.size))
        return value

    def u8(self) -> int:
        """Return the next byte."""
        return int(self._number(_U8))

    def flag(self) -> bool:
        """Return a boolean stored as a byte."""
        return bool(self._number(_U8))

    def u32(self) -> int:
        """Return an unsigned number of 4 bytes."""
        return int(self._number(_U32))

    def u64(self) -> int:
        """Return an unsigned number of 8 bytes."""
        return int(self._number(_U64))

    def f64(self) -> float:
        """Return a float of 8 bytes."""
        return float(self._number(_F64))

    def bytes32(self) -> bytes:
        """Return bytes after their length of 4 bytes."""
        return bytes(self.take(self.u32()))

    def bytes64(self) -> bytes:
        """Return bytes after their length of 8 bytes."""
        return bytes(self.take(self.u64()))

    def text32(self) -> str:
        """Return text after its length of 4 bytes."""
        return text_of(self.bytes32())

    def text64(self) -> str:
        """Return text after its length of 8 bytes."""
        return text_of(self.bytes64())

    def count(self, number: int, least_bytes: int, what: str) -> int:
        """Return ``number``, the count of entries that follow, if there are bytes for them.

        Args:
            number: the count.
            least_bytes: bytes that each entry takes at least.
            what: how messages call the entries.

        Raises:
            FormatError: there are not enough bytes.
        """
        # Before a list of them is made: 8 bytes can claim 2**64 entries.
        if number * least_bytes > self.remaining:
            raise self.damaged(f"it claims {number} {what} in {self.remaining} bytes")
        return number

    def array(self, dtype: str | np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Return the next ``count`` numbers as an array on the same memory.

        Raises:
            FormatError: there are fewer.
        """
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), kind)

    def u64s(self) -> npt.NDArray[np.uint64]:
        """Return a list of numbers of 8 bytes after their count."""
        return self.array("<u8", self.u64())

    def finish(self) -> None:
        """Raise `FormatError` if bytes are left."""
        if self.remaining:
            raise self.damaged(f"{self.remaining} bytes follow its end")


def text_of(data: bytes | memoryview) -> str:
    """Return bytes as text; bytes that are not UTF-8 become surrogates, one for each."""
    # Names and text of TileDB may be any bytes. These keep them apart, and become the same bytes
    # again.
    return bytes(data).decode("utf-8", "surrogateescape")

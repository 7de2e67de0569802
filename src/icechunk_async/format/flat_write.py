"""Writing FlatBuffers by the column: place everything first, then fill it in with NumPy.

The buffer is laid out forwards: vtables, then tables, then what tables refer to, so that every
offset points ahead and is known before a byte is written. Records of one shape (a table with the
small vectors that belong to it) are filled in as one structured array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.envelope import MAX_PAYLOAD_BYTES
from icechunk_async.format.windows import copy_of_rows, put_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]

__all__ = ["BLOCK", "IDENTIFIER", "Layout", "Offsets", "Output", "copy_pieces", "vtable"]

IDENTIFIER: Final = b"Ichk"
"""The file identifier that every writer sets and no reader checks."""

BLOCK: Final = 1 << 13
"""Records filled in at a time, field by field, so that they stay in the processor's cache."""


class Layout:
    """Decides where each part of a buffer goes."""

    def __init__(self) -> None:
        """Begin after the root offset and the file identifier."""
        self.size = 8

    def place(self, size: int, align: int) -> int:
        """Reserve ``size`` bytes and answer their position."""
        position = self.size + (-self.size) % align
        self.size = position + size
        return position

    def place_vector(self, count: int, item_size: int, align: int) -> int:
        """Reserve a vector and answer the position of its count, which items follow."""
        align = max(align, 4)
        items = self.place(4, 4) + 4
        items += (-items) % align
        self.size = items + count * item_size
        return items - 4

    def output(self) -> Output:
        """Allocate the buffer, zeroed.

        Raises:
            InvalidInputError: it exceeds what the format can address.
        """
        if self.size > MAX_PAYLOAD_BYTES:
            raise InvalidInputError(
                f"A file of {self.size} bytes exceeds the format's limit of 2 GiB. Configure "
                "manifest splitting, or commit more often."
            )
        return Output(np.zeros(self.size, np.uint8))


class Output:
    """A buffer being filled in."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        """Write the file identifier; the root comes with :meth:`finish`."""
        self.data = data
        self.put(4, IDENTIFIER)

    def put(self, position: int, raw: bytes | memoryview) -> None:
        """Copy bytes to a position."""
        self.data[position : position + len(raw)] = np.frombuffer(raw, np.uint8)

    def records(self, position: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Answer a view of ``count`` records, to be assigned to."""
        return self.data[position : position + count * dtype.itemsize].view(dtype)

    def word(self, position: int, value: int, width: int = 4) -> None:
        """Write one little-endian word, signed if ``value`` is negative."""
        self.put(position, value.to_bytes(width, "little", signed=value < 0))

    def offset(self, position: int, target: int) -> None:
        """Make the field at ``position`` refer to ``target``."""
        self.word(position, target - position)

    def offset_vector(self, position: int, targets: Positions) -> None:
        """Fill in a vector of offsets."""
        self.offsets(position, len(targets)).put(slice(0, len(targets)), targets)

    def offsets(self, position: int, count: int) -> Offsets:
        """Begin a vector of offsets, which are filled in later."""
        self.word(position, count)
        return Offsets(position + 4, self.records(position + 4, count, np.dtype("<u4")))

    def struct_vector(self, position: int, rows: npt.NDArray[Any]) -> None:
        """Fill in a vector of inline structs or words: one row an item."""
        self.word(position, len(rows))
        self.put(position + 4, np.ascontiguousarray(rows).tobytes())

    def byte_vectors(
        self,
        positions: Positions,
        source: npt.NDArray[np.uint8],
        starts: Positions,
        sizes: Positions,
    ) -> None:
        """Fill in many vectors of bytes (or strings) from pieces of ``source``."""
        words = self.data[: len(self.data) & ~3].view("<u4")
        words[positions >> 2] = sizes
        copy_pieces(self.data, positions + 4, source, starts, sizes)

    def table(self, position: int, vtable_position: int) -> None:
        """Begin a table: write the distance back to its vtable."""
        self.word(position, position - vtable_position)

    def finish(self, root: int) -> memoryview:
        """Set the root table and answer the buffer."""
        self.word(0, root)
        return memoryview(self.data)


class Offsets:
    """The entries of a vector of offsets."""

    def __init__(self, first: int, items: npt.NDArray[np.uint32]) -> None:
        """Fill in ``items``, the first of which lies at the position ``first``."""
        self._first = first
        self._items = items

    def put(self, rows: Positions | slice, targets: Positions) -> None:
        """Make entries refer to ``targets``; a slice has both its ends."""
        entries = (
            np.arange(len(targets), dtype=np.int64) + rows.start
            if isinstance(rows, slice)
            else rows
        )
        self._items[rows] = targets - (self._first + 4 * entries)


def copy_pieces(
    target: npt.NDArray[np.uint8],
    places: Positions,
    source: npt.NDArray[np.uint8],
    starts: Positions,
    sizes: Positions,
) -> None:
    """Copy pieces of one buffer to places in another: all pieces of one size at a time."""
    order = np.argsort(sizes, kind="stable")
    different, first = np.unique(sizes[order], return_index=True)
    for size, rows in zip(different.tolist(), np.split(order, first)[1:], strict=True):
        if size > 0:
            put_rows(target, places[rows], copy_of_rows(source, starts[rows], size))


def vtable(fields: Mapping[int, int], table_size: int) -> bytes:
    """Answer a vtable: where each slot's field lies in a table of ``table_size`` bytes."""
    slots = [0] * (max(fields, default=-1) + 1)
    for slot, place in fields.items():
        slots[slot] = place
    return _u16([4 + 2 * len(slots), table_size, *slots])


def _u16(values: Sequence[int]) -> bytes:
    return np.array(values, "<u2").tobytes()

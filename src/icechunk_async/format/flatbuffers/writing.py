"""Write FlatBuffers by the column; `blocks` does so for files that have few tables.

The buffer is laid out forwards: vtables, then tables, then what tables refer to, so that every
offset points ahead and is known before a byte is written. Records of one shape (a table with the
small vectors that belong to it) are filled in as one structured array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.envelope import MAX_PAYLOAD_BYTES
from icechunk_async.format.flatbuffers.blocks import HEAD, IDENTIFIER, Long, table, vector
from icechunk_async.format.flatbuffers.buffer import copy_of_rows, put_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.blocks import Block, Part, Shape

    type Positions = npt.NDArray[np.int64]

__all__ = [
    "BLOCK",
    "Layout",
    "Offsets",
    "Output",
    "column_vector",
    "copy_pieces",
    "finish_long",
    "joined",
    "long_vector",
    "vtable",
]


_LARGE_BYTES: Final = 1 << 22
"""From this size on NumPy requests large pages."""
_FEW_ROWS: Final = 8
"""Up to this many tables are written one by one in less time than by columns."""
_PIECES_OF_A_SIZE: Final = 20
"""Pieces of one size from which on it pays to copy them together."""
BLOCK: Final = 1 << 13
"""Records filled in at a time, field by field, so that they stay in the processor's cache."""


class Layout:
    """The layout: positions of all parts of a buffer."""

    def __init__(self) -> None:
        """Start after the root offset and the file identifier."""
        self.size = 8

    def place(self, size: int, align: int) -> int:
        """Reserve ``size`` bytes and return their position."""
        position = self.size + (-self.size) % align
        self.size = position + size
        return position

    def place_vector(self, count: int, item_size: int, align: int) -> int:
        """Reserve a vector and return the position of its count, which precedes the items."""
        # The items have to be aligned, and their count lies right before them.
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
            raise _too_large(self.size)
        return Output(np.zeros(self.size, np.uint8))


class Output:
    """A buffer being filled in."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        """Write the file identifier; the root comes with `finish`."""
        self.data = data
        self._view = memoryview(data)  # which takes small pieces in a fraction of NumPy's time
        # At a fixed place behind the root offset. Every official writer sets it, and no reader
        # checks it.
        self.put(4, IDENTIFIER)

    def put(self, position: int, raw: bytes | memoryview) -> None:
        """Copy bytes to a position."""
        self._view[position : position + len(raw)] = raw

    def records(self, position: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a view of ``count`` records, to be assigned to."""
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
        # Positive, since `Layout` has vtables before tables.
        self.word(position, position - vtable_position)

    def finish(self, root: int) -> memoryview:
        """Set the root table and return the buffer."""
        self.word(0, root)
        return self._view


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
    """Copy pieces of one buffer to places in another: all pieces of one size at a time.

    One by one if most sizes are different.
    """
    # Stable, so that pieces of one size are copied in the order in which they lie in the source.
    order = np.argsort(sizes, kind="stable")
    different, first = np.unique(sizes[order], return_index=True)
    if len(different) > 2 and _PIECES_OF_A_SIZE * len(different) > len(sizes):
        to, of = memoryview(target), memoryview(source)
        places_of = zip(places.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        for place, start, size in places_of:
            to[place : place + size] = of[start : start + size]
        return
    for size, rows in zip(different.tolist(), np.split(order, first)[1:], strict=True):
        if size > 0:
            put_rows(target, places[rows], copy_of_rows(source, starts[rows], size))


def vtable(fields: Mapping[int, int], table_size: int) -> bytes:
    """Return a vtable: where each slot's field lies in a table of ``table_size`` bytes."""
    slots = [0] * (max(fields, default=-1) + 1)
    for slot, place in fields.items():
        slots[slot] = place
    return _u16([4 + 2 * len(slots), table_size, *slots])


def _u16(values: Sequence[int]) -> bytes:
    return np.array(values, "<u2").tobytes()


def column_vector(shape: Shape, columns: Sequence[npt.NDArray[Any]]) -> Block:
    """Build a vector of tables that refer to nothing, given as columns: one for each slot.

    Numbers are ``(n,)``, bytes ``(n, size)``. Numbers that are 0, the default, are left out.
    """
    count = len(columns[0])
    if count <= _FEW_ROWS:
        values = map(_values, columns)
        return vector([table(shape, *row) for row in zip(*values, strict=True)])
    # One bit for each slot whose number is 0, and so one shape of table for each different pattern.
    # Bytes are never absent.
    absent = np.zeros(count, np.intp)
    for slot, column in enumerate(columns):
        if column.ndim == 1:
            absent |= (column == 0).astype(np.intp) << slot
    shapes = {
        code: shape.without(tuple([bool(code >> slot & 1) for slot in range(len(columns))]))
        for code in np.unique(absent).tolist()
    }
    # Indexed by pattern. Tables of this format have at most three columns here.
    ends, entries = np.zeros((2, 1 << len(columns)), np.int64)
    for code, found in shapes.items():
        ends[code], entries[code] = found.end, found.entry
    sizes = ends[absent]
    starts = np.cumsum(sizes) - sizes
    data = np.zeros(int(sizes.sum()), np.uint8)
    for code, found in shapes.items():
        rows = np.flatnonzero(absent == code)
        block = np.zeros((len(rows), found.end), np.uint8)
        # All tables of a pattern begin alike, down to the distance to their vtable.
        block[:, : len(found.head)] = np.frombuffer(found.head, np.uint8)
        present = [it for slot, it in enumerate(columns) if not code >> slot & 1]
        for place, column in zip(found.places, present, strict=True):
            raw = np.ascontiguousarray(column[rows]).view(np.uint8).reshape(len(rows), -1)
            block[:, place : place + raw.shape[1]] = raw
        put_rows(data, starts[rows], block)
    head = _offsets(starts + entries[absent])
    return b"".join([head, memoryview(data)]), 0


def _values(column: npt.NDArray[Any]) -> Sequence[bytes | int]:
    """Return the values of a column as `column_vector` takes it."""
    if column.ndim == 1:
        numbers: list[int] = column.tolist()
        return numbers
    raw, size = column.tobytes(), column.shape[1]
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def long_vector(positions: Positions, parts: Sequence[Part]) -> tuple[Long, int]:
    """Build a vector of tables, given where they are in pieces that follow one another."""
    return Long([_offsets(positions), *parts]), 0


def _offsets(positions: Positions) -> bytes:
    """Return the count and the offsets of a vector whose items come right after them."""
    count = len(positions)
    head = 4 + 4 * count
    gap = -head % 8
    words = np.zeros((head + gap) >> 2, "<u4")
    words[0] = count
    # Relative to the place of each offset: the first stands at 4, behind the count.
    words[1 : count + 1] = positions + (head + gap) - np.arange(4, head, 4)
    return words.tobytes()


def finish_long(root: tuple[Long, int]) -> Part:
    """Return the buffer with this root table, whose bytes are copied once.

    Raises:
        InvalidInputError: it exceeds what the format can address.
    """
    data, entry = root
    head = HEAD.pack(HEAD.size + entry, IDENTIFIER)
    size = len(head) + len(data)
    if size > MAX_PAYLOAD_BYTES:
        raise _too_large(size)
    if size < _LARGE_BYTES:
        return b"".join([head, *data.parts])
    # A bytes object of this size would lie in small pages, which take longer to touch.
    return memoryview(joined((head, *data.parts))).toreadonly()


def joined(parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
    """Copy pieces that follow one another into memory of NumPy, where they can be changed."""
    data = np.empty(sum(map(len, parts)), np.uint8)
    view, at = memoryview(data), 0
    for part in parts:
        view[at : at + len(part)] = part
        at += len(part)
    return data


def _too_large(size: int) -> InvalidInputError:
    return InvalidInputError(
        f"A file of {size} bytes exceeds the format's limit of 2 GiB. Configure "
        "manifest splitting, or commit more often."
    )

"""Reading FlatBuffers by the column: many tables of one type at once, checked before use.

One :class:`Tables` stands for any number of tables of the same type. Each accessor reads one
field of all of them with NumPy, after checking that every byte it is about to touch lies in the
buffer, so a hostile file raises ``FormatError`` and nothing else. No Python object is made per
table.

The layout is that of the FlatBuffers "Internals" document: a table begins with the signed
distance back to its vtable; a vtable holds two 16-bit sizes and then one 16-bit offset a field,
0 for a field that is absent; strings and vectors begin with a 32-bit count.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.repeats import differ
from icechunk_async.format.vtables import vtables_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    type Positions = npt.NDArray[np.int64]
    type Bytes = npt.NDArray[np.uint8]

__all__ = ["Buffer", "Tables", "Vectors"]

_MAX_SHARING: Final = 16
"""How much larger than the file the strings and numbers in it may be, unfolded.

Writers may let several tables point at one string or vector. A file in which everything points
at everything would unfold without end; genuine ones stay far below this.
"""
_MAX_REPEATED_TABLES: Final = 1
"""The same for vectors of tables, which writers do not share: each item costs far more."""


_FEW_ROWS: Final = 3
"""What is checked one by one, where reductions would take longer: small files are full of it."""
_FEW_BYTES: Final = 1 << 10
"""What is copied by an index for each byte, where preparing windows would take longer."""


class Buffer:
    """A FlatBuffer's bytes, seen as words of each size."""

    def __init__(self, payload: bytes | memoryview) -> None:
        """Look at ``payload`` without copying it."""
        self.payload = memoryview(payload)
        self.size = len(self.payload)
        self.u8: Bytes = np.frombuffer(self.payload, np.uint8)
        self._words: dict[int, npt.NDArray[Any]] = {1: self.u8}
        for width, dtype in ((2, "<u2"), (4, "<u4"), (8, "<u8")):
            whole = self.size - self.size % width
            self._words[width] = np.frombuffer(self.payload[:whole], dtype)

    def root(self) -> Tables:
        """Answer the root table, as the only row."""
        zero = np.zeros(1, np.int64)
        return Tables(self, self.targets(zero))

    def check(self, positions: Positions, size: Positions | int, align: int) -> None:
        """Make sure that ``size`` bytes at each position are in the buffer, and aligned."""
        count = len(positions)
        if count <= _FEW_ROWS:
            sizes = (size,) * count if isinstance(size, int) else size.tolist()
            for position, of_one in zip(positions.tolist(), sizes, strict=True):
                self.check_one(position, of_one, align)
            return
        # Reductions make no temporary arrays, which cost more than the looking.
        end = positions.max() + size if isinstance(size, int) else (positions + size).max()
        if not (positions.min() >= 0 and end <= self.size):
            raise _outside()
        if align > 1 and int(np.bitwise_or.reduce(positions)) & (align - 1):
            raise _misaligned()

    def check_one(self, position: int, size: int, align: int) -> None:
        """Make sure that ``size`` bytes at one position are in the buffer, and aligned."""
        if not 0 <= position <= self.size - size:
            raise _outside()
        if position & (align - 1):
            raise _misaligned()

    def shorts(self, position: int, count: int) -> tuple[int, ...]:
        """Read 16-bit words in a row: a vtable, or its first two."""
        self.check_one(position, 2 * count, 2)
        return struct.unpack_from(f"<{count}H", self.payload, position)

    def words(self, positions: Positions, width: int) -> npt.NDArray[Any]:
        """Read one unsigned word of ``width`` bytes at each (checked) position."""
        self.check(positions, width, width)
        return self._read(positions, width)

    def aligned_words(self, positions: Positions, width: int) -> npt.NDArray[Any]:
        """Read words at positions that are known to be in the buffer."""
        if width > 1:
            bits = positions.item() if len(positions) == 1 else np.bitwise_or.reduce(positions)
            if int(bits) & (width - 1):
                raise _misaligned()
        return self._read(positions, width)

    def _read(self, positions: Positions, width: int) -> npt.NDArray[Any]:
        shift = width.bit_length() - 1
        if len(positions) == 1:  # a view, without the price of an index
            row = positions.item() >> shift
            return self._words[width][row : row + 1]
        words: npt.NDArray[Any] = self._words[width][positions >> shift]
        return words

    def rows(self, positions: Positions, size: int) -> Bytes:
        """Copy ``size`` bytes at each position, without alignment: ``(n, size)``."""
        if len(positions) == 0:
            return np.empty((0, size), np.uint8)
        self.check(positions, size, 1)
        if len(positions) * size <= _FEW_BYTES:
            few: Bytes = self.u8[positions[:, None] + np.arange(size)]
            return few
        return np.lib.stride_tricks.sliding_window_view(self.u8, size)[positions]

    def require(self, positions: Positions, sizes: Positions | int) -> None:
        """Make sure that bytes known to be in the buffer are in memory: always, if it is whole."""

    def targets(self, positions: Positions) -> Positions:
        """Follow the 32-bit offset at each position."""
        distances = self.words(positions, 4).astype(np.int64)
        if not (distances.item() if len(distances) == 1 else distances.all()):
            raise FormatError("A FlatBuffer holds an offset that points at itself.")
        return positions + distances

    def check_unfolded(self, size_bytes: int, sharing: int = _MAX_SHARING) -> None:
        """Refuse contents that unfold to more than ``sharing`` times the size of the file."""
        if size_bytes > sharing * self.size:
            raise FormatError(
                f"A FlatBuffer of {self.size} bytes unfolds to {size_bytes}: it is not genuine."
            )


class Tables:
    """Any number of tables of one type, in order; the rows of every accessor."""

    def __init__(self, buffer: Buffer, positions: Positions) -> None:
        """Check the tables' vtables; ``positions`` are where the tables begin."""
        self.buffer = buffer
        self.positions = positions
        back = buffer.words(positions, 4).astype(np.int32)
        self._vtables = vtables_of(buffer, positions, positions - back)

    def __len__(self) -> int:
        """Count the tables."""
        return len(self.positions)

    @property
    def first_vtable(self) -> int:
        """Where the vtable of the first table is; there must be one."""
        return self._vtables.first

    def select(self, rows: npt.NDArray[Any]) -> Tables:
        """Answer the tables of some rows: indices or a mask."""
        return Tables(self.buffer, self.positions[rows])

    def row(self, index: int) -> Tables:
        """Answer one table alone."""
        return Tables(self.buffer, self.positions[index : index + 1])

    def has(self, slot: int) -> npt.NDArray[np.bool_]:
        """Answer in which rows the field is present."""
        return self._vtables.has(slot)

    def places(self, slot: int, size: int, *, field: str) -> Positions:
        """Answer where a required inline struct of ``size`` bytes is in the buffer."""
        positions, present = self._field(slot, size)
        _require(present, field)
        self.buffer.check(positions, size, 1)
        return positions

    def scalar(self, slot: int, width: int, default: int = 0) -> npt.NDArray[Any]:
        """Read an unsigned scalar of ``width`` bytes; ``default`` where it is absent."""
        positions, present = self._field(slot, width)
        if present is None:
            return self.buffer.aligned_words(positions, width)
        if not present.any():
            return np.broadcast_to(np.array(default, f"<u{width}"), len(self))
        values = np.full(len(self), default, f"<u{width}")
        values[present] = self.buffer.aligned_words(positions[present], width)
        return values

    def struct(self, slot: int, size: int, *, field: str) -> Bytes:
        """Read a required inline struct of ``size`` bytes without alignment: ``(n, size)``."""
        positions, present = self._field(slot, size)
        _require(present, field)
        return self.buffer.rows(positions, size)

    def vector(
        self, slot: int, item_size: int, align: int, *, required: str | None = None
    ) -> Vectors:
        """Find a vector field; rows without it have an empty one.

        Args:
            slot: number of the field.
            item_size: bytes of an item; 4 for vectors of tables and strings.
            align: alignment of an item.
            required: name of the field, where every row must have it.
        """
        positions, present = self._field(slot, 4)
        if required is not None:
            _require(present, required)
        if present is None:
            return Vectors.at(self.buffer, self.buffer.targets(positions), item_size, align)
        starts, counts = np.zeros((2, len(self)), np.int64)
        if not present.any():
            return Vectors(self.buffer, starts, counts, item_size)
        found = Vectors.at(self.buffer, self.buffer.targets(positions[present]), item_size, align)
        starts[present] = found.starts
        counts[present] = found.counts
        return Vectors(self.buffer, starts, counts, item_size)

    def strings(self, slot: int, *, required: str | None = None) -> list[str]:
        """Read a string field of every row; an absent one is empty."""
        return self.vector(slot, 1, 1, required=required).decode()

    def tables(self, slot: int, *, required: str) -> Tables:
        """Follow a required field to the one table that it refers to in each row."""
        positions, present = self._field(slot, 4)
        _require(present, required)
        return Tables(self.buffer, self.buffer.targets(positions))

    def _field(self, slot: int, size: int) -> tuple[Positions, npt.NDArray[np.bool_] | None]:
        """Answer the field's position in every row, and in which rows it is (None: in all)."""
        distances, present = self._vtables.field(slot, size)
        return self.positions + distances, present


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector or string a row: where its items start and how many there are."""

    buffer: Buffer
    starts: Positions
    counts: Positions
    item_size: int

    @classmethod
    def at(cls, buffer: Buffer, positions: Positions, item_size: int, align: int) -> Vectors:
        """Read the counts of vectors at ``positions`` and check that the items are there."""
        counts = buffer.words(positions, 4).astype(np.int64)
        starts = positions + 4
        buffer.check(starts, counts * item_size, 1)
        if align > 4:  # else the count before has told; an empty vector has no item to be aligned
            buffer.check(starts[counts > 0], 0, align)
        return cls(buffer, starts, counts, item_size)

    @classmethod
    def join(cls, parts: Sequence[Vectors]) -> Vectors:
        """Answer the rows of all parts, which are of one buffer and one type."""
        starts = np.concatenate([part.starts for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        return cls(parts[0].buffer, starts, counts, parts[0].item_size)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.starts)

    def items(self) -> Positions:
        """Answer the positions of all items of all rows, one after the other."""
        if len(self) == 1:
            start, size = self.starts.item(), self.counts.item() * self.item_size
            self.buffer.check_unfolded(size)
            return np.arange(start, start + size, self.item_size, dtype=np.int64)
        total = int(self.counts.sum())
        self.buffer.check_unfolded(total * self.item_size)
        if len(self) and (self.counts == self.counts[0]).all():
            steps = np.arange(self.counts[0], dtype=np.int64) * self.item_size
            positions: Positions = (self.starts[:, None] + steps).reshape(-1)
            return positions
        firsts = np.cumsum(self.counts) - self.counts
        within = np.arange(total, dtype=np.int64) - np.repeat(firsts, self.counts)
        return np.repeat(self.starts, self.counts) + within * self.item_size

    def words(self) -> npt.NDArray[Any]:
        """Read the unsigned words of all rows, one after the other."""
        return self.buffer.words(self.items(), self.item_size)

    def matrices(
        self, max_columns: int
    ) -> list[tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.uint32]]]:
        """Read 32-bit words as matrices, a row each: coordinates of one array.

        Other writers let coordinates of a wrong rank slip into their files, and only who knows
        the array can tell which they are. Those of too many columns are nobody's.

        Returns:
            The rows and the matrix of each length, the commonest first; rows are None for all.
        """
        if len(self) == 0 or (self.counts == self.counts[0]).all():
            return [(None, _matrix(self, max_columns))]
        lengths, times = np.unique(self.counts, return_counts=True)
        groups = (
            np.flatnonzero(self.counts == it) for it in lengths[np.argsort(-times, kind="stable")]
        )
        return [
            (rows, _matrix(self.select(rows), max_columns))
            for rows in groups
            if self.counts[rows[0]] <= max_columns
        ]

    def blocks(self, size: int) -> Iterator[Vectors]:
        """Iterate over the items of the only row, ``size`` of them at a time; at least once."""
        start, count = int(self.starts[0]), int(self.counts[0])
        for first in range(0, max(count, 1), size):
            at = np.array([start + first * self.item_size], np.int64)
            number = np.array([min(size, count - first)], np.int64)
            yield Vectors(self.buffer, at, number, self.item_size)

    def structs(self) -> Bytes:
        """Read the inline structs of all rows: ``(total, item_size)``."""
        return self.buffer.rows(self.items(), self.item_size)

    def tables(self) -> Tables:
        """Follow the items of all rows to the tables that they refer to."""
        self.check_tables()
        return Tables(self.buffer, self.buffer.targets(self.items()))

    def check_tables(self) -> None:
        """Refuse rows that share their items; before tables are followed row by row."""
        self.buffer.check_unfolded(int(self.counts.sum()) * 4, _MAX_REPEATED_TABLES)

    def where(self, mask: npt.NDArray[np.bool_], other: Vectors) -> Vectors:
        """Answer these rows, with those in ``mask`` taken from ``other``."""
        return Vectors(
            self.buffer,
            np.where(mask, other.starts, self.starts),
            np.where(mask, other.counts, self.counts),
            self.item_size,
        )

    def texts(self) -> list[str]:
        """Follow the items of all rows to the strings that they refer to."""
        return Vectors.at(self.buffer, self.buffer.targets(self.items()), 1, 1).decode()

    def select(self, rows: npt.NDArray[Any]) -> Vectors:
        """Answer some rows: indices or a mask."""
        return Vectors(self.buffer, self.starts[rows], self.counts[rows], self.item_size)

    def row(self, index: int) -> Vectors:
        """Answer one row alone."""
        return self.select(np.array([index]))

    def raw(self, index: int) -> memoryview:
        """Answer the bytes of one row, without copying."""
        self.buffer.require(self.starts[index : index + 1], self.counts[index] * self.item_size)
        start = int(self.starts[index])
        return self.buffer.payload[start : start + int(self.counts[index]) * self.item_size]

    def changes(self, longest: int | None = None) -> npt.NDArray[np.bool_]:
        """Answer which rows hold other bytes than the row before; the first one does.

        Args:
            longest: rows of more bytes count as different unless they share their place; None to
                compare all, within the bounds of a genuine file.
        """
        different = np.ones(len(self), bool)
        long = self.counts[1:] == self.counts[:-1]
        apart = self.starts[1:] != self.starts[:-1]
        different[1:] = ~long | apart
        if longest is not None:
            apart &= self.counts[1:] * self.item_size <= longest
        alike = np.flatnonzero(long & apart) + 1
        if len(alike):
            sizes = self.counts[alike] * self.item_size
            self.buffer.check_unfolded(int(sizes.sum()))
            self.buffer.require(self.starts, self.counts * self.item_size)
            different[alike] = differ(self.buffer.u8, self.starts, alike, sizes)
        return different

    def bytes(self) -> list[bytes]:
        """Copy the bytes of every row."""
        sizes = self.counts * self.item_size
        starts_sizes = list(zip(self.starts.tolist(), sizes.tolist(), strict=True))
        self.buffer.check_unfolded(sum(size for _, size in starts_sizes))
        self.buffer.require(self.starts, sizes)
        payload = self.buffer.payload
        return [bytes(payload[start : start + size]) for start, size in starts_sizes]

    def decode(self) -> list[str]:
        """Read every row as UTF-8."""
        try:
            return [raw.decode() for raw in self.bytes()]
        except UnicodeDecodeError as error:
            raise FormatError(f"A FlatBuffer string is not UTF-8: {error}.") from error


def _matrix(vectors: Vectors, max_columns: int) -> npt.NDArray[np.uint32]:
    """Read words of rows that are all of one length."""
    columns = int(vectors.counts[0]) if len(vectors) else 0
    if columns > max_columns:
        raise FormatError(f"A file has chunk coordinates of {columns} axes.")
    buffer = vectors.buffer
    buffer.check_unfolded(len(vectors) * 4 * columns)
    rows = buffer.rows(vectors.starts, 4 * columns) if columns else np.empty(0, np.uint8)
    return rows.reshape(-1).view("<u4").reshape(len(vectors), columns)


def _outside() -> FormatError:
    return FormatError("A FlatBuffer refers to bytes outside of itself.")


def _misaligned() -> FormatError:
    return FormatError("A FlatBuffer holds a misaligned value.")


def _require(present: npt.NDArray[np.bool_] | None, field: str) -> None:
    if present is not None and not present.all():
        raise FormatError(f"A FlatBuffer table lacks its required field {field!r}.")

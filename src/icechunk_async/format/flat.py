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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.even import FEWEST, Even, as_array, evenly, position_at
from icechunk_async.format.repeats import differ
from icechunk_async.format.vtables import vtables_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.buffer import Buffer, Bytes
    from icechunk_async.format.even import Places, Positions

__all__ = ["Tables", "Vectors"]

_MAX_REPEATED_TABLES: Final = 1
"""How much larger than the file vectors of tables may be, unfolded: writers do not share them, and
each item costs far more than one of a string."""


class Tables:
    """Any number of tables of one type, in order; the rows of every accessor."""

    def __init__(self, buffer: Buffer, places: Places) -> None:
        """Check the tables' vtables; ``places`` are where the tables begin."""
        self.buffer = buffer
        self._places = places
        back = buffer.words(places, 4).astype(np.int32)
        self._vtables = vtables_of(buffer, places, self.positions - back)

    @classmethod
    def root(cls, buffer: Buffer) -> Tables:
        """Answer the root table of a FlatBuffer, as the only row."""
        return cls(buffer, buffer.targets(np.zeros(1, np.int64)))

    def __len__(self) -> int:
        """Count the tables."""
        return len(self._places)

    @property
    def positions(self) -> Positions:
        """Where the tables begin."""
        return as_array(self._places)

    @property
    def first_vtable(self) -> int:
        """Where the vtable of the first table is; there must be one."""
        return self._vtables.first

    def select(self, rows: npt.NDArray[Any]) -> Tables:
        """Answer the tables of some rows: indices or a mask."""
        return Tables(self.buffer, self.positions[rows])

    def row(self, index: int) -> Tables:
        """Answer one table alone."""
        return Tables(self.buffer, np.array([position_at(self._places, index)], np.int64))

    def has(self, slot: int) -> npt.NDArray[np.bool_]:
        """Answer in which rows the field is present."""
        return self._vtables.has(slot)

    def places(self, slot: int, size: int, *, field: str) -> Positions:
        """Answer where a required inline struct of ``size`` bytes is in the buffer."""
        places, present = self._field(slot, size)
        _require(present, field)
        self.buffer.check(places, size, 1)
        return as_array(places)

    def scalar(self, slot: int, width: int, default: int = 0) -> npt.NDArray[Any]:
        """Read an unsigned scalar of ``width`` bytes; ``default`` where it is absent."""
        places, present = self._field(slot, width)
        if present is None:
            return self.buffer.aligned_words(places, width)
        if not present.any():
            return np.broadcast_to(np.array(default, f"<u{width}"), len(self))
        absent = np.flatnonzero(~present)
        if 2 * len(absent) > len(self):
            values = np.full(len(self), default, f"<u{width}")
            values[present] = self.buffer.aligned_words(as_array(places)[present], width)
            return values
        positions = np.array(as_array(places))
        positions[absent] = positions[present.argmax()]  # anywhere: it is replaced
        values = self.buffer.aligned_words(positions, width)
        values[absent] = default
        return values

    def struct(self, slot: int, size: int, *, field: str) -> Bytes:
        """Read a required inline struct of ``size`` bytes without alignment: ``(n, size)``."""
        places, present = self._field(slot, size)
        _require(present, field)
        return self.buffer.rows(places, size)

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
        places, present = self._field(slot, 4)
        if required is not None:
            _require(present, required)
        if present is None:
            return Vectors.at(self.buffer, self.buffer.targets(places), item_size, align)
        starts, counts = np.zeros((2, len(self)), np.int64)
        if not present.any():
            return Vectors(self.buffer, starts, counts, item_size)
        targets = self.buffer.targets(as_array(places)[present])
        found = Vectors.at(self.buffer, targets, item_size, align)
        starts[present] = found.starts
        counts[present] = found.counts
        return Vectors(self.buffer, starts, counts, item_size)

    def distinct_vectors(
        self, slot: int, longest: int, *, field: str
    ) -> tuple[Vectors, npt.NDArray[np.bool_]]:
        """Find those bytes of a required field that are others than in the row before.

        Args:
            slot: number of the field.
            longest: as :meth:`Vectors.changes`.
            field: its name.

        Returns:
            The bytes, and in which rows they are.
        """
        places, present = self._field(slot, 4)
        _require(present, field)
        targets = as_array(self.buffer.targets(places))
        different = np.ones(len(targets), bool)
        # Our files store once what many refer to, so that few of them are looked at.
        np.not_equal(targets[1:], targets[:-1], out=different[1:])
        if 2 * np.count_nonzero(different) < len(targets):
            found = Vectors.at(self.buffer, targets[different], 1, 1)
            kept = found.changes(longest)
            different[different] = kept
        else:
            found = Vectors.at(self.buffer, targets, 1, 1)
            kept = different = found.changes(longest)
        return found.select(kept), different

    def strings(self, slot: int, *, required: str | None = None) -> list[str]:
        """Read a string field of every row; an absent one is empty."""
        return self.vector(slot, 1, 1, required=required).decode()

    def tables(self, slot: int, *, required: str) -> Tables:
        """Follow a required field to the one table that it refers to in each row."""
        places, present = self._field(slot, 4)
        _require(present, required)
        return Tables(self.buffer, self.buffer.targets(places))

    def _field(self, slot: int, size: int) -> tuple[Places, npt.NDArray[np.bool_] | None]:
        """Answer the field's position in every row, and in which rows it is (None: in all)."""
        distances, present = self._vtables.field(slot, size)
        if isinstance(self._places, Even) and isinstance(distances, int):
            return self._places.plus(distances), present
        return self.positions + distances, present


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector or string a row: where its items start and how many there are."""

    buffer: Buffer
    places: Places
    """Where the items of each row start."""
    counts: Positions
    item_size: int

    @classmethod
    def at(cls, buffer: Buffer, places: Places, item_size: int, align: int) -> Vectors:
        """Read the counts of vectors at ``places`` and check that the items are there."""
        counts = buffer.words(places, 4).astype(np.int64)
        if isinstance(places, Even) and (counts == counts[0]).all():
            starts: Places = places.plus(4)
            buffer.check(starts, counts.item(0) * item_size, 1)
        else:
            starts = as_array(places) + 4
            buffer.check(starts, counts * item_size, 1)
        if align > 4:  # else the count before has told; an empty vector has no item to be aligned
            buffer.check(as_array(starts)[counts > 0], 0, align)
        return cls(buffer, starts, counts, item_size)

    @classmethod
    def join(cls, parts: Sequence[Vectors]) -> Vectors:
        """Answer the rows of all parts, which are of one buffer and one type."""
        starts = np.concatenate([part.starts for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        return cls(parts[0].buffer, starts, counts, parts[0].item_size)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.places)

    @property
    def starts(self) -> Positions:
        """Where the items of each row start, one by one."""
        return as_array(self.places)

    def items(self) -> Places:
        """Answer the positions of all items of all rows, one after the other."""
        if len(self) == 1:
            start, count = self.starts.item(), self.counts.item()
            self.buffer.check_unfolded(count * self.item_size)
            run = Even(start, self.item_size, count)
            return run if count >= FEWEST else run.array()
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
        start, count = self.starts.item(), self.counts.item()
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
        targets = as_array(self.buffer.targets(self.items()))
        return Tables(self.buffer, evenly(targets))

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
        start = np.array([position_at(self.places, index)], np.int64)
        return Vectors(self.buffer, start, self.counts[index : index + 1], self.item_size)

    def raw(self, index: int) -> memoryview:
        """Answer the bytes of one row, without copying."""
        start, size = position_at(self.places, index), self.counts.item(index) * self.item_size
        self.buffer.require(np.array([start], np.int64), size)
        return self.buffer.payload[start : start + size]

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
    if not columns:
        return np.empty((len(vectors), 0), np.uint32)
    # An index for each of one or two columns takes a tenth off decoding large manifests.
    if columns <= 2 and not isinstance(vectors.places, Even):
        words = np.empty((len(vectors), columns), np.uint32)
        for column in range(columns):
            words[:, column] = buffer.words(vectors.places + 4 * column, 4)
        return words
    return buffer.rows(vectors.places, 4 * columns).view("<u4")


def _require(present: npt.NDArray[np.bool_] | None, field: str) -> None:
    if present is not None and not present.all():
        raise FormatError(f"A FlatBuffer table lacks its required field {field!r}.")

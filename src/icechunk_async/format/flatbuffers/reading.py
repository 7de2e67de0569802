"""Read FlatBuffers by the column: many tables of one type at once, checked before use.

One `Tables` stands for any number of tables of the same type. Each accessor reads one
field of all of them with NumPy, after checking that every byte it is about to touch lies in the
buffer, so a hostile file raises ``FormatError`` and nothing else. No Python object is made per
table.

The layout is that of the FlatBuffers "Internals" document: a table begins with the signed
distance back to its vtable; a vtable holds two 16-bit sizes and then one 16-bit offset a field,
0 for a field that is absent; strings and vectors begin with a 32-bit count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import (
    FEWEST,
    Even,
    as_array,
    copy_of_rows,
    evenly,
    position_at,
)
from icechunk_async.format.flatbuffers.checks import MAX_REPEATED_TABLES, beyond_table, lacking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Buffer, Bytes, Places, Positions

    type Mask = npt.NDArray[np.bool_]
    type Raw = bytes

__all__ = [
    "FewVTables",
    "ManyVTables",
    "Tables",
    "VTable",
    "Vectors",
    "differ",
    "vtables_of",
]


_MOST: Final = 8
"""The number of distinct vtables handled; writers make one for each set of present fields."""


def vtables_of(
    buffer: Buffer, tables: Places, places: Positions
) -> VTable | FewVTables | ManyVTables:
    """Check the vtables at ``places``, one for each of ``tables``, and the tables' sizes.

    Raises:
        FormatError: a vtable or a table is not inside of the buffer, or misaligned.
    """
    if len(places) == 0:
        return VTable(0, 0, 0, (), 0)
    # The official builder stores equal vtables once, six to eight in a manifest, so places tell
    # them apart. Our blocks have one each, with equal contents. What neither tells apart may be
    # hostile, and is looked up for each table, by columns still.
    different, codes = _tell_apart(places)
    if codes is None:
        different, codes = _tell_contents_apart(buffer, places)
    if codes is None:
        return ManyVTables(buffer, tables, places)
    if len(different) > 1:
        return FewVTables(buffer, tables, different, codes)
    size, table_size, distances = _read(buffer, different[0])
    buffer.check(tables, table_size, 4)
    return VTable(different[0], size, table_size, distances, len(tables))


class VTable:
    """Where each field lies in tables that share one vtable, as most of a small file do.

    It is read with a few steps of the interpreter, which cost less than columns of one row.
    """

    def __init__(
        self, first: int, size: int, table_size: int, distances: tuple[int, ...], count: int
    ) -> None:
        """Stand for ``count`` tables."""
        self.first = first
        """Where the vtable of the first table is, if there is one."""
        self._size = size
        self._table_size = table_size
        self._distances = distances
        self._count = count

    def has(self, slot: int) -> Mask:
        """Return which tables have a field."""
        return _same_for_each(_distance(self._distances, slot) != 0, self._count)

    def sizes(self) -> tuple[Positions | int, Positions | int]:
        """Return the bytes that each table declares, and those of its vtable."""
        return self._table_size, self._size

    def reaches(self, slot: int) -> Mask:
        """Return which tables have a field of this number, or of a higher one."""
        return _same_for_each(any(self._distances[slot:]), self._count)

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Return how far into each table a field lies, and which tables have it (None: all).

        Args:
            slot: number of the field.
            size: its bytes.

        Raises:
            FormatError: it is not inside of its table.
        """
        distance = _distance(self._distances, slot)
        if distance == 0:
            # Place 0 is that of the table itself: it is in the buffer, and masks keep it from being
            # read.
            return 0, _same_for_each(False, self._count) if self._count else None  # noqa: FBT003
        if distance + size > self._table_size:
            raise beyond_table()
        return distance, None


class FewVTables:
    """Where each field lies in tables that share a few vtables: looked up once for each."""

    def __init__(
        self, buffer: Buffer, tables: Places, places: list[int], codes: npt.NDArray[np.intp]
    ) -> None:
        """Check the vtables at ``places``; ``codes`` map each of ``tables`` to its vtable."""
        self.first = places[0]
        self._codes = codes
        found = [_read(buffer, place) for place in places]
        self._vtables = [(table_size, distances) for _, table_size, distances in found]
        self._sizes = np.array([size for size, _, _ in found], np.int64)[codes]
        self._table_sizes = np.array([table_size for _, table_size, _ in found], np.int64)[codes]
        buffer.check(tables, self._table_sizes, 4)

    def has(self, slot: int) -> Mask:
        """Return which tables have a field."""
        known = [_distance(found, slot) != 0 for _, found in self._vtables]
        if len(set(known)) == 1:
            return _same_for_each(known[0], len(self._codes))
        column: Mask = np.array(known, bool)[self._codes]
        return column

    def sizes(self) -> tuple[Positions | int, Positions | int]:
        """Return the bytes that each table declares, and those of its vtable."""
        return self._table_sizes, self._sizes

    def reaches(self, slot: int) -> Mask:
        """Return as `VTable.reaches`."""
        known = [any(it[slot:]) for _, it in self._vtables]
        column: Mask = np.array(known, bool)[self._codes]
        return column

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Return and raise as `VTable.field`."""
        found: list[int] = []
        for table_size, distances in self._vtables:
            distance = _distance(distances, slot)
            if distance and distance + size > table_size:
                raise beyond_table()
            found.append(distance)
        if len(set(found)) == 1:
            return found[0], None if found[0] else _same_for_each(False, len(self._codes))  # noqa: FBT003
        column = np.array(found, np.int64)[self._codes]
        return column, None if all(found) else column != 0


_FEW_SLOTS: Final = 8
"""Fields beyond the known ones that are looked at, where each table has a separate vtable."""


class ManyVTables:
    """The positions of each field in tables with separate vtables."""

    def __init__(self, buffer: Buffer, tables: Places, places: Positions) -> None:
        """Check the vtables at ``places``, one for each of ``tables``."""
        self._buffer = buffer
        self._places = places
        self.first: int = places.item(0)
        buffer.check(places, 4, 2)
        # The two sizes before the rest: how much has to be in the buffer is known from them only.
        self._sizes = buffer.words(places, 2).astype(np.int64)
        self._table_sizes = buffer.words(places + 2, 2).astype(np.int64)
        buffer.check(places, self._sizes, 2)
        buffer.check(tables, self._table_sizes, 4)

    def has(self, slot: int) -> Mask:
        """Return which tables have a field."""
        present: Mask = self._distances(slot) != 0
        return present

    def sizes(self) -> tuple[Positions | int, Positions | int]:
        """Return the bytes that each table declares, and those of its vtable."""
        return self._table_sizes, self._sizes

    def reaches(self, slot: int) -> Mask:
        """Return as `VTable.reaches`; vtables far longer than that count as if they had one."""
        found: Mask = self._sizes > 4 + 2 * (slot + _FEW_SLOTS)
        for it in range(slot, slot + _FEW_SLOTS):
            found |= self.has(it)
        return found

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Return and raise as `VTable.field`."""
        distances = self._distances(slot)
        present = distances != 0
        if (present & (distances + size > self._table_sizes)).any():
            raise beyond_table()
        return distances, None if present.all() else present

    def _distances(self, slot: int) -> Positions:
        place = 4 + 2 * slot
        # A vtable ends with the last field that its writer knew or set. Fields beyond are absent.
        known = self._sizes >= place + 2
        distances = np.zeros(len(known), np.int64)
        distances[known] = self._buffer.words(self._places[known] + place, 2)
        return distances


def _read(buffer: Buffer, place: int) -> tuple[int, int, tuple[int, ...]]:
    """Check a vtable; return its size, that of its tables and the offset of each field."""
    size, table_size = buffer.shorts(place, 2)
    buffer.check_one(place, size, 2)
    # A hostile size may be below 4. The first two words were read already, so they are in the
    # buffer.
    return size, table_size, buffer.shorts(place, max(2, size >> 1))[2:]


def _distance(distances: tuple[int, ...], slot: int) -> int:
    return distances[slot] if slot < len(distances) else 0


# A stride of 0 repeats one byte. Its memory is a bytes object, so NumPy lets nobody write to it.
def _same_for_each(value: bool, count: int) -> Mask:  # noqa: FBT001
    """Return one value for ``count`` tables, in a byte of memory."""
    return np.ndarray(count, bool, b"\1" if value else b"\0", strides=(0,))


def _tell_apart(places: Positions) -> tuple[list[int], npt.NDArray[np.intp] | None]:
    """Return the distinct places and the index of each row's place; None if there are many."""
    if len(places) <= _MOST:
        listed: list[int] = places.tolist()
        different = list(dict.fromkeys(listed))
        return different, np.array([different.index(place) for place in listed], np.intp)
    different = [places.item(0)]
    left = np.flatnonzero(places != places[0])
    if len(left) == 0:
        return different, left
    codes = np.zeros(len(places), np.intp)  # others would be converted each time
    # Each round settles all tables with the vtable of the first one left: eight passes at most,
    # also where each table has another.
    while len(left) and len(different) < _MOST:
        others = places[left] != places[left[0]]
        codes[left] += 1
        different.append(places.item(left[0]))
        left = left[others]
    return different, None if len(left) else codes


_MAX_COMPARED_BYTES: Final = 64
"""Vtables of our schema are shorter; longer ones are not compared."""


def _tell_contents_apart(
    buffer: Buffer, places: Positions
) -> tuple[list[int], npt.NDArray[np.intp] | None]:
    """Return as `_tell_apart` for vtables that are equal, wherever they lie.

    Our files have a vtable in each block; looking each one up would take longer than comparing.
    """
    buffer.check(places, 4, 2)
    sizes = buffer.words(places, 2).astype(np.int64)
    buffer.check(places, sizes, 2)
    different: list[int] = []
    codes = np.zeros(len(places), np.intp)
    left = np.arange(len(places))
    # As in `_tell_apart`, but of bytes. The rounds are bounded in number and, by the size of a
    # vtable, in what they compare.
    while len(left) and len(different) < _MOST:
        size = sizes.item(left[0])
        if not 4 <= size <= _MAX_COMPARED_BYTES or size & 1:
            break
        codes[left] = len(different)
        different.append(places.item(left[0]))
        of_size = sizes[left] == size
        alike = left if of_size.all() else left[of_size]
        words = buffer.rows(places[alike], size).view(np.uint16)
        others = alike[_unequal(words, words[:1])]
        left = others if len(alike) == len(left) else np.union1d(others, left[~of_size])
    return different, None if len(left) else codes


_COMPARED_BYTES: Final = 1 << 20
"""Bytes copied at a time to compare strings."""
_SMALL_BYTES: Final = 1 << 12


def differ(
    data: npt.NDArray[np.uint8], starts: Positions, rows: Positions, sizes: Positions
) -> Mask:
    """Return which pieces of ``data`` differ from the piece before.

    Args:
        data: the bytes.
        starts: where all pieces begin.
        rows: those that are asked about, ascending, not the first. Each is of the size of the one
            before, and both lie in ``data``.
        sizes: theirs.

    Cost: in proportion to the bytes.
    """
    if (sizes == sizes[0]).all():
        return _differ(data, starts, rows, int(sizes[0]))
    different = np.zeros(len(sizes), bool)
    for size in _each_size(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        different[chosen] = _differ(data, starts, rows[chosen], size)
    return different


def _each_size(sizes: Positions) -> Positions:
    """Return the distinct sizes. Sizes of names are small, and counting is faster than sorting."""
    if sizes.max() > _SMALL_BYTES:
        return np.unique(sizes)
    return np.flatnonzero(np.bincount(sizes))


def _differ(data: npt.NDArray[np.uint8], starts: Positions, rows: Positions, size: int) -> Mask:
    """Return which of some pieces, all of one size, differ from the one before."""
    different = np.zeros(len(rows), bool)
    step = max(1, _COMPARED_BYTES // max(size, 1))
    for first in range(0, len(rows) if size else 0, step):
        some = rows[first : first + step]
        # Where most neighbours are asked about, each piece is the later one of a pair and the
        # earlier one of the next.
        near = starts[some[0] - 1 : some[-1] + 1]
        if len(near) <= 2 * len(some) and int(near.max()) + size + 8 <= len(data):
            pieces = _words(data, near, size)  # so that each is copied once
            found = _unequal(pieces[1:], pieces[:-1])[some - some[0]]
        else:
            pieces = _words(data, starts[np.concatenate([some, some - 1])], size)
            found = _unequal(pieces[: len(some)], pieces[len(some) :])
        different[first : first + step] = found
    return different


def _unequal(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Mask:
    """Return which rows differ: column by column, since rows are short and many."""
    found: Mask = left[:, 0] != right[:, 0]
    for column in range(1, left.shape[1]):
        found |= left[:, column] != right[:, column]
    return found


def _words(data: npt.NDArray[np.uint8], starts: Positions, size: int) -> npt.NDArray[Any]:
    """Copy pieces of one size, each a row of 64-bit words; of bytes at the end of the data."""
    padded = size + -size % 8
    if int(starts.max()) + padded > len(data):
        return copy_of_rows(data, starts, size)
    pieces = copy_of_rows(data, starts, padded)
    # These bytes belong to what follows, and must not count.
    pieces[:, size:] = 0
    return pieces.view(np.uint64)


class Tables:
    """Any number of tables of one type, in order; the rows of every accessor."""

    def __init__(self, buffer: Buffer, places: Places) -> None:
        """Check the tables' vtables; ``places`` are where the tables begin."""
        self.buffer = buffer
        self._places = places
        # A signed distance: official writers put vtables behind tables, too.
        back = buffer.words(places, 4).astype(np.int32)
        self.vtable_places: Positions = self.positions - back
        """Where the vtable of each table begins."""
        self._vtables = vtables_of(buffer, places, self.vtable_places)

    @classmethod
    def root(cls, buffer: Buffer) -> Tables:
        """Return the root table of a FlatBuffer, as the only row."""
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
        """Return the tables of some rows: indices or a mask."""
        return Tables(self.buffer, self.positions[rows])

    def row(self, index: int) -> Tables:
        """Return one table alone."""
        return Tables(self.buffer, np.array([position_at(self._places, index)], np.int64))

    def has(self, slot: int) -> npt.NDArray[np.bool_]:
        """Return in which rows the field is present."""
        return self._vtables.has(slot)

    def reaches(self, slot: int) -> npt.NDArray[np.bool_]:
        """Return in which rows this field, or one of a higher number, is present."""
        return self._vtables.reaches(slot)

    def sizes(self) -> tuple[Positions | int, Positions | int]:
        """Return the bytes that each table declares, and those of its vtable."""
        return self._vtables.sizes()

    def places(self, slot: int, size: int, *, field: str) -> Positions:
        """Return where a required inline struct of ``size`` bytes is in the buffer."""
        places, present = self._field(slot, size)
        _require(present, field)
        self.buffer.check(places, size, 1)
        return as_array(places)

    def find(self, slot: int, size: int) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Return where a field of ``size`` bytes is in the buffer, and in which rows it is."""
        places, present = self._field(slot, size)
        return as_array(places), np.ones(len(self), bool) if present is None else present

    def scalar(self, slot: int, width: int, default: int = 0) -> npt.NDArray[Any]:
        """Read an unsigned scalar of ``width`` bytes; ``default`` where it is absent."""
        places, present = self._field(slot, width)
        if present is None:
            # Fields end inside of their tables and tables inside of the buffer. Both were checked,
            # so only the alignment is left.
            return self.buffer.aligned_words(places, width)
        if not present.any():
            return np.broadcast_to(np.array(default, f"<u{width}"), len(self))
        absent = np.flatnonzero(~present)
        if 2 * len(absent) > len(self):
            values = np.full(len(self), default, f"<u{width}")
            values[present] = self.buffer.aligned_words(as_array(places)[present], width)
            return values
        positions = np.array(as_array(places))
        # Absent fields have the place of their table, which need not be aligned for this width.
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
        # No vector begins at 0, where the root's offset is: `starts > 0` says which rows have one.
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
            longest: as `Vectors.changes`.
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
        """Return the field's position in every row, and in which rows it is (None: in all)."""
        distances, present = self._vtables.field(slot, size)
        if isinstance(self._places, Even) and isinstance(distances, int):
            return self._places.plus(distances), present
        return self.positions + distances, present


_DECODED_ROWS: Final = 1 << 12
_DECODED_BYTES: Final = 1 << 20
"""The most strings decoded together, and their length: each byte takes 24 more while they are."""


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
            # A count may be any of 32 bits; in 64 the products below are exact.
            starts = as_array(places) + 4
            buffer.check(starts, counts * item_size, 1)
        if align > 4:  # else the count before has told; an empty vector has no item to be aligned
            buffer.check(as_array(starts)[counts > 0], 0, align)
        return cls(buffer, starts, counts, item_size)

    @classmethod
    def join(cls, parts: Sequence[Vectors]) -> Vectors:
        """Return the rows of all parts, which are of one buffer and one type."""
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
        """Return the positions of all items of all rows, one after the other."""
        if len(self) == 1:
            start, count = self.starts.item(), self.counts.item()
            self.buffer.check_unfolded(count * self.item_size)
            run = Even(start, self.item_size, count)
            return run if count >= FEWEST else run.array()
        # Before anything of this size is allocated: counts were checked one by one, and a million
        # rows may share one vector.
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

        Other writers let coordinates of a wrong rank slip into their files, and only the array's
        metadata shows which those are. Rows with too many columns are dropped.

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
        count = self.counts.item()
        for first in range(0, max(count, 1), size):
            yield self.span(first, min(first + size, count))

    def span(self, first: int, stop: int) -> Vectors:
        """Return some of the items of the only row, as a row."""
        at = np.array([self.starts.item() + first * self.item_size], np.int64)
        return Vectors(self.buffer, at, np.array([stop - first], np.int64), self.item_size)

    def structs(self) -> Bytes:
        """Read the inline structs of all rows: ``(total, item_size)``."""
        return self.buffer.rows(self.items(), self.item_size)

    def tables(self) -> Tables:
        """Follow the items of all rows to the tables that they refer to."""
        # Of 4 bytes each in the file, since writers do not share such vectors. Nested ones would
        # otherwise multiply at each level.
        self.check_tables()
        targets = as_array(self.buffer.targets(self.items()))
        return Tables(self.buffer, evenly(targets))

    def check_tables(self) -> None:
        """Refuse rows that share their items; before tables are followed row by row."""
        self.buffer.check_unfolded(int(self.counts.sum()) * 4, MAX_REPEATED_TABLES)

    def where(self, mask: npt.NDArray[np.bool_], other: Vectors) -> Vectors:
        """Return these rows, with those in ``mask`` taken from ``other``."""
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
        """Return some rows: indices or a mask."""
        return Vectors(self.buffer, self.starts[rows], self.counts[rows], self.item_size)

    def row(self, index: int) -> Vectors:
        """Return one row alone."""
        start = np.array([position_at(self.places, index)], np.int64)
        return Vectors(self.buffer, start, self.counts[index : index + 1], self.item_size)

    def raw(self, index: int) -> memoryview:
        """Return the bytes of one row, without copying."""
        start, size = position_at(self.places, index), self.counts.item(index) * self.item_size
        self.buffer.require(np.array([start], np.int64), size)
        return self.buffer.payload[start : start + size]

    def changes(self, longest: int | None = None) -> npt.NDArray[np.bool_]:
        """Return which rows hold other bytes than the row before; the first one does.

        Args:
            longest: rows of more bytes count as different unless they share their place; None to
                compare all, within the bounds of a genuine file.
        """
        different = np.ones(len(self), bool)
        long = self.counts[1:] == self.counts[:-1]
        apart = self.starts[1:] != self.starts[:-1]
        different[1:] = ~long | apart
        if longest is not None:
            # Long ones cost more to compare than to keep twice.
            apart &= self.counts[1:] * self.item_size <= longest
        alike = np.flatnonzero(long & apart) + 1
        if len(alike):
            sizes = self.counts[alike] * self.item_size
            # Rows may overlap, so that together they have far more bytes than the file.
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

    def each(self) -> Iterator[Raw]:
        """Iterate over the bytes of the rows, which may share them; each is copied at its turn."""
        sizes = self.counts * self.item_size
        self.buffer.require(self.starts, sizes)
        payload = self.buffer.payload
        for start, size in zip(self.starts.tolist(), sizes.tolist(), strict=True):
            yield bytes(payload[start : start + size])

    def decode(self) -> list[str]:
        """Read every row as UTF-8."""
        try:
            found = self._decode_together()
            return [raw.decode() for raw in self.bytes()] if found is None else found
        except UnicodeDecodeError as error:
            raise FormatError(f"A FlatBuffer string is not UTF-8: {error}.") from error

    def check_text(self) -> None:
        """Refuse rows that are not UTF-8."""
        try:
            if self._joined() is None:
                self.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"A FlatBuffer string is not UTF-8: {error}.") from error

    def _decode_together(self) -> list[str] | None:
        """Decode many rows as one text, which takes less than half the time; None if that fails."""
        joined = self._joined()
        if joined is None:
            return None
        found: list[str] = []
        for first, text in zip(range(0, len(self), _DECODED_ROWS), joined, strict=True):
            texts = text.split("\0")
            # A string that holds a NUL makes one piece more. Such rows are decoded one by one.
            if len(texts) - 1 != min(len(self) - first, _DECODED_ROWS):
                return None
            found += texts[1:]
        return found

    def _joined(self) -> list[str] | None:
        """Decode blocks of rows as a text each, with a NUL before each row; None if that fails."""
        if len(self) < FEWEST or (self.starts <= 0).any():
            return None
        # Joined they would be longer than the file, without a bound.
        if int(self.counts.sum()) > self.buffer.size:  # rows share strings
            return None
        self.buffer.require(self.starts, self.counts)
        found: list[str] = []
        for first in range(0, len(self), _DECODED_ROWS):
            counts = self.counts[first : first + _DECODED_ROWS]
            if int(counts.sum()) > _DECODED_BYTES:
                return None
            lengths = counts + 1
            ends = np.cumsum(lengths)
            starts = self.starts[first : first + _DECODED_ROWS]
            at = np.repeat(starts - 1 - (ends - lengths), lengths) + np.arange(ends.item(-1))
            letters = self.buffer.u8[at]
            # In place of the byte before each string, which belongs to its count.
            letters[ends - lengths] = 0
            # No character spans a NUL, so the joined text is UTF-8 exactly if each string is.
            found.append(letters.tobytes().decode())
        return found


def _matrix(vectors: Vectors, max_columns: int) -> npt.NDArray[np.uint32]:
    """Read words of rows that are all of one length."""
    columns = int(vectors.counts[0]) if len(vectors) else 0
    # Only if all rows have that many: `matrices` drops such rows among others.
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
        raise lacking(field)

"""Read FlatBuffers one table at a time: lookups that touch a few tables of a large file.

`reading` reads one field of many tables; this reads many fields of one. A step here takes less
than a microsecond where a column of one row takes several. Both make the same checks, so a hostile
file raises ``FormatError`` and nothing else.
"""

from __future__ import annotations

from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.checks import (
    MAX_REPEATED_TABLES,
    MAX_SHARING,
    beyond_table,
    columns_pay,
    lacking,
    misaligned,
    outside,
    pointless,
    unfolded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.format.flatbuffers.reading import Tables, Vectors

__all__ = ["Reader", "Row", "TableList"]

_U16_PAIR: Final = Struct("<HH")
_U32: Final = Struct("<I")
_I32: Final = Struct("<i")
_NUMBERS: Final = {1: Struct("<B"), 2: Struct("<H"), 4: _U32, 8: Struct("<Q")}
_SLOTS: Final = tuple(Struct(f"<{count}H") for count in range(16))


class Reader:
    """Reads single tables of a buffer.

    What tables refer to is counted over the reader's life, because tables that are sound each may
    all refer to the same things, which then would unfold without end. Read each table once.
    """

    __slots__ = ("_repeated_bytes", "_repeated_tables", "_vtables", "payload", "size")

    def __init__(self, payload: bytes | memoryview) -> None:
        """Read from ``payload``, all of which is in memory."""
        self.payload = memoryview(payload)
        self.size = len(self.payload)
        self._vtables: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._repeated_tables = 0
        self._repeated_bytes = 0

    def number(self, position: int, width: int = 4) -> int:
        """Read an unsigned word; check that it is inside and aligned."""
        if not 0 <= position <= self.size - width:
            raise outside()
        # It could be read nevertheless, but the official verifier refuses it: a file must not be
        # good for one reader and damaged for another.
        if position & (width - 1):
            raise misaligned()
        value: int = _NUMBERS[width].unpack_from(self.payload, position)[0]
        return value

    def target(self, position: int) -> int:
        """Follow the offset at a position."""
        distance = self.number(position)
        if distance == 0:
            raise pointless()
        return position + distance

    def table(self, position: int) -> Row:
        """Return the table at a position."""
        if not 0 <= position <= self.size - 4:
            raise outside()
        if position & 3:
            raise misaligned()
        place = position - _I32.unpack_from(self.payload, position)[0]
        known = self._vtables.get(place)
        if known is None:
            known = self._vtable(place)
        table_size, distances = known
        # Once for the table: with `Row._place` no field of it has to be looked at again.
        if position + table_size > self.size:
            raise outside()
        return Row(self, position, table_size, distances)

    def root(self) -> Row:
        """Return the root table."""
        return self.table(self.target(0))

    def text(self, at: int, *, counted: bool = True) -> str:
        """Read the string whose count is at a position."""
        # By its count alone: verifiers tolerate strings without the NUL that should end them.
        size = self.number(at)
        if at + 4 + size > self.size:
            raise outside()
        if counted:
            self.note_bytes(size)
        return _decoded(self.payload[at + 4 : at + 4 + size])

    def item(self, start: int, index: int) -> Row:
        """Return one table of a vector whose items begin at ``start``."""
        return self.table(self.target(start + 4 * index))

    def _vtable(self, place: int) -> tuple[int, tuple[int, ...]]:
        """Read a vtable: the size of its tables, and how far into them each field lies."""
        if not 0 <= place <= self.size - 4:
            raise outside()
        if place & 1:
            raise misaligned()
        size, table_size = _U16_PAIR.unpack_from(self.payload, place)
        if place + size > self.size:
            raise outside()
        # A hostile size below 4 counts as a vtable without fields.
        count = max(2, size >> 1) - 2
        form = _SLOTS[count] if count < len(_SLOTS) else Struct(f"<{count}H")
        found: tuple[int, tuple[int, ...]] = table_size, form.unpack_from(self.payload, place + 4)
        if len(self._vtables) < _MAX_VTABLES:
            self._vtables[place] = found
        return found

    def note_tables(self, count: int) -> None:
        """Refuse if more tables were followed in all than a genuine file has."""
        # Four bytes is what each item takes at least in the vector. Files whose tables all refer to
        # one vector would otherwise cost more with every level.
        self._repeated_tables += 4 * count
        if self._repeated_tables > MAX_REPEATED_TABLES * self.size:
            raise unfolded(self.size, self._repeated_tables)

    def note_bytes(self, size: int) -> None:
        """Refuse if more bytes were copied in all than those of a genuine file."""
        self._repeated_bytes += size
        if self._repeated_bytes > MAX_SHARING * self.size:
            raise unfolded(self.size, self._repeated_bytes)


_MAX_VTABLES: Final = 64
"""Files with shared vtables have a few; where each table has a separate one, none is met again."""


class Row:
    """One table; slots are numbered as in the schema."""

    __slots__ = ("_distances", "_reader", "_size", "position")

    def __init__(
        self, reader: Reader, position: int, size: int, distances: tuple[int, ...]
    ) -> None:
        """Stand for the table at ``position``, which was checked to be inside of the buffer."""
        self._reader = reader
        self.position = position
        self._size = size
        self._distances = distances

    def has(self, slot: int) -> bool:
        """Return whether a field is present."""
        return slot < len(self._distances) and self._distances[slot] != 0

    def number(self, slot: int, width: int) -> int:
        """Read an unsigned scalar; 0 if it is absent."""
        place = self._place(slot, width)
        return self._reader.number(place, width) if place else 0

    def struct(self, slot: int, size: int, *, field: str) -> bytes:
        """Read a required inline struct of ``size`` bytes."""
        place = self._place(slot, size)
        if not place:
            raise lacking(field)
        return bytes(self._reader.payload[place : place + size])

    def vector(
        self, slot: int, item_size: int, align: int, *, required: str | None = None
    ) -> tuple[int, int]:
        """Return where the items of a vector field begin, and how many there are.

        Args and errors as `Tables.vector`; an absent one is empty.
        """
        place = self._place(slot, 4)
        if not place:
            if required is not None:
                raise lacking(required)
            return 0, 0
        reader = self._reader
        at = reader.target(place)
        count = reader.number(at)
        if at + 4 + count * item_size > reader.size:
            raise outside()
        # The count was aligned to 4. Where a vector is empty, no item has to be aligned to more.
        if align > 4 and count and (at + 4) & (align - 1):
            raise misaligned()
        return at + 4, count

    def raw(self, slot: int, *, required: str | None = None, most: int | None = None) -> bytes:
        """Copy the first bytes of a vector or string field, at ``most`` that number; else all.

        An absent one is empty.
        """
        start, size = self.vector(slot, 1, 1, required=required)
        if most is not None:
            size = min(size, most)
        return bytes(self._reader.payload[start : start + size])

    def blob(self, slot: int, *, required: str) -> bytes:
        """Copy a required vector of bytes, which others may share; counted before it is copied."""
        start, size = self.vector(slot, 1, 1, required=required)
        self._reader.note_bytes(size)
        return bytes(self._reader.payload[start : start + size])

    def text(self, slot: int, *, required: str | None = None, counted: bool = True) -> str:
        """Read a string field; an absent one is empty.

        One that is not kept may be read many times, and is not ``counted``.
        """
        raw = self.raw(slot, required=required)
        if counted:
            self._reader.note_bytes(len(raw))
        return _decoded(raw)

    def texts(self, slot: int, *, required: str) -> list[str]:
        """Read a required vector of strings."""
        start, count = self.vector(slot, 4, 4, required=required)
        reader = self._reader
        if columns_pay(count):
            return _vectors(reader.payload, start, count, 4).texts()
        return [reader.text(reader.target(place)) for place in range(start, start + 4 * count, 4)]

    def words(self, slot: int, width: int) -> tuple[int, ...]:
        """Read a vector of unsigned words; an absent one is empty."""
        start, count = self.vector(slot, width, width)
        # Feature flags only, once a file: not counted.
        places = range(start, start + width * count, width)
        return tuple([self._reader.number(place, width) for place in places])

    def structs(self, slot: int, size: int, align: int, *, required: str | None = None) -> bytes:
        """Copy the inline structs of a vector field, one after the other."""
        start, count = self.vector(slot, size, align, required=required)
        self._reader.note_bytes(count * size)
        return bytes(self._reader.payload[start : start + count * size])

    def table(self, slot: int, *, required: str) -> Row:
        """Follow a required field to its table."""
        place = self._place(slot, 4)
        if not place:
            raise lacking(required)
        return self._reader.table(self._reader.target(place))

    def tables(self, slot: int, *, required: str | None = None) -> Iterator[Row]:
        """Iterate over the tables of a vector field; an absent one is empty."""
        start, count = self.vector(slot, 4, 4, required=required)
        # Before the first one is followed: callers make lists of all.
        self._reader.note_tables(count)
        for place in range(start, start + 4 * count, 4):
            yield self._reader.table(self._reader.target(place))

    def _place(self, slot: int, size: int) -> int:
        """Return where a field is in the buffer, 0 if it is absent."""
        distance = self._distances[slot] if slot < len(self._distances) else 0
        if distance == 0:
            return 0
        if distance + size > self._size:
            raise beyond_table()
        return self.position + distance

    def table_list(self, slot: int, *, required: str) -> tuple[memoryview, int, int]:
        """Return the arguments of `TableList` for a required vector of tables."""
        return self._reader.payload, *self.vector(slot, 4, 4, required=required)


class TableList:
    """A long vector of tables, which are read one by one or by columns."""

    def __init__(self, payload: memoryview, first: int, count: int) -> None:
        """Look at ``count`` offsets to tables, which begin at ``first``.

        Raises:
            FormatError: they cannot be those of a genuine file.
        """
        # Before columns of that length are allocated.
        if MAX_REPEATED_TABLES * len(payload) < 4 * count:
            raise unfolded(len(payload), 4 * count)
        self.payload = payload
        self._first, self._count = first, count
        self._reader = Reader(payload)

    def __len__(self) -> int:
        """Count the tables."""
        return self._count

    @cached_property
    def entries(self) -> Vectors:
        """The vector, as the only row."""
        return _vectors(self.payload, self._first, self._count, 4)

    @cached_property
    def tables(self) -> Tables:
        """All of them, to be read by columns."""
        return self.entries.tables()

    def rows(self) -> list[Row]:
        """Return all of them, to be read one by one."""
        return [self._row(row) for row in range(self._count)]

    def _row(self, row: int) -> Row:
        """Return one of them."""
        return self._reader.item(self._first, row)


def _vectors(payload: memoryview, start: int, count: int, item_size: int) -> Vectors:
    """Return a vector whose items begin at ``start``, to be read by columns."""
    import numpy as np  # noqa: PLC0415 -- single tables need no NumPy

    from icechunk_async.format.flatbuffers.buffer import Buffer  # noqa: PLC0415 -- needs NumPy
    from icechunk_async.format.flatbuffers.reading import Vectors  # noqa: PLC0415 -- needs NumPy

    places, counts = np.array([start], np.int64), np.array([count], np.int64)
    return Vectors(Buffer(payload), places, counts, item_size)


def _decoded(raw: bytes | memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"A FlatBuffer string is not UTF-8: {error}.") from error

"""The vtables of many FlatBuffer tables: a few different ones, shared by all the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.buffer import Buffer
    from icechunk_async.format.even import Places, Positions

    type Mask = npt.NDArray[np.bool_]

__all__ = ["FewVTables", "ManyVTables", "VTable", "vtables_of"]

_MOST: Final = 8
"""So many different vtables are told apart; writers make one for each set of present fields."""


def vtables_of(
    buffer: Buffer, tables: Places, places: Positions
) -> VTable | FewVTables | ManyVTables:
    """Check the vtables at ``places``, one for each of ``tables``, and the tables' sizes.

    Raises:
        FormatError: a vtable or a table is not inside of the buffer, or misaligned.
    """
    if len(places) == 0:
        return VTable(0, 0, (), 0)
    different, codes = _tell_apart(places)
    if codes is None:
        return ManyVTables(buffer, tables, places)
    if len(different) > 1:
        return FewVTables(buffer, tables, different, codes)
    table_size, distances = _read(buffer, different[0])
    buffer.check(tables, table_size, 4)
    return VTable(different[0], table_size, distances, len(tables))


class VTable:
    """Where each field lies in tables that share one vtable, as most of a small file do.

    It is read with a few steps of the interpreter, which cost less than columns of one row.
    """

    def __init__(self, first: int, table_size: int, distances: tuple[int, ...], count: int) -> None:
        """Stand for ``count`` tables."""
        self.first = first
        """Where the vtable of the first table is, if there is one."""
        self._table_size = table_size
        self._distances = distances
        self._count = count

    def has(self, slot: int) -> Mask:
        """Answer which tables have a field."""
        return _each(_distance(self._distances, slot) != 0, self._count)

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Answer how far into each table a field lies, and which tables have it (None: all).

        Args:
            slot: number of the field.
            size: its bytes.

        Raises:
            FormatError: it is not inside of its table.
        """
        distance = _distance(self._distances, slot)
        if distance == 0:
            return 0, _each(False, self._count) if self._count else None  # noqa: FBT003
        if distance + size > self._table_size:
            raise _outside()
        return distance, None


class FewVTables:
    """Where each field lies in tables that share a few vtables: looked up once for each."""

    def __init__(
        self, buffer: Buffer, tables: Places, places: list[int], codes: npt.NDArray[np.intp]
    ) -> None:
        """Check the vtables at ``places``; ``codes`` tell which each of ``tables`` has."""
        self.first = places[0]
        self._codes = codes
        self._vtables = [_read(buffer, place) for place in places]
        table_sizes = np.array([table_size for table_size, _ in self._vtables], np.int64)
        buffer.check(tables, table_sizes[codes], 4)

    def has(self, slot: int) -> Mask:
        """Answer which tables have a field."""
        known = [_distance(found, slot) != 0 for _, found in self._vtables]
        if len(set(known)) == 1:
            return _each(known[0], len(self._codes))
        column: Mask = np.array(known, bool)[self._codes]
        return column

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Answer and refuse as :meth:`VTable.field`."""
        found: list[int] = []
        for table_size, distances in self._vtables:
            distance = _distance(distances, slot)
            if distance and distance + size > table_size:
                raise _outside()
            found.append(distance)
        if len(set(found)) == 1:
            return found[0], None if found[0] else _each(False, len(self._codes))  # noqa: FBT003
        column = np.array(found, np.int64)[self._codes]
        return column, None if all(found) else column != 0


class ManyVTables:
    """Where each field lies in tables that have vtables of their own."""

    def __init__(self, buffer: Buffer, tables: Places, places: Positions) -> None:
        """Check the vtables at ``places``, one for each of ``tables``."""
        self._buffer = buffer
        self._places = places
        self.first: int = places.item(0)
        buffer.check(places, 4, 2)
        self._sizes = buffer.words(places, 2).astype(np.int64)
        self._table_sizes = buffer.words(places + 2, 2).astype(np.int64)
        buffer.check(places, self._sizes, 2)
        buffer.check(tables, self._table_sizes, 4)

    def has(self, slot: int) -> Mask:
        """Answer which tables have a field."""
        present: Mask = self._distances(slot) != 0
        return present

    def field(self, slot: int, size: int) -> tuple[int | Positions, Mask | None]:
        """Answer and refuse as :meth:`VTable.field`."""
        distances = self._distances(slot)
        present = distances != 0
        if (present & (distances + size > self._table_sizes)).any():
            raise _outside()
        return distances, None if present.all() else present

    def _distances(self, slot: int) -> Positions:
        place = 4 + 2 * slot
        known = self._sizes >= place + 2
        distances = np.zeros(len(known), np.int64)
        distances[known] = self._buffer.words(self._places[known] + place, 2)
        return distances


def _read(buffer: Buffer, place: int) -> tuple[int, tuple[int, ...]]:
    """Check a vtable; answer the size of its tables, and how far into them each field lies."""
    size, table_size = buffer.shorts(place, 2)
    buffer.check_one(place, size, 2)
    return table_size, buffer.shorts(place, max(2, size >> 1))[2:]


def _distance(distances: tuple[int, ...], slot: int) -> int:
    return distances[slot] if slot < len(distances) else 0


def _each(value: bool, count: int) -> Mask:  # noqa: FBT001
    """Answer the same for each of so many tables, in a byte of memory."""
    return np.ndarray(count, bool, b"\1" if value else b"\0", strides=(0,))


def _tell_apart(places: Positions) -> tuple[list[int], npt.NDArray[np.intp] | None]:
    """Answer the different places, and which of several each row has; None if they are many."""
    if len(places) <= _MOST:
        listed: list[int] = places.tolist()
        different = list(dict.fromkeys(listed))
        return different, np.array([different.index(place) for place in listed], np.intp)
    different = [places.item(0)]
    left = np.flatnonzero(places != places[0])
    if len(left) == 0:
        return different, left
    codes = np.zeros(len(places), np.intp)  # others would be converted each time
    while len(left) and len(different) < _MOST:
        others = places[left] != places[left[0]]
        codes[left] += 1
        different.append(places.item(left[0]))
        left = left[others]
    return different, None if len(left) else codes


def _outside() -> FormatError:
    return FormatError("A FlatBuffer table has a field outside of itself.")

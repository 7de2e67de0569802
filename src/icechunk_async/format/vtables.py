"""The vtables of many FlatBuffer tables: a few different ones, shared by all the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.flat import Buffer

    type Positions = npt.NDArray[np.int64]
    type Mask = npt.NDArray[np.bool_]

__all__ = ["VTable", "VTables", "vtables_of"]

_MOST: Final = 8
"""So many different vtables are told apart; writers make one for each set of present fields."""


def vtables_of(buffer: Buffer, tables: Positions, places: Positions) -> VTables | VTable:
    """Check the vtables at ``places``, one for each of ``tables``, and the tables' sizes.

    Raises:
        FormatError: a vtable or a table is not inside of the buffer, or misaligned.
    """
    if len(places) == 0:
        return VTable(0, 0, (), 0)
    places, codes = _tell_apart(places)
    if len(places) > 1:
        return VTables(buffer, tables, places, codes)
    place: int = places.item()
    size, table_size = buffer.shorts(place, 2)
    buffer.check_one(place, size, 2)
    buffer.check(tables, table_size, 4)
    return VTable(place, table_size, buffer.shorts(place, max(2, size >> 1))[2:], len(tables))


class VTable:
    """Where each field lies in tables that share one vtable, as all of a small file do.

    It is read with a few steps of the interpreter, which cost less than columns of one row.
    """

    def __init__(self, first: int, table_size: int, distances: tuple[int, ...], count: int) -> None:
        """Stand for ``count`` tables."""
        self.first = first
        self._table_size = table_size
        self._distances = distances
        self._count = count

    def has(self, slot: int) -> Mask:
        """Answer which tables have a field."""
        return _each(slot < len(self._distances) and self._distances[slot] != 0, self._count)

    def field(self, slot: int, size: int) -> tuple[int, Mask | None]:
        """Answer how far into each table a field lies, and which tables have it (None: all).

        Args and errors as :meth:`VTables.field`.
        """
        distance = self._distances[slot] if slot < len(self._distances) else 0
        if distance == 0:
            return 0, _each(False, self._count) if self._count else None  # noqa: FBT003
        if distance + size > self._table_size:
            raise FormatError("A FlatBuffer table has a field outside of itself.")
        return distance, None


class VTables:
    """Where each field lies in tables of one type; looked up once for tables that agree."""

    def __init__(
        self,
        buffer: Buffer,
        tables: Positions,
        places: Positions,
        codes: npt.NDArray[np.intp] | None,
    ) -> None:
        """Check the vtables at ``places``; ``codes`` tell which each of ``tables`` has."""
        self._buffer = buffer
        self._places, self._codes = places, codes
        buffer.check(self._places, 4, 2)
        self._sizes = buffer.words(self._places, 2).astype(np.int64)
        self._table_sizes = buffer.words(self._places + 2, 2).astype(np.int64)
        buffer.check(self._places, self._sizes, 2)
        buffer.check(tables, self._unfold(self._table_sizes), 4)

    @property
    def first(self) -> int:
        """Where the vtable of the first table is; there must be one."""
        return int(self._places[0])

    def has(self, slot: int) -> Mask:
        """Answer which tables have a field."""
        return self._unfold(self._distances(slot) != 0)

    def field(self, slot: int, size: int) -> tuple[Positions, Mask | None]:
        """Answer how far into each table a field lies, and which tables have it (None: all).

        Args:
            slot: number of the field.
            size: its bytes.

        Raises:
            FormatError: it is not inside of its table.
        """
        distances = self._distances(slot)
        present = distances != 0
        if (present & (distances + size > self._table_sizes)).any():
            raise FormatError("A FlatBuffer table has a field outside of itself.")
        return self._unfold(distances), None if present.all() else self._unfold(present)

    def _distances(self, slot: int) -> Positions:
        place = 4 + 2 * slot
        known = self._sizes >= place + 2
        distances = np.zeros(len(known), np.int64)
        distances[known] = self._buffer.words(self._places[known] + place, 2)
        return distances

    def _unfold[T: np.generic](self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        """Answer a row for each table, or one that all share."""
        return values if self._codes is None else values[self._codes]


def _each(value: bool, count: int) -> Mask:  # noqa: FBT001
    """Answer the same for each of so many tables, in a byte of memory."""
    return np.ndarray(count, bool, b"\1" if value else b"\0", strides=(0,))


def _tell_apart(places: Positions) -> tuple[Positions, npt.NDArray[np.intp] | None]:
    """Answer the different places, and which each row has.

    The rows have None where all have one place, or where too many have places of their own.
    """
    if len(places) == 1:
        return places, None
    left = np.flatnonzero(places != places[0])
    if len(left) == 0:
        return places[:1], None
    codes = np.zeros(len(places), np.intp)  # others would be converted each time
    different = [places[0]]
    while len(left) and len(different) < _MOST:
        others = places[left] != places[left[0]]
        codes[left] += 1
        different.append(places[left[0]])
        left = left[others]
    return (places, None) if len(left) else (np.array(different, np.int64), codes)

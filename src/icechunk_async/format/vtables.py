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

__all__ = ["VTables"]

_MOST: Final = 8
"""So many different vtables are told apart; writers make one for each set of present fields."""


class VTables:
    """Where each field lies in tables of one type; looked up once for tables that agree."""

    def __init__(self, buffer: Buffer, tables: Positions, places: Positions) -> None:
        """Check the vtables at ``places``, one for each of ``tables``, and the tables' sizes."""
        self._buffer = buffer
        self._places, self._codes = _tell_apart(places)
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
        """Answer which tables have a field; one answer for all where that is the same."""
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


def _tell_apart(places: Positions) -> tuple[Positions, npt.NDArray[np.intp] | None]:
    """Answer the different places, and which each row has.

    The rows have None where all have one place, or where too many have places of their own.
    """
    left = np.flatnonzero(places != places[0]) if len(places) else places
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

"""Cells of one field as NumPy columns, and as NumPy arrays for users."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.types import (
    BYTE_TEXT,
    TEXT,
    Datatype,
    time_unit,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.tiledb.format.schema import Attribute, Dimension, Enumeration

    type Field = Attribute | Dimension

__all__ = [
    "BINARY",
    "UTF8",
    "Cells",
    "Field",
    "category_values",
    "fill_cells",
    "is_bytes",
    "viewed",
]

BINARY: Final = frozenset({Datatype.BLOB, Datatype.ANY, Datatype.GEOM_WKB, Datatype.GEOM_WKT})
UTF8: Final = (Datatype.STRING_ASCII, Datatype.STRING_UTF8)


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one field, one after another."""

    field: Field
    values: npt.NDArray[Any]
    """Of fixed length: `(n, values of a cell)`. Else: the values of all cells in a row."""
    offsets: npt.NDArray[np.int64] | None = None
    """Of variable length: where each cell begins in ``values``, and the end; `(n + 1,)`."""
    valid: npt.NDArray[np.bool_] | None = None
    """Which cells are not null, if the field may be null; `(n,)`."""

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        beside = (it for it in (self.offsets, self.valid) if it is not None)
        return self.values.nbytes + sum(it.nbytes for it in beside)

    def take(self, rows: npt.NDArray[Any]) -> Cells:
        """Return some cells, by a mask or by their numbers."""
        valid = None if self.valid is None else self.valid[rows]
        if self.offsets is None:
            return Cells(self.field, self.values[rows], None, valid)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        # Cells of 2, 3 and 1 values, offsets [0, 2, 5, 6]. Of the rows 2 and 0 `starts` are 5 and
        # 0, `lengths` 1 and 2, and `numbers` 5, 0, 1.
        starts = self.offsets[:-1][rows]
        lengths = self.offsets[1:][rows] - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # The number of each value: those of a cell follow one another.
        numbers = np.arange(int(offsets[-1])) + np.repeat(starts - offsets[:-1], lengths)
        return Cells(self.field, self.values[numbers], offsets, valid)

    def cut(self, start: int, stop: int) -> Cells:
        """Return a run of cells, on the same memory where that is possible."""
        valid = None if self.valid is None else self.valid[start:stop]
        if self.offsets is None:
            return Cells(self.field, self.values[start:stop], None, valid)
        offsets = self.offsets[start : stop + 1]
        values = self.values[int(offsets[0]) : int(offsets[-1])]
        return Cells(self.field, values, offsets - offsets[0], valid)

    @staticmethod
    def concat(parts: Sequence[Cells]) -> Cells:
        """Return the cells of several runs of one field."""
        first = parts[0]
        if len(parts) == 1:
            return first
        valid = (
            None
            if first.valid is None
            else np.concatenate([cast("npt.NDArray[np.bool_]", it.valid) for it in parts])
        )
        values = np.concatenate([it.values for it in parts])
        if first.offsets is None:
            return Cells(first.field, values, None, valid)
        pieces: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        base = 0
        for it in parts:
            assert it.offsets is not None  # all parts are of one field
            pieces.append(it.offsets[1:] + base)
            base += int(it.offsets[-1])
        return Cells(first.field, values, np.concatenate(pieces), valid)

    def flat(self) -> npt.NDArray[Any]:
        """Return the single values of cells of fixed length with one value, `(n,)`."""
        return self.values[:, 0]

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return an array of `(n,)`, or `(n, k)` for cells of k values.

        Moments become ``datetime64``, times of day ``timedelta64``, text of fixed length ``S``.
        Cells of variable length become objects: `str`, `bytes` or arrays. Cells that may be null
        come as a masked array.
        """
        found = self._plain_numpy()
        if self.valid is None:
            return found
        mask = ~self.valid
        if found.ndim > 1:
            mask = np.repeat(mask[:, None], found.shape[1], axis=1)
        return np.ma.MaskedArray(found, mask=mask)

    def _plain_numpy(self) -> npt.NDArray[Any]:
        if self.offsets is not None:
            found = np.empty(len(self), object)
            found[:] = self.items() if len(self) else []
            return found
        return viewed(self.field, self.values)

    def stored_items(self) -> list[bytes]:
        """Return the stored bytes of each cell, little-endian."""
        data = np.ascontiguousarray(self.values).tobytes()
        width = self.values.dtype.itemsize
        if self.offsets is None:
            bounds = list(range(0, len(data) + 1, width * self.values.shape[1]))
        else:
            bounds = (self.offsets * width).tolist()
        return [data[a:b] for a, b in itertools.pairwise(bounds)]

    def items(self) -> list[Any]:
        """Return cells of variable length: `str`, `bytes`, or arrays of numbers."""
        assert self.offsets is not None  # of variable length
        bounds = self.offsets.tolist()
        pairs = itertools.pairwise(bounds)
        datatype = self.field.datatype
        if datatype in BYTE_TEXT or datatype in BINARY:
            data = self.values.tobytes()
            if datatype in (Datatype.STRING_ASCII, Datatype.STRING_UTF8):
                # TileDB does not check its text. These bytes survive a way back to bytes.
                return [data[a:b].decode("utf-8", "surrogateescape") for a, b in pairs]
            return [data[a:b] for a, b in pairs]
        shown = viewed(self.field, self.values[:, None])
        return [shown[a:b] for a, b in pairs]


def viewed(field: Field, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return stored values `(n, k)` in the type that users expect; `(n,)` if k is 1, or of text."""
    datatype = field.datatype
    width = values.shape[1]
    if datatype in TEXT and datatype in BYTE_TEXT and not field.is_variable:
        return np.ascontiguousarray(values).view(f"S{width}")[:, 0]
    unit = time_unit(datatype)
    if unit is not None:
        is_moment = datatype <= Datatype.DATETIME_AS
        values = values.view(f"<M8[{unit}]" if is_moment else f"<m8[{unit}]")
    elif datatype is Datatype.BOOL:
        # NumPy takes a truth value of 2 for neither true nor false in some operations.
        values = values.view(np.bool_) if values.max(initial=0) <= 1 else values != 0
    return values[:, 0] if width == 1 else values


def fill_cells(it: Attribute, count: int) -> Cells:
    """Return cells that were never written."""
    # Fields that a fragment's schema lacks read as this in all cells that the fragment covers, also
    # where an older fragment has values.
    unit = np.frombuffer(it.fill, it.dtype)
    valid = np.full(count, bool(it.validity_fill)) if it.is_nullable else None
    if it.is_variable:
        offsets = np.arange(count + 1, dtype=np.int64) * len(unit)
        return Cells(it, np.tile(unit, count), offsets, valid)
    return Cells(it, np.tile(unit, (count, 1)), None, valid)


def category_values(it: Enumeration) -> list[Any]:
    """Return the values of an enumeration: `str`, `bytes` or numbers.

    Raises:
        FormatError: text is not valid.
    """
    items = it.items()
    if it.datatype in UTF8:
        try:
            return [value.decode() for value in items]
        except UnicodeDecodeError as error:
            raise FormatError(
                f"The enumeration {it.name!r} of a TileDB array has text that is not valid UTF-8."
            ) from error
    if is_bytes(it.datatype):
        return list(items)
    values: list[Any] = np.frombuffer(it.data, it.numbers_dtype).tolist()
    return [bool(value) for value in values] if it.datatype is Datatype.BOOL else values


def is_bytes(datatype: Datatype) -> bool:
    """Return whether values of a type are bytes or text of one byte a unit."""
    return datatype in BYTE_TEXT or datatype in BINARY

"""Datatypes, layouts, and the NumPy types that values are stored as."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np

from icechunk_async.errors import FormatError

__all__ = [
    "BYTE_TEXT",
    "DATETIMES",
    "TEXT",
    "TIMES",
    "VAR",
    "Datatype",
    "Layout",
    "datatype_of",
    "default_fill",
    "is_time",
    "layout_of",
    "stored_dtype",
    "time_unit",
]

VAR: Final = 0xFFFFFFFF
"""As the number of values of a cell: it varies."""


class Datatype(IntEnum):
    """The type of the values of an attribute or a dimension, by its code in files."""

    INT32 = 0
    INT64 = 1
    FLOAT32 = 2
    FLOAT64 = 3
    CHAR = 4
    INT8 = 5
    UINT8 = 6
    INT16 = 7
    UINT16 = 8
    UINT32 = 9
    UINT64 = 10
    STRING_ASCII = 11
    STRING_UTF8 = 12
    STRING_UTF16 = 13
    STRING_UTF32 = 14
    STRING_UCS2 = 15
    STRING_UCS4 = 16
    ANY = 17
    DATETIME_YEAR = 18
    DATETIME_MONTH = 19
    DATETIME_WEEK = 20
    DATETIME_DAY = 21
    DATETIME_HR = 22
    DATETIME_MIN = 23
    DATETIME_SEC = 24
    DATETIME_MS = 25
    DATETIME_US = 26
    DATETIME_NS = 27
    DATETIME_PS = 28
    DATETIME_FS = 29
    DATETIME_AS = 30
    TIME_HR = 31
    TIME_MIN = 32
    TIME_SEC = 33
    TIME_MS = 34
    TIME_US = 35
    TIME_NS = 36
    TIME_PS = 37
    TIME_FS = 38
    TIME_AS = 39
    BLOB = 40
    BOOL = 41
    GEOM_WKB = 42
    GEOM_WKT = 43


class Layout(IntEnum):
    """The order of tiles, or of the cells in a tile, by its code in files."""

    ROW_MAJOR = 0
    COL_MAJOR = 1
    HILBERT = 4


DATETIMES: Final = dict(
    zip(
        range(Datatype.DATETIME_YEAR, Datatype.DATETIME_AS + 1),
        ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"),
        strict=True,
    )
)
"""Units of moments, as NumPy writes them, by code."""
TIMES: Final = dict(
    zip(
        range(Datatype.TIME_HR, Datatype.TIME_AS + 1),
        ("h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"),
        strict=True,
    )
)
"""Units of times of day, by code."""
BYTE_TEXT: Final = frozenset({Datatype.CHAR, Datatype.STRING_ASCII, Datatype.STRING_UTF8})
"""Text whose units are bytes."""
TEXT: Final = BYTE_TEXT | {
    Datatype.STRING_UTF16,
    Datatype.STRING_UTF32,
    Datatype.STRING_UCS2,
    Datatype.STRING_UCS4,
}
_STORED: Final[dict[int, str]] = {
    Datatype.INT32: "<i4",
    Datatype.INT64: "<i8",
    Datatype.FLOAT32: "<f4",
    Datatype.FLOAT64: "<f8",
    Datatype.CHAR: "i1",
    Datatype.INT8: "i1",
    Datatype.UINT8: "u1",
    Datatype.INT16: "<i2",
    Datatype.UINT16: "<u2",
    Datatype.UINT32: "<u4",
    Datatype.UINT64: "<u8",
    Datatype.STRING_ASCII: "u1",
    Datatype.STRING_UTF8: "u1",
    Datatype.STRING_UTF16: "<u2",
    Datatype.STRING_UTF32: "<u4",
    Datatype.STRING_UCS2: "<u2",
    Datatype.STRING_UCS4: "<u4",
    Datatype.ANY: "u1",
    **dict.fromkeys(DATETIMES, "<i8"),
    **dict.fromkeys(TIMES, "<i8"),
    Datatype.BLOB: "u1",
    Datatype.BOOL: "u1",
    Datatype.GEOM_WKB: "u1",
    Datatype.GEOM_WKT: "u1",
}


def datatype_of(code: int) -> Datatype:
    """Return a datatype by its code.

    Raises:
        FormatError: there is no such datatype.
    """
    try:
        return Datatype(code)
    except ValueError:
        raise FormatError(f"A TileDB array has the unknown datatype {code}.") from None


def layout_of(code: int) -> Layout:
    """Return a layout by its code.

    Raises:
        FormatError: there is no such layout for stored cells.
    """
    try:
        return Layout(code)
    except ValueError:
        raise FormatError(f"A TileDB array has the unknown layout {code}.") from None


def stored_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Return the NumPy type of single stored values; of text, the type of its units."""
    return np.dtype(_STORED[datatype])


def is_time(datatype: Datatype) -> bool:
    """Return whether values are moments or times of day, stored as numbers of a unit."""
    return datatype in DATETIMES or datatype in TIMES


def time_unit(datatype: Datatype) -> str | None:
    """Return the unit of moments or times of day, as NumPy writes it; None of other types."""
    return DATETIMES.get(datatype) or TIMES.get(datatype)


def default_fill(datatype: Datatype) -> bytes:
    """Return the fill value that TileDB uses for one value if the schema stores none."""
    dtype = stored_dtype(datatype)
    if datatype in (Datatype.FLOAT32, Datatype.FLOAT64):
        return np.array(np.nan, dtype).tobytes()
    # `char` is a signed byte to TileDB: its fill value is 0x80.
    if datatype is Datatype.CHAR or dtype.kind == "i":
        return np.array(np.iinfo(dtype).min, dtype).tobytes()
    if datatype in (Datatype.UINT8, Datatype.UINT16, Datatype.UINT32, Datatype.UINT64):
        return np.array(np.iinfo(dtype).max, dtype).tobytes()
    return bytes(dtype.itemsize)

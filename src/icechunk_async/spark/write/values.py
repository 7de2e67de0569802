"""Values of a table's columns as an array stores them: every one exactly, or refused. Pure.

An array holds a value as SQL means it if reading the array gives the value back: numbers keep their
size, texts their length, times their microsecond, and null is told from values. NumPy would convert
many others, wrapped, cut or rounded. Two roundings are accepted: that of floating-point numbers to
an array of less precision, and that of packed arrays (`scale_factor`, `add_offset`) to their
step.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, MissingCoordinatesError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import xarray

__all__ = ["Encoding", "ValueRefusedError", "coordinate_column", "encode_column", "plain_column"]


_KEPT: Final = (
    *("_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar"),
    "_Unsigned",
)
_UNITS: Final = {
    **dict.fromkeys(("microseconds", "microsecond", "us"), 1),
    **dict.fromkeys(("milliseconds", "millisecond", "ms"), 1_000),
    **dict.fromkeys(("seconds", "second", "sec", "secs", "s"), 1_000_000),
    **dict.fromkeys(("minutes", "minute", "min", "mins"), 60_000_000),
    **dict.fromkeys(("hours", "hour", "hr", "hrs", "h"), 3_600_000_000),
    **dict.fromkeys(("days", "day", "d"), 86_400_000_000),
}
"""Microseconds of the units of CF times that have a fixed length."""
_SINCE: Final = re.compile(r"\s*(\w+)\s+since\s+(\S.*?)\s*", re.IGNORECASE)
_START: Final = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?Z?")
_GREGORIAN: Final = {"standard", "gregorian", "proleptic_gregorian"}
_REFORM_US: Final = int(np.datetime64("1582-10-15", "us").astype(np.int64))
"""The calendar `standard` has Julian dates before, which Spark has not."""
_KINDS: Final = {
    **dict.fromkeys("biuf", "numbers"),
    "M": "times",
    "m": "durations",
    **dict.fromkeys("OUTS", "text"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How an array stores values: CF scale, offset, fill value and units of time.

    Attributes:
        name: name of the array.
        dtype: type of the stored values.
        attributes: the CF attributes that the array has.
    """

    name: str
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, variable: xarray.Variable, name: str, dtype: np.dtype[Any]) -> Encoding:
        """Return the encoding that xarray found when it opened the variable."""
        found = {key: it for key, it in variable.encoding.items() if key in _KEPT}
        return cls(name, dtype, found)

    @property
    def is_scaled(self) -> bool:
        """Whether stored numbers are packed by a scale or an offset."""
        return bool({"scale_factor", "add_offset"} & set(self.attributes))

    @property
    def logical(self) -> np.dtype[Any]:
        """The type as which stored values are read: CF's `_Unsigned` gives integers a sign."""
        unsigned = str(self.attributes.get("_Unsigned", "")).lower()
        if self.dtype.kind == "i" and unsigned == "true":
            return np.dtype(f"u{self.dtype.itemsize}")
        if self.dtype.kind == "u" and unsigned == "false":
            return np.dtype(f"i{self.dtype.itemsize}")
        return self.dtype

    @property
    def kind(self) -> str:
        """The values it holds: numbers, times, durations or text."""
        units = self.attributes.get("units")
        if self.dtype.kind in "iuf" and isinstance(units, str):
            return "times" if _SINCE.fullmatch(units) else "durations"
        return _KINDS.get(self.dtype.kind, str(self.dtype))

    @property
    def stored_fills(self) -> tuple[Any, ...]:
        """The values for missing data in the type of the array: all are read as null.

        The first, `_FillValue` if there is one, is what null is written as. CF allows several as
        `missing_value`.
        """
        given = (self.attributes.get(it) for it in ("_FillValue", "missing_value"))
        fills = (fill for it in given if it is not None for fill in np.atleast_1d(np.asarray(it)))
        return tuple(self._stored(fill) for fill in fills)

    def _stored(self, fill: npt.NDArray[Any]) -> Any:
        if self.dtype.kind in "iu" and fill.dtype.kind in "iuf":
            # It may be written with either sign: the bits count.
            return fill.astype(np.int64, casting="unsafe").astype(self.dtype)[()]
        return fill.astype(self.dtype)[()]


class ValueRefusedError(InvalidInputError):
    """A value that an array cannot hold; `row` is its number in the column."""

    def __init__(self, message: str, /, **context: object) -> None:
        """Keep the number of the row."""
        super().__init__(message, **context)
        self.row = cast("int | None", context.get("row"))


def coordinate_column(column: pa.Array[Any], name: str) -> npt.NDArray[Any]:
    """Return a column of coordinates as NumPy values; times in microseconds of UTC.

    Raises:
        MissingCoordinatesError: a row has null.
    """
    if column.null_count:
        raise MissingCoordinatesError(
            f"A row has null in column {name!r}, which says where it belongs. Drop such rows.",
            dimension=name,
        )
    return plain_column(column)


def encode_column(
    column: pa.Array[Any], encoding: Encoding, *, allow: bool = False
) -> npt.NDArray[Any]:
    """Return a column as the array stores it.

    Args:
        column: the values; null becomes the array's value for missing data.
        encoding: how the array stores them.
        allow: convert as NumPy does in place of refusing values.

    Raises:
        ValueRefusedError: the array cannot hold a value, or has no value for null.
    """
    # Many frames have NaN where data is missing. Read as null, it is written as null.
    has_fill = bool(encoding.stored_fills)
    is_missing = column.is_null(nan_is_null=has_fill and encoding.kind == "numbers")
    missing = np.asarray(is_missing)
    plain = column.filter(pc.invert(is_missing)) if missing.any() else column
    rows = np.flatnonzero(~missing)
    check = _Check(encoding, plain, rows, allow=allow)
    stored = np.empty(len(column), encoding.dtype)
    stored[rows] = check.encoded()
    if missing.any():
        stored[missing] = _of_null(encoding, int(np.flatnonzero(missing)[0]))
    return stored


def _of_null(encoding: Encoding, row: int) -> Any:
    if encoding.stored_fills:
        return encoding.stored_fills[0]
    if encoding.dtype.kind in "fMm":
        return np.array("NaT" if encoding.dtype.kind in "Mm" else np.nan).astype(encoding.dtype)[()]
    raise ValueRefusedError(
        f"A row has null in column {encoding.name!r}, and the array has no value for missing data. "
        "Drop such rows, or give the array a _FillValue.",
        row=row,
        column=encoding.name,
    )


def plain_column(column: pa.Array[Any]) -> npt.NDArray[Any]:
    """Return a column without nulls as NumPy values; times in microseconds of UTC."""
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        zone = getattr(column.type, "tz", None)
        # Not nanoseconds, which have no year after 2262.
        column = column.cast(pa.timestamp("us", tz=zone))
    return np.asarray(column.to_numpy(zero_copy_only=False))


@dataclass(frozen=True, slots=True)
class _Check:
    """The values of one column on their way into an array."""

    encoding: Encoding
    column: pa.Array[Any]
    """Without nulls."""
    rows: npt.NDArray[np.int64]
    """The number of each value's row."""
    allow: bool

    def encoded(self) -> npt.NDArray[Any]:
        found = _kind_of(self.column.type)
        if not len(self.column):
            return np.empty(0, self.encoding.dtype)
        if found != self.encoding.kind:
            if not self.allow:
                wanted = self.encoding.kind
                raise self.refusal(0, f"the column has {found}, and the array holds {wanted}")
            stored = self._converted(plain_column(self.column))
        elif found == "numbers":
            stored = self._numbers()
        elif found == "text":
            stored = self._texts()
        else:
            stored = self._times()
        self._refuse_fill(stored)
        return stored

    def refusal(self, at: int, why: str) -> ValueRefusedError:
        name, value = self.encoding.name, self.column[at].as_py()
        return ValueRefusedError(
            f"The array {name!r}, of {self.encoding.dtype}, cannot hold {value!r:.100} "
            f"({self.column.type}) of column {name!r}: {why}.",
            row=int(self.rows[at]),
            column=name,
            value=str(value),
            type=str(self.column.type),
        )

    def _refuse(self, bad: npt.NDArray[np.bool_], why: str) -> None:
        if not self.allow and bad.any():
            raise self.refusal(int(np.flatnonzero(bad)[0]), why)

    def _refuse_fill(self, stored: npt.NDArray[Any]) -> None:
        for fill in self.encoding.stored_fills:
            # NaN equals nothing: it is written by many as missing data, and is read as such.
            self._refuse(
                np.asarray(stored == fill, bool),
                f"it is stored as {fill}, the array's value for missing data, and is read as null",
            )

    def _converted(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            with np.errstate(all="ignore"):
                return values.astype(self.encoding.dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise self.refusal(0, f"it cannot be converted ({error})") from error

    def _numbers(self) -> npt.NDArray[Any]:
        values, encoding = self._given_numbers(), self.encoding
        if encoding.is_scaled:
            # As xarray: in double precision.
            scale = float(encoding.attributes.get("scale_factor", 1))
            offset = float(encoding.attributes.get("add_offset", 0))
            values = (values.astype(np.float64) - offset) / scale
            if encoding.dtype.kind in "iu":
                values = np.rint(values)
        logical = encoding.logical
        with np.errstate(all="ignore"):
            stored = values.astype(logical)
            self._refuse(*self._inexact(values, stored))
        return stored.view(encoding.dtype) if logical != encoding.dtype else stored

    def _inexact(
        self, values: npt.NDArray[Any], stored: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.bool_], str]:
        """Return the numbers that changed, and why that counts."""
        if stored.dtype.kind != "f":
            why = "it is no number of that type"
            # Both ways: a comparison of integers with floats would round the integers.
            return np.asarray(
                (stored != values) | (stored.astype(values.dtype) != values), bool
            ), why
        if values.dtype.kind in "biu":
            return np.asarray(stored.astype(values.dtype) != values, bool), "it would be rounded"
        lost = np.isfinite(values) & ((np.isinf(stored)) | ((stored == 0) & (values != 0)))
        return np.asarray(lost, bool), "it is too large or too small"

    def _given_numbers(self) -> npt.NDArray[Any]:
        """Return the numbers; decimals as integers or as floats, whichever holds them."""
        if not pa.types.is_decimal(self.column.type):
            return plain_column(self.column)
        if self.encoding.logical.kind in "biu" and not self.encoding.is_scaled:
            try:
                return np.asarray(self.column.cast(pa.int64()).to_numpy(zero_copy_only=False))
            except pa.ArrowInvalid:
                pass
        exact = self.column.to_pylist()
        floats = np.array([float(it) for it in exact])
        whole = np.array([it == it.to_integral_value() and int(it) != float(it) for it in exact])
        self._refuse(whole, "it would be rounded")
        return floats

    def _texts(self) -> npt.NDArray[Any]:
        dtype = self.encoding.dtype
        values = plain_column(self.column)
        if dtype.kind not in "US":
            return values.astype(dtype)
        size = dtype.itemsize // (4 if dtype.kind == "U" else 1)
        given = [it if isinstance(it, bytes | str) else str(it) for it in values.tolist()]
        if dtype.kind == "S":
            raw = [it if isinstance(it, bytes) else it.encode() for it in given]
            ascii_only = np.array([it.isascii() for it in raw])
            if not all(isinstance(it, bytes) for it in given):
                self._refuse(~ascii_only, "it is not ASCII")
            bad = np.array([len(it) > size or it.endswith(b"\0") for it in raw])
            self._refuse(bad, f"it is longer than {size} bytes, or ends in a zero byte")
            return np.array(raw, dtype)
        if any(isinstance(it, bytes) for it in given):
            raise self.refusal(0, "the column has bytes, and the array holds text")
        bad = np.array([len(it) > size or cast("str", it).endswith("\0") for it in given])
        self._refuse(bad, f"it is longer than {size} characters, or ends in a zero")
        return np.array(given, dtype)

    def _times(self) -> npt.NDArray[Any]:
        values, dtype = plain_column(self.column), self.encoding.dtype
        kind = values.dtype.kind
        values = values.astype(f"{kind}8[us]")
        if dtype.kind in "Mm":
            stored = values.astype(dtype)
            self._refuse(stored.astype(values.dtype) != values, "it would be rounded")
            return stored
        micros = self._since(values)
        if micros is None:
            return self._by_xarray(values)
        delta, unit = micros
        if dtype.kind in "iu":
            stored = (delta // unit).astype(dtype)
            changed = stored.astype(np.int64) * unit != delta
        else:
            stored = (delta / unit).astype(dtype)
            changed = np.rint(stored.astype(np.float64) * unit) != delta
        self._refuse(changed, f"the array counts {self.encoding.attributes['units']!r}")
        return stored

    def _since(self, values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], int] | None:
        """Return microseconds since the start of the array's units, and those of the unit.

        None for units and calendars that only xarray knows.
        """
        units = str(self.encoding.attributes["units"])
        match = _SINCE.fullmatch(units)
        name = (match[1] if match else units.strip()).lower()
        calendar = str(self.encoding.attributes.get("calendar", "standard")).lower()
        if name not in _UNITS or calendar not in _GREGORIAN or self.encoding.is_scaled:
            return None
        count = values.astype(np.int64)
        if match is None:
            return count, _UNITS[name]
        if not _START.fullmatch(match[2]):
            return None
        start = np.datetime64(match[2].replace(" ", "T").removesuffix("Z"), "us")
        if calendar != "proleptic_gregorian" and start.astype(np.int64) >= _REFORM_US:
            self._refuse(count < _REFORM_US, "its calendar has other dates before 1582-10-15")
        return count - int(start.astype(np.int64)), _UNITS[name]

    def _by_xarray(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # Importing these takes seconds, and most arrays do without.
        import xarray  # noqa: PLC0415
        from xarray import conventions  # noqa: PLC0415

        attributes = {k: it for k, it in self.encoding.attributes.items() if k != "_Unsigned"}
        try:
            variable = xarray.Variable(("row",), values, {}, attributes)
            encode = cast("Any", conventions.encode_cf_variable)  # pyright: ignore[reportUnknownMemberType]
            counted = np.asarray(encode(variable).values)
        except (ValueError, OverflowError) as error:
            raise self.refusal(0, str(error)) from error
        with np.errstate(all="ignore"):
            stored = counted.astype(self.encoding.dtype)
            self._refuse(np.asarray(stored != counted, bool), "it would be rounded")
        return stored


def _kind_of(column: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(column) or types.is_integer(column) or types.is_floating(column):
        return "numbers"
    if types.is_decimal(column):
        return "numbers"
    if types.is_date(column) or types.is_timestamp(column):
        return "times"
    if types.is_duration(column):
        return "durations"
    if types.is_string(column) or types.is_large_string(column) or types.is_binary(column):
        return "text"
    return str(column)

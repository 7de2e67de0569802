"""Values of a table's columns as an array stores them: every one exactly, or refused. Pure.

An array holds a value as SQL means it if reading the array gives the value back: numbers keep their
size, texts their length, times their microsecond, and null is told from values. NumPy would convert
many others, wrapped, cut or rounded. Two roundings are accepted: that of floating-point numbers to
an array of less precision, and that of packed arrays (`scale_factor`, `add_offset`) to their
step.
"""

from __future__ import annotations

import re
from datetime import date, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, MissingCoordinatesError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt
    import xarray

__all__ = [
    "Encoding",
    "ValueRefusedError",
    "check_read_back",
    "coordinate_column",
    "encode_column",
    "plain_column",
]


_KEPT: Final = (
    *("_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar"),
    "_Unsigned",
)
_UNITS: Final = {
    **dict.fromkeys(("nanoseconds", "nanosecond"), (1_000, 1)),
    **dict.fromkeys(("microseconds", "microsecond", "us"), (1, 1)),
    **dict.fromkeys(("milliseconds", "millisecond", "ms"), (1, 1_000)),
    **dict.fromkeys(("seconds", "second", "sec", "secs", "s"), (1, 1_000_000)),
    **dict.fromkeys(("minutes", "minute", "min", "mins"), (1, 60_000_000)),
    **dict.fromkeys(("hours", "hour", "hr", "hrs", "h"), (1, 3_600_000_000)),
    **dict.fromkeys(("days", "day", "d"), (1, 86_400_000_000)),
}
"""The units of CF times that have a fixed length: how many are how many microseconds.

xarray does not count microseconds in nanoseconds: they overflow, and it stores missing times.
"""
_ALLOWED: Final = "; option('cast', 'allow') converts them as NumPy does"
_MOST: Final = 2**63 - 1
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
        """Return the encoding that xarray found when it opened the variable.

        Raises:
            InvalidInputError: an attribute is not what CF says.
        """
        found = {key: it for key, it in variable.encoding.items() if key in _KEPT}
        read: np.dtype[Any] = cast("Any", variable).dtype
        if read.kind == "b" and dtype.kind in "iu":
            found["dtype"] = "bool"  # as xarray writes truth values
        encoding = cls(name, dtype, found)
        try:
            _ = encoding.stored_fills, encoding.packing
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InvalidInputError(
                f"The array {name!r} has an attribute '_FillValue', 'missing_value', "
                f"'scale_factor' or 'add_offset' that is no value of {dtype} ({error}), so that "
                "no row can be written. Correct the attribute.",
                array=name,
            ) from error
        return encoding

    @property
    def packing(self) -> tuple[float, float]:
        """The scale by which numbers are packed, and the offset."""
        scale = float(self.attributes.get("scale_factor", 1))
        return scale, float(self.attributes.get("add_offset", 0))

    @property
    def is_scaled(self) -> bool:
        """Whether stored numbers are packed by a scale or an offset."""
        return bool({"scale_factor", "add_offset"} & set(self.attributes))

    @property
    def logical(self) -> np.dtype[Any]:
        """The type as which stored values are read: CF's `_Unsigned` gives integers a sign."""
        if self.attributes.get("dtype") == "bool":
            return np.dtype(bool)
        unsigned = str(self.attributes.get("_Unsigned", "")).lower()
        if self.dtype.kind == "i" and unsigned == "true":
            return np.dtype(f"u{self.dtype.itemsize}")
        if self.dtype.kind == "u" and unsigned == "false":
            return np.dtype(f"i{self.dtype.itemsize}")
        return self.dtype

    @property
    def is_read_as_floats(self) -> bool:
        """Whether xarray reads stored integers as floating-point numbers."""
        return self.is_scaled or bool(self.stored_fills)

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


def coordinate_column(
    column: pa.Array[Any], name: str, named: Callable[[int], str] = "number {}".format
) -> npt.NDArray[Any]:
    """Return a column of coordinates as NumPy values; times in microseconds of UTC.

    Args:
        column: the coordinates.
        name: name of the dimension.
        named: tells users which row has a number.

    Raises:
        MissingCoordinatesError: a row has null.
    """
    if column.null_count:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise MissingCoordinatesError(
            f"The row {named(row)} has null in column {name!r}, which says where it belongs. "
            "Nothing was published. Drop such rows.",
            dimension=name,
        )
    if pa.types.is_decimal(column.type):
        column = _numbers_of(column)
    return plain_column(column)


def _numbers_of(column: pa.Array[Any]) -> pa.Array[Any]:
    """Return decimals as integers if all are whole, else as floating-point numbers."""
    # Spark has no unsigned integers: those of 64 bits are decimals there, and are coordinates as
    # integers.
    for whole in (pa.int64(), pa.uint64()):
        try:
            return column.cast(whole)
        except pa.ArrowInvalid:
            pass
    return column.cast(pa.float64())


def check_read_back(values: npt.NDArray[Any], encoding: Encoding) -> None:
    """Check that a packed array of coordinates (`scale_factor`) gives back what it is given.

    Raises:
        ValueRefusedError: it would be read as another coordinate, by which nobody finds its row.
    """
    if not encoding.is_scaled or encoding.kind != "numbers":
        return
    # Importing these takes seconds, and most arrays do without.
    import xarray  # noqa: PLC0415
    from xarray import conventions  # noqa: PLC0415

    stored = encode_column(pa.array(values), encoding)
    decode = cast("Any", conventions.decode_cf_variable)  # pyright: ignore[reportUnknownMemberType]
    variable = xarray.Variable(("row",), stored, dict(encoding.attributes))
    read = np.asarray(decode(encoding.name, variable).values).astype(values.dtype)
    if (read != values).any():
        row = int(np.flatnonzero(read != values)[0])
        name, value = encoding.name, values[row].item()
        raise ValueRefusedError(
            f"The row of {name}={value!r} has {value!r} ({values.dtype}) in column {name!r}, which "
            f"the array, packed in {encoding.dtype}, would give back as {read[row].item()!r}, so "
            "that nobody could find the row. Nothing was published. Give coordinates as the array "
            "gives them back; option('cast', 'allow') appends them so.",
            row=row,
            column=name,
            value=str(value),
        )


def encode_column(
    column: pa.Array[Any],
    encoding: Encoding,
    *,
    allow: bool = False,
    may_allow: bool = True,
    named: Callable[[int], str] = "number {}".format,
) -> npt.NDArray[Any]:
    """Return a column as the array stores it.

    Args:
        column: the values; null becomes the array's value for missing data.
        encoding: how the array stores them.
        allow: convert as NumPy does in place of refusing values.
        may_allow: whether users can ask for that.
        named: tells users which row has a number.

    Raises:
        ValueRefusedError: the array cannot hold a value, or has no value for null.
    """
    # Many frames have NaN where data is missing. Read as null, it is written as null.
    has_fill = bool(encoding.stored_fills)
    # Not for times and text: what is missing there is null in Arrow already.
    is_missing = column.is_null(nan_is_null=has_fill and encoding.kind == "numbers")
    missing = np.asarray(is_missing)
    plain = column.filter(pc.invert(is_missing)) if missing.any() else column
    # Errors name a row of the column that was given, and checks see one without nulls.
    rows = np.flatnonzero(~missing)
    check = _Check(encoding, plain, rows, named, allow=allow, may_allow=may_allow)
    stored = np.empty(len(column), encoding.dtype)
    stored[rows] = check.encoded()
    if missing.any():
        stored[missing] = _of_null(encoding, int(np.flatnonzero(missing)[0]), named)
    return stored


def _of_null(encoding: Encoding, row: int, named: Callable[[int], str]) -> Any:
    if encoding.stored_fills:
        return encoding.stored_fills[0]
    if encoding.dtype.kind in "fMm":
        return np.array("NaT" if encoding.dtype.kind in "Mm" else np.nan).astype(encoding.dtype)[()]
    raise ValueRefusedError(
        f"The row {named(row)} has null in column {encoding.name!r}, and the array has no value "
        "for missing data. Nothing was published. Drop such rows, or give the array a _FillValue.",
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
    named: Callable[[int], str]
    allow: bool
    may_allow: bool

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
        row, dtype = int(self.rows[at]), str(self.encoding.dtype).lstrip("<>|")
        advice = _ALLOWED if self.may_allow and not self.allow else ""
        shown = str(value) if isinstance(value, date | timedelta | Decimal) else repr(value)
        return ValueRefusedError(
            f"The row {self.named(row)} has {shown:.100} ({self.column.type}) in column {name!r}, "
            f"which the array, of {dtype}, cannot hold: {why}. Nothing was published. Convert the "
            f"column or filter such rows{advice}.",
            row=row,
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
        logical = encoding.logical
        with np.errstate(all="ignore"):
            if encoding.is_scaled:
                values = self._packed(values)
            stored = values.astype(logical)
            self._refuse(*self._inexact(values, stored))
            if logical.kind in "iu" and encoding.is_read_as_floats:
                self._refuse(_rounded(stored), "it would be read as a rounded number")
        if logical.kind == "b":
            return stored.astype(encoding.dtype)
        return stored.view(encoding.dtype) if logical != encoding.dtype else stored

    def _packed(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return numbers as xarray packs them: in double precision."""
        scale, offset = self.encoding.packing
        if values.dtype.kind in "iu":
            self._refuse(_rounded(values), "it would be rounded")
        packed = (values.astype(np.float64) - offset) / scale
        self._refuse(np.isfinite(values) & ~np.isfinite(packed), "it is too large to be packed")
        # Rounded here: a cast to integers would cut towards zero.
        return np.rint(packed) if self.encoding.dtype.kind in "iu" else packed

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
        # Rounding is accepted. A number that becomes infinite or zero has lost its size.
        lost = np.isfinite(values) & ((np.isinf(stored)) | ((stored == 0) & (values != 0)))
        return np.asarray(lost, bool), "it is too large or too small"

    def _given_numbers(self) -> npt.NDArray[Any]:
        """Return the numbers; decimals as integers or as floats, whichever holds them."""
        if not pa.types.is_decimal(self.column.type):
            return plain_column(self.column)
        kind = self.encoding.logical.kind
        if kind in "biu" and not self.encoding.is_scaled:
            # As integers if they are whole: through doubles 2**53 + 1 would become its neighbour.
            of = pa.uint64() if kind == "u" else pa.int64()
            try:
                return np.asarray(self.column.cast(of).to_numpy(zero_copy_only=False))
            except pa.ArrowInvalid:
                pass
        exact = self.column.to_pylist()
        floats = np.array([float(it) for it in exact])
        lost = np.array([it == it.to_integral_value() and int(it) != float(it) for it in exact])
        self._refuse(lost, "it would be rounded")
        return floats

    def _texts(self) -> npt.NDArray[Any]:
        dtype = self.encoding.dtype
        values = plain_column(self.column)
        if dtype.kind not in "US":
            return values.astype(dtype)
        # NumPy has four bytes for a character, and drops zeros at the end when it reads.
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
            stored = self._in_units(values)
            self._refuse(stored.astype(values.dtype) != values, "it would be rounded")
            return stored
        counted = self._since(values)
        if counted is None:
            return self._by_xarray(values)
        delta, (units, micros) = counted
        if dtype.kind in "iu":
            number = delta * units // micros
            stored = number.astype(dtype)
            # Both ways, as in `_inexact`; and what is too far has overflowed.
            changed = (stored != number) | (stored.astype(np.int64) != number)
            changed |= number * micros != delta * units
            changed |= (delta > _MOST // units) | (delta < -(_MOST // units))
        else:
            with np.errstate(all="ignore"):
                stored = (delta * float(units) / micros).astype(dtype)
                back = np.rint(stored.astype(np.float64) * micros / units)
                # As integers: a comparison with floats would round the microseconds.
                changed = ~(np.abs(back) < _MOST) | (back.astype(np.int64) != delta)
        self._refuse(changed, f"the array counts {self.encoding.attributes['units']!r}")
        return stored

    def _in_units(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return times in those of an array of NumPy's times."""
        return self._each(values, lambda some: some.astype(self.encoding.dtype))

    def _each(
        self, values: npt.NDArray[Any], convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        """Return converted values; the error, which does not say of which it is, finds its row."""
        try:
            return convert(values)
        except (ValueError, OverflowError) as error:
            first, end, why = 0, len(values), error
        # The value that was refused is in `values[first:end]`: twenty conversions find it among a
        # million.
        while end - first > 1:
            middle = (first + end) // 2
            try:
                convert(values[first:middle])
            except (ValueError, OverflowError) as error:
                end, why = middle, error
            else:
                first = middle
        raise self.refusal(first, str(why)) from why

    def _since(
        self, values: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int64], tuple[int, int]] | None:
        """Return microseconds since the start of the array's units, and `_UNITS` of the unit.

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
        if calendar != "proleptic_gregorian":
            self._refuse(count < _REFORM_US, "its calendar has other dates before 1582-10-15")
            # Days of both calendars lie between, and NumPy counts those of one: from the start
            # `days since 0001-01-01`, which many models write, it is two days off.
            if start.astype(np.int64) < _REFORM_US:
                before = _until_reform(match[2])
                return None if before is None else (count - _REFORM_US + before, _UNITS[name])
        return count - int(start.astype(np.int64)), _UNITS[name]

    def _by_xarray(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # Importing these takes seconds, and most arrays do without.
        import xarray  # noqa: PLC0415
        from xarray import conventions  # noqa: PLC0415

        attributes = {k: it for k, it in self.encoding.attributes.items() if k != "_Unsigned"}
        if values.dtype.kind == "M":
            # Where none is named CF means this one, and xarray would take NumPy's.
            attributes.setdefault("calendar", "standard")
        encode = cast("Any", conventions.encode_cf_variable)  # pyright: ignore[reportUnknownMemberType]

        def counts(some: npt.NDArray[Any]) -> npt.NDArray[Any]:
            variable = xarray.Variable(("row",), some, {}, attributes)
            return np.asarray(encode(variable).values)

        counted = self._each(values, counts)
        # xarray's missing times, which it also makes of times that it has no number for.
        lost = np.isnan(counted) if counted.dtype.kind == "f" else counted == -_MOST - 1
        self._refuse(np.asarray(lost, bool), f"xarray cannot count {attributes['units']!r} of it")
        with np.errstate(all="ignore"):
            stored = counted.astype(self.encoding.dtype)
            self._refuse(np.asarray(stored != counted, bool), "it would be rounded")
        return stored


def _until_reform(start: str) -> int | None:
    """Return the microseconds from a date of the calendar `standard` to 1582-10-15.

    None for what is no date of it.
    """
    # Importing these takes seconds, and most arrays do without.
    import xarray  # noqa: PLC0415
    from xarray import conventions  # noqa: PLC0415

    units = {"units": f"microseconds since {start}", "calendar": "standard"}
    reform = xarray.Variable(("row",), np.array([_REFORM_US]).view("M8[us]"), {}, units)
    encode = cast("Any", conventions.encode_cf_variable)  # pyright: ignore[reportUnknownMemberType]
    try:
        return int(encode(reform).values[0])
    except (ValueError, OverflowError):
        return None


def _rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which integers no floating-point number of double precision equals."""
    floats = values.astype(np.float64)
    most = float(np.iinfo(values.dtype).max)  # rounded up, where that is no such number itself
    far = floats >= most if int(most) > np.iinfo(values.dtype).max else np.zeros(len(values), bool)
    return np.asarray(far | (floats.astype(values.dtype) != values), bool)


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
    if types.is_string(column) or types.is_large_string(column):
        return "text"
    if types.is_binary(column) or types.is_large_binary(column):
        return "text"
    return str(column)

"""The meaning of the numbers or texts of an array: missing ones, and how packed ones are unpacked.

Statistics are about stored numbers, after the reinterpretation of `_Unsigned` and without missing
ones. Unpacking, by `scale_factor` and `add_offset`, keeps or turns round their order, so bounds of
stored numbers give those of unpacked ones, and a change of these attributes spoils no statistics.

Texts stand where numbers do: of all types as NumPy's `StringDType`, whose values have no padding,
are in the order of code points, and cannot be anything but Unicode.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.json.values import is_list

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.statistics import ValueKind

    type Numbers = npt.NDArray[Any]
    """Integers, floats, times as integers, or texts."""
    type Mask = npt.NDArray[np.bool_]

__all__ = ["Meaning", "meaning_of"]

_FORMAT: Final = ("data_type", "chunk_grid", "codecs", "fill_value", "storage_transformers")
_MISSING: Final = ("_FillValue", "missing_value", "_Unsigned")
# Wider floats (long doubles) would be rounded where they are summed as doubles.
_MOST_BYTES: Final = 8
_TEXT: Final = np.dtypes.StringDType()
_ASSUMED_BYTES: Final = 128
"""Of a cell of any length: the text, and the objects that it is decoded by."""


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """How stored numbers of one array are to be understood."""

    path: str
    stored: np.dtype[Any]
    """The type of the array."""
    numbers: np.dtype[Any]
    """The type that values are computed in: native byte order, signed as meant, times as int64,
    truth values as uint8; `StringDType` for text."""
    missing: tuple[Any, ...]
    """Numbers, of that type, which stand for no value; beside NaN and NaT."""
    scale: float | None
    offset: float | None
    units: str | None
    """Of CF: what numbers count if they are times, such as ``hours since 1900-01-01``."""
    calendar: Any
    digest: bytes
    """SHA-256 of all that decides which numbers bytes of a chunk become, and which are missing.

    Statistics are stored with it, and hold for no other: an array may get other attributes.
    """
    is_truth: bool = False
    """Whether values are true or false; what is not zero is true."""

    @property
    def kind(self) -> ValueKind:
        """How bounds and sums are kept."""
        match self.numbers.kind:
            case "T":
                return "t"
            case "f":
                return "f"
            case "i":
                return "i"
            case _:
                return "u"

    @property
    def is_text(self) -> bool:
        """Return whether values are text."""
        return self.numbers.kind == "T"

    @property
    def cell_bytes(self) -> int:
        """The approximate size of a decoded cell, with the text that is made of it."""
        if self.is_text:
            return _ASSUMED_BYTES if self.stored.kind == "T" else 16 + 2 * self.stored.itemsize
        return self.stored.itemsize

    @property
    def is_packed(self) -> bool:
        """Return whether values are not the stored numbers."""
        return self.scale is not None or self.offset is not None

    @property
    def is_time(self) -> bool:
        """Return whether values are times or durations of NumPy."""
        return self.stored.kind in "mM"

    @property
    def is_reversed(self) -> bool:
        """Return whether greater numbers are lesser values."""
        return self.scale is not None and self.scale < 0

    def numbers_of(self, values: npt.ArrayLike) -> Numbers:
        """Return values as Zarr decodes them as numbers or texts, of the same shape.

        Raises:
            FormatError: a text is not Unicode: it has surrogates, or numbers beyond all characters.
        """
        if self.is_text:
            try:
                return np.asarray(values, self.stored).astype(self.numbers, copy=False)
            except (TypeError, UnicodeError) as error:
                raise FormatError(
                    f"Values of {self.path!r} cannot be queried: a text is not valid Unicode, as "
                    f"are surrogates without their pair ({error}). Write it anew."
                ) from error
        if self.is_truth:
            truths: Mask = np.asarray(values, self.stored) != 0
            # Zarr decodes any byte to a truth value; 2 is as true as 1, and would sort behind it.
            return truths.view(self.numbers)
        # Statistics are kept in native order, whatever the array stores.
        native = np.asarray(values, self.stored).astype(self.stored.newbyteorder("="), copy=False)
        return native.view(self.numbers)

    def valid(self, numbers: Numbers) -> Mask:
        """Return which numbers stand for a value."""
        if self.numbers.kind == "f":
            mask = ~np.isnan(numbers)
        elif self.is_time:
            # NaT is the least integer, which would be the bound of every chunk with a missing time.
            mask = numbers != np.iinfo(np.int64).min  # NaT
        else:
            mask = np.ones(numbers.shape, bool)
        # With bits, not after decoding: `_FillValue` is compared before scale and offset, as CF
        # says.
        for it in self.missing:
            mask &= numbers != it
        return mask

    def unpacked(self, numbers: Numbers) -> Numbers:
        """Return the values of numbers: doubles if they are packed, else unchanged."""
        if not self.is_packed:
            return numbers
        with np.errstate(over="ignore", invalid="ignore"):
            doubles = numbers.astype(np.float64)
            if self.scale is not None:
                doubles *= self.scale
            if self.offset is not None:
                doubles += self.offset
        return doubles

    def bounds(self, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
        """Return the least and the greatest values of chunks, given those of stored numbers."""
        first, last = self.unpacked(low), self.unpacked(high)
        # Doubles round, but rounding keeps order: bounds stay bounds.
        return (last, first) if self.is_reversed else (first, last)


def meaning_of(path: str, document: bytes, dtype: np.dtype[Any]) -> Meaning:
    """Return the meaning of the numbers of an array.

    Args:
        path: the array, for messages.
        document: its ``zarr.json``.
        dtype: the type that Zarr decodes its chunks to.

    Raises:
        InvalidInputError: its values have no order (bytes, complex numbers), or attributes
            about missing or packed values that cannot be understood.
    """
    is_text = dtype.kind in "TU"
    if not is_text and (dtype.kind not in "biufmM" or dtype.itemsize > _MOST_BYTES):
        other = ""
        if dtype.kind in "OS":
            other = " Select by bytes with SQL: 'icechunk-async sql', or arrow.dataset."
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: they are of the type {dtype}, and only "
            f"numbers of up to 64 bits, truth values, times, durations and text can.{other}"
        )
    found: Any = json.loads(document)
    attributes: dict[str, Any] = found.get("attributes") or {}
    # Only what decides the numbers: attributes such as `units`, scale and offset may change, and
    # statistics hold.
    parts = [found.get(name) for name in _FORMAT] + [attributes.get(name) for name in _MISSING]
    is_truth = dtype.kind == "b" or (dtype.kind in "iu" and _is_marked_as_truth(attributes))
    if is_truth and dtype.kind != "b":
        parts.append("bool")
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    if is_text:
        texts = _missing_texts(path, attributes)
        return Meaning(path, dtype, _TEXT, texts, None, None, None, None, digest)
    stored = dtype.newbyteorder("=")
    numbers = np.dtype(np.int64) if dtype.kind in "mM" else stored
    if is_truth:
        numbers = np.dtype(np.uint8)
    unsigned = "" if is_truth else str(attributes.get("_Unsigned", "")).lower()
    # NetCDF 3 has no unsigned types, so files mark signed ones, and Zarr copies have the mark.
    if (unsigned, dtype.kind) in {("true", "i"), ("false", "u")}:
        numbers = np.dtype(f"{'u' if unsigned == 'true' else 'i'}{dtype.itemsize}")
    missing: list[Any] = []
    for name, it in _marks(attributes):
        missing += _missing(path, name, it, stored, numbers)
    scale, offset = (_factor(path, name, attributes) for name in ("scale_factor", "add_offset"))
    if is_truth or dtype.kind in "mM":
        scale = offset = None
    units = attributes.get("units")
    since = units if isinstance(units, str) and " since " in units else None
    calendar = attributes.get("calendar")
    return Meaning(
        path, dtype, numbers, tuple(missing), scale, offset, since, calendar, digest, is_truth
    )


def _is_marked_as_truth(attributes: dict[str, Any]) -> bool:
    """Return whether integers are true and false, which some versions of xarray store so.

    Where some are marked as missing they are read as the numbers that they are.
    """
    others = (*_MISSING[:2], "scale_factor", "add_offset")
    return attributes.get("dtype") == "bool" and not any(it in attributes for it in others)


def _marks(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the values that mark missing ones, each with the name of its attribute."""
    found: list[tuple[str, Any]] = []
    for name in _MISSING[:2]:
        given = attributes.get(name)
        found += [
            (name, it) for it in (given if is_list(given) else [] if given is None else [given])
        ]
    return found


def _missing_texts(path: str, attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Return the texts that mark missing ones, as arrays without axes."""
    found: list[Any] = []
    for name, it in _marks(attributes):
        if not isinstance(it, str):
            raise InvalidInputError(
                f"Values of {path!r} cannot be queried: its attribute {name!r} is "
                f"{json.dumps(it)[:100]}, which is not text as the values are. Correct it."
            )
        try:
            # NumPy, and so xarray, leaves out zeros at the end of what it compares with.
            found.append(np.array(it.rstrip("\0"), _TEXT))
        except UnicodeError:
            continue  # no value can be that
    return tuple(found)


def _missing(
    path: str, name: str, given: Any, stored: np.dtype[Any], numbers: np.dtype[Any]
) -> list[Any]:
    """Return the number for a value that marks missing ones; none if no cell can have it."""
    if stored.kind == "f" and isinstance(given, str):
        given = _double(given)
    if isinstance(given, bool) and stored.kind == "b":
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: its attribute {name!r} is "
            f"{json.dumps(given)[:100]}, which is not a number of the type {stored}. Correct it."
        )
    if stored.kind == "f":
        with np.errstate(over="ignore"):
            # As the array would store it: 1e20 of float32 is not the double 1e20.
            number = np.float64(given).astype(stored)
        return [] if np.isnan(number) else [number]
    if isinstance(given, float) and not given.is_integer():
        return []
    whole = int(given)
    for kind in (numbers, stored):  # -1 of a type that is meant to be unsigned is its greatest
        if _holds(kind, whole):
            return [np.array(whole, kind).view(numbers)[()]]
    return []


def _holds(dtype: np.dtype[Any], number: int) -> bool:
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.iinfo(np.uint8)
    return int(limits.min) <= number <= int(limits.max)


def _double(text: str) -> Any:
    """Read a fill value as xarray writes it: the bytes of a double in base 64; or by its name."""
    named = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    if text in named:
        return named[text]
    try:
        return float(struct.unpack("<d", base64.standard_b64decode(text))[0])
    except (ValueError, struct.error):
        return text


def _factor(path: str, name: str, attributes: dict[str, Any]) -> float | None:
    given = attributes.get(name)
    # Attributes of netCDF are arrays, which some writers keep.
    if is_list(given) and len(given) == 1:
        given = given[0]
    if given is None:
        return None
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    try:
        number = float(number)
    except OverflowError:  # JSON has integers of any length
        number = math.nan
    if not math.isfinite(number) or (name == "scale_factor" and not number):
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: its attribute {name!r} is "
            f"{json.dumps(given)[:100]}, which is no number to unpack values by. Correct it."
        )
    return number

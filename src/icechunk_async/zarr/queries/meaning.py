"""The meaning of the numbers of an array: missing ones, and how packed ones are unpacked.

Statistics are about stored numbers, after the reinterpretation of `_Unsigned` and without missing
ones. Unpacking, by `scale_factor` and `add_offset`, keeps or turns round their order, so bounds of
stored numbers give those of unpacked ones, and a change of these attributes spoils no statistics.
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
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.json.values import is_list

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.statistics import NumberKind

    type Numbers = npt.NDArray[Any]
    """Integers, floats, or times as integers."""
    type Mask = npt.NDArray[np.bool_]

__all__ = ["Meaning", "meaning_of"]

_FORMAT: Final = ("data_type", "chunk_grid", "codecs", "fill_value", "storage_transformers")
_MISSING: Final = ("_FillValue", "missing_value", "_Unsigned")
_MOST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """How stored numbers of one array are to be understood."""

    path: str
    stored: np.dtype[Any]
    """The type of the array."""
    numbers: np.dtype[Any]
    """The type that values are computed in: native byte order, signed as meant, times as int64."""
    missing: tuple[Any, ...]
    """Numbers, of that type, which stand for no value; beside NaN and NaT."""
    scale: float | None
    offset: float | None
    digest: bytes
    """SHA-256 of all that decides which numbers bytes of a chunk become, and which are missing."""

    @property
    def kind(self) -> NumberKind:
        """How bounds and sums are kept."""
        match self.numbers.kind:
            case "f":
                return "f"
            case "i":
                return "i"
            case _:
                return "u"

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

    def numbers_of(self, values: npt.NDArray[Any]) -> Numbers:
        """Return values as Zarr decodes them as numbers, of the same shape."""
        native = np.asarray(values).astype(self.stored.newbyteorder("="), copy=False)
        return native.view(self.numbers)

    def valid(self, numbers: Numbers) -> Mask:
        """Return which numbers stand for a value."""
        if self.numbers.kind == "f":
            mask = ~np.isnan(numbers)
        elif self.is_time:
            mask = numbers != np.iinfo(np.int64).min  # NaT
        else:
            mask = np.ones(numbers.shape, bool)
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
        return (last, first) if self.is_reversed else (first, last)


def meaning_of(path: str, document: bytes, dtype: np.dtype[Any]) -> Meaning:
    """Return the meaning of the numbers of an array.

    Args:
        path: the array, for messages.
        document: its ``zarr.json``.
        dtype: the type that Zarr decodes its chunks to.

    Raises:
        InvalidInputError: its values have no order (text, bytes, complex numbers), or attributes
            about missing or packed values that cannot be understood.
    """
    if dtype.kind not in "biufmM" or dtype.itemsize > _MOST_BYTES:
        other = ""
        if dtype.kind in "OTUS":
            other = " Select by text with SQL: 'icechunk-async sql', or arrow.dataset."
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: they are of the type {dtype}, and only "
            f"numbers of up to 64 bits, truth values, times and durations can.{other}"
        )
    found: Any = json.loads(document)
    attributes: dict[str, Any] = found.get("attributes") or {}
    parts = [found.get(name) for name in _FORMAT] + [attributes.get(name) for name in _MISSING]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    stored = dtype.newbyteorder("=")
    numbers = np.dtype(np.int64) if dtype.kind in "mM" else stored
    if dtype.kind == "b":
        numbers = np.dtype(np.uint8)
    unsigned = str(attributes.get("_Unsigned", "")).lower()
    if (unsigned, dtype.kind) in {("true", "i"), ("false", "u")}:
        numbers = np.dtype(f"{'u' if unsigned == 'true' else 'i'}{dtype.itemsize}")
    missing: list[Any] = []
    for name in _MISSING[:2]:
        given = attributes.get(name)
        for it in given if is_list(given) else [] if given is None else [given]:
            missing += _missing(path, name, it, stored, numbers)
    scale, offset = (_factor(path, name, attributes) for name in ("scale_factor", "add_offset"))
    if dtype.kind in "bmM":
        scale = offset = None
    return Meaning(path, dtype, numbers, tuple(missing), scale, offset, digest)


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
    if is_list(given) and len(given) == 1:
        given = given[0]
    if given is None:
        return None
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    if not math.isfinite(number) or (name == "scale_factor" and not number):
        raise InvalidInputError(
            f"Values of {path!r} cannot be queried: its attribute {name!r} is "
            f"{json.dumps(given)[:100]}, which is no number to unpack values by. Correct it."
        )
    return float(number)

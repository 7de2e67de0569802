"""Columns of tables as NumPy arrays, and those as an array of the hierarchy stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa

from icechunk_async.errors import InvalidInputError, MissingCoordinatesError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import xarray

__all__ = ["Encoding", "coordinate_column", "value_column"]

_KEPT: Final = ("_FillValue", "missing_value", "scale_factor", "add_offset", "units", "calendar")


@dataclass(frozen=True, slots=True)
class Encoding:
    """How an array stores what users see: CF scale, offset, fill value and units of time.

    Attributes:
        name: of the array.
        dtype: of what is stored.
        attributes: those of them that the array has.
    """

    name: str
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, variable: xarray.Variable, name: str, dtype: np.dtype[Any]) -> Encoding:
        """Answer the encoding that xarray found when it opened a variable."""
        found = {key: it for key, it in variable.encoding.items() if key in _KEPT}
        return cls(name, dtype, found)

    @property
    def fill(self) -> Any:
        """What is stored where there is no value; None if nothing says so."""
        return self.attributes.get("_FillValue", self.attributes.get("missing_value"))

    def encode(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Answer values of one axis as they are stored.

        Raises:
            InvalidInputError: the array cannot hold one of them.
        """
        if self.attributes:
            # These cost seconds, and few arrays need them here.
            import xarray  # noqa: PLC0415
            from xarray import conventions  # noqa: PLC0415

            try:
                # Without the type: xarray would let numbers that are too large wrap around.
                variable = xarray.Variable(("row",), values, {}, dict(self.attributes))
                encode = cast("Any", conventions.encode_cf_variable)  # pyright: ignore[reportUnknownMemberType]
                values = np.asarray(encode(variable).values)
            except (ValueError, OverflowError) as error:
                raise InvalidInputError(
                    f"Values cannot be stored in {self.name!r}: {error}"
                ) from error
        if self.dtype.kind not in "biu":
            return values.astype(self.dtype)
        if {"scale_factor", "add_offset"} & set(self.attributes):
            values = np.rint(values)
        with np.errstate(invalid="ignore"):
            stored = values.astype(self.dtype)
        if (stored != values).any():
            value = values[stored != values][0]
            raise InvalidInputError(
                f"{self.name!r} cannot hold {value!s}: it is an array of {self.dtype}. Convert "
                "the column, or leave out such rows."
            )
        return stored


def coordinate_column(column: pa.Array[Any], name: str) -> npt.NDArray[Any]:
    """Answer a column of coordinates.

    Raises:
        MissingCoordinatesError: a row has null.
    """
    if column.null_count:
        raise MissingCoordinatesError(
            f"A row has null in column {name!r}, which says where it belongs. Drop such rows.",
            dimension=name,
        )
    return _numpy(column)


def value_column(column: pa.Array[Any], encoding: Encoding) -> npt.NDArray[Any]:
    """Answer a column of values; what is null becomes NaN, or what the array has in its place.

    Raises:
        InvalidInputError: there is null, and the array has nothing for it.
    """
    if column.null_count and not (
        pa.types.is_floating(column.type) or pa.types.is_temporal(column.type)
    ):
        fill = encoding.fill
        scaled = {"scale_factor", "add_offset"} & set(encoding.attributes)
        if encoding.dtype.kind == "f" or (scaled and fill is not None):
            return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
        if fill is None:
            raise InvalidInputError(
                f"A row has null in column {encoding.name!r}, and the array says nothing of what "
                "stands for no value. Drop such rows, or give the array a _FillValue."
            )
        return np.asarray(column.fill_null(np.asarray(fill).item()).to_numpy(zero_copy_only=False))
    return _numpy(column)


def _numpy(column: pa.Array[Any]) -> npt.NDArray[Any]:
    """Answer a column; moments become UTC."""
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        zone = getattr(column.type, "tz", None)
        column = column.cast(pa.timestamp("ns", tz=zone))
    return np.asarray(column.to_numpy(zero_copy_only=False))

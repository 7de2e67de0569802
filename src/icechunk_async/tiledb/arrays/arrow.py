"""Cells of one field as Arrow arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.arrays.cells import UTF8, category_values, is_bytes
from icechunk_async.tiledb.format.schema import Attribute
from icechunk_async.tiledb.format.types import TEXT, Datatype, time_unit

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.cells import Cells, Field
    from icechunk_async.tiledb.format.schema import Enumeration

__all__ = ["arrow_type", "to_arrow"]

_UNITS: Final = frozenset({"s", "ms", "us", "ns"})
_SECONDS: Final = {"D": 86400, "h": 3600, "m": 60}
"""Units of moments that become seconds in Arrow, which lacks them."""
_NEVER: Final = np.iinfo(np.int64).min


def arrow_type(field: Field, enumeration: Enumeration | None = None) -> pa.DataType:
    """Return the Arrow type of a field.

    Moments of days, hours and minutes become seconds. Moments and times of day in other units that
    Arrow lacks are numbers of that unit. Numbers of an enumeration become a dictionary type.
    """
    if enumeration is not None and isinstance(field, Attribute):
        index = pa.from_numpy_dtype(field.dtype)
        return pa.dictionary(index, _value_type(enumeration), enumeration.is_ordered)
    datatype = field.datatype
    if is_bytes(datatype):
        if field.is_variable:
            return pa.large_string() if datatype in UTF8 else pa.large_binary()
        is_number = datatype not in TEXT and field.values == 1
        return pa.uint8() if is_number else pa.binary(field.values)
    single = _number_type(datatype, field.dtype)
    if field.is_variable:
        return pa.large_list(single)
    return single if field.values == 1 else pa.list_(single, field.values)


def to_arrow(cells: Cells, enumeration: Enumeration | None = None) -> pa.Array[Any]:
    """Return cells as an Arrow array of `arrow_type`.

    Raises:
        FormatError: text is not valid, or Arrow cannot hold a moment.
    """
    field = cells.field
    kind = arrow_type(field)
    valid = None if cells.valid is None else _bitmap(cells.valid)
    if cells.offsets is not None:
        offsets = pa.py_buffer(cells.offsets.astype(np.int64, copy=False))
        if is_bytes(field.datatype):
            # Arrow's layout of text is TileDB's: offsets and bytes, on the same memory.
            data = pa.py_buffer(np.ascontiguousarray(cells.values))
            found = pa.Array.from_buffers(kind, len(cells), [valid, offsets, data])
            return _checked_text(field, found)
        inner = _numbers(kind.value_type, field, cells.values, None)
        return pa.Array.from_buffers(kind, len(cells), [valid, offsets], children=[inner])
    if pa.types.is_fixed_size_binary(kind):
        data = pa.py_buffer(np.ascontiguousarray(cells.values))
        return pa.Array.from_buffers(kind, len(cells), [valid, data])
    if pa.types.is_fixed_size_list(kind):
        flat = np.ascontiguousarray(cells.values).reshape(-1)
        inner = _numbers(kind.value_type, field, flat, None)
        return pa.Array.from_buffers(kind, len(cells), [valid], children=[inner])
    array = _numbers(kind, field, cells.flat(), cells.valid)
    return array if enumeration is None else _categories(array, enumeration)


def _number_type(datatype: Datatype, dtype: np.dtype[Any]) -> pa.DataType:
    unit = time_unit(datatype)
    if unit is None:
        return pa.bool_() if datatype is Datatype.BOOL else pa.from_numpy_dtype(dtype)
    if datatype > Datatype.DATETIME_AS:
        return pa.duration(unit) if unit in _UNITS else pa.int64()
    if unit in _SECONDS:
        return pa.timestamp("s")
    return pa.timestamp(unit) if unit in _UNITS else pa.int64()


def _numbers(
    kind: pa.DataType,
    field: Field,
    values: npt.NDArray[Any],
    valid: npt.NDArray[np.bool_] | None,
) -> pa.Array[Any]:
    mask = None if valid is None else ~valid
    # A byte of TileDB, a bit of Arrow.
    if field.datatype is Datatype.BOOL:
        return pa.array(values != 0, kind, mask=mask)
    if kind == pa.timestamp("s"):
        values = _in_seconds(field, values)
    plain = pa.array(np.ascontiguousarray(values), mask=mask)
    # Moments are the same 64 bits in both, so they change their type and not their memory.
    return plain if plain.type == kind else plain.view(kind)


def _in_seconds(field: Field, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return moments of days, hours or minutes in seconds; those that are not a time stay so."""
    seconds = _SECONDS.get(time_unit(field.datatype) or "", 1)
    never = values == _NEVER
    most = np.iinfo(np.int64).max // seconds
    if ((np.abs(values) > most) & ~never).any():
        raise FormatError(
            f"The field {field.name!r} of a TileDB array has moments that Arrow cannot hold, "
            "hundreds of billions of years away. Read it as a NumPy array."
        )
    return np.where(never, values, values * seconds)


def _bitmap(valid: npt.NDArray[np.bool_]) -> pa.Buffer:
    # Arrow's order of bits in a bitmap, the lowest first.
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _checked_text(field: Field, array: pa.Array[Any]) -> pa.Array[Any]:
    """Return an array of text if all of it is valid UTF-8.

    Raises:
        FormatError: it is not.
    """
    if field.datatype in UTF8:
        try:
            # Arrow takes buffers unseen, and hands out invalid text until something else fails on
            # it.
            array.validate(full=True)
        except ValueError as error:
            raise FormatError(
                f"The field {field.name!r} of a TileDB array is declared as text, and a cell is "
                f"not valid: {error}. Read it with TileDB, and write it anew as bytes."
            ) from error
    return array


def _value_type(it: Enumeration) -> pa.DataType:
    if it.datatype in UTF8:
        return pa.large_string()
    if is_bytes(it.datatype):
        return pa.large_binary()
    return _number_type(it.datatype, it.numbers_dtype)


def _categories(array: pa.Array[Any], it: Enumeration) -> pa.Array[Any]:
    values = category_values(it)
    kind = _value_type(it)
    plain = pa.array(values)
    dictionary = plain if plain.type == kind else plain.cast(kind)
    bounds = pc.min_max(array).as_py()
    least, greatest = bounds["min"], bounds["max"]
    if least is not None and not 0 <= least <= greatest < len(values):
        # TileDB writes such numbers for values that the enumeration lacked: they mean nothing.
        inside = pc.and_(pc.greater_equal(array, 0), pc.less(array, len(values)))
        array = pc.if_else(inside, array, pa.scalar(None, array.type))
    return pa.DictionaryArray.from_arrays(array, dictionary, ordered=it.is_ordered)

"""Fields of TileDB arrays as columns of Spark: types, values, and what predicates say of cells."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read.pushdown import reach
from icechunk_async.zarr.queries.predicates import Junction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.zarr.queries.predicates import Predicate, Where

__all__ = ["column_type", "expression_of", "span_of", "to_column"]

_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
"""Spark has no unsigned integers: each becomes the next larger type."""
_NEVER: Final = np.iinfo(np.int64).min
"""NumPy's number of a missing moment, NaT."""
_MOST: Final = np.iinfo(np.int64).max
_MICROSECONDS: Final = {"s": 1_000_000, "ms": 1000, "us": 1}
# Beyond, neighbouring integers are one double.
_EXACT_DOUBLES: Final = 1 << 53


def column_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column for the Arrow type of a field.

    Moments and durations have microseconds, as Spark's. Enumerations are their values.
    """
    if pa.types.is_dictionary(kind):
        return column_type(kind.value_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(column_type(kind.value_type))
    return _WIDER.get(kind, kind)


def to_column(values: pa.Array[Any], wanted: pa.DataType, *, nan_as_null: bool) -> pa.Array[Any]:
    """Return cells of a field as a column; NaT, and NaN on request, become null.

    Raises:
        InvalidInputError: a moment is too far away for Spark.
    """
    kind = values.type
    if pa.types.is_dictionary(kind):
        return to_column(values.dictionary_decode(), wanted, nan_as_null=nan_as_null)
    if pa.types.is_temporal(kind):
        return _moments(values).cast(wanted)
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_temporal(kind.value_type):
            values = _moments_in_lists(values)
        return values.cast(wanted)
    if nan_as_null and pa.types.is_floating(kind):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, kind), values)
    return values if values.type == wanted else values.cast(wanted)


def _moments(values: pa.Array[Any]) -> pa.Array[Any]:
    """Return moments or durations in microseconds, the earlier one where there are finer ones."""
    unit = values.type.unit
    stored = values.view(pa.int64())
    missing = stored.is_null().to_numpy(zero_copy_only=False)
    numbers = stored.fill_null(0).to_numpy()
    missing |= numbers == _NEVER
    numbers = np.where(missing, 0, numbers)
    factor = _MICROSECONDS.get(unit, 1)
    # Before the multiplication, which would wrap. The negation is safe: `_NEVER` is masked.
    if len(numbers) and int(max(numbers.max(), -numbers.min())) > _MOST // factor:
        raise InvalidInputError(
            "A TileDB array has moments more than 292,000 years from 1970, which Spark has no type "
            "for. Leave the attribute out with the option 'arrays'."
        )
    # Down, not towards zero: Spark's moment is the microsecond in which the stored one lies, also
    # before 1970. `_in_unit` counts on it.
    numbers = numbers // 1000 if unit == "ns" else numbers * factor
    is_moment = pa.types.is_timestamp(values.type)
    return pa.array(numbers, mask=missing).view(
        pa.timestamp("us") if is_moment else pa.duration("us")
    )


def _moments_in_lists(values: pa.Array[Any]) -> pa.Array[Any]:
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.large_list(values.type.value_type))
    inner = _moments(values.values)
    kind = pa.large_list(inner.type)
    return pa.Array.from_buffers(
        kind, len(values), values.buffers()[:2], offset=values.offset, children=[inner]
    )


def expression_of(
    conditions: Iterable[Where], schema: pa.Schema, *, nan_as_null: bool
) -> pc.Expression | None:
    """Return an expression that holds for all rows which fulfil conditions of Spark, and others.

    Args:
        conditions: all of them must hold.
        schema: the fields of the array.
        nan_as_null: whether NaN is null, which satisfies no comparison.

    Returns:
        None if nothing is known.
    """
    found: pc.Expression | None = None
    for it in conditions:
        known = _known_of(it, schema, nan_as_null=nan_as_null)
        if known is not None:
            found = known if found is None else found & known
    return found


def _known_of(where: Where, schema: pa.Schema, *, nan_as_null: bool) -> pc.Expression | None:
    if not isinstance(where, Junction):
        return _known(where, schema.field(where.column).type, nan_as_null=nan_as_null)
    if not where.is_any:
        return expression_of(where.parts, schema, nan_as_null=nan_as_null)
    found: pc.Expression | None = None
    for it in where.parts:
        known = _known_of(it, schema, nan_as_null=nan_as_null)
        # Of an OR every branch must be known: a row may be there for the one that is not.
        if known is None:
            return None
        found = known if found is None else found | known
    return found


def _known(predicate: Predicate, kind: pa.DataType, *, nan_as_null: bool) -> pc.Expression | None:
    column = pc.field(predicate.column)
    if predicate.op == "not null":
        return column.is_valid()
    if pa.types.is_dictionary(kind):
        return None  # statistics are those of the numbers
    ranges = reach(column_type(kind), predicate)
    if ranges is None:
        return None
    # The OR of no range holds for no row, such as `x in ()`.
    found: pc.Expression = pc.scalar(False)  # noqa: FBT003 -- Arrow's
    for least, greatest in ranges:
        if greatest is None and pa.types.is_floating(kind) and not nan_as_null:
            return None  # boxes and statistics do not show NaN, which is greater than all numbers
        low, high = _limit(kind, least, up=False), _limit(kind, greatest, up=True)
        part: pc.Expression | None = None
        if low is not None:
            part = column >= low
        if high is not None:
            part = column <= high if part is None else part & (column <= high)
        if part is None:
            return None
        found |= part
    return found


def span_of(conditions: Iterable[Where], kind: pa.DataType) -> tuple[int | None, int | None]:
    """Return the least and the greatest coordinate of cells that fulfil conditions, and others.

    Args:
        conditions: on one dimension of a dense array; all of them must hold.
        kind: the Arrow type of the dimension.

    Returns:
        Stored numbers; None is no limit. The least is greater if no cell satisfies.
    """
    low: int | None = None
    high: int | None = None
    for it in conditions:
        least, most = _span(it, kind)
        # An AND narrows; what is unknown leaves the limit.
        if least is not None:
            low = least if low is None else max(low, least)
        if most is not None:
            high = most if high is None else min(high, most)
    return low, high


def _span(where: Where, kind: pa.DataType) -> tuple[int | None, int | None]:
    if not isinstance(where, Junction):
        ranges = reach(column_type(kind), where)
        if ranges is None:
            return None, None
        lows = [_numbered(_limit(kind, least, up=False)) for least, _ in ranges]
        highs = [_numbered(_limit(kind, greatest, up=True)) for _, greatest in ranges]
    elif where.is_any:
        lows, highs = map(list, zip(*(_span(it, kind) for it in where.parts), strict=True))
    else:
        return span_of(where.parts, kind)
    if not lows:
        return 1, 0
    # An OR is as wide as its widest branch.
    low = None if None in lows else min(it for it in lows if it is not None)
    return low, None if None in highs else max(it for it in highs if it is not None)


def _numbered(it: pa.Scalar[Any] | None) -> int | None:
    if it is None:
        return None
    found: int = it.cast(pa.int64()).as_py() if pa.types.is_temporal(it.type) else it.as_py()
    return found


def _limit(kind: pa.DataType, value: Any, *, up: bool) -> pa.Scalar[Any] | None:
    """Return a value of a type at or beyond another one; None for no limit."""
    if value is None:
        return None
    if pa.types.is_large_string(kind):
        return pa.scalar(value.decode(), kind)
    if pa.types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        # The literal is a double, and its cast to float32 may round inwards: one value further out
        # holds all that Spark's comparison as doubles would keep.
        with np.errstate(over="ignore"):
            return pa.scalar(
                np.nextafter(dtype.type(value), dtype.type(math.inf if up else -math.inf)), kind
            )
    if pa.types.is_integer(kind):
        if isinstance(value, float) and abs(value) >= _EXACT_DOUBLES:
            return None  # compared as doubles, to which neighbours are equal
        bounds = np.iinfo(kind.to_pandas_dtype())
        # Outwards, so that no row is lost: Spark compares exactly afterwards.
        whole = math.ceil(value) if up else math.floor(value)
        return pa.scalar(min(max(whole, int(bounds.min)), int(bounds.max)), kind)
    if pa.types.is_timestamp(kind):
        return pa.scalar(_in_unit(value, kind.unit, up=up), kind)
    return None


def _in_unit(microseconds: int, unit: str, *, up: bool) -> int:
    if unit == "ns":
        # Spark sees microseconds, cut off: each stands for 1,000 stored numbers, the last of which
        # ends in 999.
        whole = microseconds * 1000 + 999 * up
    else:
        step = _MICROSECONDS[unit]
        whole = -(-microseconds // step) if up else microseconds // step
    bounds = np.iinfo(np.int64)
    # The least number is NaT, which is no moment.
    return min(max(whole, int(bounds.min) + 1), int(bounds.max))

"""Conditions on one column, from Spark's filters or the option `where`, and their evaluation.

Conditions are applied to coordinates, and to bounds of chunks from their statistics, before any
chunk is read. They mean what they mean in Spark's SQL (with its ANSI mode, the default since Spark
4). Spark applies its filters again, so a filter that is not understood here costs time but not
correctness; of the option `where` everything must be understood.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import InvalidInputError
from icechunk_async.zarr.queries.predicates import MOMENT, OPERATORS, Moment, Predicate, offset_us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from icechunk_async.arrow.guarantees import ChunkBounds

    type Mask = npt.NDArray[np.bool_]

__all__ = ["Predicate", "fulfilled", "of_filter", "possible", "reach"]

_COMPARISONS: Final = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}


def of_filter(given: Filter) -> Predicate | None:
    """Translate a filter of Spark; return None for kinds that cannot prune coordinates."""
    from pyspark.sql import datasource  # noqa: PLC0415 -- at hand where a filter is

    # Spark pushes terms that are joined by AND, each of one column and literals: never an OR.
    negated = isinstance(given, datasource.Not)
    if isinstance(given, datasource.Not):
        given = given.child
    path: tuple[str, ...] = getattr(given, "attribute", ())
    # A path of several names is a field within a struct, which no array becomes.
    if len(path) != 1:
        return None
    column = path[0]
    match given:
        case datasource.In():
            return Predicate(column, "not in" if negated else "in", tuple(given.value))
        case datasource.IsNull():
            return Predicate(column, "not null" if negated else "null")
        case datasource.IsNotNull():
            return Predicate(column, "null" if negated else "not null")
        case datasource.EqualTo() if negated:
            return Predicate(column, "!=", (given.value,))
        case (
            datasource.EqualTo()
            | datasource.GreaterThan()
            | datasource.GreaterThanOrEqual()
            | datasource.LessThan()
            | datasource.LessThanOrEqual()
        ) if not negated:
            return Predicate(column, _COMPARISONS[type(given).__name__], (given.value,))
        case _:
            return None


def fulfilled(column: pa.Array[Any], predicate: Predicate, *, exact: bool) -> Mask:
    """Return a mask of the values that satisfy a predicate, as Spark's SQL means it.

    Numbers are compared as doubles if the column or a literal is of floating point, and exactly
    otherwise. NaN equals itself and is greater than all numbers.

    Args:
        column: values as Spark sees them.
        predicate: a condition on this column.
        exact: refuse literals that cannot be compared; otherwise such a predicate keeps all.

    Raises:
        InvalidInputError: with `exact`, a literal is not of the column's type.
    """
    valid = ~_bits(column.is_null())
    if predicate.op in {"null", "not null"}:
        return valid if predicate.op == "not null" else ~valid
    try:
        values, literals = _comparable(column, predicate.values)
    except (TypeError, ValueError, OverflowError) as error:
        if exact:
            raise InvalidInputError(
                f"The option 'where' compares {predicate.column!r}, which is of the type "
                f"{column.type}, with {', '.join(map(str, predicate.values))}. {error}"
            ) from None
        return np.ones(len(column), bool)
    compare = OPERATORS[predicate.op]
    return valid & compare(values, literals)


def possible(bounds: ChunkBounds, predicate: Predicate) -> Mask:
    """Return which chunks may have rows that satisfy a predicate, by what is known of them.

    The bounds are compared as `fulfilled` compares values, so that a chunk is left out only where
    Spark would drop each of its rows.

    Args:
        bounds: of the predicate's column, ``n`` chunks.
        predicate: a condition; one that cannot be compared keeps all.
    """
    match predicate.op:
        case "null":
            return ~bounds.known | bounds.has_nulls
        case "not null":
            return ~bounds.known | bounds.has_values
        case _:
            pass
    try:
        low, literals = _comparable(bounds.low, predicate.values)
        high, _ = _comparable(bounds.high, predicate.values)
    except (TypeError, ValueError, OverflowError):
        return np.ones(len(bounds.known), bool)
    compare = OPERATORS[predicate.op]
    match predicate.op:
        case "<" | "<=":
            # A chunk is dropped only if its least value is too large already; `>` is the mirror
            # image.
            some = compare(low, literals)
        case ">" | ">=":
            some = compare(high, literals)
        case "=" | "in":
            some = np.zeros(len(low), bool)
            for it in literals:
                some |= OPERATORS["<="](low, [it]) & OPERATORS[">="](high, [it])
        case _:  # "!=" and "not in": no row only where all have the one value that is named
            some = np.asarray(low != high, bool) | compare(low, literals)
    return ~bounds.known | (bounds.has_values & some)


def reach(kind: pa.DataType, predicate: Predicate) -> list[tuple[Any, Any]] | None:
    """Return the ranges in which all values lie that satisfy a predicate; None if they may be any.

    Args:
        kind: the type of the column as Spark sees it.
        predicate: a condition on it.

    Returns:
        Ranges, both ends included, where None is no limit: of numbers, microseconds since 1970, or
        UTF-8 of text. NaN, which is greater than all numbers, is in those without an upper limit.
    """
    import pyarrow as pa  # noqa: PLC0415

    if predicate.op not in _RANGES or pa.types.is_boolean(kind):
        return None
    try:
        _, literals = _comparable(pa.array([], kind), predicate.values)
    except (TypeError, ValueError, OverflowError):
        return None
    # Every number is less than NaN, which no range of numbers says.
    if any(isinstance(it, float) and math.isnan(it) for it in literals):
        return None
    return [_RANGES[predicate.op](it) for it in literals]


_RANGES: Final[dict[str, Callable[[Any], tuple[Any, Any]]]] = {
    "=": lambda it: (it, it),
    "in": lambda it: (it, it),
    "<": lambda it: (None, it),
    "<=": lambda it: (None, it),
    ">": lambda it: (it, None),
    ">=": lambda it: (it, None),
}


def _comparable(column: pa.Array[Any], given: Sequence[Any]) -> tuple[npt.NDArray[Any], list[Any]]:
    """Return values and literals that NumPy compares as Spark does; nulls become anything.

    Raises:
        TypeError, ValueError, OverflowError: a literal cannot be compared with the column; says
            what to do.
    """
    import pyarrow as pa  # noqa: PLC0415

    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return _numbers(column, given)
    if pa.types.is_boolean(kind):
        values = column.fill_null(False)  # noqa: FBT003
        return values.to_numpy(zero_copy_only=False), [
            _of(bool, it, "true or false") for it in given
        ]
    if pa.types.is_timestamp(kind):
        # Any value will do for null: the caller takes the mask of valid ones after the comparison.
        moments = column.cast(pa.int64()).fill_null(0).to_numpy()
        zoned = kind != pa.timestamp("us")
        return moments, [_moment(it, zoned=zoned) for it in given]
    texts = [_of(str, it, "quoted text") for it in given]
    if pa.types.is_string(kind):
        # As objects: NumPy's own text and bytes lose zeros at their end, which Spark compares.
        return np.array([it.encode() for it in column.fill_null("").to_pylist()], object), [
            it.encode() for it in texts
        ]
    raise TypeError("Filter in the query.")


def _of[T](kind: type[T], value: object, named: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"Give {named}.")
    return value


def _numbers(column: pa.Array[Any], given: Sequence[Any]) -> tuple[npt.NDArray[Any], list[Any]]:
    import pyarrow as pa  # noqa: PLC0415

    for it in given:
        if isinstance(it, bool) or not isinstance(it, int | float | Decimal):
            raise TypeError("Give numbers.")
    # As in Spark: `lat = 0.1` selects nothing of a float32, since both sides become doubles.
    if pa.types.is_floating(column.type) or any(isinstance(it, float) for it in given):
        doubles = column.cast(pa.float64(), safe=False).fill_null(0).to_numpy()
        return doubles, [float(it) for it in given]
    whole = pa.uint64() if pa.types.is_decimal(column.type) else column.type
    integers = column.cast(whole).fill_null(0).to_numpy(zero_copy_only=False)
    if all(isinstance(it, int) for it in given):
        return integers, list(given)
    # Slow, and exact: `x = 0.5` must not become `x = 0`, nor 2**60 + 1 a double.
    return integers.astype(object), [Decimal(it) for it in given]


def _moment(value: object, *, zoned: bool) -> int:
    """Return microseconds since 1970 of a moment, as text or as Spark hands it over."""
    from datetime import UTC, datetime  # noqa: PLC0415

    if isinstance(value, datetime):
        if (value.tzinfo is not None) != zoned:
            raise TypeError("Give moments of the same kind.")
        plain = value.astimezone(UTC).replace(tzinfo=None) if zoned else value
        return int(np.datetime64(plain, "us").astype(np.int64))
    text = value.text if isinstance(value, Moment) else _of(str, value, "quoted text")
    match = MOMENT.fullmatch(text.strip())
    if match is None:
        raise ValueError("Give a moment in ISO 8601, such as '2020-01-31 12:00:00'.")
    if zoned and not match["zone"]:
        # Spark would take that of the session, which a Python source is not told.
        raise ValueError("Name the zone, such as '2020-01-31 12:00:00Z'.")
    if match["zone"] and not zoned:
        raise ValueError("The column has no zone, so leave it out of the text.")
    moment = int(np.datetime64(match["moment"], "us").astype(np.int64))
    return moment - offset_us(match["zone"] or "Z")


def _bits(mask: Any) -> Mask:
    bits: Mask = mask.to_numpy(zero_copy_only=False)
    return bits

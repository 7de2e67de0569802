"""Conditions on one column, from Spark's filters or the option `where`, and their evaluation.

Conditions are applied to coordinates only, before any chunk is read. Spark applies its filters
again, so a filter that is not understood here costs time but not correctness.
"""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

__all__ = ["Predicate", "fulfilled", "of_filter", "parse_where"]

_COMPARISONS: Final = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
_TERM: Final = re.compile(
    r"""\s*(?:`(?P<quoted>[^`]+)`|(?P<name>\w+))\s*
    (?:(?P<op>==|=|!=|<>|<=|>=|<|>)\s*(?P<value>{literal})
    |(?P<in>(?:not\s+)?in)\s*\((?P<list>\s*{literal}\s*(?:,\s*{literal}\s*)*)\)
    |between\s+(?P<low>{literal})\s+and\s+(?P<high>{literal}))\s*""".replace(
        "{literal}", r"""(?:'[^']*'|"[^"]*"|[-+]?[\w.]+(?:[eE][-+]?\d+)?)"""
    ),
    re.VERBOSE | re.IGNORECASE,
)
_AND: Final = re.compile(r"and\b", re.IGNORECASE)
_ITEM: Final = re.compile(r"""'[^']*'|"[^"]*"|[^,\s]+""")


@dataclass(frozen=True, slots=True)
class Predicate:
    """A column compared with literals. Null satisfies the operator `null` only."""

    column: str
    op: str
    """`=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `null`, `not null`."""
    values: tuple[Any, ...] = ()


def of_filter(given: Filter) -> Predicate | None:
    """Translate a filter of Spark; return None for kinds that cannot prune coordinates."""
    from pyspark.sql import datasource  # noqa: PLC0415 -- at hand where a filter is

    negated = isinstance(given, datasource.Not)
    if isinstance(given, datasource.Not):
        given = given.child
    path: tuple[str, ...] = getattr(given, "attribute", ())
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


def parse_where(text: str) -> tuple[Predicate, ...]:
    """Parse conditions joined by `and`: comparisons, `in (...)` and `between a and b`.

    Raises:
        InvalidInputError: the text is anything else.
    """
    found: list[Predicate] = []
    place = 0
    while text.strip() and place < len(text):
        match = _TERM.match(text, place)
        if match is None:
            raise _not_understood(text, place)
        column = match["quoted"] or match["name"]
        if match["op"]:
            op = {"==": "=", "<>": "!="}.get(match["op"], match["op"])
            found.append(Predicate(column, op, (_literal(match["value"]),)))
        elif match["in"]:
            values = tuple(_literal(it) for it in _ITEM.findall(match["list"]))
            found.append(Predicate(column, " ".join(match["in"].lower().split()), values))
        else:
            found.append(Predicate(column, ">=", (_literal(match["low"]),)))
            found.append(Predicate(column, "<=", (_literal(match["high"]),)))
        place = match.end()
        if place < len(text):
            joint = _AND.match(text, place)
            if joint is None or joint.end() == len(text):
                raise _not_understood(text, place)
            place = joint.end()
    return tuple(found)


def _not_understood(text: str, place: int) -> InvalidInputError:
    return InvalidInputError(
        f"The option 'where' is not understood at {text[place:]!r}. It takes conditions on "
        "coordinates joined by 'and', such as \"lat between 10 and 20 and time >= '2020-01-01'\"."
    )


def _literal(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        raise InvalidInputError(
            f"The option 'where' holds {text!r}, which is neither a number nor quoted text."
        ) from None


def fulfilled(column: pa.Array[Any], predicate: Predicate, *, exact: bool) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that may satisfy a predicate.

    Args:
        column: values as Spark sees them.
        predicate: a condition on this column.
        exact: refuse literals that cannot be compared; otherwise such a predicate keeps all.

    Raises:
        InvalidInputError: with `exact`, a literal is not of the column's type.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if predicate.op in {"null", "not null"}:
        wanted = pc.is_null(column) if predicate.op == "null" else pc.is_valid(column)
        return _bits(wanted)
    found = [_scalar(value, column.type, exact=exact) for value in predicate.values]
    scalars = [it for it in found if it is not None]
    if len(scalars) < len(found):
        if exact:
            raise InvalidInputError(
                f"The option 'where' compares {predicate.column!r}, which is of the type "
                f"{column.type}, with {predicate.values!r}. Give literals of that type."
            )
        return np.ones(len(column), bool)
    if predicate.op in {"in", "not in"}:
        mask = np.zeros(len(column), bool)
        for it in scalars:
            mask |= _bits(pc.equal(column, it))
        if predicate.op == "not in":
            mask = ~mask & _bits(pc.is_valid(column))
    else:
        compare: Callable[..., Any] = getattr(pc, _FUNCTIONS[predicate.op])
        mask = _bits(compare(column, scalars[0]))
    if pa.types.is_floating(column.type):
        # For Spark, NaN equals itself and exceeds all numbers, unlike in Arrow: it may match.
        mask |= _bits(pc.is_nan(column))
    return mask


_FUNCTIONS: Final = {
    "=": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


def _scalar(value: Any, kind: pa.DataType, *, exact: bool) -> pa.Scalar[Any] | None:
    """Return a literal as a scalar of the column's type; None if it cannot be converted."""
    import pyarrow as pa  # noqa: PLC0415

    if value is None:
        return None
    try:
        if exact and isinstance(value, str) and pa.types.is_temporal(kind):
            return pa.scalar(np.datetime64(value, "us"), pa.timestamp("us")).cast(kind)
        scalar = pa.scalar(value, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None
    if pa.types.is_floating(kind) and not exact:
        return scalar if scalar.as_py() == value else None
    return scalar


def _bits(mask: Any) -> npt.NDArray[np.bool_]:
    """Return a mask in which null is False."""
    bits: npt.NDArray[np.bool_] = mask.fill_null(False).to_numpy(zero_copy_only=False)  # noqa: FBT003
    return bits

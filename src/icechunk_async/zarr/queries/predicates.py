"""Conditions on one column, joined by `and`, as SQL writes and means them.

Queries by value and the tables of Spark take the same conditions. Nothing here knows either: this
reads the text, and compares arrays of NumPy with literals.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    type Mask = npt.NDArray[np.bool_]

__all__ = ["MOMENT", "OPERATORS", "Predicate", "offset_us", "parse_where"]

_OPTION: Final = "The option 'where'"
_TERM: Final = re.compile(
    r"""\s*(?:`(?P<quoted>[^`]+)`|(?P<name>\w+))\s*
    (?:(?P<op>==|=|!=|<>|<=|>=|<|>)\s*(?P<value>{literal})
    |(?P<in>(?:not\s+)?in)\s*\((?P<list>\s*{literal}\s*(?:,\s*{literal}\s*)*)\)
    |between\s+(?P<low>{literal})\s+and\s+(?P<high>{literal}))\s*""".replace(
        "{literal}", r"""(?:'[^']*'|"[^"]*"|[-+]?[\w.]+(?:(?<=[eE])[-+]\d+\w*)?)"""
    ),
    re.VERBOSE | re.IGNORECASE,
)
_AND: Final = re.compile(r"and\b", re.IGNORECASE)
_ITEM: Final = re.compile(r"""'[^']*'|"[^"]*"|[^,\s]+""")
_NUMBER: Final = re.compile(
    r"(?P<number>[-+]?(?:\d+(?P<point>\.)?\d*|(?P<first>\.)\d+)(?P<exponent>e[-+]?\d+)?)"
    r"(?P<suffix>bd|[dflsy])?",
    re.IGNORECASE | re.ASCII,
)
_INTEGER_BITS: Final = {"Y": 8, "S": 16, "L": 64}
_MOST_DIGITS: Final = 38
"""Of a decimal in Spark."""
MOMENT: Final = re.compile(
    r"(?P<moment>-?\d{4,6}(?:-\d\d(?:-\d\d(?:[T ]\d\d(?::\d\d(?::\d\d(?:\.\d{1,6})?)?)?)?)?)?)"
    r"\s*(?P<zone>Z|UTC|[-+]\d\d:\d\d)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Predicate:
    """A column compared with literals. Null satisfies the operator `null` only."""

    column: str
    op: str
    """`=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `null`, `not null`."""
    values: tuple[Any, ...] = ()


def parse_where(text: str, said: str = _OPTION) -> tuple[Predicate, ...]:
    """Parse conditions joined by `and`: comparisons, `in (...)` and `between a and b`.

    Literals are those of SQL: `0.1` is a decimal, `1e-1` and `0.1D` are doubles, `0.1F` is a float.

    Args:
        text: the conditions.
        said: how messages call them.

    Raises:
        InvalidInputError: the text is anything else.
    """
    found: list[Predicate] = []
    place = 0
    while text.strip() and place < len(text):
        match = _TERM.match(text, place)
        if match is None:
            raise _not_understood(said, text, place)
        column = match["quoted"] or match["name"]
        if match["op"]:
            op = {"==": "=", "<>": "!="}.get(match["op"], match["op"])
            found.append(Predicate(column, op, (_literal(said, match["value"]),)))
        elif match["in"]:
            values = tuple(_literal(said, it) for it in _ITEM.findall(match["list"]))
            found.append(Predicate(column, " ".join(match["in"].lower().split()), values))
        else:
            found.append(Predicate(column, ">=", (_literal(said, match["low"]),)))
            found.append(Predicate(column, "<=", (_literal(said, match["high"]),)))
        place = match.end()
        if place < len(text):
            joint = _AND.match(text, place)
            if joint is None or joint.end() == len(text):
                raise _not_understood(said, text, place)
            place = joint.end()
    return tuple(found)


def _not_understood(said: str, text: str, place: int) -> InvalidInputError:
    return InvalidInputError(
        f"{said} is not understood at {text[place:]!r}. It takes conditions on single "
        "columns joined by 'and', such as \"lat between 10 and 20 and time >= '2020-01-01'\"."
    )


def _literal(said: str, text: str) -> bool | str | int | float | Decimal:
    if text[0] in "'\"":
        if "\\" in text:
            raise InvalidInputError(
                f"{said} holds {text}, with a backslash, which it does not take. "
                "Filter in the query."
            )
        return text[1:-1]
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    match = _NUMBER.fullmatch(text)
    number = None if match is None else _number(match)
    if number is None:
        raise InvalidInputError(
            f"{said} holds {text!r}, which is neither a number of SQL nor quoted text."
        )
    return number


def _number(match: re.Match[str]) -> int | float | Decimal | None:
    """Return the value of a literal as SQL means it; None for anything else."""
    text, suffix = match["number"], (match["suffix"] or "").upper()
    fraction, exponent = match["point"] or match["first"], match["exponent"]
    if suffix in _INTEGER_BITS:
        if fraction or exponent:
            return None
        bound = 1 << (_INTEGER_BITS[suffix] - 1)
        return int(text) if -bound <= int(text) < bound else None
    if suffix in {"D", "F"} or (exponent and not suffix):
        double = float(text)
        with np.errstate(over="ignore"):
            value = float(np.float32(double)) if suffix == "F" else double
        return value if math.isfinite(value) else None
    if fraction or suffix == "BD":
        exact = Decimal(text)
        return exact if len(exact.as_tuple().digits) <= _MOST_DIGITS else None
    return int(text) if len(text.lstrip("+-")) <= _MOST_DIGITS else None


def offset_us(zone: str) -> int:
    """Return how far a zone of a moment is before UTC, in microseconds."""
    if zone in {"Z", "UTC"}:
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[4:6])
    return (-1 if zone[0] == "-" else 1) * minutes * 60_000_000


def _equal(values: npt.NDArray[Any], literal: Any) -> Mask:
    if isinstance(literal, float) and math.isnan(literal):
        return np.isnan(values)
    return np.asarray(values == literal, bool)


def _less(values: npt.NDArray[Any], literal: Any) -> Mask:
    if isinstance(literal, float) and math.isnan(literal):
        return ~np.isnan(values)
    return np.asarray(values < literal, bool)


def _among(values: npt.NDArray[Any], literals: Sequence[Any]) -> Mask:
    mask = np.zeros(values.shape, bool)
    for it in literals:
        mask |= _equal(values, it)
    return mask


OPERATORS: Final[dict[str, Callable[[npt.NDArray[Any], Sequence[Any]], Mask]]] = {
    "=": lambda values, it: _equal(values, it[0]),
    "!=": lambda values, it: ~_equal(values, it[0]),
    "<": lambda values, it: _less(values, it[0]),
    "<=": lambda values, it: _less(values, it[0]) | _equal(values, it[0]),
    ">": lambda values, it: ~(_less(values, it[0]) | _equal(values, it[0])),
    ">=": lambda values, it: ~_less(values, it[0]),
    "in": _among,
    "not in": lambda values, it: ~_among(values, it),
}

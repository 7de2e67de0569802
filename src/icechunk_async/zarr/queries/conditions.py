"""Conditions on the values of one array: decided from the bounds of chunks, or cell by cell. Pure.

Both compare the same converted numbers by the same operators. Conversion keeps order, so what
bounds decide is what each cell would say.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.statistics import greatest_keys, text_key
from icechunk_async.zarr.queries.moments import is_moment, micros_of_unit, moment_of
from icechunk_async.zarr.queries.predicates import OPERATORS, Moment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.meaning import Mask, Meaning, Numbers
    from icechunk_async.zarr.queries.predicates import Predicate

__all__ = ["Condition", "condition_on"]


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """A predicate on the values of one array. A missing value satisfies none."""

    meaning: Meaning
    op: str
    literals: tuple[Any, ...]
    """Numbers: all doubles if values are compared as such. Of text, arrays without axes."""
    keys: tuple[Any, ...]
    """The literals as bounds are compared with them: keys of text, otherwise the same."""
    as_doubles: bool
    as_objects: bool
    micros: float | None = None
    """Of times of CF that are doubles, the microseconds of their unit: so they are compared."""

    def fulfilled(self, numbers: Numbers) -> Mask:
        """Return which cells satisfy it; of the shape of ``numbers``."""
        mask = OPERATORS[self.op](self._converted(self.meaning.unpacked(numbers)), self.literals)
        return mask & self.meaning.valid(numbers)

    def decided(self, rows: Rows) -> tuple[Mask, Mask]:
        """Return which chunks have no cell that satisfies it, and of which all do; ``(n,)``.

        Args:
            rows: statistics of the chunks.
        """
        if self.meaning.is_text:
            low, high = rows["low"], greatest_keys(rows)
        else:
            first, last = self.meaning.bounds(rows["low"], rows["high"])
            low, high = self._converted(first), self._converted(last)
        with np.errstate(invalid="ignore"):
            possible, certain = self._ranges(low, high)
        some = rows["count"] > 0
        return ~possible | ~some, certain & some & (rows["nulls"] == 0)

    def _ranges(self, low: Numbers, high: Numbers) -> tuple[Mask, Mask]:
        """Return in which ranges of values some could satisfy it, and in which all do."""
        compare, literals = OPERATORS[self.op], self.keys
        match self.op:
            case "<" | "<=":
                return compare(low, literals), compare(high, literals)
            case ">" | ">=":
                return compare(high, literals), compare(low, literals)
            case "=" | "in":
                return _has_any(low, high, literals), (low == high) & compare(low, literals)
            case _:  # "!=" and "not in"
                certain = ~_has_any(low, high, literals)
                return ~((low == high) & ~compare(low, literals)), certain

    def _converted(self, values: Numbers) -> Numbers:
        if self.micros is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                return np.rint(values.astype(np.float64) * self.micros)
        if self.as_doubles:
            return values.astype(np.float64, copy=False)
        return values.astype(object) if self.as_objects else values


def _has_any(low: Numbers, high: Numbers, literals: Sequence[Any]) -> Mask:
    found = np.zeros(low.shape, bool)
    for it in literals:
        found |= np.asarray((low <= it) & (high >= it), bool)
    return found


def condition_on(meaning: Meaning, predicate: Predicate) -> Condition:
    """Return a predicate as a condition on the values of an array.

    Numbers are compared as doubles if the array is of floating point or packed, or a literal is a
    double, and exactly otherwise; as the tables of Spark do. Text is compared by code points.

    Raises:
        InvalidInputError: a literal cannot be compared with its values.
    """
    try:
        if meaning.is_text:
            return _condition_on_text(meaning, predicate)
        literals: list[int | float | Decimal | Fraction]
        micros: float | None = None
        floating = meaning.kind == "f" or meaning.is_packed
        if is_moment(meaning, predicate.values):
            moments = [moment_of(it, meaning) for it in predicate.values]
            literals = [*moments]
            if floating and meaning.stored.kind != "M":
                micros = micros_of_unit(meaning)
                literals = [it * Fraction(micros) for it in moments]
        elif meaning.is_truth:
            literals = [_truth(it) for it in predicate.values]
        else:
            literals = [_number(it) for it in predicate.values]
        doubles = floating or any(isinstance(it, float) for it in literals)
        if doubles:
            literals = [float(it) for it in literals]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"A condition compares {predicate.column!r}, which is of the type {meaning.stored}, "
            f"with {', '.join(map(_shown, predicate.values))}. {error}"
        ) from None
    objects = not doubles and any(not isinstance(it, int) for it in literals)
    given = tuple(literals)
    return Condition(meaning, predicate.op, given, given, doubles, objects, micros)


def _condition_on_text(meaning: Meaning, predicate: Predicate) -> Condition:
    texts = [_text(it) for it in predicate.values]
    # As arrays of the type of cells, since NumPy drops trailing zeros of other text.
    literals = tuple(np.array(it, meaning.numbers) for it in texts)
    keys = tuple(map(text_key, texts))
    return Condition(meaning, predicate.op, literals, keys, as_doubles=False, as_objects=False)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Moment) else repr(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("Give text in quotes.")
    return value


def _number(value: Any) -> int | float | Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError("Give numbers.")
    return value


def _truth(value: Any) -> int:
    if not isinstance(value, bool):
        raise TypeError("Give true or false.")
    return int(value)

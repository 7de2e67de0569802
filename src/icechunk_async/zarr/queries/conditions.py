"""Conditions on the values of one array: decided from the bounds of chunks, or cell by cell. Pure.

Both compare the same converted numbers by the same operators. Conversion keeps order, so what
bounds decide is what each cell would say.

Moments become numbers that values are compared with. Values are times of NumPy, or numbers with
`units` of CF such as `hours since 1900-01-01`. Whole numbers are compared exactly, and others by
their nearest microsecond, which few doubles are.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.statistics import greatest_keys, text_key
from icechunk_async.zarr.queries.predicates import MOMENT, OPERATORS, Moment, offset_us

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.meaning import Mask, Meaning, Numbers
    from icechunk_async.zarr.queries.predicates import Predicate

__all__ = ["Condition", "condition_on"]

_STEPS_NS: Final[dict[str, Fraction]] = {
    "W": Fraction(7 * 86_400 * 10**9),
    "D": Fraction(86_400 * 10**9),
    "h": Fraction(3_600 * 10**9),
    "m": Fraction(60 * 10**9),
    "s": Fraction(10**9),
    "ms": Fraction(10**6),
    "us": Fraction(10**3),
    "ns": Fraction(1),
    "ps": Fraction(1, 10**3),
    "fs": Fraction(1, 10**6),
    "as": Fraction(1, 10**9),
}
# Spellings as in cftime. Months and years are missing: they have no fixed length.
_OF_CF: Final[dict[str, str]] = {
    **dict.fromkeys(("d", "day", "days"), "D"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), "ns"),
}
# As units are found in files: one or two digits, with or without a time, a zone or a `T`.
_SINCE: Final = re.compile(
    r"\s*(?P<unit>[A-Za-z]+)\s+since\s+(?P<year>\d{1,4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T\s]\s*(?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{0,6})0*)?)?)?"
    r"\s*(?:Z|UTC|GMT|(?P<zone>[-+]\d\d:\d\d))?\s*",
    re.ASCII,
)
_MIXED: Final = frozenset({"standard", "gregorian"})
"""Names of the calendar of CF that is Julian until 1582."""
# The first day of the Gregorian calendar, after 1582-10-04 of the Julian one.
_FIRST_US: Final = int(np.datetime64("1582-10-15", "us").astype(np.int64))


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
        # Missing cells go last: NaN and fill values compare as any numbers, and fulfil nothing.
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
        # Bounds of chunks without values are NaN, or anything: `some` leaves them out.
        with np.errstate(invalid="ignore"):
            possible, certain = self._ranges(low, high)
        some = rows["count"] > 0
        return ~possible | ~some, certain & some & (rows["nulls"] == 0)

    def _ranges(self, low: Numbers, high: Numbers) -> tuple[Mask, Mask]:
        """Return in which ranges of values some could satisfy it, and in which all do."""
        compare, literals = OPERATORS[self.op], self.keys
        match self.op:
            case "<" | "<=":
                # Bounds [2, 9] and the condition `< 5`: some may be if the least is, and all are if
                # the greatest is.
                return compare(low, literals), compare(high, literals)
            case ">" | ">=":
                return compare(high, literals), compare(low, literals)
            # That all satisfy an equation is certain only of a chunk with a single value.
            case "=" | "in":
                return _has_any(low, high, literals), (low == high) & compare(low, literals)
            case _:  # "!=" and "not in"
                certain = ~_has_any(low, high, literals)
                return ~((low == high) & ~compare(low, literals)), certain

    def _converted(self, values: Numbers) -> Numbers:
        if self.micros is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                # 0.1 hours has no exact double. Rounded to microseconds, `time = '...'` finds the
                # cell that xarray shows with this time.
                return np.rint(values.astype(np.float64) * self.micros)
        if self.as_doubles:
            return values.astype(np.float64, copy=False)
        return values.astype(object) if self.as_objects else values


def _has_any(low: Numbers, high: Numbers, literals: Sequence[Any]) -> Mask:
    # Whether a literal lies within the bounds, so that the chunk may hold it.
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
        if _is_moment(meaning, predicate.values):
            moments = [_moment_of(it, meaning) for it in predicate.values]
            literals = [*moments]
            if floating and meaning.stored.kind != "M":
                micros = _micros_of_unit(meaning)
                literals = [it * Fraction(micros) for it in moments]
        elif meaning.is_truth:
            literals = [_truth(it) for it in predicate.values]
        else:
            literals = [_number(it) for it in predicate.values]
        doubles = floating or any(isinstance(it, float) for it in literals)
        if doubles:
            # By the nearest double, as Spark does: 0.1 finds the cells that were written as 0.1.
            literals = [float(it) for it in literals]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"A condition compares {predicate.column!r}, which is of the type {meaning.stored}, "
            f"with {', '.join(map(_shown, predicate.values))}. {error}"
        ) from None
    # Decimals and fractions have no type in NumPy. Objects compare them exactly with integers.
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


def _is_moment(meaning: Meaning, values: tuple[Any, ...]) -> bool:
    """Return whether literals are moments to an array: those with times, and text to CF's."""
    if meaning.stored.kind == "M":
        return True
    given = any(isinstance(it, str | Moment) for it in values)
    return given and meaning.stored.kind in "iuf" and meaning.units is not None


def _moment_of(value: Any, meaning: Meaning) -> int | Fraction:
    """Return a moment as a number of the array's unit, since the moment that it counts from.

    Raises:
        TypeError, ValueError, OverflowError: it is no moment, or the array's times are in another
            calendar; says what to do.
    """
    text = value.text if isinstance(value, Moment) else value
    match = MOMENT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise TypeError("Give a moment in ISO 8601, such as '2020-01-31 12:00:00'.")
    # Microseconds: Spark's timestamps have no more, and 64 bits hold them for 292,000 years.
    moment = int(np.datetime64(match["moment"], "us").astype(np.int64))
    moment -= offset_us(match["zone"] or "Z")
    # Fractions: a double has no room for the nanoseconds since 1970, let alone since year 1.
    if meaning.stored.kind == "M":
        unit, steps = np.datetime_data(meaning.stored)
        if unit not in _STEPS_NS:
            raise TypeError(f"Times in units of {unit!r} cannot be compared with moments.")
        found = Fraction(moment * 1000) / (_STEPS_NS[unit] * steps)
    else:
        step, start = _of_cf(meaning)
        # NumPy counts days by the Gregorian calendar at all times.
        if str(meaning.calendar or "standard").lower() in _MIXED and min(moment, start) < _FIRST_US:
            raise TypeError("Its calendar is Julian before 1582-10-15. Give numbers of its units.")
        found = Fraction((moment - start) * 1000) / step
    return int(found) if found.denominator == 1 else found


def _micros_of_unit(meaning: Meaning) -> float:
    """Return the microseconds of a unit of CF."""
    return float(_of_cf(meaning)[0] / 1000)


def _of_cf(meaning: Meaning) -> tuple[Fraction, int]:
    """Return the nanoseconds of a unit of CF, and the microseconds since 1970 of its start."""
    match = _SINCE.fullmatch(meaning.units or "")
    step = None if match is None else _OF_CF.get(match["unit"].lower())
    calendar = str(meaning.calendar or "standard").lower()
    if match is None or step is None or calendar not in {*_MIXED, "proleptic_gregorian"}:
        raise TypeError(
            f"Its units are {meaning.units!r} in the calendar {calendar!r}, which no moment can be "
            "compared with. Give numbers of its units."
        )
    date = f"{match['year']:0>4}-{match['month']:0>2}-{match['day']:0>2}"
    time = ":".join((match[it] or "0").rjust(2, "0") for it in ("hour", "minute", "second"))
    text = f"{date}T{time}.{(match['part'] or '').ljust(6, '0')}"
    start = int(np.datetime64(text, "us").astype(np.int64)) - offset_us(match["zone"] or "Z")
    return _STEPS_NS[step], start

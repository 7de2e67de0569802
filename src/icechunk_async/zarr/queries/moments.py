"""Moments in conditions, as numbers that the values of an array are compared with.

Values are times of NumPy, or numbers with `units` of CF such as `hours since 1900-01-01`. Whole
numbers are compared exactly, and others by their nearest microsecond, which few doubles are.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.zarr.queries.predicates import MOMENT, Moment, offset_us

if TYPE_CHECKING:
    from icechunk_async.zarr.queries.meaning import Meaning

__all__ = ["is_moment", "micros_of_unit", "moment_of"]

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
_OF_CF: Final[dict[str, str]] = {
    **dict.fromkeys(("d", "day", "days"), "D"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("us", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), "ns"),
}
_SINCE: Final = re.compile(
    r"\s*(?P<unit>[A-Za-z]+)\s+since\s+(?P<year>\d{1,4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T\s]\s*(?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{0,6})0*)?)?)?"
    r"\s*(?:Z|UTC|GMT|(?P<zone>[-+]\d\d:\d\d))?\s*",
    re.ASCII,
)
_MIXED: Final = frozenset({"standard", "gregorian"})
"""Names of the calendar of CF that is Julian until 1582."""
_FIRST_US: Final = int(np.datetime64("1582-10-15", "us").astype(np.int64))


def is_moment(meaning: Meaning, values: tuple[Any, ...]) -> bool:
    """Return whether literals are moments to an array: those with times, and text to CF's."""
    if meaning.stored.kind == "M":
        return True
    given = any(isinstance(it, str | Moment) for it in values)
    return given and meaning.stored.kind in "iuf" and meaning.units is not None


def moment_of(value: Any, meaning: Meaning) -> int | Fraction:
    """Return a moment as a number of the array's unit, since the moment that it counts from.

    Raises:
        TypeError, ValueError, OverflowError: it is no moment, or the array's times are in another
            calendar; says what to do.
    """
    text = value.text if isinstance(value, Moment) else value
    match = MOMENT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise TypeError("Give a moment in ISO 8601, such as '2020-01-31 12:00:00'.")
    moment = int(np.datetime64(match["moment"], "us").astype(np.int64))
    moment -= offset_us(match["zone"] or "Z")
    if meaning.stored.kind == "M":
        unit, steps = np.datetime_data(meaning.stored)
        if unit not in _STEPS_NS:
            raise TypeError(f"Times in units of {unit!r} cannot be compared with moments.")
        found = Fraction(moment * 1000) / (_STEPS_NS[unit] * steps)
    else:
        step, start = _of_cf(meaning)
        if str(meaning.calendar or "standard").lower() in _MIXED and min(moment, start) < _FIRST_US:
            raise TypeError("Its calendar is Julian before 1582-10-15. Give numbers of its units.")
        found = Fraction((moment - start) * 1000) / step
    return int(found) if found.denominator == 1 else found


def micros_of_unit(meaning: Meaning) -> float:
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

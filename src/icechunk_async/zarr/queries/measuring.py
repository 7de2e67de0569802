"""Statistics of the cells of one chunk, and what those of many chunks come to.

The same functions serve chunks whose statistics were stored and chunks that are read for a query,
so that a result does not depend on which statistics are known.

Stored bounds of text hold its beginning, so the least and the greatest of all chunks may be longer
than any bound. Chunks whose bounds were cut are read if theirs could be the one, and no others.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.statistics import (
    HIGH_CUT,
    LOW_CUT,
    greatest_keys,
    row_type,
    text_bound,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.meaning import Mask, Meaning, Numbers

__all__ = [
    "FUNCTIONS",
    "AggregateFunction",
    "ExtremeTexts",
    "check_function",
    "is_whole_text",
    "measure",
    "of_constant",
    "set_bounds",
    "successor",
    "summary",
]

type AggregateFunction = Literal["count", "min", "max", "sum", "mean", "var", "std"]
FUNCTIONS: Final = ("count", "min", "max", "sum", "mean", "var", "std")
_HALF: Final = 32
_LOW_HALF: Final = (1 << _HALF) - 1
_LAST: Final = "\U0010ffff"
_SURROGATES: Final = range(0xD800, 0xE000)


def measure(
    meaning: Meaning,
    numbers: Numbers,
    chosen: Mask | None = None,
    take: Callable[[str, str], None] | None = None,
) -> Rows:
    """Return the statistics of some cells as one row, without a key: ``(1,)``.

    Args:
        meaning: what the numbers are.
        numbers: all cells of a chunk that count, of any shape.
        chosen: which of them to take; None for all.
        take: is given the least and the greatest text, whole, since bounds may be cut.
    """
    row = np.zeros(1, row_type(meaning.kind))
    valid = meaning.valid(numbers)
    nulls = ~valid
    if chosen is not None:
        valid &= chosen
        nulls &= chosen
    # Beside the count: a condition holds for all cells only where none is missing.
    row["nulls"] = np.count_nonzero(nulls)
    values = numbers.reshape(-1) if valid.all() else numbers[valid]
    row["count"] = values.size
    if not values.size:
        return row
    if meaning.is_text:
        low, high = str(values.min()), str(values.max())
        set_bounds(row, 0, low, high)
        if take is not None:
            take(low, high)
        return row
    row["low"], row["high"] = values.min(), values.max()
    if meaning.kind == "f":
        row["low"] += 0.0  # of -0.0 makes 0.0
        row["high"] += 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        doubles = values.astype(np.float64)
        if meaning.kind == "f":
            row["sum"] = doubles.sum()
        else:
            _set_sum(row, values)
        # Two passes, since squares minus the squared mean lose all digits where values are large
        # and close.
        doubles -= doubles.sum() / values.size
        # Not np.dot: the threads of BLAS wait for each other, which is slow where cores are busy.
        row["deviations"] = np.square(doubles, out=doubles).sum()
    return row


def _set_sum(row: Rows, values: Numbers) -> None:
    """Set the exact sum of integers: halves of 32 bits cannot overflow their own sums."""
    # The total is sum * 2**32 + rest. With fewer than 2**31 cells neither half can overflow.
    wide = values.astype(np.int64 if values.dtype.kind == "i" else np.uint64)
    high, low = int((wide >> _HALF).sum()), int((wide & _LOW_HALF).sum())
    row["sum"], row["rest"] = high + (low >> _HALF), low & _LOW_HALF


def of_constant(meaning: Meaning, number: Any, cells: Numbers) -> Rows:
    """Return statistics of chunks all of whose cells have one number: ``(n,)``, without keys.

    Args:
        meaning: what the number is.
        number: it, as an array without axes.
        cells: how many cells each chunk has in the array, ``(n,)``.
    """
    rows = np.zeros(len(cells), row_type(meaning.kind))
    if not meaning.valid(number).all():
        rows["nulls"] = cells
        return rows
    rows["count"] = cells
    if meaning.is_text:
        text = str(number.item())
        set_bounds(rows, cells > 0, text, text)
        return rows
    rows["low"] = rows["high"] = np.where(cells > 0, number, number.dtype.type(0)) + 0
    if meaning.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            rows["sum"] = float(number) * cells
            rows["deviations"] = np.where(cells > 0, float(number) - float(number), 0.0)
        return rows
    # Integers of Python, as the product needs up to 95 bits.
    sums = [int(number) * it for it in cells.tolist()]
    rows["sum"] = [it >> _HALF for it in sums]
    rows["rest"] = [it & _LOW_HALF for it in sums]
    return rows


def check_function(function: str, meaning: Meaning) -> None:
    """Raise InvalidInputError unless the values of an array have an aggregate."""
    if function not in FUNCTIONS:
        raise InvalidInputError(
            f"There is no aggregate {function!r}. There are {', '.join(FUNCTIONS)}."
        )
    # Moments have no sum, and the variance of either would be in units squared.
    some = {"M": ("count", "min", "max", "mean"), "m": FUNCTIONS[:5]}.get(meaning.stored.kind)
    if meaning.is_text:
        some = FUNCTIONS[:3]
    if some is not None and function not in some:
        raise InvalidInputError(
            f"Values of {meaning.path!r} are {'text' if meaning.is_text else 'times'}, which "
            f"{'has' if meaning.is_text else 'have'} no {function}. There are {', '.join(some)}."
        )


def is_whole_text(function: str, meaning: Meaning) -> bool:
    """Return whether an aggregate is a text, which statistics may have the beginning of only."""
    return meaning.is_text and function != "count"


@dataclass(frozen=True, slots=True)
class _Whole:
    """The sums over many rows, in stored numbers."""

    count: int
    total: int | float
    deviations: float


def summary(
    function: AggregateFunction, meaning: Meaning, rows: Rows, text: str | None = None
) -> tuple[Any, int]:
    """Return the aggregate of all cells behind some rows, and how many have a value.

    Floats are added exactly and rounded once, so the order of the rows does not count.

    Args:
        function: which aggregate.
        meaning: what the values are.
        rows: statistics of all cells.
        text: of text, the least or the greatest, as rows may not have it.

    Raises:
        InvalidInputError: there is no such function, or not for times.
    """
    check_function(function, meaning)
    rows = rows[rows["count"] > 0]
    count = sum(rows["count"].tolist())
    match function:
        case "count":
            return count, count
        case "min" | "max" if not count:
            return None, 0
        case "min" | "max" if meaning.is_text:
            return text, count
        case "min" | "max":
            # With a negative scale the least value is the greatest stored number.
            lowest = (function == "min") != meaning.is_reversed
            number = rows["low"].min() if lowest else rows["high"].max()
            return _shown(meaning, number), count
        case _:
            return _of_all(function, meaning, _joined(meaning, rows, count)), count


def _joined(meaning: Meaning, rows: Rows, count: int) -> _Whole:
    total: int | float
    if meaning.kind == "f":
        total = _exact_sum(rows["sum"].tolist())
    else:
        total = (sum(rows["sum"].tolist()) << _HALF) + sum(rows["rest"].tolist())
    if not count:
        return _Whole(0, total, 0.0)
    # Deviations from the mean of all: those within the chunks, and those of their means.
    with np.errstate(over="ignore", invalid="ignore"):
        counts = rows["count"].astype(np.float64)
        sums = rows["sum"].astype(np.float64)
        if meaning.kind != "f":
            sums = sums * float(1 << _HALF) + rows["rest"]
        # Chan's formula for joining variances.
        between = counts * (sums / counts - total / count) ** 2
    return _Whole(count, total, _exact_sum([*rows["deviations"].tolist(), *between.tolist()]))


def _exact_sum(values: list[float]) -> float:
    """Return the sum of floats, rounded once; as IEEE 754 has it if it is not finite."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond all floats
        return float(np.sum(np.array(values)))


def _of_all(function: AggregateFunction, meaning: Meaning, whole: _Whole) -> Any:
    scale = 1.0 if meaning.scale is None else meaning.scale
    offset = 0.0 if meaning.offset is None else meaning.offset
    match function:
        case "sum":
            if meaning.is_time:
                return _duration(meaning, int(whole.total))
            if not meaning.is_packed:
                return whole.total
            return _product(scale, whole.total) + offset * whole.count
        case _ if not whole.count:
            return None
        case "mean" if meaning.is_time:
            # Exact: 2**53 nanoseconds are 104 days, so a double would round a moment.
            mean_time = round(Fraction(whole.total) / whole.count)
            return np.int64(mean_time).view(meaning.stored.newbyteorder("="))
        case "mean":
            mean = whole.total / whole.count
            return scale * mean + offset if meaning.is_packed else mean
        case _:
            variance = scale * scale * whole.deviations / whole.count
            return variance if function == "var" else math.sqrt(variance)


def _product(scale: float, total: float) -> float:
    try:
        return scale * total
    except OverflowError:  # an integer beyond all floats
        return math.inf if (scale > 0) == (total > 0) else -math.inf


def _duration(meaning: Meaning, total: int) -> Any:
    if abs(total) > np.iinfo(np.int64).max:
        raise InvalidInputError(
            f"The durations of {meaning.path!r} add up to more than 64 bits can hold. Ask for "
            "their mean."
        )
    return np.int64(total).view(meaning.stored.newbyteorder("="))


def _shown(meaning: Meaning, number: Any) -> Any:
    """Return a stored number as a value of Python, or as a time of NumPy."""
    if meaning.is_time:
        return np.int64(number).view(meaning.stored.newbyteorder("="))
    value = meaning.unpacked(np.asarray(number))[()].item()
    return bool(value) if meaning.is_truth else value


def set_bounds(rows: Rows, which: Any, low: str, high: str) -> None:
    """Set the bounds of some rows."""
    (rows["low"][which], low_cut), (rows["high"][which], high_cut) = map(text_bound, (low, high))
    rows["cut"][which] = LOW_CUT * low_cut | HIGH_CUT * high_cut


def successor(begin: str) -> str | None:
    """Return the least text that is greater than all that begin with this; None without any."""
    kept = begin.rstrip(_LAST)
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    # Halves of pairs are no characters, and UTF-8 has none of them.
    if following in _SURROGATES:
        following = _SURROGATES.stop
    return kept[:-1] + chr(following)


class ExtremeTexts:
    """The least or the greatest text of each group of chunks. Memory: one text for each."""

    def __init__(
        self, groups: Sequence[npt.NDArray[np.integer[Any]]], chunks: int, *, least: bool
    ) -> None:
        """Begin without cells.

        Args:
            groups: chunks that belong together, by their places in a plan; each in one group.
            chunks: how many the plan has.
            least: whether to find the least, not the greatest.
        """
        self.found: npt.NDArray[Any] = np.full(len(groups), None, object)
        self._groups = groups
        self._group_of = np.zeros(chunks, np.int64)
        for number, group in enumerate(groups):
            self._group_of[group] = number
        self._least = least
        self._lock = threading.Lock()

    def settled(self, rows: Rows, known: Mask) -> Mask:
        """Return which chunks need not be read, and take the bounds of them that are whole.

        Args:
            rows: statistics of chunks.
            known: which of them are about all cells that count.
        """
        found = known.copy()
        for number, group in enumerate(self._groups):
            found[group] &= ~self._needed(number, rows[group], known[group])
        return found

    def _needed(self, number: int, rows: Rows, known: Mask) -> Mask:
        """Return which known chunks of a group must be read, and take whole bounds of others."""
        bounds = rows["low" if self._least else "high"]
        some = known & (rows["count"] > 0)
        is_cut = (rows["cut"] & (LOW_CUT if self._least else HIGH_CUT)) > 0
        exact = bounds[some & ~is_cut].tolist()
        begins = bounds[some & is_cut].tolist()
        if exact:
            self._take(number, text_of(min(exact) if self._least else max(exact)))
        if not begins:
            return np.zeros(len(rows), bool)
        if self._least:
            # The text of the least beginning is less than this; others are greater than theirs.
            # Begins `ab...` and `ac...`, both cut: the least text begins with `ab`, so the second
            # chunk is not read. An exact `abb` excludes those that begin behind it as well.
            could_be = bounds < min([*exact, _raised(min(begins))])
        else:
            could_be = greatest_keys(rows) > max([*exact, *begins])
        return np.asarray(some & is_cut & could_be, bool)

    def add(self, chunk: int, low: str, high: str) -> None:
        """Take the least and the greatest text of a chunk; from any thread."""
        self._take(int(self._group_of[chunk]), low if self._least else high)

    def _take(self, number: int, text: str) -> None:
        # Chunks are measured on several threads.
        with self._lock:
            best = self.found[number]
            if best is None or (text < best if self._least else text > best):
                self.found[number] = text


def _raised(begin: bytes) -> bytes:
    """Return a key above those of all texts with a beginning."""
    return begin[: begin[-1]].ljust(len(begin), b"\xff")

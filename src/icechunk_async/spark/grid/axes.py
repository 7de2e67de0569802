"""Find the indices of coordinates along the dimensions of arrays; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    AmbiguousCoordinatesError,
    InvalidInputError,
    MissingCoordinatesError,
    OutsideGridError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    type Column = npt.NDArray[Any]

__all__ = ["Appended", "Axis", "PlaceFinder", "Steps", "check_unambiguous"]

_KINDS: Final = {
    **dict.fromkeys("biuf", "numbers"),
    "M": "times",
    "m": "durations",
    **dict.fromkeys("OUT", "text"),
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Equal steps by which a coordinate continues after its last value.

    Attributes:
        last: the last existing value.
        step: the difference from one value to the next; not zero.
        most: how many values may follow.
    """

    last: Any
    step: Any
    most: int

    @classmethod
    def after(cls, values: Column, most: int) -> Steps | None:
        """Return the steps of a coordinate; None if they differ or there is no step."""
        if len(values) < 2 or values.dtype.kind not in "iufM":
            return None
        signed = values.astype(np.int64) if values.dtype.kind in "iu" else values
        steps = np.diff(signed)
        zero = np.zeros((), steps.dtype)
        equal = (
            np.allclose(steps, steps[0], rtol=1e-5, atol=0)
            if values.dtype.kind == "f"
            else bool((steps == steps[0]).all())
        )
        return cls(signed[-1], steps[0], most) if equal and steps[0] != zero else None

    def number(self, values: Column) -> npt.NDArray[np.int64]:
        """Return the number of steps from the last value to each.

        -1 if it is not on a step, or on one that is too far.
        """
        number, good = self._count(values)
        good &= number <= self.most
        return np.where(good, number, -1).astype(np.int64)

    def beyond(self, values: Column) -> npt.NDArray[np.bool_]:
        """Return which values are on a step, and too far."""
        number, good = self._count(values)
        return np.asarray(good & (number > self.most), bool)

    def _count(self, values: Column) -> tuple[Column, npt.NDArray[np.bool_]]:
        if values.dtype.kind == "f":
            steps = (values.astype(np.float64) - self.last) / self.step
            number = np.rint(steps)
            good = np.abs(steps - number) <= 1e-3
        else:
            since = (values.astype(np.int64) if values.dtype.kind != "M" else values) - self.last
            number = since // self.step
            good = since == number * self.step
        return number, np.asarray(good & (number >= 1), bool)

    def values(self, count: int) -> Column:
        """Return the next `count` values."""
        return np.asarray(self.last + self.step * np.arange(1, count + 1))


@dataclass(frozen=True, slots=True)
class Axis:
    """The indices along one dimension.

    Attributes:
        name: name of the dimension, and of its column.
        values: the coordinate at every index, in any order; with `steps`, only existing ones.
        first: the first index to append at; rows before are late.
        steps: how the coordinate continues after `values`, for an append.
    """

    name: str
    values: Column
    first: int = 0
    steps: Steps | None = None

    def at(self, place: int) -> Any:
        """Return the coordinate at an index, also at one that follows by steps."""
        if place < len(self.values) or self.steps is None:
            return self.values[place]
        return self.steps.values(place + 1 - len(self.values))[-1]

    def finder(self) -> PlaceFinder:
        """Return a finder of indices; make one for many rows, since it sorts."""
        return PlaceFinder(self)


class PlaceFinder:
    """Finds the indices of coordinates along an axis."""

    def __init__(self, axis: Axis) -> None:
        """Sort the coordinates of the axis."""
        self._axis = axis
        values = axis.values
        self._values = values.astype(object) if values.dtype.kind in "UT" else values
        self._order = np.argsort(self._values, kind="stable")
        self._sorted = self._values[self._order]

    def places(
        self, given: Column, named: Callable[[int], str] = "number {}".format
    ) -> npt.NDArray[np.int64]:
        """Return the index of each coordinate.

        Args:
            given: the coordinates.
            named: tells users which row has a number.

        Raises:
            MissingCoordinatesError: a coordinate is NaN or NaT.
            OutsideGridError: a coordinate does not exist in this dimension.
            InvalidInputError: they are of another kind than those of the dimension.
        """
        axis = self._axis
        self._check_kind(given)
        empty = np.isnan(given) if given.dtype.kind in "fmM" else np.zeros(len(given), bool)
        if empty.any():
            raise MissingCoordinatesError(
                f"The row {named(_first(empty))} has no value in column {axis.name!r}, which says "
                "where it belongs. Nothing was published. Drop such rows.",
                dimension=axis.name,
            )
        with np.errstate(invalid="ignore"):
            wanted = given.astype(self._values.dtype)
        known = _may_match(given, wanted)
        places = np.full(len(given), -1, np.int64)
        if len(self._sorted):
            at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
            there = known & (self._sorted[at] == wanted)
            places = np.where(there, self._order[at], -1).astype(np.int64)
        if axis.steps is not None:
            number = axis.steps.number(wanted)
            after = known & (places < 0) & (number >= 1)
            places = np.where(after, len(axis.values) - 1 + number, places)
            self._check_growth(known & (places < 0) & axis.steps.beyond(wanted), given, named)
        self._check(places, given, named)
        return places

    def _check_kind(self, given: Column) -> None:
        wanted, found = _KINDS.get(self._values.dtype.kind), _KINDS.get(given.dtype.kind)
        if wanted != found or found is None:
            raise InvalidInputError(
                f"The column {self._axis.name!r} has {found or given.dtype}, and the coordinates "
                f"of that dimension are {wanted or self._values.dtype}. Convert the column."
            )

    def _check_growth(
        self, far: npt.NDArray[np.bool_], given: Column, named: Callable[[int], str]
    ) -> None:
        axis = self._axis
        if far.any() and axis.steps is not None:
            row = _first(far)
            value = given[row]
            raise OutsideGridError(
                f"The row {named(row)} has {value!s} ({given.dtype}) in column {axis.name!r}, "
                f"which is more than {axis.steps.most:,} steps after the last coordinate, "
                f"{axis.steps.last!s}. Nothing was published. If it is no mistake, allow more with "
                "option('max-append', N).",
                dimension=axis.name,
                value=str(value),
            )

    def _check(
        self, places: npt.NDArray[np.int64], given: Column, named: Callable[[int], str]
    ) -> None:
        axis, bad = self._axis, places < 0
        if bad.any():
            row = _first(bad)
            value = given[row]
            raise OutsideGridError(
                f"The row {named(row)} has {value!s} ({given.dtype}) in column {axis.name!r}, "
                f"which is not among the {len(axis.values)} coordinates of that dimension"
                + (" and does not follow them in equal steps." if axis.steps else ".")
                + " Nothing was published. Filter such rows, or make the arrays larger first.",
                dimension=axis.name,
                value=str(value),
            )


def _may_match(given: Column, wanted: Column) -> npt.NDArray[np.bool_]:
    """Return which coordinates are still themselves in the type of a dimension.

    Floats are rounded to the precision in which the dimension stores them, so that 0.1 is found in
    float32. Integers are not rounded: another one is another row.
    """
    if wanted.dtype.kind != "f":
        return np.asarray(wanted == given, bool)
    if given.dtype.kind not in "iu":
        return np.ones(len(given), bool)
    bits = given.dtype.itemsize * 8 - (given.dtype.kind == "i")
    with np.errstate(invalid="ignore"):
        same = wanted.astype(given.dtype) == given
    return np.asarray(same & (wanted < 2.0**bits), bool)  # beyond, the cast is undefined


def _first(which: npt.NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(which)[0])


class Appended:
    """The coordinates of appended rows as the rows gave them, by their place along the axis."""

    def __init__(self, axis: Axis, length: int) -> None:
        """Begin without rows; `length` is that of the axis before."""
        self._axis = axis
        self._length = length
        self._places: list[npt.NDArray[np.int64]] = []
        self._values: list[Column] = []

    def add(self, places: npt.NDArray[np.int64], given: Column) -> None:
        """Take the coordinates of rows at some places.

        Raises:
            AmbiguousCoordinatesError: two of the rows have one place and different coordinates.
        """
        new = places >= self._length
        found, values = self._joined(places[new], given[new].astype(self._axis.values.dtype))
        self._places.append(found)
        self._values.append(values)

    def columns(self) -> tuple[npt.NDArray[np.int64], Column]:
        """Return the places, ascending, and the coordinate at each.

        Raises:
            AmbiguousCoordinatesError: as `add`.
        """
        return self._joined(
            np.concatenate([np.empty(0, np.int64), *self._places]),
            np.concatenate([np.empty(0, self._axis.values.dtype), *self._values]),
        )

    def _joined(
        self, places: npt.NDArray[np.int64], values: Column
    ) -> tuple[npt.NDArray[np.int64], Column]:
        found, first, which = np.unique(places, return_index=True, return_inverse=True)
        differs = values != values[first][which]
        if differs.any():
            at = int(np.flatnonzero(differs)[0])
            one, other = values[first][which][at], values[at]
            raise AmbiguousCoordinatesError(
                f"Rows have {one!s} and {other!s} in column {self._axis.name!r}, which both are "
                "the same step after the last coordinate. Round the column to the values that are "
                "meant.",
                dimension=self._axis.name,
                value=str(other),
            )
        return found, values[first]


def check_unambiguous(name: str, values: Column) -> None:
    """Check that a dimension has no coordinate twice.

    Raises:
        AmbiguousCoordinatesError: a coordinate occurs more than once.
    """
    found, times = np.unique(
        values.astype(object) if values.dtype.kind in "UT" else values, return_counts=True
    )
    if (times > 1).any():
        value = found[times > 1][0]
        raise AmbiguousCoordinatesError(
            f"The dimension {name!r} has the coordinate {value!s} {times.max()} times, so the cell "
            "of a row is ambiguous. Rows cannot be written to such arrays; write regions with "
            "write_region or xarray.",
            dimension=name,
            value=str(value),
        )

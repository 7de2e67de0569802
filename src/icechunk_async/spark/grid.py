"""Geometry of arrays that rows are written to; pure.

An `Axis` finds the indices of coordinates along a dimension. A `ChunkGrid` numbers the chunks of an
array and knows the region of each, and a `ChunkAssembly` collects the rows of each. Reading and
streams divide work by `icechunk_async.arrow.boxes`.
"""

from __future__ import annotations

from math import prod
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import zarr

    from icechunk_async.errors import DuplicateRowsError

    type Column = npt.NDArray[Any]

__all__ = [
    "Appended",
    "Axis",
    "Block",
    "ChunkAssembly",
    "ChunkGrid",
    "PlaceFinder",
    "Region",
    "Steps",
    "check_disjoint",
    "check_unambiguous",
    "share",
]


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
        # Descending coordinates without a sign would have steps of 2**64 less one.
        signed = values.astype(np.int64) if values.dtype.kind in "iu" else values
        steps = np.diff(signed)
        zero = np.zeros((), steps.dtype)
        equal = (
            # Steps such as 0.1 are no doubles, and differ in their last digits.
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
            # Covers the rounding of float32 up to some 16,000 steps from zero. Anything further off
            # a step is another coordinate.
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
            # `searchsorted` returns the place where a value would go, past the end for the largest.
            # Only a comparison says whether the value is there.
            at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
            there = known & (self._sorted[at] == wanted)
            places = np.where(there, self._order[at], -1).astype(np.int64)
        if axis.steps is not None:
            number = axis.steps.number(wanted)
            after = known & (places < 0) & (number >= 1)
            # Existing coordinates come first. With the last one at index 9, the first step is at
            # index 10.
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
    # The largest int64 becomes 2.0**63, which is no int64: equal after a round trip would say
    # nothing.
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
        # Late rows have a coordinate already, which the array keeps.
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
        # Of rows with one place the first gives the coordinate, and all others must have the same:
        # which task is first must not decide what is written.
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


type Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """The chunk grid of an array, or its grid of shards if it has them.

    Attributes:
        edges: along each axis the indices at which chunks begin, and the length of the array.
    """

    edges: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, array: zarr.Array[Any]) -> ChunkGrid:
        """Return the grid of an array."""
        try:
            sizes = array.shards or array.chunks
        except NotImplementedError:  # Zarr has no single chunk shape for an irregular grid
            return cls(
                tuple(
                    # The sizes of an irregular grid may sum to more than the length. `[4, 4, 4]` of
                    # 10: edges 0, 4, 8, 10.
                    np.minimum(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), length)
                    for sizes, length in zip(array.write_chunk_sizes, array.shape, strict=True)
                )
            )
        return cls(tuple(map(_equal, sizes, array.shape)))

    def grown(self, axis: int, size: int, length: int) -> ChunkGrid:
        """Return the grid with another length along an axis of regular chunks."""
        return ChunkGrid((*self.edges[:axis], _equal(size, length), *self.edges[axis + 1 :]))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return prod(self.counts)

    def region(self, chunk: int) -> Region:
        """Return the region of a chunk, given its number in C order, clipped to the array."""
        return tuple(
            slice(int(edges[at]), int(edges[at + 1]))
            for at, edges in zip(np.unravel_index(chunk, self.counts), self.edges, strict=True)
        )

    def index(self, chunk: int, cell: int) -> tuple[int, ...]:
        """Return the index of a cell of a chunk, both given by their numbers in C order."""
        region = self.region(chunk)
        at = np.unravel_index(cell, tuple(it.stop - it.start for it in region))
        return tuple(int(i) + it.start for i, it in zip(at, region, strict=True))

    def chunks_in(self, region: Region) -> npt.NDArray[np.int64]:
        """Return the numbers of the chunks of a region.

        Raises:
            InvalidInputError: the region is outside of the array, or cuts a chunk.
        """
        if len(region) != len(self.edges):
            raise InvalidInputError(
                f"The region {region} has {len(region)} axes, and the array has {len(self.edges)}."
            )
        axes = [self._along(axis, place) for axis, place in enumerate(region)]
        # An array without axes has one chunk, and `meshgrid` of nothing has no place.
        if not axes:
            return np.zeros(1, np.int64)
        places = np.meshgrid(*axes, indexing="ij")
        return np.ravel_multi_index([it.ravel() for it in places], self.counts).astype(np.int64)

    def _along(self, axis: int, place: slice) -> npt.NDArray[np.int64]:
        edges = self.edges[axis]
        start = 0 if place.start is None else place.start
        stop = int(edges[-1]) if place.stop is None else place.stop
        if place.step not in (None, 1) or not 0 <= start <= stop <= edges[-1]:
            raise InvalidInputError(
                f"Along axis {axis} the region {place} is not within 0 and {int(edges[-1])}, or "
                "has a step other than 1."
            )
        # Both must be edges: with the edges 0, 4, 8, 10 the region from 4 to 10 is chunks 1 and 2.
        first, last = np.searchsorted(edges, [start, stop])
        if edges[first] != start or edges[last] != stop:
            raise InvalidInputError(
                f"Along axis {axis} the region from {start} to {stop} begins or ends inside of a "
                "chunk, so another task could overwrite the rest of that chunk. Begin and end it "
                f"at multiples of the chunks: near are {int(edges[max(first - 1, 0)])} and "
                f"{int(edges[last])}."
            )
        return np.arange(first, last, dtype=np.int64)


def _equal(size: int, length: int) -> npt.NDArray[np.int64]:
    """Return the edges of regular chunks."""
    # Chunks of 4 in a length of 10 have the edges 0, 4, 8, 10; a length of 0 has the edge 0, and no
    # chunk.
    return np.minimum(np.arange(0, length + size, size, dtype=np.int64), length)


def share(number: int, parts: int, part: int) -> range:
    """Return one of `parts` parts of `range(number)`; their sizes differ by at most one."""
    return range(number * part // parts, number * (part + 1) // parts)


def check_disjoint(grid: ChunkGrid, regions: Sequence[Region]) -> int:
    """Check that regions consist of whole chunks, and that no two share one; return their number.

    Raises:
        InvalidInputError: a region cuts a chunk, or two regions share one.
    """
    numbers = [grid.chunks_in(region) for region in regions]
    if not numbers:
        return 0
    chunks = np.concatenate(numbers)
    # Sorted, not marked in the grid, which may have many more chunks than are written. The sort is
    # stable: chunks that several regions have stand in the order of the regions.
    order = np.argsort(chunks, kind="stable")
    twice = np.flatnonzero(chunks[order[1:]] == chunks[order[:-1]])
    if len(twice):
        ends = np.cumsum([len(it) for it in numbers])
        owners = np.searchsorted(ends, [order[twice], order[twice + 1]], side="right")
        other, number = owners[:, np.argmin(owners[1])].tolist()
        raise InvalidInputError(
            f"The regions {other} and {number} have chunks in common: {regions[other]} and "
            f"{regions[number]}. Only one task may write a chunk."
        )
    return len(chunks)


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one chunk.

    Attributes:
        chunk: number of the chunk, in C order.
        cells: index of each row's cell within the chunk, in C order.
        values: columns of the rows, by name.
        whole: whether every cell of the chunk has a row.
    """

    chunk: int
    cells: npt.NDArray[np.int64]
    values: Mapping[str, Column]
    whole: bool


class ChunkAssembly:
    """Collects rows by chunk, and yields each chunk as soon as all its cells have rows."""

    def __init__(
        self, grid: ChunkGrid, duplicate: Callable[[tuple[int, ...]], DuplicateRowsError]
    ) -> None:
        """Begin without rows; `duplicate` returns the error for two rows of a cell, by index."""
        self._grid = grid
        self._duplicate = duplicate
        self._waiting: dict[int, list[tuple[npt.NDArray[np.int64], dict[str, Column]]]] = {}
        self._rows: dict[int, int] = {}
        self.whole: set[int] = set()
        """Chunks all of whose cells had rows."""

    def add(
        self, places: list[npt.NDArray[np.int64]], columns: Mapping[str, Column]
    ) -> Iterator[Block]:
        """Add rows, and yield the chunks that they complete.

        Args:
            places: for each axis the index of every row.
            columns: values of the rows.

        Raises:
            DuplicateRowsError: two rows have the same cell.
        """
        if not len(places[0]):
            return
        # By `right` an index that is an edge belongs to the chunk that begins there: with the edges
        # 0, 4, 8 index 4 is of chunk 1.
        along = [
            np.searchsorted(edges, at, side="right") - 1
            for edges, at in zip(self._grid.edges, places, strict=True)
        ]
        chunks = np.ravel_multi_index(along, self._grid.counts).astype(np.int64)
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order])) + 1
        # Now the rows of one chunk lie together, and each chunk is handled once for the whole
        # batch.
        for rows in np.split(order, bounds):
            chunk = int(chunks[rows[0]])
            cells = self._cells(chunk, [at[rows] for at in places])
            # Each of its cells has had a row, so that this one is a cell's second. The chunk may be
            # written.
            if chunk in self.whole:
                raise self._duplicate(self._grid.index(chunk, int(cells[0])))
            self._waiting.setdefault(chunk, []).append(
                (cells, {name: values[rows] for name, values in columns.items()})
            )
            self._rows[chunk] = self._rows.get(chunk, 0) + len(rows)
            # Counted, not looked at: a cell with two rows makes up for one without, which `_take`
            # finds before anything is written.
            if self._rows[chunk] >= self.size(chunk):
                self.whole.add(chunk)
                yield self._take(chunk)

    def rest(self) -> Iterator[Block]:
        """Yield the chunks that have rows for some of their cells, in ascending order.

        Raises:
            DuplicateRowsError: two rows have the same cell.
        """
        for chunk in sorted(self._waiting):
            yield self._take(chunk)

    def size(self, chunk: int) -> int:
        """Return the number of cells of a chunk."""
        return prod(self._shape(chunk))

    def _shape(self, chunk: int) -> tuple[int, ...]:
        return tuple(at.stop - at.start for at in self._grid.region(chunk))

    def _cells(self, chunk: int, places: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        region = self._grid.region(chunk)
        inside = [at - here.start for at, here in zip(places, region, strict=True)]
        return np.asarray(np.ravel_multi_index(inside, self._shape(chunk)), np.int64)

    def _take(self, chunk: int) -> Block:
        parts = self._waiting.pop(chunk)
        del self._rows[chunk]
        cells = np.concatenate([it for it, _ in parts])
        times = np.bincount(cells, minlength=self.size(chunk))
        if times.max() > 1:
            twice = int(np.flatnonzero(times > 1)[0])
            raise self._duplicate(self._grid.index(chunk, twice))
        values = {name: np.concatenate([it[name] for _, it in parts]) for name in parts[0][1]}
        return Block(chunk, cells, values, whole=len(cells) == self.size(chunk))

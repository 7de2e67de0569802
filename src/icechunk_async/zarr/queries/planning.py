"""Which chunks of an array a query needs: the one planner of aggregates and of conditions.

Each condition is decided for each chunk, as far as possible without reading it: from the statistics
of the array that it is about, or from all values of a coordinate, an array with one axis, which is
read once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.format.paths import check_path
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.conditions import condition_on
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import (
    columns_of,
    combined,
    joined,
    leaves,
    mapped,
    split_by_column,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.arrays import Box, Coords, KnownChunks
    from icechunk_async.zarr.queries.conditions import Condition
    from icechunk_async.zarr.queries.meaning import Mask, Numbers
    from icechunk_async.zarr.queries.predicates import Tree, Where
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["Plan", "check_conditions", "planned"]

_MOST_CHUNKS: Final = 5_000_000
"""The most chunks of a region: columns of more would take gigabytes."""
_MOST_VALUES: Final = 1 << 24
"""The most values of a coordinate that is read whole; of more than 8 bytes, fewer."""
_ARRAYS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Variable:
    """An array that conditions are about."""

    array: QueriedArray
    axes: tuple[int, ...]
    """The axis of the target that each axis is along."""
    known: KnownChunks
    is_line: bool = False
    """Whether this is a coordinate, which is read whole along the region."""
    line_bytes: int = 0
    """Stored size of the part of a coordinate that was read."""

    def within(self, box: Box) -> Box:
        """Return the part of this array that belongs to a part of the target."""
        return tuple(box[axis] for axis in self.axes)

    def aligned(self, mask: Mask, rank: int) -> Mask:
        """Return a mask of this array with the axes of the target."""
        order = sorted(range(len(self.axes)), key=lambda it: self.axes[it])
        sizes = dict(zip(self.axes, mask.shape, strict=True))
        # A mask over (lon, time) of a target (time, lat, lon): turned to (time, lon), and with the
        # shape (time, 1, lon) NumPy broadcasts it.
        shape = tuple(sizes.get(axis, 1) for axis in range(rank))
        return mask.transpose(order).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Test:
    """Conditions on one array."""

    variable: _Variable
    conditions: Tree[Condition]
    line: Mask | None = None
    """Which values of a coordinate, from the beginning of the region, fulfil them."""
    start: int = 0
    """Where the region begins along a coordinate."""

    def fulfilled(self, numbers: Numbers) -> Mask:
        """Return which cells fulfil them."""
        return combined(self.conditions, lambda it: it.fulfilled(numbers))

    def decided(self, rows: Rows) -> tuple[Mask, Mask]:
        """Return which chunks have no cell that fulfils them, and of which all do; ``(n,)``."""
        found = {id(it): it.decided(rows) for it in leaves(self.conditions)}
        possible = combined(self.conditions, lambda it: ~found[id(it)][0])
        return ~possible, combined(self.conditions, lambda it: found[id(it)][1])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The chunks of an array in a region, in ascending order, and what is known of each."""

    target: QueriedArray
    known: KnownChunks
    region: Box
    coords: Coords
    """Where they are in the grid, ``(n, rank)``."""
    excluded: Mask
    """Which chunks have no cell that fulfils the conditions, ``(n,)``."""
    included: Mask
    """Which chunks have only such cells, ``(n,)``."""
    variables: tuple[_Variable, ...]
    tests: Tree[_Test] | None
    """The conditions; None for none."""

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self.coords)

    @property
    def arrays_read(self) -> list[QueriedArray]:
        """The arrays of which a part is in memory for each chunk that is read."""
        return [self.target, *(it.array for it in self._others)]

    @property
    def _others(self) -> list[_Variable]:
        return [it for it in self.variables if not it.is_line and it.array.path != self.target.path]

    def known_whole(self) -> tuple[Mask, Rows]:
        """Return for which chunks statistics stand for all cells that count, and statistics."""
        statistics, known = self.known.statistics(self.coords)
        # Statistics are about all cells of a chunk. If some are outside of the region, or do not
        # fulfil the conditions, the chunk is read.
        return known & self.included & self._are_whole(), statistics

    def _are_whole(self) -> Mask:
        """Return which chunks lie wholly in the region, as far as they are in the array."""
        whole = np.ones(len(self), bool)
        for axis, part in enumerate(self.region):
            size, length = self.target.chunks[axis], self.target.shape[axis]
            first = self.coords[:, axis] * size
            whole &= (first >= part.start) & (np.minimum(first + size, length) <= part.stop)
        return whole

    def box(self, at: int) -> Box:
        """Return the cells of a chunk that are in the region."""
        parts = zip(self.coords[at].tolist(), self.target.chunks, self.region, strict=True)
        return tuple(
            slice(max(place * size, part.start), min((place + 1) * size, part.stop))
            for place, size, part in parts
        )

    @property
    def by_lines(self) -> bool:
        """Return whether coordinates decide all conditions."""
        return all(it.is_line for it in self.variables)

    async def mask(self, at: int, numbers: Numbers | None = None) -> Mask | None:
        """Return which cells of `box` fulfil the conditions; None if all do.

        Args:
            at: the chunk.
            numbers: the target's cells there, if they were read.

        Cost: reads these cells of the arrays in conditions, except of coordinates.
        """
        if self.included[at] or self.tests is None:
            return None
        box = self.box(at)
        # Each array once, though several conditions may be about it.
        read = {} if numbers is None else {self.target.path: numbers}
        for it in self.variables:
            if not it.is_line and it.array.path not in read:
                read[it.array.path] = await it.array.read(it.within(box))

        def own(test: _Test) -> Mask:
            variable = test.variable
            if test.line is None:
                return variable.aligned(test.fulfilled(read[variable.array.path]), len(box))
            (part,) = variable.within(box)
            line = test.line[part.start - test.start : part.stop - test.start]
            return variable.aligned(line, len(box))

        whole = np.ones(tuple(part.stop - part.start for part in box), bool)
        return whole & combined(self.tests, own)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the stored bytes of the chunks, ``(n,)``."""
        return self.known.lengths(self.coords)

    def bytes_of_conditions(self, reads: npt.NDArray[np.int64]) -> int:
        """Return the stored bytes of other arrays that are read with some chunks."""
        # Coordinates were read once, for all chunks.
        total = sum(it.line_bytes for it in self.variables)
        masked = reads[~self.included[reads]]
        for it in self._others:
            touched = _touched(it, self, masked)
            total += int(it.known.lengths(touched).sum())
        return total


def _touched(variable: _Variable, plan: Plan, reads: npt.NDArray[np.int64]) -> Coords:
    """Return the chunks of another array that cells of some chunks lie in, once for each read."""
    found: list[Coords] = []
    for at in reads.tolist():
        box = variable.within(plan.box(at))
        spans: Sequence[Coords] = [
            np.arange(part.start // size, -(-part.stop // size), dtype=np.int64)
            for part, size in zip(box, variable.array.chunks, strict=True)
        ]
        found.append(np.stack(np.meshgrid(*spans, indexing="ij"), -1).reshape(-1, len(spans)))
    if not found:
        return np.empty((0, len(variable.axes)), np.int64)
    return np.concatenate(found)


async def planned(
    store: IcechunkStore, path: str, where: str | None, region: Sequence[slice] | None
) -> Plan:
    """Plan a query of an array.

    Args:
        store: where the array is.
        path: the array.
        where: conditions on it and on arrays of the same group along its dimensions; None for none.
        region: a slice for each of the first axes; None for the whole array.

    Raises:
        NodeNotFoundError: there is no such array.
        InvalidInputError: the region, or a condition, cannot be understood.

    Cost: for each array named, its manifests and statistics; for coordinates, their chunks.
    """
    path = check_path(path)
    target = await QueriedArray.open(store, path)
    box = checked_region(target, region)
    coords = _coords(target, box)
    known = await target.known_chunks(store)
    variables, tests = await _tests(store, target, known, box, where)
    excluded = np.zeros(len(coords), bool)
    included = np.ones(len(coords), bool)
    if tests is not None:
        decided = {id(it): _decided(it, target, coords, box) for it in leaves(tests)}
        # Trees have no `not`, so what may hold of each leaf gives what may hold of the whole, and
        # what must hold what must.
        excluded = ~combined(tests, lambda it: ~decided[id(it)][0])
        included = combined(tests, lambda it: decided[id(it)][1])
    return Plan(target, known, box, coords, excluded, included, tuple(variables), tests)


def checked_region(target: QueriedArray, region: Sequence[slice] | None) -> Box:
    """Return a region with a start and a stop along each axis.

    Raises:
        InvalidInputError: it has more axes than the array, or steps.
    """
    given: list[Any] = list(region or ())
    if len(given) > len(target.shape) or not all(isinstance(it, slice) for it in given):
        raise InvalidInputError(
            f"The region {given} does not fit {target.path!r}, which has {len(target.shape)} axes. "
            "Give a slice for each."
        )
    if any(it.step not in {None, 1} for it in given):
        raise InvalidInputError(f"The region {given} has steps. Give slices without a step.")
    given += [slice(None)] * (len(target.shape) - len(given))
    spans = (it.indices(length) for it, length in zip(given, target.shape, strict=True))
    return tuple(slice(start, max(start, stop)) for start, stop, _ in spans)


def _coords(target: QueriedArray, box: Box) -> Coords:
    """Return the chunks that a region touches."""
    if any(it.start == it.stop for it in box):
        return np.empty((0, len(box)), np.int64)
    ranges = [
        range(part.start // size, -(-part.stop // size))
        for part, size in zip(box, target.chunks, strict=True)
    ]
    # Python's numbers, which do not overflow as those of NumPy would for a grid that is claimed.
    count = math.prod(map(len, ranges))
    if count > _MOST_CHUNKS:
        raise InvalidInputError(
            f"The region has {count} chunks of {target.path!r}, and at most {_MOST_CHUNKS} can be "
            "queried at a time. Name a smaller region."
        )
    spans = [np.arange(it.start, it.stop, dtype=np.int64) for it in ranges]
    if not spans:
        return np.empty((1, 0), np.int64)
    return np.stack(np.meshgrid(*spans, indexing="ij"), axis=-1).reshape(count, len(spans))


async def _tests(
    store: IcechunkStore, target: QueriedArray, known: KnownChunks, box: Box, where: str | None
) -> tuple[list[_Variable], Tree[_Test] | None]:
    """Find the chunks of the arrays that conditions are about, and read coordinates."""
    found: dict[str, _Variable] = {}
    lines: dict[str, Numbers] = {}

    async def prepare(it: tuple[str, _Opened]) -> None:
        name, (array, axes) = it
        own = known if array is target else await array.known_chunks(store)
        found[name] = _Variable(array, axes, own)
        # A coordinate is read once and decides whole rows of chunks. One that is too long for
        # memory is read with each chunk, as other arrays are.
        most = _MOST_VALUES * 8 // max(8, array.meaning.cell_bytes)
        # Also one with chunks of another size than the target's.
        if len(axes) == 1 and array is not target and array.shape[0] <= most:
            found[name], lines[name] = await _read_line(found[name], box)

    opened, asked = await _opened(store, target, where)
    await bounded_map(prepare, opened.items(), limit=_ARRAYS_AT_ONCE)

    def test(it: _Asked) -> _Test:
        plain = _Test(found[it.column], it.conditions)
        if it.column not in lines:
            return plain
        (part,) = plain.variable.within(box)
        return replace(plain, line=plain.fulfilled(lines[it.column]), start=part.start)

    return [found[it] for it in opened], None if asked is None else mapped(asked, test)


type _Opened = tuple[QueriedArray, tuple[int, ...]]
"""An array, and the axes of the target that its own are along."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Conditions on the array of a name."""

    column: str
    conditions: Tree[Condition]


async def check_conditions(store: IcechunkStore, target: QueriedArray, where: str | None) -> None:
    """Raise InvalidInputError unless conditions can be asked of an array. Nothing is read."""
    await _opened(store, target, where)


async def _opened(
    store: IcechunkStore, target: QueriedArray, where: str | None
) -> tuple[dict[str, _Opened], Tree[_Asked] | None]:
    """Open the arrays that conditions are about, and return the conditions on each."""
    parsed = () if where is None else parse_where(where, "The condition")
    if not parsed:
        return {}, None
    group = target.path.rpartition("/")[0]
    found: dict[str, _Opened] = {}
    for name in columns_of(*parsed):
        path = f"{group}/{name}"
        array = target
        if path != target.path:
            try:
                array = await QueriedArray.open(store, path)
            except NodeNotFoundError:
                raise InvalidInputError(
                    f"A condition is about {name!r}, and there is no array {path!r}. Conditions "
                    f"are about {target.path!r} and arrays beside it."
                ) from None
        found[name] = array, _axes(array, target)

    def asked(column: str, own: Where) -> _Asked:
        return _Asked(column, mapped(own, partial(condition_on, found[column][0].meaning)))

    return found, split_by_column(joined(parsed, is_any=False), asked)


def _axes(array: QueriedArray, target: QueriedArray) -> tuple[int, ...]:
    """Return the axes of the target that those of another array are along."""
    if array is target:
        return tuple(range(len(target.shape)))
    axes: list[int] = []
    for name, length in zip(array.dims, array.shape, strict=True):
        found = [axis for axis, it in enumerate(target.dims) if it is not None and it == name]
        if len(found) != 1 or found[0] in axes or target.shape[found[0]] != length:
            raise InvalidInputError(
                f"A condition is about {array.path!r}, whose dimensions are {array.dims} with "
                f"{array.shape} cells. They have to be among those of {target.path!r}, "
                f"{target.dims} with {target.shape} cells, each once and of the same length."
            )
        axes.append(found[0])
    return tuple(axes)


async def _read_line(variable: _Variable, box: Box) -> tuple[_Variable, Numbers]:
    """Read a coordinate along the region."""
    (part,) = variable.within(box)
    if part.start == part.stop:
        return replace(variable, is_line=True), np.zeros(0, variable.array.meaning.numbers)
    numbers = await variable.array.read((part,))
    size = variable.array.chunks[0]
    places = np.arange(part.start // size, -(-part.stop // size), dtype=np.int64)
    line_bytes = int(variable.known.lengths(places[:, None]).sum())
    return replace(variable, is_line=True, line_bytes=line_bytes), numbers


def _decided(test: _Test, target: QueriedArray, coords: Coords, box: Box) -> tuple[Mask, Mask]:
    """Return which chunks of the target no cell fulfils the conditions in, and which all do."""
    count = len(coords)
    if not count:
        return np.zeros(0, bool), np.ones(0, bool)
    if test.line is not None:
        return _decided_by_line(test, target, coords, box)
    variable = test.variable
    sizes = tuple(target.chunks[axis] for axis in variable.axes)
    if sizes != variable.array.chunks:  # other chunks: each lies in several of the target
        return np.zeros(count, bool), np.zeros(count, bool)
    own = coords[:, list(variable.axes)]
    statistics, known = variable.known.statistics(own)
    none, every = test.decided(statistics)
    return known & none, known & every


def _decided_by_line(
    test: _Test, target: QueriedArray, coords: Coords, box: Box
) -> tuple[Mask, Mask]:
    (axis,) = test.variable.axes
    line = test.line
    assert line is not None
    size, part = target.chunks[axis], box[axis]
    first = part.start // size
    places = np.arange(first, -(-part.stop // size), dtype=np.int64)
    starts = np.maximum(places * size, part.start) - part.start
    # Of a line F F T T T T over chunks of 3: some are T and T, every is F and T. `starts` ascend
    # strictly, without which `reduceat` would return single values.
    some = np.logical_or.reduceat(line, starts)
    every = np.logical_and.reduceat(line, starts)
    at = coords[:, axis] - first
    return ~some[at], every[at]

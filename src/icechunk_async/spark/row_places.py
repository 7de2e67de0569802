"""Rows find their chunks: from coordinates to cells, and from cells to whole chunks; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import DuplicateRowsError, MissingCoordinatesError, OutsideGridError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from icechunk_async.spark.chunk_grid import ChunkGrid

    type Column = npt.NDArray[Any]

__all__ = ["Axis", "Block", "ChunkAssembly", "Steps"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Equal steps by which a coordinate goes on after its last value.

    Attributes:
        last: the last value that is there.
        step: from one value to the next; not zero.
        most: how many may follow.
    """

    last: Any
    step: Any
    most: int

    @classmethod
    def after(cls, values: Column, most: int) -> Steps | None:
        """Answer the steps that a coordinate has; None if they differ, or there is none."""
        if len(values) < 2 or values.dtype.kind not in "iufM":
            return None
        steps = np.diff(values)
        zero = np.zeros((), steps.dtype)
        equal = (
            np.allclose(steps, steps[0], rtol=1e-5, atol=0)
            if values.dtype.kind == "f"
            else bool((steps == steps[0]).all())
        )
        return cls(values[-1], steps[0], most) if equal and steps[0] != zero else None

    def number(self, values: Column) -> npt.NDArray[np.int64]:
        """Answer how many steps after the last each value lies; -1 for what is no such place."""
        steps = (values - self.last) / self.step
        whole = np.rint(steps)
        tolerance = 1e-3 if values.dtype.kind == "f" else 0
        good = (np.abs(steps - whole) <= tolerance) & (whole >= 1) & (whole <= self.most)
        return np.where(good, whole, -1).astype(np.int64)

    def values(self, count: int) -> Column:
        """Answer the next values."""
        return np.asarray(self.last + self.step * np.arange(1, count + 1))


@dataclass(frozen=True, slots=True)
class Axis:
    """The places along one dimension.

    Attributes:
        name: of the dimension, and of the column.
        values: the coordinate of every place; for an append, only those that are there already
            if ``steps`` tells how it goes on.
        first: places before this one are not written to.
        steps: how the coordinate goes on.
    """

    name: str
    values: Column
    first: int = 0
    steps: Steps | None = None

    def places(self, given: Column) -> npt.NDArray[np.int64]:
        """Answer the place of each coordinate.

        Raises:
            MissingCoordinatesError: one is NaN or NaT.
            OutsideGridError: one is no coordinate of this dimension, or may not be written to.
        """
        if (
            given.dtype.kind in "fmM"
            and (np.isnan(given) if given.dtype.kind == "f" else np.isnat(given)).any()
        ):
            raise MissingCoordinatesError(
                f"A row has no value in column {self.name!r}, which says where it belongs. Drop "
                "such rows.",
                dimension=self.name,
            )
        wanted = given.astype(self.values.dtype) if len(self.values) else given
        order = np.argsort(self.values, kind="stable")
        at = np.searchsorted(self.values, wanted, sorter=order)
        found = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(given), int)
        known = self.values[found] == wanted if len(order) else np.zeros(len(given), bool)
        places = np.where(known, found, -1).astype(np.int64)
        if self.steps is not None:
            number = self.steps.number(wanted)
            places = np.where(known | (number < 1), places, len(self.values) - 1 + number)
        self._check(places, given)
        return places

    def _check(self, places: npt.NDArray[np.int64], given: Column) -> None:
        bad = places < self.first
        if not bad.any():
            return
        value = given[bad][0]
        there = bool((places[bad] >= 0)[0])
        raise OutsideGridError(
            f"A row has {value!s} in column {self.name!r}, "
            + (
                "which the arrays have already, and this write appends. Use mode('overwrite') to "
                "replace values."
                if there
                else f"which is none of the {len(self.values)} coordinates of that dimension"
                + (" and does not follow them in equal steps." if self.steps else ".")
                + " Filter such rows, or make the arrays larger first."
            ),
            dimension=self.name,
            value=str(value),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one chunk.

    Attributes:
        chunk: its number, in C order.
        cells: places of the rows in the chunk, in C order.
        values: columns by name.
        whole: whether every cell of the chunk has a row.
    """

    chunk: int
    cells: npt.NDArray[np.int64]
    values: Mapping[str, Column]
    whole: bool


class ChunkAssembly:
    """Collects rows by chunk, and gives each chunk away as soon as all its cells have rows."""

    def __init__(self, grid: ChunkGrid, array: str) -> None:
        """Begin without rows; ``array`` is named in messages."""
        self._grid = grid
        self._array = array
        self._waiting: dict[int, list[tuple[npt.NDArray[np.int64], dict[str, Column]]]] = {}
        self._rows: dict[int, int] = {}
        self._given: set[int] = set()

    def add(
        self, places: list[npt.NDArray[np.int64]], columns: Mapping[str, Column]
    ) -> Iterator[Block]:
        """Take rows, and give the chunks that they complete.

        Args:
            places: for each axis the place of every row.
            columns: values of the rows.

        Raises:
            DuplicateRowsError: two rows are for one cell.
        """
        if not len(places[0]):
            return
        along = [
            np.searchsorted(edges, at, side="right") - 1
            for edges, at in zip(self._grid.edges, places, strict=True)
        ]
        chunks = np.ravel_multi_index(along, self._grid.counts).astype(np.int64)
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order])) + 1
        for rows in np.split(order, bounds):
            chunk = int(chunks[rows[0]])
            cells = self._cells(chunk, [at[rows] for at in places])
            if chunk in self._given:
                self._refuse(chunk, int(cells[0]))
            self._waiting.setdefault(chunk, []).append(
                (cells, {name: values[rows] for name, values in columns.items()})
            )
            self._rows[chunk] = self._rows.get(chunk, 0) + len(rows)
            if self._rows[chunk] >= self._size(chunk):
                yield self._take(chunk)

    def rest(self) -> Iterator[Block]:
        """Give the chunks that have rows for some of their cells.

        Raises:
            DuplicateRowsError: two rows are for one cell.
        """
        for chunk in sorted(self._waiting):
            yield self._take(chunk)

    def _shape(self, chunk: int) -> tuple[int, ...]:
        return tuple(at.stop - at.start for at in self._grid.region(chunk))

    def _size(self, chunk: int) -> int:
        return int(np.prod(self._shape(chunk)))

    def _cells(self, chunk: int, places: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        region = self._grid.region(chunk)
        inside = [at - here.start for at, here in zip(places, region, strict=True)]
        return np.asarray(np.ravel_multi_index(inside, self._shape(chunk)), np.int64)

    def _take(self, chunk: int) -> Block:
        parts = self._waiting.pop(chunk)
        self._given.add(chunk)
        del self._rows[chunk]
        cells = np.concatenate([it for it, _ in parts])
        times = np.bincount(cells, minlength=self._size(chunk))
        if times.max() > 1:
            self._refuse(chunk, int(np.flatnonzero(times > 1)[0]))
        values = {name: np.concatenate([it[name] for _, it in parts]) for name in parts[0][1]}
        return Block(chunk, cells, values, whole=len(cells) == self._size(chunk))

    def _refuse(self, chunk: int, cell: int) -> None:
        at = np.unravel_index(cell, self._shape(chunk))
        index = tuple(
            int(it) + here.start for it, here in zip(at, self._grid.region(chunk), strict=True)
        )
        raise DuplicateRowsError(
            f"Several rows have the coordinates of the cell {index} of {self._array!r}. Leave one "
            "row for each cell, for example with dropDuplicates on the coordinates.",
            array=self._array,
            index=index,
        )

"""Rows find their chunks: from places along axes to cells of whole chunks; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import DuplicateRowsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from icechunk_async.spark.chunk_grid import ChunkGrid

    type Column = npt.NDArray[Any]

__all__ = ["Block", "ChunkAssembly"]


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

"""Chunks of an array by number, the region of each, and the rows of each; pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import zarr

    from icechunk_async.errors import DuplicateRowsError

    type Column = npt.NDArray[Any]

__all__ = ["Block", "ChunkAssembly", "ChunkGrid", "Region", "check_disjoint", "share"]


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
    return np.minimum(np.arange(0, length + size, size, dtype=np.int64), length)


def share(number: int, parts: int, part: int) -> range:
    """Return one of `parts` parts of `range(number)`; their sizes differ by at most one."""
    return range(number * part // parts, number * (part + 1) // parts)


def check_disjoint(grid: ChunkGrid, regions: Sequence[Region]) -> int:
    """Check that regions consist of whole chunks, and that no two share one; return their number.

    Raises:
        InvalidInputError: a region cuts a chunk, or two regions share one.
    """
    owners = np.full(grid.chunks, -1, np.int64)
    for number, region in enumerate(regions):
        chunks = grid.chunks_in(region)
        taken = owners[chunks]
        if (taken >= 0).any():
            other = int(taken[taken >= 0][0])
            raise InvalidInputError(
                f"The regions {other} and {number} have chunks in common: {regions[other]} and "
                f"{region}. Only one task may write a chunk."
            )
        owners[chunks] = number
    return int(np.count_nonzero(owners >= 0))


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
            if chunk in self.whole:
                raise self._duplicate(self._grid.index(chunk, int(cells[0])))
            self._waiting.setdefault(chunk, []).append(
                (cells, {name: values[rows] for name, values in columns.items()})
            )
            self._rows[chunk] = self._rows.get(chunk, 0) + len(rows)
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

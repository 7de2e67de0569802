"""Chunks of an array by number, and where each lies; pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import zarr

__all__ = ["ChunkGrid", "Region", "check_disjoint", "share"]

type Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Where the chunks of an array begin and end; of an array with shards, these.

    Attributes:
        edges: along each axis, the places where chunks begin, and the length of the array.
    """

    edges: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, array: zarr.Array[Any]) -> ChunkGrid:
        """Answer the grid of an array."""
        try:
            sizes = array.shards or array.chunks
        except NotImplementedError:  # chunks that differ in size
            return cls(
                tuple(
                    np.minimum(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), length)
                    for sizes, length in zip(array.write_chunk_sizes, array.shape, strict=True)
                )
            )
        return cls(tuple(map(_equal, sizes, array.shape)))

    def grown(self, axis: int, size: int, length: int) -> ChunkGrid:
        """Answer the grid of an array that is made longer along an axis of equal chunks."""
        return ChunkGrid((*self.edges[:axis], _equal(size, length), *self.edges[axis + 1 :]))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many chunks there are along each axis."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return prod(self.counts)

    def region(self, chunk: int) -> Region:
        """Answer where a chunk lies, given its number in C order; of a last one, what is left."""
        return tuple(
            slice(int(edges[at]), int(edges[at + 1]))
            for at, edges in zip(np.unravel_index(chunk, self.counts), self.edges, strict=True)
        )

    def chunks_in(self, region: Region) -> npt.NDArray[np.int64]:
        """Answer the numbers of the chunks that a region consists of.

        Raises:
            InvalidInputError: it is outside of the array, or ends inside of a chunk.
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
                f"Along axis {axis} the region {place} is not within 0 and {int(edges[-1])}, "
                "step by step."
            )
        first, last = np.searchsorted(edges, [start, stop])
        if edges[first] != start or edges[last] != stop:
            raise InvalidInputError(
                f"Along axis {axis} the region from {start} to {stop} begins or ends inside of a "
                "chunk, so that the rest of it could be lost to another task. Let it begin and "
                f"end at multiples of the chunks: near are {int(edges[max(first - 1, 0)])} and "
                f"{int(edges[last])}."
            )
        return np.arange(first, last, dtype=np.int64)


def _equal(size: int, length: int) -> npt.NDArray[np.int64]:
    """Answer the edges of equal chunks."""
    return np.minimum(np.arange(0, length + size, size, dtype=np.int64), length)


def share(number: int, parts: int, part: int) -> range:
    """Answer one of the parts of ``range(number)``, whose sizes differ by one at most."""
    return range(number * part // parts, number * (part + 1) // parts)


def check_disjoint(grid: ChunkGrid, regions: Sequence[Region]) -> None:
    """Make sure that regions consist of whole chunks, and that no two have one in common.

    Raises:
        InvalidInputError: they do not.
    """
    owners = np.full(grid.chunks, -1, np.int64)
    for number, region in enumerate(regions):
        chunks = grid.chunks_in(region)
        taken = owners[chunks]
        if (taken >= 0).any():
            other = int(taken[taken >= 0][0])
            raise InvalidInputError(
                f"The regions {other} and {number} have chunks in common: {regions[other]} and "
                f"{region}. Each chunk can be written by one task."
            )
        owners[chunks] = number

"""Where chunks begin and end."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.grid import ChunkGrid, Region, check_disjoint, share


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=3), st.booleans())
def test_chunks_cover_every_cell_once(axes: list[tuple[int, int]], shards: bool) -> None:  # noqa: FBT001
    """Of arrays with and without shards; the last chunk along an axis is cut off."""
    shape, chunks = tuple(it for it, _ in axes), tuple(it for _, it in axes)
    outer = tuple(it * 2 for it in chunks) if shards and axes else None
    array: Any = zarr.create_array({}, shape=shape, chunks=chunks, shards=outer, dtype="i1")
    grid = ChunkGrid.of(array)
    times = np.zeros(shape, int)
    for chunk in range(grid.chunks):
        region = grid.region(chunk)
        assert grid.chunks_in(region).tolist() == [chunk]
        assert all(at.start % it == 0 for at, it in zip(region, outer or chunks, strict=True))
        times[region] += 1
    assert (times == 1).all()
    assert sorted(grid.chunks_in(tuple(slice(None) for _ in shape))) == list(range(grid.chunks))


def test_chunks_may_differ_in_size() -> None:
    """As in rectilinear grids."""
    with zarr.config.set({"array.rectilinear_chunks": True}):
        array: Any = zarr.create_array({}, shape=(6, 4), chunks=((1, 2, 3), (4,)), dtype="i1")
        assert [it.tolist() for it in ChunkGrid.of(array).edges] == [[0, 1, 3, 6], [0, 4]]


def test_a_longer_array_has_more_chunks() -> None:
    """Those that are there may become whole."""
    array: Any = zarr.create_array({}, shape=(3, 5), chunks=(2, 5), dtype="i1")
    grown = ChunkGrid.of(array).grown(0, 2, 7)
    assert [it.tolist() for it in grown.edges] == [[0, 2, 4, 6, 7], [0, 5]]


def test_regions_that_cut_or_share_chunks_are_refused() -> None:
    """They share chunks, cut them, or are outside of the array."""
    array: Any = zarr.create_array({}, shape=(10,), chunks=(4,), dtype="i1")
    grid = ChunkGrid.of(array)
    check_disjoint(grid, [(slice(8, 10),), (slice(0, 8),)])
    cases: list[tuple[list[Region], str]] = [
        ([(slice(0, 8),), (slice(4, 10),)], "0 and 1 have chunks in common"),
        ([(slice(0, 6),)], "inside of a chunk"),
        ([(slice(0, 12),)], "not within"),
        ([(slice(0, 4, 2),)], "step other than 1"),
        ([(slice(0, 4), slice(0, 1))], "2 axes"),
    ]
    for regions, words in cases:
        with pytest.raises(InvalidInputError, match=words):
            check_disjoint(grid, regions)


def test_the_first_region_that_shares_a_chunk_is_named() -> None:
    """With the one that has the chunk already, in the order of the regions."""
    grid = ChunkGrid((np.arange(7), np.arange(7)))
    corner, row, column = (slice(0, 1),) * 2, (slice(5), slice(2, 3)), (slice(4, 5), slice(6))
    assert check_disjoint(grid, []) == 0
    assert check_disjoint(grid, [corner, (slice(2, 2), slice(6)), row]) == 1 + 5
    with pytest.raises(InvalidInputError, match="regions 1 and 2 have"):
        check_disjoint(grid, [corner, row, column, corner])


def test_a_large_grid_takes_no_memory() -> None:
    """A thousand million chunks, of which two hundred are written."""
    grid = ChunkGrid((np.arange(100_001), np.arange(10_001)))
    regions: list[Region] = [
        (slice(it, it + 2), slice(5, 6)) for it in (0, 4, *range(100, 98_100, 1000))
    ]
    tracemalloc.start()
    try:
        assert check_disjoint(grid, regions) == 200
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(0, 50), st.integers(1, 12))
def test_shares_cover_a_range_and_differ_by_one_at_most(number: int, parts: int) -> None:
    """Sizes differ by one at most."""
    shares = [share(number, parts, it) for it in range(parts)]
    assert [it for part in shares for it in part] == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1

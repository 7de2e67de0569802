"""Boxes of dense arrays: which tiles are read, and how many at a time."""

from __future__ import annotations

import asyncio
import itertools
import math
import tracemalloc
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.tiledb.arrays import dense
from icechunk_async.tiledb.arrays.dense import DenseGrid, overlap, read_dense
from icechunk_async.tiledb.format.schema import Attribute, Dimension, Schema
from icechunk_async.tiledb.format.types import Datatype, Layout
from tests.tiledb.compare import columns_of_file, read_query
from tests.unit.tiledb.archives import ARCHIVES, cases, files_below, filled, stored_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.tiledb.arrays.dense import Box, Tile, TileSource

COUNT = Attribute("count", Datatype.INT8, 1, (), b"\x07")


def grid_of(shape: Sequence[int], tiles: Sequence[int], boxes: Sequence[Box] = ()) -> DenseGrid:
    """Return a grid whose fragments hold boxes, and none of the attributes."""
    dimensions = tuple(
        Dimension(f"d{axis}", Datatype.INT64, 1, (), 0, size - 1, tile)
        for axis, (size, tile) in enumerate(zip(shape, tiles, strict=True))
    )
    row, none = Layout.ROW_MAJOR, ()
    schema = Schema(22, False, False, row, row, 1, none, none, none, dimensions, (COUNT,))  # noqa: FBT003
    fragments: list[Any] = [
        SimpleNamespace(
            schema=SimpleNamespace(tile_shape=schema.tile_shape, dimensions=dimensions, fields={}),
            footer=SimpleNamespace(is_dense=True, non_empty=[(low, high - 1) for low, high in box]),
            tile_box=[(low // t, -(-high // t)) for (low, high), t in zip(box, tiles, strict=True)],
            cells_of=lambda _: math.prod(tiles),
        )
        for box in boxes
    ]
    return DenseGrid(schema, fragments)


SPANS = st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda it: (it[0], it[0] + it[1]))
BOXES = st.tuples(SPANS, SPANS)


@given(st.lists(BOXES, max_size=3), BOXES, st.tuples(*[st.integers(1, 5)] * 2), st.integers(1, 9))
def test_parts_have_every_tile_of_a_fragment_once(
    boxes: list[Box], box: Box, tiles: tuple[int, int], most: int
) -> None:
    """They have no more tiles than they may, and lie in the box."""
    grid = grid_of((24, 24), tiles, boxes)
    parts = list(grid.parts(box, most))
    found = [it for part in parts for it in grid.tiles_in(part)]
    assert len(found) == len(set(found))
    assert all(overlap(it, box) == it for it in parts)
    assert all(sum(1 for _ in grid.tiles_in(it)) <= most for it in parts)
    for tile in grid.tiles_in(box):
        sources = grid.sources(tile, box)
        assert not sources or tile in found
        assert sources == [
            it for part in parts if tile in grid.tiles_in(part) for it in grid.sources(tile, part)
        ]


async def test_tiles_that_no_fragment_holds_are_not_visited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of thirty million tiles of one cell, one fragment has three."""
    held = ((10_000_000, 10_000_003),)
    grid = grid_of([1 << 60], [1], [held])
    visited: list[object] = []
    sources = grid.sources

    def noticed(tile: Tile, wanted: Box) -> list[TileSource]:
        visited.append(tile)
        return sources(tile, wanted)

    monkeypatch.setattr(grid, "sources", noticed)
    tracemalloc.start()
    try:
        found = await read_dense(grid, [COUNT], ((0, 30_000_000),))
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert len(visited) <= 2 * dense.TILES_A_PART
    assert set(np.unique(found["count"].values)) == {7}


async def test_others_have_their_turn_while_many_tiles_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no tile has to be awaited."""
    monkeypatch.setattr(dense, "TILES_A_PART", 1)
    box = ((0, 100),)
    grid = grid_of([100], [1], [box])
    turns = itertools.count()

    async def other() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await asyncio.sleep(0)
    before = next(turns)
    await read_dense(grid, [COUNT], box)
    assert next(turns) - before >= 99
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize(("archive", "job"), cases(quick=[ARCHIVES[0], ARCHIVES[-1]]))
async def test_cells_are_the_same_in_parts(
    archive: str, job: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fixed and of variable length, and null ones."""
    pytest.importorskip("pyarrow", reason="sparse arrays are read as Arrow, which is not installed")
    monkeypatch.setattr(dense, "TILES_A_PART", most)
    url = await filled(files_below(archive, job["number"]))
    for number, query in enumerate(job["queries"]):
        stored = stored_results(archive, job["number"], number)
        if stored is not None:
            schema, found = await read_query(url, query)
            if not schema.is_sparse:
                assert found == columns_of_file(stored, schema)

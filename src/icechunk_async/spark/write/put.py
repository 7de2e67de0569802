"""Write the rows of a chunk into arrays, each stored chunk once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import zarr

    from icechunk_async.spark.grid.chunks import Block, ChunkGrid

__all__ = ["put_block"]


async def put_block(
    arrays: Mapping[str, zarr.Array[Any]],
    grid: ChunkGrid,
    block: Block,
    old: tuple[int, int] | None,
) -> None:
    """Write a chunk of every array once; cells without a row keep their values.

    Args:
        arrays: the arrays by name.
        grid: their common chunk grid.
        block: the rows of the chunk.
        old: the axis that is appended to, and its length before. Cells beyond that length had no
            value, although the chunk may hold some from when the array was longer.
    """
    region = grid.region(block.chunk)
    shape = tuple(at.stop - at.start for at in region)

    async def put(name: str) -> None:
        array = arrays[name].async_array
        values: npt.NDArray[Any]
        # A chunk whose cells all have rows need not be read.
        if block.whole:
            values = np.empty(shape, array.dtype)
        else:
            values = np.array(await array.getitem(region))
        if old is not None and not block.whole:
            axis, length = old
            new = slice(max(0, length - region[axis].start), None)
            values[(*[slice(None)] * axis, new)] = array.metadata.fill_value
        values.reshape(-1)[block.cells] = block.values[name]
        await array.setitem(region, values)

    await bounded_map(put, list(arrays), limit=len(arrays))

"""Blocks of arrays that are written in parallel, and the chunks of the array that they go to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    import zarr

    type Region = tuple[slice, ...]

__all__ = ["check_blocks", "within"]


def check_blocks(
    blocks: tuple[tuple[int, ...], ...], target: zarr.Array[Any], region: Region | None
) -> None:
    """Raise an error if two blocks lie in one chunk (or shard) of the target.

    Args:
        blocks: sizes of the blocks along each axis.
        target: the array to write into.
        region: the part of it.

    Raises:
        InvalidInputError: written at once, one block could overwrite a part of the other.
    """
    places = region or (slice(None),) * len(target.shape)
    for axis, (sizes, chunks) in enumerate(zip(blocks, target.write_chunk_sizes, strict=True)):
        # Blocks of 3, 3 and 2 elements from 2 on meet at 5 and 8. With chunks of 4 the 5 lies
        # within one, which two workers would read, change and write back at once.
        start = places[axis].start or 0
        meetings = start + np.cumsum(sizes[:-1], dtype=np.int64)
        bad = meetings[~np.isin(meetings, np.cumsum(chunks))]
        if bad.size:
            raise InvalidInputError(
                f"Along axis {axis} of {target.path!r} two blocks meet at {int(bad[0])}, inside "
                "of a chunk: written in parallel, one could overwrite the other's "
                "part. Rechunk the source so that its blocks end where chunks of the array do "
                "(for xarray: align_chunks=True)."
            )


def within(place: Region, region: Region | None) -> Region:
    """Return the place in the target of a place in the source."""
    # Slices have both ends here: workers that open the target do not know what `None` stood for.
    if region is None:
        return place
    starts = [it.start or 0 for it in region]
    return tuple(
        slice(start + it.start, start + it.stop) for start, it in zip(starts, place, strict=True)
    )

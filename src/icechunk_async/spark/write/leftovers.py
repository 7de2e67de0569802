"""Clear what an array held beyond its end when it was longer, before it grows over it.

Shrinking an array keeps the rest of its last chunks, and may keep whole chunks beyond its end.
Grown again, it would show those values in cells that nobody wrote.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.core.sync import sync

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.spark.shared import open_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import zarr

    from icechunk_async.sync.store import IcechunkStore

    type Place = tuple[int, ...]

__all__ = ["clear_leftovers", "places_beyond"]

_CONCURRENT = 64


def places_beyond(
    shape: Sequence[int], chunks: Sequence[int], axis: int, length: int
) -> Iterable[Place]:
    """Return the chunks of an array that have cells at or after an index of one axis. Pure."""
    counts = [range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    counts[axis] = range(length // chunks[axis], len(counts[axis]))
    return product(*counts)


def clear_leftovers(store: IcechunkStore, arrays: Iterable[tuple[str, int]], length: int) -> None:
    """Clear cells beyond a length in chunks that the session has not written.

    Args:
        store: the store of a session, in which the arrays have their new shape.
        arrays: paths, and the number of the axis that grew.
        length: the length before. Chunks that the session wrote are taken to be right.

    Cost: looks for each chunk with new cells; reads those that are there.
    """
    written = store.session.status().updated_chunks
    for path, axis in arrays:
        array = open_array(store, path, write=True)
        sizes = array.shards or array.chunks
        mine = {tuple(it) for it in written.get(f"/{path}", [])}
        beyond = [it for it in places_beyond(array.shape, sizes, axis, length) if it not in mine]
        for place in _stored(store, path, array, beyond):
            region = [
                slice(at * size, min((at + 1) * size, end))
                for at, size, end in zip(place, sizes, array.shape, strict=True)
            ]
            if region[axis].start >= length:
                sync(store.delete(_key(path, array, place)))
                continue
            region[axis] = slice(length, region[axis].stop)
            values = np.asarray(array[tuple(region)])
            if not _all_equal(values, array.fill_value):
                array[tuple(region)] = array.fill_value


def _stored(
    store: IcechunkStore, path: str, array: zarr.Array[Any], places: Sequence[Place]
) -> list[Place]:
    async def exists(place: Place) -> bool:
        return await store.exists(_key(path, array, place))

    async def look() -> list[bool]:
        return await bounded_map(exists, places, limit=_CONCURRENT)

    return [place for place, there in zip(places, sync(look()), strict=True) if there]


def _key(path: str, array: zarr.Array[Any], place: Place) -> str:
    return f"{path}/{array.metadata.encode_chunk_key(place)}"


def _all_equal(values: np.ndarray[Any, Any], fill: Any) -> bool:
    same = values == fill
    if values.dtype.kind in "fcMm":
        same = same | ((values != values) & (np.asarray(fill) != np.asarray(fill)))  # noqa: PLR0124 - NaN
    return bool(np.all(same))

"""Where the virtual chunks of a session are, read from the columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._concurrency import bounded_map
from icechunk_async.format.chunk_refs import Kind

if TYPE_CHECKING:
    from icechunk_async.format.chunk_refs import ChunkRefs
    from icechunk_async.repository.virtual import VirtualLocations
    from icechunk_async.repository.workspace import Workspace

__all__ = ["virtual_locations"]

_ARRAYS_AT_ONCE: Final = 4


async def virtual_locations(workspace: Workspace) -> list[str]:
    """Answer the location of every virtual chunk, as ``Session.all_virtual_chunk_locations``."""
    with workspace.lock:
        paths = [node.path for node in workspace.tree.nodes() if node.array is not None]

    async def of_array(path: str) -> list[str]:
        return _locations(await workspace.all_refs(path), workspace.virtual.locations)

    parts = await bounded_map(of_array, sorted(paths), limit=_ARRAYS_AT_ONCE)
    return [location for part in parts for location in part]


def _locations(refs: ChunkRefs, locations: VirtualLocations) -> list[str]:
    """Answer absolute locations of the virtual rows; equal ones are one object."""
    used, rows = np.unique(refs.objects[refs.kinds == Kind.VIRTUAL], return_inverse=True)
    codes, distinct = refs.locations.take(used.astype(np.int64)).distinct()
    absolute = [locations.expand(location) for location in distinct.strings]
    return [absolute[code] for code in codes[rows].tolist()]

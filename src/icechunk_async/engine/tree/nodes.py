"""Ask about nodes: ids, where chunks are, and where virtual ones come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.tree.listing import ChunkType
from icechunk_async.engine.tree.workspace import InManifests
from icechunk_async.errors import NodeNotFoundError
from icechunk_async.format.manifest.refs import InlineChunk, Kind, NativeChunk, VirtualChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.engine.virtual.chunks import VirtualLocations
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRef, ChunkRefs

__all__ = ["chunk_type", "known_chunk_type", "node_id", "virtual_locations"]


def node_id(workspace: Workspace, path: str) -> NodeId:
    """Return the id of the node at an absolute path.

    Raises:
        NodeNotFoundError: nothing is there.
    """
    node = workspace.node(path)
    if node is None:
        raise NodeNotFoundError(f"There is no array or group at {path!r}.", path=path)
    return node.id


async def chunk_type(workspace: Workspace, path: str, coords: Sequence[int]) -> ChunkType:
    """Return where the bytes of a chunk are; see ``Session.chunk_type``."""
    workspace.array(path)
    handle = await workspace.find_chunk(path, tuple(coords))
    return _type_of(None if handle is None else handle.ref)


def known_chunk_type(workspace: Workspace, path: str, coords: Sequence[int]) -> ChunkType | None:
    """Return as `chunk_type`, without an event loop; None if that would take a request."""
    workspace.array(path)
    found = workspace.find_in_memory(path, tuple(coords))
    return None if isinstance(found, InManifests) else _type_of(found)


def _type_of(ref: ChunkRef | None) -> ChunkType:
    match ref:
        case None:
            return ChunkType.UNINITIALIZED
        case NativeChunk():
            return ChunkType.NATIVE
        case VirtualChunk():
            return ChunkType.VIRTUAL
        case InlineChunk():
            return ChunkType.INLINE


_ARRAYS_AT_ONCE: Final = 4


async def virtual_locations(workspace: Workspace) -> list[str]:
    """Return the location of every virtual chunk, as ``Session.all_virtual_chunk_locations``."""
    with workspace.lock:
        paths = [node.path for node in workspace.tree.nodes() if node.array is not None]

    async def of_array(path: str) -> list[str]:
        return _locations(await workspace.all_refs(path), workspace.virtual.locations)

    parts = await bounded_map(of_array, sorted(paths), limit=_ARRAYS_AT_ONCE)
    return [location for part in parts for location in part]


def _locations(refs: ChunkRefs, locations: VirtualLocations) -> list[str]:
    """Return absolute locations of the virtual rows; equal ones are one object."""
    used, rows = np.unique(refs.objects[refs.kinds == Kind.VIRTUAL], return_inverse=True)
    codes, distinct = refs.locations.take(used.astype(np.int64)).distinct()
    absolute = [locations.expand(location) for location in distinct.strings]
    return [absolute[code] for code in codes[rows].tolist()]

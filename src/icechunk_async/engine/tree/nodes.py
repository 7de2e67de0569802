"""What a session does with nodes beside their documents and chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, overload

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.tree import reshape as reshaping
from icechunk_async.engine.tree.listing import Batches, ChunkBatch, ChunkType
from icechunk_async.errors import NodeNotFoundError
from icechunk_async.format.manifest.refs import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.tree.reshape import MoveChunk, MoveChunks
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.engine.virtual.chunks import VirtualLocations
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs

__all__ = ["NodeOperations", "virtual_locations"]


class NodeOperations:
    """Moving, reshaping and asking about nodes; a base of the session."""

    workspace: Workspace

    async def move(self, from_path: str, to_path: str) -> None:
        """Give a node, and all below it, another path; nothing is copied.

        Reads in this session see the new places at once, others with the commit. Node ids stay.
        Paths may be given with or without the leading slash.

        Args:
            from_path: the array or group; not the root.
            to_path: where it goes; nothing may be there, and a group must be above it.

        Raises:
            NodeNotFoundError: nothing is at ``from_path``.
            NodeExistsError: something is at ``to_path``.
            InvalidMoveError: ``to_path`` is ``from_path`` or below it, or not in a group.
            SessionStateError: the session is not one of ``Repository.rearrange_session``.
            ReadOnlyError: it was committed, or is being committed.
            InvalidInputError: a path cannot be one.

        Cancellation: no effect. Cost: no request; time in proportion to the nodes below.
        """
        self.workspace.move_node(check_path(from_path), check_path(to_path))

    async def get_node_id(self, path: str) -> NodeId:
        """Return the id that an array or group keeps for its whole life, wherever it is moved.

        Raises:
            NodeNotFoundError: nothing is there.

        Cancellation: no effect. Cost: none.
        """
        path = check_path(path)
        node = self.workspace.node(path)
        if node is None:
            raise NodeNotFoundError(f"There is no array or group at {path!r}.", path=path)
        return node.id

    async def shift_array(self, path: str, chunk_offset: Iterable[int]) -> None:
        """Move all chunks of an array by whole chunks, as rolling windows need.

        Chunks that leave the grid are gone: resize the array first to keep them. Places that
        nothing moves to hold fill values afterwards. No chunk is read or written.

        Args:
            path: the array; its chunk grid must be regular.
            chunk_offset: how far along each axis, in chunks; negative towards the start.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: its grid is not regular, or it has another number of axes.
            SessionStateError: the array was changed meanwhile, or the session only moves nodes.
            ReadOnlyError: the session only reads. After any error nothing was moved.

        Cancellation: nothing was moved.

        Cost: one request for each manifest of the array that is not cached; memory in proportion
        to its chunks, in columns.
        """
        await reshaping.shift(self.workspace, check_path(path), chunk_offset)

    @overload
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunk,
        backward: MoveChunk | None = None,
        *,
        vectorized: Literal[False] = False,
    ) -> None: ...
    @overload
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunks,
        backward: MoveChunks | None = None,
        *,
        vectorized: Literal[True],
    ) -> None: ...
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunk | MoveChunks,
        backward: MoveChunk | MoveChunks | None = None,
        *,
        vectorized: bool = False,
    ) -> None:
        """Move the chunks of an array to where a function says. None is read or written.

        Without ``backward`` a chunk also stays where it was, unless another came there.

        Args:
            path: the array; its chunk grid must be regular.
            forward: asked about each chunk that exists, with its coordinates as a list in
                ascending order: answers its new coordinates, or None to leave it. Of several
                chunks with one target the last one counts.
            backward: the inverse of ``forward``: asked about each chunk that exists and that
                none came to. Where it answers None, or a place where no chunk was, that chunk is
                deleted.
            vectorized: call each function once, with all coordinates as the rows of an integer
                array ``(n, rank)``; it answers such an array, where a row with a negative
                number means None. Much faster.

        Raises:
            InvalidCoordinatesError: ``forward`` answered a place outside of the grid.
            InvalidInputError: a function answered no coordinates, or the grid is not regular.
            NodeNotFoundError, SessionStateError, ReadOnlyError: as :meth:`shift_array`.
            Exception: whatever a function raises. After any error nothing was moved.

        Cancellation: nothing was moved.

        Cost: as :meth:`shift_array`. The functions run on the event loop.
        """
        await reshaping.reindex(
            self.workspace, check_path(path), forward, backward, vectorized=vectorized
        )

    async def chunk_type(self, path: str, coords: Sequence[int]) -> ChunkType:
        """Return where the bytes of a chunk are.

        A chunk that was never written, or that the grid has no place for, is uninitialized.

        Raises:
            NodeNotFoundError: there is no array.

        Cancellation: no effect. Cost: at most one request, for the manifest.
        """
        path = check_path(path)
        self.workspace.array(path)
        handle = await self.workspace.find_chunk(path, tuple(coords))
        match None if handle is None else handle.ref:
            case None:
                return ChunkType.UNINITIALIZED
            case NativeChunk():
                return ChunkType.NATIVE
            case VirtualChunk():
                return ChunkType.VIRTUAL
            case InlineChunk():
                return ChunkType.INLINE

    def chunk_coordinates(
        self, path: str, batch_size: int = 1000
    ) -> Batches[npt.NDArray[np.uint32]]:
        """Iterate over the coordinates of the chunks that exist, as ``(n, rank)`` arrays.

        Order, errors and cost as :meth:`array_chunk_iterator`.
        """
        return Batches(
            self.workspace, check_path(path), batch_size, lambda refs: refs.coords.copy()
        )

    def array_chunk_iterator(self, path: str, batch_size: int = 100_000) -> Batches[ChunkBatch]:
        """Iterate over the chunks of an array that exist, in columns.

        They come manifest by manifest, in ascending order within each, and last those that this
        session wrote; each once. What the session changes after the call does not count.

        Args:
            path: the array.
            batch_size: rows in a batch, at most.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: the batch size is not positive.

        Cancellation: the step is lost. The iteration may be left at any point.

        Cost: one request for each manifest that is not cached, when its turn comes; memory for
        one manifest, and whatever the cache keeps.
        """
        locations = self.workspace.virtual.locations
        return Batches(
            self.workspace, check_path(path), batch_size, lambda refs: ChunkBatch(refs, locations)
        )


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

"""What a session knows about nodes and chunks, and how it moves them; forks and merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync._states import ChunkType
from icechunk_async.sync.iterators import AsyncCloseableIterator
from icechunk_async.sync.portal import run, run_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from icechunk_async.sync.session_handles import SessionHandle

    type Reindexing = Callable[[Iterable[int]], Iterable[int] | None]

__all__ = ["NodeOperations"]


class NodeOperations:
    """A base of the session."""

    _session: SessionHandle

    def move(self, from_path: str, to_path: str) -> None:
        """Move a node with all below it; in a session of ``Repository.rearrange_session``.

        Nothing is copied, and nothing is overwritten: the new path must be free, and its parent
        a group.

        Raises:
            SessionStateError: the session is no such session, or the new place is not allowed.
            NotFoundError: there is no such node.
            AlreadyExistsError: the new path is taken.
        """
        run(self._session.ask(lambda session: session.move(from_path, to_path)))

    async def move_async(self, from_path: str, to_path: str) -> None:
        """Await what :meth:`move` does."""
        await run_async(self._session.ask(lambda session: session.move(from_path, to_path)))

    def get_node_id(self, path: str) -> str:
        """Return the id of a node, which stays the same when it moves.

        Raises:
            NodeNotFoundError: there is no such node.
        """
        return str(run(self._session.ask(lambda session: session.get_node_id(path))))

    async def get_node_id_async(self, path: str) -> str:
        """Await what :meth:`get_node_id` answers."""
        return str(await run_async(self._session.ask(lambda session: session.get_node_id(path))))

    def all_virtual_chunk_locations(self) -> list[str]:
        """Return the location of every virtual chunk, one for each chunk."""
        return list(run(self._session.ask(lambda it: it.all_virtual_chunk_locations())))

    async def all_virtual_chunk_locations_async(self) -> list[str]:
        """Await what :meth:`all_virtual_chunk_locations` answers."""
        ask = self._session.ask(lambda it: it.all_virtual_chunk_locations())
        return list(await run_async(ask))

    def reindex_array(
        self, array_path: str, forward: Reindexing, backward: Reindexing | None = None
    ) -> None:
        """Give every chunk of an array other coordinates, without copying any.

        Args:
            array_path: the array; its chunk grid must be regular.
            forward: answers the new coordinates of a chunk, or None to drop it.
            backward: answers the old coordinates, or None where the chunk has none; the inverse
                of ``forward``.

        Both are called on the thread that answers blocking calls, and must not make any.
        """
        run(self._session.ask(lambda it: it.reindex_array(array_path, forward, backward)))

    def shift_array(self, array_path: str, chunk_offset: Iterable[int]) -> None:
        """Move all chunks of an array by a number of chunks along each axis.

        What leaves the grid is dropped; what becomes free holds the fill value.
        """
        offset = tuple(chunk_offset)
        run(self._session.ask(lambda session: session.shift_array(array_path, offset)))

    async def chunk_coordinates(
        self, array_path: str, batch_size: int = 1000
    ) -> AsyncIterator[tuple[int, ...]]:
        """Iterate over the coordinates of the chunks that exist."""
        batches = AsyncCloseableIterator(
            self._session.each(lambda it: it.chunk_coordinates(array_path, batch_size=batch_size)),
            parts=batch_size,
        )
        async for batch in batches:
            for row in batch.tolist():
                yield tuple(row)

    def chunk_type(self, array_path: str, chunk_coordinates: Sequence[int]) -> ChunkType:
        """Tell where a chunk is kept, if it exists.

        Raises:
            NodeNotFoundError: there is no such array.
        """
        coords = tuple(chunk_coordinates)
        kind = run(self._session.ask(lambda session: session.chunk_type(array_path, coords)))
        return ChunkType(int(kind))

    async def chunk_type_async(
        self, array_path: str, chunk_coordinates: Sequence[int]
    ) -> ChunkType:
        """Await what :meth:`chunk_type` answers."""
        coords = tuple(chunk_coordinates)
        ask = self._session.ask(lambda session: session.chunk_type(array_path, coords))
        return ChunkType(int(await run_async(ask)))

"""Move the chunks of an array to other places in its grid; only references change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from icechunk_async.engine.tree.workspace import document_of
from icechunk_async.errors import InvalidCoordinatesError, InvalidInputError, SessionStateError
from icechunk_async.format.json.values import is_object
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.engine.tree.array_state import ArrayState
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.snapshot import Node

    type _Rows = npt.NDArray[np.int64]

__all__ = ["MoveChunk", "MoveChunks", "reindex", "reindexed", "shift", "shifted"]

type MoveChunk = Callable[[list[int]], Iterable[int] | None]
"""Returns the new place of the chunk at some coordinates, or None."""
type MoveChunks = Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]
"""Returns the new places of chunks, a row each; negative rows stand for None."""

_FAR: Final = 1 << 32
"""Beyond any grid, in either direction."""
_BYTES_PER_REF: Final = 64


async def shift(workspace: Workspace, path: str, chunk_offset: Iterable[int]) -> None:
    """Move all chunks of an array by whole chunks; see ``Session.shift_array``."""
    state = _begin(workspace, path)
    grid = _grid(state.node)
    try:
        # Python's integers have no end, and NumPy's have 64 bits; beyond the grid all steps are
        # alike.
        offset = [max(-_FAR, min(_FAR, index(step))) for step in chunk_offset]
    except TypeError as error:
        raise InvalidInputError(f"{path!r} is shifted by whole chunks: {error}.") from error
    if len(offset) != len(grid):
        raise InvalidInputError(
            f"{path!r} has {len(grid)} axes, and was to be shifted along {len(offset)}. Give one "
            "number of chunks for each axis.",
            path=path,
        )
    refs = await workspace.refs_of(state)
    changes = await workspace.assets.compute(
        lambda: shifted(refs, offset, grid), size_bytes=len(refs) * _BYTES_PER_REF
    )
    _finish(workspace, path, state, changes)


async def reindex(
    workspace: Workspace,
    path: str,
    forward: MoveChunk | MoveChunks,
    backward: MoveChunk | MoveChunks | None,
    *,
    vectorized: bool,
) -> None:
    """Move chunks of an array to where a function says; see ``Session.reindex_array``."""
    state = _begin(workspace, path)
    refs = await workspace.refs_of(state)
    ahead = _rows_function(forward, path, vectorized=vectorized)
    back = None if backward is None else _rows_function(backward, path, vectorized=vectorized)
    _finish(workspace, path, state, reindexed(refs, ahead, back, _grid(state.node), path))


def shifted(refs: ChunkRefs, offset: Sequence[int], grid: Coordinates) -> ChunkRefs:
    """Return the references to set and delete that move chunks by ``offset`` along each axis."""
    places = refs.coords.astype(np.int64) + np.array(offset, np.int64)
    # Places that leave the grid are dropped, as by the official engine.
    stay = _inside(places, grid)
    # Every old place is deleted, and then every new one is set: of rows with equal coordinates the
    # last one counts, so a chunk that comes to the old place of another is there.
    gone = ChunkRefs.build(refs.coords, Kind.DELETED)
    return ChunkRefs.concat([gone, _placed(refs, stay, places)]).sort()


def reindexed(
    refs: ChunkRefs,
    forward: Callable[[_Rows], _Rows],
    backward: Callable[[_Rows], _Rows] | None,
    grid: Coordinates,
    path: str,
) -> ChunkRefs:
    """Return the references to set and delete that move chunks to where ``forward`` says.

    Both functions return a row of coordinates for each row, a negative one for no place.

    Raises:
        InvalidCoordinatesError: a place lies outside of the grid.
    """
    here = refs.coords.astype(np.int64)
    places = forward(here)
    goes = (places >= 0).all(axis=1)
    wrong = goes & ~_inside(places, grid)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidCoordinatesError(
            f"Chunk {tuple(here[row].tolist())} of {path!r} was to be moved to "
            f"{tuple(places[row].tolist())}, outside of the array's grid of {grid} chunks. "
            "Nothing was moved. Return None to leave a chunk where it is, or resize the array.",
            path=path,
        )
    moved = _placed(refs, goes, places).sort()
    if backward is None:
        return moved
    left = refs.coords[~rows_in(refs.coords, moved.coords)]
    sources = backward(left.astype(np.int64))
    # Bounded before the cast, which would take a number beyond 32 bits for another place.
    known = (sources >= 0).all(axis=1) & (sources < _FAR).all(axis=1)
    known[known] = rows_in(sources[known].astype(np.uint32), refs.coords)
    return ChunkRefs.concat([ChunkRefs.build(left[~known], Kind.DELETED), moved]).sort()


def _placed(refs: ChunkRefs, rows: npt.NDArray[np.bool_], places: _Rows) -> ChunkRefs:
    """Return some references with other coordinates."""
    return replace(refs.take(rows), coords=places[rows].astype(np.uint32))


def _inside(places: _Rows, grid: Coordinates) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.all(
        (places >= 0) & (places < np.array(grid, np.int64)), axis=1
    )
    return found


def _rows_function(
    function: MoveChunk | MoveChunks, path: str, *, vectorized: bool
) -> Callable[[_Rows], _Rows]:
    """Return a function of rows that checks the results of the user's function."""

    def at_once(rows: _Rows) -> _Rows:
        answer = np.asarray(cast("MoveChunks", function)(rows.copy()))
        if answer.shape != rows.shape or answer.dtype.kind not in "iu":
            raise InvalidInputError(
                f"The function that reindexes {path!r} returned an array of {answer.dtype} with "
                f"shape {answer.shape}; it must return integers with shape {rows.shape}."
            )
        clipped: _Rows = np.clip(answer, None, _FAR).astype(np.int64)
        return clipped

    def one_by_one(rows: _Rows) -> _Rows:
        answers = np.full(rows.shape, -1, np.int64)
        for number, row in enumerate(rows.tolist()):
            place = cast("MoveChunk", function)(row)
            if place is not None:
                answers[number] = _coordinates(place, rows.shape[1], path)
        return answers

    return at_once if vectorized else one_by_one


def _coordinates(place: Any, rank: int, path: str) -> list[int]:
    """Return the result of a user's function as coordinates; far ones become beyond any grid."""
    try:
        numbers = [min(_FAR, index(value)) for value in place]
    except TypeError as error:
        raise _no_coordinates(place, rank, path) from error
    if len(numbers) != rank or min(numbers, default=0) < 0:
        raise _no_coordinates(place, rank, path)
    return numbers


def _no_coordinates(place: object, rank: int, path: str) -> InvalidInputError:
    return InvalidInputError(
        f"The function that reindexes {path!r} returned {place!r:.200}; it must return {rank} "
        "coordinates of a chunk, none negative, or None.",
        path=path,
    )


def _begin(workspace: Workspace, path: str) -> ArrayState:
    """Return the array's state, if its chunks can be moved."""
    with workspace.lock:
        workspace.check_writable()
        state = workspace.array_state(path)
    grid = document_of(state.node).get("chunk_grid")
    name = grid.get("name") if is_object(grid) else None
    if name != "regular":
        raise InvalidInputError(
            f"{path!r} has a chunk grid of kind {name!r:.100}. Only the chunks of a regular grid "
            "can be moved: those of others differ in size by their place.",
            path=path,
        )
    return state


def _finish(workspace: Workspace, path: str, state: ArrayState, changes: ChunkRefs) -> None:
    """Make the changes, unless the array was changed meanwhile."""
    with workspace.lock:  # held from the check to the change, without an await
        workspace.check_writable()
        node = workspace.tree.get(path)
        known = workspace.changes.chunks.get(state.node.id)
        revision = 0 if known is None else known.revision
        if node != state.node or workspace.base is not state.base or revision != state.revision:
            raise SessionStateError(
                f"{path!r} was changed while its chunks were being moved. Nothing was moved; try "
                "again when nothing else writes the array in this session."
            )
        if len(changes):
            workspace.tree.chunk_changes(state.node).set_many(changes)
            workspace.changes.sources |= {state.base.id}


def _grid(node: Node) -> Coordinates:
    assert node.array is not None  # asked for as an array
    return node.array.grid

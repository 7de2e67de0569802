"""A merge that is half settled, as bytes, so that another process can continue it.

The changes are those of a fork; beside them are the moves, the conflicts, and which of these are
open. Bytes from elsewhere are not trusted: every value is checked, and reading never runs code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ChangeSet, Deleted, WorkingTree
from icechunk_async.engine.changes.detect import Conflict, ConflictKind
from icechunk_async.engine.changes.merge import check_fits
from icechunk_async.engine.changes.moves import Moves
from icechunk_async.engine.changes.wire import (
    ForkState,
    Parcel,
    decode_fork,
    encode_fork,
    list_of,
    rows_of,
    table_of,
    typed,
)
from icechunk_async.engine.history.diff import Diff
from icechunk_async.errors import (
    FormatError,
    InvalidMoveError,
    NodeExistsError,
    NodeNotFoundError,
)
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.snapshot import Nodes

__all__ = ["PendingState", "decode_pending", "encode_pending", "fitting"]

_PARCEL: Final = Parcel(b"ICAMERGE", 1, "pending merge")
# The changes travel as those of a fork do; a merge is no session's.
_NO_SESSION: Final = bytes(12)
_PATH_SETS: Final = (
    "new_groups",
    "new_arrays",
    "deleted_groups",
    "deleted_arrays",
    "updated_groups",
    "updated_arrays",
)


@dataclass(frozen=True, slots=True)
class PendingState:
    """The part of a pending merge that travels."""

    branch: str
    """Where it is to be committed."""
    base_id: SnapshotId
    source_id: SnapshotId
    target_id: SnapshotId
    """The tip of the branch when it began, which the changes are against."""
    changes: ChangeSet
    """Those of the merge, and what was written to settle conflicts."""
    message: str
    diff: Diff
    """The changes of the merge when it began."""
    conflicts: tuple[Conflict, ...]
    open: frozenset[int]
    """The numbers of the conflicts that are not settled."""


def encode_pending(state: PendingState) -> bytes:
    """Return the bytes of a pending merge. Cost: some 12 to 25 bytes a chunk."""
    changes, diff = state.changes, state.diff
    document: dict[str, object] = {
        "branch": state.branch,
        "base": bytes(state.base_id),
        "source": bytes(state.source_id),
        "message": state.message,
        "fork": encode_fork(ForkState(_NO_SESSION, state.target_id, changes)),
        "moves": [list(it) for it in changes.moves.requested],
        "diff": {
            **{name: sorted(getattr(diff, name)) for name in _PATH_SETS},
            "chunks": [[path, *_rows_to(it)] for path, it in sorted(diff.updated_chunks.items())],
            "moved": [list(it) for it in diff.moved_nodes],
        },
        "conflicts": [
            [
                it.kind.name,
                it.path,
                None if it.node_id is None else bytes(it.node_id),
                *_rows_to(np.array(it.coords or np.empty((0, 0)), np.uint32)),
            ]
            for it in state.conflicts
        ],
        "open": sorted(state.open),
    }
    return _PARCEL.pack(document)


def decode_pending(data: bytes | memoryview) -> PendingState:
    """Read the bytes of a pending merge; its moves are only requested yet, see `fitting`.

    Raises:
        FormatError: they are damaged, hostile, or of a newer version of this library.
    """
    return _PARCEL.unpack(data, _state)


def fitting(state: PendingState, base: Nodes, spec_version: int) -> ChangeSet:
    """Return the changes of a merge that was read from bytes, made on the nodes of its target.

    Raises:
        FormatError: no merge can have made them there.
    """
    changes = state.changes.copy()
    # Made again on the target's nodes, one after the other: what moves with what is worked out
    # here, and not believed.
    moves, created = Moves(), set(changes.new)
    try:
        for source, target in changes.moves.requested:
            moves.add(base, source, target, created=created)
    except (NodeExistsError, NodeNotFoundError, InvalidMoveError) as error:
        raise FormatError(f"A pending merge moves what cannot be moved: {error}") from error
    changes.moves = moves
    moved = WorkingTree(base, ChangeSet(moves=moves)).edited()
    # Where a node is now follows from its id. A path from bytes might name another node.
    deleted = {
        node_id: Deleted(moved.path_of(node_id) or gone.path, gone.is_array)
        for node_id, gone in changes.deleted.items()
    }
    check_fits(replace(changes, deleted=deleted, moves=Moves()), moved, spec_version)
    return changes


def _state(document: dict[str, object]) -> PendingState:
    fork = decode_fork(typed(document["fork"], bytes))
    fork.changes.moves = Moves(_pairs(document["moves"]))
    conflicts = tuple(_conflict(*row) for row in rows_of(document["conflicts"], 6))
    numbers = frozenset(typed(it, int) for it in list_of(document["open"]))
    if any(not 0 <= it < len(conflicts) for it in numbers):
        raise FormatError("A pending merge has a conflict open that it does not list.")
    return PendingState(
        typed(document["branch"], str),
        SnapshotId(typed(document["base"], bytes)),
        SnapshotId(typed(document["source"], bytes)),
        fork.base_id,
        fork.changes,
        typed(document["message"], str),
        _diff(table_of(document["diff"])),
        conflicts,
        numbers,
    )


def _diff(document: dict[str, object]) -> Diff:
    sets = {name: frozenset(map(_path, list_of(document[name]))) for name in _PATH_SETS}
    chunks = {
        _path(path): _rows_of(count, rank, data)
        for path, count, rank, data in rows_of(document["chunks"], 4)
    }
    moved = tuple((_path(one), _path(other)) for one, other in _pairs(document["moved"]))
    return Diff(**sets, updated_chunks=chunks, moved_nodes=moved)


def _conflict(kind: object, path: object, node_id: object, *rows: object) -> Conflict:
    count, rank, data = rows
    coords: list[list[int]] = _rows_of(count, rank, data).tolist()
    return Conflict(
        ConflictKind[typed(kind, str)],
        _path(path),
        tuple(tuple(row) for row in coords),
        None if node_id is None else NodeId(typed(node_id, bytes)),
    )


def _rows_to(coords: npt.NDArray[np.uint32]) -> tuple[int, int, bytes]:
    """Return coordinates as their number, their rank, and their numbers."""
    return len(coords), coords.shape[1], np.ascontiguousarray(coords, "<u4").tobytes()


def _rows_of(count: object, rank: object, data: object) -> npt.NDArray[np.uint32]:
    rows, axes, numbers = typed(count, int), typed(rank, int), typed(data, bytes)
    # Without axes an array has one chunk, so the bytes bound the number of rows.
    if not 0 <= axes <= MAX_RANK or not 0 <= rows <= max(1, len(numbers)):
        raise FormatError(f"A pending merge holds {rows} chunks of {axes} axes, which cannot be.")
    if len(numbers) != 4 * rows * axes:
        raise FormatError("A pending merge holds other coordinates than it says.")
    return np.frombuffer(numbers, "<u4").reshape(rows, axes).astype(np.uint32)


def _pairs(value: object) -> list[tuple[str, str]]:
    return [(_path(one), _path(other)) for one, other in rows_of(value, 2)]


def _path(value: object) -> str:
    path = typed(value, str)
    if not path.startswith("/") or check_path(path) != path:
        raise FormatError(f"A pending merge names a node {path[:100]!r}, which is no path.")
    return path

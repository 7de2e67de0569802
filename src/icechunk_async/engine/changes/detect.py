"""Detect conflicts between the changes of a session and a newer commit.

Pure: takes a change set, a transaction log and a snapshot, and returns conflicts.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.manifest.row_index import rows_in
from icechunk_async.format.paths import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.snapshot import Nodes, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["Conflict", "ConflictKind", "clears", "detect_conflicts"]


class ConflictKind(IntEnum):
    """The kinds of conflicts; the numbers are the official engine's."""

    NEW_NODE_CONFLICTS_WITH_EXISTING_NODE = 1
    NEW_NODE_IN_INVALID_GROUP = 2
    ZARR_METADATA_DOUBLE_UPDATE = 3
    ZARR_METADATA_UPDATE_OF_DELETED_ARRAY = 4
    ZARR_METADATA_UPDATE_OF_DELETED_GROUP = 5
    CHUNK_DOUBLE_UPDATE = 6
    CHUNKS_UPDATED_IN_DELETED_ARRAY = 7
    CHUNKS_UPDATED_IN_UPDATED_ARRAY = 8
    DELETE_OF_UPDATED_ARRAY = 9
    DELETE_OF_UPDATED_GROUP = 10
    MOVE_OPERATION_CANNOT_BE_REBASED = 11


@dataclass(frozen=True, slots=True)
class Conflict:
    """One clash between this session and a newer commit."""

    kind: ConflictKind
    path: str
    """The node, as this session knows it; of a node in an invalid group, the array above it."""
    coords: tuple[tuple[int, ...], ...] = ()
    """For chunk conflicts: the chunks that both changed."""
    node_id: NodeId | None = field(default=None, repr=False)


def detect_conflicts(
    ours: WorkingTree,
    log: TransactionLog,
    theirs: Snapshot,
    *,
    path_of: Callable[[NodeId], str | None] | None = None,
) -> list[Conflict]:
    """Return every conflict between a session and one newer commit.

    Args:
        ours: the session's hierarchy and changes.
        log: of the newer commit, or of one that expired before it.
        theirs: the newer commit's snapshot.
        path_of: returns the path of a node that ours may have changed and others too; by default
            that in the session's base.
    """
    if log.moves:
        # Told alone, as by the official engine: ids of the log stand for other paths than ours, so
        # further conflicts would name wrong nodes.
        first = log.moves[0]
        return [Conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, first.source)]
    changes = ours.changes
    blocked = changes.moves.obstacle(theirs.nodes)
    if blocked is not None:
        return [Conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, blocked)]
    return [
        *_new_nodes(changes, theirs.nodes),
        *_updated_nodes(changes, log),
        *_chunks(ours, log, path_of or ours.base.path_of),
        *_deleted_nodes(changes, log, theirs.nodes),
    ]


def clears(log: TransactionLog, ours: WorkingTree) -> bool:
    """Return whether a log alone shows that a commit clashes with nothing of a session.

    If it does not, `detect_conflicts` decides with the commit's snapshot: a log has no paths, which
    are needed for nodes that the session created, deleted or moved.
    """
    changes = ours.changes
    if log.moves or changes.new or changes.deleted or changes.moves.requested:
        return False
    touched = _chunks(ours, log, ours.base.path_of)
    return not any(_updated_nodes(changes, log)) and not any(touched)


def _new_nodes(changes: ChangeSet, theirs: Nodes) -> Iterator[Conflict]:
    for path, node in changes.new.items():
        existing = theirs.get(path)
        # A node there is theirs, unless it is the one that we deleted; two cannot share a path.
        if existing is not None and existing.id not in changes.deleted:
            kind = ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE
            yield Conflict(kind, path, node_id=node.id)
        for parent in ancestors(path):
            above = theirs.get(parent)
            if above is not None and above.array is not None and above.id not in changes.deleted:
                kind = ConflictKind.NEW_NODE_IN_INVALID_GROUP
                yield Conflict(kind, parent, node_id=node.id)
                break


def _updated_nodes(changes: ChangeSet, log: TransactionLog) -> Iterator[Conflict]:
    # Chunks that they wrote under a document of ours are no conflict, as in the official engine.
    # Those outside of a smaller grid of ours are cut off by `kept_grid`.
    for node_id, node in changes.updated.items():
        if node_id in log.updated_arrays or node_id in log.updated_groups:
            yield Conflict(ConflictKind.ZARR_METADATA_DOUBLE_UPDATE, node.path, node_id=node_id)
        if node_id in log.deleted_arrays:
            kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY
            yield Conflict(kind, node.path, node_id=node_id)
        if node_id in log.deleted_groups:
            kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_GROUP
            yield Conflict(kind, node.path, node_id=node_id)


def _chunks(
    ours: WorkingTree, log: TransactionLog, path_of: Callable[[NodeId], str | None]
) -> Iterator[Conflict]:
    for node_id, changed in ours.changes.chunks.items():
        if changed.is_empty():
            continue
        path = path_of(node_id)
        if path is None:
            continue  # created in this session, so no other session can have changed it
        if node_id in log.deleted_arrays:
            kind = ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY
            yield Conflict(kind, path, node_id=node_id)
        if node_id in log.updated_arrays:
            kind = ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
            yield Conflict(kind, path, node_id=node_id)
        mine = changed.columns().coords
        both = mine[rows_in(mine, log.chunks_of(node_id, changed.rank))]
        if len(both):
            rows: list[list[int]] = both.tolist()
            coords = tuple(tuple(row) for row in rows)
            yield Conflict(ConflictKind.CHUNK_DOUBLE_UPDATE, path, coords, node_id)


def _deleted_nodes(changes: ChangeSet, log: TransactionLog, theirs: Nodes) -> Iterator[Conflict]:
    # Nodes that they created in a group that we delete are no conflict either, and stay without a
    # parent, as in the official engine: the format allows that.
    for node_id, gone in changes.deleted.items():
        now = theirs.get(gone.path)  # another node, if they deleted and recreated it
        for it in {node_id, node_id if now is None else now.id}:
            if gone.is_array and (it in log.updated_arrays or it in log.updated_chunks):
                yield Conflict(ConflictKind.DELETE_OF_UPDATED_ARRAY, gone.path, node_id=node_id)
                break
            if not gone.is_array and it in log.updated_groups:
                yield Conflict(ConflictKind.DELETE_OF_UPDATED_GROUP, gone.path, node_id=node_id)
                break

"""Whether changes of a session and of a newer commit can both stand, and what to do if not.

Detection is pure: a change set, a transaction log and a snapshot in, conflicts out. A solver
decides each conflict; the stock ones follow the official engine's policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.row_index import rows_in
from icechunk_async.repository.paths import ancestors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.snapshot import Nodes, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.repository.changes import ChangeSet, WorkingTree

__all__ = [
    "BasicConflictSolver",
    "Clash",
    "Conflict",
    "ConflictDetector",
    "ConflictKind",
    "ConflictSolver",
    "Resolution",
    "VersionSelection",
    "apply_resolution",
    "detect_conflicts",
]


class ConflictKind(IntEnum):
    """What clashes; the numbers are the official engine's."""

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


class Resolution(Enum):
    """What to do about one conflict."""

    OURS = "ours"
    """Keep this session's change on top of the newer commit."""
    THEIRS = "theirs"
    """Take this session's change back, as far as it clashes."""
    FAIL = "fail"
    """Give up: the rebase fails and reports the conflict."""


@dataclass(frozen=True, slots=True)
class Clash:
    """What a solver is given: one newer commit, and every conflict with it.

    ``base`` is the snapshot that the session stood on, ``theirs`` the newer commit, ``ours``
    the hierarchy as the session sees it.
    """

    conflicts: Sequence[Conflict]
    base: Snapshot
    theirs: Snapshot
    theirs_log: TransactionLog
    ours: WorkingTree


class ConflictSolver(Protocol):
    """Decides conflicts. Any class with this method is one."""

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        """Answer a resolution for each of ``clash.conflicts``, in order.

        What cannot be resolved as asked counts as :attr:`Resolution.FAIL`: only chunk
        conflicts, and deletions of what was updated, can be resolved to ``OURS``; any conflict
        but a move can be resolved to ``THEIRS``.

        Cancellation: the rebase ends where it is; see ``Session.rebase``.
        """
        ...


class ConflictDetector:
    """Accepts no conflict: a rebase succeeds only where nothing clashes."""

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        """Fail every conflict."""
        return [Resolution.FAIL] * len(clash.conflicts)


class VersionSelection(Enum):
    """Which side of a chunk conflict stays."""

    FAIL = "fail"
    USE_OURS = "ours"
    USE_THEIRS = "theirs"


@dataclass(frozen=True, slots=True)
class BasicConflictSolver:
    """The official engine's stock policies; note that by default our chunks replace theirs."""

    on_chunk_conflict: VersionSelection = VersionSelection.USE_OURS
    fail_on_delete_of_updated_array: bool = False
    fail_on_delete_of_updated_group: bool = False

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        """Resolve chunk conflicts and deletions by policy; fail all others."""
        return [self._resolve(conflict.kind) for conflict in clash.conflicts]

    def _resolve(self, kind: ConflictKind) -> Resolution:
        match kind:
            case ConflictKind.CHUNK_DOUBLE_UPDATE:
                return Resolution(self.on_chunk_conflict.value)
            case ConflictKind.DELETE_OF_UPDATED_ARRAY:
                fail = self.fail_on_delete_of_updated_array
            case ConflictKind.DELETE_OF_UPDATED_GROUP:
                fail = self.fail_on_delete_of_updated_group
            case _:
                fail = True
        return Resolution.FAIL if fail else Resolution.OURS


_OURS_POSSIBLE = frozenset(
    {
        ConflictKind.CHUNK_DOUBLE_UPDATE,
        ConflictKind.DELETE_OF_UPDATED_ARRAY,
        ConflictKind.DELETE_OF_UPDATED_GROUP,
    }
)


def detect_conflicts(ours: WorkingTree, log: TransactionLog, theirs: Snapshot) -> list[Conflict]:
    """Answer every conflict between a session and one newer commit.

    Args:
        ours: the session's hierarchy and changes.
        log: what the newer commit, or one that expired before it, touched.
        theirs: the newer commit's snapshot.
    """
    if log.moves:
        first = log.moves[0]
        return [Conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, first.source)]
    changes = ours.changes
    return [
        *_new_nodes(changes, theirs.nodes),
        *_updated_nodes(changes, log),
        *_chunks(ours, log),
        *_deleted_nodes(changes, log, theirs.nodes),
    ]


def _new_nodes(changes: ChangeSet, theirs: Nodes) -> Iterator[Conflict]:
    for path, node in changes.new.items():
        existing = theirs.get(path)
        # Another node than the one we deleted there was made by them; two cannot share a path.
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
    for node_id, node in changes.updated.items():
        if node_id in log.updated_arrays or node_id in log.updated_groups:
            yield Conflict(ConflictKind.ZARR_METADATA_DOUBLE_UPDATE, node.path, node_id=node_id)
        if node_id in log.deleted_arrays:
            kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY
            yield Conflict(kind, node.path, node_id=node_id)
        if node_id in log.deleted_groups:
            kind = ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_GROUP
            yield Conflict(kind, node.path, node_id=node_id)


def _chunks(ours: WorkingTree, log: TransactionLog) -> Iterator[Conflict]:
    for node_id, changed in ours.changes.chunks.items():
        if changed.is_empty():
            continue
        path = ours.base.path_of(node_id)
        if path is None:
            continue  # created in this session; nobody else knows it
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
    for node_id, gone in changes.deleted.items():
        now = theirs.get(gone.path)  # another node, if they deleted it and made it anew
        for it in {node_id, node_id if now is None else now.id}:
            if gone.is_array and (it in log.updated_arrays or it in log.updated_chunks):
                yield Conflict(ConflictKind.DELETE_OF_UPDATED_ARRAY, gone.path, node_id=node_id)
                break
            if not gone.is_array and it in log.updated_groups:
                yield Conflict(ConflictKind.DELETE_OF_UPDATED_GROUP, gone.path, node_id=node_id)
                break


def apply_resolution(ours: WorkingTree, conflict: Conflict, resolution: Resolution) -> bool:
    """Change the session as a solver decided; answer whether that settles the conflict.

    Raises:
        InvalidInputError: the solver answered something else than a resolution.
    """
    match resolution:
        case Resolution.OURS:
            return conflict.kind in _OURS_POSSIBLE
        case Resolution.THEIRS:
            return _take_back(ours, conflict)
        case Resolution.FAIL:
            return False
        case _:
            raise InvalidInputError(
                f"A conflict solver answered {resolution!r}; it must answer a Resolution for "
                "each conflict."
            )


def _take_back(ours: WorkingTree, conflict: Conflict) -> bool:
    """Undo the part of the session's changes that clashes."""
    changes, node_id = ours.changes, conflict.node_id
    if node_id is None:
        return False
    match conflict.kind:
        case ConflictKind.CHUNK_DOUBLE_UPDATE:
            if node_id in changes.chunks:
                changes.chunks[node_id].drop(np.array(conflict.coords, np.uint32))
        case (
            ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE
            | ConflictKind.NEW_NODE_IN_INVALID_GROUP
        ):
            changes.new = {path: it for path, it in changes.new.items() if it.id != node_id}
            changes.chunks.pop(node_id, None)
        case ConflictKind.DELETE_OF_UPDATED_ARRAY | ConflictKind.DELETE_OF_UPDATED_GROUP:
            changes.deleted.pop(node_id, None)
        case (
            ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY
            | ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
        ):
            changes.chunks.pop(node_id, None)
        case ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED:
            return False
        case _:
            changes.updated.pop(node_id, None)
            changes.chunks.pop(node_id, None)
    return True

"""Turn differences into changes that a session can commit on another snapshot. Pure.

Nodes are known by their ids, so that changes follow nodes that were moved on the other side.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.engine.changes.compare import RefChanges, same_refs
from icechunk_async.engine.changes.detect import Conflict, ConflictKind
from icechunk_async.engine.changes.moves import Moves
from icechunk_async.errors import InvalidMoveError, NodeExistsError, NodeNotFoundError
from icechunk_async.format.manifest.row_index import rows_in
from icechunk_async.format.paths import ancestors
from icechunk_async.format.zarr_document import same_chunk_format

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.engine.versions.differences import Differences
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.snapshot import Node, Nodes, Snapshot

__all__ = ["Transported", "follows", "transport"]


@dataclass(slots=True)
class Transported:
    """Changes for another snapshot, and what stands in their way already."""

    changes: ChangeSet
    conflicts: list[Conflict] = field(default_factory=list[Conflict])
    """Those that have nothing to do with chunks or documents: places that are taken."""


def transport(
    found: Differences,
    target: Snapshot,
    theirs: Differences | None,
    *,
    leave_out_equal: bool = True,
) -> Transported:
    """Return the changes of some differences as changes on another snapshot.

    What both sides did alike is left out: equal documents, equal references, nodes that both
    deleted, and groups that both created with one document. An array that both created with one
    document becomes the one of ``target``.

    Args:
        found: the changes, from the common base.
        target: the snapshot that gets them.
        theirs: from the common base to ``target``; None if that is the base.
        leave_out_equal: leave out what both did alike.
    """
    return _Transport(found, target, theirs, leave_out_equal=leave_out_equal).run()


class _Transport:
    def __init__(
        self,
        found: Differences,
        target: Snapshot,
        theirs: Differences | None,
        *,
        leave_out_equal: bool,
    ) -> None:
        self._leave_out_equal = leave_out_equal
        self._found = found
        self._target = target
        self._nodes: Nodes = target.nodes
        nothing: dict[NodeId, RefChanges] = {}
        self._their_chunks = nothing if theirs is None else theirs.chunks
        self._changes = ChangeSet(sources=frozenset({found.after.id}))
        self._conflicts: list[Conflict] = []
        self._twins: dict[NodeId, NodeId] = {}
        """Arrays that both created: the id on this side, and that of the target."""

    def run(self) -> Transported:
        self._move()
        for node in self._found.deleted:
            self._delete(node)
        for node in self._found.created:
            self._create(node)
        for old, new in self._found.updated:
            self._update(old, new)
        for node_id, changes in self._found.chunks.items():
            self._write(node_id, changes)
        self._find_orphans()
        return Transported(self._changes, self._conflicts)

    def _move(self) -> None:
        """Move whole subtrees, the highest first, to where they are on this side."""
        moves, created = Moves(), {node.path for node in self._found.created}
        # From above, so that what a group takes along is in its place when its children are looked
        # at.
        pairs = sorted(self._found.moved, key=lambda it: (it[1].path.count("/"), it[1].path))
        after = self._found.after.nodes
        for old, new in pairs:
            origin = self._nodes.path_of(new.id)
            with_group = follows(old.path, new.path, self._found.before.nodes, after)
            if origin is None:
                if not with_group:
                    self._conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, old.path, new.id)
                continue
            now = moves.place(origin)
            # The target moved it there as well, or it came along with its group.
            if now == new.path:
                continue
            if origin != old.path and not self._followed(old.path, origin):
                if not with_group:  # else where the target put the node itself counts
                    self._conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, origin, new.id)
                continue
            try:
                moves.add(self._nodes, now, new.path, created=created)
            except (NodeExistsError, NodeNotFoundError, InvalidMoveError):
                self._conflict(ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED, now, new.id)
        self._changes.moves = moves

    def _followed(self, old: str, now: str) -> bool:
        """Return whether a node is elsewhere in the target only because its group moved there."""
        return follows(old, now, self._found.before.nodes, self._nodes)

    def _delete(self, node: Node) -> None:
        path, is_array = self._nodes.path_of(node.id), node.array is not None
        if path is None:
            return  # both deleted it
        if path != node.path and not self._followed(node.path, path):
            kind = ConflictKind.DELETE_OF_UPDATED_GROUP
            if is_array:
                kind = ConflictKind.DELETE_OF_UPDATED_ARRAY
            self._conflict(kind, path, node.id)
        self._changes.deleted[node.id] = Deleted(path, is_array)

    def _place(self, path: str) -> str:
        """Return where a path of this side is on the target: below the same group."""
        for parent in ancestors(path):
            node = self._found.after.nodes.get(parent)
            origin = None if node is None else self._nodes.path_of(node.id)
            if origin is not None:
                stem = self._changes.moves.place(origin).rstrip("/")
                return stem + "/" + path[len(parent) :].lstrip("/")
        return path

    def _create(self, node: Node) -> None:
        there = self._nodes.path_of(node.id)
        if there is not None:  # both have it, from a commit picked or a base that expired
            self._create_again(node, there)
            return
        place = self._place(node.path)
        theirs_at = self._nodes.get(place)
        gone = theirs_at is not None and theirs_at.id in self._changes.deleted
        if theirs_at is not None and not gone and theirs_at.user_data == node.user_data:
            if theirs_at.array is not None and node.array is not None:
                self._twins[node.id] = theirs_at.id
                return
            if theirs_at.array is None and node.array is None:
                return
        self._changes.new[place] = _bare(node, place)

    def _create_again(self, node: Node, there: str) -> None:
        """Report another document: nobody knows which side changed what the other one has."""
        theirs, path = self._nodes[there], self._changes.moves.place(there)
        if theirs.user_data == node.user_data:
            return
        self._changes.updated[node.id] = _bare(node, path)
        self._conflict(ConflictKind.ZARR_METADATA_DOUBLE_UPDATE, path, node.id)
        if theirs.array is None or node.array is None:
            return
        chunks = self._their_chunks.get(node.id)
        if chunks is not None and not same_chunk_format(theirs.user_data, node.user_data):
            self._clash_of_chunks(node.id, path, chunks.coords)
        self._reshape(node.id, theirs.array.grid, node.array.grid)

    def _update(self, old: Node, new: Node) -> None:
        there = self._nodes.path_of(new.id)
        theirs = None if there is None else self._nodes[there]
        if self._leave_out_equal and theirs is not None and theirs.user_data == new.user_data:
            return
        path = old.path if there is None else self._changes.moves.place(there)
        self._changes.updated[new.id] = _bare(new, path)
        if old.array is None or new.array is None:
            return
        chunks = self._their_chunks.get(new.id)
        if chunks is not None and not same_chunk_format(old.user_data, new.user_data):
            self._clash_of_chunks(new.id, path, chunks.coords)
        if self._reshape(new.id, old.array.grid, new.array.grid):
            self._check_cut(new.id, path, new.array.grid)

    def _reshape(self, node_id: NodeId, before: Coordinates, grid: Coordinates) -> bool:
        """Drop chunks outside of a smaller grid; return whether it is smaller along an axis."""
        mine = ArrayChanges(len(grid))
        smaller = len(before) == len(grid) and any(a < b for a, b in zip(grid, before, strict=True))
        if smaller:
            mine.shrink(grid)
        elif len(before) != len(grid):
            # Nothing of the old chunks counts under another number of axes.
            mine.kept_grid = (0,) * len(grid)
        else:
            return False
        self._changes.chunks[node_id] = mine
        return smaller

    def _check_cut(self, node_id: NodeId, path: str, grid: Coordinates) -> None:
        """Report chunks that the target gained where this side cut the array off."""
        theirs = self._their_chunks.get(node_id)
        if theirs is None or theirs.after.rank != len(grid):
            return
        # Appended by one side and cut off by the other: merged silently, the chunks would be gone.
        lost = theirs.after.coords[~theirs.after.inside(tuple((0, size) for size in grid))]
        if len(lost):
            self._clash_of_chunks(node_id, path, lost)

    def _clash_of_chunks(self, node_id: NodeId, path: str, coords: npt.NDArray[np.uint32]) -> None:
        rows: list[list[int]] = coords.tolist()
        kind = ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY
        self._conflict(kind, path, node_id, tuple(tuple(row) for row in rows))

    def _write(self, node_id: NodeId, changes: RefChanges) -> None:
        target_id = self._twins.get(node_id, node_id)
        theirs = self._their_chunks.get(target_id)
        if theirs is not None and self._leave_out_equal:
            changes = without_equal(changes, theirs)
        if not changes.is_empty():
            # After `_reshape`, which may have noted the smaller grid in it already.
            mine = self._changes.chunks.setdefault(target_id, ArrayChanges(changes.after.rank))
            mine.set_many(changes.updates())

    def _find_orphans(self) -> None:
        """Report nodes that would be left without the group that they are in."""
        changes = self._changes
        # The official engine looks for neither, and leaves nodes without the group above them.
        for node_id, gone in changes.deleted.items():
            if gone.is_array:
                continue
            for path in self._nodes.below(gone.path):
                if (
                    self._nodes[path].id not in changes.deleted
                    and changes.moves.place(path) == path
                ):
                    self._conflict(ConflictKind.DELETE_OF_UPDATED_GROUP, gone.path, node_id)
                    break
        for path, node in changes.new.items():
            parent = next(iter(ancestors(path)), None)
            if parent is not None and not self._has_group(parent):
                self._conflict(ConflictKind.NEW_NODE_IN_INVALID_GROUP, parent, node.id)

    def _has_group(self, path: str) -> bool:
        """Return whether a path is a group after the changes, or was not one before either."""
        if path in self._changes.new:
            return True
        if self._found.after.nodes.get(path) is None:  # a hierarchy without that group's document
            return True
        node = self._changes.moves.find(self._nodes, path)
        return node is not None and node.id not in self._changes.deleted

    def _conflict(
        self,
        kind: ConflictKind,
        path: str,
        node_id: NodeId,
        coords: tuple[Coordinates, ...] = (),
    ) -> None:
        self._conflicts.append(Conflict(kind, path, coords, node_id))


def without_equal(changes: RefChanges, theirs: RefChanges) -> RefChanges:
    """Leave out what another side did alike: the same references set, the same chunks deleted."""
    mine, others = changes.updates(), theirs.updates()
    both = np.flatnonzero(rows_in(mine.coords, others.coords))
    if not len(both) or mine.rank != others.rank:
        return changes
    at = np.flatnonzero(rows_in(others.coords, mine.coords))  # in the same order: both ascend
    alike = same_refs(mine, both, others, at)
    if not alike.any():
        return changes
    return changes.without(mine.coords[both[alike]])


def follows(old: str, now: str, before: Nodes, after: Nodes) -> bool:
    """Return whether a node changed its path only because a group above it was moved."""
    for parent in ancestors(old):
        node = before.get(parent)
        place = None if node is None else after.path_of(node.id)
        # The nearest group that moved decides: from `/g` to `/h`, so `/g/x/a` follows to `/h/x/a`.
        if place is not None and place != parent:
            return now == place.rstrip("/") + "/" + old[len(parent) :].lstrip("/")
    return False


def _bare(node: Node, path: str) -> Node:
    """Return a node at a path, without the manifests that it has on its own side."""
    # Its chunks are among the changes; a commit writes their manifests.
    array = None if node.array is None else replace(node.array, manifests=())
    return replace(node, path=path, array=array)

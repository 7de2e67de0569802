"""What a session changed, and the hierarchy as it looks with those changes.

Pure: values in, values out, nothing awaits. The session guards it with a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from icechunk_async.errors import NodeExistsError
from icechunk_async.format.ids import NodeId
from icechunk_async.format.snapshot import Node
from icechunk_async.format.transaction_log import TransactionLog
from icechunk_async.repository.chunk_changes import ArrayChanges
from icechunk_async.repository.moves import Moves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.snapshot import ArrayData, Nodes

__all__ = ["ChangeSet", "Deleted", "WorkingTree"]


@dataclass(frozen=True, slots=True)
class Deleted:
    """A node of the base snapshot that was deleted."""

    path: str
    is_array: bool


@dataclass(slots=True)
class ChangeSet:
    """The changes of one session against its base snapshot."""

    new: dict[str, Node] = field(default_factory=dict[str, Node])
    """Created nodes by path."""
    updated: dict[NodeId, Node] = field(default_factory=dict[NodeId, Node])
    """Nodes of the base with another metadata document; their manifests are the base's."""
    deleted: dict[NodeId, Deleted] = field(default_factory=dict[NodeId, Deleted])
    chunks: dict[NodeId, ArrayChanges] = field(default_factory=dict[NodeId, ArrayChanges])
    moves: Moves = field(default_factory=Moves)
    """Of a session that only moves; all else is empty then."""
    sources: frozenset[SnapshotId] = frozenset()
    """Bases whose references went into ``chunks``: while these are known, what they need stays."""

    def copy(self) -> ChangeSet:
        """Answer a change set that can be edited without touching this one."""
        chunks = {node_id: changes.copy() for node_id, changes in self.chunks.items()}
        new, updated, deleted = dict(self.new), dict(self.updated), dict(self.deleted)
        return ChangeSet(new, updated, deleted, chunks, self.moves.copy(), self.sources)

    def is_empty(self) -> bool:
        """Tell whether committing would change nothing."""
        touched = self.new or self.updated or self.deleted or self.moves.requested
        return not touched and all(changes.is_empty() for changes in self.chunks.values())

    def same_as(self, earlier: ChangeSet) -> bool:
        """Tell whether nothing changed since ``earlier`` was copied from these changes."""
        revisions = [
            {node_id: it.revision for node_id, it in changes.chunks.items()}
            for changes in (self, earlier)
        ]
        return revisions[0] == revisions[1] and (self.new, self.updated, self.deleted) == (
            earlier.new,
            earlier.updated,
            earlier.deleted,
        )

    def log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Answer the transaction log of these changes (spec, "Transaction logs")."""
        nodes = self.new.values()
        updated = self.updated.values()
        deleted = self.deleted.items()
        return TransactionLog(
            snapshot_id,
            new_groups=frozenset(node.id for node in nodes if node.array is None),
            new_arrays=frozenset(node.id for node in nodes if node.array is not None),
            deleted_groups=frozenset(it for it, gone in deleted if not gone.is_array),
            deleted_arrays=frozenset(it for it, gone in deleted if gone.is_array),
            updated_groups=frozenset(node.id for node in updated if node.array is None),
            updated_arrays=frozenset(node.id for node in updated if node.array is not None),
            updated_chunks={
                node_id: changes.columns().coords
                for node_id, changes in self.chunks.items()
                if not changes.is_empty()
            },
            moves=self.moves.net(),
        )


class WorkingTree:
    """A base snapshot's nodes overlaid with a change set, which its methods edit."""

    def __init__(self, base: Nodes, changes: ChangeSet) -> None:
        """Look at ``base`` through ``changes``."""
        self.base = base
        self.changes = changes

    def get(self, path: str) -> Node | None:
        """Answer the node at a path as the session sees it."""
        created = self.changes.new.get(path)
        if created is not None:
            return created
        node = self.changes.moves.find(self.base, path)
        if node is None or node.id in self.changes.deleted:
            return None
        return self.changes.updated.get(node.id, node)

    def base_node(self, node: Node) -> Node | None:
        """Answer the node of the base snapshot that ``node`` is, changed or not."""
        origin = self.changes.moves.origin(node.path)
        found = None if origin is None else self.base.get(origin)
        return found if found is not None and found.id == node.id else None

    def paths(self, below: str | None = None) -> list[str]:
        """Answer the paths of all nodes, or of all descendants of ``below``, in order."""
        changes = self.changes
        found = changes.moves.paths(self.base, below)
        if changes.deleted:
            found = [path for path in found if self.base[path].id not in changes.deleted]
        prefix = "" if below is None else below.rstrip("/") + "/"
        created = [path for path in changes.new if path.startswith(prefix) and path != below]
        return sorted(found + created) if created else found

    def child_names(self, path: str) -> list[str]:
        """Answer the names directly below a path, also of parents that are not nodes."""
        paths = self.paths(path)
        prefix = path.rstrip("/") + "/"
        names: list[str] = []
        seen: set[str] = set()
        index = 0
        while index < len(paths):
            name, slash, _ = paths[index][len(prefix) :].partition("/")
            if name not in seen:
                seen.add(name)
                names.append(name)
            if slash:  # jump over the whole subtree: "0" is the character after "/"
                index = bisect_left(paths, f"{prefix}{name}0", index)
            else:
                index += 1
        return names

    def set_node(self, path: str, user_data: bytes, array: ArrayData | None) -> None:
        """Create a node or replace its metadata document; an equal document changes nothing.

        Raises:
            NodeExistsError: a node of the other type is there.
        """
        node = self.get(path)
        changes = self.changes
        if node is None:
            changes.new[path] = Node(NodeId.random(), path, user_data, array)
            return
        if (node.array is None) != (array is None):
            kinds = ("group", "array") if node.array is None else ("array", "group")
            raise NodeExistsError(
                f"There is a {kinds[0]} at {path!r}, so no {kinds[1]} can be written there. "
                "Delete it first.",
                path=path,
            )
        if node.user_data == user_data:
            return
        if array is not None:
            self._reshape(node, array)
        changed = replace(node, user_data=user_data, array=array)
        if path in changes.new:
            changes.new[path] = changed
        else:
            changes.updated[node.id] = changed

    def _reshape(self, node: Node, array: ArrayData) -> None:
        """Forget chunks outside of a smaller grid, or all if the number of axes changes."""
        assert node.array is not None
        old, new = node.array.grid, array.grid
        if old == new:
            return
        if len(old) != len(new):
            changes = ArrayChanges(len(new))
            changes.kept_grid = (0,) * len(new)
            self.changes.chunks[node.id] = changes
        elif any(a > b for a, b in zip(old, new, strict=True)):
            self.chunk_changes(node).shrink(new)

    def delete_node(self, path: str) -> None:
        """Delete an array, or a group and everything below it; a missing node is no error."""
        node = self.get(path)
        if node is None:
            return
        doomed = [path, *self.paths(path)] if node.array is None else [path]
        for target in doomed:
            self._delete_one(target)

    def _delete_one(self, path: str) -> None:
        node = self.get(path)
        assert node is not None
        changes = self.changes
        changes.chunks.pop(node.id, None)
        if changes.new.pop(path, None) is None:
            changes.updated.pop(node.id, None)
            changes.deleted[node.id] = Deleted(path, node.array is not None)

    def chunk_changes(self, node: Node) -> ArrayChanges:
        """Answer the editable chunk changes of an array."""
        assert node.array is not None
        changes = self.changes.chunks.get(node.id)
        if changes is None:
            changes = self.changes.chunks[node.id] = ArrayChanges(len(node.array.dimensions))
        return changes

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes as the session sees them, in order of paths."""
        for path in self.paths():
            node = self.get(path)
            assert node is not None
            yield node

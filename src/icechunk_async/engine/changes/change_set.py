"""The changes of a session, and the hierarchy with those changes.

Single changes are kept by coordinates until there are some thousand, which then become columns.
Changes made in bulk stay the columns that they were given as. The latest change of a chunk counts.

Pure: values in, values out, nothing awaits. The session guards it with a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import field, replace
from itertools import count
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.moves import Moves
from icechunk_async.errors import NodeExistsError
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.snapshot import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import ArrayData, Nodes
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["ArrayChanges", "ChangeSet", "Deleted", "WorkingTree", "settle_together"]


# One counter for every session and thread of the process. `next` of it is one step of the
# interpreter, so that no two states of changes ever get the same number.
_REVISIONS: Final = count(1)
_MAX_SINGLES: Final = 4096
"""The most single changes kept: an object for each takes ten times the memory of a row, and
what is in columns already is not left to the commit."""
_FEWEST_TOGETHER: Final = 4
"""Arrays whose changes become columns together; of fewer it takes longer than one by one."""


class ArrayChanges:
    """Changed chunks of an array of ``rank`` axes. Not safe for concurrent use by itself."""

    def __init__(self, rank: int) -> None:
        """Begin without changes."""
        self.rank = rank
        self.kept_grid: Coordinates | None = None
        """Chunks of the base snapshot outside of this grid are gone: the array was shrunk."""
        self.revision = 0
        """Identifies this state among all states of all changes, so that manifests made from it are
        not taken for those of another state; 0 while nothing changed."""
        self.journal: ArrayChanges | None = None
        """The chunks that were set or deleted since somebody began to note it, for those who keep a
        record elsewhere; None if nobody did, or if changes were undone since."""
        self._singles: dict[Coordinates, ChunkRef | None] = {}
        self._blocks: list[ChunkRefs] = []  # oldest first, all older than the singles

    def copy(self) -> ArrayChanges:
        """Return changes that can be edited without touching these; columns are shared."""
        twin = ArrayChanges(self.rank)
        twin.kept_grid, twin.revision = self.kept_grid, self.revision
        twin._singles, twin._blocks = dict(self._singles), list(self._blocks)
        twin.journal = None if self.journal is None else self.journal.copy()
        return twin

    def taken_journal(self) -> ArrayChanges | None:
        """Return the changes since the last call, and note from now on; None: nobody knows."""
        taken, self.journal = self.journal, ArrayChanges(self.rank)
        return taken

    def is_empty(self) -> bool:
        """Return whether no chunk was set or deleted."""
        return not self._singles and not self._blocks

    def count(self) -> int:
        """Count the chunks that were set or deleted, some twice if they were changed again."""
        return len(self._singles) + sum(map(len, self._blocks))

    def set(self, coords: Coordinates, ref: ChunkRef | None) -> None:
        """Set one chunk; None deletes it.

        Cost: about half a microsecond, most of it in the calls that make columns of thousands.
        """
        if len(self._singles) >= _MAX_SINGLES:
            self._settle()
        self._singles[coords] = ref
        self.revision = next(_REVISIONS)
        if self.journal is not None:
            self.journal.set(coords, ref)

    def set_many(self, refs: ChunkRefs) -> None:
        """Set or delete many chunks; of rows with equal coordinates the last one counts.

        Cost: in all, the logarithm of the number of calls for each chunk: blocks are joined when
        the newer has grown as large as the older, so there are few.
        """
        if len(refs) == 0:
            return
        # What was set one by one is older than the new block, and `find` looks at blocks from the
        # newest to the oldest.
        self._settle()
        self._push(refs.sort())
        self.revision = next(_REVISIONS)
        if self.journal is not None:
            self.journal.set_many(refs)

    def find(self, coords: Coordinates) -> tuple[bool, ChunkRef | None]:
        """Return whether a chunk was changed, and its reference (None: deleted)."""
        if coords in self._singles:
            return True, self._singles[coords]
        for block in reversed(self._blocks):
            row = block.find(coords)
            if row is not None:
                return True, block.ref(row)
        return False, None

    def columns(self) -> ChunkRefs:
        """Return all changes, deletions included, in ascending order of coordinates."""
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        self._settle()
        if not self._blocks:
            return ChunkRefs.empty(self.rank)
        # The joined block is kept: the log, the manifests and each look for conflicts ask for it
        # again.
        if len(self._blocks) > 1:
            self._blocks = [ChunkRefs.concat(self._blocks).sort()]
        return self._blocks[0]

    def keeps(self, coords: Coordinates) -> bool:
        """Return whether the base snapshot's chunk at ``coords`` still counts."""
        if self.kept_grid is None:
            return True
        return not self.keeps_nothing and all(
            at < size for at, size in zip(coords, self.kept_grid, strict=True)
        )

    @property
    def keeps_nothing(self) -> bool:
        """Whether no chunk of the base snapshot counts any more, as after a change of rank."""
        # The grid of no axes has no zero in it: the one chunk of such an array is kept while no
        # grid is noted, and gone once one is.
        return self.kept_grid is not None and not any(self.kept_grid)

    def shrink(self, grid: Coordinates) -> None:
        """Delete every chunk outside of ``grid``; growing again does not bring it back.

        Changes out there stay as deletions: a transaction log lists every chunk touched.
        """
        old = grid if self.kept_grid is None else self.kept_grid
        self.kept_grid = tuple(min(a, b) for a, b in zip(old, grid, strict=True))
        self.clip(grid)
        self.revision = next(_REVISIONS)

    def clip(self, grid: Coordinates) -> None:
        """Turn changes outside of ``grid`` into deletions; the base's chunks stay."""
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        refs = self.columns()
        inside = refs.inside(tuple((0, size) for size in grid))
        if not inside.all():
            gone = ChunkRefs.build(refs.coords[~inside], Kind.DELETED)
            self._blocks = [ChunkRefs.concat([refs.take(inside), gone]).sort()]
            self.revision = next(_REVISIONS)
            if self.journal is not None:
                self.journal.set_many(gone)

    def drop(self, coords: npt.NDArray[np.uint32]) -> None:
        """Undo the changes of some chunks; ``coords`` is ``(n, rank)``."""
        from icechunk_async.format.manifest.row_index import rows_in  # noqa: PLC0415 -- on use

        refs = self.columns()
        keep = ~rows_in(refs.coords, coords)
        self._blocks = [refs.take(keep)] if keep.any() else []
        self.revision = next(_REVISIONS)
        # A journal lists what was set. It cannot say that a change was taken back, so the next
        # publication has to compare whole states.
        self.journal = None

    @property
    def singles(self) -> dict[Coordinates, ChunkRef | None]:
        """The changes that are not in columns yet, if no others are; not to be changed."""
        return {} if self._blocks else self._singles

    def settle(self, columns: ChunkRefs) -> None:
        """Take the `singles` as columns, which somebody made of them."""
        self._singles, self._blocks = {}, [columns]

    def _settle(self) -> None:
        """Turn single changes into a block, so that a newer block can follow."""
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        if self._singles:
            self._push(ChunkRefs.from_mapping(self.rank, self._singles).sort())
            self._singles = {}

    def _push(self, block: ChunkRefs) -> None:
        """Add the newest block."""
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        # Blocks get shorter from the oldest to the newest, as in a binary counter: after 4n, 2n and
        # n rows another n make one block of 8n. So each row of equal batches is sorted a
        # logarithmic number of times. Batches of ever fewer rows stay apart, which lookups pay for:
        # n rows are in at most sqrt(2n) blocks.
        while self._blocks and len(self._blocks[-1]) <= len(block):
            block = ChunkRefs.concat([self._blocks.pop(), block]).sort()
        self._blocks.append(block)


def settle_together(changes: Iterable[ArrayChanges]) -> None:
    """Turn the single changes of many arrays into columns, for all of them at once.

    Cost: a fifth of what `ArrayChanges.columns` takes for each array by itself.
    """
    by_rank: dict[int, list[ArrayChanges]] = {}
    for it in changes:
        if it.singles:
            by_rank.setdefault(it.rank, []).append(it)
    for rank, alike in by_rank.items():
        if len(alike) < _FEWEST_TOGETHER:
            continue
        from icechunk_async.format.manifest.several import Several  # noqa: PLC0415 -- on use

        # None if some are virtual: their locations lie in pools, one for each array. These become
        # columns one by one, when they are asked for.
        columns = Several.from_mappings(rank, [it.singles for it in alike])
        if columns is not None:
            for it, refs in zip(alike, columns.divided(), strict=True):
                it.settle(refs)


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
    """Those of a session that only moves nodes; everything else is empty then."""
    sources: frozenset[SnapshotId] = frozenset()
    """Snapshots whose references were copied into ``chunks``. The commit requires that they still
    exist, because otherwise the chunk objects may have been collected."""

    def copy(self) -> ChangeSet:
        """Return a change set that can be edited without touching this one."""
        chunks = {node_id: changes.copy() for node_id, changes in self.chunks.items()}
        new, updated, deleted = dict(self.new), dict(self.updated), dict(self.deleted)
        return ChangeSet(new, updated, deleted, chunks, self.moves.copy(), self.sources)

    def renumber(self, ids: Mapping[NodeId, NodeId]) -> None:
        """Give created nodes other ids."""
        self.new = {
            path: replace(node, id=ids.get(node.id, node.id)) for path, node in self.new.items()
        }
        self.chunks = {ids.get(node_id, node_id): it for node_id, it in self.chunks.items()}

    def is_empty(self) -> bool:
        """Return whether committing would change nothing."""
        touched = self.new or self.updated or self.deleted or self.moves.requested
        return not touched and all(changes.is_empty() for changes in self.chunks.values())

    def count(self) -> int:
        """Count the nodes and chunks that were changed."""
        nodes = len(self.new) + len(self.updated) + len(self.deleted) + len(self.moves.requested)
        return nodes + sum(changes.count() for changes in self.chunks.values())

    def touched(self) -> set[NodeId]:
        """Return the ids of the nodes that were created, deleted, or changed with their chunks."""
        created = (node.id for node in self.new.values())
        return {*created, *self.updated, *self.deleted, *self.chunks}

    def note_anew(self) -> None:
        """Forget what journals hold, and note the chunks that are set from now on."""
        for it in self.chunks.values():
            it.taken_journal()

    def same_as(self, earlier: ChangeSet) -> bool:
        """Return whether nothing changed since ``earlier`` was copied from these changes."""
        # Equal numbers are equal chunks, which need not be looked at. Moves are left out: states
        # are compared for forks, and a session that moves nodes has none.
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
        """Return the transaction log of these changes (spec, "Transaction logs")."""
        from icechunk_async.format.transaction_log import TransactionLog  # noqa: PLC0415 -- on use

        settle_together(self.chunks.values())
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
        """Return the node at a path as the session sees it."""
        # First, because a created node may stand where one of the base was deleted.
        created = self.changes.new.get(path)
        if created is not None:
            return created
        node = self.changes.moves.find(self.base, path)
        if node is None or node.id in self.changes.deleted:
            return None
        return self.changes.updated.get(node.id, node)

    def base_node(self, node: Node) -> Node | None:
        """Return the node of the base snapshot that ``node`` is, changed or not."""
        origin = self.changes.moves.origin(node.path)
        # The path alone does not tell: another node may have been created where the base has this
        # one.
        found = None if origin is None else self.base.get(origin)
        return found if found is not None and found.id == node.id else None

    def paths(self, below: str | None = None) -> list[str]:
        """Return the paths of all nodes, or of all descendants of ``below``, in order."""
        changes = self.changes
        found = changes.moves.paths(self.base, below)
        deleted = map(self.base.path_of, changes.deleted)
        gone = {changes.moves.place(path) for path in deleted if path is not None}
        if changes.moves.requested:  # something else may have been moved there
            gone = {path for path in gone if self._is_deleted(path)}
        if gone:
            found = [path for path in found if path not in gone]
        prefix = "" if below is None else below.rstrip("/") + "/"
        created = [path for path in changes.new if path.startswith(prefix) and path != below]
        return sorted(found + created) if created else found

    def _is_deleted(self, path: str) -> bool:
        node = self.changes.moves.find(self.base, path)
        return node is not None and node.id in self.changes.deleted

    def child_names(self, path: str) -> list[str]:
        """Return the names directly below a path, also of parents that are not nodes."""
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
            # What was set under the old number of axes goes as well: a log has coordinates of one
            # rank for each array.
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
        # As in the official engine: a log names a deleted array, and none of its chunks.
        changes.chunks.pop(node.id, None)
        if changes.new.pop(path, None) is None:
            changes.updated.pop(node.id, None)
            changes.deleted[node.id] = Deleted(path, node.array is not None)

    def chunk_changes(self, node: Node) -> ArrayChanges:
        """Return the editable chunk changes of an array."""
        assert node.array is not None
        changes = self.changes.chunks.get(node.id)
        if changes is None:
            changes = self.changes.chunks[node.id] = ArrayChanges(len(node.array.dimensions))
        return changes

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes as the session sees them, in order of paths."""
        yield from self.edited().values()

    def edited(self) -> Nodes:
        """Return all nodes as the session sees them.

        Cost: time in proportion to the changes.
        """
        changes, base = self.changes, self.base
        if not (changes.new or changes.updated or changes.deleted or changes.moves.requested):
            return base
        moved = changes.moves.net()
        arrived = (changes.moves.find(base, move.target) for move in moved)
        put = {it.path: it for it in arrived if it is not None and it.id not in changes.deleted}
        put.update((it.path, it) for it in changes.updated.values() if base.path_of(it.id))
        put.update(changes.new)
        deleted = [path for path in map(base.path_of, changes.deleted) if path is not None]
        return base.edited(put.values(), [*deleted, *(move.source for move in moved)])

    def deleted_nodes(self) -> Iterator[Node]:
        """Iterate over the nodes of the base that were deleted."""
        for path in map(self.base.path_of, self.changes.deleted):
            if path is not None:
                yield self.base[path]

    def changed_arrays(self) -> list[Node]:
        """Return the arrays with changed chunks or another document, in order of their paths."""
        changes = self.changes
        found = [node for node in changes.new.values() if node.id in changes.chunks]
        for node_id in changes.chunks.keys() | changes.updated.keys():
            path = self.base.path_of(node_id)
            node = None if path is None else self.get(changes.moves.place(path))
            if node is not None and node.id == node_id:
                found.append(node)
        return sorted((it for it in found if it.array is not None), key=lambda node: node.path)

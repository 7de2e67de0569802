"""Merge the changes of forks into those of the session they came from, and check that they fit.

Pure, and needs no snapshot: the changes of a fork and of its session start from the same state, so
that the changes alone show what both did. Nothing is merged until all clashes are known. Of chunks
that several set, the last one merged stays, as in the official engine.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet
from icechunk_async.errors import FormatError, InvalidMetadataError, MergeFailedError
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.paths import ancestors
from icechunk_async.format.zarr_document import parse_document

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.changes.change_set import Deleted
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.snapshot import Node, Nodes

__all__ = ["ForkPoint", "MergeClash", "MergeClashKind", "Merger", "Since", "check_fits"]


_MOST_COORDS = 1000
"""The most coordinates that a clash lists; a fork may have written millions."""


class MergeClashKind(Enum):
    """The reasons why changes of a fork cannot be merged with others."""

    CREATED_BY_BOTH = "created by both"
    UPDATED_BY_BOTH = "given different metadata by both"
    DELETED_AND_CHANGED = "deleted by one and changed or recreated by the other"
    CREATED_BELOW_ARRAY = "an array to one and a parent to the other"
    OTHER_RANK = "written with another number of axes than it has now"
    WRITTEN_BY_BOTH = "written by both"


@dataclass(frozen=True, slots=True)
class MergeClash:
    """One thing that a fork and its session, or an earlier fork, both did."""

    kind: MergeClashKind
    path: str
    coords: tuple[Coordinates, ...] = ()
    """The chunks concerned, if it is about chunks; the first thousand."""
    fork: int = 0
    """The place of the fork among those that were to be merged, from 0."""
    fork_id: str = ""
    """The fork that published it, see ``ForkSession.publish``; empty if it was merged by hand."""


class ForkPoint:
    """The changes that a session had when forks of it began."""

    def __init__(self, changes: ChangeSet) -> None:
        """Remember ``changes``, which must not change any more."""
        self.changes = changes

    @cached_property
    def paths(self) -> Mapping[NodeId, str]:
        """Paths of the nodes that the session had created."""
        return {node.id: path for path, node in self.changes.new.items()}


class Since(Protocol):
    """The changes of a session since the state that other changes were made on."""

    def deleted(self, node_id: NodeId) -> bool:
        """Return whether a node of that state is gone."""
        ...

    def path(self, node_id: NodeId) -> str | None:
        """Return the path of a node that was created in the session, or deleted."""
        ...

    def document(self, node_id: NodeId, path: str) -> bytes | None:
        """Return the metadata document that a node was given; None: as in the base snapshot."""
        ...

    def document_changed(self, node_id: NodeId, path: str) -> bool:
        """Return whether a node was given another metadata document since."""
        ...

    def chunks_changed(self, node_id: NodeId, *, waiting: bool) -> bool:
        """Return whether chunks of an array were changed since.

        ``waiting`` says that chunks of others are about to be merged into it.
        """
        ...


class _Since:
    """The changes of a session since the state that a fork began in."""

    def __init__(self, now: ChangeSet, point: ForkPoint) -> None:
        self.now = now
        self.then = point.changes
        self.paths = point.paths

    def deleted(self, node_id: NodeId) -> bool:
        """Return whether the session deleted a node that the fork's state had."""
        path = self.paths.get(node_id)
        if path is not None:
            now = self.now.new.get(path)
            return now is None or now.id != node_id
        return node_id in self.now.deleted

    def path(self, node_id: NodeId) -> str | None:
        """Return the path of a node that the session created before, or deleted."""
        gone = self.now.deleted.get(node_id)
        return self.paths.get(node_id) if gone is None else gone.path

    def document(self, node_id: NodeId, path: str) -> bytes | None:
        """Return the metadata document that the session gave a node."""
        return _document(self.now, node_id, path)

    def document_changed(self, node_id: NodeId, path: str) -> bool:
        """Return whether the session gave a node another metadata document since."""
        return self.document(node_id, path) != _document(self.then, node_id, path)

    def chunks_changed(self, node_id: NodeId, *, waiting: bool) -> bool:
        """Return whether the session changed chunks of an array since, or other forks did."""
        now, then = self.now.chunks.get(node_id), self.then.chunks.get(node_id)
        before, after = (0 if it is None else it.revision for it in (then, now))
        return waiting or before != after


def _document(changes: ChangeSet, node_id: NodeId, path: str) -> bytes | None:
    created = changes.new.get(path)
    if created is not None and created.id == node_id:
        return created.user_data
    updated = changes.updated.get(node_id)
    return None if updated is None else updated.user_data


class Merger:
    """Merges forks one after the other into a copy of a session's changes."""

    def __init__(
        self,
        changes: ChangeSet,
        base_id: SnapshotId,
        *,
        path_of: Callable[[NodeId], str | None] = lambda _: None,
        allow_overlaps: bool = True,
    ) -> None:
        """Begin with a session's changes, which are not modified.

        Args:
            changes: those of the session.
            base_id: of the snapshot that they are against.
            path_of: paths of nodes of its base snapshot, for messages.
            allow_overlaps: let the last of several forks that set one chunk have its way.
        """
        self._changes = changes.copy()
        self._base_id = base_id
        self._path_of = path_of
        self._allow_overlaps = allow_overlaps
        self._pending: dict[NodeId, list[tuple[int, ChunkRefs]]] = {}
        """Columns of forks, to be joined all at once; the place of the fork with each."""
        self._fork = 0
        self._touched: set[NodeId] = set()
        """Arrays that forks gave other chunks or another grid."""
        self._clashes: list[MergeClash] = []
        self._fork_id = ""

    @property
    def changes(self) -> ChangeSet:
        """The session's changes with what was merged so far, but for chunks that wait."""
        return self._changes

    @cached_property
    def created(self) -> dict[NodeId, str]:
        """Paths of the nodes that were created, those of forks included, by id."""
        return {node.id: path for path, node in self._changes.new.items()}

    def add(self, fork: ChangeSet, point: ForkPoint) -> None:
        """Merge a fork that began at ``point``."""
        self.add_since(self._apart(fork), _Since(self._changes, point))

    def add_since(self, fork: ChangeSet, since: Since, fork_id: str = "") -> None:
        """Merge changes that were made on the state that ``since`` knows of; name their fork."""
        self._fork_id = fork_id
        # A fork that shifted chunks names the snapshot that it began at. If that is one of a
        # session with changes, no history lists it, and the commit would refuse. Its chunks are the
        # session's own, or those of the session's base, which stands for it here.
        if fork.sources:  # of an unpublished snapshot on top of the base, perhaps
            self._changes.sources |= {self._base_id}
        # Deletions come first, so that a node in the place of a deleted one finds the path free,
        # and chunks last, when it is known which arrays there are. Paths that clash are ``taken``:
        # what follows from a clash is not told again.
        taken: set[str] = set()
        for node_id, gone in fork.deleted.items():
            if self._delete(since, fork, node_id, gone):
                taken.add(gone.path)
        for node in fork.new.values():
            if node.path in taken or not self._create(node):
                taken.add(node.path)
        for node in fork.updated.values():
            self._update(since, node)
        paths = {node.id: node.path for node in fork.updated.values()}
        paths.update((node.id, node.path) for node in fork.new.values())
        for node_id, changes in fork.chunks.items():
            if paths.get(node_id) not in taken:
                self._write(since, node_id, changes, paths.get(node_id))
        self._fork += 1

    def _apart(self, fork: ChangeSet) -> ChangeSet:
        """Return a fork whose created nodes have no id of another node.

        Random ids never agree. Those of layouts with short ids may, because each fork chose them.
        """
        ids = {
            node.id: NodeId.random()
            for node in fork.new.values()
            if self.created.get(node.id, node.path) != node.path
        }
        if not ids:
            return fork
        apart = fork.copy()
        apart.renumber(ids)
        return apart

    def finish(self) -> ChangeSet:
        """Return the session's changes with those of every fork.

        Raises:
            MergeFailedError: there are clashes; all of them are in its context.

        Cost: one sort of all chunks of each array.
        """
        for node_id in list(self._pending):
            self._join(node_id)
        if self._clashes:
            raise _failure(self._clashes)
        for node in (*self._changes.new.values(), *self._changes.updated.values()):
            changes = self._changes.chunks.get(node.id)
            if changes is not None and node.array is not None and node.id in self._touched:
                changes.clip(node.array.grid)  # one may have shrunk what another wrote to
        return self._changes

    def _clash(self, kind: MergeClashKind, path: str, refs: ChunkRefs | None = None) -> None:
        coords = () if refs is None else _coordinates(refs.coords)
        self._clashes.append(MergeClash(kind, path, coords, self._fork, self._fork_id))

    def _delete(self, since: Since, fork: ChangeSet, node_id: NodeId, gone: Deleted) -> bool:
        """Delete a node; answer whether the path must not be created anew."""
        anew, theirs = fork.new.get(gone.path), self._changes.new.get(gone.path)
        if since.deleted(node_id):
            if theirs is None and anew is None:
                return False  # both deleted it
            if theirs is not None and anew is not None:
                return False  # the same node if merged before, else told when it is created
            self._clash(MergeClashKind.DELETED_AND_CHANGED, gone.path)
            return True
        waiting = node_id in self._pending
        if since.document_changed(node_id, gone.path) or since.chunks_changed(
            node_id, waiting=waiting
        ):
            self._clash(MergeClashKind.DELETED_AND_CHANGED, gone.path)
            return True
        changes = self._changes
        created = changes.new.get(gone.path)
        changes.chunks.pop(node_id, None)
        self._pending.pop(node_id, None)
        if created is not None and created.id == node_id:
            del changes.new[gone.path]
            self.created.pop(node_id, None)
            self.__dict__.pop("_parents", None)  # it may have been the last below its parent
        else:
            changes.updated.pop(node_id, None)
            changes.deleted[node_id] = gone
        return False

    def _create(self, node: Node) -> bool:
        """Create a node; answer whether it is there now."""
        theirs = self._changes.new.get(node.path)
        if theirs is not None:
            if theirs.id == node.id and theirs.user_data == node.user_data:
                return True  # merged before
            self._clash(MergeClashKind.CREATED_BY_BOTH, node.path)
            return False
        for parent in ancestors(node.path):
            above = self._changes.new.get(parent)
            if above is not None and above.array is not None:
                self._clash(MergeClashKind.CREATED_BELOW_ARRAY, parent)
                return False
        if node.array is not None and node.path in self._parents:
            self._clash(MergeClashKind.CREATED_BELOW_ARRAY, node.path)
            return False
        self._changes.new[node.path] = node
        self.created[node.id] = node.path
        self._parents.update(ancestors(node.path))
        return True

    @cached_property
    def _parents(self) -> set[str]:
        """Paths that have created nodes below them."""
        return {parent for path in self._changes.new for parent in ancestors(path)}

    def _update(self, since: Since, node: Node) -> None:
        """Give a node another metadata document."""
        self._touched.add(node.id)
        if since.deleted(node.id):
            self._clash(MergeClashKind.DELETED_AND_CHANGED, node.path)
            return
        if since.document(node.id, node.path) == node.user_data:
            return
        if since.document_changed(node.id, node.path):
            self._clash(MergeClashKind.UPDATED_BY_BOTH, node.path)
            return
        created = self._changes.new.get(node.path)
        if created is not None and created.id == node.id:
            self._changes.new[node.path] = node
        else:
            self._changes.updated[node.id] = node

    def _write(
        self, since: Since, node_id: NodeId, changes: ArrayChanges, path: str | None
    ) -> None:
        """Take over changed chunks of an array."""
        if changes.is_empty() and changes.kept_grid is None:
            return
        refs = changes.columns()
        path = path or since.path(node_id)
        if since.deleted(node_id):
            self._clash(MergeClashKind.DELETED_AND_CHANGED, path or str(node_id), refs)
            return
        self._touched.add(node_id)
        node = self._changed_node(node_id, path)
        rank = None if node is None or node.array is None else len(node.array.dimensions)
        mine = self._changes.chunks.get(node_id)
        touched = since.chunks_changed(node_id, waiting=node_id in self._pending)
        if (rank is not None and rank != changes.rank) or (
            mine is not None and mine.rank != changes.rank and touched
        ):
            where = node.path if node is not None else path or self._path_of(node_id)
            self._clash(MergeClashKind.OTHER_RANK, where or str(node_id), refs)
            return
        # What waits was merged before this fork: its smaller grid cuts that off, and not what the
        # fork itself wrote.
        if changes.kept_grid is not None:
            self._join(node_id)
            mine = self._changes.chunks.get(node_id)
        if mine is None or mine.rank != changes.rank:
            self._pending.pop(node_id, None)
            mine = self._changes.chunks[node_id] = ArrayChanges(changes.rank)
        if changes.kept_grid is not None:
            mine.shrink(changes.kept_grid)
        if len(refs):
            # Joined at the end, in one sort. Joined at once, each of a thousand forks would sort
            # the chunks of all before it.
            self._pending.setdefault(node_id, []).append((self._fork, refs))

    def _changed_node(self, node_id: NodeId, path: str | None) -> Node | None:
        """Return a node that was created, or given other metadata."""
        node = self._changes.updated.get(node_id)
        if node is None and path is not None:
            created = self._changes.new.get(path)
            node = created if created is not None and created.id == node_id else None
        return node

    def _join(self, node_id: NodeId) -> None:
        """Add the columns that wait for it to an array's changes."""
        waiting = self._pending.pop(node_id, [])
        if not waiting:
            return
        if not self._allow_overlaps and len(waiting) > 1:
            self._check_overlaps(node_id, waiting)
        self._changes.chunks[node_id].set_many(ChunkRefs.concat([refs for _, refs in waiting]))

    def _check_overlaps(self, node_id: NodeId, waiting: Sequence[tuple[int, ChunkRefs]]) -> None:
        coords = np.concatenate([refs.coords for _, refs in waiting])
        forks = np.repeat([fork for fork, _ in waiting], [len(refs) for _, refs in waiting])
        rows, first, counts = np.unique(coords, axis=0, return_index=True, return_counts=True)
        if (counts == 1).all():
            return
        # `np.unique` returns the first row of equal ones, and rows stand in the order of merging.
        # So the others are those of forks that came later, and the earliest of these is named.
        again = np.ones(len(coords), bool)
        again[first] = False
        created = (path for path, it in self._changes.new.items() if it.id == node_id)
        path = self._path_of(node_id) or next(created, str(node_id))
        kind, fork = MergeClashKind.WRITTEN_BY_BOTH, int(forks[again].min())
        self._clashes.append(MergeClash(kind, path, _coordinates(rows[counts > 1]), fork))


def _coordinates(coords: npt.NDArray[np.uint32]) -> tuple[Coordinates, ...]:
    rows: list[list[int]] = coords[:_MOST_COORDS].tolist()
    return tuple(tuple(row) for row in rows)


def _failure(clashes: list[MergeClash]) -> MergeFailedError:
    parts = [
        f"{clash.path!r} was {clash.kind.value}"
        + (f" ({len(clash.coords)} chunk(s), the first {clash.coords[0]})" if clash.coords else "")
        + (f" (fork {clash.fork_id})" if clash.fork_id else "")
        for clash in clashes[:5]
    ]
    more = f", and {len(clashes) - 5} more" if len(clashes) > 5 else ""
    return MergeFailedError(
        f"The forks do not go together: {'; '.join(parts)}{more}. Nothing was merged. Let each "
        "fork change its own nodes and metadata, or create shared ones before forking.",
        clashes=clashes,
    )


def check_fits(
    changes: ChangeSet, base: Nodes, spec_version: int, *, only: Collection[NodeId] | None = None
) -> None:
    """Refuse changes that no session can have made.

    Args:
        changes: those of a fork or a session, as they came from elsewhere.
        base: the nodes of the snapshot that they are against.
        spec_version: of the repository.
        only: the nodes to look at; None: all.

    Raises:
        FormatError: they create a node where there is one, change one that there is not, say
            something else of an array than its document says, or leave chunks outside of a grid.

    Cost: reads the document of each node that was changed, and looks at each chunk of arrays
    that stayed.
    """
    if only is not None:
        changes = _parts(changes, only)
    known = _check_created(changes, base, spec_version) | _check_updated(
        changes, base, spec_version
    )
    for node_id, gone in changes.deleted.items():
        was = base.get(gone.path)
        if was is None or was.id != node_id or (was.array is not None) != gone.is_array:
            raise _impossible(f"deletes {gone.path!r}, which is another node, or none")
    for node_id, chunks in changes.chunks.items():
        if not chunks.is_empty() or chunks.kept_grid is not None:
            place = None if node_id in changes.deleted else base.path_of(node_id)
            _check_chunks(chunks, known.get(node_id) or (None if place is None else base[place]))


def _parts(changes: ChangeSet, only: Collection[NodeId]) -> ChangeSet:
    """Return the changes of some nodes, and all deletions."""
    return ChangeSet(
        {path: node for path, node in changes.new.items() if node.id in only},
        {it: node for it, node in changes.updated.items() if it in only},
        changes.deleted,
        {it: chunks for it, chunks in changes.chunks.items() if it in only},
    )


def _check_created(changes: ChangeSet, base: Nodes, spec_version: int) -> dict[NodeId, Node]:
    """Check created nodes; return them by id."""
    known = {node.id: node for node in changes.new.values()}
    # Manifests and logs know nodes by their ids alone: two nodes of one id would share their
    # chunks.
    if len(known) < len(changes.new):
        raise _impossible("creates two nodes with one id")
    for path, node in changes.new.items():
        there = base.get(path)
        if there is not None and there.id not in changes.deleted:
            raise _impossible(f"creates {path!r}, where there is a node")
        if base.path_of(node.id) is not None:
            raise _impossible(f"creates {path!r} with the id of another node")
        _check_document(node, spec_version)
    return known


def _check_updated(changes: ChangeSet, base: Nodes, spec_version: int) -> dict[NodeId, Node]:
    """Check nodes that were given other documents; return them by id."""
    for node_id, node in changes.updated.items():
        was = base.get(node.path)
        if was is None or was.id != node_id or (was.array is None) != (node.array is None):
            raise _impossible(f"changes {node.path!r}, which is another node, or none")
        if node_id in changes.deleted:
            raise _impossible(f"both changes and deletes {node.path!r}")
        _check_document(node, spec_version)
        _check_shrunk(was, node, changes.chunks.get(node_id))
    return changes.updated


def _check_document(node: Node, spec_version: int) -> None:
    try:
        parsed = parse_document(node.user_data, node.path)
    except InvalidMetadataError as error:
        raise _impossible(f"brings a document that no array or group can have: {error}") from error
    # The bytes say shape and grid twice. Chunks are checked against one, and Zarr reads by the
    # document: a difference would put chunks where no reader looks.
    if parsed.array != node.array:
        raise _impossible(f"says another shape or grid of {node.path!r} than its document")
    if spec_version == 1 and not parsed.regular_grid:
        raise _impossible(f"gives {node.path!r} a rectilinear grid, which format 1 cannot store")


def _check_shrunk(was: Node, node: Node, chunks: ArrayChanges | None) -> None:
    """Refuse an array that shrank and keeps chunks of the base outside of its grid."""
    if was.array is None or node.array is None:
        return
    old, new = was.array.grid, node.array.grid
    kept = None if chunks is None else chunks.kept_grid
    if len(old) != len(new):
        fits = kept is not None and not any(kept)  # of another number of axes none can be kept
    else:
        limits = old if kept is None else kept
        fits = len(limits) == len(new) and all(
            min(a, b) <= size for a, b, size in zip(old, limits, new, strict=True)
        )
    if not fits:
        raise _impossible(f"shrinks {node.path!r} and keeps chunks outside of its grid")


def _check_chunks(chunks: ArrayChanges, node: Node | None) -> None:
    if node is None or node.array is None:
        raise _impossible("changes chunks of an array that does not exist")
    grid = node.array.grid
    if chunks.rank != len(grid):
        raise _impossible(f"changes chunks of {chunks.rank} axes of {node.path!r}")
    refs = chunks.columns()
    outside = ~refs.inside(tuple((0, size) for size in grid))
    if np.any(outside & (refs.kinds != Kind.DELETED)):
        raise _impossible(f"sets chunks outside of the grid of {node.path!r}")


def _impossible(what: str) -> FormatError:
    return FormatError(
        f"A fork {what}: its bytes were damaged or made by another program. Nothing was merged."
    )

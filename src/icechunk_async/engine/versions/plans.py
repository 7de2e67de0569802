"""Merge, cherry-pick, revert and restore: which three snapshots each of them is about."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING, Protocol

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges
from icechunk_async.engine.commit.once import repeated
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.history.graph import lineage, merged_into
from icechunk_async.engine.versions.combine import Combining, combine, load
from icechunk_async.engine.versions.differences import chunk_grid, nodes_of
from icechunk_async.engine.versions.naming import find_ref
from icechunk_async.errors import (
    BranchNotFoundError,
    FormatError,
    InvalidInputError,
    NodeNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.json.values import is_list, is_object
from icechunk_async.format.paths import ancestors, check_selection, is_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.history import History
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.versions.combine import Combined
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = [
    "CherryPick",
    "Merge",
    "Plan",
    "Restore",
    "Revert",
    "Squash",
    "chunk_shape",
    "descendant",
    "parent_of_tip",
    "plan_squash",
]


class Plan(Protocol):
    """Changes to be put on top of a branch, which may have moved when they are.

    A plan may be combined several times. What its refs named the first time counts.
    """

    branch: str

    @property
    def how(self) -> Combining:
        """The kind of change."""
        ...

    def message(self, source: Snapshot, base: Snapshot) -> str:
        """Return the message of the commit, if the caller gives none."""
        ...

    async def combine(self, engine: Engine) -> Combined:
        """Work out the changes for the present tip of the branch."""
        ...


@dataclass(slots=True)
class Merge:
    """Merge what a branch, a tag or a snapshot changed into a branch."""

    source: SnapshotId | str
    branch: str
    base: SnapshotId | str | None = None
    solver: ConflictSolver | None = None
    how: Combining = field(default=Combining.MERGE, init=False)
    _source_id: SnapshotId | None = field(default=None, init=False)

    def message(self, source: Snapshot, base: Snapshot) -> str:
        """As `Plan`."""
        del base
        name = self.source if isinstance(self.source, str) else str(source.id)
        return f"Merge {name!r} into {self.branch!r}"

    async def combine(self, engine: Engine) -> Combined:
        """As `Plan`."""
        # Named once: if the target moves, the same source is merged again, also where its branch
        # moved too.
        self._source_id = source_id = self._source_id or await find_ref(engine, self.source)
        target_id = await _tip(engine, self.branch)
        if self.base is not None:
            base_id = await find_ref(engine, self.base)
        else:
            base_id = await _common_ancestor(engine, source_id, target_id)
        source = await load(engine, source_id, "which is to be merged")
        base = await load(engine, base_id, "the common ancestor")
        return await combine(
            engine, base, source, await engine.assets.snapshot(target_id), self.solver
        )


@dataclass(slots=True)
class CherryPick:
    """Make the changes of one commit on a branch, too."""

    snapshot: SnapshotId | str
    branch: str
    solver: ConflictSolver | None = None
    how: Combining = field(default=Combining.CHERRY_PICK, init=False)

    def message(self, source: Snapshot, base: Snapshot) -> str:
        """As `Plan`."""
        del base
        return source.message

    async def combine(self, engine: Engine) -> Combined:
        """As `Plan`."""
        self.snapshot = await find_ref(engine, self.snapshot)
        base, source = await _commit(engine, self.snapshot)
        target = await engine.assets.snapshot(await _tip(engine, self.branch))
        return await combine(engine, base, source, target, self.solver)


@dataclass(slots=True)
class Revert:
    """Take back one commit; later ones stay."""

    snapshot: SnapshotId | str
    branch: str
    solver: ConflictSolver | None = None
    how: Combining = field(default=Combining.REVERT, init=False)

    def message(self, source: Snapshot, base: Snapshot) -> str:
        """As `Plan`."""
        del source
        first = base.message.split("\n", 1)[0]
        return f"Revert {first!r}\n\nTakes back snapshot {base.id}."

    async def combine(self, engine: Engine) -> Combined:
        """As `Plan`."""
        self.snapshot = await find_ref(engine, self.snapshot)
        before, commit = await _commit(engine, self.snapshot)
        target = await engine.assets.snapshot(await _tip(engine, self.branch))
        return await combine(engine, commit, before, target, self.solver)


@dataclass(slots=True)
class Restore:
    """Bring nodes back to how they were in another snapshot."""

    ref: SnapshotId | str
    branch: str
    paths: Sequence[str] | None = None
    region: Sequence[slice] | None = None
    how: Combining = field(default=Combining.RESTORE, init=False)

    def message(self, source: Snapshot, base: Snapshot) -> str:
        """As `Plan`."""
        del base
        what = "everything" if self.paths is None else ", ".join(map(repr, self.paths))
        return f"Restore {what} from snapshot {source.id}"

    async def combine(self, engine: Engine) -> Combined:
        """As `Plan`."""
        self.ref = await find_ref(engine, self.ref)
        source = await load(engine, self.ref, "which is to be restored")
        target = await engine.assets.snapshot(await _tip(engine, self.branch))
        if self.paths is None:
            if self.region is not None:
                raise InvalidInputError(
                    "A region is a part of one array: name the array with paths=[...]."
                )
            return await combine(engine, target, source, target)
        wanted = _wanted(self.paths, source, target)
        if self.region is not None:
            return await _restore_region(engine, source, target, wanted, self.region)

        def within(path: str) -> bool:
            return path in wanted.parents or any(is_within(path, top) for top in wanted.tops)

        return await combine(engine, target, source, target, within=within)


@dataclass(frozen=True, slots=True)
class _Wanted:
    tops: tuple[str, ...]
    """Nodes that are brought back with all below them."""
    parents: frozenset[str]
    """Groups above them that the target lacks."""


def _wanted(paths: Sequence[str], source: Snapshot, target: Snapshot) -> _Wanted:
    tops = tuple(check_selection(paths))
    for top in tops:
        if top not in source.nodes and top not in target.nodes:
            raise NodeNotFoundError(
                f"There is nothing to restore at {top!r}: neither snapshot {source.id} nor the tip "
                "of the branch has a node there.",
                path=top,
            )
    above = {parent for top in tops if top in source.nodes for parent in ancestors(top)}
    # Groups that the target has stay unchanged: only what was named is brought back.
    return _Wanted(tops, frozenset(it for it in above if it not in target.nodes))


async def _restore_region(
    engine: Engine,
    source: Snapshot,
    target: Snapshot,
    wanted: _Wanted,
    region: Sequence[slice],
) -> Combined:
    """Bring back the chunks of a part of one array; its metadata stay unchanged."""
    if len(wanted.tops) != 1:
        raise InvalidInputError(
            f"A region is a part of one array, and {len(wanted.tops)} paths were named."
        )
    path = wanted.tops[0]
    old, new = source.nodes.get(path), target.nodes.get(path)
    if old is None or new is None or old.array is None or new.array is None:
        raise NodeNotFoundError(
            f"A region of {path!r} cannot be restored: it must be an array in snapshot "
            f"{source.id} and at the tip of the branch. Restore the whole array.",
            path=path,
        )
    if old.id != new.id or chunk_shape(old) != chunk_shape(new):
        raise InvalidInputError(
            f"A region of {path!r} cannot be restored: the array was created anew, or got other "
            "chunks, since then. Restore the whole array.",
            path=path,
        )
    box = _box(path, new, region)
    found = await combine(engine, target, source, target, within=lambda it: it == path)
    changes = found.changes.chunks.get(new.id)
    kept = ArrayChanges(len(box))
    if changes is not None:
        refs = changes.columns()
        kept.set_many(refs.take(refs.inside(box)))
    found.changes.updated.clear()
    found.changes.new.clear()
    found.changes.deleted.clear()
    found.changes.chunks = {} if kept.is_empty() else {new.id: kept}
    if kept.is_empty():
        found.changes.sources = frozenset()
    # Base and target are one snapshot, so nothing of the target was compared and nothing clashes.
    return replace(found, conflicts=())


def chunk_shape(node: Node) -> tuple[int, ...]:
    """Return the elements of a chunk along each axis of a regular grid, each 1 at least.

    Raises:
        InvalidInputError: the grid is of another kind.
        FormatError: the metadata document is damaged.
    """
    assert node.array is not None
    grid = chunk_grid(node)
    if grid.get("name") != "regular":
        raise InvalidInputError(
            f"{node.path!r} has a chunk grid of kind {grid.get('name')!r:.60}, and regions are "
            "told for regular grids only. Restore the whole array."
        )
    configuration: object = grid.get("configuration")
    sizes: object = configuration.get("chunk_shape") if is_object(configuration) else None
    lengths = [it.array_length for it in node.array.dimensions]
    if not is_list(sizes) or len(sizes) != len(lengths) or not all(map(_is_size, sizes, lengths)):
        raise FormatError(f"The chunk grid in the metadata document of {node.path!r} is damaged.")
    return tuple(max(size, 1) for size in sizes)


def _is_size(size: object, length: int) -> bool:
    # Only along an axis of length 0 may chunks have the length 0.
    return type(size) is int and size >= min(length, 1)


def _box(path: str, node: Node, region: Sequence[slice]) -> Extents:
    """Return the chunks that make up a region of elements."""
    assert node.array is not None
    dimensions, shape = node.array.dimensions, chunk_shape(node)
    if len(region) != len(dimensions):
        raise InvalidInputError(
            f"{path!r} has {len(dimensions)} axes, and the region has {len(region)} slices."
        )
    box: list[tuple[int, int]] = []
    for axis, (part, dimension, size) in enumerate(zip(region, dimensions, shape, strict=True)):
        start, stop, step = part.indices(dimension.array_length)
        if step != 1 or start % size or (stop % size and stop != dimension.array_length):
            raise InvalidInputError(
                f"Along axis {axis} of {path!r} the region is {start}:{stop}:{step}. Chunks are "
                f"brought back whole, so it must begin and end at a multiple of {size}, or at the "
                f"end of the array ({dimension.array_length}), with step 1."
            )
        box.append((start // size, -(-stop // size)))
    return tuple(box)


async def _tip(engine: Engine, branch: str) -> SnapshotId:
    try:
        return await engine.history.branch_tip(branch)
    except BranchNotFoundError as error:
        if branch in await engine.history.tags():
            raise BranchNotFoundError(
                f"{branch!r} is a tag, and tags do not move. Name a branch, or create one there.",
                branch=branch,
            ) from error
        raise


async def _commit(engine: Engine, snapshot_id: SnapshotId) -> tuple[Snapshot, Snapshot]:
    """Return the parent of a commit, and the commit.

    Raises:
        InvalidInputError: it is the first snapshot.
        SnapshotNotFoundError: one of them is gone.
    """
    info = await engine.history.snapshot_info(snapshot_id)
    if info.parent_id is None:
        raise InvalidInputError(
            f"Snapshot {snapshot_id} is the first of its history: there is nothing before it that "
            "its changes could be told from."
        )
    # The parent that is left is an older one, so the difference would hold other commits as well.
    if info.pruned_ancestor_logs:
        raise _parent_expired(snapshot_id)
    parent = await load(engine, info.parent_id, f"which comes before {snapshot_id}")
    for log in await load_logs(engine.assets, [info]):
        known = log.new_groups | log.new_arrays
        if any(parent.nodes.path_of(it) is None for it in nodes_of(log) - known):
            raise _parent_expired(snapshot_id)  # format 1 does not say so in another way
    return parent, await load(engine, snapshot_id, "whose changes are asked for")


def _parent_expired(snapshot_id: SnapshotId) -> SnapshotNotFoundError:
    return SnapshotNotFoundError(
        f"The snapshot before {snapshot_id} has expired, so the changes of this commit alone "
        "cannot be told from those before it. Restore a snapshot or some paths instead.",
        snapshot_id=str(snapshot_id),
    )


async def parent_of_tip(engine: Engine, branch: str) -> tuple[SnapshotId, SnapshotId]:
    """Return the tip of a branch and the snapshot before it.

    Raises:
        InvalidInputError: the tip is the first snapshot.
    """
    tip = await _tip(engine, branch)
    info = await engine.history.snapshot_info(tip)
    if info.parent_id is None:
        raise InvalidInputError(
            f"The tip of {branch!r} is the first snapshot, {tip}: there is nothing to undo."
        )
    return tip, info.parent_id


async def descendant(
    engine: Engine, branch: str, to: SnapshotId | str
) -> tuple[SnapshotId, SnapshotId]:
    """Return the tip of a branch, and a snapshot that has it before it.

    Raises:
        InvalidInputError: the tip is not an ancestor of the snapshot.
    """
    tip, target = await _tip(engine, branch), await find_ref(engine, to)
    if not await _has_before(engine.history, target, tip):
        raise InvalidInputError(
            f"{branch!r} cannot be moved forward to {target}: its tip, {tip}, is not among the "
            "snapshots before that, so commits of the branch would be lost. Merge instead."
        )
    return tip, target


async def _has_before(history: History, snapshot_id: SnapshotId, wanted: SnapshotId) -> bool:
    async for info in history.ancestry(snapshot_id):
        if info.id == wanted:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Squash:
    """One commit in the place of several."""

    combined: Combined
    tip: SnapshotId
    """Where the branch was."""
    message: str
    properties: dict[str, JSON]


async def plan_squash(engine: Engine, branch: str, since: SnapshotId | str) -> Squash | None:
    """Work out the commit that replaces those after ``since``; None without such commits.

    Raises:
        InvalidInputError: ``since`` is not an ancestor of the tip.
    """
    tip, start = await _tip(engine, branch), await find_ref(engine, since)
    if tip == start:
        return None
    messages: list[str] = []
    merged: list[SnapshotId] = []
    async for info in engine.history.ancestry(tip):
        if info.id == start:
            break
        messages.append(info.message)
        merged += merged_into(info.metadata)
    else:
        raise InvalidInputError(
            f"Snapshot {start} is not among those before the tip of {branch!r}, so there are no "
            "commits after it to squash."
        )
    base, last = await load(engine, start, "the first to stay"), await engine.assets.snapshot(tip)
    combined = await combine(engine, base, last, base)
    properties = {**repeated(last), **Combining.MERGE.properties(*reversed(merged))}
    return Squash(combined, tip, "\n\n".join(reversed(messages)), properties)


async def _common_ancestor(engine: Engine, source: SnapshotId, target: SnapshotId) -> SnapshotId:
    """Return the newest snapshot that both have before them, merges included.

    One that expired counts while it can still be read.
    """
    theirs = await lineage(engine.history, target)
    ours = await lineage(engine.history, source)
    expired = _expired(theirs, ours)
    for snapshot_id in _expired(ours, theirs):
        if snapshot_id in expired:
            with suppress(SnapshotNotFoundError):
                return (await engine.assets.read_snapshot(snapshot_id)).id
            break  # it was collected, and older ones with it
    both = [info for info in ours.values() if info.id in theirs]
    if not both:
        raise InvalidInputError(
            f"Snapshots {source} and {target} have no common ancestor. Name the snapshot whose "
            "state both began with: base=..."
        )
    newest = max(both, key=lambda info: info.flushed_at)
    return newest.id


def _expired(
    some: Mapping[SnapshotId, SnapshotInfo], others: Mapping[SnapshotId, SnapshotInfo]
) -> dict[SnapshotId, None]:
    """Return the snapshots that expired before those that only one side has, newest first."""
    own = (it for it in some.values() if it.id not in others)
    return dict.fromkeys(gone for it in own for gone in reversed(it.pruned_ancestor_logs))

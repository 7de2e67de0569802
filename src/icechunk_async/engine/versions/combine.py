"""Put the changes between two snapshots on top of a third: merge, pick, take back, bring back.

All of them are one step. The changes from a *base* to a *source* are made on the tip of a branch,
and what the branch changed since the base may clash with them:

| | base | source |
|---|---|---|
| merge | the nearest common ancestor | the tip of the other branch |
| cherry-pick | the parent of a commit | the commit |
| revert | the commit | its parent |
| restore | the tip itself | the snapshot to bring back |
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import WorkingTree
from icechunk_async.engine.changes.detect import Conflict, ConflictKind, detect_conflicts
from icechunk_async.engine.commit.conflicts import ConflictDetector, PreparingSolver
from icechunk_async.engine.commit.rebase import Settlement, without_settled
from icechunk_async.engine.history.diff import Diff, diff_of_log
from icechunk_async.engine.history.graph import PROPERTY
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.versions.differences import Differences, find_differences
from icechunk_async.engine.versions.report import Behind, MergeReport, reported
from icechunk_async.engine.versions.transport import transport
from icechunk_async.errors import SnapshotNotFoundError
from icechunk_async.format.zarr_document import same_chunk_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.changes.change_set import ChangeSet
    from icechunk_async.engine.commit.conflicts import ConflictSolver, Settled
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = ["Combined", "Combining", "combine", "load"]


class Combining(Enum):
    """The kinds of changes that are put on top of a branch."""

    MERGE = "merged"
    CHERRY_PICK = "picked"
    REVERT = "reverted"
    RESTORE = "restored"

    def properties(self, *sources: SnapshotId) -> dict[str, JSON]:
        """Return the properties of a commit that say where its changes came from."""
        return {PROPERTY: {self.value: [str(it) for it in sources]}} if sources else {}


@dataclass(frozen=True, slots=True)
class Combined:
    """Changes that are ready to be committed on a snapshot, and the conflicts that are open."""

    base: Snapshot
    source: Snapshot
    target: Snapshot
    """The snapshot that the changes are against."""
    changes: ChangeSet
    """Without conflicting ones: there the target stays unchanged."""
    conflicts: tuple[Conflict, ...]

    def diff(self) -> Diff:
        """Return the nodes and chunks that the changes touch, by path."""
        new = {node.id: path for path, node in self.changes.new.items()}
        gone = {node_id: it.path for node_id, it in self.changes.deleted.items()}
        places = self.changes.moves

        def path_of(node_id: NodeId) -> str | None:
            path = new.get(node_id) or gone.get(node_id)
            if path is None and (there := self.target.nodes.path_of(node_id)) is not None:
                path = places.place(there)
            return path

        return diff_of_log(self.changes.log(self.source.id), path_of)

    async def report(self, engine: Engine, branch: str) -> MergeReport:
        """Return the report of the changes, which were not committed yet.

        Cost: none without conflicts; else the logs of the commits on both sides.
        """
        ends = self.base.id, self.source.id, self.target.id
        conflicts = await reported(Behind(engine, *ends), self.conflicts)
        return MergeReport(branch, *ends, None, self.diff(), conflicts)


async def load(engine: Engine, snapshot_id: SnapshotId, why: str) -> Snapshot:
    """Load a snapshot that versions are worked out from.

    Raises:
        SnapshotNotFoundError: it was collected; the message says what it was needed for.
    """
    try:
        return await engine.assets.read_snapshot(snapshot_id)
    except SnapshotNotFoundError as error:
        raise SnapshotNotFoundError(
            f"Snapshot {snapshot_id}, {why}, is not there: it never was, or it expired and was "
            "collected. Nothing was changed.",
            snapshot_id=str(snapshot_id),
        ) from error


async def combine(
    engine: Engine,
    base: Snapshot,
    source: Snapshot,
    target: Snapshot,
    solver: ConflictSolver | None = None,
    *,
    within: Callable[[str], bool] | None = None,
) -> Combined:
    """Return the changes from ``base`` to ``source``, to be committed on ``target``.

    Args:
        engine: of the repository.
        base: the snapshot that both sides are compared with.
        source: has the changes.
        target: the tip of the branch.
        solver: decides what clashes. *Ours* is the source, *theirs* is the target. None: nobody.
        within: says by path which nodes of the source count; None: all.

    Raises:
        InvalidInputError: the solver returned something invalid.
        FormatError: a manifest is damaged.

    Cost: that of comparing the base with both, see `find_differences`.
    """
    # The branch did not move, so there is nothing of it to be compared.
    if base.id == target.id:
        ours = await find_differences(engine, base, source, within=within)
        theirs = Differences(base, target)
    else:
        ours, theirs = await gather(
            find_differences(engine, base, source, within=within),
            find_differences(engine, base, target),
        )
    moved = transport(ours, target, theirs)
    behind = Behind(engine, base.id, source.id, target.id)
    home = engine.workspace(base, SessionMode.READONLY)
    settlement = Settlement(home, moved.changes, target, ours=source, who=behind.commits)
    settled: Settled = {}
    if isinstance(solver, PreparingSolver):
        # Two who append the same bytes did the same, and yet both blocks are wanted.
        whole = transport(ours, target, theirs, leave_out_equal=False).changes
        preparing = Settlement(home, whole, target, ours=source)
        settled = await preparing.prepare(solver)
        for node_id in settled:
            moved.changes.updated[node_id] = whole.updated[node_id]
            moved.changes.chunks[node_id] = whole.chunks[node_id]
    clashes = [*moved.conflicts, *_clashes(base, moved.changes, target, theirs)]
    found = without_settled(clashes, settled)
    log = theirs.log(target.id)
    open_conflicts = await settlement.decide(found, log, solver or ConflictDetector())
    for conflict in open_conflicts:
        settlement.take_back(conflict)
    changes = moved.changes
    if changes.is_empty():
        changes.sources = frozenset()
    return Combined(base, source, target, changes, tuple(open_conflicts))


def _clashes(
    base: Snapshot, changes: ChangeSet, target: Snapshot, theirs: Differences
) -> list[Conflict]:
    """Return the conflicts of changes with what the target did since the base."""

    def path_of(node_id: NodeId) -> str | None:
        return target.nodes.path_of(node_id) or base.nodes.path_of(node_id)

    tree, log = WorkingTree(target.nodes, changes), theirs.log(target.id)
    moves, changes.moves = changes.moves, type(changes.moves)()  # those were looked at before
    found = detect_conflicts(tree, log, target, path_of=path_of)
    changes.moves = moves
    updated = {new.id: (old, new) for old, new in theirs.updated}
    return [it for it in found if not _is_harmless(it, changes, updated)]


def _is_harmless(
    conflict: Conflict, changes: ChangeSet, updated: dict[NodeId, tuple[Node, Node]]
) -> bool:
    """Return whether chunks mean the same in an array whose document changed meanwhile."""
    if conflict.kind is not ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY:
        return False
    pair = None if conflict.node_id is None else updated.get(conflict.node_id)
    mine = None if conflict.node_id is None else changes.chunks.get(conflict.node_id)
    if pair is None or mine is None or mine.kept_grid is not None:
        return False
    # The official engine calls any new document a conflict. Attributes and the shape do not change
    # what the bytes of a chunk mean, as long as the chunk lies in the grid of both.
    array = pair[1].array
    old, new = (node.user_data for node in pair)
    if not same_chunk_format(old, new) or array is None or len(array.grid) != mine.rank:
        return False
    ours = changes.updated.get(pair[1].id)
    grids = [array.grid] if ours is None or ours.array is None else [array.grid, ours.array.grid]
    box = tuple((0, max(sizes)) for sizes in zip(*grids, strict=True))
    return bool(mine.columns().inside(box).all())

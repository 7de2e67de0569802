"""Replaying a session's changes on top of commits that came after its base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import ConflictError, InvalidInputError, RebaseFailedError
from icechunk_async.repository.changes import WorkingTree
from icechunk_async.repository.conflicts import Clash, apply_resolution, detect_conflicts
from icechunk_async.repository.diff import load_logs

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.repository.changes import ChangeSet
    from icechunk_async.repository.conflicts import Conflict, ConflictSolver
    from icechunk_async.repository.history import History
    from icechunk_async.repository.workspace import Workspace

__all__ = ["rebase"]

_CONCURRENT_SNAPSHOTS = 16


async def rebase(
    workspace: Workspace, history: History, branch: str, solver: ConflictSolver
) -> None:
    """Move a workspace to the tip of its branch, commit by commit.

    Raises:
        RebaseFailedError: a conflict that the solver did not settle. The workspace stands on
            the last commit that did not clash, with its changes.
        ConflictError: the branch was reset: the workspace's base is no longer part of it.
        BranchNotFoundError: the branch is gone.

    Cancellation: the workspace stands on its old base or on a commit after it, with its
    changes.
    """
    assets = workspace.assets
    commits = await _commits_since(history, branch, workspace.base.id)
    snapshots = await bounded_map(
        assets.snapshot, [info.id for info in commits], limit=_CONCURRENT_SNAPSHOTS
    )
    for info, theirs in zip(commits, snapshots, strict=True):
        logs = await load_logs(assets, [info], need_pruned=True)
        changes = workspace.changes.copy()
        for log in logs:
            await _settle(workspace.base, changes, log, theirs, solver)
        changes.deleted = {
            node_id: gone
            for node_id, gone in changes.deleted.items()
            if theirs.nodes.path_of(node_id) is not None  # else they deleted it too
        }
        workspace.rebase_to(theirs, changes)


async def _commits_since(history: History, branch: str, base_id: SnapshotId) -> list[SnapshotInfo]:
    """Answer the commits of a branch after a snapshot, oldest first."""
    tip = await history.branch_tip(branch)
    commits: list[SnapshotInfo] = []
    async for info in history.ancestry(tip):
        if info.id == base_id:
            return commits[::-1]
        commits.append(info)
    raise ConflictError(
        f"Branch {branch!r} is at {tip}, and the session's base {base_id} is no longer part of "
        "it: the branch was reset or its tip amended. Begin a new session.",
        branch=branch,
        expected_parent=str(base_id),
        actual_parent=str(tip),
    )


async def _settle(
    base: Snapshot,
    changes: ChangeSet,
    log: TransactionLog,
    theirs: Snapshot,
    solver: ConflictSolver,
) -> None:
    ours = WorkingTree(base.nodes, changes)
    conflicts = detect_conflicts(ours, log, theirs)
    if not conflicts:
        return
    clash = Clash(tuple(conflicts), base, theirs, log, ours)
    resolutions = await solver.solve(clash)
    if len(resolutions) != len(conflicts):
        raise InvalidInputError(
            f"A conflict solver answered {len(resolutions)} resolutions for {len(conflicts)} "
            "conflicts; it must answer one for each."
        )
    unsolved = [
        conflict
        for conflict, resolution in zip(conflicts, resolutions, strict=True)
        if not apply_resolution(ours, conflict, resolution)
    ]
    if unsolved:
        raise RebaseFailedError(
            f"The session's changes clash with commit {log.id}: {_describe(unsolved)}. Nothing "
            "was published and no change was lost. Choose a solver that decides these, or begin "
            "a new session and make the changes again.",
            snapshot_id=str(log.id),
            conflicts=conflicts,
        )


def _describe(conflicts: list[Conflict]) -> str:
    parts = [
        f"{conflict.kind.name.lower().replace('_', ' ')} at {conflict.path!r}"
        + (f" ({len(conflict.coords)} chunk(s))" if conflict.coords else "")
        for conflict in conflicts[:5]
    ]
    more = f", and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    return "; ".join(parts) + more

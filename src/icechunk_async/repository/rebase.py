"""Replaying a session's changes on top of commits that came after its base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async import _telemetry
from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import ConflictError
from icechunk_async.repository.diff import load_logs
from icechunk_async.repository.settling import Settlement

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.repository.conflicts import ConflictSolver
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
    with _telemetry.span("rebase", branch=branch):
        assets = workspace.assets
        commits = await _commits_since(history, branch, workspace.base.id)
        snapshots = await bounded_map(
            assets.snapshot, [info.id for info in commits], limit=_CONCURRENT_SNAPSHOTS
        )
        for info, theirs in zip(commits, snapshots, strict=True):
            logs = await load_logs(assets, [info], need_pruned=True)
            changes = workspace.changes.copy()
            settlement = Settlement(workspace, changes, theirs)
            for log in logs:
                await settlement.settle(log, solver)
            changes.deleted = {
                node_id: gone
                for node_id, gone in changes.deleted.items()
                if theirs.nodes.path_of(node_id) is not None  # else they deleted it too
            }
            changes.moves = changes.moves.replay(theirs.nodes)
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

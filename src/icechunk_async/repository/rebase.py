"""Replaying a session's changes on top of commits that came after its base."""

from __future__ import annotations

from itertools import batched, takewhile
from typing import TYPE_CHECKING, Final

from icechunk_async import _telemetry
from icechunk_async._concurrency import bounded_map, gather
from icechunk_async.errors import ConflictError
from icechunk_async.repository.detection import clears
from icechunk_async.repository.diff import load_logs
from icechunk_async.repository.settling import Settlement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.repository.conflicts import ConflictSolver
    from icechunk_async.repository.history import History
    from icechunk_async.repository.workspace import Workspace

__all__ = ["rebase"]

_AT_ONCE: Final = 64
"""Commits whose logs are in memory at the same time."""
_CONCURRENT_SNAPSHOTS: Final = 16
_CONCURRENT_COMMITS: Final = 32


async def rebase(
    workspace: Workspace,
    history: History,
    branch: str,
    solver: ConflictSolver,
    *,
    tip: SnapshotId | None = None,
) -> None:
    """Move a workspace to the tip of its branch, commit by commit.

    Args:
        workspace: is changed.
        history: of the repository.
        branch: whose tip is the goal.
        solver: decides conflicts.
        tip: where the branch was when it was last read; None to read it now.

    Raises:
        RebaseFailedError: a conflict that the solver did not settle. The workspace stands on
            the last commit that did not clash, with its changes.
        ConflictError: the branch was reset: the workspace's base is no longer part of it.
        BranchNotFoundError: the branch is gone.

    Cancellation: the workspace stands on its old base or on a commit after it, with its
    changes.

    Cost: a request for the tip unless it is given; then for up to 64 commits the logs of all and
    the last snapshot, at the same time. From the first commit whose log cannot tell that nothing
    clashes, the snapshots of all, and that of the one before it, also at the same time.
    """
    with _telemetry.span("rebase", branch=branch):
        commits = await _commits_since(history, branch, workspace.base.id, tip)
        for some in batched(commits, _AT_ONCE):
            await _replay(workspace, some, solver)


async def _replay(
    workspace: Workspace, commits: Sequence[SnapshotInfo], solver: ConflictSolver
) -> None:
    """Move a workspace to the last of some commits that follow its base."""
    assets = workspace.assets

    async def load(info: SnapshotInfo) -> list[TransactionLog]:
        return await load_logs(assets, [info], need_pruned=True)

    logs, last = await gather(
        bounded_map(load, commits, limit=_CONCURRENT_COMMITS), assets.snapshot(commits[-1].id)
    )
    clear = list(
        takewhile(
            lambda index: all(clears(log, workspace.tree) for log in logs[index]),
            range(len(commits)),
        )
    )
    # Beside those that are not clear the last one that is, on which a rebase that fails stands.
    # After the first of them a solver may have changed what the session changes.
    wanted = range(max(0, len(clear) - 1), len(commits) - 1)
    snapshots = await bounded_map(
        assets.snapshot, [commits[index].id for index in wanted], limit=_CONCURRENT_SNAPSHOTS
    )
    for theirs, touched in zip([*snapshots, last], logs[wanted.start :], strict=True):
        await _settle(workspace, theirs, touched, solver)


async def _settle(
    workspace: Workspace, theirs: Snapshot, logs: Sequence[TransactionLog], solver: ConflictSolver
) -> None:
    """Move a workspace to a newer commit, settling what clashes with its logs."""
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


async def _commits_since(
    history: History, branch: str, base_id: SnapshotId, tip: SnapshotId | None
) -> list[SnapshotInfo]:
    """Answer the commits of a branch after a snapshot, oldest first."""
    if tip is None or tip == base_id:  # what was read last may be no news
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

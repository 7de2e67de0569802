"""The commits of a branch after a snapshot, and whether that snapshot is still in its history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async.errors import SnapshotNotFoundError, StreamPositionLostError

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.repository import Repository

__all__ = ["Commit", "commits_after", "first_snapshot", "tip_of"]


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a branch.

    Attributes:
        snapshot_id: the snapshot it made.
        parent_id: the snapshot it was based on; None if that is the repository's first one, which
            is empty: everything in the commit is then new, even if older commits expired.
        written_at: when it was made, by its writer's clock.
    """

    snapshot_id: str
    parent_id: str | None
    written_at: datetime


async def tip_of(repository: Repository, branch: str) -> str:
    """Return the tip of a branch.

    Raises:
        BranchNotFoundError: there is no such branch.
    """
    return str(await repository.lookup_branch(branch))


async def first_snapshot(repository: Repository, branch: str) -> str:
    """Return the first snapshot in the history of a branch.

    Cost: one request with format version 2, one for each commit with version 1.
    """
    found = ""
    async for info in repository.ancestry(branch=branch):
        found = str(info.id)
    return found


async def commits_after(
    repository: Repository,
    branch: str,
    start: str,
    end: str | None = None,
    *,
    may_be_older: bool = False,
) -> list[Commit]:
    """Return the commits of a branch after one snapshot, oldest first.

    Args:
        repository: an open repository.
        branch: the branch; its history must have both snapshots.
        start: the last snapshot that was read.
        end: the last snapshot to read; None for the tip. If it is `start`, nothing is returned.
        may_be_older: return nothing, instead of raising, if `end` is older than `start`. That can
            be so in the first batch of a query that begins at the tip.

    Raises:
        StreamPositionLostError: one of them is not in the history of the branch any more, or `end`
            is older than `start`: the branch was reset, and what follows `end` was read already.
        BranchNotFoundError: there is no such branch.

    Cost: one request with format version 2, one for each commit back to `start` with version 1.
    """
    newer: list[SnapshotInfo] = []
    seen_end = end is None
    async for info in repository.ancestry(branch=branch):
        snapshot_id = str(info.id)
        seen_end = seen_end or snapshot_id == end
        if snapshot_id == start:
            if not seen_end:
                assert end is not None  # None counts as seen
                await _check_older(repository, branch, info, end)
                if not may_be_older:
                    raise await _lost(repository, branch, start)
            return _commits(newer, info)
        if seen_end:
            newer.append(info)
    raise await _lost(repository, branch, start if seen_end or end is None else end)


async def _check_older(repository: Repository, branch: str, info: SnapshotInfo, end: str) -> None:
    """Raise StreamPositionLostError unless `end` is an ancestor of a snapshot."""
    async for older in repository.ancestry(snapshot_id=info.id):
        if str(older.id) == end:
            return
    raise await _lost(repository, branch, end)


def _commits(newer: list[SnapshotInfo], start: SnapshotInfo) -> list[Commit]:
    found: list[Commit] = []
    parent = start
    for info in reversed(newer):
        parent_id = None if parent.parent_id is None else str(parent.id)
        found.append(Commit(str(info.id), parent_id, info.written_at))
        parent = info
    return found


async def _lost(repository: Repository, branch: str, snapshot_id: str) -> StreamPositionLostError:
    """Return the error that says why a snapshot is not in the history of a branch."""
    try:
        await repository.lookup_snapshot(snapshot_id)
    except SnapshotNotFoundError:
        found = "it expired or was collected as garbage"
    else:
        found = "the branch was reset, its tip amended, or the history expired"
    return StreamPositionLostError(
        f"The stream has read {branch!r} up to snapshot {snapshot_id}, which is not in the history "
        f"of that branch any more: {found}. No row was read. Begin a new query with a new "
        "checkpoint, and with the option 'starting-snapshot' name the snapshot to continue "
        "after, or 'earliest' to read the whole history.",
        branch=branch,
        snapshot_id=snapshot_id,
    )

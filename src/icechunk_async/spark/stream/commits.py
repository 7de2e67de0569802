"""The commits of a branch after a snapshot, and whether that snapshot is still in its history."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.open import as_snapshot_id
from icechunk_async.engine.versions.watch import commits_since, why_gone
from icechunk_async.errors import StreamPositionLostError

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.repository import Repository

__all__ = ["Commit", "commits_after", "first_snapshot", "snapshots_of", "tip_of"]


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


async def snapshots_of(repository: Repository, commit: Commit) -> tuple[Snapshot | None, Snapshot]:
    """Return the snapshots before a commit, None if it has no parent, and after it."""
    load = repository.engine.assets.snapshot
    before = None if commit.parent_id is None else await load(as_snapshot_id(commit.parent_id))
    return before, await load(as_snapshot_id(commit.snapshot_id))


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
    # Looked up once: both walks below are of the same history, whatever is committed meanwhile.
    tip = await repository.lookup_branch(branch)
    found = await _since(repository, branch, start, tip)
    places = {str(info.id): at for at, info in enumerate(found)}
    if end is not None and end not in places:
        await _since(repository, branch, end, tip)  # or it is not in the history at all
        if not may_be_older:
            raise await _lost(repository, branch, start)
        return []
    wanted = found if end is None else found[: places[end] + 1]
    return [
        # The first snapshot is empty. A commit on it has no state before, which also holds if
        # commits in between have expired.
        Commit(str(it.id), None if before.parent_id is None else str(before.id), it.written_at)
        for before, it in pairwise(wanted)
    ]


async def _since(
    repository: Repository, branch: str, start: str, tip: SnapshotId
) -> list[SnapshotInfo]:
    """Return a snapshot and the commits after it, oldest first."""
    found = await commits_since(repository.engine.history, as_snapshot_id(start), tip)
    if found is None:
        raise await _lost(repository, branch, start)
    return found


async def _lost(repository: Repository, branch: str, snapshot_id: str) -> StreamPositionLostError:
    """Return the error that says why a snapshot is not in the history of a branch."""
    why = await why_gone(repository.engine.history, as_snapshot_id(snapshot_id))
    return StreamPositionLostError(
        f"The stream has read {branch!r} up to snapshot {snapshot_id}, which is not in the history "
        f"of that branch any more: {why}. No row was read. Begin a new query with a new "
        "checkpoint, and with the option 'starting-snapshot' name the snapshot to continue "
        "after, or 'earliest' to read the whole history.",
        branch=branch,
        snapshot_id=snapshot_id,
    )

"""Watch a branch: its commits, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async.errors import (
    InvalidInputError,
    SnapshotNotFoundError,
    StorageUnavailableError,
    StreamPositionLostError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.engine.history import History
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo

__all__ = ["commits_since", "watch", "why_gone"]

_SLOWER: Final = 1.5


async def watch(
    history: History,
    branch: str,
    since: SnapshotId | None,
    *,
    poll_seconds: float,
    max_poll_seconds: float,
) -> AsyncGenerator[SnapshotInfo]:
    """Iterate over the commits of a branch without end; see `Repository.watch`."""
    if not 0 < poll_seconds <= max_poll_seconds:
        raise InvalidInputError(
            f"A branch is looked at every poll_seconds, at most max_poll_seconds apart; they are "
            f"{poll_seconds} and {max_poll_seconds}."
        )
    seen = since if since is not None else await history.branch_tip(branch)
    pause = poll_seconds
    while True:
        try:
            tip = await history.branch_tip(branch)
        except StorageUnavailableError:  # the policies of the storage have tried for long already
            tip = seen
            pause = max_poll_seconds
        if tip == seen:
            await anyio.sleep(pause)
            # Each look is a request, from every watcher: branches that rest are looked at less and
            # less often.
            pause = min(pause * _SLOWER, max_poll_seconds)
            continue
        pause = poll_seconds
        found = await commits_since(history, seen, tip)
        for info in await _check_all_there(history, branch, seen, found):
            yield info
            seen = info.id


async def commits_since(
    history: History, start: SnapshotId, tip: SnapshotId
) -> list[SnapshotInfo] | None:
    """Return a snapshot and the commits after it up to another, oldest first.

    None if the first is not in the history of the second. Commits between them that expired are in
    the ``pruned_ancestor_logs`` of the next one.
    """
    found: list[SnapshotInfo] = []
    async for info in history.ancestry(tip):
        found.append(info)
        if info.id == start:
            return found[::-1]
        # It expired below this commit, so it is nowhere further back.
        if start in info.pruned_ancestor_logs:
            break
    return None


async def why_gone(history: History, snapshot_id: SnapshotId) -> str:
    """Return why a snapshot is not in the history of a branch any more."""
    try:
        await history.snapshot_info(snapshot_id)
    except SnapshotNotFoundError:
        return "it expired or was collected as garbage"
    return "the branch was reset, its tip amended, or the history expired"


async def _check_all_there(
    history: History, branch: str, seen: SnapshotId, found: list[SnapshotInfo] | None
) -> list[SnapshotInfo]:
    """Return the commits after what was seen.

    Raises:
        StreamPositionLostError: what was seen is not in the history, or a commit after it expired.
    """
    if found is None:
        raise StreamPositionLostError(
            f"{branch!r} was followed up to snapshot {seen}, which is not in its history any more: "
            f"{await why_gone(history, seen)}. Nothing is skipped silently: begin again at a "
            "snapshot of your choice, for example at the tip.",
            branch=branch,
            snapshot_id=str(seen),
        )
    newer = found[1:]
    gone = [str(it) for info in newer for it in info.pruned_ancestor_logs]
    if gone:
        raise StreamPositionLostError(
            f"{branch!r} was followed up to snapshot {seen}, and {len(gone)} commit(s) after that "
            f"expired before they were reported, the first of them {gone[0]}. Nothing is skipped "
            f"silently: compare {seen} with {newer[0].id} by changes, and begin again after that.",
            branch=branch,
            snapshot_id=str(seen),
        )
    return newer

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

__all__ = ["commits_after", "watch"]

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
            pause = min(pause * _SLOWER, max_poll_seconds)
            continue
        pause = poll_seconds
        for info in await commits_after(history, branch, seen, tip):
            yield info
            seen = info.id


async def commits_after(
    history: History, branch: str, start: SnapshotId, tip: SnapshotId
) -> list[SnapshotInfo]:
    """Return the commits of a branch after a snapshot, oldest first.

    Raises:
        StreamPositionLostError: the snapshot is not in the branch's history any more.
    """
    newer: list[SnapshotInfo] = []
    async for info in history.ancestry(tip):
        if info.id == start:
            return newer[::-1]
        if start in info.pruned_ancestor_logs:
            break
        newer.append(info)
    try:
        await history.snapshot_info(start)
    except SnapshotNotFoundError:
        found = "it expired or was collected"
    else:
        found = "the branch was reset, its tip was amended, or the history expired"
    raise StreamPositionLostError(
        f"{branch!r} was followed up to snapshot {start}, which is not in its history any more: "
        f"{found}. Nothing is skipped in silence: begin again at a snapshot of your choice, "
        "for example at the tip.",
        branch=branch,
        snapshot_id=str(start),
    )

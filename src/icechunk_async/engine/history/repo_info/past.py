"""Where a branch was at some time, from the operations log (format 2). Pure.

The parents of a tip tell only the history that the branch has now. A reset or an amendment takes
snapshots out of it, and expiration leaves some out. The log still names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.engine.history.refusals import no_snapshot_yet, snapshot_dropped
from icechunk_async.format.operations_log import (
    BranchCreated,
    BranchDeleted,
    BranchReset,
    CommitAmended,
    NewCommit,
    RepoInitialized,
)

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo

__all__ = ["PastTip"]


class PastTip:
    """Goes through the log, newest entry first, and undoes what happened to a branch.

    A commit counts from the time that its snapshot has, which is what a history shows, and from
    that of its entry if it was dropped from the history.

    Attributes:
        is_over: whether older entries tell nothing more.
    """

    def __init__(self, info: RepoInfo, branch: str, tip: SnapshotId, moment_us: int) -> None:
        """Begin at the tip that the branch has in ``info``."""
        self.is_over = False
        self._info = info
        self._branch = branch
        self._moment_us = moment_us
        self._tip: SnapshotId | None = tip
        """Where the branch was after the next older entry; None if nothing newer tells it."""
        self._found: SnapshotId | None = None
        self._created_later = False

    def see(self, update: Update) -> None:
        """Take the next entry of the log.

        Raises:
            SnapshotNotFoundError: the branch was at a snapshot that was dropped since.
        """
        is_past = update.updated_at <= self._moment_us
        if is_past and self._created_later:
            self.is_over = True
            return
        match update.detail:
            # The newest commit of that time is the answer. By the time of its snapshot, which is
            # older than that of the entry where the publication took long.
            case NewCommit(self._branch, new) | CommitAmended(self._branch, _, new) if (
                is_past or self._was_written(new)
            ):
                self._finish(new)
            # These entries do not say where the branch went. It is where the next newer entry found
            # it.
            case BranchReset(self._branch) | BranchCreated(self._branch) if is_past:
                self._finish(self._tip)
            # From here on entries are newer than that time, and are undone one by one.
            case NewCommit(self._branch, new):
                self._tip = self._parent(new)
            case CommitAmended(self._branch, previous) | BranchReset(self._branch, previous):
                self._tip = previous
            # At that time there was an older branch of this name. The entry says where it was last.
            case BranchDeleted(self._branch, previous):
                self._tip, self._created_later = previous, False
            case BranchCreated(self._branch):
                self._created_later = True
            # The first entry of all, which does not name its snapshot.
            case RepoInitialized() if is_past and self._branch == MAIN:
                self._finish(self._tip or self._root())
            # An entry about something else. If it is old enough, no entry in between has moved the
            # branch.
            case _:
                if is_past and self._tip is not None:
                    self._finish(self._tip)

    def end(self) -> SnapshotId:
        """Return the snapshot by ancestry if the log does not reach back to that time.

        A branch that was created later has the history of what it was created at.

        Raises:
            SnapshotNotFoundError: it tells nothing, or snapshots of that time were dropped from it.
        """
        if self._found is not None:
            return self._found
        if self._tip is None or self._tip not in self._info.snapshots:
            raise snapshot_dropped(self._moment_us)
        passed: SnapshotInfo | None = None
        for it in self._info.ancestry(self._tip):
            if it.flushed_at <= self._moment_us:
                # Between the two lay snapshots that expired, one of which may have been the tip at
                # that time.
                if passed is not None and passed.pruned_ancestor_logs:
                    raise snapshot_dropped(self._moment_us)
                return it.id
            passed = it
        raise no_snapshot_yet(self._moment_us, passed)

    def _finish(self, tip: SnapshotId | None) -> None:
        if tip not in self._info.snapshots:
            raise snapshot_dropped(self._moment_us, tip)
        self._found, self.is_over = tip, True

    def _was_written(self, snapshot_id: SnapshotId) -> bool:
        info = self._info.snapshots.get(snapshot_id)
        return info is not None and info.flushed_at <= self._moment_us

    def _parent(self, snapshot_id: SnapshotId) -> SnapshotId | None:
        """Return the parent that a snapshot was committed with; None if nothing tells it."""
        info = self._info.snapshots.get(snapshot_id)
        if info is None:
            return None
        # Logs are listed oldest first, so the last one is that of the parent that the commit had.
        return info.pruned_ancestor_logs[-1] if info.pruned_ancestor_logs else info.parent_id

    def _root(self) -> SnapshotId:
        *_, root = self._info.ancestry(self._info.branches[MAIN])
        return root.id

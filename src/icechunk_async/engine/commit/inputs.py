"""Inputs of a session: nodes that its changes were computed from, and that others must not touch.

A rebase looks for conflicts with what a session wrote, not with what that was computed from. A
commit that names its inputs looks at them after every rebase. It can land only on the snapshot
that was looked at, so nothing comes between the look and the commit.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from icechunk_async.engine.history.diff import diff_snapshots
from icechunk_async.errors import ConflictError, InvalidInputError, SnapshotNotFoundError
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    from collections.abc import Collection

    from icechunk_async.engine.history import History
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.ids import SnapshotId

__all__ = ["Inputs", "first_touched"]


def first_touched(diff: Diff, paths: Collection[str]) -> str | None:
    """Return the first of some absolute paths that a diff touches; None if it touches none.

    A node is touched if it, or one below it, was created, deleted, moved, given other metadata or
    written to, or if one above it was moved.
    """
    touched = set(
        chain(
            diff.new_groups,
            diff.new_arrays,
            diff.deleted_groups,
            diff.deleted_arrays,
            diff.updated_groups,
            diff.updated_arrays,
            diff.updated_chunks,
        )
    )
    moved = {end for move in diff.moved_nodes for end in move}
    for path in paths:
        if any(_is_within(it, path) for it in touched | moved):
            return path
        if any(_is_within(path, end) for end in moved):
            return path
    return None


def _is_within(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor.rstrip("/") + "/")


class Inputs:
    """The inputs of one commit, and the snapshot up to which nobody touched them."""

    def __init__(self, paths: Collection[str], since: SnapshotId) -> None:
        """Take paths as users give them.

        Raises:
            InvalidInputError: one cannot be a path.
        """
        self._paths = [check_path(path) for path in paths]
        self._since = since

    async def check(self, workspace: Workspace, history: History, branch: str) -> None:
        """Raise an error if a commit up to the workspace's base touched an input.

        Raises:
            ConflictError: one did, or that cannot be found out.

        Cost: nothing if the base was looked at already, else that of a diff, whose transaction
        logs a rebase has just read.
        """
        start, end = self._since, workspace.base.id
        if not self._paths or start == end:
            return
        context = {"branch": branch, "expected_parent": str(start), "actual_parent": str(end)}
        try:
            # The missing log of an expired commit may be the one that touched an input: a diff that
            # is only shown leaves it out, and this must not.
            diff = await diff_snapshots(history, workspace.assets, start, end, need_pruned=True)
        except (InvalidInputError, SnapshotNotFoundError) as error:
            raise ConflictError(
                f"Whether others changed an input of this commit cannot be found out: {start}, "
                f"where the session began, is no longer part of branch {branch!r}. Nothing was "
                "published. Begin a new session and compute the changes again.",
                **context,
            ) from error
        path = first_touched(diff, self._paths)
        if path is not None:
            raise ConflictError(
                f"Others committed to {branch!r} and changed {path!r}, an input of this commit. "
                "Nothing was published. Begin a new session and compute the changes again.",
                path=path,
                **context,
            )
        # The next try, after another rebase, looks only at what came since.
        self._since = end

"""Branches and tags of an open repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.format.ids import SnapshotId
from icechunk_async.repository.opened import check_safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.repository.opened import Opened

__all__ = ["RefOperations", "as_snapshot_id"]


def as_snapshot_id(given: SnapshotId | str) -> SnapshotId:
    """Answer an id given as such or as text."""
    return given if isinstance(given, SnapshotId) else SnapshotId.parse(given)


class RefOperations:
    """What can be done to branches and tags; a base of the repository."""

    def __init__(self, opened: Opened) -> None:
        """Work on an open repository."""
        self._opened = opened

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Answer every branch and its tip. Cost: one request; with format 1 one a branch."""
        return dict(await self._opened.history.branches())

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Answer every tag and its snapshot. Cost: one request; with format 1 two a tag."""
        return dict(await self._opened.history.tags())

    async def list_branches(self) -> set[str]:
        """Answer the names of all branches."""
        return set(await self._opened.history.branches())

    async def lookup_branch(self, name: str) -> SnapshotId:
        """Answer the tip of a branch.

        Raises:
            BranchNotFoundError: there is no such branch.
        """
        return await self._opened.history.branch_tip(name)

    async def create_branch(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Create a branch whose tip is a snapshot.

        Raises:
            BranchExistsError, SnapshotNotFoundError, InvalidRefNameError: nothing changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been created.
        """
        check_safe(self._opened.storage)
        await self._opened.history.create_branch(name, as_snapshot_id(snapshot_id))

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId | str,
        *,
        from_snapshot_id: SnapshotId | str | None = None,
    ) -> None:
        """Move a branch to any snapshot.

        Args:
            name: the branch.
            snapshot_id: its new tip.
            from_snapshot_id: move it only if this is its tip now.

        Raises:
            BranchNotFoundError, SnapshotNotFoundError: nothing changed.
            ConflictError: its tip is not ``from_snapshot_id``.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been moved.
        """
        check_safe(self._opened.storage)
        expected = None if from_snapshot_id is None else as_snapshot_id(from_snapshot_id)
        await self._opened.history.reset_branch(
            name, as_snapshot_id(snapshot_id), expected=expected
        )

    async def delete_branch(self, name: str) -> None:
        """Delete a branch; its snapshots stay until they are collected.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidRefNameError: ``main`` cannot be deleted.
        """
        check_safe(self._opened.storage)
        await self._opened.history.delete_branch(name)

    async def list_tags(self) -> set[str]:
        """Answer the names of all tags; deleted ones are not among them."""
        return set(await self._opened.history.tags())

    async def lookup_tag(self, name: str) -> SnapshotId:
        """Answer the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        return await self._opened.history.tag_target(name)

    async def create_tag(self, name: str, snapshot_id: SnapshotId | str) -> None:
        """Give a snapshot a name for good.

        Raises:
            TagExistsError, TagDeletedError, SnapshotNotFoundError, InvalidRefNameError: nothing
                changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the tag may have been created.
        """
        check_safe(self._opened.storage)
        await self._opened.history.create_tag(name, as_snapshot_id(snapshot_id))

    async def delete_tag(self, name: str) -> None:
        """Delete a tag; its name is never used again.

        Raises:
            TagNotFoundError: there is no such tag.
        """
        check_safe(self._opened.storage)
        await self._opened.history.delete_tag(name)

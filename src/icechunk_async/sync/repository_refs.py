"""Branches and tags."""

from __future__ import annotations

from icechunk_async.errors import SessionStateError
from icechunk_async.sync.asking import Asking
from icechunk_async.sync.errors import ErrorKind
from icechunk_async.sync.refusals import refusal

__all__ = ["RefOperations"]


class RefOperations(Asking):
    """A base of the repository. Snapshot ids are text."""

    def create_branch(self, branch: str, snapshot_id: str) -> None:
        """Create a branch whose tip is a snapshot.

        Raises:
            AlreadyExistsError, SnapshotNotFoundError, InvalidInputError: nothing changed.
        """
        self._ask(lambda it: it.create_branch(branch, snapshot_id))

    async def create_branch_async(self, branch: str, snapshot_id: str) -> None:
        """Await what :meth:`create_branch` does."""
        await self._ask_async(lambda it: it.create_branch(branch, snapshot_id))

    def list_branches(self) -> set[str]:
        """Return the names of all branches."""
        return self._ask(lambda it: it.list_branches())

    async def list_branches_async(self) -> set[str]:
        """Await what :meth:`list_branches` answers."""
        return await self._ask_async(lambda it: it.list_branches())

    def lookup_branch(self, branch: str) -> str:
        """Return the tip of a branch.

        Raises:
            RefNotFoundError: there is no such branch.
        """
        return str(self._ask(lambda it: it.lookup_branch(branch)))

    async def lookup_branch_async(self, branch: str) -> str:
        """Await what :meth:`lookup_branch` answers."""
        return str(await self._ask_async(lambda it: it.lookup_branch(branch)))

    def reset_branch(
        self, branch: str, snapshot_id: str, *, from_snapshot_id: str | None = None
    ) -> None:
        """Move a branch to any snapshot.

        Args:
            branch: the branch.
            snapshot_id: its new tip.
            from_snapshot_id: move it only if this is its tip now.

        Raises:
            RefNotFoundError, SnapshotNotFoundError: nothing changed.
            ConflictError: its tip is not ``from_snapshot_id``.
        """
        self._ask(
            lambda it: it.reset_branch(branch, snapshot_id, from_snapshot_id=from_snapshot_id)
        )

    async def reset_branch_async(
        self, branch: str, snapshot_id: str, *, from_snapshot_id: str | None = None
    ) -> None:
        """Await what :meth:`reset_branch` does."""
        await self._ask_async(
            lambda it: it.reset_branch(branch, snapshot_id, from_snapshot_id=from_snapshot_id)
        )

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; its snapshots stay until they are collected.

        Raises:
            RefNotFoundError: there is no such branch.
            SessionStateError: ``main`` cannot be deleted.
        """
        _check_deletable(branch)
        self._ask(lambda it: it.delete_branch(branch))

    async def delete_branch_async(self, branch: str) -> None:
        """Await what :meth:`delete_branch` does."""
        _check_deletable(branch)
        await self._ask_async(lambda it: it.delete_branch(branch))

    def create_tag(self, tag: str, snapshot_id: str) -> None:
        """Give a snapshot a name for good.

        Raises:
            AlreadyExistsError: the name is taken, or was once; nothing changed.
            SnapshotNotFoundError, InvalidInputError: nothing changed.
        """
        self._ask(lambda it: it.create_tag(tag, snapshot_id))

    async def create_tag_async(self, tag: str, snapshot_id: str) -> None:
        """Await what :meth:`create_tag` does."""
        await self._ask_async(lambda it: it.create_tag(tag, snapshot_id))

    def list_tags(self) -> set[str]:
        """Return the names of all tags; deleted ones are not among them."""
        return self._ask(lambda it: it.list_tags())

    async def list_tags_async(self) -> set[str]:
        """Await what :meth:`list_tags` answers."""
        return await self._ask_async(lambda it: it.list_tags())

    def lookup_tag(self, tag: str) -> str:
        """Return the snapshot of a tag.

        Raises:
            RefNotFoundError: there is no such tag, or it was deleted.
        """
        return str(self._ask(lambda it: it.lookup_tag(tag)))

    async def lookup_tag_async(self, tag: str) -> str:
        """Await what :meth:`lookup_tag` answers."""
        return str(await self._ask_async(lambda it: it.lookup_tag(tag)))

    def delete_tag(self, tag: str) -> None:
        """Delete a tag; its name is never used again.

        Raises:
            RefNotFoundError: there is no such tag.
        """
        self._ask(lambda it: it.delete_tag(tag))

    async def delete_tag_async(self, tag: str) -> None:
        """Await what :meth:`delete_tag` does."""
        await self._ask_async(lambda it: it.delete_tag(tag))


def _check_deletable(branch: str) -> None:
    if branch == "main":
        raise refusal(
            SessionStateError(
                "The branch 'main' cannot be deleted. Reset it to another snapshot instead."
            ),
            ErrorKind.CANNOT_DELETE_MAIN,
        )

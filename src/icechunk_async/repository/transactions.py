"""A session, what is done in it and its commit as one ``async with`` block."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async.format.metadata import JSON
    from icechunk_async.repository.conflicts import ConflictSolver
    from icechunk_async.repository.session import Session
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["TransactionOperations"]


class TransactionOperations:
    """Transactions of an open repository; a base of the repository."""

    @abstractmethod
    async def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch."""

    @asynccontextmanager
    async def transaction(
        self,
        branch: str,
        *,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[IcechunkStore]:
        """Commit what is written in the block, all at once when it ends.

        If the block fails or is cancelled, nothing is committed; no other writer ever sees a
        part of it. Its store only reads afterwards.

        Args:
            branch: where to commit.
            message: says what was done, for people.
            metadata: properties of the snapshot; see ``Session.commit``, also for what follows.
            rebase_with: where another writer was first, replay the block's changes on top.
            rebase_tries: how often at most.
            timeout_seconds: how long the commit may take; the block may take as long as it likes.

        Raises:
            NothingToCommitError: the block changed nothing.
            ConflictError, RebaseFailedError, OutcomeUnknownError: as ``Session.commit``. The
                session is at ``store.session``, with its changes.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: before the block.

        Cancellation: within the block nothing is committed; while it is committed, it may be.
        """
        session = await self.writable_session(branch)
        yield session.store
        await session.commit(
            message,
            metadata,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            timeout_seconds=timeout_seconds,
        )

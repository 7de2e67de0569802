"""Beginning sessions, and transactions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from icechunk_async.sync.asking import Asking
from icechunk_async.sync.conversion import check_aware, check_one
from icechunk_async.sync.portal import run, run_async
from icechunk_async.sync.session import Session
from icechunk_async.sync.session_handles import SessionHandle

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime

    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["SessionOperations"]


class SessionOperations(Asking):
    """A base of the repository."""

    async def _readonly(
        self,
        branch: str | None,
        tag: str | None,
        snapshot_id: str | None,
        as_of: datetime | None,
    ) -> Session:
        if as_of is not None:
            check_aware(as_of, "as_of")
        check_one(branch, tag, snapshot_id)
        return Session(
            await SessionHandle.of(
                self._repository,
                lambda it: it.readonly_session(
                    branch, tag=tag, snapshot_id=snapshot_id, as_of=as_of
                ),
            )
        )

    def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """Begin a session that reads one snapshot, whatever others commit meanwhile.

        Args:
            branch: read its tip.
            tag: read its snapshot.
            snapshot_id: read this snapshot.
            as_of: with a branch: read what was its tip at this time, by the writers' clocks.

        Raises:
            RefNotFoundError, SnapshotNotFoundError: there is none.
            InvalidInputError: not exactly one was named, or ``as_of`` without a branch.
        """
        return run(self._readonly(branch, tag, snapshot_id, as_of))

    async def readonly_session_async(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """Await what :meth:`readonly_session` answers."""
        return await run_async(self._readonly(branch, tag, snapshot_id, as_of))

    async def _writable(self, branch: str) -> Session:
        return Session(
            await SessionHandle.of(self._repository, lambda it: it.writable_session(branch))
        )

    def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch.

        Raises:
            RefNotFoundError: there is no such branch.
            ReadOnlyError: the repository's status forbids changes.
        """
        return run(self._writable(branch))

    async def writable_session_async(self, branch: str) -> Session:
        """Await what :meth:`writable_session` answers."""
        return await run_async(self._writable(branch))

    async def _rearrange(self, branch: str) -> Session:
        return Session(
            await SessionHandle.of(self._repository, lambda it: it.rearrange_session(branch))
        )

    def rearrange_session(self, branch: str) -> Session:
        """Begin a transaction that only moves nodes; format version 2.

        Raises:
            RefNotFoundError: there is no such branch.
            ReadOnlyError: the repository's status forbids changes.
        """
        return run(self._rearrange(branch))

    async def rearrange_session_async(self, branch: str) -> Session:
        """Await what :meth:`rearrange_session` answers."""
        return await run_async(self._rearrange(branch))

    @contextmanager
    def transaction(
        self,
        branch: str,
        *,
        message: str,
        metadata: dict[str, Any] | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
    ) -> Generator[IcechunkStore]:
        """Write to a store in a ``with`` block and commit at its end, unless the block failed.

        Args and errors: as :meth:`Session.commit <icechunk_async.sync.Session.commit>`.
        """
        session = self.writable_session(branch)
        yield session.store
        session.commit(
            message=message,
            metadata=metadata,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
        )

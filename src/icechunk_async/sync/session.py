"""Sessions for code that blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync.portal import run
from icechunk_async.zarr.store import IcechunkStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.metadata import JSON
    from icechunk_async.repository.conflicts import ConflictSolver
    from icechunk_async.repository.diff import Diff
    from icechunk_async.repository.session import Session as AsyncSession
    from icechunk_async.repository.session import SessionMode

__all__ = ["Session"]


class Session:
    """A snapshot to read, or one transaction on a branch; every method blocks until it is done.

    Arguments, results and errors are those of :class:`icechunk_async.Session`.
    """

    def __init__(self, session: AsyncSession, owner: object) -> None:
        """Use ``Repository.readonly_session`` or ``Repository.writable_session``."""
        self._session = session
        self._owner = owner  # the repository closes when nothing refers to it any more

    def __repr__(self) -> str:
        """Show mode, branch and snapshot."""
        return repr(self._session)

    @property
    def mode(self) -> SessionMode:
        """What the session may do."""
        return self._session.mode

    @property
    def read_only(self) -> bool:
        """Whether the session only reads."""
        return self._session.read_only

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the session stands on."""
        return self._session.snapshot_id

    @property
    def branch(self) -> str | None:
        """The branch that a writable session commits to."""
        return self._session.branch

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether a commit would change anything."""
        return self._session.has_uncommitted_changes

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the session's hierarchy, for ``zarr`` and ``xarray``."""
        session = self._session
        return IcechunkStore(session, read_only=session.read_only, keep_alive=self._owner)

    def status(self) -> Diff:
        """Answer what the session changed so far."""
        return self._session.status()

    def discard_changes(self) -> None:
        """Forget every change of the session."""
        self._session.discard_changes()

    def commit(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        allow_empty: bool = False,
    ) -> SnapshotId:
        """Publish the session's changes as a new snapshot on its branch, all at once."""
        return run(
            self._session.commit(
                message,
                metadata,
                rebase_with=rebase_with,
                rebase_tries=rebase_tries,
                timeout_seconds=timeout_seconds,
                allow_empty=allow_empty,
            )
        )

    def amend(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        allow_empty: bool = False,
    ) -> SnapshotId:
        """Replace the tip of the branch by a snapshot with the session's changes."""
        return run(self._session.amend(message, metadata, allow_empty=allow_empty))

    def flush(self, message: str, metadata: Mapping[str, JSON] | None = None) -> SnapshotId:
        """Make a snapshot of the session's changes that no branch holds."""
        return run(self._session.flush(message, metadata))

    def rebase(self, solver: ConflictSolver) -> None:
        """Replay the session's changes on top of the newer commits of its branch."""
        run(self._session.rebase(solver))

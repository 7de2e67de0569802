"""Sessions with the official engine's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.sync._display import Displayed
from icechunk_async.sync._mirrors import to_native
from icechunk_async.sync._states import SessionMode
from icechunk_async.sync.config import RepositoryConfig
from icechunk_async.sync.errors import coded, translated
from icechunk_async.sync.portal import run, run_async
from icechunk_async.sync.session_nodes import NodeOperations
from icechunk_async.sync.snapshots import Diff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.session import AnySession as AsyncSession
    from icechunk_async.sync._display import Rows
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.session_handles import SessionHandle
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["ForkSession", "Session", "SessionMode"]


class Session(NodeOperations, Displayed):
    """A snapshot to read, and for a writable session one transaction on a branch.

    Made by ``Repository.readonly_session``, ``writable_session`` and ``rearrange_session``. What
    blocks here is awaited in the method of the same name with ``_async``. Only sessions that only
    read can be pickled; see :meth:`fork` for the others.
    """

    def __init__(self, session: SessionHandle) -> None:
        """Use the methods of a repository."""
        self._session = session

    def _rows(self) -> Rows:
        rows: list[tuple[str, object]] = [
            ("read_only", self.read_only),
            ("snapshot_id", self.snapshot_id),
        ]
        if not self.read_only:
            rows.append(("branch", self.branch))
            rows.append(("has_uncommitted_changes", self.has_uncommitted_changes))
        return rows

    def __eq__(self, value: object) -> bool:
        """Return whether both are the same session; two of one snapshot are not."""
        return isinstance(value, Session) and self._session is value._session

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash(id(self._session))

    def __getstate__(self) -> object:
        """Return plain data.

        Raises:
            ValueError: the session can write, and a copy of it could not commit.
        """
        return {"_session": self._session}

    def __setstate__(self, state: object) -> None:
        """Stand on the same snapshot; it is opened at the first use."""
        if not isinstance(state, dict):
            raise ValueError("Invalid state")  # noqa: TRY004 -- the official engine's
        self._session = state["_session"]

    @property
    def read_only(self) -> bool:
        """Whether the session only reads; so it does once it was committed."""
        return self._session.read_only

    @property
    def mode(self) -> SessionMode:
        """What the session may do."""
        return SessionMode[self._session.mode]

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the session stands on."""
        return self._session.snapshot_id

    @property
    def branch(self) -> str | None:
        """The branch that the session commits to; None if it only reads."""
        return self._session.branch

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether a commit would change anything."""
        return self._session.has_uncommitted_changes

    @property
    def config(self) -> RepositoryConfig:
        """The configuration of the repository."""
        return RepositoryConfig.from_native(self._session.repository.now().config)

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the session's hierarchy, for ``zarr`` and ``xarray``."""
        from icechunk_async.sync.store import IcechunkStore  # noqa: PLC0415 -- zarr loads slowly

        return IcechunkStore(self._session)

    def status(self) -> Diff:
        """Return what the session changed so far."""
        with translated():
            return Diff.from_native(self._session.now().status())

    def discard_changes(self) -> None:
        """Forget every change of the session.

        Raises:
            ReadOnlyError: the session cannot change anything, or is being committed.
        """
        with translated(), coded("read-only-session"):
            self._session.now().discard_changes()

    async def _publish[T](self, question: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Ask what only a session that may commit can answer."""

        async def asked(session: AsyncSession) -> T:
            with coded("commit-not-allowed"):
                return await question(session)

        return await self._session.ask(asked)

    async def _commit(
        self,
        message: str,
        metadata: dict[str, Any] | None,
        rebase_with: ConflictSolver | None,
        rebase_tries: int,
        allow_empty: bool,  # noqa: FBT001
    ) -> str:
        solver = to_native(rebase_with)
        return str(
            await self._publish(
                lambda session: session.commit(
                    message,
                    metadata,
                    rebase_with=solver,
                    rebase_tries=rebase_tries,
                    allow_empty=allow_empty,
                )
            )
        )

    def commit(
        self,
        message: str,
        metadata: dict[str, Any] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        allow_empty: bool = False,
    ) -> str:
        """Publish the session's changes as a new snapshot on its branch, all at once.

        Afterwards the session only reads and stands on the new snapshot.

        Args:
            message: says what was done, for people.
            metadata: properties of the snapshot, JSON values by name; laid over the
                repository's default commit metadata.
            rebase_with: where another writer was first, replay the changes on top and try
                again, letting this solver decide conflicts. Without it such a race is lost.
            rebase_tries: how often at most.
            allow_empty: make a snapshot even if nothing changed.

        Returns: the id of the new snapshot.

        Raises:
            ConflictError: another writer was first; nothing was published, no change is lost.
            RebaseFailedError: the solver did not settle a conflict; likewise.
            SessionStateError: nothing changed, or the session only reads.

        An interrupt or a deadline may come after the commit was published: commit the same
        session again to find out.
        """
        return run(self._commit(message, metadata, rebase_with, rebase_tries, allow_empty))

    async def commit_async(
        self,
        message: str,
        metadata: dict[str, Any] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        allow_empty: bool = False,
    ) -> str:
        """Await what :meth:`commit` does."""
        return await run_async(
            self._commit(message, metadata, rebase_with, rebase_tries, allow_empty)
        )

    async def _amend(
        self,
        message: str,
        metadata: dict[str, Any] | None,
        allow_empty: bool,  # noqa: FBT001
    ) -> str:
        return str(
            await self._publish(
                lambda session: session.amend(message, metadata, allow_empty=allow_empty)
            )
        )

    def amend(
        self,
        message: str,
        *,
        metadata: dict[str, Any] | None = None,
        allow_empty: bool = False,
    ) -> str:
        """Replace the tip of the branch by a snapshot with the session's changes on top of it.

        Message and properties are replaced, not joined. Needs format version 2.

        Raises:
            SessionStateError: the tip is the first snapshot, or moved nodes.
            ConflictError: as :meth:`commit`.
        """
        return run(self._amend(message, metadata, allow_empty))

    async def amend_async(
        self,
        message: str,
        *,
        metadata: dict[str, Any] | None = None,
        allow_empty: bool = False,
    ) -> str:
        """Await what :meth:`amend` does."""
        return await run_async(self._amend(message, metadata, allow_empty))

    async def _flush(self, message: str, metadata: dict[str, Any] | None) -> str:
        return str(await self._session.ask(lambda session: session.flush(message, metadata)))

    def flush(self, message: str, *, metadata: dict[str, Any] | None = None) -> str:
        """Make a snapshot of the session's changes that no branch holds.

        It can be read by its id, and a branch or tag can be set to it. Afterwards the session
        only reads and stands on it.
        """
        return run(self._flush(message, metadata))

    async def flush_async(self, message: str, *, metadata: dict[str, Any] | None = None) -> str:
        """Await what :meth:`flush` does."""
        return await run_async(self._flush(message, metadata))

    def rebase(self, solver: ConflictSolver) -> None:
        """Replay the session's changes on top of the newer commits of its branch.

        Raises:
            RebaseFailedError: a conflict that the solver did not settle. The session stands on
                the last commit that did not clash, with its changes.
        """
        given = to_native(solver)
        run(self._publish(lambda session: session.rebase(given)))

    async def rebase_async(self, solver: ConflictSolver) -> None:
        """Await what :meth:`rebase` does."""
        given = to_native(solver)
        await run_async(self._publish(lambda session: session.rebase(given)))

    async def _merge(self, others: tuple[ForkSession, ...]) -> None:
        forks = [other._session.fork for other in others]  # noqa: SLF001 -- a class of this module
        await self._session.ask(lambda session: session.merge(*forks))

    def merge(self, *others: ForkSession) -> None:
        """Take in the changes of forks of this session.

        Raises:
            SessionStateError: one was not forked from here.
            ConflictError: two changed the same; nothing was merged.
        """
        run(self._merge(others))

    async def merge_async(self, *others: ForkSession) -> None:
        """Await what :meth:`merge` does."""
        await run_async(self._merge(others))

    async def _fork(self) -> SessionHandle:
        return self._session.nested(await self._session.ask(lambda session: session.fork()))

    def fork(self) -> ForkSession:
        """Return a child that can be pickled and written to elsewhere; see :meth:`merge`.

        Raises:
            SessionStateError: the session only reads: pickle it as it is.
        """
        return ForkSession(run(self._fork()))


class ForkSession(Session):
    """A child of a writable session: it pickles, and is merged back instead of committed."""

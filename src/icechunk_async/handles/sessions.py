"""The handle of a native session, shared by a session for code that blocks and its stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.processes import generation
from icechunk_async.errors import SessionStateError, WrongTypeError
from icechunk_async.format.ids import SessionId
from icechunk_async.session import ForkSession as AsyncForkSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractContextManager

    from icechunk_async.handles.repositories import RepositoryHandle
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.session import AnySession as AsyncSession

__all__ = ["SessionHandle", "not_a_fork"]

_ADVICE: Final = (
    "A writable session stays in its process: a copy could not commit. Make one child per task "
    "with Session.fork(), pickle those, and Session.merge() what comes back before the commit. "
    "To only read elsewhere, pickle a session of Repository.readonly_session(). To write dask "
    "arrays of an xarray dataset, use icechunk_async.sync.xarray.to_icechunk()."
)


class SessionHandle:
    """One session of a repository.

    A handle that was unpickled opens its session at the first use. So does one of a read-only
    session or of a fork that a process inherited by `os.fork`: the connections belong to the
    parent's loop. A writable session is refused there, since two copies would commit.
    """

    def __init__(
        self,
        repository: RepositoryHandle[Any],
        session: AsyncSession | None,
        *,
        snapshot_id: str | None = None,
    ) -> None:
        """Take a native session, or the id of a snapshot to read."""
        self.repository = repository
        self._session = session
        self._snapshot_id = snapshot_id
        self._generation = generation()
        self._opening: SingleFlight[int, AsyncSession] = SingleFlight()

    async def forked(self) -> SessionHandle:
        """Return the handle of a fork of this session; on the portal's loop."""
        return SessionHandle(self.repository, await self.ask(lambda session: session.fork()))

    def __getstate__(self) -> dict[str, Any]:
        if self.is_fork:
            return {"repository": self.repository, "fork": self.fork_bytes()}
        if not self.read_only:
            raise ValueError(_ADVICE)
        return {"repository": self.repository, "snapshot_id": self.snapshot_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fork = AsyncForkSession.from_bytes(state["fork"]) if "fork" in state else None
        SessionHandle.__init__(
            self, state["repository"], fork, snapshot_id=state.get("snapshot_id")
        )

    def errors(self) -> AbstractContextManager[None, None]:
        """Return a block that raises the errors that callers expect for those of the library."""
        block: AbstractContextManager[None, None] = self.repository.source.errors()
        return block

    @property
    def read_only(self) -> bool:
        """Whether the session only reads."""
        return self._session is None or (not self.is_fork and self._session.read_only)

    @property
    def mode(self) -> str:
        """The kind of session: `readonly`, `writable` or `rearrange`."""
        return "readonly" if self._session is None else self._session.mode.value

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the session is based on."""
        if self._session is not None:
            return str(self._session.snapshot_id)
        assert self._snapshot_id is not None
        return self._snapshot_id

    @property
    def session_id(self) -> str:
        """The name of a session that can write, and of its forks.

        Raises:
            SessionStateError: the session only reads.
        """
        if self._session is None:
            with self.errors():
                raise SessionStateError("A session that was unpickled to read has no id.")
        return str(SessionId(self._session.session_id))

    @property
    def branch(self) -> str | None:
        """The branch that a writable session commits to."""
        if self._session is None or self.read_only:
            return None
        return self._session.branch

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether a commit, or a merge, would change anything."""
        session = self._session
        return session is not None and not self.read_only and session.has_uncommitted_changes

    @property
    def is_fork(self) -> bool:
        """Whether it is a fork of a writable session."""
        return isinstance(self._session, AsyncForkSession)

    @property
    def fork(self) -> AsyncForkSession:
        """The native fork, which need not be open to be merged.

        Raises:
            SessionStateError: the session is not a fork.
        """
        if not isinstance(self._session, AsyncForkSession):
            with self.errors():
                raise SessionStateError(
                    "Only forks can be merged: make them with Session.fork().",
                    code="merge-not-allowed",
                )
        return self._session

    @property
    def unmerged_forks(self) -> tuple[str, ...]:
        """The names of forks that were neither merged nor discarded."""
        return () if self._session is None else self._session.unmerged_forks

    def discard_forks(self, *names: str) -> None:
        """No longer wait for forks."""
        session = self._session
        if session is not None:
            with self.errors():
                session.discard_fork(*names)

    def fork_bytes(self) -> bytes:
        """Return the changes of the fork; blocks until its chunks are stored and durable."""
        fork = self.fork
        if fork.is_attached and fork.has_uncommitted_changes:
            with self.errors():
                run(fork.store_pending_chunks())
        return fork.to_bytes()

    @property
    def ready(self) -> AsyncSession | None:
        """The native session, if it is open."""
        session = self._session
        if isinstance(session, AsyncForkSession):
            return session if session.is_attached else None
        if session is not None and self._generation != generation():
            if session.read_only:
                return None
            with self.errors():
                raise SessionStateError(f"This process inherited the session by os.fork. {_ADVICE}")
        return session

    @property
    def known(self) -> AsyncSession | None:
        """The native session as `ready`, for showing it: None for one that may not be used here."""
        return self.ready if self._generation == generation() else None

    async def session(self) -> AsyncSession:
        """Return the native session; on the portal's loop."""
        ready = self.ready
        if ready is None:
            ready = await self._opening.run(0, self._reopen)
            self._session, self._generation = ready, generation()
        return ready

    async def _reopen(self) -> AsyncSession:
        fork = self._session
        if isinstance(fork, AsyncForkSession):
            await self.repository.ask(lambda repository: _attach(fork, repository))
            return fork
        snapshot_id = self.snapshot_id
        return await self.repository.ask(
            lambda repository: repository.readonly_session(snapshot_id=snapshot_id)
        )

    def now(self) -> AsyncSession:
        """Return the native session; blocks if it must be opened first."""
        with Shortened():  # errors show the caller, not this line
            return self.ready or run(self.session())

    async def ask[T](self, question: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Put a question to the session; on the portal's loop. Errors are the source's."""
        with self.errors():
            return await question(await self.session())

    async def each[T](
        self, question: Callable[[AsyncSession], AsyncIterator[T]]
    ) -> AsyncIterator[T]:
        """Iterate over the replies to a question; on the portal's loop."""
        with self.errors():
            async for item in question(await self.session()):
                yield item


def not_a_fork(value: object) -> WrongTypeError:
    """Return the error for something to merge that is neither a fork nor any other session."""
    return WrongTypeError(
        f"Only forks can be merged, made by Session.fork; this is a {type(value).__name__}."
    )


async def _attach(fork: AsyncForkSession, repository: AsyncRepository) -> None:
    """Let a fork that arrived read and write through the repository that the process shares."""
    engine = repository.engine
    base = await engine.assets.snapshot(fork.snapshot_id)
    fork.attach(engine, base)

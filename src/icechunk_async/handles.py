"""Open repositories and sessions that code which blocks can use anywhere.

A handle opens at its first use, also in a process to which it was pickled, or forked. What is asked
runs on the loop of code that blocks. One handle of a repository is shared by a repository for code
that blocks and its sessions, one of a session by that session and its stores. Handles do not know
the classes that they are for: a `Source` says how to open, and whose errors to raise.

A source, plain data, travels between processes. All unpickled sessions and stores with equal
sources share one open repository in a process, and the last few of these repositories stay open.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import weakref
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from icechunk_async._runtime.blocking.portal import at_exit, run, run_async, run_later
from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.processes import generation
from icechunk_async.engine.open import open_engine
from icechunk_async.errors import SessionStateError, StorageClosedError, WrongTypeError
from icechunk_async.format.ids import SessionId
from icechunk_async.session import ForkSession as AsyncForkSession

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from icechunk_async.engine.open import Engine, Origin
    from icechunk_async.session import AnySession as AsyncSession

__all__ = ["Elsewhere", "Here", "RepositoryHandle", "SessionHandle", "Source", "not_a_fork"]

_KEPT_OPEN: Final = 4
"""Else each task of a worker, which unpickles its store, would open the repository again."""
_ADVICE: Final = (
    "A writable session stays in its process: a copy could not commit. Make one child per task "
    "with Session.fork(), pickle those, and Session.merge() what comes back before the commit. "
    "To only read elsewhere, pickle a session of Repository.readonly_session(). To write dask "
    "arrays of an xarray dataset, use icechunk_async.sync.xarray.to_icechunk()."
)
# Strong: at exit all that is open is closed, whatever became of its handle.
_all_open: Final[set[_Open[Any]]] = set()
_handles: Final[weakref.WeakValueDictionary[bytes, RepositoryHandle[Any, Any]]] = (
    weakref.WeakValueDictionary()
)
_recent: Final[deque[RepositoryHandle[Any, Any]]] = deque(maxlen=_KEPT_OPEN)
_sharing = threading.Lock()


class Source[R](Protocol):
    """How a repository is opened; plain data that pickles, equal to its copies."""

    def opening(self) -> AbstractAsyncContextManager[R]:
        """Open the repository for the length of a block."""
        ...

    def settle(self, repository: R) -> None:
        """Give an open repository the settings of the source that may change while it is open."""
        ...

    def errors(self) -> AbstractContextManager[None, None]:
        """Return a block that raises the errors that callers expect for those of the library."""
        ...


class RepositoryHandle[S: Source[Any], R]:
    """A repository as its source opens it, which is open or opens at its first use.

    It closes with `close`, when nothing refers to the handle any more, or with the process.
    """

    def __init__(self, source: S) -> None:
        """Keep the source; nothing is opened yet."""
        self.source = source
        self._open: _Open[R] | None = None
        self._opening: SingleFlight[int, None] = SingleFlight()
        self._opener: tuple[int, asyncio.Task[Any]] | None = None
        """The task that opens the repository at present, and the generation of its loop."""
        self._closed: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Its bytes are the key of the shared handles: sources hold dictionaries of options, and do
        # not hash.
        return _shared, (pickle.dumps(self.source),)

    async def enter(self, manager: AbstractAsyncContextManager[R]) -> None:
        """Open the repository with `manager`. Cancellation: it closes again."""
        with self.source.errors():
            opened = await _Open[R].enter(manager)
        self._keep(opened)

    def _keep(self, opened: _Open[R]) -> None:
        self.source.settle(opened.repository)  # it may have changed since the opening began
        weakref.finalize(self, opened.close_later).atexit = False  # at exit, the portal closes it
        self._open = opened

    @property
    def ready(self) -> R | None:
        """The repository, if it is open."""
        opened = self._open
        if opened is None or opened.generation != generation() or self._closed is not None:
            return None
        return opened.repository

    async def repository(self) -> R:
        """Return the repository; on the portal's loop."""
        ready = self.ready
        if ready is not None:
            return ready
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        try:
            # One opening for all who wait, which ends when the last of them is cancelled.
            await self._opening.run(0, self._enter_source)
        except asyncio.CancelledError:
            # `close` cancels the opening and not those who wait for it. They get its advice and not
            # a CancelledError, which nobody asked for.
            if self._closed is None or _is_being_cancelled():
                raise
        ready = self.ready
        if ready is None:
            assert self._closed is not None  # by another thread in the meantime
            raise self._closed.with_traceback(None)
        return ready

    async def _enter_source(self) -> None:
        """Open the repository and keep it: nobody else would close it if all who wait gave up."""
        task = asyncio.current_task()
        assert task is not None  # of the flight
        # Before the first await: `close` in another thread finds the task, or `_closed` is seen
        # below.
        self._opener = generation(), task
        try:
            opened = await _Open[R].enter(self.source.opening())
            if self._closed is None:
                self._keep(opened)
            else:
                # Closed while it opened, and too late to be cancelled. Nobody else knows of what
                # was opened.
                await opened.close()
        finally:
            self._opener = None  # after the result is kept, so that `close` sees one of both

    def now(self) -> R:
        """Return the repository; blocks if it must be opened first."""
        with Shortened():  # errors show the caller, not this line
            return self.ready or run(self.ask(_itself))

    async def ask[T](self, question: Callable[[R], Awaitable[T]]) -> T:
        """Put a question to the repository; on the portal's loop. Errors are the source's."""
        with self.source.errors():
            return await question(await self.repository())

    async def each[T, U](
        self, question: Callable[[R], AsyncIterator[T]], convert: Callable[[T], U]
    ) -> AsyncIterator[U]:
        """Iterate over the replies to a question; on the portal's loop."""
        with self.source.errors():
            async for item in question(await self.repository()):
                yield convert(item)

    def settle(self, source: S) -> None:
        """Take a source with other settings, also for the repository if it is open."""
        self.source = source
        if self.ready is not None:
            source.settle(self.ready)

    def close(self, advice: str = "") -> None:
        """Close the repository for good, also if it is being opened.

        Args:
            advice: the message for later uses of the handle; a general one if empty.
        """
        if self._closed is None:
            self._closed = (
                RuntimeError(advice)
                if advice
                else StorageClosedError("The repository was closed. Open it again.")
            )
        # In this order: whatever opens it keeps the result before it forgets the task.
        if self._opener is not None or self._open is not None:
            # On the portal's loop, where clients were opened; this may be any thread.
            run(self._end())

    async def _end(self) -> None:
        """Give up the opening, and close what is open; in this process and on the portal's loop."""
        if self._opener is not None and self._opener[0] == generation():
            opener = self._opener[1]
            opener.cancel()
            # Waits and does not await: the error of the opening belongs to those who asked for it.
            await asyncio.wait([opener])
        if self._open is not None and self._open.generation == generation():
            await self._open.close()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Open[R]:
    """An open repository, and how to close it."""

    def __init__(self, repository: R, stack: AsyncExitStack) -> None:
        self.repository = repository
        self.generation = generation()
        self._stack = stack
        _all_open.add(self)

    @classmethod
    async def enter(cls, manager: AbstractAsyncContextManager[R]) -> Self:
        async with AsyncExitStack() as stack:
            repository = await stack.enter_async_context(manager)
            # From here on it is open until it is closed. If anything failed before, the block has
            # closed it.
            return cls(repository, stack.pop_all())

    async def close(self) -> None:
        # Taken out before the await: of `close`, a finalizer and the exit, only the first closes
        # it.
        if self in _all_open:
            _all_open.discard(self)
            await self._stack.aclose()

    def close_later(self) -> None:
        if self.generation == generation():
            # Not waited for: a finalizer runs on any thread, also on that of the loop, which would
            # wait for itself.
            run_later(self.close())


async def _close_all() -> None:
    for opened in list(_all_open):
        if opened.generation == generation():  # others are closed by the parent process
            await opened.close()


async def _itself[R](repository: R) -> R:
    return repository


def _shared(source: bytes) -> RepositoryHandle[Any, Any]:
    """Return the handle of this process for a pickled source."""
    with _sharing:
        # Weak, so that what nobody uses closes; `_recent` holds the last few for the next task.
        handle = _handles.get(source)
        if handle is None:
            handle = _handles[source] = RepositoryHandle(
                pickle.loads(source)  # noqa: S301 -- within a pickle that is being read anyway
            )
        if handle not in _recent:
            _recent.append(handle)
        return handle


at_exit(_close_all)


def _new_lock() -> None:
    global _sharing  # noqa: PLW0603 -- another thread may have held it when this process forked
    _sharing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


class SessionHandle:
    """One session of a repository.

    A handle that was unpickled opens its session at the first use. So does one of a read-only
    session or of a fork that a process inherited by `os.fork`: the connections belong to the
    parent's loop. A writable session is refused there, since two copies would commit.
    """

    def __init__(
        self,
        repository: RepositoryHandle[Any, Any],
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
        # By id: all who unpickle it read one state, wherever the branch is by then.
        return {"repository": self.repository, "snapshot_id": self.snapshot_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Without the origin: the repository handle says where it is, and holds the secrets once.
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
        return self._session is None or self._session.read_only

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
        # Pickling cannot await, so it blocks. What did not change needs no request, and most forks
        # that are sent out are empty.
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
            # A reader stands on a snapshot that never changes: the child opens it again by its id.
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
            # Several who wait set the same session.
            self._session, self._generation = ready, generation()
        return ready

    async def _reopen(self) -> AsyncSession:
        fork = self._session
        if isinstance(fork, AsyncForkSession):
            await self.repository.ask(lambda repository: _attach(fork, repository.engine))
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


async def _attach(fork: AsyncForkSession, engine: Engine) -> None:
    """Let a fork that arrived read and write through the repository that the process shares."""
    base = await engine.assets.snapshot(fork.snapshot_id)
    fork.attach(engine, base)


# Where datasets of many versions read


class Elsewhere:
    """A repository that opens where it is needed, in this process or another."""

    def __init__(self, handle: RepositoryHandle[Any, Any]) -> None:
        """Read through a handle, whose errors are raised."""
        self._handle = handle

    def run[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `icechunk_async.datasets.cube.Home`."""
        return run(self._handle.ask(lambda it: question(it.engine)))

    async def run_async[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `icechunk_async.datasets.cube.Home`."""
        return await run_async(self._handle.ask(lambda it: question(it.engine)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (self._handle,)


class Here:
    """An open repository of asyncio; a pickled copy opens it elsewhere."""

    def __init__(self, engine: Engine) -> None:
        """Read while the repository is open."""
        self._engine = engine

    def run[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `icechunk_async.datasets.cube.Home`."""

        async def ask() -> T:
            return await question(self._engine)

        # On the portal's loop and not the repository's: `run` blocks the caller, who may be on that
        # one. The engine serves several loops.
        return run(ask())

    async def run_async[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `icechunk_async.datasets.cube.Home`: on the caller's own loop."""
        return await question(self._engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (RepositoryHandle[_Native, _Opened](_Native(self._engine.origin)),)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open repository, of which only the engine is needed."""

    engine: Engine


@dataclass(frozen=True, slots=True)
class _Native:
    """Opens a repository with the same arguments as before, and raises the library's own errors."""

    origin: Origin

    @asynccontextmanager
    async def opening(self) -> AsyncGenerator[_Opened]:
        """Open it; the credentials and options are in the origin."""
        # The engine alone: it is all that reading needs, and handles lie below `Repository`.
        async with open_engine(self.origin.request(None, None)) as engine:
            yield _Opened(engine)

    def settle(self, repository: _Opened) -> None:
        """Change nothing: who only reads has no settings."""

    def errors(self) -> AbstractContextManager[None, None]:
        """Return a block that leaves errors unchanged."""
        return nullcontext()

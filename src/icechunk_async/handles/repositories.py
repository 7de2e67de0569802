"""The handle of a native repository, shared by a repository for code that blocks and its sessions.

A `Source`, plain data, travels between processes. An unpickled repository, session or store opens
at its first use. All unpickled sessions and stores with equal sources share one open repository in
a process, and the last few of these repositories stay open.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import weakref
from collections import deque
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from icechunk_async._runtime.blocking.portal import at_exit, run, run_later
from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.processes import generation
from icechunk_async.errors import StorageClosedError
from icechunk_async.format.json.metadata import encode_items

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from icechunk_async.repository import Repository as AsyncRepository

__all__ = ["RepositoryHandle", "Source"]

_KEPT_OPEN: Final = 4
_NEWEST: Final = 2
"""The version of the format whose metadata takes the most."""


class Source(Protocol):
    """How a repository is opened; plain data that pickles, equal to its copies."""

    @property
    def default_metadata(self) -> Mapping[str, Any]:
        """The properties of all commits."""
        ...

    def opening(self) -> AbstractAsyncContextManager[AsyncRepository]:
        """Open the repository for the length of a block."""
        ...

    def with_metadata(self, metadata: Mapping[str, Any]) -> Self:
        """Return the source with other properties of all commits."""
        ...

    def errors(self) -> AbstractContextManager[None, None]:
        """Return a block that raises the errors that callers expect for those of the library."""
        ...


class RepositoryHandle[S: Source]:
    """A native repository, which is open or opens at its first use.

    It closes with `close`, when nothing refers to the handle any more, or with the process.
    """

    def __init__(self, source: S) -> None:
        """Keep the source; nothing is opened yet."""
        self.source = source
        self._open: _Open | None = None
        self._opening: SingleFlight[int, None] = SingleFlight()
        self._opener: tuple[int, asyncio.Task[Any]] | None = None
        """The task that opens the repository at present, and the generation of its loop."""
        self._closed: Exception | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (pickle.dumps(self.source),)

    async def enter(self, manager: AbstractAsyncContextManager[AsyncRepository]) -> None:
        """Open the repository with `manager`. Cancellation: it closes again."""
        with self.source.errors():
            opened = await _Open.enter(manager)
        self._keep(opened)

    def _keep(self, opened: _Open) -> None:
        opened.repository.default_commit_metadata = dict(self.source.default_metadata)
        weakref.finalize(self, opened.close_later).atexit = False  # at exit, the portal closes it
        self._open = opened

    @property
    def ready(self) -> AsyncRepository | None:
        """The native repository, if it is open."""
        opened = self._open
        if opened is None or opened.generation != generation() or self._closed is not None:
            return None
        return opened.repository

    async def repository(self) -> AsyncRepository:
        """Return the native repository; on the portal's loop."""
        ready = self.ready
        if ready is not None:
            return ready
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        try:
            await self._opening.run(0, self._enter_source)
        except asyncio.CancelledError:
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
        self._opener = generation(), task
        try:
            opened = await _Open.enter(self.source.opening())
            if self._closed is None:
                self._keep(opened)
            else:
                await opened.close()
        finally:
            self._opener = None  # after the result is kept, so that `close` sees one of both

    def now(self) -> AsyncRepository:
        """Return the native repository; blocks if it must be opened first."""
        with Shortened():  # errors show the caller, not this line
            return self.ready or run(self.ask(_itself))

    async def ask[T](self, question: Callable[[AsyncRepository], Awaitable[T]]) -> T:
        """Put a question to the repository; on the portal's loop. Errors are the source's."""
        with self.source.errors():
            return await question(await self.repository())

    async def each[T, R](
        self, question: Callable[[AsyncRepository], AsyncIterator[T]], convert: Callable[[T], R]
    ) -> AsyncIterator[R]:
        """Iterate over the replies to a question; on the portal's loop."""
        with self.source.errors():
            async for item in question(await self.repository()):
                yield convert(item)

    def set_default_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Give these properties to all later commits.

        Raises:
            InvalidInputError: one cannot be stored; those in force stay.
        """
        with self.source.errors():
            encode_items(metadata, _NEWEST)
        self.source = self.source.with_metadata(dict(metadata))
        if self.ready is not None:
            self.ready.default_commit_metadata = dict(metadata)

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
            run(self._end())

    async def _end(self) -> None:
        """Give up the opening, and close what is open; in this process and on the portal's loop."""
        if self._opener is not None and self._opener[0] == generation():
            opener = self._opener[1]
            opener.cancel()
            await asyncio.wait([opener])
        if self._open is not None and self._open.generation == generation():
            await self._open.close()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Open:
    """An open native repository, and how to close it."""

    def __init__(self, repository: AsyncRepository, stack: AsyncExitStack) -> None:
        self.repository = repository
        self.generation = generation()
        self._stack = stack
        _all_open.add(self)

    @classmethod
    async def enter(cls, manager: AbstractAsyncContextManager[AsyncRepository]) -> _Open:
        async with AsyncExitStack() as stack:
            repository = await stack.enter_async_context(manager)
            return cls(repository, stack.pop_all())

    async def close(self) -> None:
        if self in _all_open:
            _all_open.discard(self)
            await self._stack.aclose()

    def close_later(self) -> None:
        if self.generation == generation():
            run_later(self.close())


async def _close_all() -> None:
    for opened in list(_all_open):
        if opened.generation == generation():  # others are closed by the parent process
            await opened.close()


async def _itself(repository: AsyncRepository) -> AsyncRepository:
    return repository


def _shared(source: bytes) -> RepositoryHandle[Any]:
    """Return the handle of this process for a pickled source."""
    with _sharing:
        handle = _handles.get(source)
        if handle is None:
            handle = _handles[source] = RepositoryHandle(
                pickle.loads(source)  # noqa: S301 -- within a pickle that is being read anyway
            )
        if handle not in _recent:
            _recent.append(handle)
        return handle


_all_open: Final[set[_Open]] = set()
_handles: Final[weakref.WeakValueDictionary[bytes, RepositoryHandle[Any]]] = (
    weakref.WeakValueDictionary()
)
_recent: Final[deque[RepositoryHandle[Any]]] = deque(maxlen=_KEPT_OPEN)
_sharing = threading.Lock()
at_exit(_close_all)


def _new_lock() -> None:
    global _sharing  # noqa: PLW0603 -- another thread may have held it when this process forked
    _sharing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)

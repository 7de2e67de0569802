"""The handle of a native repository, shared by a repository of the facade and its sessions.

A `Source`, plain data, travels between processes. An unpickled repository, session or store opens
at its first use. All unpickled sessions and stores with equal sources share one open repository in
a process, and the last few of these repositories stay open.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import warnings
import weakref
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async._runtime.blocking.portal import at_exit, run, run_later
from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.processes import generation
from icechunk_async._version import __version__
from icechunk_async.errors import StorageClosedError, VirtualContainerError
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.sync.errors import translated
from icechunk_async.sync.handles.arguments import described, given_access
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.states import Attribution, SpecVersion
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.engine.commit.hooks import CommitEvent
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.engine.open import Creation, Origin
    from icechunk_async.storage.cache.cached import CacheOptions
    from icechunk_async.storage.policies.hedge import HedgePolicy

__all__ = ["RepositoryHandle", "Source"]

_KEPT_OPEN: Final = 4
_LABELLED: Final = frozenset({"s3", "gs", "az", "http", "https"})
"""Schemes of storages that have the option ``user_agent``."""
_NEWEST: Final = int(SpecVersion.current())


@dataclass(frozen=True, slots=True)
class Source:
    """The arguments that a repository was opened with, as the caller gave them."""

    storage: Storage
    config: Any = None
    authorized: Mapping[str, Any] | None = None
    attribution: Attribution | None = None
    default_metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cache: CacheOptions | None = None
    hedge: HedgePolicy | None = None
    packing: Packing | None = None
    sums: bool | None = None
    verify_reads: bool = False
    after_commit: tuple[Callable[[CommitEvent], object], ...] = ()
    """Hooks of this process; they do not travel, and so stay the last field."""

    @classmethod
    def of(cls, origin: Origin) -> Source:
        """Return how the facade opens, in other processes, what was opened natively."""
        return cls(
            Storage.from_url(origin.url, **origin.storage_options),
            origin.config,
            origin.authorized,
            packing=origin.settings.packing,
            sums=origin.settings.sums,
            verify_reads=origin.verify_reads,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        _, *values, _ = (getattr(self, it.name) for it in fields(self))
        return Source, (described(self.storage), *values)

    def changed(self, config: Any, authorized: Mapping[str, Any] | None) -> Source:
        """Return the arguments for opening it with more configuration, or other access."""
        if config is not None and self.config is not None:
            config = self.config.merge(config)
        return replace(
            self,
            config=self.config if config is None else config,
            authorized=self.authorized if authorized is None else authorized,
            default_metadata={},
        )

    def opening(self) -> AbstractAsyncContextManager[AsyncRepository]:
        """Open the repository for the length of a block.

        Warns of access to containers that the repository lacks, and opens it without.
        """
        return self._entered(AsyncRepository.open)

    def creating(
        self, creation: Creation, *, or_open: bool = False
    ) -> AbstractAsyncContextManager[AsyncRepository]:
        """Create the repository, or with `or_open` create or open it; warns as `opening` does."""
        create = AsyncRepository.open_or_create if or_open else AsyncRepository.create
        return self._entered(
            partial(
                create,
                spec_version=creation.spec_version,
                layout=creation.layout,
                check_clean_root=creation.check_clean_root,
                probe=creation.probe,
            )
        )

    @asynccontextmanager
    async def _entered(
        self, enter: Callable[..., AbstractAsyncContextManager[AsyncRepository]]
    ) -> AsyncGenerator[AsyncRepository]:
        location, options = await self.storage.place()
        entering = enter(
            location,
            storage_options=_labelled(location, options, self.attribution),
            config=to_native(self.config),
            authorize_virtual_chunk_access=given_access(self.authorized),
            cache=self.cache,
            hedge=self.hedge,
            packing=self.packing,
            sums=self.sums,
            verify_reads=self.verify_reads,
            after_commit=self._hooks(),
        )
        async with AsyncExitStack() as stack:
            try:
                repository = await stack.enter_async_context(entering)
            except VirtualContainerError as error:  # the repository exists, by now
                again = self.without(error).opening()
                repository = await stack.enter_async_context(again)
            yield repository

    def _hooks(self) -> list[Callable[[CommitEvent], Awaitable[object]]]:
        """Return hooks for the native library, which runs each in a thread."""
        if not self.after_commit:
            return []
        from icechunk_async.sync.versions import native_hook  # noqa: PLC0415 -- loaded when it is used

        return [native_hook(it) for it in self.after_commit]

    def without(self, error: VirtualContainerError) -> Source:
        """Return the source without access to the containers that the error reports as missing."""
        shown = cast("tuple[str, ...]", error.context.get("url_prefixes", ()))
        given = self.authorized or {}
        missing = {it for it in given if veiled_url(it) in shown}
        if not missing:
            raise error
        for prefix in shown:
            warnings.warn(
                f"authorize_virtual_chunk_access names {prefix!r}, and the repository has no "
                "virtual chunk container there. Add it to the configuration, or leave it out here.",
                UserWarning,
                stacklevel=2,
            )
        kept = {it: access for it, access in given.items() if it not in missing}
        return replace(self, authorized=kept)


def _labelled(
    location: object, options: Mapping[str, object], attribution: Attribution | None
) -> dict[str, object]:
    """Return the options of a storage that sends labels with its requests."""
    labelled = dict(options)
    if attribution is None or attribution == Attribution() or not isinstance(location, str):
        return labelled
    given = {"workload": attribution.workload, "principal": attribution.principal}
    labels = "; ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    client = f"{attribution.client} " if attribution.client else ""
    agent = f"{client}icechunk-async/{__version__}{f' ({labels})' if labels else ''}"
    if location.partition("://")[0] in _LABELLED:
        labelled.setdefault("user_agent", agent)
    return labelled


class RepositoryHandle:
    """A native repository, which is open or opens at its first use.

    It closes with `close`, when nothing refers to the handle any more, or with the process.
    """

    def __init__(self, source: Source) -> None:
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
        with translated():
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
        """Put a question to the repository; on the portal's loop. Errors are the facade's."""
        with translated():
            return await question(await self.repository())

    async def each[T, R](
        self, question: Callable[[AsyncRepository], AsyncIterator[T]], convert: Callable[[T], R]
    ) -> AsyncIterator[R]:
        """Iterate over the replies to a question; on the portal's loop."""
        with translated():
            async for item in question(await self.repository()):
                yield convert(item)

    def set_default_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Give these properties to all later commits.

        Raises:
            InvalidInputError: one cannot be stored; those in force stay.
        """
        with translated():
            encode_items(metadata, _NEWEST)
        self.source = replace(self.source, default_metadata=dict(metadata))
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


def _shared(source: bytes) -> RepositoryHandle:
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
_handles: Final[weakref.WeakValueDictionary[bytes, RepositoryHandle]] = (
    weakref.WeakValueDictionary()
)
_recent: Final[deque[RepositoryHandle]] = deque(maxlen=_KEPT_OPEN)
_sharing = threading.Lock()
at_exit(_close_all)


def _new_lock() -> None:
    global _sharing  # noqa: PLW0603 -- another thread may have held it when this process forked
    _sharing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)

"""The repository behind the blocking facade, as Spark's driver and tasks use it.

Spark's processes are short-lived, pickle everything, and cannot share memory. This module is the
only one of the package that reaches through the facade's handles and into an open repository; the
rest of the package asks an `SharedRepository`.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import zarr

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.changes.merge import ForkPoint, Merger
from icechunk_async.engine.changes.since import changes_since
from icechunk_async.engine.changes.wire import decode_fork, encode_fork
from icechunk_async.format.ids import SnapshotId
from icechunk_async.handles import SessionHandle
from icechunk_async.session import ForkSession as AsyncForkSession
from icechunk_async.spark.requests import Budget
from icechunk_async.sync import ForkSession, Repository
from icechunk_async.sync.opening import RepositoryHandle, Source
from icechunk_async.sync.session import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import NativeChunk
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.sync import RepositoryConfig
    from icechunk_async.sync.storage import Storage
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "SharedRepository",
    "adopt_changes",
    "base_of",
    "budget_of",
    "changes_of",
    "fork_changes",
    "has_chunks",
    "in_task",
    "merge_changes",
    "new_point",
    "open_array",
    "read_objects",
    "root_with",
    "store_object",
    "without_chunks",
    "workspace_of",
]

_CONCURRENT: Final = 16


class SharedRepository:
    """One repository, in the driver or in a task.

    It pickles as plain data (how to open the repository, secrets included) and opens at first use.
    All with equal data share one open repository in each process.
    """

    def __init__(self, handle: RepositoryHandle) -> None:
        """Wrap a handle; use `of` or `at`."""
        self._handle = handle

    def __eq__(self, other: object) -> bool:
        """Return whether both share one open repository."""
        if not isinstance(other, SharedRepository):
            return NotImplemented
        # Equal sources share one handle in a process (`_shared`), so that this is a key of caches.
        return self._handle is other._handle

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash(id(self._handle))

    @classmethod
    def of(cls, repository: Repository | str) -> SharedRepository:
        """Wrap an open repository, or the one at a URL."""
        opened = Repository.open(repository) if isinstance(repository, str) else repository
        return cls(opened.handle)

    @classmethod
    def at(
        cls,
        storage: Storage,
        config: RepositoryConfig | None = None,
        virtual: Mapping[str, Any] | None = None,
    ) -> SharedRepository:
        """Wrap the repository in a storage.

        Args:
            storage: where the repository is.
            config: settings to apply on top of the stored configuration.
            virtual: credentials of virtual chunk containers, by URL prefix.
        """
        return cls(_shared(Source(storage, config, virtual)))

    def in_task(self, budget: Budget) -> SharedRepository:
        """Return the same repository with the share of a budget that the calling task has."""
        return SharedRepository(_shared(self._handle.source.changed(budget.of_task(), None)))

    def budget(self, tasks: int = 0, job_requests: int = 0) -> Budget:
        """Return the budget to send to tasks.

        Args:
            tasks: how many tasks of one executor run at once; 0 if they have to ask.
            job_requests: requests at a time of the whole job; 0 for what the session says.
        """
        requests = self._handle.now().config.effective_max_concurrent_requests
        return Budget(requests, tasks, job_requests)

    def ask[T](self, question: Callable[[AsyncRepository], Awaitable[T]]) -> T:
        """Return the result of a coroutine function called with the open repository; blocks.

        Raises:
            IcechunkError: the facade's class for any error of the engine.
        """
        return run(self._handle.ask(question))

    def lists_whole_folders(self) -> bool:
        """Return whether there is nothing to gain from tasks that list a part of a folder each.

        On a local disk, listing a prefix reads the whole folder. Some storages list nothing.
        """
        return self.ask(_lists_whole_folders)

    def session(self, snapshot_id: str) -> Session:
        """Return a read-only session of a snapshot; it opens at first use."""
        return Session(SessionHandle(self._handle, None, snapshot_id=snapshot_id))

    def fork(self, data: bytes) -> ForkSession:
        """Return a fork from what `fork_changes` returned; it attaches at first use."""
        return ForkSession(SessionHandle(self._handle, AsyncForkSession.from_bytes(data)))


async def _lists_whole_folders(repository: AsyncRepository) -> bool:
    engine = repository.engine
    return engine.assets.blocking is not None or not engine.storage.capabilities.listing


def _shared(source: Source) -> RepositoryHandle:
    # Unpickling is what looks up the process-wide handle of equal sources.
    handle: RepositoryHandle = pickle.loads(pickle.dumps(RepositoryHandle(source)))  # noqa: S301
    return handle


def budget_of(session: Session) -> Budget:
    """Return the budget of the repository of a session, to send to tasks."""
    return SharedRepository(session.handle.repository).budget()


def in_task(session: Session, budget: Budget) -> Session:
    """Return a read-only session with the share of a budget that the calling task has."""
    if not session.read_only:
        return session  # it cannot travel to another process, and so is in the driver's
    shared = SharedRepository(session.handle.repository).in_task(budget)
    return shared.session(session.snapshot_id)


def workspace_of(session: Session) -> Workspace:
    """Return the nodes and references of a session; blocks if it has to be opened."""
    return session.handle.now().workspace


def has_chunks(session: Session, path: str) -> bool:
    """Return whether an array has any chunk."""
    return run(_has_chunks(session.handle, path))


async def _has_chunks(handle: SessionHandle, path: str) -> bool:
    native = await handle.session()
    async for batch in native.chunk_coordinates(f"/{path}", batch_size=1):
        # The first one decides; the rest is not listed.
        if len(batch):
            return True
    return False


def fork_changes(fork: ForkSession) -> bytes:
    """Return the changes of a fork once its chunks are durable; no location and no secret."""
    return fork.handle.fork_bytes()


def base_of(root: bytes) -> str:
    """Return the snapshot that a root was made from."""
    return str(decode_fork(root).base_id)


def changes_of(fork: ForkSession, root: bytes, point: bytes) -> bytes:
    """Return the changes made in a copy of a root, once its chunks are durable.

    Args:
        fork: a fork with the bytes of the root, in which a task worked.
        root: the root.
        point: names the state of the root; see `new_point`.
    """
    state = decode_fork(fork_changes(fork))
    # Without what the root changed already: every task would send that back, and merge it again.
    since = changes_since(state.changes, decode_fork(root).changes)
    return encode_fork(replace(state, base_id=SnapshotId(point), changes=since))


def adopt_changes(changes: bytes, root: bytes, point: bytes) -> bytes:
    """Return changes as if they had been made in a copy of another root in the same state."""
    since = decode_fork(changes).changes
    # Only the place where changes start is replaced: both roots were prepared alike, which the
    # caller has checked node by node.
    return encode_fork(replace(decode_fork(root), base_id=SnapshotId(point), changes=since))


def without_chunks(changes: bytes, coords: npt.NDArray[np.uint32]) -> bytes:
    """Return changes of a task without some chunks of every array of their rank.

    Args:
        changes: what `changes_of` returned.
        coords: coordinates of the chunks, `(n, axes)`.
    """
    state = decode_fork(changes)
    for it in state.changes.chunks.values():
        # The arrays of one write share a grid, and the coordinates are of that grid.
        if it.rank == coords.shape[1]:
            it.drop(coords)
    return encode_fork(state)


def root_with(root: bytes, changes: bytes) -> bytes:
    """Return the root with what a task changed: the fork in which the task worked."""
    state = decode_fork(root)
    merger = Merger(state.changes, state.base_id)
    # The task's changes follow the root's: to a merger that does not know that point, nodes which
    # the root created would be clashes.
    merger.add(decode_fork(changes).changes, ForkPoint(state.changes))
    return encode_fork(replace(state, changes=merger.finish()))


def store_object(fork: ForkSession, data: bytes) -> NativeChunk:
    """Store bytes as an object that nothing refers to: garbage, once nobody needs it."""
    return run(fork.handle.ask(lambda native: native.workspace.assets.chunks.store(data)))


def read_objects(
    repository: Repository, ranges: Sequence[tuple[NativeChunk, int, int]]
) -> list[bytes | memoryview]:
    """Return ranges of objects that `store_object` stored.

    Raises:
        FormatError: one is missing or too short.
    """

    async def read(opened: AsyncRepository) -> list[bytes | memoryview]:
        chunks = opened.engine.assets.chunks

        async def one(part: tuple[NativeChunk, int, int]) -> bytes | memoryview:
            at, start, stop = part
            return await chunks.read(at.chunk_id, at.offset + start, at.offset + stop)

        return await bounded_map(one, ranges, limit=_CONCURRENT)

    return SharedRepository.of(repository).ask(read) if ranges else []


def new_point() -> bytes:
    """Return a new name for the state of a root.

    Changes of tasks say with it that they follow that state, which no snapshot holds: every task
    gets the root's changes, so that none has to be stored for them.
    """
    return bytes(SnapshotId.random())


def merge_changes(session: Session, root: bytes, forks: Sequence[bytes]) -> None:
    """Bring the changes of a root, and those that tasks made after it, into a session."""
    resumed = AsyncForkSession.from_bytes(root)
    parts = [AsyncForkSession.from_bytes(it) for it in forks]
    run(session.handle.ask(lambda native: native.resume(resumed, *parts)))


def open_array(store: IcechunkStore, path: str, *, write: bool = False) -> zarr.Array[Any]:
    """Open an existing array.

    Args:
        store: the store of a session.
        path: path of the array.
        write: open it for writing.

    Raises:
        FileNotFoundError: there is no such array.
    """
    opening = cast("Any", zarr.open_array)  # pyright: ignore[reportUnknownMemberType]
    array: zarr.Array[Any] = opening(store, path=path, mode="r+" if write else "r", zarr_format=3)
    return array

"""Sessions: one consistent view of a hierarchy, one transaction on a branch, and forks of it."""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn, Self, overload

import anyio

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.processes import generation
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.open import Request, open_engine
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.tree.workspace import Closed, Workspace
from icechunk_async.errors import SessionStateError, StorageError, StorageUnavailableError
from icechunk_async.format.ids import SessionId
from icechunk_async.format.paths import check_path

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Collection,
        Iterable,
        Mapping,
        Sequence,
    )

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.engine.changes.publications import Shared
    from icechunk_async.engine.changes.wire import Lineage, Membership
    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.commit.flush import ManifestOptions
    from icechunk_async.engine.commit.forks import Forks
    from icechunk_async.engine.commit.once import Transaction
    from icechunk_async.engine.commit.publisher import Publisher
    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.leases.keeper import Lease
    from icechunk_async.engine.leases.member import Member
    from icechunk_async.engine.leases.spiller import Resumed, Spiller
    from icechunk_async.engine.open import Engine, Origin
    from icechunk_async.engine.tree.listing import Batches, ChunkBatch, ChunkType
    from icechunk_async.engine.tree.reshape import MoveChunk, MoveChunks
    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage
    from icechunk_async.zarr.queries.aggregate import Aggregate
    from icechunk_async.zarr.queries.measuring import AggregateFunction
    from icechunk_async.zarr.queries.selection import Selection
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["AnySession", "ForkSession", "Session", "SessionMode"]

_log = logging.getLogger(__name__)


class _Hierarchy(ABC):
    """The common part of sessions and their forks: a hierarchy to read, change and fork."""

    @property
    @abstractmethod
    def workspace(self) -> Workspace:
        """The hierarchy, with the changes so far."""

    @property
    @abstractmethod
    def _forks(self) -> Forks: ...

    @property
    @abstractmethod
    def origin(self) -> Origin | None:
        """Where the repository is and how it was opened; secrets are not shown."""

    @property
    @abstractmethod
    def mode(self) -> SessionMode:
        """The mode; after a commit the session only reads."""

    @property
    @abstractmethod
    def branch(self) -> str | None:
        """The branch that a writable session commits to; None for forks and readers."""

    @property
    def read_only(self) -> bool:
        """Whether the session only reads."""
        return self.mode is SessionMode.READONLY

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the session stands on."""
        return self.workspace.base.id

    @property
    def spec_version(self) -> int:
        """The format version that new files are written in."""
        return self.workspace.assets.spec_version

    @property
    def store(self) -> IcechunkStore[Self]:
        """A Zarr store of the session's hierarchy, for ``zarr`` and ``xarray``."""
        from icechunk_async.zarr.store import IcechunkStore  # noqa: PLC0415 -- zarr loads slowly

        return IcechunkStore(self, read_only=self.read_only)

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether anything was changed since the session began or was committed."""
        with self.workspace.lock:
            return not self.workspace.changes.is_empty()

    def status(self) -> Diff:
        """Return the changes of the session so far."""
        from icechunk_async.engine.history.diff import diff_of_log  # noqa: PLC0415 -- not to read

        workspace = self.workspace
        with workspace.lock:
            tree, changes = workspace.tree, workspace.changes
            paths: dict[NodeId, str] = {it: gone.path for it, gone in changes.deleted.items()}
            paths.update((node.id, path) for path, node in changes.new.items())
            # Under the lock, because making columns of single changes edits them in place.
            log = changes.log(workspace.base.id)
            return diff_of_log(log, lambda it: paths.get(it) or tree.base.path_of(it))

    def discard_changes(self) -> None:
        """Forget every change of the session.

        Raises:
            ReadOnlyError: the session only reads, or is being committed.
        """
        workspace = self.workspace
        with workspace.lock:
            workspace.check_open()
            workspace.rebase_to(workspace.base, ChangeSet())

    async def all_virtual_chunk_locations(self) -> list[str]:
        """Return the URL of the object behind every virtual chunk, array by array.

        There is an entry for each chunk; names of containers are replaced by their prefixes.

        Cost: one request for each manifest that is not cached; no object is made per chunk.
        """
        from icechunk_async.engine.tree.listing import virtual_locations  # noqa: PLC0415 -- on use

        return await virtual_locations(self.workspace)

    async def move(self, from_path: str, to_path: str) -> None:
        """Give a node, and all below it, another path; nothing is copied.

        Reads in this session see the new places at once, others with the commit. Node ids stay.
        Paths may be given with or without the leading slash.

        Args:
            from_path: the array or group; not the root.
            to_path: where it goes; nothing may be there, and a group must be above it.

        Raises:
            NodeNotFoundError: nothing is at ``from_path``.
            NodeExistsError: something is at ``to_path``.
            InvalidMoveError: ``to_path`` is ``from_path`` or below it, or not in a group.
            SessionStateError: the session is not one of ``Repository.rearrange_session``.
            ReadOnlyError: it was committed, or is being committed.
            InvalidInputError: a path cannot be one.

        Cancellation: no effect. Cost: no request; time in proportion to the nodes below.
        """
        self.workspace.move_node(check_path(from_path), check_path(to_path))

    async def get_node_id(self, path: str) -> NodeId:
        """Return the id that an array or group keeps for its whole life, wherever it is moved.

        Raises:
            NodeNotFoundError: nothing is there.

        Cancellation: no effect. Cost: none.
        """
        from icechunk_async.engine.tree.listing import node_id  # noqa: PLC0415 -- on use

        return node_id(self.workspace, check_path(path))

    async def shift_array(self, path: str, chunk_offset: Iterable[int]) -> None:
        """Move all chunks of an array by whole chunks, as rolling windows need.

        Chunks that leave the grid are gone: resize the array first to keep them. Places that
        nothing moves to hold fill values afterwards. No chunk is read or written.

        Args:
            path: the array; its chunk grid must be regular.
            chunk_offset: how far along each axis, in chunks; negative towards the start.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: its grid is not regular, or it has another number of axes.
            SessionStateError: the array was changed meanwhile, or the session only moves nodes.
            ReadOnlyError: the session only reads. After any error nothing was moved.

        Cancellation: nothing was moved.

        Cost: one request for each manifest of the array that is not cached; memory in proportion
        to its chunks, in columns.
        """
        from icechunk_async.engine.tree import reshape  # noqa: PLC0415 -- loaded when it is used

        await reshape.shift(self.workspace, check_path(path), chunk_offset)

    @overload
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunk,
        backward: MoveChunk | None = None,
        *,
        vectorized: Literal[False] = False,
    ) -> None: ...
    @overload
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunks,
        backward: MoveChunks | None = None,
        *,
        vectorized: Literal[True],
    ) -> None: ...
    async def reindex_array(
        self,
        path: str,
        forward: MoveChunk | MoveChunks,
        backward: MoveChunk | MoveChunks | None = None,
        *,
        vectorized: bool = False,
    ) -> None:
        """Move the chunks of an array to where a function says. None is read or written.

        Without ``backward`` a chunk also stays where it was, unless another came there.

        Args:
            path: the array; its chunk grid must be regular.
            forward: called for each chunk that exists, with its coordinates as a list, in
                ascending order. Returns its new coordinates, or None to leave it. Of several
                chunks with one target the last one counts.
            backward: the inverse of ``forward``: called for each chunk that exists and that no
                chunk was moved to. If it returns None, or a place where no chunk was, that
                chunk is deleted.
            vectorized: call each function once, with all coordinates as the rows of an integer
                array ``(n, rank)``; it returns such an array, where a row with a negative
                number means None. Much faster.

        Raises:
            InvalidCoordinatesError: ``forward`` returned a place outside of the grid.
            InvalidInputError: a function returned no coordinates, or the grid is not regular.
            NodeNotFoundError, SessionStateError, ReadOnlyError: as `shift_array`.
            Exception: any error of a function. After any error nothing was moved.

        Cancellation: nothing was moved.

        Cost: as `shift_array`. The functions run on the event loop.
        """
        from icechunk_async.engine.tree import reshape  # noqa: PLC0415 -- loaded when it is used

        await reshape.reindex(
            self.workspace, check_path(path), forward, backward, vectorized=vectorized
        )

    async def chunk_type(self, path: str, coords: Sequence[int]) -> ChunkType:
        """Return where the bytes of a chunk are.

        A chunk that was never written, or that the grid has no place for, is uninitialized.

        Raises:
            NodeNotFoundError: there is no array.

        Cancellation: no effect. Cost: at most one request, for the manifest.
        """
        from icechunk_async.engine.tree.listing import chunk_type  # noqa: PLC0415 -- on use

        return await chunk_type(self.workspace, check_path(path), coords)

    def chunk_coordinates(
        self, path: str, batch_size: int = 1000
    ) -> Batches[npt.NDArray[np.uint32]]:
        """Iterate over the coordinates of the chunks that exist, as ``(n, rank)`` arrays.

        Order, errors and cost as `array_chunk_iterator`.
        """
        from icechunk_async.engine.tree.listing import chunk_coordinates  # noqa: PLC0415 -- on use

        return chunk_coordinates(self.workspace, check_path(path), batch_size)

    def array_chunk_iterator(self, path: str, batch_size: int = 100_000) -> Batches[ChunkBatch]:
        """Iterate over the chunks of an array that exist, in columns.

        They come manifest by manifest, in ascending order within each, and last those that this
        session wrote; each once. What the session changes after the call does not count.

        Args:
            path: the array.
            batch_size: rows in a batch, at most.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: the batch size is not positive.

        Cancellation: the step is lost. The iteration may be left at any point.

        Cost: one request for each manifest that is not cached, when its turn comes; memory for
        one manifest, beside the cache.
        """
        from icechunk_async.engine.tree.listing import Batches, ChunkBatch  # noqa: PLC0415 -- on use

        locations = self.workspace.virtual.locations
        return Batches(
            self.workspace, check_path(path), batch_size, lambda refs: ChunkBatch(refs, locations)
        )

    async def aggregate(
        self,
        path: str,
        function: AggregateFunction,
        *,
        where: str | None = None,
        region: Sequence[slice] | None = None,
    ) -> Aggregate:
        """Return an aggregate of the values of an array, reading as few chunks as possible.

        Values are those that xarray shows, in 64 bits: missing ones (NaN, NaT, `_FillValue`,
        `missing_value`) do not count, `scale_factor`, `add_offset` and `_Unsigned` apply. Chunks
        whose statistics are known (`Repository.analyze`) and all of whose cells count are not read,
        nor are those in which no cell can count. All others are, so statistics that are missing
        change the cost and not the result.

        Args:
            path: the array: numbers of up to 64 bits, truth values, times, durations or text, in
                a regular grid.
            function: what to return. The sum of integers is exact; floats are added in doubles.
                Text has ``count``, ``min`` and ``max``, in the order of code points. The variance
                and the standard deviation are those of all values (``ddof=0``).
            where: conditions, as in SQL, on this array and on arrays beside it
                along its dimensions, such as ``"t2m > 320 and lat between 40 and 60"``.
            region: a slice for each of the first axes; None for the whole array.

        Returns:
            The aggregate, how many values it is of, and the chunks and bytes read and skipped.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidInputError: its values have no order, or an argument cannot be understood.
            FormatError: a chunk that is needed is missing or damaged.

        Cancellation: no effect.

        Cost: one request for each manifest of the array that is not cached, one listing, one
        request for each object with its statistics, and one for each chunk that is read; as much
        for other arrays in ``where``, of which those with one axis are read. Memory for 256 MiB of
        decoded chunks or one larger chunk (a text of any length is taken for 128 bytes), and some
        700 bytes for each chunk of the array.
        """
        from icechunk_async.zarr.queries.aggregate import aggregate  # noqa: PLC0415 -- on use

        return await aggregate(self.store, path, function, where, region)

    async def where(
        self, conditions: str, *, group: str = "/", region: Sequence[slice] | None = None
    ) -> Selection:
        """Find the cells that fulfil conditions: candidate chunks at once, masks when asked for.

        Chunks are excluded by their statistics (`Repository.analyze`) and by coordinates. The rest
        is read while the selection is iterated over.

        Args:
            conditions: as in `aggregate`, on arrays of one group. Cells are
                those of the array with the most axes, of several the first; the others are along
                its dimensions.
            group: where the arrays are.
            region: a slice for each of the first axes; None for the whole array.

        Returns:
            The selection. The session must be open while it is iterated over.

        Raises:
            NodeNotFoundError: there is no array of a name.
            InvalidInputError: values of an array have no order, or an argument cannot be
                understood.

        Cancellation: no effect. Cost: that of `aggregate` without the reads of chunks.
        """
        from icechunk_async.zarr.queries.selection import select  # noqa: PLC0415 -- on use

        return await select(self.store, conditions, group, region)

    @property
    def has_pending_chunks(self) -> bool:
        """Whether chunks wait in memory to be packed; see `store_pending_chunks`."""
        packs = self.workspace.packs
        return packs is not None and not packs.are_stored

    async def store_pending_chunks(self) -> None:
        """Return when every chunk written so far is in the storage, and durable there.

        If small chunks are packed, some wait in memory until there are enough of them. Local
        disks are synced only by a commit, which can sync only what its own process wrote. So a
        fork needs this call before its bytes leave the process; the end of
        ``ForkSession.attached``, the blocking facade and Spark's tasks make it by themselves.

        Raises:
            StorageError: some are not stored; they stay in the session. Call again.

        Cancellation: as an error.
        """
        await self.workspace.store_packs()
        await self.workspace.store_statistics()
        await self.workspace.assets.storage.sync()

    async def fork(self) -> ForkSession:
        """Return a session for another task or process, which sees what this one sees now.

        A fork reads and writes like its session, pickles with what was written in it, and is
        never committed: merge it into this session (or into another fork of it) and commit that.
        Until then, or until `discard_fork`, the session refuses to commit.

        Raises:
            SessionStateError: the session only reads, or moves nodes.
            ReadOnlyError: it is being committed or merged.
            StorageUnavailableError: its changes could not be stored for the fork to see.

        Cancellation: no effect but files that nothing refers to.

        Cost: none if the session has no uncommitted changes. Else its changes are stored once,
        however many forks begin there: manifests, which the commit uses again, and a snapshot
        that no branch holds. Garbage collection takes that for garbage, as it takes the chunks
        of every session: let it spare what is younger than a session can be. A session with a
        lease also lets its earlier forks see these changes, as `Session.refresh` does: two
        requests more.
        """
        self._check_mode("forked")
        return await self._new_fork()

    async def _new_fork(self) -> ForkSession:
        return ForkSession.beside(self, self._forks, await self._forks.begin())

    async def merge(self, *forks: ForkSession, allow_overlaps: bool = True) -> None:
        """Take over what was changed in forks, or nothing if any of it clashes.

        A fork can be merged into the session that it came from, and into its siblings, so that
        many can be merged as a tree. The fork itself does not change.

        A fork that published (``ForkSession.publish``) brings what it has not published. The rest
        is taken in as by `Session.refresh`, which is done first; nothing is applied twice.

        Args:
            forks: in order: of several that set one chunk the last one counts.
            allow_overlaps: if false, a chunk that several of these forks set is a clash.

        Raises:
            MergeFailedError: they clash with each other, or with what this session did since
                they began. Every clash is in its context; nothing was merged.
            SessionStateError: one is no fork, or came from another session or another state of
                it (it was rebased since, for example).
            ReadOnlyError: this session cannot be changed, or not at present.
            FormatError: one holds changes that nobody can have made in a fork of this session.

        Cancellation: nothing was merged, or all of it.

        Cost: no requests; time and memory in proportion to what the forks changed. A session with
        a lease makes one listing, and if one of the forks published, a refresh.
        """
        self._check_mode("merged into")
        for fork in forks:
            _check_is_fork(fork)
        await self._prepare_to_merge(forks)
        await self._forks.merge(forks, allow_overlaps=allow_overlaps)

    async def resume(
        self, root: ForkSession, *forks: ForkSession, allow_overlaps: bool = False
    ) -> None:
        """Continue in place of a session that is gone, perhaps with its process.

        This session, which must not have changed anything, then stands where ``root`` stands,
        with what was changed in it and in ``forks`` of it. A commit finds out what others did
        since.

        Args:
            root: a fork of the session that is gone; it may have been read from bytes.
            forks: forks of ``root``, made after its last change; also from bytes.
            allow_overlaps: see `merge`.

        Raises:
            SnapshotNotFoundError: what ``root`` stands on was collected as garbage.
            SessionStateError: a fork is of another session; or ``root`` was forked from a session
                with changes, so that it stands on a snapshot that was never published.
            MergeFailedError: forks clash.

        Cancellation and errors: the session has no changes.
        """
        self._check_mode("resumed")
        for fork in (root, *forks):
            _check_is_fork(fork)
        await self._check_published(root.snapshot_id)
        await self._forks.resume(root, forks, allow_overlaps=allow_overlaps)

    @property
    def unmerged_forks(self) -> tuple[str, ...]:
        """The ``fork_id`` of each fork that was handed out and neither merged nor discarded.

        Forks of forks are among them once those are merged. All copies of a fork count as one.
        """
        return self._forks.missing()

    def discard_fork(self, *forks: ForkSession | str) -> None:
        """No longer wait for forks, given themselves or by their ``fork_id``; see `Session.commit`.

        What was changed in them is lost. They can still be merged.

        Raises:
            InvalidInputError: one was merged or discarded already, or is another session's; nothing
                was discarded.
        """
        self._forks.discard(it.fork_id if isinstance(it, ForkSession) else it for it in forks)

    @abstractmethod
    async def _prepare_to_merge(self, forks: Iterable[ForkSession]) -> None:
        """Take in what forks published."""

    @abstractmethod
    async def _check_published(self, snapshot_id: SnapshotId) -> None:
        """Refuse to continue on a snapshot that no commit can follow."""

    def _check_mode(self, what: str) -> None:
        if self.mode is not SessionMode.WRITABLE:
            raise SessionStateError(
                f"A {self.mode.value} session cannot be {what}. Begin one with "
                "Repository.writable_session; to read elsewhere, open the repository there.",
                code="cannot-fork-read-only-session" if what == "forked" else "merge-not-allowed",
            )


class Session(_Hierarchy):
    """A snapshot to read, and for a writable session one transaction on a branch.

    A session that is garbage-collected by Python with changes that were neither committed nor
    discarded gives a ``ResourceWarning``, which says how many; Python shows it with ``-X dev``.

    Made by ``Repository.readonly_session``, ``Repository.writable_session`` and
    ``Repository.rearrange_session``. Nobody else sees what a session changed before `commit`; a
    session that is dropped leaves nothing behind but objects for garbage collection.

    One session may be used from several tasks and event loops (Zarr has its own).
    """

    def __init__(
        self,
        workspace: Workspace,
        begin_publisher: Callable[[], Publisher],
        *,
        origin: Origin | None,
        lease: Lease | None = None,
        told: Callable[[Snapshot, SnapshotId | None, str], Awaitable[None]] | None = None,
    ) -> None:
        """Stand on the workspace's base.

        Args:
            workspace: the hierarchy; it says whether the session only reads.
            begin_publisher: returns what publishes the session.
            origin: how others can open the repository.
            lease: of a leased session.
            told: is told of each snapshot that was published on the branch, the tip before, and
                whether it was a commit or an amendment.
        """
        self._workspace = workspace
        # Let go of once it was called: what it holds is open, and would outlive its repository.
        self._begin_publisher: Callable[[], Publisher] | None = begin_publisher
        self._told = told
        self._abandoned = False
        self._origin = origin
        # The workspace has it too: each change asks the lease whether it still holds.
        self._lease = workspace.lease = lease
        # What only reads has no use for what publishes, nor for the time to import it.
        self._begun: _Writing | None = None
        if not workspace.is_fixed:
            self._begun = self._begin_writing()

    def _begin_writing(self) -> _Writing:
        from icechunk_async.engine.commit.forks import Forks  # noqa: PLC0415 -- not to read

        begin, self._begin_publisher = self._begin_publisher, None
        assert begin is not None  # this is called once
        lease, publisher = self._lease, begin()
        publisher.lease = lease
        forks = Forks(
            self._workspace,
            publisher.flusher,
            session_id=None if lease is None else lease.session_id,
            distrust=publisher.guard.distrust,
            # A session without a lease is in no circle: it is freed, with its changes, as soon as
            # nobody holds it.
            view=None if lease is None else self._shared,
        )
        if lease is None:
            return _Writing(publisher, forks, None)
        from icechunk_async.engine.leases.spiller import Spiller  # noqa: PLC0415 -- not to read

        return _Writing(publisher, forks, Spiller(self._workspace, lease, forks.take_in))

    @property
    def _writing(self) -> _Writing:
        """The parts that publish; a session that only reads has some that refuse to."""
        if self._begun is None:
            with self._workspace.lock:
                if self._begun is None:
                    # Looked at again under the lock: of two threads one would find that the other
                    # has used up what makes a publisher.
                    self._begun = self._begin_writing()
        return self._begun

    # `warn` is bound now: when the interpreter ends, names of modules may be gone before sessions
    # are.
    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Warn if changes vanish with the session: neither committed nor discarded."""
        # The constructor may have failed. Work under a lease is stored, and can be resumed.
        begun: _Writing | None = getattr(self, "_begun", None)
        if begun is None or self._abandoned or self._lease is not None:
            return
        if self.mode is SessionMode.READONLY or not (count := self._workspace.changes.count()):
            return
        warn(
            f"A session on branch {self.branch!r} was dropped with {count} uncommitted "
            "change(s). Commit it, or say that they are not needed: session.discard_changes().",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def abandon(self) -> None:
        """Let the session be dropped with its changes, which can be read as long as it lives."""
        self._abandoned = True

    def __reduce__(self) -> str:
        """Refuse to pickle, and say what to send instead."""
        raise SessionStateError(
            "A session does not pickle: its connections stay here, and a copy of a writable one "
            "could not commit. To write elsewhere send a fork, 'await session.fork()', and merge "
            "it when it is back. To read, open the repository in the other process "
            f"with readonly_session(snapshot_id={str(self.snapshot_id)!r})."
        )

    def __repr__(self) -> str:
        """Show mode, branch and snapshot, and what was changed so far."""
        from icechunk_async._display.versions import session_card  # noqa: PLC0415 -- loaded when it is used

        return session_card(self).text()

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        from icechunk_async._display.versions import session_card  # noqa: PLC0415 -- loaded when it is used

        return session_card(self).html()

    @property
    def workspace(self) -> Workspace:
        """The hierarchy, with the changes so far."""
        return self._workspace

    @property
    def publisher(self) -> Publisher:
        """The part of this session that commits, for tests; it may change between releases."""
        return self._writing.publisher

    @property
    def _forks(self) -> Forks:
        return self._writing.forks

    @property
    def origin(self) -> Origin | None:
        """Where the repository is and how it was opened; secrets are not shown."""
        return self._origin

    @property
    def mode(self) -> SessionMode:
        """The mode; after a commit the session only reads."""
        return SessionMode.READONLY if self._begun is None else self._begun.publisher.mode

    @property
    def branch(self) -> str | None:
        """The branch that a writable session commits to."""
        return None if self._begun is None else self._begun.publisher.branch

    @property
    def session_id(self) -> SessionId:
        """Names the session and its forks; with a lease also in ``Repository.sessions``."""
        return SessionId(self._forks.session_id)

    @property
    def has_lease(self) -> bool:
        """Whether garbage collection spares what the session writes, see `writable_session`."""
        return self._lease is not None

    async def _close_lease(self, snapshot_id: SnapshotId) -> SnapshotId:
        """Say in the lease that the session was published, which failing does not undo."""
        lease, spiller = self._lease, self.spiller
        if lease is not None and spiller is not None:
            from icechunk_async.engine.leases.record import LeaseState  # noqa: PLC0415 -- not to read
            from icechunk_async.engine.leases.register import remove_spills  # noqa: PLC0415 -- not to read

            # The lease says that it is over before its segments go: a process that resumes it in
            # between finds the commit, and never an open lease whose segments are gone.
            await lease.close(LeaseState.COMMITTED, snapshot_id, spiller.shared)
            if lease.record.spilled or spiller.has_forks:
                try:
                    await remove_spills(self._workspace.assets.storage, lease.session_id)
                except StorageError as error:  # garbage collection does it later
                    _log.info("spilled changes of session %s stay: %s", lease.session_id, error)
        return snapshot_id

    @property
    def spiller(self) -> Spiller | None:
        """Spills the session; None without a lease. For the repository, which lets it beat."""
        return None if self._begun is None else self._begun.spiller

    async def continue_from(self, stored: Resumed) -> None:
        """Begin with changes that other processes made, which ``Repository`` read back."""
        assert self.spiller is not None  # it has a lease
        # Chunks of other processes are of any age by their clocks, so that each collection since
        # may have taken some: the commit looks for all of them.
        self.publisher.guard.distrust()
        await self.spiller.resume(stored)

    async def spill(self) -> None:
        """Store the session's changes beside its lease, so that they outlive this process.

        ``Repository.resume_session`` continues the session from there. A session that is used
        spills by itself once a minute, and after some ten thousand chunks. What changed after
        the last spill is lost with the process.

        Raises:
            SessionStateError: the session has no lease.
            LeaseExpiredError, LeaseLostError: the session is over; nothing was spilled.
            StorageError: it may not be spilled; the changes stay here. Call again.

        Cancellation: as a StorageError.

        Cost: one request for the segment, which holds what changed since the last spill, one for
        the lease, and those for chunks that wait to be packed. 12 to 25 bytes for each chunk.
        """
        if self.spiller is None:
            raise SessionStateError(
                "A session without a lease cannot be spilled: nothing would protect what it "
                "wrote. Begin one with Repository.writable_session(branch, lease=True)."
            )
        await self.spiller.spill()

    async def refresh(self) -> bool:
        """Take in what forks of the session published, and let forks see what changed here.

        For sessions with a lease; forks do the same with ``ForkSession.publish`` and
        ``ForkSession.refresh``. What the session changed since it last refreshed or forked lies
        above what it takes in: where both set a chunk, the session's counts. Of several
        publications the one that was published last counts. Forks that published are not missing
        any more. A commit takes in what was published by itself.

        Returns: whether forks had published anything new.

        Raises:
            SessionStateError: the session has no lease.
            MergeFailedError: publications clash with each other, or with what this session
                changed; see `merge`. Every clash is in its context, with the fork that published
                it. Nothing was taken in. `discard_fork` leaves out what one of them published.
            LeaseExpiredError, LeaseLostError: the session is over.
            ReadOnlyError: this session cannot be changed, or not at present.
            FormatError: a publication is damaged; nothing was taken in.
            StorageError: it may have been taken in; forks do not see it yet. Call again.

        Cancellation: as a StorageError.

        Cost: one listing if nothing is new. Otherwise a request for each publication, and two to
        store what is new beside the lease: 12 to 25 bytes for each chunk.
        """
        if self.spiller is None:
            raise SessionStateError(
                "A session without a lease cannot be refreshed: its forks have nowhere to publish "
                "to. Begin one with Repository.writable_session(branch, lease=True), or merge its "
                "forks."
            )
        with self._workspace.lock:
            self._workspace.check_writable()
        return await self.spiller.refresh()

    def _shared(self) -> Shared | None:
        """Return the state that forks see; None if they are not of the session of the lease."""
        spiller, forks = self.spiller, self._forks
        if spiller is None or spiller.session_id != forks.session_id or self.spec_version < 1:
            return None
        return spiller.shared

    async def _new_fork(self) -> ForkSession:
        spiller = self.spiller
        if spiller is None or self._shared() is None:
            return await super()._new_fork()
        with self._workspace.lock:
            self._workspace.check_writable()
        # What the fork builds on is stored first: a session that is resumed elsewhere, and the
        # other forks, must know the state that it was made from.
        membership = await spiller.share()
        base = await self._forks.begin(membership.known)
        # The fork begins at a snapshot that holds them; sent along as well, a thousand forks of a
        # million references would be a thousand copies (decision 0012).
        membership = replace(membership, known=ChangeSet())
        return ForkSession.beside(self, self._forks, base, membership)

    async def _prepare_to_merge(self, forks: Iterable[ForkSession]) -> None:
        spiller = self.spiller
        members = {
            fork.lineage.fork_id: fork.membership for fork in forks if fork.membership is not None
        }
        if spiller is None or not members:
            return
        # Most merges are of forks that never published, and cost one listing at most: a copy of the
        # fork, made before it was pickled back, may have published without this one knowing.
        marked = any(it.number or it.refreshed for it in members.values())
        if marked or await spiller.has_publications(members):
            await self.refresh()

    def discard_fork(self, *forks: ForkSession | str) -> None:
        """No longer wait for forks, given themselves or by their ``fork_id``; see `commit`.

        What was changed in them is lost, also what they published and the session did not take in.
        Forks that published nothing can still be merged.

        Raises:
            InvalidInputError: one was merged or discarded already, or is another session's; nothing
                was discarded.
        """
        names = [it.fork_id if isinstance(it, ForkSession) else it for it in forks]
        spiller = self.spiller
        waiting = () if spiller is None else spiller.waiting
        # It refuses all names if one is unknown, and so comes before any is given up.
        self._forks.discard(names, also=waiting)
        if spiller is not None:
            for name in names:
                spiller.give_up(bytes.fromhex(name))

    @asynccontextmanager
    async def _publishing(
        self, *, allow_missing_forks: bool, timeout_seconds: float | None = None
    ) -> AsyncGenerator[float | None]:
        """Take in what forks published, so that the block publishes it; keep out what is late.

        Yields: the time that is left.
        """
        began = anyio.current_time()
        # An unknown commit is found out first, with exactly the changes that it had: what forks
        # published since is not in the snapshot that may have landed.
        unsure = self.publisher.outcome_unknown  # then it was done before
        spiller = self.spiller
        if spiller is None or not spiller.has_forks:
            spiller = None
        try:
            if spiller is not None and not unsure:
                with self._workspace.lock:
                    self._workspace.check_open()
                # Cut off here, nothing was sent to the branch: this is an error of a known outcome,
                # and not one that the caller has to find out about.
                with anyio.move_on_after(timeout_seconds) as scope:
                    await spiller.seal()
                if scope.cancelled_caught:
                    raise StorageUnavailableError(
                        f"The commit did not come to its end within {timeout_seconds:g} s: what "
                        "forks published is not read yet. Nothing was published and no change was "
                        "lost; commit again, with more time."
                    )
            if not (allow_missing_forks or unsure):
                self._forks.check_complete()
            if timeout_seconds is not None:
                timeout_seconds = max(0, timeout_seconds - (anyio.current_time() - began))
            yield timeout_seconds
        finally:
            # Not after an unknown outcome: if the commit landed, what a fork publishes now would
            # never be part of one. The next try decides.
            if spiller is not None and not (self.read_only or self.outcome_unknown):
                await spiller.unseal()

    @property
    def outcome_unknown(self) -> bool:
        """Whether a commit may have landed without an answer; commit again to find out."""
        return self.publisher.outcome_unknown

    @property
    def already_committed(self) -> bool:
        """Whether ``commit(once=...)`` found its transaction on the branch and published none."""
        return self.publisher.already_committed

    @property
    def collected_chunks(self) -> dict[str, npt.NDArray[np.uint32]]:
        """The chunks that must be written again after a `ChunksCollectedError`.

        By the path of their array, coordinates as rows ``(n, rank)``. Chunks that were written
        or deleted since are left out; empty if the last commit found everything.
        """
        return self.publisher.guard.lost_chunks()

    async def commit(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        allow_empty: bool = False,
        allow_missing_forks: bool = False,
        once: Transaction | None = None,
        unchanged: Collection[str] = (),
    ) -> SnapshotId:
        """Publish the session's changes as a new snapshot on its branch, all at once.

        Afterwards the session is read-only and stands on the new snapshot.

        Args:
            message: says what was done, for people.
            metadata: properties of the snapshot, JSON values by name; laid over the
                repository's default commit metadata.
            rebase_with: where another writer was first, replay the changes on top and try
                again, letting this solver decide conflicts. Without it such a race is lost.
            rebase_tries: how often at most.
            timeout_seconds: how long the call may take, tries and waits included.
            allow_empty: make a snapshot even if nothing changed.
            allow_missing_forks: commit although forks were handed out that were neither merged nor
                discarded (`discard_fork`); what they wrote is lost.
            once: names the commit. Where the branch holds this transaction, or a later one of
                the same application, nothing is published: the session drops its changes and
                stands on the newest snapshot that records it, whose id is returned. See
                ``already_committed``; and `Transaction` for how long it is remembered.
            unchanged: paths of arrays and groups that the changes were computed from. If a commit
                since the session began touched one of them, or a node below it, that is a
                conflict that no solver decides. Without it, only what the session itself wrote
                is compared with what others wrote.

        Raises:
            NothingToCommitError: nothing changed.
            SessionStateError: forks are missing; see ``unmerged_forks``.
            ConflictError: another writer was first, and either no solver was given or the
                tries or the time were used up; or others touched what is to be ``unchanged``.
                Nothing was published; no change is lost. This error, `RebaseFailedError` and
                `ChunksCollectedError` name a snapshot with the changes, which
                `Repository.readonly_session` opens, in ``context["kept_snapshot_id"]``.
            StorageUnavailableError: the time was used up otherwise. Nothing was published.
            RebaseFailedError: the solver did not settle a conflict. Nothing was published.
            ReadOnlyError, RepositoryReadOnlyError, BranchNotFoundError: nothing was published.
            ChunksCollectedError: garbage collection deleted chunks of this session, because its
                cutoff was younger. Nothing was published; see ``collected_chunks``.
            LeaseExpiredError: a session with a lease was idle for too long. Nothing was published.
            LeaseLostError: another process continued, committed or ended it. Nothing was published.
            SnapshotNotFoundError: chunks were shifted or reindexed, the session was rebased,
                and the snapshot that it stood on has expired since. Nothing was published.
            OutcomeUnknownError: the storage never answered, or not in time. Committing again
                finds out, and publishes only what was not published.

        Cancellation: the commit may have been published.

        Cost: two requests that follow one another after the chunks are stored, where nobody
        else commits: manifests, snapshot, log and backup together, then the reference. A try
        that lost a race stores again only what the winner's commit affects. If garbage was
        collected since the session began, one listing more; and if the cutoff can reach what the
        session wrote, a request for each of its chunk objects, or one listing of all chunk
        objects if it has more than 32. With format version 1 the first listing is made always,
        beside the other requests. A session with a lease
        makes two requests more: it renews the lease before and closes it after. With ``once``, a
        walk along the history where the session's base records no transaction: one request, or
        with format version 1 one for each commit back to the nearest record.
        """
        async with self._publishing(
            allow_missing_forks=allow_missing_forks, timeout_seconds=timeout_seconds
        ) as left:
            snapshot_id = await self.publisher.commit(
                message,
                metadata,
                rebase_with=rebase_with,
                rebase_tries=rebase_tries,
                timeout_seconds=left,
                allow_empty=allow_empty,
                once=once,
                unchanged=unchanged,
            )
        # Published by now: none of what follows raises an error of the storage, which would read as
        # a failed commit. Hooks keep their failures for `Repository.hook_failures`.
        await self._close_lease(snapshot_id)
        if self._told is not None and not self.publisher.already_committed:
            published = self._workspace.base
            await self._told(published, published.parent_id, "commit")
        return snapshot_id

    async def amend(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        allow_empty: bool = False,
        allow_missing_forks: bool = False,
    ) -> SnapshotId:
        """Replace the tip of the branch by a snapshot with the session's changes on top of it.

        Message and properties are replaced, not joined; those that record transactions
        (``commit(once=...)``) are repeated. The old tip can still be read by its
        id until it is collected. Afterwards the session is read-only.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
            SessionStateError: the tip is the first snapshot, or it moved nodes and the session
                does not; or forks are missing.
            NothingToCommitError, ConflictError, ReadOnlyError: as `commit`.
            SnapshotNotFoundError, ChunksCollectedError: as `commit`.

        Cancellation: the amendment may have been published.
        """
        # Before: afterwards the session stands on the new tip.
        replaced_id = self._workspace.base.id
        async with self._publishing(allow_missing_forks=allow_missing_forks):
            snapshot_id = await self.publisher.amend(message, metadata, allow_empty=allow_empty)
        await self._close_lease(snapshot_id)
        if self._told is not None:
            await self._told(self._workspace.base, replaced_id, "amend")
        return snapshot_id

    async def flush(
        self,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        *,
        allow_missing_forks: bool = False,
    ) -> SnapshotId:
        """Publish a snapshot of the session's changes that no branch holds, even an empty one.

        It can be read by its id, and a branch or tag can be set to it; else it is collected
        as garbage. Afterwards the session is read-only and stands on it.

        Raises:
            SnapshotNotFoundError: the session's base has expired or been collected. Nothing was
                published.
            ReadOnlyError, ChunksCollectedError, SessionStateError: as `commit`.

        Cancellation: the snapshot may exist.

        Cost: as `commit`; with format version 1 besides a listing of the refs, a request for each,
        and one for each commit since the session began.
        """
        async with self._publishing(allow_missing_forks=allow_missing_forks):
            snapshot_id = await self.publisher.flush(message, metadata)
        return await self._close_lease(snapshot_id)

    async def _check_published(self, snapshot_id: SnapshotId) -> None:
        await self.publisher.check_published(snapshot_id)

    async def rebase(self, solver: ConflictSolver) -> None:
        """Replay the session's changes on top of the newer commits of its branch.

        Nothing is published. Nothing happens if there are no newer commits.

        Raises:
            RebaseFailedError: a conflict that the solver did not settle. The session stands on
                the last commit that did not clash, with its changes.
            ConflictError: the branch was reset away from the session's base.
            ReadOnlyError: the session only reads.

        Cancellation: the session stands on its old base or on a commit after it.

        Forks fit no more afterwards: what they published before is part of the session.
        """
        async with self._publishing(allow_missing_forks=True):
            await self.publisher.rebase(solver)


class ForkSession(_Hierarchy):
    """A part of a session that travels: it reads, writes and pickles, and is merged.

    Made by ``Session.fork``. Pickled, it carries where the repository is and what was written to
    it so far, which is columns and a few bytes a chunk; chunks themselves are stored when they
    are written. At its destination it opens nothing by itself: use `attached` to work in it, and
    merge it whether it is attached or not.
    """

    def __init__(
        self,
        state: _Attached | _Detached,
        *,
        session_id: bytes,
        base_id: SnapshotId,
        origin: Origin | None,
        deduplicate: bool = False,
    ) -> None:
        """Begin attached or detached; see `Session.fork` and `from_bytes`."""
        self._deduplicate = deduplicate
        self._held: _Attached | _Detached = state
        self._session_id = session_id
        self._base_id = base_id
        self._origin = origin

    @classmethod
    def beside(
        cls,
        session: _Hierarchy,
        forks: Forks,
        base: Snapshot,
        membership: Membership | None = None,
    ) -> Self:
        """Return a fork of ``session`` that stands on ``base`` and shares its connections."""
        from icechunk_async.engine.leases.keeper import Lease  # noqa: PLC0415 -- not to read

        home = session.workspace
        workspace = Workspace(
            base,
            home.assets,
            home.virtual,
            inline_threshold_bytes=home.inline_threshold_bytes,
            read_only=False,
            # Separate packs: a fork may be merged later, elsewhere or never, so its chunks share no
            # objects with those of its session.
            packs=None if home.packs is None else home.packs.another(),
            deduplicate=home.deduplication is not None,
        )
        workspace.recorder = home.recorder
        lease = home.lease
        state = _Attached.to(
            workspace,
            forks.flusher.options,
            forks.session_id,
            forks.hand_out(),
            membership,
            # None for a fork of a fork, whose workspace has no lease: it asks the storage first.
            alive_us=lease.renewed_us if isinstance(lease, Lease) else None,
        )
        return cls(
            state,
            session_id=forks.session_id,
            base_id=base.id,
            origin=session.origin,
            deduplicate=home.deduplication is not None,
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, origin: Origin | None = None) -> Self:
        """Read what `to_bytes` wrote. Such a fork can be merged, and attached to a storage.

        Raises:
            FormatError: the bytes are damaged, or another version of the library wrote them.
        """
        from icechunk_async.engine.changes.wire import decode_fork  # noqa: PLC0415 -- not to read

        state = decode_fork(data)
        return cls(
            _Detached(state.changes, None, state.lineage, state.membership),
            session_id=state.session_id,
            base_id=state.base_id,
            origin=origin,
            deduplicate=state.deduplicate,
        )

    def to_bytes(self) -> bytes:
        """Return the changes of the fork, without where the repository is and any secret.

        Equal states give equal bytes. Cost: some 12 to 25 bytes a chunk. On local disks, what the
        bytes refer to is durable after the end of `attached`, or `store_pending_chunks`.

        Raises:
            SessionStateError: chunks wait to be packed; see `store_pending_chunks`.
        """
        from icechunk_async.engine.changes.wire import ForkState, encode_fork  # noqa: PLC0415 -- not to read

        state = self._state
        if isinstance(state, _Detached):
            fork = (self._base_id, state.changes, state.lineage, state.membership)
        else:
            with state.workspace.lock:  # first: a thread may write while this looks
                fork = (
                    state.workspace.base.id,
                    state.noted_changes(),
                    state.forks.lineage,
                    state.membership,
                )
        # After the copy: a chunk that a thread packs before it would be among the changes and not
        # in the storage, and one that is packed later only makes this refuse once too often.
        if self.has_pending_chunks:
            raise _pending()
        return encode_fork(ForkState(self._session_id, *fork, self._deduplicate))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as plain data."""
        return type(self).from_bytes, (self.to_bytes(), self._origin)

    def __repr__(self) -> str:
        """Show the snapshot, whether it can be read and written here, and what was changed."""
        from icechunk_async._display.versions import session_card  # noqa: PLC0415 -- loaded when it is used

        return session_card(self).text()

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        from icechunk_async._display.versions import session_card  # noqa: PLC0415 -- loaded when it is used

        return session_card(self).html()

    @property
    def workspace(self) -> Workspace:
        """The hierarchy, with the changes so far, while the fork is attached."""
        return self._attached.workspace

    @property
    def _forks(self) -> Forks:
        return self._attached.forks

    @property
    def _state(self) -> _Attached | _Detached:
        """The state in this process: nothing that the parent of a forked child opened is open."""
        held = self._held
        if isinstance(held, _Attached) and held.generation != generation():
            # A child has one thread after `os.fork`, so nothing races this. What the parent opened
            # is left alone: two processes that use one connection mix up their requests.
            held = self._held = held.inherited()
        return held

    @_state.setter
    def _state(self, state: _Attached | _Detached) -> None:
        self._held = state

    @property
    def _attached(self) -> _Attached:
        if isinstance(self._state, _Detached):
            raise SessionStateError(
                "This fork comes from another process and has nothing open here. Read and write "
                "within 'async with fork.attached()'; to merge it, nothing needs to be open."
            )
        return self._state

    @property
    def origin(self) -> Origin | None:
        """Where its repository is and how it was opened; its secrets are not shown."""
        return self._origin

    @property
    def mode(self) -> SessionMode:
        """Writable, as its session was."""
        return SessionMode.WRITABLE

    @property
    def branch(self) -> None:
        """None: a fork is merged, not committed."""
        return

    @property
    def session_id(self) -> bytes:
        """Names the session that the fork, and every fork of a fork, belongs to."""
        return self._session_id

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the fork stands on; perhaps one that was never published."""
        state = self._state
        return self._base_id if isinstance(state, _Detached) else state.workspace.base.id

    @property
    def lineage(self) -> Lineage:
        """Which fork this is, and which others were merged into it or are missing from it."""
        state = self._state
        return state.lineage if isinstance(state, _Detached) else state.forks.lineage

    @property
    def membership(self) -> Membership | None:
        """The fork's place among those that publish to a lease; None if it cannot."""
        return self._state.membership

    async def publish(self) -> bool:
        """Let the session and its other forks see what was changed here, before any commit.

        For forks of a session with a lease, wherever they are attached. Others see it all at once,
        when they refresh. It is part of the session then, and of its commit: a fork that published
        need not be merged, and counts as merged. What it changes afterwards must be published
        again, or merged.

        Of two that set one chunk, the one that published last counts, if it had refreshed. Where
        neither had seen the other's, the clocks of their machines decide which was last.

        Returns: whether anything was new. The first time, something always is.

        Raises:
            SessionStateError: the session has no lease; it was rebased or discarded its changes, or
                gave the fork up, since; or another copy of this fork published. Or this is a fork
                of a fork, which had changes that it had not published.
            LeaseExpiredError: the session was idle for too long.
            LeaseLostError: it was committed or ended, or is continued by another process.
            LeaseNotFoundError: its lease was removed, some time after its end.
            OutcomeUnknownError: it may have been published, because the storage never answered or
                the session is just being committed or resumed. Publish again to find out.
            StorageError: nothing was published. After any error what was changed is still here.

        Cancellation: it may have been published. Publish again to find out.

        Cost: two requests, and those for chunks that wait to be packed: one writes what changed
        since the last time, 12 to 25 bytes for each chunk, one reads the lease. A request more at
        most once a minute, or for short leases each tenth of their length, renews the lease. The
        first time in a process, one more tells its age, where the backend does not tell the time.
        """
        return await self._member("publish").publish()

    async def refresh(self) -> bool:
        """See what the session and its other forks published, below what was changed here.

        What this fork changed and did not publish lies above what it reads: where both set a chunk,
        the fork's counts, here and, once it publishes, for all. The session publishes by
        ``Session.refresh`` and by forking. Afterwards the fork stands on the snapshot that its
        session builds on, and what others changed is among its changes.

        Returns: whether anything was new.

        Raises:
            MergeFailedError: publications clash with each other, or with what this fork changed and
                did not publish; see ``Session.merge``. Nothing was taken in. `discard_changes`
                forgets what was not published.
            SessionStateError, LeaseLostError, LeaseNotFoundError: as `publish`.
            FormatError: what was published is damaged; nothing was taken in.

        Cancellation and errors: the fork sees what it saw before.

        Cost: one listing if nothing is new. Otherwise one request for the lease, and one for each
        publication and each segment that the session stored since.
        """
        return await self._member("refresh").refresh()

    def _member(self, what: str) -> Member:
        member = self._attached.member
        if member is None:
            raise SessionStateError(
                f"This fork cannot {what}: its session has no lease, or it is a fork of a fork "
                "that had changes which were not published, or the repository's format is older "
                "than version 1. Fork a session of Repository.writable_session(branch, lease=True)."
            )
        return member

    async def _prepare_to_merge(self, forks: Iterable[ForkSession]) -> None:
        """Leave it to the session."""

    async def _new_fork(self) -> ForkSession:
        base = await self._forks.begin()
        member = self._attached.member
        # None as well if the fork has changes that it did not publish: the session could not tell
        # later what a fork of it builds on.
        membership = None if member is None else member.for_fork()
        return ForkSession.beside(self, self._forks, base, membership)

    def discard_changes(self) -> None:
        """Forget every change of the fork that it did not publish.

        Raises:
            ReadOnlyError: other forks are being merged into it.
        """
        member = self._attached.member
        if member is None:
            super().discard_changes()
        else:
            member.discard()

    async def _check_published(self, snapshot_id: SnapshotId) -> None:
        """Leave it to the session that commits: a fork does not know the history."""

    @property
    def unmerged_forks(self) -> tuple[str, ...]:
        """The ``fork_id`` of each fork of this one that was neither merged nor discarded."""
        return tuple(sorted(it.hex() for it in self.lineage.missing))

    @property
    def fork_id(self) -> str:
        """Names the fork, and every copy of it, among the forks of its session."""
        return self.lineage.fork_id.hex()

    @property
    def is_attached(self) -> bool:
        """Whether the fork can read and write here."""
        return isinstance(self._state, _Attached)

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether anything was changed in the fork, or is not published if it has published."""
        state = self._state
        if isinstance(state, _Detached):
            if state.membership is None:
                return not state.changes.is_empty()
            from icechunk_async.engine.changes.publications import news_since, noted_in  # noqa: PLC0415 -- not to read
            from icechunk_async.format.snapshot import Nodes  # noqa: PLC0415 -- not to read

            known = state.membership.known
            # An empty base will do: its nodes say what news are compared with later, and whether
            # there are any does not depend on them. A detached fork has not read its own.
            noted = noted_in(state.changes)
            return not news_since(known, state.changes, Nodes(), {}, [noted]).is_empty()
        if state.member is not None:
            return state.member.has_news
        return super().has_uncommitted_changes

    @property
    def has_pending_chunks(self) -> bool:
        """Whether chunks wait in memory to be packed; such a fork does not travel."""
        if isinstance(self._state, _Detached):
            return self._state.unstored is not None
        return super().has_pending_chunks

    async def store_pending_chunks(self) -> None:
        """Return when every chunk written so far is in the storage; see ``Session``.

        Raises:
            StorageError: some are not stored; they stay in the fork. Call again.
            SessionStateError: some are not, and the fork is not attached.
        """
        if self.is_attached:
            await super().store_pending_chunks()
        elif self.has_pending_chunks:
            raise _pending()

    def changes_so_far(self) -> ChangeSet:
        """Return a copy of what was changed in the fork."""
        state = self._state
        if isinstance(state, _Detached):
            return state.changes.copy()
        with state.workspace.lock:
            return state.noted_changes()

    async def stored_changes(self) -> ChangeSet:
        """Return a copy of what was changed in the fork, once every chunk of it is stored.

        Raises:
            StorageError, SessionStateError: as `store_pending_chunks`.
        """
        changes = self.changes_so_far()  # first: what is written meanwhile is not among them
        if self.is_attached:  # local disks need no sync: the commit syncs what this process wrote
            await self.workspace.store_packs()
            await self.workspace.store_statistics()
        else:
            await self.store_pending_chunks()
        return changes

    @asynccontextmanager
    async def attached(
        self,
        storage: Storage | None = None,
        *,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    ) -> AsyncGenerator[Self]:
        """Open the fork's repository for the length of the block, to read and write.

        If the fork is attached already, for example where it was made, nothing is opened.

        Args:
            storage: use this one, which is left open, in place of what travelled with the fork.
            authorize_virtual_chunk_access: use these in place of what travelled; see
                ``Repository.open``.

        Raises:
            SnapshotNotFoundError: what the fork stands on was collected as garbage.
            FormatError: the changes that it came with cannot have been made on that.
            SessionStateError: it was read from bytes alone, and no storage is given.
            StorageError: at the end of the block: chunks that waited to be packed are not stored.
                They stay in the fork, which can be attached again but not sent until they are.

        Cancellation, and other errors in the block: what was written stays in the fork.

        Cost: four requests; the block's end waits for none.
        """
        if self.is_attached:
            yield self
            await self.store_pending_chunks()
            return
        if self._origin is not None:
            request = self._origin.request(storage, authorize_virtual_chunk_access)
        elif storage is not None:
            request = Request(storage, {}, None, authorize_virtual_chunk_access or {})
        else:
            raise SessionStateError(
                "This fork was read from bytes that do not say where its repository is: give an "
                "open storage, 'fork.attached(storage)'."
            )
        async with open_engine(request) as engine:
            self.attach(engine, await engine.assets.snapshot(self.snapshot_id))
            try:
                yield self
                await self.store_pending_chunks()
            finally:
                self._detach()

    def attach(self, engine: Engine, base: Snapshot) -> None:
        """Begin to read and write in an open repository, for as long as that is open.

        Raises:
            FormatError: the changes that it came with cannot have been made on ``base``.
        """
        from icechunk_async.engine.changes.merge import check_fits  # noqa: PLC0415 -- not to read

        state = self._state
        assert isinstance(state, _Detached)
        # The bytes may come from anywhere. They decoded, and may still name nodes that the snapshot
        # does not have, or chunks outside of an array's grid.
        check_fits(state.changes, base.nodes, engine.assets.spec_version)
        if state.membership is not None:
            check_fits(state.membership.known, base.nodes, engine.assets.spec_version)
        workspace = Workspace(
            base,
            engine.assets,
            engine.virtual,
            inline_threshold_bytes=engine.config.effective_inline_chunk_threshold_bytes,
            read_only=False,
            # Chunks that an earlier block could not store are still in memory, and go with this
            # one.
            packs=state.unstored or engine.new_packs(),
            deduplicate=self._deduplicate,
        )
        workspace.rebase_to(base, state.changes)
        if engine.assets.keeps_statistics:
            from icechunk_async.zarr.queries.written import recorder_for  # noqa: PLC0415 -- on use

            workspace.recorder = recorder_for(engine.assets)
        self._state = _Attached.to(
            workspace, engine.manifest_options, self._session_id, state.lineage, state.membership
        )

    def _detach(self) -> None:
        """Keep the changes with chunks that are not stored, and nothing that is open."""
        attached, workspace = self._attached, self.workspace
        with workspace.lock:
            # In this order under the lock: a thread that still writes is refused, or its chunk is
            # among the changes that are kept.
            workspace.closed = Closed.DETACHED
            packs = workspace.packs
            unstored = None if packs is None or packs.are_stored else packs
            self._base_id = workspace.base.id
            self._state = _Detached(
                attached.noted_changes(), unstored, self._forks.lineage, self.membership
            )

    async def merge(self, *forks: ForkSession, allow_overlaps: bool = True) -> None:
        """Take over what was changed in other forks; see ``Session.merge``.

        Needs no storage: forks that travelled can be merged wherever they are.
        """
        from icechunk_async.engine.commit.forks import joined, merge_apart  # noqa: PLC0415 -- not to read

        state = self._state
        if isinstance(state, _Detached):
            for fork in forks:
                _check_is_fork(fork)
            merged = await merge_apart(
                state.changes, self._session_id, self._base_id, forks, allow_overlaps=allow_overlaps
            )
            if self._state is state:  # no await since: nothing can be changed in between
                lineage = joined(state.lineage, forks)
                self._state = _Detached(merged, state.unstored, lineage, state.membership)
            else:  # it was attached or merged into meanwhile
                await self.merge(*forks, allow_overlaps=allow_overlaps)
            return
        await super().merge(*forks, allow_overlaps=allow_overlaps)

    async def commit(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a fork is merged into its session, and that is committed."""
        raise _never_published()

    async def amend(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a fork is merged into its session, and that amends."""
        raise _never_published()

    async def flush(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a fork is merged into its session, and that is flushed."""
        raise _never_published()

    async def rebase(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a fork is merged into its session, and that is rebased."""
        raise _never_published()

    async def spill(self) -> NoReturn:
        """Refuse: a fork is merged into its session, and that is spilled."""
        raise SessionStateError(
            "A fork cannot be spilled. Merge it into its session, and spill that."
        )


type AnySession = Session | ForkSession
"""The sessions that a Zarr store can stand on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    """The parts of a session that publish what was changed in it."""

    publisher: Publisher
    forks: Forks
    spiller: Spiller | None
    """Of a session with a lease."""


@dataclass(frozen=True, slots=True, eq=False)
class _Attached:
    """A fork whose repository is open."""

    workspace: Workspace
    forks: Forks
    generation: int
    """The process in which the repository is open."""
    member: Member | None
    """Publishes to the lease of its session, if that has one."""

    @classmethod
    def to(
        cls,
        workspace: Workspace,
        options: ManifestOptions,
        session_id: bytes,
        lineage: Lineage,
        membership: Membership | None,
        *,
        alive_us: int | None = None,
    ) -> Self:
        from icechunk_async.engine.commit.flush import Flusher  # noqa: PLC0415 -- not to read
        from icechunk_async.engine.commit.forks import Forks  # noqa: PLC0415 -- not to read

        flusher = Flusher(workspace.assets, options)
        forks = Forks(workspace, flusher, session_id=session_id, lineage=lineage)
        member = None
        if membership is not None:
            from icechunk_async.engine.leases.member import Member  # noqa: PLC0415 -- not to read

            member = Member(workspace, membership, lambda: forks.lineage, alive_us=alive_us)
        return cls(workspace, forks, generation(), member)

    @property
    def membership(self) -> Membership | None:
        return None if self.member is None else self.member.membership

    def noted_changes(self) -> ChangeSet:
        """Return a copy of the changes, with journals of what is not published."""
        return self.workspace.changes.copy() if self.member is None else self.member.noted_changes()

    def inherited(self) -> _Detached:
        """Return the changes, for a child process made by `os.fork`.

        The lock is not taken: a thread of the parent may have held it.
        """
        packs = self.workspace.packs
        if packs is not None and not packs.are_stored:
            # The parent appends to them and stores them under the same keys.
            raise SessionStateError(
                "This process inherited the fork by os.fork while chunks of it waited in memory "
                "to be packed. Store them before: 'await fork.store_pending_chunks()'."
            )
        return _Detached(self.noted_changes(), None, self.forks.lineage, self.membership)


@dataclass(frozen=True, slots=True, eq=False)
class _Detached:
    """A fork that has nothing open."""

    changes: ChangeSet
    unstored: Packs | None
    """Chunks of those changes that are not in the storage; None if all are."""
    lineage: Lineage
    membership: Membership | None


def _check_is_fork(fork: object) -> None:
    """Raise SessionStateError for another session, or anything else that is no fork."""
    if not isinstance(fork, ForkSession):
        raise SessionStateError(
            f"Only forks can be merged, and {fork!r} is not a fork. Make one with 'await "
            "session.fork()', write to it, and merge that."
        )


def _pending() -> SessionStateError:
    return SessionStateError(
        "Chunks that were written to this fork wait in memory to be packed, and would be missing "
        "elsewhere. Store them first: 'await fork.store_pending_chunks()' while it is attached; "
        "the end of 'async with fork.attached()' does so by itself, unless it fails."
    )


def _never_published() -> SessionStateError:
    return SessionStateError(
        "A fork cannot be committed, amended, flushed or rebased. Merge it into the session that "
        "it came from, 'await session.merge(fork)', and do that there.",
        code="commit-not-allowed",
    )

"""Sessions: one consistent view of a hierarchy, one transaction on a branch, and forks of it."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, NoReturn, Self, cast

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import SingleFlight, gather
from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.changes.merge import ForkPoint, Merger, check_fits
from icechunk_async.engine.changes.wire import ForkState, decode_fork, encode_fork
from icechunk_async.engine.commit.publisher import Publishing, SessionMode
from icechunk_async.engine.open import Request, open_engine
from icechunk_async.engine.tree.nodes import NodeOperations, virtual_locations
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import OutcomeUnknownError, SessionStateError, StorageUnavailableError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping

    from icechunk_async.engine.commit.flush import ManifestOptions
    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.engine.history import History
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.open import Engine, Origin
    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.storage import Storage
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["ForkSession", "Forking", "Session", "SessionMode"]


_SESSION_BYTES: Final = 12
_MERGING: Final = "Forks are being merged into the session."
_BYTES_PER_FORK: Final = 1 << 15
"""Roughly what merging one fork is worth; decides what goes to a thread."""


class Forking(Publishing):
    """What a session does to be worked on by many; a base of the session."""

    def __init__(
        self,
        workspace: Workspace,
        history: History,
        options: ManifestOptions,
        *,
        branch: str | None,
        mode: SessionMode,
        default_metadata: Mapping[str, JSON],
        origin: Origin | None,
        session_id: bytes | None = None,
    ) -> None:
        """Stand on the workspace's base; ``origin`` says how others can open the repository."""
        super().__init__(
            workspace, history, options, branch=branch, mode=mode, default_metadata=default_metadata
        )
        self._origin = origin
        self._session_id = session_id or clock.random_bytes(_SESSION_BYTES)
        self._points: dict[SnapshotId, ForkPoint] = {}
        """What forks of this session stand on, besides its base: unpublished snapshots."""
        self._points_of: ChangeSet | None = None
        """The changes that these snapshots hold the beginning of."""
        self._flights: SingleFlight[ForkPoint, SnapshotId] = SingleFlight()
        self._latest: ForkPoint | None = None

    async def fork(self) -> ForkSession:
        """Return a session for somebody else to work in, who sees what this one sees now.

        A fork reads and writes like its session, pickles with what was written in it, and is
        never committed: merge it into this session (or into another fork of it) and commit that.

        Raises:
            SessionStateError: the session only reads, or moves nodes.
            ReadOnlyError: it is being committed or merged.
            StorageUnavailableError: its changes could not be stored for the fork to see.

        Cancellation: no effect but files that nothing refers to.

        Cost: none where the session has no uncommitted changes. Else its changes are stored
        once, however many forks begin there: manifests, which the commit uses again, and a
        snapshot that no branch holds. Garbage collection takes that for garbage, as it takes the
        chunks of every session: let it spare what is younger than a session can be.
        """
        self._check_mode("forked")
        workspace = self.workspace
        with workspace.lock:
            workspace.check_writable()
            base = workspace.base
            point, points = self._point_now(), self._points
        if point is None:
            return self._fork_at(base)
        base_id = await self._flights.run(point, lambda: self._store_point(base, point, points))
        return self._fork_at(await workspace.assets.snapshot(base_id))

    def _point_now(self) -> ForkPoint | None:
        """Return the session's present changes; the same as before if nothing changed since."""
        changes = self.workspace.changes
        if changes is not self._points_of:
            self._points, self._points_of, self._latest = {}, changes, None
        if changes.is_empty():
            return None
        if self._latest is None or not changes.same_as(self._latest.changes):
            self._latest = ForkPoint(changes.copy())
        return self._latest

    def _fork_at(self, base: Snapshot) -> ForkSession:
        # Forks are sessions, and sessions can be forked.

        return ForkSession.beside(self, base)

    async def _store_point(
        self, base: Snapshot, point: ForkPoint, points: dict[SnapshotId, ForkPoint]
    ) -> SnapshotId:
        """Store an unpublished snapshot of the session's state, unless that was done.

        It is noted in ``points``, those of the changes at the beginning: the session may have been
        rebased meanwhile, and then what is done in the fork must not be merged.
        """
        for known_id, known in points.items():
            if known is point:
                return known_id
        await self.workspace.store_packs()
        flushed = await self._flusher.flush(base, WorkingTree(base.nodes, point.changes))
        snapshot = Snapshot(
            SnapshotId.random(),
            base.id,
            max(clock.now_us(), base.flushed_at + 1),
            "fork",
            {},
            flushed.nodes,
            flushed.files,
        )
        try:
            await gather(self._flusher.store(flushed), self.workspace.assets.put_snapshot(snapshot))
        except OutcomeUnknownError as error:
            raise StorageUnavailableError(
                f"The state that a fork begins in may not be stored: {error} Nothing was "
                "published and no change was lost; fork again."
            ) from error
        points[snapshot.id] = point
        return snapshot.id

    @property
    def has_pending_chunks(self) -> bool:
        """Whether chunks wait in memory to be packed; see :meth:`store_pending_chunks`."""
        packs = self.workspace.packs
        return packs is not None and not packs.are_stored

    async def store_pending_chunks(self) -> None:
        """Return when every chunk written so far is in the storage, and durable there.

        Where small chunks are packed, some wait in memory until there are enough of them, and
        local disks are synced only by a commit, which can sync what its own process wrote. So a
        fork needs this call before its bytes leave the process; the end of ``attached()``, the
        blocking facade and Spark's tasks make it by themselves.

        Raises:
            StorageError: some are not; they stay in the session. Call again.

        Cancellation: likewise.
        """
        await self.workspace.store_packs()
        await self.workspace.assets.storage.sync()

    async def merge(self, *forks: ForkSession, allow_overlaps: bool = True) -> None:
        """Take over what was done in forks; nothing, if any of it clashes.

        A fork can be merged into the session that it came from, and into its siblings, so that
        many can be merged as a tree. It stays as it is.

        Args:
            forks: in order: of several that set one chunk the last one counts.
            allow_overlaps: without it, a chunk that several of these forks set is a clash.

        Raises:
            MergeFailedError: they clash with each other, or with what this session did since
                they began. Every clash is in its context; nothing was merged.
            SessionStateError: one is no fork, or came from another session or another state of
                it (it was rebased since, for example).
            ReadOnlyError: this session cannot be changed, or not at present.
            FormatError: one holds changes that nobody can have made in a fork of this session.

        Cancellation: nothing was merged, or all of it.

        Cost: no requests; time and memory in proportion to what the forks changed.
        """
        self._check_mode("merged into")
        with self._merging() as workspace:
            merger = Merger(
                workspace.changes,
                workspace.base.id,
                path_of=workspace.base.nodes.path_of,
                allow_overlaps=allow_overlaps,
            )
            points = [self._point_of(fork) for fork in forks]
            parts = [await stored_changes(fork) for fork in forks]

            def work() -> ChangeSet:
                for changes, point in zip(parts, points, strict=True):
                    merger.add(changes, point)
                merged = merger.finish()
                check_fits(merged, workspace.base.nodes)
                return merged

            merged = await workspace.assets.compute(work, size_bytes=_BYTES_PER_FORK * len(parts))
            with workspace.lock:
                _check_still_merging(workspace)
                if self._points_of is workspace.changes:
                    self._points_of = merged
                workspace.rebase_to(workspace.base, merged)

    async def resume(
        self, root: ForkSession, *forks: ForkSession, allow_overlaps: bool = False
    ) -> None:
        """Go on in place of a session that is gone, perhaps with its process.

        This session, which must not have changed anything, stands where ``root`` stands, with
        what was changed in it and in ``forks`` of it. A commit finds out what others did since.

        Args:
            root: a fork of the session that is gone; it may have been read from bytes.
            forks: forks of ``root``, made after its last change; likewise.
            allow_overlaps: see :meth:`merge`.

        Raises:
            SnapshotNotFoundError: what ``root`` stands on was collected as garbage.
            SessionStateError: a fork is of another session.
            MergeFailedError: forks clash.

        Cancellation and errors: the session has no changes.
        """
        self._check_mode("resumed")
        check_is_fork(root)
        workspace = self.workspace
        base = await workspace.assets.snapshot(root.snapshot_id)
        done = await stored_changes(root)
        with workspace.lock:
            workspace.check_writable()
            if not workspace.changes.is_empty():
                raise SessionStateError(
                    "This session has changes of its own, and cannot go on in place of another. "
                    "Begin a new one with Repository.writable_session."
                )
            before = (self._session_id, self._points, self._points_of)
            began, changes = workspace.base, done
            point = ForkPoint(changes.copy())
            self._session_id = root.session_id
            self._points = {
                fork.snapshot_id: point for fork in forks if fork.snapshot_id != base.id
            }
            self._points_of = changes
            workspace.rebase_to(base, changes)
        try:
            await self.merge(*forks, allow_overlaps=allow_overlaps)
        except BaseException:
            workspace.rebase_to(began, ChangeSet())
            self._session_id, self._points, self._points_of = before
            raise

    def _point_of(self, fork: ForkSession) -> ForkPoint:
        """Return what this session had changed when a fork began."""
        check_is_fork(fork)
        workspace = self.workspace
        if fork.session_id == self._session_id:
            if fork.snapshot_id == workspace.base.id:
                return ForkPoint(ChangeSet())
            point = self._points.get(fork.snapshot_id)
            if point is not None and self._points_of is workspace.changes:
                return point
        raise wrong_base(fork, self._session_id, workspace.base.id)

    def _check_mode(self, what: str) -> None:
        if self._mode is not SessionMode.WRITABLE:
            raise SessionStateError(
                f"A {self._mode.value} session cannot be {what}. Begin one with "
                "Repository.writable_session; to read elsewhere, open the repository there.",
                code="cannot-fork-read-only-session" if what == "forked" else "merge-not-allowed",
            )

    @contextmanager
    def _merging(self) -> Generator[Workspace]:
        """Keep changes out while forks are merged."""
        workspace = self.workspace
        with workspace.lock:
            workspace.check_writable()
            workspace.why_read_only = _MERGING
        try:
            yield workspace
        finally:
            with workspace.lock:
                if workspace.why_read_only == _MERGING:
                    workspace.why_read_only = None


def check_is_fork(fork: object) -> None:
    """Refuse what is no fork.

    Raises:
        SessionStateError: it is another session, or something else.
    """
    if not isinstance(fork, ForkSession):
        raise SessionStateError(
            f"Only forks can be merged, and {fork!r} is none. Make one with 'await "
            "session.fork()', write to it, and merge that."
        )


def _check_still_merging(workspace: Workspace) -> None:
    """Refuse to put what was merged into a fork that was detached meanwhile."""
    if workspace.why_read_only != _MERGING:
        raise SessionStateError(
            f"{workspace.why_read_only} Other forks were being merged into it just then, and "
            "nothing of them was: merge them into it again."
        )


def wrong_base(fork: ForkSession, session_id: bytes, base_id: SnapshotId) -> SessionStateError:
    """Return why a fork cannot be merged here."""
    if fork.session_id != session_id:
        return SessionStateError(
            f"{fork!r} came from another session, and can be merged into that one only."
        )
    return SessionStateError(
        f"{fork!r} began in another state than {base_id}, where this session stands: the session "
        "was rebased or its changes were discarded since, or the fork is one of a fork, and must "
        "be merged into that first. What was written to it is lost unless that is done."
    )


async def stored_changes(fork: ForkSession) -> ChangeSet:
    """Return what was done in a fork, once all that it refers to is stored."""
    changes = fork.changes_so_far()  # first: what is written meanwhile is not among them
    if fork.is_attached:  # the commit syncs what this process wrote
        await fork.workspace.store_packs()
    else:
        await fork.store_pending_chunks()
    return changes


class Session(NodeOperations, Forking):
    """A snapshot to read, and for a writable session one transaction on a branch.

    Made by ``Repository.readonly_session``, ``Repository.writable_session`` and
    ``Repository.rearrange_session``. Nothing that a
    session changed is visible to anyone else before :meth:`commit`; a session that is dropped
    leaves nothing behind but objects for garbage collection.

    One session may be used from several tasks and event loops (Zarr has its own).
    """

    def __reduce__(self) -> str:
        """Refuse to pickle, and say what to send instead."""
        raise SessionStateError(
            "A session does not pickle: its connections stay here, and a copy of a writable one "
            "could not commit. To write elsewhere send a fork, 'await session.fork()', and merge "
            "it when it is back. To read, open the repository in the other process "
            f"with readonly_session(snapshot_id={str(self.snapshot_id)!r})."
        )

    def __repr__(self) -> str:
        """Show mode, branch and snapshot."""
        where = f" on {self._branch!r}" if self._branch is not None else ""
        return f"<{self._mode.value} session{where} at {self.snapshot_id}>"

    @property
    def mode(self) -> SessionMode:
        """What the session may do; it only reads once it was committed."""
        return self._mode

    @property
    def read_only(self) -> bool:
        """Whether the session only reads."""
        return self._mode is SessionMode.READONLY

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the session stands on."""
        return self.workspace.base.id

    @property
    def spec_version(self) -> int:
        """The format version that new files are written to."""
        return self._history.spec_version

    @property
    def branch(self) -> str | None:
        """The branch that a writable session commits to."""
        return self._branch

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the session's hierarchy, for ``zarr`` and ``xarray``."""
        # The one convenience that looks up to a higher layer.
        from icechunk_async.zarr.store import IcechunkStore  # noqa: PLC0415

        return IcechunkStore(self, read_only=self.read_only)

    def status(self) -> Diff:
        """Return what the session changed so far."""
        from icechunk_async.engine.history.diff import diff_of_log  # noqa: PLC0415 -- not without need

        workspace = self.workspace
        with workspace.lock:
            tree, changes = workspace.tree, workspace.changes
            paths: dict[NodeId, str] = {it: gone.path for it, gone in changes.deleted.items()}
            paths.update((node.id, path) for path, node in changes.new.items())
            log = changes.log(workspace.base.id)
            return diff_of_log(log, lambda it: paths.get(it) or tree.base.path_of(it))

    async def all_virtual_chunk_locations(self) -> list[str]:
        """Return the URL of the object behind every virtual chunk, array by array.

        There is an entry for each chunk; names of containers are replaced by their prefixes.

        Cost: one request for each manifest that is not cached; no object is made per chunk.
        """
        return await virtual_locations(self.workspace)

    def discard_changes(self) -> None:
        """Forget every change of the session.

        Raises:
            ReadOnlyError: the session cannot change anything, or is being committed.
        """
        workspace = self.workspace
        with workspace.lock:
            workspace.check_open()
            workspace.rebase_to(workspace.base, ChangeSet())


class ForkSession(Session):
    """A session that travels: it reads, writes and pickles, and is merged instead of committed.

    Made by ``Session.fork``. Pickled, it carries where the repository is and what was written to
    it so far, which is columns and a few bytes a chunk; chunks themselves are stored when they
    are written. Where it arrives it opens nothing by itself: use :meth:`attached` to work in it,
    and merge it as it is.
    """

    _base_id: SnapshotId
    _carried: ChangeSet | None
    """What was changed, while the fork is not attached."""
    _unstored: Packs | None
    """Chunks of those changes that are not in the storage; None if all are."""

    @classmethod
    def beside(cls, session: Forking, base: Snapshot) -> Self:
        """Return a fork of ``session`` that stands on ``base`` and shares its connections."""
        home = session.workspace
        workspace = Workspace(
            base,
            home.assets,
            home.virtual,
            inline_threshold_bytes=home.inline_threshold_bytes,
            read_only=False,
            packs=None if home.packs is None else home.packs.another(),
        )
        fork = cls(
            workspace,
            session._history,  # noqa: SLF001 - a fork is a part of its session
            session._flusher.options,  # noqa: SLF001
            branch=None,
            mode=SessionMode.WRITABLE,
            default_metadata={},
            origin=session._origin,  # noqa: SLF001
            session_id=session._session_id,  # noqa: SLF001
        )
        fork._base_id, fork._carried, fork._unstored = base.id, None, None
        return fork

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, origin: Origin | None = None) -> Self:
        """Read what :meth:`to_bytes` wrote. Such a fork can be merged, and attached to a storage.

        Raises:
            FormatError: the bytes are damaged, or another version of the library wrote them.
        """
        state = decode_fork(data)
        fork = cls.__new__(cls)
        fork._arrive(state, origin)  # noqa: SLF001 - made here
        return fork

    def _arrive(self, state: ForkState, origin: Origin | None) -> None:
        """Begin detached, in place of ``__init__``."""
        self._session_id, self._base_id, self._origin = state.session_id, state.base_id, origin
        self._mode, self._branch = SessionMode.WRITABLE, None
        self._let_go(state.changes, None)

    def to_bytes(self) -> bytes:
        """Return what was done in the fork, without where the repository is and any secret.

        Equal states give equal bytes. Cost: some 12 to 25 bytes a chunk. On local disks, what the
        bytes refer to is durable after the end of ``attached()``, or ``store_pending_chunks``.

        Raises:
            SessionStateError: chunks wait to be packed; see ``store_pending_chunks``.
        """
        changes = self.changes_so_far()  # first: a thread may write while this looks
        if self.has_pending_chunks:
            raise _pending()
        return encode_fork(ForkState(self._session_id, self._base_id, changes))

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override] # a session refuses
        """Pickle as plain data."""
        return type(self).from_bytes, (self.to_bytes(), self._origin)

    def __repr__(self) -> str:
        """Show the snapshot, and whether it can be read and written here."""
        state = "" if self._carried is None else ", not attached"
        return f"<fork at {self.snapshot_id}{state}>"

    @property
    def session_id(self) -> bytes:
        """Names the session that the fork, and every fork of a fork, belongs to."""
        return self._session_id

    @property
    def origin(self) -> Origin | None:
        """Where its repository is and how it was opened; its secrets are not shown."""
        return self._origin

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the fork stands on; perhaps one that was never published."""
        return self._base_id

    @property
    def is_attached(self) -> bool:
        """Whether the fork can read and write here."""
        return self._carried is None

    @property
    def has_uncommitted_changes(self) -> bool:
        """Whether anything was changed in the fork."""
        if self._carried is not None:
            return not self._carried.is_empty()
        return super().has_uncommitted_changes

    @property
    def store(self) -> IcechunkStore:
        """A Zarr store of the fork's hierarchy, while it is attached."""
        if not self.is_attached:
            _refuse_detached()
        return super().store

    @property
    def has_pending_chunks(self) -> bool:
        """Whether chunks wait in memory to be packed; such a fork does not travel."""
        return super().has_pending_chunks if self.is_attached else self._unstored is not None

    async def store_pending_chunks(self) -> None:
        """Return when every chunk written so far is in the storage; see ``Session``.

        Raises:
            StorageError: some are not; they stay in the fork. Call again.
            SessionStateError: some are not, and the fork is not attached.
        """
        if self._carried is None:
            await super().store_pending_chunks()
        elif self.has_pending_chunks:
            raise _pending()

    def changes_so_far(self) -> ChangeSet:
        """Return a copy of what was changed in the fork."""
        if self._carried is not None:
            return self._carried.copy()
        with self.workspace.lock:
            return self.workspace.changes.copy()

    @asynccontextmanager
    async def attached(
        self,
        storage: Storage | None = None,
        *,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    ) -> AsyncGenerator[Self]:
        """Open the fork's repository for the length of the block, to read and write.

        A fork that is attached already, as it is where it was made, is simply answered.

        Args:
            storage: use this one, which is left open, in place of what travelled with the fork.
            authorize_virtual_chunk_access: likewise; see ``Repository.open``.

        Raises:
            SnapshotNotFoundError: what the fork stands on was collected as garbage.
            SessionStateError: it was read from bytes alone, and no storage is given.
            StorageError: at the end of the block: chunks that waited to be packed are not stored.
                They stay in the fork, which can be attached again but not sent until they are.

        Cancellation, and other errors in the block: what was written stays in the fork, likewise.

        Cost: four requests; the block's end waits for none.
        """
        if self._carried is None:
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
            self._take_hold(engine, await engine.assets.snapshot(self._base_id))
            try:
                yield self
                await self.store_pending_chunks()
            finally:
                with self.workspace.lock:
                    self.workspace.why_read_only = "The fork was detached."
                    changes = self.workspace.changes
                self._let_go(changes, self.workspace.packs)

    def _take_hold(self, engine: Engine, base: Snapshot) -> None:
        """Begin to read and write."""
        assert self._carried is not None  # it was detached
        workspace = Workspace(
            base,
            engine.assets,
            engine.virtual,
            inline_threshold_bytes=engine.config.effective_inline_chunk_threshold_bytes,
            read_only=False,
            packs=self._unstored or engine.new_packs(),
        )
        workspace.rebase_to(base, self._carried)
        Session.__init__(
            self,
            workspace,
            engine.history,
            engine.manifest_options,
            branch=None,
            mode=SessionMode.WRITABLE,
            default_metadata={},
            origin=self._origin,
            session_id=self._session_id,
        )
        self._carried = self._unstored = None

    def _let_go(self, changes: ChangeSet, packs: Packs | None) -> None:
        """Keep the changes with chunks that are not stored, and nothing that is open."""
        self._carried = changes
        self._unstored = None if packs is None or packs.are_stored else packs
        self.workspace = cast("Workspace", _NotAttached())
        self._history = cast("History", _NotAttached())

    async def merge(self, *forks: ForkSession, allow_overlaps: bool = True) -> None:
        """Take over what was done in other forks; see ``Session.merge``.

        Needs no storage: forks that travelled can be merged wherever they are.
        """
        if self._carried is None:
            await super().merge(*forks, allow_overlaps=allow_overlaps)
            return
        for fork in forks:
            check_is_fork(fork)
            if (fork.session_id, fork.snapshot_id) != (self._session_id, self._base_id):
                raise wrong_base(fork, self._session_id, self._base_id)
        parts = [await stored_changes(fork) for fork in forks]
        if not self.is_attached:  # still: no await from here on
            merger = Merger(self._carried, self._base_id, allow_overlaps=allow_overlaps)
            for changes in parts:
                merger.add(changes, ForkPoint(ChangeSet()))
            self._carried = merger.finish()
        else:
            await super().merge(*forks, allow_overlaps=allow_overlaps)

    @contextmanager
    def _exclusively(self) -> Generator[str]:
        _never_published()
        yield ""


def _pending() -> SessionStateError:
    return SessionStateError(
        "Chunks that were written to this fork wait in memory to be packed, and would be missing "
        "elsewhere. Store them first: 'await fork.store_pending_chunks()' while it is attached; "
        "the end of 'async with fork.attached()' does so by itself, unless it fails."
    )


def _never_published() -> NoReturn:
    raise SessionStateError(
        "A fork cannot be committed, amended, flushed or rebased. Merge it into the session that "
        "it came from, 'await session.merge(fork)', and do that there.",
        code="commit-not-allowed",
    )


class _NotAttached:
    """In the place of what only an attached fork has."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_detached()


def _refuse_detached() -> NoReturn:
    raise SessionStateError(
        "This fork arrived from elsewhere and has nothing open here. Read and write within "
        "'async with fork.attached()'; to merge it, nothing needs to be open."
    )

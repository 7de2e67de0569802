"""Handing a session's work to others: forks, and merging them back."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from icechunk_async import _clock
from icechunk_async._concurrency import SingleFlight, gather
from icechunk_async.errors import OutcomeUnknownError, SessionStateError, StorageUnavailableError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.snapshot import Snapshot
from icechunk_async.repository.changes import ChangeSet, WorkingTree
from icechunk_async.repository.merge import ForkPoint, Merger
from icechunk_async.repository.merge_checks import check_fits
from icechunk_async.repository.publishing import Publishing, SessionMode

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from icechunk_async.format.metadata import JSON
    from icechunk_async.repository.flush import ManifestOptions
    from icechunk_async.repository.fork import ForkSession
    from icechunk_async.repository.history import History
    from icechunk_async.repository.origin import Origin
    from icechunk_async.repository.workspace import Workspace

__all__ = ["Forking"]

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
        self._session_id = session_id or _clock.random_bytes(_SESSION_BYTES)
        self._points: dict[SnapshotId, ForkPoint] = {}
        """What forks of this session stand on, besides its base: unpublished snapshots."""
        self._points_of: ChangeSet | None = None
        """The changes that these snapshots hold the beginning of."""
        self._flights: SingleFlight[ForkPoint, SnapshotId] = SingleFlight()
        self._latest: ForkPoint | None = None

    async def fork(self) -> ForkSession:
        """Answer a session for somebody else to work in, who sees what this one sees now.

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
        """Answer the session's present changes; the same as before if nothing changed since."""
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
        from icechunk_async.repository.fork import ForkSession  # noqa: PLC0415

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
            max(_clock.now_us(), base.flushed_at + 1),
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
        """Answer what this session had changed when a fork began."""
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
    from icechunk_async.repository.fork import ForkSession  # noqa: PLC0415 - as above

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
    """Answer why a fork cannot be merged here."""
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
    """Answer what was done in a fork, once all that it refers to is stored."""
    changes = fork.changes_so_far()  # first: what is written meanwhile is not among them
    if fork.is_attached:  # the commit syncs what this process wrote
        await fork.workspace.store_packs()
    else:
        await fork.store_pending_chunks()
    return changes

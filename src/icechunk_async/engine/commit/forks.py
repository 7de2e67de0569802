"""Forks of a session: the unpublished snapshots that they begin at, and how they are merged."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import SingleFlight, gather
from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.changes.merge import ForkPoint, Merger, check_fits
from icechunk_async.engine.changes.wire import Lineage
from icechunk_async.engine.tree.workspace import REFUSALS, Closed
from icechunk_async.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    SessionStateError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from icechunk_async.engine.commit.flush import Flusher
    from icechunk_async.engine.tree.workspace import Workspace

__all__ = ["Forks", "Mergeable", "joined", "merge_apart"]

_SESSION_BYTES: Final = 12
_FORK_BYTES: Final = 6
_SHOWN: Final = 5
_BYTES_PER_FORK: Final = 1 << 15
"""Roughly what merging one fork is worth; decides what goes to a thread."""


class Mergeable(Protocol):
    """A fork, as far as merging reads it."""

    @property
    def session_id(self) -> bytes:
        """Names the session that the fork, and every fork of a fork, belongs to."""
        ...

    @property
    def snapshot_id(self) -> SnapshotId:
        """The snapshot that the fork began at."""
        ...

    async def stored_changes(self) -> ChangeSet:
        """Return the changes of the fork, once every chunk of it is in the storage."""
        ...

    @property
    def lineage(self) -> Lineage:
        """Which fork it is, and which others were merged into it or are missing from it."""
        ...


class Forks:
    """The forks of one session, or of one fork."""

    def __init__(
        self,
        workspace: Workspace,
        flusher: Flusher,
        *,
        session_id: bytes | None = None,
        lineage: Lineage | None = None,
        distrust: Callable[[], None] | None = None,
    ) -> None:
        """Begin without forks.

        Args:
            workspace: that of the session, or of the fork.
            flusher: builds the snapshots at which forks begin.
            session_id: given for a fork of a session.
            lineage: given for a fork of a session.
            distrust: called if the session takes over what was written before it began.
        """
        self._distrust = distrust
        self.lineage = lineage or Lineage()
        """Which fork this is, if it is one, and which others were merged or are missing."""
        self.flusher = flusher
        self.session_id = session_id or clock.random_bytes(_SESSION_BYTES)
        self._workspace = workspace
        self._points: dict[SnapshotId, ForkPoint] = {}
        """The changes of the session at each unpublished snapshot from which forks begin."""
        self._points_of: ChangeSet | None = None
        """The change set that the points are earlier states of; others make them worthless."""
        self._flights: SingleFlight[ForkPoint, SnapshotId] = SingleFlight()
        self._latest: ForkPoint | None = None

    async def begin(self) -> Snapshot:
        """Return a snapshot of the session's present state for a fork to begin at.

        See `Session.fork`.
        """
        workspace = self._workspace
        with workspace.lock:
            workspace.check_writable()
            workspace.number_nodes()
            base = workspace.base
            point, points = self._point_now(), self._points
        if point is None:
            return base
        base_id = await self._flights.run(point, lambda: self._store_point(base, point, points))
        return await workspace.assets.snapshot(base_id)

    def _point_now(self) -> ForkPoint | None:
        """Return the session's present changes; the same object while they stay the same."""
        changes = self._workspace.changes
        if changes is not self._points_of:
            self._points, self._points_of, self._latest = {}, changes, None
        if changes.is_empty():
            return None
        if self._latest is None or not changes.same_as(self._latest.changes):
            self._latest = ForkPoint(changes.copy())
        return self._latest

    async def _store_point(
        self, base: Snapshot, point: ForkPoint, points: dict[SnapshotId, ForkPoint]
    ) -> SnapshotId:
        """Store an unpublished snapshot of the session's state, unless it is stored already.

        It is noted in ``points``, those of the changes at the beginning: if the session is
        rebased meanwhile, the fork's changes do not fit any more and must not be merged.
        """
        for known_id, known in points.items():
            if known is point:
                return known_id
        assets = self._workspace.assets
        await self._workspace.store_packs()
        flushed = await self.flusher.flush(base, WorkingTree(base.nodes, point.changes))
        snapshot = Snapshot(
            SnapshotId.random(assets.layout.id_bytes),
            base.id,
            max(clock.now_us(), base.flushed_at + 1),
            "fork",
            {},
            flushed.nodes,
            flushed.files,
        )
        try:
            await gather(self.flusher.store(flushed), assets.put_snapshot(snapshot))
        except OutcomeUnknownError as error:
            raise StorageUnavailableError(
                f"The state that a fork begins in may not be stored: {error} Nothing was "
                "published and no change was lost; fork again."
            ) from error
        points[snapshot.id] = point
        return snapshot.id

    async def merge(self, forks: Sequence[Mergeable], *, allow_overlaps: bool) -> None:
        """Take over what was changed in forks, or nothing if any of it clashes.

        See `Session.merge`.
        """
        with self._merging() as workspace:
            merger = Merger(
                workspace.changes,
                workspace.base.id,
                path_of=workspace.base.nodes.path_of,
                allow_overlaps=allow_overlaps,
            )
            points = [self._point_of(fork) for fork in forks]
            parts = [await fork.stored_changes() for fork in forks]

            def work() -> ChangeSet:
                for changes, point in zip(parts, points, strict=True):
                    merger.add(changes, point)
                merged = merger.finish()
                check_fits(merged, workspace.base.nodes, workspace.assets.spec_version)
                return merged

            merged = await workspace.assets.compute(work, size_bytes=_BYTES_PER_FORK * len(parts))
            with workspace.lock:
                _check_still_merging(workspace)
                if self._points_of is workspace.changes:
                    self._points_of = merged
                workspace.rebase_to(workspace.base, merged)
                self.lineage = joined(self.lineage, forks)

    def hand_out(self) -> Lineage:
        """Note a new fork, which is missing until it is merged or discarded; return its lineage."""
        fork_id = clock.random_bytes(_FORK_BYTES)
        with self._workspace.lock:
            self.lineage = replace(self.lineage, missing=self.lineage.missing | {fork_id})
        return Lineage(fork_id)

    def missing(self) -> tuple[str, ...]:
        """Return the names of the forks that were neither merged nor discarded."""
        return tuple(sorted(it.hex() for it in self.lineage.missing))

    def discard(self, names: Iterable[str]) -> None:
        """No longer wait for some forks. Their changes are lost.

        Raises:
            InvalidInputError: there is no such fork, or it was merged; nothing was discarded.
        """
        given = list(names)
        with self._workspace.lock:
            known = {it.hex(): it for it in self.lineage.missing}
            if unknown := [name for name in given if name not in known]:
                raise InvalidInputError(
                    f"This session does not wait for a fork {unknown[0]!r}: it was merged or "
                    "discarded already, or is another session's. It waits for: "
                    f"{', '.join(sorted(known)) or 'none'}."
                )
            gone = {known[name] for name in given}
            self.lineage = replace(self.lineage, missing=self.lineage.missing - gone)

    def check_complete(self) -> None:
        """Refuse to publish while forks are missing.

        Raises:
            SessionStateError: some are; their names are in its context, as ``forks``.
        """
        if missing := self.missing():
            more = f", and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise SessionStateError(
                f"{len(missing)} fork(s) of this session were handed out and neither merged nor "
                f"discarded: {', '.join(missing[:_SHOWN])}{more}. What they wrote would be lost. "
                "Nothing was published. Merge them ('session.merge'), give them up "
                "('session.discard_fork'), or pass allow_missing_forks=True.",
                forks=missing,
            )

    async def resume(
        self, root: Mergeable, forks: Sequence[Mergeable], *, allow_overlaps: bool
    ) -> None:
        """Continue at the state of ``root``, and merge forks of it. See `Session.resume`."""
        workspace = self._workspace
        base = await workspace.assets.snapshot(root.snapshot_id)
        changes = await root.stored_changes()
        with workspace.lock:
            workspace.check_writable()
            if not workspace.changes.is_empty():
                raise SessionStateError(
                    "This session has changes, and cannot continue in place of another. Begin a "
                    "new one with Repository.writable_session."
                )
            before = (self.session_id, self._points, self._points_of, self.lineage)
            began, point = workspace.base, ForkPoint(changes.copy())
            self.session_id = root.session_id
            self.lineage = Lineage(missing=root.lineage.missing)
            self._points = {
                fork.snapshot_id: point for fork in forks if fork.snapshot_id != base.id
            }
            self._points_of = changes
            workspace.rebase_to(base, changes)
        if self._distrust is not None:
            self._distrust()
        try:
            await self.merge(forks, allow_overlaps=allow_overlaps)
        except BaseException:
            workspace.rebase_to(began, ChangeSet())
            self.session_id, self._points, self._points_of, self.lineage = before
            raise

    def _point_of(self, fork: Mergeable) -> ForkPoint:
        """Return the changes that this session had when a fork began."""
        workspace = self._workspace
        if fork.session_id == self.session_id:
            if fork.snapshot_id == workspace.base.id:
                return ForkPoint(ChangeSet())
            point = self._points.get(fork.snapshot_id)
            if point is not None and self._points_of is workspace.changes:
                return point
        raise _wrong_base(fork, self.session_id, workspace.base.id)

    @contextmanager
    def _merging(self) -> Generator[Workspace]:
        """Keep changes out while forks are merged."""
        workspace = self._workspace
        with workspace.lock:
            workspace.check_writable()
            workspace.closed = Closed.MERGING
        try:
            yield workspace
        finally:
            with workspace.lock:
                if workspace.closed is Closed.MERGING:
                    workspace.closed = None


def joined(lineage: Lineage, forks: Iterable[Mergeable]) -> Lineage:
    """Return a lineage after forks were merged."""
    found = [fork.lineage for fork in forks]
    merged = lineage.merged.union(*(it.merged | {it.fork_id} for it in found))
    missing = lineage.missing.union(*(it.missing for it in found))
    return replace(lineage, merged=merged, missing=missing - merged)


async def merge_apart(
    changes: ChangeSet,
    session_id: bytes,
    base_id: SnapshotId,
    forks: Sequence[Mergeable],
    *,
    allow_overlaps: bool,
) -> ChangeSet:
    """Return the changes of a fork together with those of others of the same base.

    Needs no storage, so all forks must stand on the very same snapshot.

    Raises:
        SessionStateError: one began elsewhere.
        MergeFailedError: they clash.
    """
    for fork in forks:
        if (fork.session_id, fork.snapshot_id) != (session_id, base_id):
            raise _wrong_base(fork, session_id, base_id)
    parts = [await fork.stored_changes() for fork in forks]
    merger = Merger(changes, base_id, allow_overlaps=allow_overlaps)
    for part in parts:
        merger.add(part, ForkPoint(ChangeSet()))
    return merger.finish()


def _check_still_merging(workspace: Workspace) -> None:
    """Refuse to put what was merged into a fork that was detached meanwhile."""
    if workspace.closed is not Closed.MERGING:
        assert workspace.closed is not None  # only detaching comes in between
        raise SessionStateError(
            f"{REFUSALS[workspace.closed]} Other forks were being merged into it at that time, "
            "and nothing of them was: merge them into it again."
        )


def _wrong_base(fork: Mergeable, session_id: bytes, base_id: SnapshotId) -> SessionStateError:
    """Return why a fork cannot be merged here."""
    if fork.session_id != session_id:
        return SessionStateError(
            f"{fork!r} came from another session, and can be merged into that one only."
        )
    return SessionStateError(
        f"{fork!r} began in another state than {base_id}, where this session stands: the session "
        "was rebased or its changes were discarded since, or the fork is one of a fork, and must "
        "be merged into that first. Its changes are lost unless that is done."
    )

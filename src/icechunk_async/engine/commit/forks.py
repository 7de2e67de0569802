"""Forks of a session: the unpublished snapshots that they begin at, and how they are merged."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import SingleFlight, gather
from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.changes.merge import ForkPoint, Merger, check_fits
from icechunk_async.engine.changes.publications import (
    GIVEN_UP,
    UNKNOWN,
    News,
    Shared,
    SincePublished,
    news_since,
    noted_in,
    with_unknown,
)
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

    from icechunk_async.engine.changes.wire import Membership
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

    @property
    def membership(self) -> Membership | None:
        """Its place among those that publish to a lease; None if its session has none."""
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
        view: Callable[[], Shared | None] | None = None,
    ) -> None:
        """Begin without forks.

        Args:
            workspace: that of the session, or of the fork.
            flusher: builds the snapshots at which forks begin.
            session_id: given for a fork of a session.
            lineage: given for a fork of a session.
            distrust: called if the session takes over what was written before it began.
            view: returns the state that the forks of a session with a lease see; none without one.
        """
        self._view = view or (lambda: None)
        self._distrust = distrust
        self.lineage = lineage or Lineage()
        """Which fork this is, if it is one, and which others were merged or are missing."""
        self.flusher = flusher
        self.session_id = session_id or clock.random_bytes(_SESSION_BYTES)
        self._workspace = workspace
        self._points: dict[SnapshotId, ForkPoint] = {}
        """The changes of the session at each unpublished snapshot from which forks begin."""
        self._points_of: int | None = None
        """The line of changes that the points are states of; another makes them worthless."""
        self._flights: SingleFlight[ForkPoint, SnapshotId] = SingleFlight()
        self._latest: ForkPoint | None = None

    async def begin(self, known: ChangeSet | None = None) -> Snapshot:
        """Return a snapshot of the session's present state for a fork to begin at.

        See `Session.fork`. ``known`` is the state that all forks see, if the session has a lease.
        """
        workspace = self._workspace
        with workspace.lock:
            workspace.check_writable()
            # Before the fork has a state: nodes must not get other ids when the session commits.
            workspace.number_nodes()
            base = workspace.base
            point, points = self._point_at(known), self._points
        if point is None:
            return base
        base_id = await self._flights.run(point, lambda: self._store_point(base, point, points))
        return await workspace.assets.snapshot(base_id)

    def _point_at(self, known: ChangeSet | None) -> ForkPoint | None:
        """Return the changes that a fork begins at; the same object while they stay the same."""
        changes = self._workspace.changes if known is None else known
        if self._workspace.line != self._points_of:
            self._points, self._points_of, self._latest = {}, self._workspace.line, None
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
        # By identity: `_point_at` returns the same object while nothing changed, so forks of one
        # state share a snapshot.
        for known_id, known in points.items():
            if known is point:
                return known_id
        assets = self._workspace.assets
        await self._workspace.store_packs()
        flushed = await self.flusher.flush(base, WorkingTree(base.nodes, point.changes))
        snapshot = Snapshot(
            SnapshotId.random(assets.layout.id_bytes),
            base.id,
            # History is ordered by these times, and a clock that lags must not stop a fork.
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

        See `Session.merge`. Of forks that published, that is what they did not publish.
        """
        with self._merging() as workspace:
            base = workspace.base
            merger = Merger(
                workspace.changes,
                base.id,
                path_of=base.nodes.path_of,
                allow_overlaps=allow_overlaps,
            )
            points = [self._point_of(fork) for fork in forks]
            parts = [
                await (fork.stored_changes() if point is not None else self._news_of(fork))
                for fork, point in zip(forks, points, strict=True)
            ]
            shared = self._view() or Shared()

            def work() -> ChangeSet:
                stamps = with_unknown(shared.stamps, shared.changes, workspace.changes)
                for part, point in zip(parts, points, strict=True):
                    if isinstance(part, News):
                        since = SincePublished(merger, base.nodes, stamps, part)
                        changes = part.changes
                        merger.add_since(changes, since)
                    else:
                        assert point is not None
                        changes = part
                        merger.add(changes, point)
                    # What a fork of this call changed has no time that later ones could be compared
                    # with.
                    stamps.update(dict.fromkeys(changes.chunks, UNKNOWN))
                merged = merger.finish()
                check_fits(merged, base.nodes, workspace.assets.spec_version)
                return merged

            # Nothing can be written meanwhile, since the workspace is closed for merging; but a
            # fork that the forks are merged into can be detached.
            merged = await workspace.assets.compute(work, size_bytes=_BYTES_PER_FORK * len(parts))
            with workspace.lock:
                _check_still_merging(workspace)
                workspace.rebase_to(workspace.base, merged, continues=True)
                self.lineage = joined(self.lineage, forks)

    def _is_apart(self, membership: Membership, fork_id: bytes) -> bool:
        """Return whether a fork published, by itself or by a copy, or knows what others did."""
        shared = self._view() or Shared()
        return membership.refreshed or max(membership.number, shared.taken.get(fork_id, 0)) > 0

    async def _news_of(self, fork: Mergeable) -> News:
        """Return the changes that a fork did not publish.

        Raises:
            SessionStateError: they do not fit what the session took in.
        """
        changes, membership = await fork.stored_changes(), fork.membership
        assert membership is not None  # see `_point_of`
        shared = self._view()
        assert shared is not None
        base = await self._workspace.assets.snapshot(fork.snapshot_id)
        known, noted = membership.known, [noted_in(changes)]
        news = news_since(known, changes, base.nodes, membership.stamps, noted)
        _check_published(fork, membership, shared, news)
        return news

    def take_in(self, lineages: Iterable[Lineage]) -> None:
        """Note forks whose publications the session took in: they are not missing any more."""
        with self._workspace.lock:
            self.lineage = _joined(self.lineage, list(lineages))

    def hand_out(self) -> Lineage:
        """Note a new fork, which is missing until it is merged or discarded; return its lineage."""
        fork_id = clock.random_bytes(_FORK_BYTES)
        with self._workspace.lock:
            self.lineage = replace(self.lineage, missing=self.lineage.missing | {fork_id})
        return Lineage(fork_id)

    def missing(self) -> tuple[str, ...]:
        """Return the names of the forks that were neither merged nor discarded."""
        return tuple(sorted(it.hex() for it in self.lineage.missing))

    def discard(self, names: Iterable[str], also: Iterable[bytes] = ()) -> None:
        """No longer wait for some forks. Their changes are lost.

        Args:
            names: those that are not waited for any more.
            also: other forks that can be named.

        Raises:
            InvalidInputError: there is no such fork, or it was merged; nothing was discarded.
        """
        given = list(names)
        with self._workspace.lock:
            known = {it.hex(): it for it in (*self.lineage.missing, *also)}
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
            workspace.rebase_to(base, changes)
            self._points_of = workspace.line
        # Its chunks are of any age, by clocks of other machines: every collection may have reached
        # them.
        if self._distrust is not None:
            self._distrust()
        try:
            await self.merge(forks, allow_overlaps=allow_overlaps)
        except BaseException:
            # Back to an empty session: the caller may try again with other forks.
            workspace.rebase_to(began, ChangeSet())
            self.session_id, self._points, self._points_of, self.lineage = before
            raise

    def _point_of(self, fork: Mergeable) -> ForkPoint | None:
        """Return the changes that this session had when a fork began.

        None if the fork knows by itself what its changes are to be compared with: it published, or
        it is one of a session that was resumed.
        """
        workspace, membership = self._workspace, fork.membership
        if fork.session_id != self.session_id:
            raise _wrong_base(fork, self.session_id, workspace.base.id)
        if membership is None or not self._is_apart(membership, fork.lineage.fork_id):
            if fork.snapshot_id == workspace.base.id:
                return ForkPoint(ChangeSet())
            point = self._points.get(fork.snapshot_id)
            if point is not None and self._points_of == workspace.line:
                return point
        if membership is None or membership.base_id != workspace.base.id:
            raise _wrong_base(fork, self.session_id, workspace.base.id)
        if self._view() is None:
            raise SessionStateError(
                f"{fork!r} published changes, or took in those of others. Merge it into its "
                "session, with 'Repository.resume_session' if that is gone."
            )
        return None

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


def _check_published(fork: Mergeable, membership: Membership, shared: Shared, news: News) -> None:
    """Refuse a fork that the session is ahead of, or behind.

    Raises:
        SessionStateError: its changes do not fit.
    """
    fork_id = fork.lineage.fork_id
    taken = shared.taken.get(fork_id, 0)
    if taken == GIVEN_UP:
        why = "was given up by 'discard_fork' with what it published"
    elif taken > membership.number and not news.is_empty():
        why = (
            "published more than this copy of it knows of. Merge the copy that published last; or "
            "refresh this one, to use it further"
        )
    elif membership.generation < shared.since or taken < membership.number:
        why = "began before the session was rebased, or its changes were discarded"
    elif not shared.covers(membership.taken):
        why = "builds on publications that the session did not take in. Refresh the session first"
    else:
        return
    raise SessionStateError(f"{fork!r}, {fork_id.hex()}, {why}. Nothing was merged.")


def joined(lineage: Lineage, forks: Iterable[Mergeable]) -> Lineage:
    """Return a lineage after forks were merged."""
    return _joined(lineage, [fork.lineage for fork in forks])


def _joined(lineage: Lineage, found: Sequence[Lineage]) -> Lineage:
    merged = lineage.merged.union(*(it.merged | {it.fork_id} for it in found))
    missing = lineage.missing.union(*(it.missing for it in found))
    # A fork of a fork is missing only until some merged fork holds it.
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
        member = fork.membership
        if member is not None and (member.number or member.refreshed):
            raise SessionStateError(
                f"{fork!r} published changes, or took in those of others, and cannot be merged "
                "into another fork. Merge it into its session."
            )
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

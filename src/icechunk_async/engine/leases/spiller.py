"""Store the changes of a leased session beside its lease, and take in what its forks published.

Segments hold the session's changes in the order in which they were stored. The first of them are
*shared*: forks see the state that these lead to. The others are there for a process that resumes
the session. They become shared when the session forks or refreshes. Only then is it written down
which publications of forks they hold, so that each counts once whatever fails in between.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import AnyLoopLock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.changes.merge import check_fits
from icechunk_async.engine.changes.publications import (
    GIVEN_UP,
    Base,
    Shared,
    laid_over,
    news_since,
    next_stamp,
    note_more,
    noted_in,
    taken_in,
    without_journals,
)
from icechunk_async.engine.changes.wire import Membership
from icechunk_async.engine.leases.files import Segment, Spilled, encode_segment, replay
from icechunk_async.engine.leases.stored import (
    IncompleteListing,
    Place,
    listed,
    never_complete,
    publications_of,
    segments_of,
    shared_of,
)
from icechunk_async.engine.tree.workspace import Closed
from icechunk_async.errors import (
    FormatError,
    MergeFailedError,
    SessionStateError,
    StorageError,
)
from icechunk_async.format.ids import BackupId
from icechunk_async.format.layout import spill_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from icechunk_async.engine.changes.change_set import ArrayChanges
    from icechunk_async.engine.changes.publications import News, Publication
    from icechunk_async.engine.changes.wire import Lineage
    from icechunk_async.engine.leases.files import PublicationName
    from icechunk_async.engine.leases.keeper import Lease
    from icechunk_async.engine.leases.record import LeaseRecord
    from icechunk_async.engine.leases.stored import Stored
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage

__all__ = ["Resumed", "Spiller", "spilled_changes"]

_log = logging.getLogger(__name__)

_MOST_SEGMENTS: Final = 64
"""The most segments of a session; then one takes the place of all, or two if not all is shared."""
_BYTES_A_CHUNK: Final = 64
_LISTINGS: Final = 20
_PUBLISHING: Final = (Closed.PUBLISHING, Closed.PUBLISHED, Closed.IN_DOUBT)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The stored state of a session."""

    shared: Shared
    changes: ChangeSet


@dataclass(frozen=True, slots=True)
class _Held:
    """The segments that the next one can be added to."""

    names: tuple[str, ...]
    spilled: Spilled
    """Their contents."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The segments to store, and what the lease says of them."""

    segments: list[Segment]
    kept: tuple[str, ...]
    """Names of those that stay before them."""
    shared: int
    """The number of segments that forks see, those that stay included."""
    spilled: Spilled
    state: Shared
    """The state that forks see afterwards."""


class Spiller:
    """Stores one session. Usable from any loop; one thing at a time."""

    def __init__(
        self, workspace: Workspace, lease: Lease, took_in: Callable[[list[Lineage]], None]
    ) -> None:
        """Begin with a session of which nothing was stored that can be added to.

        Args:
            workspace: that of the session.
            lease: the session's.
            took_in: called with the lineages of publications when they are part of the session.
        """
        self._took_in = took_in
        self._workspace = workspace
        self._lease = lease
        self._storage = workspace.assets.storage
        self._held: _Held | None = None
        """None if it is not known what is stored; then all is stored anew."""
        self._alone = AnyLoopLock()
        self.shared = Shared(since=lease.record.since)
        """The state that forks see, and what was taken in of theirs."""
        self._told = self.shared
        """The shared state that is stored."""
        self._untold = False
        """Whether that is an older one."""
        self._noted: dict[NodeId, ArrayChanges | None] = {}
        """Notes of chunks that the session set since then; journals hold the newest."""
        self._known: dict[PublicationName, Publication] = {}
        self._listed: frozenset[PublicationName] = frozenset()
        """The publications that the last listing showed."""
        self._absorbed: tuple[PublicationName, ...] = ()
        """Publications that can be deleted once the shared state is stored."""
        # The workspace counts it up where its changes do not continue those before, as after
        # `discard`.
        self._line = workspace.line
        self._generation = lease.record.generation
        self.has_forks = False
        """Whether there may be publications that were not taken in."""

    @property
    def lease(self) -> Lease:
        """The session's lease."""
        return self._lease

    @property
    def session_id(self) -> bytes:
        """Names the session."""
        return self._lease.session_id

    async def beat(self) -> None:
        """Spill, and so renew the lease, if the session or a fork was used since it was renewed."""
        if self._lease.used or (self.has_forks and await self._lease.renewed_by_fork()):
            await self.spill()

    async def spill(self) -> None:
        """Store what changed since the last time, and renew the lease; see `Session.spill`."""
        async with self._alone:
            self._lease.check()
            # Storing renews the lease by the same write that lists the segments.
            if not await self._store(share=False):
                await self._lease.renew()

    async def share(self) -> Membership:
        """Let forks see all changes so far; return what a new one needs to publish its own.

        Cost: none if they see them already.
        """
        async with self._alone:
            self._lease.check()
            await self._store(share=True)
            self.has_forks = True
            shared = self.shared
            return Membership(
                self._lease.session_id,
                self._workspace.base.id,
                self._generation,
                self._lease.record.turn,
                clock=shared.clock,
                stamps=shared.stamps,
                taken=shared.taken,
                known=shared.changes,
            )

    async def refresh(self) -> bool:
        """Take in what forks published, and let them see the session's changes.

        Returns: whether they had published anything new.
        """
        async with self._alone:
            self._lease.check()
            new = await self._take_in(sharing=True)
            await self._store(share=True)
            return new

    async def has_publications(self, fork_ids: Container[bytes]) -> bool:
        """Return whether some forks published what was not taken in yet. Cost: one listing."""
        stored = await listed(self._storage, self._lease.session_id)
        return any(
            it.fork_id in fork_ids and self._counts(it) and self.shared.takes(it.fork_id, it.number)
            for it in stored.publications
        )

    async def resume(self, stored: Resumed) -> None:
        """Continue from a stored state, with what forks published.

        If publications clash the session goes without all that are new. The next refresh names
        the clashes.
        """
        workspace = self._workspace
        with workspace.lock:
            workspace.rebase_to(workspace.base, stored.changes, continues=True)
            self.shared = self._told = stored.shared
        async with self._alone:
            try:
                await self._take_in()
            except MergeFailedError as error:
                self.has_forks = True
                session_id = self._lease.session_id
                _log.warning("session %s goes without publications: %s", session_id, error)
            await self._decide()

    async def seal(self) -> None:
        """Take in what forks published, and let nobody publish any more until `unseal`."""
        # Sealed before it is looked: what a fork publishes after that is refused, and so cannot be
        # missed.
        self._lease.sealed = True
        await self._lease.renew()
        async with self._alone:
            await self._take_in()

    async def unseal(self) -> None:
        """Let forks publish again, after a commit that failed. If that fails the next beat does."""
        self._lease.sealed = False
        try:
            await self.spill()
        except (StorageError, SessionStateError) as error:
            _log.info("forks of session %s cannot publish yet: %s", self.session_id, error)

    @property
    def waiting(self) -> frozenset[bytes]:
        """The forks whose publications were read, and not taken in because they clash."""
        return frozenset(
            it.fork_id for it in self._known if self.shared.takes(it.fork_id, it.number)
        )

    def give_up(self, fork_id: bytes) -> None:
        """Leave out what a fork published and nobody took in, and what it publishes later."""
        with self._workspace.lock:
            taken = {**self.shared.taken, fork_id: GIVEN_UP}
            self.shared, self._untold = replace(self.shared, taken=taken), True

    # Storing

    async def _store(self, *, share: bool) -> bool:
        """Store what is not stored yet, and say so in the lease; return whether there was any."""
        workspace, lease = self._workspace, self._lease
        # What is stored is decided under the workspace's lock at one moment. Then, without it, come
        # the chunks, the segments, the lease, and last the deletion of what no lease names.
        plan = self._plan(share=share)
        if plan is None:
            return False
        # If anything fails from here on, the next spill writes everything anew: whether the lease
        # lists this segment is not known then.
        self._held = None  # until it is certain
        # First what the changes refer to. Chunks written meanwhile may be stored with it.
        await workspace.store_packs()
        # A lease that lists a segment must not survive a power cut that its segment did not.
        await self._storage.sync()
        names = plan.kept + tuple([await self._put(segment) for segment in plan.segments])
        before = lease.record.spilled

        def written(record: LeaseRecord) -> LeaseRecord:
            return replace(
                record,
                base_id=plan.spilled.base_id,
                spilled=names,
                shared=plan.shared,
                taken=plan.state.taken,
                serials=plan.state.serials,
                clock=plan.state.clock,
                generation=self._generation,
                since=plan.state.since,
            )

        await lease.renew(written)
        self._held, self._told = _Held(names, plan.spilled), plan.state
        gone = [it for it in before if it not in names and it.isalnum()]
        if self.shared is plan.state:
            self._untold = False
            gone += map(str, self._absorbed)
            self._absorbed = ()
        if gone:
            prefix = spill_prefix(lease.session_id)
            # Last: until the lease says otherwise, these are what a resumed session reads.
            await self._storage.delete([f"{prefix}{it}" for it in gone])
        return True

    async def _put(self, segment: Segment) -> str:
        count = sum(map(len, (it.columns() for it in segment.changes.chunks.values())))
        session_id = self._lease.session_id
        data = await self._workspace.assets.compute(
            lambda: encode_segment(session_id, segment), size_bytes=count * _BYTES_A_CHUNK
        )
        # Never a number: a process that lost the session may still write, and must not replace a
        # segment of the other.
        name = str(BackupId.random())
        await self._storage.put(f"{spill_prefix(session_id)}{name}", data)
        return name

    def _plan(self, *, share: bool) -> _Plan | None:
        """Return the segments to store; None if all is stored and said already."""
        workspace = self._workspace
        with workspace.lock:
            if workspace.closed in _PUBLISHING:
                return None
            self._notice_break()
            changes, base_id = workspace.changes, workspace.base.id
            # The journals are taken below, and begin anew for the next segment.
            note_more(self._noted, changes, self.shared.changes)
            # Private: forks do not see all of it, and must not before the session forks or
            # refreshes.
            private = not changes.same_as(self.shared.changes)
            if private and share:
                stamp = next_stamp(clock.now_us(), self.shared.clock)
                self.shared = self.shared.with_own(changes, stamp)
                self._untold, private = True, False
            if not private:
                self._noted = {}
            held = self._held
            if held is None or held.spilled.base_id != base_id or len(held.names) >= _MOST_SEGMENTS:
                held, self._told = _Held((), Spilled(base_id)), Shared()
                for it in changes.chunks.values():
                    it.journal = None  # it is of other segments
            plan = self._segments(held, changes, private=private)
            record = self._lease.record
            said = record.spilled == held.names and record.base_id == base_id
            if said and not (
                plan.segments or self._untold or record.generation != self._generation
            ):
                self._held = _Held(held.names, plan.spilled)
                return None
            return plan

    def _segments(self, held: _Held, changes: ChangeSet, *, private: bool) -> _Plan:
        """Return one segment for what is new, or two if forks must not see all of it."""
        shared, told, spilled = self.shared, self._told, held.spilled
        seen = self._lease.record.shared if held.names else 0
        stamps = {it: at for it, at in shared.stamps.items() if told.stamps.get(it) != at}
        segments: list[Segment] = []
        # Two segments: the state that forks see, then what is above it and only a resumed session
        # reads.
        if private and shared.changes is not told.changes:
            segment, spilled = spilled.take(shared.changes.copy())
            segment = replace(segment, stamps=stamps)
            segments += [] if segment.is_empty() else [segment]
            seen = len(held.names) + len(segments)
        segment, spilled = spilled.take(changes)
        if not private:
            segment = replace(segment, stamps=stamps)
        segments += [] if segment.is_empty() else [segment]
        if not private:
            seen = len(held.names) + len(segments)
        return _Plan(segments, held.names, seen, spilled, shared)

    def _notice_break(self) -> None:
        """Begin another generation of forks where the changes do not continue those so far."""
        workspace = self._workspace
        if workspace.line == self._line:
            return
        self._line = workspace.line
        self._held, self._absorbed, self._noted = None, (), {}
        shared = self.shared
        if shared.changes.is_empty() and not shared.taken and not self.has_forks:
            return
        # Forks of before are told that they do not fit, and what they publish meanwhile does not
        # count.
        self._generation += 1
        self._known.clear()
        # What was taken in stays known, so that a fork can find out what became of it.
        self.shared = replace(shared, changes=ChangeSet(), stamps={}, since=self._generation)

    # Taking in

    async def _take_in(self, *, sharing: bool = False) -> bool:
        """Put what forks published below what the session changed since it shared its state.

        Args:
            sharing: whether all of it is stored next, for forks to see.

        Returns: whether there was anything new.

        Raises:
            MergeFailedError: they clash; nothing was taken in.

        Cost: one listing, and a request for each publication.
        """
        workspace = self._workspace
        with workspace.lock:
            self._notice_break()
            base, line = workspace.base, workspace.line
        stored, found = await self._published(base)
        if not found:
            return False
        before, ground = self.shared, Base(base.id, base.nodes, workspace.assets.spec_version)
        # On a copy, because forks that this session makes meanwhile refer to the shared state.
        noting = before.changes.copy()
        noting.note_anew()
        folded = await workspace.assets.compute(
            lambda: taken_in(replace(before, changes=noting), found, ground),
            size_bytes=sum(it.news.changes.count() for it in found) * _BYTES_A_CHUNK,
        )
        with workspace.lock:
            workspace.check_writable()
            # Publications were read without the lock, and the session may have been rebased at the
            # same time.
            if workspace.line != line:
                raise SessionStateError(
                    "The session's changes were discarded, or it was rebased, while publications "
                    "of its forks were taken in. None was; they do not fit any more."
                )
            # `give_up` waits for nobody. What was read of that fork must not come in after it.
            gave_up = not all(self.shared.takes(it.fork_id, it.number) for it in found)
            if not gave_up:
                noted = [self._noted, noted_in(workspace.changes)]
                own = news_since(
                    before.changes, workspace.changes, base.nodes, before.stamps, noted
                )
                changes = laid_over(folded, own, ground)
                workspace.rebase_to(base, changes, continues=True)
                self._note(changes, own, sharing=sharing)
                taken = {**self.shared.taken, **folded.taken}
                folded = replace(folded, changes=without_journals(folded.changes), taken=taken)
                self.shared, self._untold = folded, True
                stale = [it for it in stored.publications if not self._counts(it)]
                self._absorbed = (*self._absorbed, *self._known, *stale)
                self._known.clear()
                self._took_in([it.lineage for it in found])
        return await self._take_in(sharing=sharing) if gave_up else True

    def _note(self, changes: ChangeSet, own: News, *, sharing: bool) -> None:
        """Begin to note changes anew, after publications were put below the session's."""
        told, record = self._told.changes, self._lease.record
        if sharing and self._held is not None and self.shared.changes is told:
            # Journals hold all that is new since. Segments that forks do not see are not needed.
            names = record.spilled[: record.shared]
            self._held = _Held(names, Spilled.of(record.base_id, told))
            return
        self._held = None
        self._noted = dict(own.changes.chunks)
        changes.note_anew()

    async def _decide(self) -> None:
        """Let forks of the process before this one know whether they were in time.

        Until then they are told that nobody knows.
        """
        generation, accepted = self._generation, dict[bytes, int]()
        for it in self._listed:
            if self._counts(it):
                # Those that were listed, also if they clash: their forks were in time, and a later
                # refresh has them.
                accepted[it.fork_id] = max(accepted.get(it.fork_id, 0), it.number + 1)
        await self._lease.renew(
            lambda record: replace(record, decided=generation, accepted=accepted)
        )

    def _counts(self, it: PublicationName) -> bool:
        """Return whether a publication is part of the session, as this process knows it.

        The lease may be yet to say that another generation began.
        """
        record = replace(self._lease.record, generation=self._generation, since=self.shared.since)
        return record.counts(it.generation, it.fork_id, it.number)

    async def _published(self, base: Snapshot) -> tuple[Stored, list[Publication]]:
        """Return the publications that are new, in the order in which they count."""
        session_id = self._lease.session_id
        place = Place(self._storage, session_id, base.id)
        for _ in range(_LISTINGS):
            stored = await listed(self._storage, session_id)
            self._listed = stored.publications
            names = [it for it in stored.publications if self._counts(it)]
            with suppress(IncompleteListing):
                return stored, await publications_of(place, self.shared, names, self._known)
        raise never_complete(session_id)


async def spilled_changes(
    storage: Storage, record: LeaseRecord, base: Snapshot, spec_version: int
) -> Resumed:
    """Return the changes of a session as it stored them last.

    Raises:
        FormatError: they are damaged, or cannot be made on the session's base.

    Cost: a request for each segment, 64 at most.
    """
    try:
        segments = await segments_of(storage, record.session_id, record.spilled)
    except IncompleteListing as error:
        raise FormatError(
            f"Session {record.session_id} spilled changes to {str(error)!r}, which is missing."
        ) from error
    shared = shared_of(record, segments[: record.shared])
    noting = shared.changes.copy()
    noting.note_anew()
    changes = replay(record.base_id, segments[record.shared :], noting)
    check_fits(changes, base.nodes, spec_version)
    return Resumed(shared, changes)

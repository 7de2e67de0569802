"""A fork of a leased session, as it publishes to the lease and reads what others published.

To publish is to create one object and then to read the lease: the object counts if the lease is
still that of the fork's session, and nobody began to commit it. A commit is written into the lease
before publications are looked for. So the commit has all of a fork that was told
that it published, and a fork that was too late is told so. A process that resumes the session takes
the lease, looks for publications, and writes down in the lease which of them count.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import AnyLoopLock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet
from icechunk_async.engine.changes.merge import check_fits
from icechunk_async.engine.changes.publications import (
    GIVEN_UP,
    Base,
    Publication,
    Shared,
    laid_over,
    news_since,
    next_stamp,
    noted_in,
    noted_together,
    stamped,
    taken_in,
    without_journals,
)
from icechunk_async.engine.leases.files import (
    PublicationName,
    decode_publication,
    encode_publication,
)
from icechunk_async.engine.leases.keeper import beat_seconds
from icechunk_async.engine.leases.record import LeaseState, encode_lease
from icechunk_async.engine.leases.register import read_lease
from icechunk_async.engine.leases.stored import (
    IncompleteListing,
    Place,
    Stored,
    listed,
    never_complete,
    publications_of,
    segments_of,
    shared_of,
)
from icechunk_async.engine.leases.times import listed_at, modified_at, storage_time, told_time
from icechunk_async.errors import (
    LeaseExpiredError,
    LeaseLostError,
    LeaseNotFoundError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    SessionStateError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import SessionId
from icechunk_async.format.layout import lease_key, spill_prefix
from icechunk_async.storage import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from icechunk_async.engine.changes.publications import News, Noted
    from icechunk_async.engine.changes.wire import Lineage, Membership
    from icechunk_async.engine.leases.record import LeaseRecord
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Version

__all__ = ["Member"]

_log = logging.getLogger(__name__)

_TRIES: Final = 20
_CLEANUP_SECONDS: Final = 15
_SERIAL_BYTES: Final = 12
_BYTES_A_CHUNK: Final = 64
_COARSE: Final = timedelta(seconds=1)
"""The storage may cut times to whole seconds."""
_MICROSECOND: Final = timedelta(microseconds=1)
_HERE: Final = "What it changed since it published last is still here, and was not published."
_OVER: Final = (LeaseExpiredError, LeaseLostError, LeaseNotFoundError)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A publication that is stored, or may be, or may be one day."""

    publication: Publication
    known: ChangeSet
    """The fork's changes as of then."""
    parts: int
    """The number of notes that it holds."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state that the last refresh read."""

    stored: Stored
    counted: frozenset[PublicationName]
    """The publications that no segment held yet, and that count."""
    names: tuple[str, ...]
    """The names of the segments that forks see."""
    shared: Shared
    """The state that these lead to."""


class _AnotherCountsError(Exception):
    """The session has another publication by this name, with this serial if that is known."""

    def __init__(self, serial: bytes | None) -> None:
        super().__init__()
        self.serial = serial


def _serial_of(record: LeaseRecord, name: PublicationName) -> bytes | None:
    """Return the serial of a publication if it is the last one that the session has, else None."""
    is_last = record.taken.get(name.fork_id) == name.number + 1
    return record.serials.get(name.fork_id) if is_last else None


class Member:
    """One fork that is attached. Usable from any loop; one thing at a time."""

    def __init__(
        self,
        workspace: Workspace,
        membership: Membership,
        lineage: Callable[[], Lineage],
        *,
        alive_us: int | None = None,
    ) -> None:
        """Continue as a fork was.

        Args:
            workspace: that of the fork.
            membership: its place in the session.
            lineage: returns its lineage.
            alive_us: when the lease had been renewed, by ``clock.elapsed_us``, if that is known.
        """
        self._workspace = workspace
        self._storage = workspace.assets.storage
        self.membership = membership
        self._lineage = lineage
        self._told = None if membership.number == 0 else lineage()
        """The lineage as others know it."""
        self._parts: list[Noted] = []
        """Notes of chunks that are not published; journals hold the newest."""
        # Several, because a try whose reply was lost may land after the next one was sent.
        self._attempts: list[_Attempt] = []
        """Publications whose outcome is unknown; they have one number."""
        self._seen: _Seen | None = None
        self._known: dict[PublicationName, Publication] = {}
        """Publications that no segment holds yet."""
        self._alive_us = alive_us
        self._looked_us = 0
        self._serial: bytes | None = None
        """The serial that the lease had when it was read last; None if it never was."""
        self._alone = AnyLoopLock()

    @property
    def session_id(self) -> SessionId:
        """The session whose lease it is."""
        return SessionId(self.membership.session_id)

    @property
    def has_news(self) -> bool:
        """Whether anything was changed that is not published."""
        workspace, membership = self._workspace, self.membership
        with workspace.lock:
            # Comparing revisions is quick; to find the news copies columns.
            if workspace.changes.same_as(membership.known):
                return False
            return not self._news().is_empty()

    def _news(self) -> News:
        workspace, membership = self._workspace, self.membership
        return news_since(
            membership.known,
            workspace.changes,
            workspace.base.nodes,
            membership.stamps,
            [*self._parts, noted_in(workspace.changes)],
        )

    def for_fork(self) -> Membership | None:
        """Return the place of a fork of this one; None if others do not know its state."""
        with self._workspace.lock:
            if self.has_news:
                return None
            membership = self.membership
            taken = {**membership.taken, self._lineage().fork_id: membership.number}
            return replace(membership, number=0, refreshed=False, taken=taken, known=ChangeSet())

    # Publishing

    async def publish(self) -> bool:
        """Let others see what was changed; see `ForkSession.publish`."""
        async with self._alone:
            published = False
            for _ in range(_TRIES):
                # Each try has the same number. If an earlier one counts, the next is made of what
                # came after it.
                published |= await self._settle_earlier()
                attempt = self._attempt()
                if attempt is None:
                    if not published:
                        await self._confirm(None)
                    return published
                # First what the changes refer to. Chunks written meanwhile may be stored with it.
                await self._workspace.store_packs()
                await self._storage.sync()
                if await self._put(attempt) and await self._settle(attempt, fresh=True):
                    return True
            raise StorageUnavailableError(
                f"This fork could not publish: each time an earlier try landed late. {_HERE} Try "
                "again."
            )

    def _attempt(self) -> _Attempt | None:
        """Return the changes to publish; None if others know all of them."""
        workspace, membership, lineage = self._workspace, self.membership, self._lineage()
        with workspace.lock:
            workspace.check_writable()
            changes = workspace.changes
            news = self._news()
            if news.is_empty() and lineage == self._told:
                return None
            # Under the lock, with nothing awaited in between: a chunk that another thread sets from
            # now on is in the next notes, and none is in both or in neither.
            self._parts.append(noted_in(changes))
            changes.note_anew()
            publication = Publication(
                lineage.fork_id,
                membership.number,
                next_stamp(clock.now_us(), membership.clock),
                news,
                membership.taken,
                lineage,
                clock.random_bytes(_SERIAL_BYTES),
            )
            return _Attempt(publication, without_journals(changes), len(self._parts))

    def noted_changes(self) -> ChangeSet:
        """Return a copy of the fork's changes, whose journals hold all that is not published."""
        changes, known = self._workspace.changes.copy(), self.membership.known.chunks
        noted = noted_together([*self._parts, noted_in(changes)], self.membership.known)
        for node_id, it in changes.chunks.items():
            it.journal = noted.get(node_id, ArrayChanges(it.rank)) if node_id in known else None
        return changes

    def discard(self) -> None:
        """Forget what was changed and is not published."""
        workspace = self._workspace
        with workspace.lock:
            workspace.check_open()
            changes = self.membership.known.copy()
            changes.note_anew()
            workspace.rebase_to(workspace.base, changes)
            self._parts.clear()

    def _name(self) -> PublicationName:
        membership = self.membership
        return PublicationName(membership.generation, self._lineage().fork_id, membership.number)

    def _key(self, name: PublicationName) -> str:
        return f"{spill_prefix(self.session_id)}{name}"

    async def _put(self, attempt: _Attempt) -> bool:
        """Store a publication; return False if an earlier try may have taken its place.

        Raises:
            SessionStateError: another copy of the fork did.
            OutcomeUnknownError: it may be stored.
            StorageError: it is not.
        """
        membership, name = self.membership, self._name()
        publication = attempt.publication
        data = await self._workspace.assets.compute(
            lambda: encode_publication(self.session_id, membership.base_id, publication),
            size_bytes=publication.news.changes.count() * _BYTES_A_CHUNK,
        )
        earlier = bool(self._attempts)
        # Before it is sent, so that a task that is cancelled meanwhile settles it next time.
        self._attempts.append(attempt)
        try:
            await self._storage.put(self._key(name), data, if_version=ABSENT)
        except PreconditionFailedError:
            self._attempts.remove(attempt)
            if not earlier:
                raise self._copied() from None
            return False
        except OutcomeUnknownError as error:
            if await self._published(name) is None:
                raise OutcomeUnknownError(
                    f"Whether this fork published is unknown: {error} What it changed is still "
                    "here. Publish again to find out."
                ) from error
            return False
        except StorageError:
            self._attempts.remove(attempt)
            raise
        return True

    async def _published(self, name: PublicationName) -> Publication | None:
        """Return the publication by a name, if there is one."""
        key = self._key(name)
        try:
            found = await self._storage.get(key)
        except ObjectNotFoundError:
            return None
        return decode_publication(found.data, self.session_id, self.membership.base_id, name, key)

    async def _settle_earlier(self) -> bool:
        """Find out what became of earlier tries; return whether one of them was published."""
        if not self._attempts:
            return False
        name = self._name()
        found = await self._published(name)
        if found is not None:
            serial: bytes | None = found.serial
        else:  # it is deleted once the session has it
            record, _, _ = await read_lease(self._storage, self.session_id)
            serial = _serial_of(record, name)
        attempt = self._earlier(serial)
        if attempt is not None:
            return await self._settle(attempt, fresh=False)
        if found is None:
            return False
        self._attempts.clear()
        raise self._copied()

    def _earlier(self, serial: bytes | None) -> _Attempt | None:
        return next((it for it in self._attempts if it.publication.serial == serial), None)

    async def _settle(self, attempt: _Attempt, *, fresh: bool) -> bool:
        """Make sure that a publication that is stored counts; else take it back and say why.

        Returns: False if the session has another one by this name, of an earlier try.
        """
        name, publication = self._name(), attempt.publication
        try:
            await self._confirm(name, publication.serial, fresh=fresh)
        except OutcomeUnknownError:
            raise
        except _AnotherCountsError as error:
            await self._take_back(name, attempt)
            if self._earlier(error.serial) is None:
                raise self._copied() from None
            return False
        except (*_OVER, SessionStateError):
            await self._take_back(name, attempt)
            raise
        del self._attempts[:]
        self._advance(name, attempt)
        return True

    def _advance(self, name: PublicationName, attempt: _Attempt) -> None:
        """Note that others know of a publication."""
        publication = attempt.publication
        with self._workspace.lock:
            membership = self.membership
            del self._parts[: attempt.parts]
            self._told = publication.lineage
            self.membership = replace(
                membership,
                number=membership.number + 1,
                clock=publication.stamp,
                stamps=stamped(membership.stamps, publication.news, publication.stamp),
                known=attempt.known,
            )
            if self._seen is not None:
                self._known[name] = publication
                stored = self._seen.stored
                self._seen = replace(
                    self._seen,
                    stored=replace(stored, publications=stored.publications | {name}),
                    counted=self._seen.counted | {name},
                )

    async def _take_back(self, name: PublicationName, attempt: _Attempt) -> None:
        """Delete a publication that does not count; one that stays is found out by the next try."""
        with suppress(StorageError), anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
            # `delete` returns what it could not delete.
            if not await self._storage.delete([self._key(name)]):
                self._attempts.remove(attempt)

    def _copied(self) -> SessionStateError:
        return SessionStateError(
            f"Another copy of fork {self._lineage().fork_id.hex()} has published since this one "
            f"was made. {_HERE} Take in the other's changes, 'await fork.refresh()', and "
            "publish then. Better give each task its own fork."
        )

    # The lease

    async def _confirm(
        self, name: PublicationName | None, serial: bytes = b"", *, fresh: bool = False
    ) -> None:
        """Read the lease, renew it where it is due, and raise unless the fork can publish.

        Args:
            name: the publication that is stored already, if one is.
            serial: of that.
            fresh: whether it was stored just now.

        Raises:
            LeaseExpiredError, LeaseLostError, LeaseNotFoundError: the session is over.
            SessionStateError: the fork does not fit any more.
            OutcomeUnknownError: the session is being published, with the publication or without.
            _AnotherCountsError: the session has another by this name.
        """
        for _ in range(_TRIES):
            looked_us = clock.elapsed_us()
            record, version, renewed_at = await read_lease(self._storage, self.session_id)
            if self._counts(record, name, serial):
                return
            # Somebody renewed the lease after it was last read, so it holds from that reading on at
            # least. Only differences of this clock are used, never its time.
            if self._serial not in (None, record.serial):
                self._alive_us = max(self._alive_us or 0, self._looked_us)
            self._serial, self._looked_us = record.serial, looked_us
            idle_us = None if self._alive_us is None else looked_us - self._alive_us
            if idle_us is None or idle_us >= record.duration_us:
                key = self._key(name) if fresh and name is not None else None
                idle_us = await self._idle_us(record, renewed_at, key)
                self._alive_us = looked_us - idle_us
            if idle_us / 1e6 < beat_seconds(record):
                return
            if record.began_us is None:  # else it would begin with this renewal
                began_at = renewed_at or await modified_at(
                    self._storage, lease_key(self.session_id)
                )
                record = replace(record, began_us=clock.to_us(began_at))
            if await self._renew(record, version):
                return
        raise StorageUnavailableError(
            f"The lease of session {self.session_id} could not be renewed by a fork: each time "
            "somebody else did. Publish again."
        )

    def _counts(self, record: LeaseRecord, name: PublicationName | None, serial: bytes) -> bool:
        """Return whether all that was published is in the session's state, whatever comes next.

        Raises:
            As `_confirm`.
        """
        number = self.membership.number
        taken = record.taken.get(self._lineage().fork_id, 0)
        if record.state is LeaseState.ENDED:
            pass
        elif name is None:
            if record.state is LeaseState.COMMITTED and taken >= number > 0:
                return True
        elif taken > number:
            known = _serial_of(record, name)
            if known != serial:
                raise _AnotherCountsError(known)
            return True
        elif (
            record.state is LeaseState.OPEN
            and record.turn != self.membership.turn
            and record.counts(name.generation, name.fork_id, number)
        ):
            if name.generation >= record.decided:
                raise OutcomeUnknownError(
                    f"{record.owner!r} is about to continue session {self.session_id}, and it is "
                    "not known yet whether with what this fork published just now. Publish again "
                    "to find out."
                )
            return True  # it was there when the session was resumed
        self._check_open(record, _HERE)
        if name is not None and record.sealed:
            raise OutcomeUnknownError(
                f"Session {self.session_id} is being committed or rebased, and it is not known yet "
                "whether with what this fork published just now. Publish again to find out."
            )
        return False

    def _check_open(self, record: LeaseRecord, here: str = "") -> None:
        """Raise unless the session still takes the fork's changes; ``here`` says what is left."""
        session_id, fork_id = self.session_id, self._lineage().fork_id
        if record.state is not LeaseState.OPEN:
            how, context = "was ended", {"session_id": str(session_id)}
            if record.snapshot_id is not None:
                how = f"was committed as {record.snapshot_id}"
                context["snapshot_id"] = str(record.snapshot_id)
            raise LeaseLostError(
                f"Session {session_id} {how}, and its forks publish no more. {here} Write it again "
                "in a new session.",
                **context,
            )
        if record.turn != self.membership.turn:
            raise LeaseLostError(
                f"{record.owner!r} continues session {session_id}, which this fork is of, and its "
                f"forks publish no more. {here} Merge it there: 'await session.merge(fork)'.",
                session_id=str(session_id),
            )
        if record.taken.get(fork_id) == GIVEN_UP:
            raise SessionStateError(
                f"Session {session_id} gave up fork {fork_id.hex()}, by 'session.discard_fork'. "
                f"{here}"
            )
        if record.generation != self.membership.generation:
            raise SessionStateError(
                f"Session {session_id} was rebased, or its changes were discarded, since this fork "
                f"began. They do not fit any more. {here} Fork again, and write it there."
            )

    async def _idle_us(
        self, record: LeaseRecord, renewed_at: datetime | None, fresh_key: str | None
    ) -> int:
        """Return how long ago the lease was renewed at most, by the storage's clock.

        Raises:
            LeaseExpiredError: that is longer than it holds.

        Cost: none where the backend tells the time and when an object was modified; else a request,
        or three without a fresh object to look at.
        """
        # Three clocks that may disagree: only the storage's is used, as collection uses it.
        now = await told_time(self._workspace.assets.backend)
        if now is None and fresh_key is not None:
            now = await listed_at(self._storage, fresh_key)
        if now is None:
            now = await storage_time(self._storage)
        if renewed_at is None:
            renewed_at = await modified_at(self._storage, lease_key(self.session_id))
        idle = max(now - renewed_at, timedelta(0))
        if idle // _MICROSECOND >= record.duration_us:
            raise LeaseExpiredError(
                f"The lease of session {self.session_id} has expired: it holds for "
                f"{record.duration_us / 1e6:.0f} s, and was renewed last at "
                f"{renewed_at.isoformat()}. Garbage collection may have deleted what the session "
                f"and its forks wrote. {_HERE} Begin a new session, and write it there.",
                session_id=str(self.session_id),
            )
        # Rounded up, so that a fork takes the lease for older than it is and renews it earlier.
        return (idle + _COARSE) // _MICROSECOND

    async def _renew(self, record: LeaseRecord, version: Version) -> bool:
        """Renew the lease; return False if somebody else changed it meanwhile.

        Failing at that does no harm yet: who publishes next tries again.
        """
        sent_us, renewed = clock.elapsed_us(), record.renewed()
        try:
            await self._storage.put(
                lease_key(self.session_id), encode_lease(renewed), if_version=version
            )
        except PreconditionFailedError:
            return False
        except StorageError as error:
            _log.info("a fork did not renew the lease of session %s: %s", self.session_id, error)
            return True
        self._serial, self._looked_us, self._alive_us = renewed.serial, sent_us, sent_us
        return True

    # Reading what others published

    async def refresh(self) -> bool:
        """Take in what others published; see `ForkSession.refresh`."""
        async with self._alone:
            await self._settle_earlier()
            for _ in range(_TRIES):
                # Names first, then the lease: what the lease says was taken in may be deleted
                # between the two. A segment or publication that is gone then means to look again.
                stored = await listed(self._storage, self.session_id)
                if self._seen is not None and stored == self._seen.stored:
                    return False
                record, _, _ = await read_lease(self._storage, self.session_id)
                self._check_open(record)
                try:
                    return await self._read(record, stored)
                except IncompleteListing:
                    continue
            raise never_complete(self.session_id)

    async def _read(self, record: LeaseRecord, stored: Stored) -> bool:
        base = await self._workspace.assets.snapshot(record.base_id)
        seen, membership = self._seen, self.membership
        names = record.spilled[: record.shared]
        shared = await self._read_shared(record, names, base)
        found = await publications_of(
            Place(self._storage, self.session_id, base.id),
            shared,
            [
                it
                for it in stored.publications
                if record.counts(it.generation, it.fork_id, it.number)
            ],
            self._known,
        )
        now = _Seen(stored, frozenset(self._known), names, shared)
        # Segments that only a resumed session reads change the listing, too, and nothing here.
        if seen is not None and (seen.names, seen.counted) == (now.names, now.counted):
            self._seen = now
            return False
        ground = Base(base.id, base.nodes, self._workspace.assets.spec_version)
        folded = await self._workspace.assets.compute(
            lambda: taken_in(shared, found, ground),
            size_bytes=sum(it.news.changes.count() for it in found) * _BYTES_A_CHUNK,
        )
        mine = {self._lineage().fork_id: membership.number} if membership.number else {}
        if not folded.covers({**membership.taken, **mine}):
            raise IncompleteListing  # it showed less than this fork has seen before
        self._stand_on(base, folded)
        self._seen = now
        return True

    async def _read_shared(
        self, record: LeaseRecord, names: tuple[str, ...], base: Snapshot
    ) -> Shared:
        """Return the state that segments lead to; read only those that are new."""
        seen = self._seen
        if seen is not None and names[: len(seen.names)] == seen.names:
            names, before = names[len(seen.names) :], seen.shared
        else:
            before = None
        segments = await segments_of(self._storage, self.session_id, names)
        shared = shared_of(record, segments, before)
        # The rest was compared with the base when it was read.
        touched = {node_id for it in segments for node_id in it.changes.touched()}
        spec_version = self._workspace.assets.spec_version
        check_fits(shared.changes, base.nodes, spec_version, only=touched)
        return shared

    def _stand_on(self, base: Snapshot, folded: Shared) -> None:
        """Put the state that others know below what this fork changed and did not publish.

        Raises:
            MergeFailedError: they clash; nothing was taken in.
        """
        workspace = self._workspace
        folded.changes.note_anew()
        with workspace.lock:
            workspace.check_writable()
            membership = self.membership
            ground = Base(base.id, base.nodes, workspace.assets.spec_version)
            changes = laid_over(folded, self._news(), ground)
            workspace.rebase_to(base, changes, continues=membership.refreshed)
            self._parts.clear()
            # Another copy of this fork may have published: from its number on, this one is its
            # successor.
            number = folded.taken.get(self._lineage().fork_id, 0)
            self.membership = replace(
                membership,
                number=max(membership.number, number),
                refreshed=True,
                clock=max(membership.clock, folded.clock),
                stamps=folded.stamps,
                taken=folded.taken,
                known=without_journals(folded.changes),
            )

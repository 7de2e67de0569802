"""The leases of a repository: list them, end one, and say what collection must spare for them."""

from __future__ import annotations

import logging
from dataclasses import field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.leases.keeper import lost
from icechunk_async.engine.leases.record import LeaseState, decode_lease, encode_lease
from icechunk_async.engine.leases.times import modified_at, storage_time, told_time
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    LeaseExpiredError,
    LeaseNotFoundError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageFullError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import SessionId, SnapshotId
from icechunk_async.format.layout import LEASED_SESSIONS, LEASES, SPILLS, lease_key, spill_prefix
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.engine.leases.record import LeaseRecord
    from icechunk_async.storage import Storage, Version

__all__ = [
    "LeasedSession",
    "SessionState",
    "Spared",
    "as_session_id",
    "count_expired",
    "end_session",
    "leased_sessions",
    "open_lease",
    "read_lease",
    "remove_dead",
    "remove_spills",
    "spared",
]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 32
_TRIES: Final = 20
_SKEW: Final = timedelta(minutes=5)
"""By how much the clocks of one storage may disagree: it can consist of many machines."""
_LATE: Final = timedelta(hours=1)
"""Collection takes a lease for dead this long after its holder does: a commit that began in time
may still be under way."""
_GRACE: Final = timedelta(days=1)
"""How long a dead lease can still be looked at before collection removes it."""
_REMEMBERED: Final = timedelta(days=7)
"""The same for sessions that came to their end, so that a job that is started again is told."""
_LONGEST: Final = timedelta(days=7)
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_DELETED_AT_ONCE: Final = 1000


class SessionState(Enum):
    """The states of a leased session."""

    LIVE = "live"
    EXPIRED = "expired"
    """Idle for longer than its lease holds: it can be neither written nor committed."""
    COMMITTED = "committed"
    ENDED = "ended"
    """Given up, by its holder or by hand."""


@dataclass(frozen=True, slots=True)
class LeasedSession:
    """A session with a lease, as others see it. Times are aware, UTC, by the storage's clock."""

    session_id: SessionId
    owner: str
    """The one who began or resumed it, for people."""
    branch: str
    base_id: SnapshotId
    """The snapshot that its changes are against."""
    began_at: datetime
    heartbeat_at: datetime
    """When the lease was renewed last."""
    expires_at: datetime
    """When it expires unless it is renewed."""
    age: timedelta
    """Since it began."""
    state: SessionState
    snapshot_id: SnapshotId | None = None
    """The commit of a session that was committed."""
    segments: int = 0
    """The number of files that hold its spilled changes, see ``Session.spill``."""


@dataclass(frozen=True, slots=True)
class Spared:
    """The objects that collection must leave alone because of leases."""

    written_since: datetime | None = None
    """Everything that was written at this time or later; None if no lease is live."""
    bases: frozenset[SnapshotId] = frozenset()
    """Snapshots that live sessions build on, with all that they refer to."""
    dead: tuple[SessionId, ...] = field(default=())
    """Leases that can be removed."""
    without_lease: Mapping[SessionId, datetime] = field(
        default_factory=dict["SessionId", "datetime"]
    )
    """Sessions that spilled and have no lease, by when they did last. A fork that is killed while
    it publishes may leave an object after the lease was removed."""

    def cutoff(self, asked: datetime) -> datetime:
        """Return the time before which garbage may be deleted, of that which was asked for."""
        return asked if self.written_since is None else min(asked, self.written_since)


def as_session_id(given: SessionId | str) -> SessionId:
    """Return the id of a session, parsed if it is text."""
    return given if isinstance(given, SessionId) else SessionId.parse(given)


async def read_lease(
    storage: Storage, session_id: SessionId
) -> tuple[LeaseRecord, Version, datetime | None]:
    """Return a lease, its version, and when it was renewed if the storage tells.

    Raises:
        LeaseNotFoundError: no session with a lease has this id.
        FormatError: it is damaged.
    """
    key = lease_key(session_id)
    try:
        found = await storage.get(key)
    except ObjectNotFoundError as error:
        raise LeaseNotFoundError(
            f"There is no session {session_id} with a lease in this repository. It may have had "
            "none, or garbage collection removed its lease some time after its end. "
            "'repository.sessions()' lists those that there are.",
            session_id=str(session_id),
        ) from error
    return decode_lease(found.data, session_id, key), found.version, found.last_modified


async def leased_sessions(storage: Storage, backend: object) -> list[LeasedSession]:
    """Return every session with a lease; see `Repository.sessions`."""
    renewed = await _renewed(storage)
    if not renewed:
        return []
    now = await told_time(backend) or await storage_time(storage)

    async def look(entry: tuple[SessionId, datetime]) -> LeasedSession | None:
        try:
            record, _, _ = await read_lease(storage, entry[0])
        except LeaseNotFoundError:  # removed meanwhile
            return None
        return _described(record, entry[1], now)

    found = await bounded_map(look, renewed.items(), limit=_AT_ONCE)
    return sorted(filter(None, found), key=lambda it: (it.began_at, it.session_id))


def _described(record: LeaseRecord, renewed_at: datetime, now: datetime) -> LeasedSession:
    began_at = renewed_at if record.began_us is None else clock.from_us(record.began_us)
    expires_at = renewed_at + timedelta(microseconds=record.duration_us)
    state = SessionState(record.state.value) if record.state is not LeaseState.OPEN else None
    if state is None:
        state = SessionState.LIVE if now < expires_at else SessionState.EXPIRED
    return LeasedSession(
        record.session_id,
        record.owner,
        record.branch,
        record.base_id,
        began_at,
        renewed_at,
        expires_at,
        max(now - began_at, timedelta(0)),
        state,
        record.snapshot_id,
        len(record.spilled),
    )


async def count_expired(storage: Storage) -> int:
    """Count the sessions that collection takes for dead, by this machine's clock.

    Nothing is written, so it can be asked of storages that may only be read.

    Cost: one request, and one for each session with a lease.
    """
    if not storage.capabilities.listing:
        return 0
    # Wrong clocks make a wrong count here and nothing else: `check` only reports it.
    now = clock.from_us(clock.now_us())

    async def look(entry: tuple[SessionId, datetime]) -> bool:
        try:
            record, _, _ = await read_lease(storage, entry[0])
        except (LeaseNotFoundError, FormatError):
            return False
        it = _described(record, entry[1], now)
        return it.state is SessionState.EXPIRED and now > it.expires_at + _LATE

    renewed = await _renewed(storage)
    return sum(await bounded_map(look, renewed.items(), limit=_AT_ONCE))


async def open_lease(
    storage: Storage, backend: object, session_id: SessionId
) -> tuple[LeaseRecord, Version]:
    """Return the lease of a session that can be continued, and its version.

    Raises:
        LeaseNotFoundError: no session with a lease has this id.
        LeaseExpiredError: it was idle for longer than its lease holds.
        LeaseLostError: it was committed or ended.
        FormatError: its lease is damaged.
    """
    record, version, renewed_at = await read_lease(storage, session_id)
    if record.state is not LeaseState.OPEN:
        raise lost(record)
    if renewed_at is None:
        renewed_at = await modified_at(storage, lease_key(session_id))
    now = await told_time(backend) or await storage_time(storage)
    if now >= renewed_at + timedelta(microseconds=record.duration_us):
        raise LeaseExpiredError(
            f"Session {session_id} cannot be resumed: its lease was renewed last at "
            f"{renewed_at.isoformat()} and holds for {record.duration_us / 1e6:.0f} s. Garbage "
            "collection may have deleted what it wrote. Begin a new session.",
            session_id=str(session_id),
        )
    if record.began_us is None:  # it was never renewed, so that was when it began
        record = replace(record, began_us=clock.to_us(renewed_at))
    return record, version


async def end_session(storage: Storage, session_id: SessionId) -> None:
    """Take the lease from a session and its holder; see `Repository.end_session`."""
    for _ in range(_TRIES):
        record, version, _ = await read_lease(storage, session_id)
        if record.state is not LeaseState.OPEN:
            return
        ended = replace(record.renewed(), state=LeaseState.ENDED)
        try:
            await storage.put(lease_key(session_id), encode_lease(ended), if_version=version)
        # Its holder renewed it meanwhile, or the lease may be ended already.
        except (PreconditionFailedError, OutcomeUnknownError):
            continue  # the next look tells
        return
    raise StorageUnavailableError(
        f"Session {session_id} could not be ended: its holder renews its lease all the time, or "
        "the storage gives no answers. Try again."
    )


async def spared(storage: Storage, backend: object) -> Spared:
    """Return the objects that collection and expiration must leave alone.

    Args:
        storage: where the leases are.
        backend: the same without its policies, which may be able to tell the time.

    Raises:
        StorageError: the leases could not be read; then nothing may be deleted.

    Cost: one listing if there are no leases; otherwise also one request for each, and three more.
    """
    # Without a listing nothing can be collected either, so nothing needs to be spared.
    if not storage.capabilities.listing:
        return Spared()
    # Leases first, then the time. A session that begins in between wrote nothing yet that a cutoff
    # of before can reach.
    stored = await _stored(storage, LEASES)
    renewed = stored[LEASED_SESSIONS]
    without_lease = {it: at for it, at in stored[SPILLS].items() if it not in renewed}
    if not renewed:
        return Spared(without_lease=without_lease)
    try:
        now = await told_time(backend) or await storage_time(storage)
    except StorageFullError:  # collection makes room; at an earlier time more leases are live
        now = max(renewed.values())

    async def look(entry: tuple[SessionId, datetime]) -> Spared:
        session_id, renewed_at = entry
        try:
            record, _, _ = await read_lease(storage, session_id)
        except LeaseNotFoundError:  # removed meanwhile
            return Spared()
        except FormatError as error:
            _log.warning("%s The lease counts as one of the longest kind.", error)
            # A damaged lease must not let collection delete the work of a session that may be
            # alive.
            return spared_for_unknown(session_id, renewed_at, now)
        return spared_for(_described(record, renewed_at, now), now)

    each = await bounded_map(look, renewed.items(), limit=_AT_ONCE)
    return Spared(
        min((it.written_since for it in each if it.written_since is not None), default=None),
        frozenset(base_id for it in each for base_id in it.bases),
        tuple(sorted(session_id for it in each for session_id in it.dead)),
        without_lease,
    )


def spared_for(it: LeasedSession, now: datetime) -> Spared:
    """Return the objects that must be left alone for one session."""
    if it.state in (SessionState.COMMITTED, SessionState.ENDED):
        # Until then a job that is started again after its commit is told so, and does not do its
        # work twice.
        gone = now > it.heartbeat_at + _REMEMBERED
        return Spared(dead=(it.session_id,)) if gone else Spared()
    # Lateness is granted to the holder, not by it: it stops at `expires_at`, and its last request
    # may still be on its way.
    if now <= it.expires_at + _LATE:
        return Spared(it.began_at - _SKEW, frozenset({it.base_id}))
    gone = now > it.expires_at + _LATE + _GRACE
    return Spared(dead=(it.session_id,)) if gone else Spared()


def spared_for_unknown(session_id: SessionId, renewed_at: datetime, now: datetime) -> Spared:
    """Return the objects that must be left alone for a session whose lease cannot be read."""
    if now <= renewed_at + _LONGEST + _LATE:
        return Spared(renewed_at - _LONGEST)
    gone = now > renewed_at + _LONGEST + _LATE + _GRACE
    return Spared(dead=(session_id,)) if gone else Spared()


async def remove_dead(storage: Storage, leases: Spared, cutoff: datetime) -> None:
    """Delete leases that ended long ago, and what their sessions spilled.

    Args:
        storage: where the leases are.
        leases: what `spared` returned.
        cutoff: what was written at this time or later stays. Where there is no lease, also what was
            written within the longest lease before it.

    What cannot be deleted stays for the next collection. Cost: a listing and one or two requests
    for each.
    """
    for session_id in leases.dead:  # the lease last: until then the next collection sees both
        await remove_spills(storage, session_id)
        await storage.delete([lease_key(session_id)])
    for session_id, written_at in leases.without_lease.items():
        if written_at < cutoff - _LONGEST - _LATE:
            await remove_spills(storage, session_id)


async def remove_spills(storage: Storage, session_id: SessionId) -> None:
    """Delete what a session spilled, once it needs none of it."""
    entries = storage.list_prefix(spill_prefix(session_id))
    async with closing(entries):
        keys = [entry.key async for entry in entries if isinstance(entry, ObjectInfo)]
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        await storage.delete(keys[start : start + _DELETED_AT_ONCE])


async def _renewed(storage: Storage) -> dict[SessionId, datetime]:
    """Return every lease, with the time when it was renewed."""
    return (await _stored(storage, LEASED_SESSIONS))[LEASED_SESSIONS]


async def _stored(storage: Storage, prefix: str) -> dict[str, dict[SessionId, datetime]]:
    """Return by folder which sessions have objects there, with when the newest was written."""
    found: dict[str, dict[SessionId, datetime]] = {LEASED_SESSIONS: {}, SPILLS: {}}
    entries = storage.list_prefix(prefix)
    async with closing(entries):
        async for entry in entries:
            for folder, times in found.items():
                if not isinstance(entry, ObjectInfo) or not entry.key.startswith(folder):
                    continue
                name = entry.key.removeprefix(folder)
                try:
                    session_id = SessionId.parse(name.partition("/")[0])
                except InvalidInputError:  # not ours
                    continue
                times[session_id] = max(entry.last_modified, times.get(session_id, _LONG_AGO))
    return found

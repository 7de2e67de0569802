"""Hold the lease of one session: renew it, notice that it expired or was lost, and end it.

The holder trusts no clock for this: it measures how long ago it sent the last renewal that landed,
which cannot be later than the storage noted it. Everybody else compares times of modification, all
of the storage's clock. So wrong clocks, here or there, change nothing.

Every change is a conditional write on the last one. Of two processes that continue one session, one
lands; the other finds another holder in what it reads back, and can no longer renew. Since a commit
renews first, it can no longer commit either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, cast

import anyio

from icechunk_async._runtime import clock
from icechunk_async.engine.leases.record import (
    LeaseRecord,
    LeaseState,
    decode_lease,
    encode_lease,
)
from icechunk_async.engine.leases.times import modified_at
from icechunk_async.errors import (
    LeaseExpiredError,
    LeaseLostError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    SessionStateError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.format.layout import lease_key
from icechunk_async.storage import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from weakref import ref

    from icechunk_async.engine.changes.publications import Shared
    from icechunk_async.format.ids import SessionId, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.storage import Expected, Storage, Version

    type Edit = Callable[[LeaseRecord], LeaseRecord]

__all__ = ["MANY_USES", "Beats", "Lease", "beat_seconds", "keep_alive", "lost"]

_log = logging.getLogger(__name__)

_TRIES: Final = 20
# At least nine renewals in a row may fail before the lease expires.
_BEATS: Final = 10
_LONGEST_BEAT_SECONDS: Final = 60.0
MANY_USES: Final = 20_000
"""A session that was used so often beats at once. To write a chunk counts twice."""
_SESSION: Final = "session"
_TURN: Final = "session_turn"


def beat_seconds(record: LeaseRecord) -> float:
    """Return how long those who use a session wait before they renew its lease again."""
    # A day's lease is renewed each minute all the same, because a beat also spills what was
    # written.
    return min(record.duration_us / _BEATS / 1e6, _LONGEST_BEAT_SECONDS)


class Lease:
    """The lease of one session, in the process that holds it. Usable from any thread and loop."""

    def __init__(
        self, storage: Storage, record: LeaseRecord, version: Expected, renewed_us: int
    ) -> None:
        """Use `begin`.

        Args:
            storage: where the lease is.
            record: the lease as last written.
            version: of the object then.
            renewed_us: before that was sent, by ``clock.elapsed_us``.
        """
        self._storage = storage
        self._key = lease_key(record.session_id)
        self._lock = threading.Lock()  # held over no await
        self._record = record
        self._version = version
        self._renewed_us = renewed_us
        self._over: SessionStateError | None = None
        self.used = False
        """Whether the session was used since the last renewal."""
        self._uses = 0
        self.sealed = False
        """Whether forks cannot publish at present; others know once the lease is renewed."""
        self.on_many_uses: Callable[[], None] | None = None
        """Called, from any thread, when the session was used very often since the last renewal."""

    @classmethod
    async def begin(cls, storage: Storage, record: LeaseRecord) -> Lease:
        """Store the lease of a new session.

        Raises:
            StorageError: there may be a lease that nobody holds; it expires.

        Cost: two requests in a row.
        """
        # Measured before the request: the lease then holds here a little shorter than for everybody
        # else.
        lease = cls(storage, record, ABSENT, clock.elapsed_us())
        await lease.renew()
        lease._noted(await modified_at(storage, lease._key))
        return lease

    @classmethod
    async def take_over(
        cls, storage: Storage, record: LeaseRecord, version: Version, owner: str
    ) -> Lease | None:
        """Take a lease from its holder; return None if it is at another version by now.

        Raises:
            StorageError: it may have been taken, by nobody; the next one may take it.
        """
        sent_us = clock.elapsed_us()  # before it is sent, see `check`
        taken = record.taken_over(owner).renewed()
        key = lease_key(record.session_id)
        try:
            found = await storage.put(key, encode_lease(taken), if_version=version)
        except PreconditionFailedError:
            return None
        except OutcomeUnknownError:
            # The reply was lost. Only this process knows the serial, so it tells whether the write
            # landed.
            there = await storage.get(key)
            if decode_lease(there.data, record.session_id, key).serial != taken.serial:
                raise
            found = there.version
        return cls(storage, taken, found, sent_us)

    @staticmethod
    async def mark_committed(
        storage: Storage, record: LeaseRecord, snapshot_id: SnapshotId
    ) -> None:
        """Write down for a holder that died what its session was committed as.

        Failing at that does no harm: the next process that resumes the session finds it out again.
        """
        held = await storage.get(lease_key(record.session_id))
        done = replace(record, state=LeaseState.COMMITTED, snapshot_id=snapshot_id)
        # The commit itself is in the history, which the next process looks at.
        with suppress(StorageError):
            await storage.put(
                lease_key(record.session_id), encode_lease(done), if_version=held.version
            )

    @property
    def session_id(self) -> SessionId:
        """The session."""
        return self._record.session_id

    @property
    def record(self) -> LeaseRecord:
        """The lease as last written."""
        return self._record

    @property
    def renewed_us(self) -> int:
        """Before the last renewal that landed was sent, by ``clock.elapsed_us``."""
        return self._renewed_us

    @property
    def is_over(self) -> bool:
        """Whether it expired, was lost or was ended."""
        return self._over is not None or self._record.state is not LeaseState.OPEN

    @property
    def beat_seconds(self) -> float:
        """How long a session in use waits before it renews its lease again."""
        return beat_seconds(self._record)

    def check(self) -> None:
        """Note that the session is used, and raise unless it may be.

        Raises:
            LeaseExpiredError: it was idle for too long.
            LeaseLostError: another process holds, committed or ended it.
        """
        self.used = True
        self._uses += 1
        if self._uses == MANY_USES and self.on_many_uses is not None:
            self.on_many_uses()
        if self._over is not None:
            # A new one each time: an error that is raised twice collects the tracebacks of both.
            raise type(self._over)(self._over.message, **self._over.context)
        # Counted from when the renewal was sent. The storage dated it later, if at all, so that for
        # everybody else the lease holds longer than it is used here.
        idle_us = clock.elapsed_us() - self._renewed_us
        if idle_us >= self._record.duration_us:
            raise self._expired(idle_us)

    async def renew(self, edit: Edit = lambda record: record) -> None:
        """Let the lease hold for its whole time from now on.

        Args:
            edit: what else to change; perhaps called more than once, also on its own result.

        Raises:
            LeaseExpiredError, LeaseLostError: as `check`; the session is over.
            StorageError: the lease may have been renewed; it holds at least as long as before.

        Cancellation: as a StorageError.

        Cost: one request, and two more for each reply that was lost.
        """
        for _ in range(_TRIES):
            self.check()
            with self._lock:
                # Only made under the lock. If another task lands first, this write is refused, and
                # is made again of what that one stored.
                record = replace(edit(self._record).renewed(), sealed=self.sealed)
                version = self._version
            sent_us = clock.elapsed_us()
            try:
                found = await self._storage.put(self._key, encode_lease(record), if_version=version)
            except (PreconditionFailedError, OutcomeUnknownError):
                if await self._settle(record, sent_us):
                    return
            else:
                self._wrote(record, found, sent_us)
                return
        raise StorageUnavailableError(
            f"The lease of session {self.session_id} could not be renewed: each time somebody "
            "else in this process changed it. Try again."
        )

    async def renewed_by_fork(self) -> bool:
        """Return whether a fork renewed the lease since this process did.

        Raises:
            LeaseLostError: another process holds, committed or ended the session.

        Cost: one request.
        """
        try:
            found = await self._storage.get(self._key)
        except ObjectNotFoundError:
            return False
        record = decode_lease(found.data, self.session_id, self._key)
        mine = self._record
        if record.serial == mine.serial:
            return False
        # The serial alone does not tell: forks of this session renew the lease, too, in its name.
        if record.holder != mine.holder or record.state is not LeaseState.OPEN:
            raise self._lost(_why(record), record.snapshot_id)
        return True

    async def move_to(self, base_id: SnapshotId) -> None:
        """Say that the session builds on another snapshot; errors as `renew`."""
        await self.renew(lambda record: replace(record, base_id=base_id))

    def marks(self) -> Mapping[str, JSON]:
        """Return the properties of a snapshot that show which session it is a commit of."""
        return {_SESSION: str(self.session_id), _TURN: self._record.turn}

    def check_not_committed(self, snapshot_id: SnapshotId, marks: object) -> None:
        """Refuse if a snapshot is the commit of this session by another of its holders.

        Raises:
            LeaseLostError: it is.
        """
        found = cast("dict[str, JSON]", marks) if isinstance(marks, dict) else {}
        if found.get(_SESSION) == str(self.session_id) and found.get(_TURN) != self._record.turn:
            raise self._lost(_committed(self._record, snapshot_id), snapshot_id)

    async def close(
        self,
        state: LeaseState,
        snapshot_id: SnapshotId | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Write down that the session came to its end; failing at that does no harm.

        The lease then expires by itself.

        Args:
            state: how it ended.
            snapshot_id: its commit.
            shared: what was published with it of its forks.
        """

        def closed(record: LeaseRecord) -> LeaseRecord:
            if shared is not None:
                record = replace(record, taken=shared.taken, serials=shared.serials)
            return replace(record, state=state, snapshot_id=snapshot_id)

        try:
            await self.renew(closed)
        except (StorageError, SessionStateError) as error:
            _log.info("the lease of session %s stays until it expires: %s", self.session_id, error)

    def _noted(self, began_at: datetime) -> None:
        began_us = clock.to_us(began_at)
        with self._lock:
            self._record = replace(self._record, began_us=began_us)

    def _wrote(self, record: LeaseRecord, version: Expected, sent_us: int) -> None:
        with self._lock:
            self._record, self._version = record, version
            # Replies may come in another order than the renewals were sent.
            self._renewed_us = max(self._renewed_us, sent_us)
        self.used, self._uses = False, 0

    async def _settle(self, written: LeaseRecord, sent_us: int) -> bool:
        """Read what is stored after a write that may have landed; return whether it did.

        Raises:
            LeaseLostError: another process was first.
        """
        try:
            found = await self._storage.get(self._key)
        except ObjectNotFoundError:  # it was deleted; the session itself is as good as before
            with self._lock:
                self._version = ABSENT
            return False
        record = decode_lease(found.data, self.session_id, self._key)
        if record.serial == written.serial:
            self._wrote(record, found.version, sent_us)
            return True
        if record.holder != written.holder or record.state is not LeaseState.OPEN:
            raise self._lost(_why(record), record.snapshot_id)
        with self._lock:  # another task of this process renewed it, or the write is yet to land
            # What is stored since the session began does not say when that was. Without it
            # collection would spare only what was written since the newest renewal.
            began_us = self._record.began_us if record.began_us is None else record.began_us
            self._record, self._version = replace(record, began_us=began_us), found.version
        return False

    def _expired(self, idle_us: int) -> LeaseExpiredError:
        holds = self._record.duration_us / 1e6
        self._over = LeaseExpiredError(
            f"The lease of session {self.session_id} has expired: it holds for {holds:.0f} s, and "
            f"was renewed last {idle_us / 1e6:.0f} s ago. Garbage collection may have deleted what "
            "the session wrote, so it can be neither written nor committed. Begin a new session; "
            "a longer lease holds longer without use.",
            session_id=str(self.session_id),
        )
        return self._over

    def _lost(self, why: str, snapshot_id: SnapshotId | None) -> LeaseLostError:
        context = {} if snapshot_id is None else {"snapshot_id": str(snapshot_id)}
        error = LeaseLostError(
            f"This session is over here: {why}", session_id=str(self.session_id), **context
        )
        self._over = error
        return error


def _committed(record: LeaseRecord, snapshot_id: SnapshotId) -> str:
    return f"another of its holders committed session {record.session_id} as {snapshot_id}."


def lost(record: LeaseRecord) -> LeaseLostError:
    """Return the error for a session that somebody else holds, or nobody any more."""
    context = {} if record.snapshot_id is None else {"snapshot_id": str(record.snapshot_id)}
    return LeaseLostError(
        f"This session is over here: {_why(record)}",
        session_id=str(record.session_id),
        **context,
    )


def _why(record: LeaseRecord) -> str:
    """Return the reason why this process no longer holds a session."""
    match record.state:
        case LeaseState.COMMITTED if record.snapshot_id is not None:
            return _committed(record, record.snapshot_id)
        case LeaseState.OPEN:
            return (
                f"{record.owner!r} continues session {record.session_id}. What was not spilled "
                "before is only here."
            )
        case _:
            return f"session {record.session_id} was ended. Begin a new one."


class Beats(Protocol):
    """A lease, with what has to be done at each beat."""

    @property
    def lease(self) -> Lease:
        """The lease."""
        ...

    async def beat(self) -> None:
        """Renew the lease if the session was used since it was renewed last."""
        ...


async def keep_alive[B: Beats](reference: ref[B], seconds: float) -> None:
    """Let a session beat again and again while it is used, until it or its lease is gone.

    Args:
        reference: the session; one that nobody refers to any more lets its lease expire.
        seconds: the time in between; a session that is used very often beats earlier.
    """
    loop, wake = asyncio.get_running_loop(), asyncio.Event()

    def wake_up() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(wake.set)

    while True:
        session = reference()
        if session is None or session.lease.is_over:
            return
        session.lease.on_many_uses = wake_up
        # While this waits, it must not keep a session alive that nobody else refers to.
        del session
        # Woken early where many chunks were written, so that a crash loses a bounded amount of
        # work.
        with anyio.move_on_after(seconds):
            await wake.wait()
        wake.clear()
        session = reference()
        if session is None or session.lease.is_over:
            return
        lease = session.lease
        try:
            await session.beat()
        except StorageError as error:  # the next one may be luckier; until then the lease holds
            _log.warning("the lease of session %s was not renewed: %s", lease.session_id, error)
        except SessionStateError as error:  # its next use says so
            _log.warning("%s", error)
            return
        del session, lease

"""Spill the changes of a leased session beside its lease, and read them back."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.changes.merge import check_fits
from icechunk_async.engine.leases.segments import Spilled, decode_segment, encode_segment, replay
from icechunk_async.engine.tree.workspace import Closed
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.ids import BackupId
from icechunk_async.format.layout import spill_prefix

if TYPE_CHECKING:
    from icechunk_async.engine.changes.change_set import ChangeSet
    from icechunk_async.engine.leases.keeper import Lease
    from icechunk_async.engine.leases.record import LeaseRecord
    from icechunk_async.engine.leases.segments import Segment
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.ids import SessionId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage

__all__ = ["Spiller", "spilled_changes"]

_MOST_SEGMENTS: Final = 64
"""The most segments of a session; then one takes the place of all."""
_AT_ONCE: Final = 16
_POLL_SECONDS: Final = 0.01
_BYTES_A_CHUNK: Final = 64
_PUBLISHING: Final = (Closed.PUBLISHING, Closed.PUBLISHED, Closed.IN_DOUBT)


class Spiller:
    """Spills one session. Usable from any loop; one spill at a time."""

    def __init__(self, workspace: Workspace, lease: Lease) -> None:
        """Begin with a session of which nothing was spilled that can be added to."""
        self._workspace = workspace
        self._lease = lease
        self._storage = workspace.assets.storage
        self._spilled: Spilled | None = None
        """What is in the segments; None: nobody knows, so the next spill begins anew."""
        self._busy = threading.Lock()  # held over awaits, so only ever tried, never waited for

    @property
    def lease(self) -> Lease:
        """The session's lease."""
        return self._lease

    async def beat(self) -> None:
        """Spill, and so renew the lease, if the session was used since it was renewed last."""
        if self._lease.used:
            await self.spill()

    async def spill(self) -> None:
        """Store what changed since the last spill, and renew the lease; see `Session.spill`."""
        while not self._busy.acquire(blocking=False):  # noqa: ASYNC110 -- perhaps another loop's
            await anyio.sleep(_POLL_SECONDS)
        try:
            await self._spill()
        finally:
            self._busy.release()

    async def _spill(self) -> None:
        workspace, lease = self._workspace, self._lease
        lease.check()
        taken = self._take()
        if taken is None:
            await lease.renew()
            return
        segment, now, anew = taken
        self._spilled = None  # until it is certain
        # First what the changes refer to. Chunks written meanwhile may be stored with it.
        await workspace.store_packs()
        await self._storage.sync()
        count = sum(map(len, (it.columns() for it in segment.changes.chunks.values())))
        data = await workspace.assets.compute(
            lambda: encode_segment(lease.session_id, segment), size_bytes=count * _BYTES_A_CHUNK
        )
        name = str(BackupId.random())
        prefix = spill_prefix(lease.session_id)
        await self._storage.put(f"{prefix}{name}", data)
        before = lease.record.spilled

        def listed(record: LeaseRecord) -> LeaseRecord:
            spilled = (name,) if anew else (*record.spilled, name)
            return replace(record, base_id=segment.base_id, spilled=spilled)

        await lease.renew(listed)
        self._spilled = now
        if anew and before:
            await self._storage.delete([f"{prefix}{it}" for it in before])

    def _take(self) -> tuple[Segment, Spilled, bool] | None:
        """Return the segment to spill, and whether it replaces the others; None if it is empty."""
        workspace = self._workspace
        with workspace.lock:
            if workspace.closed in _PUBLISHING:
                return None
            base_id, spilled = workspace.base.id, self._spilled
            anew = (
                spilled is None
                or spilled.base_id != base_id
                or len(self._lease.record.spilled) >= _MOST_SEGMENTS
            )
            if spilled is None or anew:
                spilled = Spilled(base_id)
            segment, now = spilled.take(workspace.changes)
            record = self._lease.record
            nothing_there = not record.spilled and record.base_id == base_id
            if segment.is_empty() and (nothing_there or not anew):
                self._spilled = now
                return None
            return segment, now, anew


async def spilled_changes(
    storage: Storage, record: LeaseRecord, base: Snapshot, spec_version: int
) -> ChangeSet:
    """Return the changes of a session as it spilled them last.

    Raises:
        FormatError: they are damaged, or cannot be made on the session's base.

    Cost: a request for each segment, 64 at most.
    """

    async def read(name: str) -> Segment:
        key = f"{spill_prefix(record.session_id)}{_checked(name, record.session_id)}"
        try:
            data = (await storage.get(key)).data
        except ObjectNotFoundError as error:
            raise FormatError(
                f"Session {record.session_id} spilled changes to {key!r}, which is missing."
            ) from error
        return decode_segment(data, record.session_id, key)

    segments = await bounded_map(read, record.spilled, limit=_AT_ONCE)
    changes = replay(record.base_id, segments)
    check_fits(changes, base.nodes, spec_version)
    return changes


def _checked(name: str, session_id: SessionId) -> str:
    if not name.isalnum():
        raise FormatError(f"The lease of session {session_id} names a file {name[:40]!r}.")
    return name

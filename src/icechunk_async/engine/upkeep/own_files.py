"""Files that only this library knows, in a garbage collection: proposals and statistics of chunks.

Open proposals keep what they need; those that ended some time ago are deleted. Statistics are
deleted by their array, when no snapshot has it any more, and not by their chunks: to know these,
all of them would have to be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.leases.register import spared
from icechunk_async.engine.proposals.files import load_all, pinned, record_key
from icechunk_async.engine.sidecars.statistics import id_of
from icechunk_async.engine.upkeep.sweep import BATCH, Tally, delete_batch, is_older, pages
from icechunk_async.format.layout import STATISTICS, proposal_prefix, statistics_key

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from typing import Self

    from icechunk_async.engine.leases.register import Spared
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import NodeId, StatisticsId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import ObjectInfo, Storage

__all__ = ["Doomed", "delete_ended", "drop", "spared_in"]


async def spared_in(engine: Engine) -> Spared:
    """Return the things that collection and expiration spare for leases and open proposals.

    Cost: that of `spared`, and one listing and a request for each proposal.
    """
    leases, needed = await gather(
        spared(engine.storage, engine.assets.backend), pinned(engine.storage)
    )
    return replace(leases, bases=leases.bases | needed)


async def delete_ended(storage: Storage, cutoff: datetime, *, dry_run: bool) -> Tally:
    """Delete proposals that were accepted or closed before a time, or count their objects.

    Proposals that are open or damaged stay. The record that says that it ended goes last, so that
    a proposal of which a part is deleted never looks open.
    """
    tally = Tally()
    if not storage.capabilities.listing:
        return tally
    records, _ = await load_all(storage)
    for record in records:
        if not record.state.is_over:
            continue
        found: list[ObjectInfo] = []
        async for page in pages(storage, proposal_prefix(record.id)):
            found += page
        if not found:  # another collection was here
            continue
        if not all(is_older(it.last_modified, cutoff) for it in found):
            continue
        last = record_key(record.id, record.number)
        # False sorts before True, so the record that says it ended is the last to go.
        found.sort(key=lambda it: it.key == last)
        await _delete(storage, found, tally, dry_run=dry_run)
    return tally


async def _delete(
    storage: Storage, objects: list[ObjectInfo], tally: Tally, *, dry_run: bool
) -> None:
    *others, last = objects
    parts = [others[at : at + BATCH] for at in range(0, len(others), BATCH)]
    for part in [*parts, [last]]:
        failures = [] if dry_run else await delete_batch(storage, [it.key for it in part])
        failed = {it.key for it in failures}
        tally.failures += failures
        tally.count += len(part) - len(failed)
        tally.size_bytes += sum(it.size_bytes for it in part if it.key not in failed)
        # The rest goes with the next collection, in the same order.
        if failures:
            return


class Doomed:
    """Old statistics whose arrays were found in no snapshot so far."""

    def __init__(self, objects: dict[NodeId, list[ObjectInfo]]) -> None:
        """Begin with all that are old, by their array."""
        self._objects = objects

    @classmethod
    async def listed(cls, storage: Storage, cutoff: datetime) -> Self:
        """List what was written before a time. Cost: one listing."""
        found: dict[NodeId, list[ObjectInfo]] = {}
        async for page in pages(storage, STATISTICS):
            for it in page:
                found_id = id_of(it.key)
                # Younger ones may be of an array that a session creates at this moment.
                if found_id is not None and is_older(it.last_modified, cutoff):
                    found.setdefault(found_id.node_id, []).append(it)
        return cls(found)

    def spare(self, snapshot: Snapshot) -> None:
        """Keep the statistics of all arrays of a snapshot."""
        found = [it for it in self._objects if snapshot.nodes.path_of(it) is not None]
        for node_id in found:
            del self._objects[node_id]

    async def delete(self, storage: Storage, cutoff: datetime, *, dry_run: bool) -> Tally:
        """Delete what is left and was written before a time, or count it."""
        tally = Tally()
        chosen = [it for some in self._objects.values() for it in some]
        chosen = [it for it in chosen if is_older(it.last_modified, cutoff)]
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            failures = [] if dry_run else await delete_batch(storage, [it.key for it in part])
            failed = {it.key for it in failures}
            tally.failures += failures
            tally.count += len(part) - len(failed)
            tally.size_bytes += sum(it.size_bytes for it in part if it.key not in failed)
        return tally


async def drop(engine: Engine, superseded: Iterable[StatisticsId]) -> None:
    """Delete statistics that others hold as well.

    Queries that are under way take those that are gone for unknown.
    """
    keys = [statistics_key(it) for it in superseded]
    for start in range(0, len(keys), BATCH):
        await delete_batch(engine.storage, keys[start : start + BATCH])

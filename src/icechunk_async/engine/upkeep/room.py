"""Collection on a full storage: make the room that it needs, and remove what killed writers left.

Dropping snapshots from the history writes two objects, a backup and the repo info. On a full
storage some garbage is deleted before: objects that no snapshot needs which the history lists,
reachable or not. Until the history says that a collection ran, an open session cannot notice that
it lost something to it, so no more is deleted than the two objects need.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import closing
from icechunk_async.engine.upkeep.own_files import spared_in
from icechunk_async.engine.upkeep.survey import Limits, Survey
from icechunk_async.engine.upkeep.sweep import (
    BATCH,
    chunk_ids,
    delete_batch,
    garbage_in,
    id_set,
    is_older,
    pages,
)
from icechunk_async.errors import SnapshotNotFoundError, StorageFullError
from icechunk_async.storage.extensions import Unfinished, UnfinishedWrites

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from icechunk_async.engine.open import Engine
    from icechunk_async.format.id_set import Ids, IdSet
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import ObjectInfo, Storage

__all__ = [
    "count_unfinished",
    "remove_unfinished",
    "trial_objects",
    "with_room",
]

_log = logging.getLogger(__name__)

# A backup and a repo info, with some history in them.
_ROOM_BYTES: Final = 1 << 20
_MORE: Final = 8
"""The factor by which more is deleted if that was not enough."""


async def count_unfinished(engine: Engine) -> Unfinished:
    """Count what writers are writing at this moment, or left when they were killed."""
    backend = engine.assets.backend
    return await backend.unfinished() if isinstance(backend, UnfinishedWrites) else Unfinished()


async def remove_unfinished(engine: Engine, cutoff: datetime, *, dry_run: bool) -> Unfinished:
    """Remove what was left by processes killed before the cutoff; only count it in a dry run.

    Cost: one request, and on a local disk a listing of all folders.
    """
    files, backend = Unfinished(), engine.assets.backend
    if isinstance(backend, UnfinishedWrites):
        files = await backend.unfinished(cutoff, remove=not dry_run)
    trials = await _remove_trials(engine.storage, cutoff, dry_run=dry_run)
    return Unfinished(files.count + trials.count, files.size_bytes + trials.size_bytes)


async def trial_objects(storage: Storage) -> list[ObjectInfo]:
    """Return the objects by which a storage was tried; those of killed processes stay.

    Cost: one request.
    """
    from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

    if not storage.capabilities.listing:
        return []
    return [it async for page in pages(storage, PROBE_PREFIX) for it in page]


async def _remove_trials(storage: Storage, cutoff: datetime, *, dry_run: bool) -> Unfinished:
    """Remove the objects of trials that were stopped before the cutoff, or only count them."""
    old = [it for it in await trial_objects(storage) if is_older(it.last_modified, cutoff)]
    failed: set[str] = set()
    for start in range(0, 0 if dry_run else len(old), BATCH):
        keys = [it.key for it in old[start : start + BATCH]]
        failed |= {it.key for it in await delete_batch(storage, keys)}
    gone = [it.size_bytes for it in old if it.key not in failed]
    return Unfinished(len(gone), sum(gone))


async def with_room[T](engine: Engine, cutoff: datetime, change: Callable[[], Awaitable[T]]) -> T:
    """Make a change of the history; if there is no room for it, delete garbage and try again.

    Args:
        engine: the repository.
        cutoff: what was written at this time or later stays; the storage's clock has passed it.
        change: writes all or nothing.

    Raises:
        StorageFullError: there is no garbage that can be deleted before the change.
    """
    needed = _ROOM_BYTES
    while True:
        try:
            return await change()
        except StorageFullError as error:
            # First what nothing can ever need.
            freed = (await remove_unfinished(engine, cutoff, dry_run=False)).size_bytes
            if freed < needed:
                freed += await _delete_some(engine, cutoff, needed - freed)
            _log.warning("the storage is full; %d bytes of garbage were deleted first", freed)
            if freed == 0:
                error.add_note(
                    "Dropping snapshots from the history needs room for two small objects, and "
                    "there is no garbage that could be deleted before. Make some room."
                )
                raise
            # Each round frees something or raises, so this ends.
            needed *= _MORE


async def _delete_some(engine: Engine, cutoff: datetime, needed: int) -> int:
    """Delete old objects that no listed snapshot needs; return how many bytes they had."""
    chunks = id_set(())

    def absorb(parts: list[Ids]) -> None:
        for part in parts:
            chunks.add(part)

    survey = Survey(engine.assets, chunk_ids, absorb, limits=Limits())
    # Drops nothing and writes nothing: it tells what the history lists.
    listed = await engine.history.release(frozenset(), survey.parent_of, cutoff=None)
    pinned = await _bases(engine, survey, listed.snapshots)
    await survey.cover(listed.snapshots | pinned)
    kept: dict[str, IdSet] = {
        "snapshots": id_set(listed.snapshots | pinned),
        "transactions": id_set(listed.logs | pinned),
        "manifests": id_set(survey.manifests),
        "chunks": chunks,
    }
    freed = 0
    for folder, keep in kept.items():
        found = pages(engine.storage, f"{folder}/")
        async with closing(found):
            async for page in found:
                garbage = garbage_in(page, keep, cutoff)
                for it in garbage:
                    if freed >= needed:
                        return freed
                    # One by one, so that no more goes than is needed.
                    if not await delete_batch(engine.storage, [it.key]):
                        freed += it.size_bytes
    return freed


async def _bases(
    engine: Engine, survey: Survey[Ids], listed: frozenset[SnapshotId]
) -> frozenset[SnapshotId]:
    """Return the bases of live leases that the history lost but whose files are still there."""
    found: set[SnapshotId] = set()
    for base_id in (await spared_in(engine)).bases - listed:
        with suppress(SnapshotNotFoundError):  # another engine collected it
            await survey.parent_of(base_id)
            found.add(base_id)
    return frozenset(found)

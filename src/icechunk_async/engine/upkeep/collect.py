"""Expiration and garbage collection: drop old history, then delete what nothing needs.

Collection does not disturb other writers if the cutoff lies before the beginning of every session
that is still open: what those wrote is younger. Sessions with leases are seen, and the cutoff is
moved to before the oldest of them. What open sessions build on is in the history, or they can
no longer commit. So first what goes is dropped from the history, in one atomic step; then
everything that is still part of it is marked; then the rest is deleted. A commit that lands before
that step is part of the history that is marked. One that comes after it sees that a collection ran,
and refuses if the session wrote something before the cutoff (`engine/commit/guard.py`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import no_progress
from icechunk_async.engine.leases.register import Spared, remove_dead
from icechunk_async.engine.leases.times import storage_time, told_time
from icechunk_async.engine.upkeep.own_files import Doomed, delete_ended, spared_in
from icechunk_async.engine.upkeep.room import remove_unfinished, with_room
from icechunk_async.engine.upkeep.survey import Survey
from icechunk_async.engine.upkeep.sweep import (
    Sweep,
    Tally,
    chunk_ids,
    id_set,
    is_older,
    object_name,
    pages,
)
from icechunk_async.errors import InvalidInputError, SnapshotNotFoundError, StorageFullError
from icechunk_async.format.id_set import parse_ids
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import SUMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.history.protocol import Expiration, Kept, ParentOf
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.survey import Limits
    from icechunk_async.format.id_set import Ids, IdSet
    from icechunk_async.storage import DeleteFailure, Storage
    from icechunk_async.storage.extensions import Unfinished

__all__ = [
    "FOLDERS",
    "MOST_AHEAD",
    "GarbageReport",
    "checked_by_storage",
    "checked_cutoff",
    "collect_garbage",
    "expire_snapshots",
    "old_snapshots",
    "pinned_bases",
    "release",
]

_log = logging.getLogger(__name__)
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_SNAPSHOTS: Final = "snapshots"
_SUMS: Final = SUMS.rstrip("/")
FOLDERS: Final = (_SNAPSHOTS, "transactions", "manifests", "chunks", _SUMS)
"""In the order of deletion: an object is deleted before those that it refers to.
Sums come last: one that cannot be deleted keeps nothing else."""
MOST_AHEAD: Final = timedelta(minutes=5)
"""How far this machine's clock may be ahead. A cutoff that counts back from a clock further ahead
would protect less than it says."""
_COARSENESS: Final = timedelta(seconds=1)
"""Stores truncate times to seconds, and file systems to some milliseconds."""


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The garbage that was deleted, or after a dry run what would have been deleted."""

    bytes_deleted: int = 0
    chunks_deleted: int = 0
    manifests_deleted: int = 0
    snapshots_deleted: int = 0
    attributes_deleted: int = 0
    """Always 0: the format has a place for such files, and no engine writes them."""
    transaction_logs_deleted: int = 0
    sums_deleted: int = 0
    """Checksums of manifests, and lists of digests of snapshots, that were deleted."""
    statistics_deleted: int = 0
    """Objects with statistics of chunks of arrays that are gone."""
    failures: tuple[DeleteFailure, ...] = ()
    """Each object that could not be deleted, with its key and the reason."""
    skipped_phases: tuple[str, ...] = ()
    """Folders that were left to the next run because of the failures."""
    unfinished_deleted: int = 0
    """Files of killed writers on a local disk that never became objects, and objects by which
    killed processes tried the storage."""
    proposal_files_deleted: int = 0
    """Records and pages of proposals that ended before the cutoff."""


async def expire_snapshots(engine: Engine, rule: Expiration, *, dry_run: bool) -> set[SnapshotId]:
    """Drop old snapshots from the history; see `Repository.expire_snapshots`."""
    if rule.older_than_us > clock.now_us():
        raise InvalidInputError(
            "Expiration was asked to drop snapshots older than "
            f"{clock.from_us(rule.older_than_us).isoformat()}, which is in the future: whatever "
            "their age, all but the tips of branches and tags would go. Give an age such as "
            "timedelta(days=90), or a time that is past; the present drops all that there are."
        )
    engine.history.capabilities.require("expiration")
    if not dry_run:
        engine.check_safe()
    with telemetry.span("expire", dry_run=dry_run):
        rule = replace(rule, keep=(await spared_in(engine)).bases)
        released = set(await engine.history.expire(rule, dry_run=dry_run))
    _log.info("%d snapshot(s) expired%s", len(released), " (dry run)" * dry_run)
    return released


def checked_cutoff(moment: datetime) -> datetime:
    """Return the time before which garbage may be deleted, with its zone.

    Raises:
        InvalidInputError: it is in the future.
    """
    if clock.to_us(moment) > clock.now_us():
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {moment.isoformat()}, "
            "which is in the future: it would delete what sessions write at this moment. Name a "
            "time before the beginning of the oldest session that is still open."
        )
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


async def collect_garbage(
    engine: Engine,
    delete_object_older_than: datetime,
    *,
    dry_run: bool,
    limits: Limits,
    progress: ProgressCallback | None = None,
) -> GarbageReport:
    """Delete old objects that nothing needs; see `Repository.garbage_collect`."""
    engine.history.capabilities.require("upkeep")
    cutoff = checked_cutoff(delete_object_older_than)
    if not dry_run:
        engine.check_safe()
    with telemetry.span("garbage_collect", dry_run=dry_run):
        report = await _collect(engine, cutoff, dry_run=dry_run, limits=limits, progress=progress)
    _log.info("garbage collected%s: %s", " (dry run)" * dry_run, report)
    for failure in report.failures:
        _log.warning("%r could not be deleted: %s", failure.key, failure.error)
    return report


async def _collect(
    engine: Engine,
    cutoff: datetime,
    *,
    dry_run: bool,
    limits: Limits,
    progress: ProgressCallback | None,
) -> GarbageReport:
    chunks = id_set(())

    def absorb(parts: list[Ids]) -> None:
        for part in parts:
            chunks.add(part)

    asked = cutoff
    leases, (statistics, (old, newest)) = await gather(
        spared_in(engine), _old_objects(engine.storage, asked)
    )
    cutoff = leases.cutoff(asked)
    if cutoff < asked:  # less is old, because sessions have leases
        statistics, (old, newest) = await _old_objects(engine.storage, cutoff)
    survey = Survey(
        engine.assets, chunk_ids, absorb, limits=limits, note=statistics.spare, progress=progress
    )
    # A base may be unreachable since its branch was reset; the session that stands on it may still
    # flush.
    old -= leases.bases
    # Everything is read before anything changes: a damaged repository stays unchanged.
    kept = await engine.history.release(old, survey.parent_of, cutoff=None)
    await survey.cover(kept.snapshots)
    pinned = await pinned_bases(leases, kept, survey.parent_of)
    await survey.cover(pinned)
    # The survey above read what takes long. From here on it is quick: the shorter the time between
    # the change of the history and the deletions, the fewer commits have to look for their chunks.
    if not dry_run:
        kept, cutoff = await release(engine, cutoff, old, newest, survey.parent_of)
        await survey.cover(kept.snapshots)  # those published meanwhile; later ones are young
    await engine.assets.compute(lambda: len(chunks), size_bytes=chunks.size_bytes)  # sorts them
    keep = (
        id_set(kept.snapshots | pinned),
        id_set(kept.logs | pinned),
        id_set(survey.manifests),
        chunks,
        id_set([*(kept.snapshots | pinned), *survey.manifests]),
    )
    tallies, skipped = await _sweep(engine, cutoff, keep, dry_run=dry_run, progress=progress)
    gone = await statistics.delete(engine.storage, cutoff, dry_run=dry_run)
    if not dry_run:
        await remove_dead(engine.storage, leases, cutoff)
    ended, unfinished = await gather(
        delete_ended(engine.storage, cutoff, dry_run=dry_run),
        remove_unfinished(engine, cutoff, dry_run=dry_run),
    )
    return _report(tallies, gone, ended, unfinished, skipped)


async def _sweep(
    engine: Engine,
    cutoff: datetime,
    keep: tuple[IdSet, ...],
    *,
    dry_run: bool,
    progress: ProgressCallback | None,
) -> tuple[dict[str, Tally], tuple[str, ...]]:
    """Delete what is old and not kept; return what was found in each folder, and folders left out.

    Args:
        engine: an open repository.
        cutoff: what is younger stays.
        keep: the ids in use, for each of `FOLDERS`.
        dry_run: delete nothing.
        progress: is told each step.
    """
    sweep = Sweep(
        engine.storage,
        cutoff,
        dry_run=dry_run,
        side_by_side=engine.assets.blocking is None,  # memory and local disks list without waiting
        folders=engine.assets.backend,
        progress=progress or no_progress,
    )
    tallies = {folder: Tally() for folder in FOLDERS}
    await sweep.look_ahead(FOLDERS)
    for place, folder in enumerate(FOLDERS):
        await sweep.run(folder, keep[place], tallies[folder])
        # What could not be deleted still refers to objects in the later folders, and without those
        # it would look like damage.
        if tallies[folder].failures:
            return tallies, FOLDERS[place + 1 :]
    return tallies, ()


def _report(
    tallies: Mapping[str, Tally],
    statistics: Tally,
    proposals: Tally,
    unfinished: Unfinished,
    skipped: tuple[str, ...],
) -> GarbageReport:
    """Return the report of deletions: by folder, of statistics, proposals and unfinished files."""
    every = (*tallies.values(), statistics, proposals)
    return GarbageReport(
        bytes_deleted=sum(it.size_bytes for it in every) + unfinished.size_bytes,
        chunks_deleted=tallies["chunks"].count,
        manifests_deleted=tallies["manifests"].count,
        snapshots_deleted=tallies[_SNAPSHOTS].count,
        transaction_logs_deleted=tallies["transactions"].count,
        sums_deleted=tallies[_SUMS].count,
        statistics_deleted=statistics.count,
        proposal_files_deleted=proposals.count,
        failures=tuple(failure for it in every for failure in it.failures),
        skipped_phases=skipped,
        unfinished_deleted=unfinished.count,
    )


async def pinned_bases(leases: Spared, kept: Kept, parent_of: ParentOf) -> frozenset[SnapshotId]:
    """Return the bases of live sessions that the history lost but whose files are still there."""
    found: set[SnapshotId] = set()
    for base_id in leases.bases - kept.snapshots:
        try:
            await parent_of(base_id)
        except SnapshotNotFoundError:  # another engine collected it; nothing is left to spare
            continue
        found.add(base_id)
    return frozenset(found)


async def release(
    engine: Engine,
    cutoff: datetime,
    old: frozenset[SnapshotId],
    newest: datetime,
    parent_of: ParentOf,
) -> tuple[Kept, datetime]:
    """Drop unreachable snapshots from the history for good.

    Args:
        engine: the repository.
        cutoff: what was written at this time or later stays.
        old: snapshots whose files are old enough to be deleted.
        newest: when the newest of all snapshots was written, by the storage's clock.
        parent_of: see `ParentOf`.

    Returns:
        What is kept, and the cutoff for deleting the rest: at most the time of the storage's clock
        when the history was changed.

    Raises:
        InvalidInputError: the cutoff is in the future by the storage's clock, or this machine's
            clock is far ahead of it; nothing changed.
        RepositoryReadOnlyError, ConflictError: nothing changed.
    """
    past = await checked_by_storage(engine.storage, engine.assets.backend, cutoff, newest)

    async def drop() -> Kept:
        return await engine.history.release(old, parent_of, cutoff=past)

    kept = await with_room(engine, past, drop)
    for gone in old - kept.snapshots:
        engine.assets.forget_snapshot(gone)
    return kept, past


async def _old_objects(
    storage: Storage, cutoff: datetime
) -> tuple[Doomed, tuple[frozenset[SnapshotId], datetime]]:
    return await gather(Doomed.listed(storage, cutoff), old_snapshots(storage, cutoff))


async def old_snapshots(
    storage: Storage, cutoff: datetime
) -> tuple[frozenset[SnapshotId], datetime]:
    """Return which snapshots are old, and when the newest of all was written."""
    found: set[SnapshotId] = set()
    newest = _LONG_AGO
    async for page in pages(storage, f"{_SNAPSHOTS}/"):
        newest = max(newest, *(it.last_modified for it in page))
        old = [it for it in page if is_older(it.last_modified, cutoff)]
        ids, valid = parse_ids([object_name(it.key) for it in old])
        found.update(SnapshotId(row.tobytes()) for row in ids[valid])
    return frozenset(found), newest


async def checked_by_storage(
    storage: Storage, backend: object, cutoff: datetime, newest: datetime
) -> datetime:
    """Return a cutoff that is past by the storage's clock, so that what is written later is young.

    That is the given one, or the present time of a storage's clock that is a little behind.

    Args:
        storage: whose clock counts.
        backend: the storage without its policies, which may be able to tell the time.
        cutoff: the time before which objects are to be deleted.
        newest: when the newest object that is known was written. If the cutoff is before that, a
            storage that cannot simply tell the time is not asked.

    Raises:
        InvalidInputError: one of the two clocks is wrong; it says which times they show.
        StorageFullError: there is no room to ask for the time; it names a cutoff that needs none.

    Cost: none if the backend tells the time, else at most three requests: an empty object is
    written, listed and deleted.

    Cancellation: waits some seconds for the deletion. An object that stays is not part of the
    repository and does no harm.
    """
    now = await told_time(backend)
    if now is None:
        # Something younger than the cutoff is there, so the cutoff is past by the storage's own
        # clock.
        if cutoff < newest:
            return cutoff
        now = await _tried(storage, newest)
    here = clock.from_us(clock.now_us())
    if cutoff >= now + _COARSENESS:
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {cutoff.isoformat()}, "
            f"and by the clock of the storage it is only {now.isoformat()}: objects that are "
            "written at this moment would count as old. Set this machine's clock right, or "
            "name an earlier time."
        )
    # The cutoff itself is past. But if it was counted back from this machine's clock, it is as much
    # too late as the clock is ahead.
    if here > now + MOST_AHEAD:
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {cutoff.isoformat()}. By "
            f"this machine's clock it is {here.isoformat()}, and by the clock of the storage only "
            f"{now.isoformat()}: a time that was counted back from the former is later than it "
            "should be, so work in progress could be deleted. Set the wrong one of the two clocks "
            "right, or collect from a machine whose clock agrees with the storage's."
        )
    # Of whole seconds the rest is unknown, and `is_older` takes that into account.
    return cutoff if now.microsecond == 0 else min(cutoff, now)


async def _tried(storage: Storage, newest: datetime) -> datetime:
    """Return the time of an empty object that is written now."""
    try:
        return await storage_time(storage)
    except StorageFullError as error:
        raise StorageFullError(
            "The storage has no room for the empty object by which its clock is read, so nothing "
            f"was collected. Name a cutoff before {newest.isoformat()}, when the newest snapshot "
            "was written: that needs no reading of the clock. Or make room."
        ) from error

"""Garbage collection as a Spark job: the driver decides, tasks read, list and delete.

The order is that of one process, and it is what makes it safe:

1. Read everything that is kept, before anything changes.
2. Release the rest in one atomic step: no reader can find it any more.
3. Read what was committed in between.
4. Only then list objects. The driver holds the list of keys to delete.

Nothing that is garbage by then can be needed again, so a task that runs twice does no harm.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.protocol import Kept
from icechunk_async.engine.leases.register import Spared, remove_dead
from icechunk_async.engine.upkeep.collect import (
    FOLDERS,
    GarbageReport,
    checked_cutoff,
    old_snapshots,
    pinned_bases,
    release,
)
from icechunk_async.engine.upkeep.own_files import Doomed, delete_ended, spared_in
from icechunk_async.engine.upkeep.room import remove_unfinished
from icechunk_async.engine.upkeep.survey import Limits, Survey
from icechunk_async.engine.upkeep.sweep import (
    BATCH,
    Tally,
    chunk_ids,
    delete_batch,
    garbage_in,
    id_set,
    pages,
)
from icechunk_async.errors import StorageError
from icechunk_async.format.id_set import IdSet
from icechunk_async.format.ids import ALPHABET
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import (
    columns_of,
    default_tasks,
    in_rounds,
    reported,
    run_job,
    shares,
)
from icechunk_async.storage import DeleteFailure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.storage.extensions import Unfinished
    from icechunk_async.sync import Repository

__all__ = ["garbage_collect"]

_MARKS: Final = "chunks binary"
_FOUND: Final = "key string, size_bytes long, modified_us long"
_FAILED: Final = "key string, reason string"
_KEYS_PER_TASK: Final = 10 * BATCH
_REPORT: Final = pa.schema(
    [
        ("folder", pa.string()),
        ("key", pa.string()),
        ("size_bytes", pa.int64()),
        ("last_modified", pa.timestamp("us", tz="UTC")),
        ("deleted", pa.bool_()),
        ("reason", pa.string()),
    ]
)


def garbage_collect(
    spark: SparkSession,
    repository: Repository | str,
    delete_object_older_than: datetime,
    *,
    dry_run: bool = False,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[GarbageReport]:
    """Delete the objects that are not reachable from any branch or tag.

    Does the same as `Repository.garbage_collect`, under the same rules: choose a time before the
    start of every session that is still open anywhere, jobs included. With format version 1,
    nobody may create or reset branches and tags at the same time. The table has a row for each
    garbage object: `folder`, `key`, `size_bytes`, `last_modified`, whether it was `deleted`, and
    otherwise the `reason`.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, or its URL.
        delete_object_older_than: keep objects written at this time or later, by the clock of the
            storage; not in the future.
        dry_run: change nothing, and report what would be deleted.
        tasks: number of tasks that read manifests; by default four for each core.
        progress: called with the number of finished tasks of each step, from a thread.

    Raises:
        InvalidInputError: the time is in the future. Nothing was deleted.
        RepositoryReadOnlyError, UnsafeStorageError: the repository or its storage does not allow
            it. Nothing was deleted.
        FormatError, SnapshotNotFoundError: a snapshot is damaged or missing. Nothing was deleted.
        ConflictError: each attempt to write the repository's history lost a race. Nothing was
            deleted.
        PySparkException: a task failed too often. If it was reading, for example a damaged
            manifest, nothing was deleted; if it was deleting, only garbage was, and calling again
            finishes the work.

    Cost: that of one process, divided. Memory of the driver: 12 bytes for each chunk in use, and
    a key for each garbage object.
    """
    cutoff = checked_cutoff(delete_object_older_than)
    shared = SharedRepository.of(repository)
    collection = _Collection(spark, shared, cutoff, dry_run, tasks, progress)
    if not dry_run:
        shared.ask(_checked)
    kept = collection.decide()
    plan = collection.list_garbage(kept)
    return collection.delete(plan)


async def _checked(repository: AsyncRepository) -> None:
    repository.engine.check_safe()


@dataclass(frozen=True, slots=True)
class _Begun:
    """The state of the repository at the start of a collection."""

    old: frozenset[SnapshotId]
    newest: datetime
    kept: Kept
    manifests: list[tuple[ManifestId, int]]


@dataclass
class _Collection:
    """One collection, on the driver."""

    spark: SparkSession
    shared: SharedRepository
    cutoff: datetime
    dry_run: bool
    tasks: int | None
    progress: ProgressCallback | None
    leases: Spared = field(default_factory=Spared)
    chunks: IdSet = field(default_factory=IdSet)
    manifests: set[ManifestId] = field(default_factory=set["ManifestId"])
    statistics: Doomed = field(default_factory=lambda: Doomed({}))

    def decide(self) -> Kept:
        """Find what must be kept, and release the rest unless this is a dry run."""
        survey: Survey[None] | None = None

        async def begin(native: AsyncRepository) -> _Begun:
            nonlocal survey
            opened = native.engine
            # Leases first: a live session holds the cutoff back, and all that follows goes by that.
            self.leases = await spared_in(opened)
            self.cutoff = self.leases.cutoff(self.cutoff)
            self.statistics = await Doomed.listed(opened.storage, self.cutoff)
            survey = Survey(
                opened.assets,
                lambda _: None,
                lambda _: None,
                limits=Limits(),
                note=self.statistics.spare,
            )
            old, newest = await old_snapshots(opened.storage, self.cutoff)
            old -= self.leases.bases
            kept = await opened.history.release(old, survey.parent_of, cutoff=None)
            pinned = await pinned_bases(self.leases, kept, survey.parent_of)
            kept = Kept(kept.snapshots | pinned, kept.logs | pinned)
            return _Begun(old, newest, kept, await survey.discover(kept.snapshots))

        begun = self.shared.ask(begin)
        self._mark(begun.manifests)
        if self.dry_run:
            return begun.kept

        async def settle(native: AsyncRepository) -> tuple[Kept, list[tuple[ManifestId, int]]]:
            assert survey is not None  # made by begin
            settled, self.cutoff = await release(
                native.engine, self.cutoff, begun.old, begun.newest, survey.parent_of
            )
            pinned = self.leases.bases & begun.kept.snapshots
            settled = Kept(settled.snapshots | pinned, settled.logs | pinned)
            return settled, await survey.discover(settled.snapshots)

        kept, more = self.shared.ask(settle)
        self._mark(more)  # committed in between; later commits cannot need released objects
        return kept

    def _mark(self, manifests: list[tuple[ManifestId, int]]) -> None:
        """Mark the chunk objects that some manifests refer to.

        The 12 bytes of an id are random, so no manifest is smaller than the ids that are in it.
        """
        self.manifests.update(it for it, _ in manifests)
        for some in in_rounds(self.spark, manifests):
            count = self.tasks or default_tasks(self.spark, len(some))
            table = self._job(shares(some, count), _marks, _MARKS, "reading manifests")
            for data in table.column("chunks").to_pylist():
                self.chunks.add(np.frombuffer(data, np.uint8).reshape(-1, 12))

    def list_garbage(self, kept: Kept) -> pa.Table:
        """Return all garbage objects. The set of kept objects must be final."""
        keep = dict(
            zip(
                FOLDERS,
                (
                    id_set(kept.snapshots).ids(),
                    id_set(kept.logs).ids(),
                    id_set(self.manifests).ids(),
                    self.chunks.ids(),
                    id_set([*kept.snapshots, *self.manifests]).ids(),
                ),
                strict=True,
            )
        )
        whole = self.shared.lists_whole_folders()
        parts: list[_Listing] = []
        for folder, ids in keep.items():
            # Snapshots and logs are few beside these.
            large = folder in ("manifests", "chunks") and not whole
            for letter in range(len(ALPHABET)) if large else (None,):
                prefix = f"{folder}/" if letter is None else f"{folder}/{ALPHABET[letter]}"
                # The first letter of an id is its first five bits (base 32).
                mine = ids if letter is None else ids[ids[:, 0] >> 3 == letter]
                parts.append(_Listing(prefix, self.cutoff, mine.tobytes()))
        return self._job(parts, _list, _FOUND, "listing objects")

    def delete(self, plan: pa.Table) -> JobReport[GarbageReport]:
        """Delete the planned objects, referring ones before those referred to, and report."""
        keys: list[str] = plan.column("key").to_pylist()
        folders = np.array([key.partition("/")[0] for key in keys], object)
        reasons: dict[str, str] = {}
        skipped: tuple[str, ...] = ()
        for place, folder in enumerate(FOLDERS):
            mine = [keys[row] for row in np.flatnonzero(folders == folder).tolist()]
            failed = {} if self.dry_run else self._delete(mine, folder)
            reasons.update(failed)
            if failed:
                # What could not be deleted still refers to objects in later folders, and would look
                # like damage without them.
                skipped = FOLDERS[place + 1 :]
                break
        statistics = self.shared.ask(self._delete_statistics)
        if not self.dry_run:
            self.shared.ask(lambda it: remove_dead(it.engine.storage, self.leases, self.cutoff))
        ended = self.shared.ask(
            lambda it: delete_ended(it.engine.storage, self.cutoff, dry_run=self.dry_run)
        )
        left: dict[str, str] = dict.fromkeys(
            skipped, "Not tried, since objects that refer to it could not be deleted."
        )
        rows = [reasons.get(key) or left.get(key.partition("/")[0]) for key in keys]
        sizes: list[int] = plan.column("size_bytes").to_pylist()
        gone = np.array([reason is None for reason in rows], bool)
        counts = {it: int(np.count_nonzero(gone & (folders == it))) for it in FOLDERS}
        unfinished = self.shared.ask(self._remove_unfinished)
        result = GarbageReport(
            bytes_deleted=int(np.array(sizes, np.int64)[gone].sum())
            + unfinished.size_bytes
            + statistics.size_bytes
            + ended.size_bytes,
            chunks_deleted=counts["chunks"],
            manifests_deleted=counts["manifests"],
            snapshots_deleted=counts["snapshots"],
            transaction_logs_deleted=counts["transactions"],
            sums_deleted=counts["sums"],
            statistics_deleted=statistics.count,
            proposal_files_deleted=ended.count,
            failures=(
                *(DeleteFailure(key, StorageError(reason)) for key, reason in reasons.items()),
                *statistics.failures,
                *ended.failures,
            ),
            skipped_phases=skipped,
            unfinished_deleted=unfinished.count,
        )
        columns = {
            "folder": folders.tolist(),
            "key": keys,
            "size_bytes": sizes,
            "last_modified": [clock.from_us(it) for it in plan.column("modified_us").to_pylist()],
            "deleted": (gone & (not self.dry_run)).tolist(),
            "reason": rows,
        }
        batch = pa.RecordBatch.from_pydict(columns, _REPORT)
        return reported(self.spark, result, pa.Table.from_batches([batch], _REPORT))

    async def _delete_statistics(self, repository: AsyncRepository) -> Tally:
        storage = repository.engine.storage
        return await self.statistics.delete(storage, self.cutoff, dry_run=self.dry_run)

    async def _remove_unfinished(self, repository: AsyncRepository) -> Unfinished:
        return await remove_unfinished(repository.engine, self.cutoff, dry_run=self.dry_run)

    def _delete(self, keys: list[str], folder: str) -> dict[str, str]:
        """Delete objects of one folder, a few without a job; return reasons for those left."""
        parts = [
            tuple(keys[start : start + _KEYS_PER_TASK])
            for start in range(0, len(keys), _KEYS_PER_TASK)
        ]
        # A job takes Spark a fifth of a second and more before it does anything; this is one
        # request.
        if len(keys) <= BATCH:
            done = self.shared.ask(lambda it: _delete(it, keys))
            return dict(zip(done["key"], done["reason"], strict=True))
        table = self._job(parts, _delete, _FAILED, f"deleting {folder}")
        columns = (table.column(it).to_pylist() for it in ("key", "reason"))
        return dict(zip(*columns, strict=True))

    def _job(self, parts: Sequence[Any], work: Any, columns: str, phase: str) -> pa.Table:
        return run_job(
            self.spark, self.shared, parts, work, columns, phase=phase, progress=self.progress
        )


async def _marks(
    repository: AsyncRepository, manifests: Sequence[tuple[ManifestId, int]]
) -> Mapping[str, Sequence[Any]]:
    """Return the ids of chunk objects that manifests refer to."""
    opened = repository.engine
    found = IdSet()

    def absorb(parts: list[Ids]) -> None:
        for part in parts:
            found.add(part)

    survey = Survey(opened.assets, chunk_ids, absorb, limits=Limits(manifests=8))
    await survey.read(manifests)
    return columns_of(_MARKS, [(found.ids().tobytes(),)])


@dataclass(frozen=True, slots=True)
class _Listing:
    """A prefix of a folder, and the ids to keep there."""

    prefix: str
    cutoff: datetime
    keep: bytes


async def _list(repository: AsyncRepository, part: _Listing) -> Mapping[str, Sequence[Any]]:
    """Return the garbage objects below a prefix."""
    keep = IdSet()
    keep.add(np.frombuffer(part.keep, np.uint8).reshape(-1, 12))
    rows: list[tuple[Any, ...]] = []
    async for page in pages(repository.engine.storage, part.prefix):
        rows += [
            (it.key, it.size_bytes, clock.to_us(it.last_modified))
            for it in garbage_in(page, keep, part.cutoff)
        ]
    return columns_of(_FOUND, rows)


async def _delete(repository: AsyncRepository, keys: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    """Delete objects; return those that could not be deleted."""
    storage = repository.engine.storage
    failures: list[DeleteFailure] = []
    for start in range(0, len(keys), BATCH):
        failures += await delete_batch(storage, list(keys[start : start + BATCH]))
    return columns_of(_FAILED, [(it.key, str(it.error)) for it in failures])

"""Garbage collection: one driver decides what goes, tasks read, list and delete.

The order is that of one process. All that is kept is read before anything changes; then what goes
becomes unknown, in one atomic step; then what came meanwhile is read. Only after that are objects
listed, and the driver holds the plan of what is deleted: tasks delete the keys that they are told,
and nothing that was garbage then can be needed again, so it does no harm where a task runs twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async._runtime import clock
from icechunk_async.engine.open import check_safe
from icechunk_async.engine.upkeep.collect import FOLDERS, GarbageReport, old_snapshots, release
from icechunk_async.engine.upkeep.survey import Limits, Survey
from icechunk_async.engine.upkeep.sweep import (
    BATCH,
    chunk_ids,
    delete_batch,
    garbage_in,
    id_set,
    pages,
)
from icechunk_async.errors import StorageError
from icechunk_async.format.id_set import IdSet
from icechunk_async.format.ids import ALPHABET
from icechunk_async.repository import checked_cutoff
from icechunk_async.spark.jobs.job import (
    Shipped,
    columns_of,
    default_tasks,
    opened_of,
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
    from icechunk_async.engine.history.protocol import Kept
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.jobs.job import JobReport
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
    """Delete the objects that no branch and no tag leads to.

    Does what ``Repository.garbage_collect`` does, under the same rules: choose a time before the
    beginning of every session that is still open anywhere, jobs included; with format version 1
    nobody must create or reset branches and tags meanwhile. The report has a row for each object
    of garbage: ``folder``, ``key``, ``size_bytes``, ``last_modified``, whether it was ``deleted``,
    and for what reason not.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open one, or its URL.
        delete_object_older_than: spare what was written at this time or later, by the storage's
            clock; not in the future.
        dry_run: change nothing, and report what would be deleted.
        tasks: into how many to divide the reading of manifests; by default four for each core.
        progress: told how many tasks of each step are done; called from a thread.

    Raises:
        InvalidInputError: the time is in the future; nothing was deleted.
        RepositoryReadOnlyError, UnsafeStorageError: likewise.
        FormatError, SnapshotNotFoundError: a snapshot is damaged or missing; nothing was deleted.
            Of a manifest the exception of Spark's says so, and likewise.
        ConflictError: the repository changed each time that its history was to be written;
            nothing was deleted.
        PySparkException: a task failed too often: part of the garbage may be deleted, and
            nothing else is. Calling again finishes the work.

    Cost: as in one process, divided. Memory of the driver: 12 bytes for each chunk in use, and a
    key for each object of garbage.
    """
    cutoff = checked_cutoff(delete_object_older_than)
    shipped = Shipped(repository)
    collection = _Collection(spark, shipped, cutoff, dry_run, tasks, progress)
    if not dry_run:
        shipped.ask(_checked)
    kept = collection.decide()
    plan = collection.list_garbage(kept)
    return collection.delete(plan)


async def _checked(repository: AsyncRepository) -> None:
    check_safe(opened_of(repository).storage)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a collection begins with."""

    old: frozenset[SnapshotId]
    newest: datetime
    kept: Kept
    manifests: list[tuple[ManifestId, int]]


@dataclass
class _Collection:
    """One collection on the driver."""

    spark: SparkSession
    shipped: Shipped
    cutoff: datetime
    dry_run: bool
    tasks: int | None
    progress: ProgressCallback | None
    chunks: IdSet = field(default_factory=IdSet)
    manifests: set[ManifestId] = field(default_factory=set["ManifestId"])

    def decide(self) -> Kept:
        """Find out what must be kept, and make the rest unknown unless only counting."""
        survey: Survey[None] | None = None

        async def begin(native: AsyncRepository) -> _Begun:
            nonlocal survey
            opened = opened_of(native)
            survey = Survey(opened.assets, lambda _: None, lambda _: None, limits=Limits())
            old, newest = await old_snapshots(opened.storage, self.cutoff)
            kept = await opened.history.release(old, survey.parent_of, dry_run=True)
            return _Begun(old, newest, kept, await survey.discover(kept.snapshots))

        begun = self.shipped.ask(begin)
        self._mark(begun.manifests)
        if self.dry_run:
            return begun.kept

        async def settle(native: AsyncRepository) -> tuple[Kept, list[tuple[ManifestId, int]]]:
            assert survey is not None  # see above
            settled = await release(
                opened_of(native), self.cutoff, begun.old, begun.newest, survey.parent_of
            )
            return settled, await survey.discover(settled.snapshots)

        kept, more = self.shipped.ask(settle)
        self._mark(more)  # what came meanwhile: the last that can matter
        return kept

    def _mark(self, manifests: list[tuple[ManifestId, int]]) -> None:
        """Note which chunk objects some manifests refer to."""
        self.manifests.update(it for it, _ in manifests)
        count = self.tasks or default_tasks(self.spark, len(manifests))
        table = self._job(shares(manifests, count), _marks, _MARKS, "reading manifests")
        for data in table.column("chunks").to_pylist():
            self.chunks.add(np.frombuffer(data, np.uint8).reshape(-1, 12))

    def list_garbage(self, kept: Kept) -> pa.Table:
        """Return all garbage. It is listed once nothing can be added to what is kept."""
        keep = dict(
            zip(
                FOLDERS,
                (
                    id_set(kept.snapshots).ids(),
                    id_set(kept.logs).ids(),
                    id_set(self.manifests).ids(),
                    self.chunks.ids(),
                ),
                strict=True,
            )
        )
        # Each listing of a local directory looks at all of it.
        whole = self.shipped.ask(_lists_whole_folders)
        parts: list[_Listing] = []
        for folder, ids in keep.items():
            large = folder in ("manifests", "chunks") and not whole
            for letter in range(len(ALPHABET)) if large else (None,):
                prefix = f"{folder}/" if letter is None else f"{folder}/{ALPHABET[letter]}"
                mine = ids if letter is None else ids[ids[:, 0] >> 3 == letter]
                parts.append(_Listing(prefix, self.cutoff, mine.tobytes()))
        return self._job(parts, _list, _FOUND, "listing objects")

    def delete(self, plan: pa.Table) -> JobReport[GarbageReport]:
        """Delete what is planned, what refers to others first; report on it."""
        keys: list[str] = plan.column("key").to_pylist()
        folders = np.array([key.partition("/")[0] for key in keys], object)
        reasons: dict[str, str] = {}
        skipped: tuple[str, ...] = ()
        for place, folder in enumerate(FOLDERS):
            mine = [keys[row] for row in np.flatnonzero(folders == folder).tolist()]
            failed = {} if self.dry_run else self._delete(mine, folder)
            reasons.update(failed)
            if failed:
                skipped = FOLDERS[place + 1 :]
                break
        left: dict[str, str] = dict.fromkeys(
            skipped, "Left alone, since others could not be deleted."
        )
        rows = [reasons.get(key) or left.get(key.partition("/")[0]) for key in keys]
        sizes: list[int] = plan.column("size_bytes").to_pylist()
        gone = np.array([reason is None for reason in rows], bool)
        counts = {it: int(np.count_nonzero(gone & (folders == it))) for it in FOLDERS}
        result = GarbageReport(
            bytes_deleted=int(np.array(sizes, np.int64)[gone].sum()),
            chunks_deleted=counts["chunks"],
            manifests_deleted=counts["manifests"],
            snapshots_deleted=counts["snapshots"],
            transaction_logs_deleted=counts["transactions"],
            failures=tuple(
                DeleteFailure(key, StorageError(reason)) for key, reason in reasons.items()
            ),
            skipped_phases=skipped,
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

    def _delete(self, keys: list[str], folder: str) -> dict[str, str]:
        """Delete objects of one folder, few by the driver itself; answer why some are left."""
        parts = [
            tuple(keys[start : start + _KEYS_PER_TASK])
            for start in range(0, len(keys), _KEYS_PER_TASK)
        ]
        if len(keys) <= BATCH:
            done = self.shipped.ask(lambda it: _delete(it, keys))
            return dict(zip(done["key"], done["reason"], strict=True))
        table = self._job(parts, _delete, _FAILED, f"deleting {folder}")
        columns = (table.column(it).to_pylist() for it in ("key", "reason"))
        return dict(zip(*columns, strict=True))

    def _job(self, parts: Sequence[Any], work: Any, columns: str, phase: str) -> pa.Table:
        return run_job(
            self.spark, self.shipped, parts, work, columns, phase=phase, progress=self.progress
        )


async def _lists_whole_folders(repository: AsyncRepository) -> bool:
    return opened_of(repository).assets.direct is not None


async def _marks(
    repository: AsyncRepository, manifests: Sequence[tuple[ManifestId, int]]
) -> Mapping[str, Sequence[Any]]:
    """Return the chunk objects that manifests refer to, each once."""
    opened = opened_of(repository)
    found = IdSet()

    def absorb(parts: list[Ids]) -> None:
        for part in parts:
            found.add(part)

    survey = Survey(opened.assets, chunk_ids, absorb, limits=Limits(manifests=8))
    await survey.read(manifests)
    return columns_of(_MARKS, [(found.ids().tobytes(),)])


@dataclass(frozen=True, slots=True)
class _Listing:
    """A part of a folder, and what is kept of it."""

    prefix: str
    cutoff: datetime
    keep: bytes


async def _list(repository: AsyncRepository, part: _Listing) -> Mapping[str, Sequence[Any]]:
    """Return the garbage of a part of a folder."""
    keep = IdSet()
    keep.add(np.frombuffer(part.keep, np.uint8).reshape(-1, 12))
    rows: list[tuple[Any, ...]] = []
    async for page in pages(opened_of(repository).storage, part.prefix):
        rows += [
            (it.key, it.size_bytes, clock.to_us(it.last_modified))
            for it in garbage_in(page, keep, part.cutoff)
        ]
    return columns_of(_FOUND, rows)


async def _delete(repository: AsyncRepository, keys: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    """Delete objects; answer those that could not be."""
    storage = opened_of(repository).storage
    failures: list[DeleteFailure] = []
    for start in range(0, len(keys), BATCH):
        failures += await delete_batch(storage, list(keys[start : start + BATCH]))
    return columns_of(_FAILED, [(it.key, str(it.error)) for it in failures])

"""Storage statistics and rewriting of manifests, divided over tasks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.flush import Flusher
from icechunk_async.engine.upkeep.rewrite import (
    begin_rewriting,
    nothing_published,
    publish_rewritten,
)
from icechunk_async.engine.upkeep.statistics import ChunkTally, contribution
from icechunk_async.engine.upkeep.survey import Limits, Survey
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import (
    columns_of,
    default_tasks,
    reported,
    run_job,
    shares,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.changes.splitting import CellPlan
    from icechunk_async.engine.commit.flush import Written
    from icechunk_async.engine.upkeep.statistics import ChunkPart, ChunkStorageStats
    from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.sync import Repository

__all__ = ["discover_manifests", "rewrite_manifests", "storage_statistics"]

# Enough that starting a task is small beside it, and few enough that one that fails has not much to
# do again.
_CELLS_PER_TASK: Final = 64
_MANIFESTS_AT_ONCE: Final = 4
_STATISTICS: Final = (
    "manifest_id string, size_bytes long, references long, native_bytes long, "
    "virtual_bytes long, inlined_bytes long, part binary"
)
_REWRITTEN: Final = (
    "array string, manifest_id string, size_bytes long, references long, written binary"
)


async def discover_manifests(
    repository: AsyncRepository, progress: ProgressCallback | None = None
) -> list[tuple[ManifestId, int]]:
    """Return the manifests reachable from branches and tags, with their sizes.

    Cost: reads every snapshot.
    """
    opened = repository.engine
    survey: Survey[None] = Survey(
        opened.assets, lambda _: None, lambda _: None, limits=Limits(), progress=progress
    )
    return await survey.discover(await opened.history.reachable(survey.parent_of))


def storage_statistics(
    spark: SparkSession,
    repository: Repository | str,
    *,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[ChunkStorageStats]:
    """Count the bytes of all chunks reachable from branches and tags, in every snapshot.

    The result is that of `Repository.chunk_storage_stats`. The table has a row for each manifest:
    its `size_bytes`, `references`, and the bytes of the chunks that it refers to. Chunks that
    several manifests refer to are in the row of each, and count once in the result.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, or its URL.
        tasks: number of tasks; by default four for each core.
        progress: called with the number of finished tasks, from a thread.

    Raises:
        FormatError, SnapshotNotFoundError: a snapshot is damaged or missing.
        PySparkException: a task failed too often.

    Cost: the driver reads every snapshot, tasks every manifest. Memory of the driver: 32 bytes
    for each distinct byte range of chunks.
    """
    shared = SharedRepository.of(repository)
    manifests = shared.ask(lambda it: discover_manifests(it, progress))
    parts = shares(manifests, tasks or default_tasks(spark, len(manifests)))
    table = run_job(
        spark,
        shared,
        parts,
        _contributions,
        _STATISTICS,
        phase="reading manifests",
        progress=progress,
    )
    tally = ChunkTally()
    for batch in table.column("part").to_pylist():
        part: ChunkPart = pickle.loads(batch)  # noqa: S301 -- our own tasks'
        # Byte ranges, not sums: chunks that several manifests share are joined here, and count
        # once.
        tally.absorb([part])
    return reported(spark, tally.stats(), table, "part")


async def _contributions(
    repository: AsyncRepository, manifests: Sequence[tuple[ManifestId, int]]
) -> Mapping[str, Sequence[Any]]:
    """Return the contribution of each manifest; a few are in memory at a time."""
    assets = repository.engine.assets

    async def row(entry: tuple[ManifestId, int]) -> tuple[Any, ...]:
        manifest_id, size_bytes = entry
        manifest = await assets.manifests.read(manifest_id, size_bytes)
        part = contribution(manifest)
        sizes = [int((it.stops - it.starts).sum()) for it in (part.native, part.virtual)]
        shown = (str(manifest_id), size_bytes, len(manifest), *sizes, part.inlined_bytes)
        return (*shown, pickle.dumps(part, protocol=5))

    rows = await bounded_map(row, manifests, limit=_MANIFESTS_AT_ONCE)
    return columns_of(_STATISTICS, rows)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Some of the new manifests of an array."""

    snapshot_id: SnapshotId
    path: str
    cells: Sequence[CellPlan]
    """Planned by the driver: a plan may need every manifest of the array."""


def rewrite_manifests(
    spark: SparkSession,
    repository: Repository | str,
    message: str,
    *,
    branch: str = "main",
    metadata: Mapping[str, JSON] | None = None,
    commit_method: Literal["new_commit", "amend"] = "new_commit",
    manifests_per_task: int = _CELLS_PER_TASK,
    progress: ProgressCallback | None = None,
) -> JobReport[SnapshotId]:
    """Rewrite all manifests of a branch's tip, split as the current configuration says.

    Does the same as `Repository.rewrite_manifests`: tasks write the manifests, the driver
    commits. The table has a row for each new manifest.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository with the configuration to split by, or its URL.
        message: message of the commit.
        branch: the branch whose tip is rewritten.
        metadata: properties of the commit.
        commit_method: add a commit on top of the tip, or amend the tip.
        manifests_per_task: the most new manifests that one task writes.
        progress: called with the number of finished tasks, from a thread.

    Raises:
        BranchNotFoundError, RepositoryReadOnlyError, UnsupportedBySpecError, SessionStateError: as
            for `Repository.rewrite_manifests`. Nothing was published.
        ConflictError: another writer committed in between. Nothing was published; try again.
        PySparkException: a task failed too often. Nothing was published.

    Manifests that tasks stored before a failure, or twice, are garbage.

    Cost: the driver reads the tip's snapshot, and the manifests of arrays whose references may be
    in more than 4096 new manifests; tasks read every manifest, each those that its own come from.
    """
    shared = SharedRepository.of(repository)
    # The tip is looked up once. `publish_rewritten` refuses if it has moved.
    begun = shared.ask(lambda it: begin_rewriting(it.engine, branch, commit_method))
    arrays = {node.path: node for node in begun.base.nodes.values() if node.array is not None}

    async def plan(native: AsyncRepository) -> list[tuple[str, list[CellPlan]]]:
        flusher = _flusher(native)
        return [(path, await flusher.cells(node, begun.base)) for path, node in arrays.items()]

    parts = [
        _Cells(begun.base.id, path, cells[start : start + manifests_per_task])
        for path, cells in shared.ask(plan)
        for start in range(0, len(cells), manifests_per_task)
    ]
    table = run_job(
        spark,
        shared,
        parts,
        _rewrite,
        _REWRITTEN,
        phase="rewriting manifests",
        progress=progress,
    )
    written: dict[NodeId, list[Written]] = {}
    for path, data in zip(
        *(table.column(it).to_pylist() for it in ("array", "written")), strict=True
    ):
        if data is not None:
            written.setdefault(arrays[path].id, []).append(pickle.loads(data))  # noqa: S301

    async def publish(native: AsyncRepository) -> SnapshotId:
        flushed = _flusher(native).rewritten(begun.base, written)
        properties = {**native.default_commit_metadata, **(metadata or {})}
        return await publish_rewritten(native.engine, begun, flushed, message, properties)

    return reported(spark, shared.ask(publish), table, "written")


def _flusher(repository: AsyncRepository) -> Flusher:
    opened = repository.engine
    return Flusher(opened.assets, opened.manifest_options)


async def _rewrite(repository: AsyncRepository, cells: _Cells) -> Mapping[str, Sequence[Any]]:
    """Write some new manifests; the first row also has the references to all of them."""
    base = await repository.engine.assets.snapshot(cells.snapshot_id)
    node = base.nodes[cells.path]
    # Errors of the engine say here that nothing was published, as they would in one process.
    with nothing_published():
        made = await _flusher(repository).rewrite_cells(node, base, cells.cells)
    rows: list[tuple[Any, ...]] = [
        (cells.path, str(it.id), it.size_bytes, it.num_chunk_refs, None)
        for it in made.files.values()
    ]
    if rows:
        # Once for all manifests of the task, in its first row.
        rows[0] = (*rows[0][:-1], pickle.dumps(made, protocol=5))
    return columns_of(_REWRITTEN, rows)

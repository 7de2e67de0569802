"""Check that every object that a repository needs exists, divided over tasks."""

from __future__ import annotations

import pickle
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async.engine.upkeep.check import (
    BrokenReference,
    NeededChunks,
    NeededObjects,
    ReferenceReport,
    broken_chunks,
    broken_virtual,
    needed_of,
    report_of,
    survey_history,
)
from icechunk_async.format.ids import ALPHABET
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

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.upkeep.check import VirtualObject
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.sync import Repository

__all__ = ["check_references"]

_NEEDED: Final = "needed binary, broken binary"
_BROKEN: Final = "broken binary, unauthorized long"
_REPORT: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("location", pa.string()),
        ("problem", pa.string()),
        ("detail", pa.string()),
        ("references", pa.int64()),
    ]
)


def check_references(
    spark: SparkSession,
    repository: Repository | str,
    *,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[ReferenceReport]:
    """Check that every object reachable from branches and tags exists and is long enough.

    The result is that of `Repository.check_references`. The table has a row for each object with
    a problem: its `kind`, `location`, `problem` and `detail`, and how many chunks refer to it
    (`references`).

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, authorised to read the containers of virtual chunks to
            check, or its URL.
        tasks: number of tasks of each step; by default four for each core.
        progress: called with the number of finished tasks of each step, from a thread.

    Raises:
        PySparkException: a task failed too often.

    Cost: that of one process, divided; the driver reads every snapshot. Memory of the driver:
    about 40 bytes for each chunk object in use.
    """
    shared = SharedRepository.of(repository)
    history = shared.ask(lambda it: survey_history(it.engine))
    count = tasks or default_tasks(spark, len(history.manifests))
    table = run_job(
        spark,
        shared,
        shares(history.manifests, count),
        _read,
        _NEEDED,
        phase="reading manifests",
        progress=progress,
    )
    needed = NeededObjects.joined(_loaded(table, "needed"))
    broken = [*history.broken, *(it for some in _loaded(table, "broken") for it in some)]
    whole = shared.ask(_lists_whole_folders)
    virtual = sorted(needed.virtual.items(), key=lambda it: it[0][0])
    parts: list[_Chunks | _Virtual] = [
        *_chunk_parts(needed.chunks, whole=whole),
        *(_Virtual(dict(it)) for it in shares(virtual, default_tasks(spark, len(virtual)))),
    ]
    table = run_job(
        spark, shared, parts, _look, _BROKEN, phase="looking for objects", progress=progress
    )
    found = [it for some in _loaded(table, "broken") for it in some]
    found.sort(key=lambda it: (it.kind, it.location))
    unauthorized = sum(table.column("unauthorized").to_pylist())
    result = report_of(history, needed, [*broken, *found], unauthorized)
    rows = [astuple(it) for it in result.broken]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(_REPORT.names)}
    batch = pa.RecordBatch.from_pydict(columns, _REPORT)
    return reported(spark, result, pa.Table.from_batches([batch], _REPORT))


def _loaded(table: pa.Table, column: str) -> list[Any]:
    return [pickle.loads(it) for it in table.column(column).to_pylist()]  # noqa: S301 -- our own


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunk objects whose keys begin with a prefix."""

    prefix: str
    needed: NeededChunks


@dataclass(frozen=True, slots=True)
class _Virtual:
    """Some of the external objects that virtual chunks refer to."""

    needed: dict[VirtualObject, tuple[int, int]]


def _chunk_parts(needed: NeededChunks, *, whole: bool) -> list[_Chunks]:
    """Divide chunk objects the way they are listed: by first letters, or all in one listing."""
    if not len(needed.ids):
        return []
    if whole:
        return [_Chunks("chunks/", needed)]
    # The first letter of an id is its first five bits (base 32).
    firsts = needed.ids[:, 0] >> 3
    parts = [
        _Chunks(f"chunks/{letter}", needed.take(firsts == number))
        for number, letter in enumerate(ALPHABET)
    ]
    return [it for it in parts if len(it.needed.ids)]


async def _lists_whole_folders(repository: AsyncRepository) -> bool:
    """Return whether listing a prefix costs as much as the whole folder, as on local disks."""
    opened = repository.engine
    return opened.assets.blocking is not None or not opened.storage.capabilities.listing


async def _read(
    repository: AsyncRepository, manifests: Sequence[tuple[ManifestId, int]]
) -> Mapping[str, Sequence[Any]]:
    """Return the objects that manifests refer to, and the manifests that cannot be read."""
    opened = repository.engine
    needed: list[NeededObjects] = []
    broken: list[BrokenReference] = []
    for entry in manifests:
        one, problems = await needed_of(opened, *entry)
        needed = [NeededObjects.joined([*needed, one])]
        broken += problems
    row = (pickle.dumps(NeededObjects.joined(needed), protocol=5), pickle.dumps(broken))
    return columns_of(_NEEDED, [row])


async def _look(
    repository: AsyncRepository, part: _Chunks | _Virtual
) -> Mapping[str, Sequence[Any]]:
    """Return which of some objects are missing or too short."""
    opened = repository.engine
    match part:
        case _Chunks(prefix, needed):
            broken, unauthorized = await broken_chunks(opened.storage, needed, prefix), 0
        case _Virtual(needed):
            broken, unauthorized = await broken_virtual(opened.virtual, needed)
    return columns_of(_BROKEN, [(pickle.dumps(broken), unauthorized)])

"""Make the statistics that chunks lack, divided over tasks."""

from __future__ import annotations

import pickle
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.own_files import drop
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import columns_of, default_tasks, reported, run_job
from icechunk_async.zarr.queries.analyze import Tally, join_objects, lacking, measure_chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.results import Analysis
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.sync import Repository
    from icechunk_async.zarr.queries.analyze import Unknown

__all__ = ["analyze"]

_MEASURED: Final = "array string, chunks long, bytes_read long, unreadable long, messages binary"
_CHUNKS_PER_TASK: Final = 16_384
"""The most, so that a task that fails has not much to do again; one object holds as many."""


@dataclass(slots=True)
class _Plan:
    """Chunks without statistics, in a snapshot."""

    snapshot_id: str = ""
    tally: Tally = field(default_factory=Tally)
    unknown: list[Unknown] = field(default_factory=list["Unknown"])


def analyze(
    spark: SparkSession,
    repository: Repository | str,
    *,
    ref: str = "main",
    paths: Collection[str] | None = None,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[Analysis]:
    """Read the chunks of a snapshot that have no statistics yet, and store them for each.

    The result is that of `Repository.analyze`. The table has a row for each array of a task:
    `array`, the `chunks` and `bytes_read`, and the number of `unreadable` chunks.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, or its URL.
        ref: the snapshot to analyze: a branch, a tag or an id, as `readonly_session` takes it.
        paths: these arrays, and those in these groups; None for all.
        tasks: number of tasks, or more if one would get more than 16,384 chunks; by default four
            for each core.
        progress: called with the number of finished tasks, from a thread.

    Raises:
        NotFoundError: ``ref`` names nothing.
        FormatError: a manifest is missing or damaged.
        UnsafeStorageError, UnsupportedBySpecError: nothing was stored.
        PySparkException: a task failed too often. Statistics that were stored until then stay; the
            next call continues.

    Cost: the driver reads the manifests of the snapshot; its memory is some 60 bytes for each chunk
    without statistics. Tasks read these chunks once, with memory for 256 MiB of decoded chunks.
    """
    shared = SharedRepository.of(repository)

    async def begin(opened: AsyncRepository) -> _Plan:
        # Refused before the manifests are read, and before a task stores anything.
        opened.engine.history.capabilities.require("upkeep")
        opened.engine.check_safe()
        # Once: tasks and the end go by the id, wherever the branch is by then.
        session = await opened.readonly_session(ref=ref)
        plan = _Plan(str(session.snapshot_id))
        plan.unknown = [it async for it in lacking(session.store, paths, plan.tally) if len(it)]
        return plan

    plan = shared.ask(begin)
    total = sum(map(len, plan.unknown))
    parts = [
        (plan.snapshot_id, it) for it in divided(plan.unknown, tasks or default_tasks(spark, total))
    ]
    table = run_job(
        spark, shared, parts, _measure, _MEASURED, phase="analyzing chunks", progress=progress
    )
    tally = plan.tally
    tally.chunks = sum(table.column("chunks").to_pylist())
    tally.bytes_read = sum(table.column("bytes_read").to_pylist())
    for it in table.column("messages").to_pylist():
        tally.unreadable += pickle.loads(it)  # noqa: S301 -- our own tasks'

    async def finish(opened: AsyncRepository) -> Analysis:
        session = await opened.readonly_session(snapshot_id=plan.snapshot_id)
        # Tasks stored an object each. Joined, a query reads one for an array; the small ones go.
        for path in {it.path: None for it in plan.unknown}:
            await drop(opened.engine, await join_objects(session.store, path))
        return tally.analysis(session.snapshot_id)

    return reported(spark, shared.ask(finish), table, "messages")


def divided(unknown: Sequence[Unknown], tasks: int) -> list[tuple[Unknown, ...]]:
    """Divide chunks of arrays into parts of similar numbers, in order. Pure."""
    total = sum(map(len, unknown))
    most = max(1, min(_CHUNKS_PER_TASK, -(-total // tasks)))
    parts: list[tuple[Unknown, ...]] = []
    part: list[Unknown] = []
    room = most
    for array in unknown:
        start = 0
        while start < len(array):
            # A part may end within an array, and the next continues with others: arrays of 7 and 3
            # chunks, with room for 5, are the parts 5 | 2 and 3.
            piece = array.part(start, start + room)
            start += len(piece)
            room -= len(piece)
            part.append(piece)
            if not room:
                parts.append(tuple(part))
                part, room = [], most
    return [*parts, tuple(part)] if part else parts


async def _measure(
    repository: AsyncRepository, work: tuple[str, tuple[Unknown, ...]]
) -> Mapping[str, Sequence[Any]]:
    snapshot_id, arrays = work
    session = await repository.readonly_session(snapshot_id=snapshot_id)
    rows: list[tuple[Any, ...]] = []
    for unknown in arrays:
        tally = Tally()
        await measure_chunks(session.store, unknown, tally)
        messages = tally.unreadable
        row = (unknown.path, tally.chunks, tally.bytes_read, len(messages), pickle.dumps(messages))
        rows.append(row)
    return columns_of(_MEASURED, rows)

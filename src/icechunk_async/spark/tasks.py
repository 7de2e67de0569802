"""Work on one repository divided over the tasks of a Spark job.

Plain data travels to the tasks: how to open the repository, and one part of the work each. The
driver decides; tasks read, list, delete or write what they were given. Spark may run a task
twice, so the work of a task must be harmless to repeat.
"""

from __future__ import annotations

import pickle
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid4

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.requests import seen_cores

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.shared import SharedRepository

__all__ = [
    "MOST_PARTITIONS",
    "JobReport",
    "check_result_size",
    "columns_of",
    "default_looks",
    "default_tasks",
    "default_tasks_of",
    "few",
    "in_rounds",
    "places_by_number",
    "reported",
    "run_job",
    "shares",
    "total_cores",
]


MOST_PARTITIONS: Final = 1_000_000
"""The most partitions of a query: the driver keeps some 500 bytes of each, and Spark a task."""
# Each turn asks the JVM for all jobs of the group, and nobody reads a bar more often.
_POLL_SECONDS: Final = 0.2
# More than one, so that no core is idle for long while another ends its last task.
_TASKS_PER_CORE: Final = 4
_TASK_BYTES: Final = 64 << 20
# A task that is lost loses what it has looked at: with a million files on few cores, a bounded
# part.
_MOST_LOOKS: Final = 1_000
# Measured: 12 to 25 bytes for a native chunk. Most of it is the id, which does not compress.
_BYTES_A_CHUNK: Final = 25
_MERGING: Final = 200
"""Bytes for each chunk of a commit while the driver merges the changes of tasks."""
_RESULT_SIZE: Final = "spark.driver.maxResultSize"
_SIZE: Final = re.compile(r"(\d+)([kmgtp]?)b?")
_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_OF_GROUPS: Final = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
"""Local properties that `SparkContext.setJobGroup` sets."""
_TYPES: Final = {
    "string": pa.string(),
    "long": pa.int64(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}


@dataclass(frozen=True)
class JobReport[T]:
    """The result of a job.

    Attributes:
        result: what the same operation of a repository returns in one process.
        table: one row for each thing that was looked at or done.
        frame: the table as a data frame.
    """

    result: T
    table: pa.Table
    frame: DataFrame


def total_cores(spark: SparkSession) -> int:
    """Return the number of tasks that the cluster runs at once, as far as the session knows."""
    return seen_cores(spark) or int(spark.conf.get("spark.default.parallelism", "8") or 8)


def default_tasks(spark: SparkSession, pieces: int) -> int:
    """Return the number of tasks for some pieces: one each, at most four per core."""
    return max(1, min(pieces, total_cores(spark) * _TASKS_PER_CORE))


def default_tasks_of(spark: SparkSession, pieces: int, size: int) -> int:
    """Return the number of tasks for some pieces of `size` bytes: one to four for each core.

    Each has 64 MiB at least, if there is one for each core: starting a task takes Spark as long as
    reading and writing some megabytes.
    """
    cores = total_cores(spark)
    each = min(_TASKS_PER_CORE, max(1, size // (cores * _TASK_BYTES)))
    return max(1, min(pieces, cores * each))


def places_by_number(spark: SparkSession) -> bool:
    """Return whether the engine puts rows into partitions that a column numbers.

    Spark does. Sail, which speaks Spark Connect as well, refuses such a plan when it looks at it.

    Cost: with Spark Connect one request.
    """
    if not type(spark).__module__.startswith("pyspark.sql.connect"):
        return True
    from pyspark.errors import UnsupportedOperationException  # noqa: PLC0415

    try:
        # Spark refuses numbers of any other type.
        numbers = spark.range(1).selectExpr("cast(id as int) as number")
        return len(numbers.repartitionById(1, "number").schema) == 1
    except UnsupportedOperationException:
        return False


def default_looks(spark: SparkSession, files: int) -> int:
    """Return the number of files that a task looks at: a task for each core, or 1,000 files."""
    return max(1, min(_MOST_LOOKS, -(-files // total_cores(spark))))


def check_result_size(spark: SparkSession, chunks: int) -> None:
    """Refuse a job whose results Spark would not bring to the driver, before it runs.

    Args:
        spark: the session, which knows the bound.
        chunks: chunks that the tasks write; for each up to 25 bytes come back. Chunks that are
            small enough to be stored inline come back whole, which is not counted.

    Raises:
        InvalidInputError: the results could pass `spark.driver.maxResultSize`.
    """
    text, bound = _result_size(spark)
    wanted = chunks * _BYTES_A_CHUNK
    if bound and wanted > bound:  # 0 is no bound
        raise InvalidInputError(
            f"The job would compute {chunks} chunks, whose references are up to {wanted} bytes, "
            f"and {_RESULT_SIZE} is {text}: Spark would throw the results away at the end. Start "
            f"Spark with a {_RESULT_SIZE} of {-(-wanted >> 20)}m or more, and as much more memory "
            f"of the driver; its Python needs about {-(-chunks * _MERGING >> 20)}m besides. Or "
            "make chunks larger, or write in several commits with write_region."
        )


def few[T](parts: Iterable[T], least: int = 0) -> list[T]:
    """Return the parts of a plan as a list.

    Args:
        parts: made while they are counted.
        least: how many there are at least, where that is known beforehand.

    Raises:
        InvalidInputError: there are more than a million.
    """
    # Where a lower bound is known it decides alone: a plan of a billion parts would take hours to
    # make, only to be refused.
    found = [] if least > MOST_PARTITIONS else list(islice(parts, MOST_PARTITIONS + 1))
    if max(least, len(found)) <= MOST_PARTITIONS:
        return found
    raise InvalidInputError(
        f"The table would be read in {max(least, len(found))} partitions or more, and a query has "
        f"{MOST_PARTITIONS} at most: Spark's driver keeps each of them. Set the option "
        "'partition-bytes' to a larger number, so that a task reads more chunks, or read less with "
        "'where' and 'arrays'."
    )


def in_rounds[T](
    spark: SparkSession, files: Sequence[tuple[T, int]]
) -> Iterator[list[tuple[T, int]]]:
    """Divide files, given with their sizes, so that Spark brings all results of a round back.

    A round has files of half of `spark.driver.maxResultSize`, or one. Use it where the results for
    a file are no larger than the file.
    """
    _, bound = _result_size(spark)
    found: list[tuple[T, int]] = []
    size = 0
    for it in files:
        # Half, because Spark's bound counts what it wraps around results as well.
        if found and bound and size + it[1] > bound // 2:
            yield found
            found, size = [], 0
        found.append(it)
        size += it[1]
    if found:
        yield found


def _result_size(spark: SparkSession) -> tuple[str, int]:
    """Return the bound of a job's results, as text and in bytes; 0 for none."""
    text = (spark.conf.get(_RESULT_SIZE, None) or "1g").strip().lower()
    match = _SIZE.fullmatch(text)
    return text, 0 if match is None else int(match[1]) << _SHIFTS[match[2]]


def shares[T](items: Sequence[T], count: int) -> list[tuple[T, ...]]:
    """Divide items into `count` parts of similar size; empty parts are left out."""
    # Dealt out like cards, not cut: neighbours are often alike, such as the manifests of one large
    # array, and would all fall to one task.
    return [part for start in range(count) if (part := tuple(items[start::count]))]


def columns_of(columns: str, rows: Sequence[Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    """Return rows as columns, given names and types as `run_job` takes them."""
    names = _arrow(columns).names
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def reported[T](spark: SparkSession, result: T, table: pa.Table, *internal: str) -> JobReport[T]:
    """Return a report without the columns that only the driver needs."""
    kept = [name for name in table.column_names if name not in internal]
    shown = table.select(kept)
    # Spark Connect takes no table without rows unless it is told the columns.
    columns = None if shown.num_rows else from_arrow_schema(shown.schema)
    return JobReport(result, shown, spark.createDataFrame(shown, columns))


def run_job[P](
    spark: SparkSession,
    shared: SharedRepository,
    parts: Sequence[P],
    work: Callable[[AsyncRepository, P], Awaitable[Mapping[str, Sequence[Any]]]],
    columns: str,
    *,
    phase: str,
    progress: ProgressCallback | None = None,
) -> pa.Table:
    """Run one task for each part, and return the rows of all of them.

    Args:
        spark: a session, also one of Spark Connect.
        shared: the repository; tasks share its budget of requests, and that of the job.
        parts: plain data, one item for each task, which gets nothing of the others.
        work: returns the columns of one part. It may run several times for a part; one result
            counts.
        columns: names and types of the columns, in Spark's notation.
        phase: what is being done, for Spark's pages and `progress`.
        progress: called with the number of finished tasks, from a separate thread.

    Raises:
        InvalidInputError: the session's `spark.icechunk.maxRequests` is no positive number.
        PySparkException: a task failed too often.
    """
    budget, schema = shared.budget().in_session(spark, len(parts)), _arrow(columns)
    # Spark divides nothing into no partitions: it wants one at least.
    if not parts:
        return pa.Table.from_batches([], schema)

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # A partition has one part with Spark. Where rows are placed by hash, as with Sail, it may
        # have several or none.
        for batch in batches:
            for pickled in batch.column("part").to_pylist():
                part = pickle.loads(pickled)  # noqa: S301 -- the driver of this job wrote it
                # Here, not in the driver: the share of a budget follows from where the task runs.
                found = shared.in_task(budget).ask(partial(_work_on, work, part))
                yield pa.RecordBatch.from_pydict(dict(found), schema=schema)

    frame = _divided(spark, parts).mapInArrow(each, columns)
    with _watched(spark, phase, len(parts), progress):
        table: pa.Table = frame.toArrow()
    return table


def _divided(spark: SparkSession, parts: Sequence[object]) -> DataFrame:
    """Return parts as rows, one in each partition.

    What a function refers to travels to every task: with all parts in it, the work of a job would
    grow with their square. A data frame, not an RDD: Spark Connect has no RDDs.
    """
    dumps = cast("Any", cloudpickle).dumps
    rows = {
        "number": pa.array(range(len(parts)), pa.int32()),
        "part": pa.array([dumps(it) for it in parts], pa.binary()),
    }
    frame = spark.createDataFrame(pa.table(rows))
    if places_by_number(spark):
        return frame.repartitionById(len(parts), "number")
    return frame.repartition(len(parts))


async def _work_on[P, R](
    work: Callable[[AsyncRepository, P], Awaitable[R]], part: P, repository: AsyncRepository
) -> R:
    return await work(repository, part)


def _arrow(columns: str) -> pa.Schema:
    fields = [it.split() for it in columns.split(",")]
    return pa.schema([(name, _TYPES[kind]) for name, kind in fields])


@contextmanager
def _watched(
    spark: SparkSession, phase: str, total: int, progress: ProgressCallback | None
) -> Generator[None]:
    """Name a job in Spark's pages, and report its progress while it runs."""
    tell = progress or no_progress
    tell(Progress(phase, 0, total))
    try:
        context: Any = spark.sparkContext
    except Exception:  # noqa: BLE001 -- Spark Connect has no context, so no progress in between
        yield
    else:
        # Users name the jobs of a thread as well, to cancel them: theirs comes back afterwards.
        before = {name: context.getLocalProperty(name) for name in _OF_GROUPS}
        group = f"icechunk-async-{uuid4()}"
        context.setJobGroup(group, f"{phase} ({total})")
        ended = threading.Event()
        watcher = threading.Thread(
            target=_watch,
            args=(context.statusTracker(), group, ended, Progress(phase, 0, total), tell),
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            # Spark has no call that removes a job group; later jobs would inherit it.
            for name, value in before.items():
                context.setLocalProperty(name, value)
    tell(Progress(phase, total, total))


def _watch(
    tracker: Any, group: str, ended: threading.Event, last: Progress, tell: ProgressCallback
) -> None:
    while not ended.wait(_POLL_SECONDS):
        found = _count_done(tracker, group, last.total or 0)
        # A stage that is tried again counts from zero: progress never goes back.
        if found > last.done:
            last = replace(last, done=found)
            tell(last)


def _count_done(tracker: Any, group: str, total: int) -> int:
    """Return the number of ended tasks of the stage that has one for each part."""
    done = 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in () if info is None else info.stageIds:
            found = tracker.getStageInfo(stage)
            # The job has other stages, such as that of placing the parts, with other numbers of
            # tasks.
            if found is not None and found.numTasks == total:
                done = max(done, found.numCompletedTasks)
    return done

"""Pieces of work on one repository, each done by a task of a Spark job.

What travels is plain data: how to open the repository, and what to do. The driver decides; tasks
read, list, delete or write what they were told to, and may do so twice without harm.
"""

from __future__ import annotations

import pickle
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa

from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.spark.budget import Budget, shared_handle
from icechunk_async.spark.write.cooperative import total_cores
from icechunk_async.sync import Repository
from icechunk_async.sync.handles import RepositoryHandle
from icechunk_async.sync.portal import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Opened
    from icechunk_async.repository import Repository as AsyncRepository

__all__ = [
    "JobReport",
    "Shipped",
    "columns_of",
    "default_tasks",
    "opened_of",
    "reported",
    "run_job",
    "shares",
]

_POLL_SECONDS: Final = 0.2
_TASKS_PER_CORE: Final = 4


@dataclass(frozen=True)
class JobReport[T]:
    """How a job ended.

    Attributes:
        result: what the same operation answers in one process.
        table: one row for each thing that was looked at or done.
        frame: the same as a data frame.
    """

    result: T
    table: pa.Table
    frame: DataFrame


class Shipped:
    """A repository as it is on the driver, and as it is sent to tasks, which share its budget."""

    def __init__(self, repository: Repository | str) -> None:
        """Take an open repository, or open one by its URL."""
        self.repository = Repository.open(repository) if isinstance(repository, str) else repository
        handle = self.repository._repository  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        self._handle = handle
        self.budget = Budget(handle.now().config.effective_max_concurrent_requests)
        self.bytes = pickle.dumps(RepositoryHandle(handle.source.changed(None, None)))

    def ask[T](self, question: Callable[[AsyncRepository], Awaitable[T]]) -> T:
        """Return a question to the repository, on the driver."""
        return run(self._handle.ask(question))


def opened_of(repository: AsyncRepository) -> Opened:
    """Return the parts of a repository."""
    return repository._opened  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def default_tasks(spark: SparkSession, pieces: int) -> int:
    """Return into how many tasks to divide many small pieces of work."""
    return max(1, min(pieces, total_cores(spark) * _TASKS_PER_CORE))


def shares[T](items: Sequence[T], count: int) -> list[tuple[T, ...]]:
    """Divide items into so many parts of about the same size; none is empty."""
    return [part for start in range(count) if (part := tuple(items[start::count]))]


def columns_of(columns: str, rows: Sequence[Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    """Return rows as columns of these names."""
    names = _arrow(columns).names
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def reported[T](spark: SparkSession, result: T, table: pa.Table, *internal: str) -> JobReport[T]:
    """Return a report, without the columns that are for the driver alone."""
    kept = [name for name in table.column_names if name not in internal]
    shown = table.select(kept)
    return JobReport(result, shown, spark.createDataFrame(shown))


def run_job[P](
    spark: SparkSession,
    shipped: Shipped,
    parts: Sequence[P],
    work: Callable[[AsyncRepository, P], Awaitable[Mapping[str, Sequence[Any]]]],
    columns: str,
    *,
    phase: str,
    progress: ProgressCallback | None = None,
) -> pa.Table:
    """Do some work for each part, one task a part, and answer what all of them answered.

    Args:
        spark: a session, also one of Spark Connect.
        shipped: the repository.
        parts: plain data.
        work: answers columns. It may run several times for one part; one answer counts.
        columns: their names and types, as Spark writes them.
        phase: says what is done, in Spark's pages and to ``progress``.
        progress: told how many tasks are done, from a thread of its own.

    Raises whatever Spark raises when a task failed too often.
    """
    handle, budget = shipped.bytes, shipped.budget

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                whole: RepositoryHandle = pickle.loads(handle)  # noqa: S301 -- our own
                repository = shared_handle(whole.source.changed(budget.of_task(), None))
                answered = run(repository.ask(partial(_done_by, work, parts[number])))
                yield pa.RecordBatch.from_pydict(dict(answered), schema=schema)

    schema = _arrow(columns)
    if not parts:
        return pa.Table.from_batches([], schema)
    frame = spark.range(0, len(parts), 1, len(parts)).mapInArrow(each, columns)
    with _watched(spark, phase, len(parts), progress):
        answer: pa.Table = frame.toArrow()
    return answer


async def _done_by[P, R](
    work: Callable[[AsyncRepository, P], Awaitable[R]], part: P, repository: AsyncRepository
) -> R:
    return await work(repository, part)


_TYPES: Final = {
    "string": pa.string(),
    "long": pa.int64(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}


def _arrow(columns: str) -> pa.Schema:
    fields = [it.split() for it in columns.split(",")]
    return pa.schema([(name, _TYPES[kind]) for name, kind in fields])


@contextmanager
def _watched(
    spark: SparkSession, phase: str, total: int, progress: ProgressCallback | None
) -> Generator[None]:
    """Name a job in Spark's pages, and tell how far it is while it runs."""
    tell = progress or no_progress
    tell(Progress(phase, 0, total))
    try:
        context: Any = spark.sparkContext
    except Exception:  # noqa: BLE001 -- Spark Connect has none: nobody can tell how far it is
        yield
    else:
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
            for name in ("spark.jobGroup.id", "spark.job.description"):
                context.setLocalProperty(name, None)
    tell(Progress(phase, total, total))


def _watch(
    tracker: Any, group: str, ended: threading.Event, last: Progress, tell: ProgressCallback
) -> None:
    while not ended.wait(_POLL_SECONDS):
        found = min(last.total or 0, _done(tracker, group))
        if found > last.done:
            last = replace(last, done=found)
            tell(last)


def _done(tracker: Any, group: str) -> int:
    """Count the tasks of a group of jobs that are done."""
    done = 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in () if info is None else info.stageIds:
            found = tracker.getStageInfo(stage)
            done += 0 if found is None else found.numCompletedTasks
    return done

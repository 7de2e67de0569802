"""The work of a job grows with its size, not with the square of it; counted, up to a million files.

Bytes and calls are counted, which do not depend on the machine. Spark is a stand-in that runs no
task, or runs all of them here.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark import cloudpickle

from icechunk_async.spark.ingest.catalog import Catalog, Entry
from icechunk_async.spark.ingest.files import Files, divide
from icechunk_async.spark.ingest.ingest import report_of
from icechunk_async.spark.ingest.plan import (
    Answered,
    Template,
    groups_of,
    plan_concat,
    plan_groups,
)
from icechunk_async.spark.ingest.tasks import FileWork, ScanOptions
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import run_job, total_cores
from tests.spark.here import session_here
from tests.spark.sources import open_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.sync import Repository

MILLION = 1_000_000


class Recorder:
    """A stand-in for a session and its frames, which keeps what would travel to tasks."""

    def __init__(self) -> None:
        self.conf = session_here().conf
        self.parts: list[int] = []
        self.function = 0
        self._schema: Any = None

    @property
    def sparkContext(self) -> Any:  # noqa: N802 -- Spark's
        """Raise an error, as Spark Connect does."""
        raise NotImplementedError

    def createDataFrame(self, table: Any) -> Recorder:  # noqa: N802 -- Spark's
        """Keep the size of each part."""
        self.parts = [len(it) for it in table.column("part").to_pylist()]
        return self

    def repartitionById(self, count: int, _: str) -> Recorder:  # noqa: N802 -- Spark's
        """Each part is a partition."""
        assert count == len(self.parts)
        return self

    def mapInArrow(self, work: Callable[..., Any], _: str) -> Recorder:  # noqa: N802 -- Spark's
        """Keep the size of the function, which travels to every task."""
        self.function = len(cast("Any", cloudpickle).dumps(work))
        return self

    def toArrow(self) -> None:  # noqa: N802 -- Spark's
        """Run no task."""


async def stay(_: AsyncRepository, part: Any) -> dict[str, list[int]]:
    """Return the number of files of a part."""
    return {"files": [len(part.files)]}


def _parts(files: int, spark: SparkSession) -> list[FileWork]:
    names = [(f"s3://archive/model/run/{at:09}.nc", None) for at in range(files)]
    options = ScanOptions()
    divided = divide(names, [1] * files, total_cores(spark))
    return [FileWork(options, it) for it in divided]


def _recorded(shared: SharedRepository, files: int) -> Recorder:
    recorder = Recorder()
    spark = cast("SparkSession", recorder)
    run_job(spark, shared, _parts(files, spark), stay, "files long", phase="counting")
    return recorder


def test_a_task_receives_no_more_in_a_job_of_a_million_files(repository: Repository) -> None:
    """Its own 50 files, and a function that knows of no other."""
    shared = SharedRepository.of(repository)
    small, large = _recorded(shared, 10_000), _recorded(shared, MILLION)
    assert len(large.parts) == MILLION // 50
    assert max(large.parts) <= max(small.parts) + 8
    # The number of parts is in it, by which tasks divide requests.
    assert large.function <= small.function + 8
    assert sum(large.parts) <= 1.01 * sum(small.parts) * MILLION / 10_000


def _calls(work: Callable[[], object]) -> int:
    """Return the number of calls of Python functions in some work, after it ran once."""
    work()
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Name(str):
    """The name of a file, whose uses as a key are calls of a Python function."""

    __slots__ = ()

    def __hash__(self) -> int:
        """Return the hash of the text."""
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        """Return whether the texts are equal."""
        return super().__eq__(other)


def _unchanged(
    count: int, concat_dim: str | None
) -> tuple[list[str], Catalog, dict[str, Answered]]:
    """Return files that were ingested before and have not changed."""
    files: list[str] = [Name(f"s3://archive/model/{at:09}.nc") for at in range(count)]
    entries = [
        Entry(it, "old", f"/{at:09}", 0, 0, 10, ("a",))
        if concat_dim is None
        else Entry(it, "old", "/", at, 1, 10)
        for at, it in enumerate(files)
    ]
    return (
        files,
        Catalog(tuple(entries), concat_dim),
        {it: Answered("old", None, None) for it in files},
    )


def _groups(count: int) -> Callable[[], object]:
    files, catalog, answers = _unchanged(count, None)

    def plan() -> pa.Table:
        groups = groups_of("/", files, None, catalog.entries)
        planned = plan_groups(catalog, files, answers, groups, mode="append")
        assert planned.is_unchanged
        return report_of(planned, answers, files)

    return plan


def _concat(count: int) -> Callable[[], object]:
    files, catalog, answers = _unchanged(count, "time")
    existing = Template("time", {}, frozenset())

    def plan() -> pa.Table:
        planned = plan_concat(
            catalog, files, answers, dim="time", group="/", mode="append", existing=existing
        )
        assert planned.is_unchanged
        return report_of(planned, answers, files)

    return plan


@pytest.mark.parametrize("make", [_groups, _concat])
def test_ten_times_the_files_are_ten_times_the_work_of_planning(
    make: Callable[[int], Callable[[], object]],
) -> None:
    """In the driver, also where nothing has changed."""
    small, large = _calls(make(200)), _calls(make(2_000))
    assert small >= 200
    assert large <= 11 * small


def test_ten_times_the_files_are_ten_times_the_work_of_dividing(url: str, tmp_path: Path) -> None:
    """From what the caller gives to the parts of tasks."""
    sources = tmp_path / "sources"
    shared = SharedRepository.of(open_for(url, sources))

    def work(count: int) -> Callable[[], object]:
        given = {f"{sources}/{at:09}.nc": at % 97 * 10**6 for at in range(count)}

        def division() -> None:
            files = Files.given(shared, given, "auto")
            costs = files.costs(files.locations, ScanOptions())
            assert sum(map(len, divide(files.locations, costs, 2))) == count

        return division

    small, large = _calls(work(1_000)), _calls(work(10_000))
    assert small >= 1_000
    assert large <= 11 * small


async def count_files(_: AsyncRepository, files: Sequence[str]) -> dict[str, list[int]]:
    """Return the number of files of a part."""
    return {"files": [len(files)]}


def test_ten_times_the_parts_are_ten_times_the_work_of_tasks(repository: Repository) -> None:
    """All of them together, one after the other in this process."""
    shared = SharedRepository.of(repository)

    def job(count: int) -> None:
        parts = [[f"s3://archive/{at:09}.nc"] for at in range(count)]
        table = run_job(session_here(), shared, parts, count_files, "files long", phase="counting")
        assert sum(table.column("files").to_pylist()) == count

    small, large = _calls(lambda: job(100)), _calls(lambda: job(1_000))
    assert large <= 11 * small


def test_the_results_of_a_task_do_not_grow_with_the_job(repository: Repository) -> None:
    """It returns those of its files; a part is pickled once."""
    pickled: list[int] = []

    class Part:
        """Counts how often it is pickled."""

        def __init__(self, at: int) -> None:
            self.at = at

        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append(self.at)
            return int, (self.at,)

    async def same(_: AsyncRepository, at: Any) -> dict[str, list[int]]:
        return {"at": [at]}

    shared = SharedRepository.of(repository)
    parts = [Part(at) for at in range(500)]
    table = run_job(session_here(), shared, parts, same, "at long", phase="counting")
    assert table.column("at").to_pylist() == list(range(500))
    assert pickled == list(range(500))
    assert len(pickle.dumps(table)) < 500 * 100

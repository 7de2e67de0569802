"""All tasks of a job together have at most its budget of requests open at a time."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

pytest.importorskip("aiohttp", reason="the driver of the HTTP backend is not installed")

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import CooperativeWrite, Input, NewArray, map_chunks
from icechunk_async.spark.options import ReadOptions, WriteOptions
from icechunk_async.spark.read.reader import IcechunkReader, Part, Reading
from icechunk_async.spark.read.sql import _plan_read
from icechunk_async.spark.requests import (
    JOB_REQUESTS,
    JOB_SETTING,
    SEEN_CORES,
    Budget,
    tasks_of_job,
)
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.source import register
from icechunk_async.spark.stream import stream_reader
from icechunk_async.spark.stream.source import StreamReader
from icechunk_async.spark.tasks import run_job
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.sync import Repository
from tests.interop.web_files import WebFile, web_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.repository import Repository as AsyncRepository

CLUSTER = {"spark.master": "spark://host:7077", "spark.executor.cores": "4"}
CHUNKS = 32


class Gate:
    """Counts requests for chunks; holds them until there are more at once than allowed."""

    def __init__(self, most: int) -> None:
        self.peak = 0
        self._most = most
        self._open = False
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        """Count and hold one request."""
        if not path.startswith("/chunks/"):
            yield
            return
        with self._changed:
            self._held += 1
            self.peak = max(self.peak, self._held)
            self._changed.notify_all()
            # What would be too many comes at once, or never: then all others may pass.
            if not self._changed.wait_for(self._passes, timeout=1):
                self._open = True
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1

    def _passes(self) -> bool:
        return self._open or self.peak > self._most


@pytest.fixture
def held(url: str, repository: Repository) -> Iterator[tuple[str, Callable[[Gate], None]]]:
    """A repository of many chunks on a web server, and a function that sets its gate."""
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(CHUNKS, 1000),
        chunks=(1, 1000),
        dtype="f8",
        compressors=None,
        dimension_names=["t", "x"],
    )
    array[:] = np.arange(CHUNKS * 1000.0).reshape(CHUNKS, 1000)
    session.commit("made")
    folder = Path(url.removeprefix("file://"))
    with web_files() as served:
        for path in filter(Path.is_file, folder.rglob("*")):
            served.files[f"/{path.relative_to(folder)}"] = WebFile(path.read_bytes())

        def hold(gate: Gate) -> None:
            served.during = gate

        yield served.url, hold


def read(spark: SparkSession, place: str, target: str, options: Mapping[str, str]) -> None:
    """Read rows."""
    del target
    given = {"partition-bytes": str(CHUNKS * 1000 * 24 // 4), **options}
    rows = spark.read.format("icechunk").options(**given).load(place)
    assert rows.rdd.getNumPartitions() >= 2
    assert rows.where("a >= 0").count() == CHUNKS * 1000


def compute(spark: SparkSession, place: str, target: str, options: Mapping[str, str]) -> None:
    """Compute an array from one of another repository."""
    del options
    source = Repository.open(place).readonly_session("main")
    whole = Input(
        "a", lambda region: (slice(16 * region[0].start, 16 * region[0].stop), slice(None))
    )
    new = NewArray("sums", (2,), (1,), "f8")
    map_chunks(spark, target, total, [whole], new, read_from=source, tasks=2)
    stored = zarr.open_array(Repository.open(target).readonly_session("main").store, path="sums")
    assert np.asarray(stored[:]).sum() == np.arange(CHUNKS * 1000.0).sum()


def total(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sum of a block."""
    return np.asarray([block.sum()])


def job(spark: SparkSession, place: str, target: str, options: Mapping[str, str]) -> None:
    """Read in the tasks of a job."""
    del target, options
    table = run_job(
        spark, SharedRepository.of(place), [0, 1], read_half, "sum long", phase="reading"
    )
    assert sum(table.column("sum").to_pylist()) == np.arange(CHUNKS * 1000).sum()


async def read_half(native: AsyncRepository, part: int) -> dict[str, list[int]]:
    """Read half of the chunks at once."""
    session = await native.readonly_session("main")
    array: Any = await zarr.api.asynchronous.open_array(store=session.store, path="a", mode="r")
    half = CHUNKS // 2
    return {"sum": [int((await array.getitem(slice(part * half, (part + 1) * half))).sum())]}


@pytest.mark.parametrize(
    ("work", "said"), [(read, "session"), (read, "option"), (compute, "session"), (job, "session")]
)
def test_no_more_requests_are_open_at_a_time_than_the_job_may_have(
    spark: SparkSession,
    held: tuple[str, Callable[[Gate], None]],
    tmp_path: Path,
    work: Callable[..., None],
    said: str,
) -> None:
    """Two tasks at a time have two each of four; without the limit more would be open."""
    place, hold = held
    target = (tmp_path / "target").as_uri()
    Repository.create(target)
    gate = Gate(4)
    hold(gate)
    try:
        if said == "session":
            spark.conf.set(JOB_SETTING, "4")
        work(spark, place, target, {"max-requests": "4"} if said == "option" else {})
    finally:
        spark.conf.unset(JOB_SETTING)
    assert 1 < gate.peak <= 4


def test_without_a_budget_the_same_work_has_more_requests_open(
    spark: SparkSession, held: tuple[str, Callable[[Gate], None]], tmp_path: Path
) -> None:
    """So the test above would see it."""
    place, hold = held
    gate = Gate(4)
    hold(gate)
    job(spark, place, (tmp_path / "none").as_uri(), {})
    assert gate.peak > 4


@pytest.mark.parametrize(
    ("properties", "task_cpus", "cores", "expected"),
    [
        ({"spark.master": "local[6]", "spark.default.parallelism": "90"}, 1, 90, 6),
        ({"spark.master": "local-cluster[2, 3, 1024]", "spark.executor.cores": "3"}, 1, 0, 6),
        (CLUSTER, 1, 0, 4),
        (CLUSTER, 1, 4000, 4000),
        (CLUSTER, 2, 4000, 2000),
        ({**CLUSTER, "spark.executor.instances": "1000"}, 1, 2, 4000),
        ({**CLUSTER, "spark.executor.instances": "1000"}, 2, 0, 2000),
        ({**CLUSTER, "spark.dynamicAllocation.maxExecutors": "50"}, 1, 2, 200),
        ({**CLUSTER, "spark.dynamicAllocation.maxExecutors": "2147483647"}, 1, 8, 8),
        ({**CLUSTER, "spark.cores.max": "64"}, 1, 2, 64),
        ({**CLUSTER, SEEN_CORES: "640"}, 1, 0, 640),
        ({**CLUSTER, "spark.default.parallelism": "300"}, 1, 0, 300),
        ({}, 1, 0, 16),
    ],
)
def test_tasks_of_a_job_are_counted_as_far_as_spark_says(
    properties: dict[str, str], task_cpus: int, cores: int, expected: int
) -> None:
    """The largest number counts: a cluster may grow. The machine has 16 cores."""
    assert tasks_of_job(properties, task_cpus, 16, cores) == expected


class Task:
    """The context of a task, with properties that the driver set."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self.getLocalProperty = properties.get

    def cpus(self) -> int:
        """Each task takes one core."""
        return 1


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """A function after which this process is a task, with some properties."""

    def begin(properties: Mapping[str, str]) -> None:
        monkeypatch.setattr(
            "icechunk_async.spark.requests.TaskContext.get", lambda: Task(properties)
        )

    return begin


def _share(budget: Budget) -> int:
    found = budget.of_task().max_concurrent_requests
    assert found is not None
    return found


@pytest.mark.parametrize("executors", [1, 2, 16, 100, 1000])
@pytest.mark.parametrize("given", [0, 100, 100_000])
def test_tasks_of_any_cluster_keep_both_bounds(
    in_task: Callable[[Mapping[str, str]], None], executors: int, given: int
) -> None:
    """That of an executor and that of the job, unless there are more tasks than requests."""
    in_task({**CLUSTER, "spark.executor.instances": str(executors)})
    share = _share(Budget(256, job_requests=given))
    assert share * 4 <= 256
    assert share * 4 * executors <= max(given or JOB_REQUESTS, 4 * executors)
    # And none is wasted: the next larger share would break a bound.
    most = given or JOB_REQUESTS
    assert (share + 1) * 4 > 256 or (share + 1) * 4 * executors > most


def test_few_tasks_in_a_large_cluster_share_what_is_there(
    in_task: Callable[[Mapping[str, str]], None],
) -> None:
    """A job of ten tasks among thousands of cores has the full share of an executor for each."""
    in_task({**CLUSTER, "spark.executor.instances": "1000"})
    assert _share(Budget(256)) == 1
    assert _share(Budget(256).among(10)) == 64
    assert _share(Budget(256, job_requests=100).among(10)) == 10


def test_a_reader_says_how_many_parts_it_planned(
    repository: Repository, url: str, in_task: Callable[[Mapping[str, str]], None]
) -> None:
    """Spark pickles the reader before it plans, so each part has the number."""
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(40,), chunks=(1,), dtype="i4", dimension_names=["t"]
    )
    array[:] = 1
    session.commit("made")
    options = Reading.begin(ReadOptions.parse({"path": url, "partition-bytes": "40"})).options
    reader = IcechunkReader(options, Reading.begin(options).spark_schema())
    parts = reader.partitions()
    in_task({**CLUSTER, "spark.executor.instances": "1000"})
    assert list(reader.read(parts[0]))
    assert reader.options.budget is not None
    assert reader.options.budget.parts == len(parts)
    assert _share(reader.options.budget) == min(64, JOB_REQUESTS // len(parts)) > 1


def test_a_function_that_reads_all_parts_in_one_task_divides_by_one(
    repository: Repository, url: str, in_task: Callable[[Mapping[str, str]], None]
) -> None:
    """However many parts a job would have: no other task reads with it."""
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(400,), chunks=(1,), dtype="i4", dimension_names=["t"]
    )
    array[:] = 1
    session.commit("made")
    found = _plan_read(ReadOptions.parse({"path": url, "partition-bytes": "4"}))
    assert JOB_REQUESTS // len(found.parts) < 64
    in_task({**CLUSTER, "spark.executor.instances": "1000"})
    assert len(list(found.rows())) == 400
    assert found.reader is not None
    assert found.reader.options.budget is not None
    assert _share(found.reader.options.budget) == 64


@pytest.mark.parametrize(("executors", "expected"), [(1, 64), (100, 10)])
def test_a_reader_that_begins_in_a_task_divides_once(
    repository: Repository,
    url: str,
    in_task: Callable[[Mapping[str, str]], None],
    executors: int,
    expected: int,
) -> None:
    """As those of streams do, which do not know how many parts there are."""
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(4,), dtype="i4", dimension_names=["t"])
    session.commit("made")
    reading = Reading.begin(ReadOptions.parse({"path": url}))
    schema = reading.spark_schema()
    in_task({**CLUSTER, "spark.executor.instances": str(executors)})
    reader = IcechunkReader(reading.options, schema)
    assert list(reader.read(Part((((0, 4),),))))
    assert reader.options.budget is not None
    assert _share(reader.options.budget) == expected


def test_writers_and_streams_take_the_option(
    repository: Repository, url: str, in_task: Callable[[Mapping[str, str]], None]
) -> None:
    """Of ten requests each of four tasks at a time has two."""
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(4,), dtype="i4", dimension_names=["t"])
    session.commit("made")
    given = {"path": url, "max-requests": "10"}
    plan = WritePlan.begin(WriteOptions.parse(given), ["t", "a"], overwrite=True)
    columns = Reading.begin(ReadOptions.parse({"path": url})).spark_schema()
    stream = stream_reader(given, columns)
    assert isinstance(stream, StreamReader)
    assert stream.options.read.budget is not None
    in_task(CLUSTER)
    assert plan.write.fork().handle.repository.source.config.max_concurrent_requests == 2
    assert _share(stream.options.read.budget) == 2
    write = CooperativeWrite.begin(url, max_requests=8)
    assert write.fork().handle.repository.source.config.max_concurrent_requests == 2


@pytest.mark.parametrize("text", ["many", "0", "-3", "1.5", "²"])
def test_a_setting_that_is_no_number_is_refused_before_a_task_runs(
    spark: SparkSession, repository: Repository, url: str, text: str
) -> None:
    """With its name; nothing is committed."""
    before = repository.lookup_branch("main")
    spark.conf.set(JOB_SETTING, text)
    try:
        with pytest.raises(InvalidInputError, match=r"spark\.icechunk\.maxRequests.*positive"):
            map_chunks(spark, url, total, [], NewArray("t", (2,), (1,), "f8"))
    finally:
        spark.conf.unset(JOB_SETTING)
    assert repository.lookup_branch("main") == before


def test_registering_notes_the_cores_of_the_cluster(spark: SparkSession) -> None:
    """Queries are planned where nobody can ask for them."""
    spark.conf.unset(SEEN_CORES)
    register(spark)
    assert spark.conf.get(SEEN_CORES) == str(spark.sparkContext.defaultParallelism)

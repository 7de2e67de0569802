"""Loops and repositories in Spark's processes: started late, safe to fork, with one budget."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import zarr

from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.reader import Reading
from icechunk_async.spark.requests import Budget, tasks_at_a_time
from icechunk_async.spark.write.cooperative import CooperativeWrite, run_tasks
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.sync import ForkSession


@pytest.fixture
def place(url: str) -> str:
    """Return the URL of a repository for 100 requests at a time."""
    repository = Repository.create(
        local_filesystem_storage(url.removeprefix("file://")),
        RepositoryConfig(max_concurrent_requests=100),
    )
    repository.save_config()
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(4,), chunks=(1,), dtype="i4")
    array[:] = np.arange(4)
    session.commit("made")
    return url


@pytest.mark.parametrize(
    ("properties", "task_cpus", "expected"),
    [
        ({"spark.master": "local[6]"}, 1, 6),
        ({"spark.master": "local[6,3]"}, 2, 3),
        ({"spark.master": "local[*]"}, 1, 16),
        ({"spark.master": "local"}, 1, 1),
        ({"spark.master": "spark://host:7077"}, 1, 16),
        ({"spark.master": "spark://host:7077", "spark.executor.cores": "4"}, 1, 4),
        ({"spark.master": "yarn", "resource.executor.cores": "8"}, 4, 2),
        ({"spark.master": "local-cluster[2,3,1024]", "spark.executor.cores": "3"}, 1, 3),
        ({}, 32, 1),
    ],
)
def test_concurrent_tasks_are_counted_as_spark_counts_them(
    properties: dict[str, str], task_cpus: int, expected: int
) -> None:
    """As Spark decides it, on a machine of 16 cores."""
    assert tasks_at_a_time(properties, task_cpus, 16) == expected


def test_writing_tasks_share_the_budget(spark: SparkSession, place: str) -> None:
    """Two tasks at a time, so each has half; the driver has all."""
    write = CooperativeWrite.begin(place)

    def requests(fork: ForkSession) -> int:
        most: int = fork.handle.repository.now().config.effective_max_concurrent_requests
        return most

    def work(fork: ForkSession, task: int) -> None:
        array: Any = zarr.open_array(fork.store, path="a", mode="r+")
        array[task] = requests(fork)

    write.commit(run_tasks(spark, write, 2, work), 2, "told")
    store = Repository.open(place).readonly_session("main").store
    told = np.asarray(zarr.open_array(store, path="a", mode="r")[:])
    assert told.tolist() == [50, 50, 2, 3]
    assert requests(write.fork()) == 100


def test_reading_tasks_share_the_budget(spark: SparkSession, place: str) -> None:
    """Two tasks at a time, so each has half; where the job is planned there is no such limit."""
    options = Reading.begin(ReadOptions.parse({"path": place})).options
    assert options.budget == Budget(100)

    async def requests(repository: AsyncRepository) -> int:
        return repository.config.effective_max_concurrent_requests

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"requests": [options.repository.ask(requests)]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(tell, "requests long").collect()
    assert {row.requests for row in rows} == {50}
    assert options.repository.ask(requests) == 100


def test_importing_starts_nothing() -> None:
    """No thread, no loop and no client, nor PySpark, before something is used."""
    program = """
import sys, threading
import icechunk_async.sync, icechunk_async.spark
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert "pyspark" not in sys.modules
import icechunk_async.spark.source, icechunk_async.spark.read.reader
import icechunk_async.spark.write.rows
import icechunk_async.spark.stream.sink, icechunk_async.spark.write.compute
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env=environment)


def test_workers_are_used_again_and_open_once(spark: SparkSession, place: str) -> None:
    """A worker that serves several jobs keeps its loop and its repository; forks have their own."""
    options = Reading.begin(ReadOptions.parse({"path": place})).options

    async def identity(repository: AsyncRepository) -> int:
        return id(repository)

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import threading

        for _ in batches:
            opened = options.repository.ask(identity), options.repository.ask(identity)
            portals = [it for it in threading.enumerate() if "portal" in it.name]
            row = {
                "worker": [os.getpid()],
                "opened": [opened[0]],
                "same": [opened[0] == opened[1]],
                "portals": [len(portals)],
            }
            yield pa.RecordBatch.from_pydict(row)

    seen: dict[int, set[int]] = {}
    for _ in range(3):
        schema = "worker long, opened long, same boolean, portals long"
        for row in spark.range(0, 2, 1, 2).mapInArrow(tell, schema).collect():
            assert row.same
            assert row.portals == 1
            seen.setdefault(row.worker, set()).add(row.opened)
    assert os.getpid() not in seen
    assert any(len(opened) == 1 for opened in seen.values())
    assert len(seen) < 6  # else none was used again

"""Planned reads reach the driver, and the log that Spark keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.spark import PlannedRead, watch_reads
from tests.spark.tables import make_reader, plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


@pytest.fixture
def planned(spark: SparkSession) -> Iterator[Accumulator[list[PlannedRead]]]:
    """The planned reads of a session, which is no longer watched afterwards."""
    from icechunk_async.spark import register

    yield watch_reads(spark)
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    register(spark)


@pytest.fixture
def snapshot_id(repository: Repository) -> str:
    """The tip of a repository with 100 numbers in chunks of ten."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name in ("x", "v"):
        array = group.create_array(
            name, shape=(100,), chunks=(10,), dtype="i8", dimension_names=["x"]
        )
        array[:] = np.arange(100)
    return session.commit("a hundred numbers")


def read_of(snapshot_id: str, chunks: int, rows: int, *conditions: str) -> PlannedRead:
    """Return the planned read of a query for the root group."""
    return PlannedRead(
        snapshot_id=snapshot_id,
        group="",
        conditions=conditions,
        chunks=chunks,
        all_chunks=10,
        rows=rows,
        all_rows=100,
        partitions=1,
    )


def test_the_driver_learns_what_is_read_and_what_is_pruned(
    spark: SparkSession, planned: Accumulator[list[PlannedRead]], snapshot_id: str, url: str
) -> None:
    """By the option and by filters pushed down; not before a query needs it."""
    reader = spark.read.format("icechunk")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    assert planned.value == []

    whole = reader.load(url)
    assert planned.value == []
    assert whole.count() == 100
    assert planned.value == [read_of(snapshot_id, 10, 100)]

    few = reader.option("where", "x >= 35 and x < 55").load(url)
    assert few.count() == 20
    assert planned.value[1:] == [read_of(snapshot_id, 3, 20, "x")]

    pushed = spark.read.format("icechunk").option("push-filters", "true").load(url)
    assert [row.v for row in pushed.where("x = 12").collect()] == [12]
    assert planned.value[2:] == [read_of(snapshot_id, 1, 1, "x")]


@pytest.mark.usefixtures("snapshot_id")
def test_only_the_latest_thousand_reads_are_kept(
    spark: SparkSession, planned: Accumulator[list[PlannedRead]], url: str
) -> None:
    """A session that runs for months does not fill its driver's memory."""
    for number in range(1200):
        planned.add([read_of("a", number, 0)])
    spark.read.format("icechunk").load(url).count()
    assert len(planned.value) == 1000
    assert [it.chunks for it in planned.value[:2]] == [201, 202]
    assert planned.value[-1].rows == 100


def test_the_log_that_spark_keeps_says_what_is_read(
    spark: SparkSession, snapshot_id: str, url: str
) -> None:
    """At the level INFO, which is below the one of PySpark's processes."""
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    try:
        frame = spark.read.format("icechunk").option("where", "x in (3, 95)").load(url)
        assert frame.count() == 2
        told = spark.tvf.python_worker_logs().where("logger = 'icechunk_async.spark.read.reader'")
        messages = [row.msg for row in told.collect() if snapshot_id in row.msg]
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    read = read_of(snapshot_id, 2, 2, "x")
    assert messages == [str(read)]
    assert "2 of 10 chunks of the grid are read, 2 of 100 rows" in messages[0]


@pytest.mark.parametrize("layout", ["rows", "chunks"])
def test_the_partitions_that_one_worker_reads_open_their_group_once(
    repository: Repository,
    snapshot_id: str,
    url: str,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Opening takes a millisecond for each array of the group, however few a query needs."""
    reader = make_reader(url, layout=layout, snapshot_id=snapshot_id, partition_bytes="100")
    parts = plan(reader)
    if layout == "rows":
        assert len(parts) > 5
    opened: list[str] = []
    opening = zarr.open_group

    def counted(*args: Any, **options: Any) -> Any:
        opened.append(options.get("path", ""))
        return opening(*args, **options)

    monkeypatch.setattr(zarr, "open_group", counted)
    rows = sum(batch.num_rows for part in parts * 3 for batch in reader.read(part))
    assert rows == 3 * (100 if layout == "rows" else 20)
    assert len(opened) <= 1

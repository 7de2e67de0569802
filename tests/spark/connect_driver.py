"""Reading and writing through Spark Connect: run by its test, on a repository made here.

Argument: a directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from pyspark.sql import SparkSession

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import (
    NewArray,
    map_chunks,
    register,
    register_functions,
    verify,
    watch_reads,
)
from icechunk_async.spark.tasks import places_by_number
from icechunk_async.sync import Repository


def main(directory: Path) -> None:
    """Read and write; fail where an answer is not what it should be."""
    url = (directory / "repo").as_uri()
    repository = Repository.create(url)
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    x = group.create_array("x", shape=(4,), chunks=(4,), dtype="i8", dimension_names=["x"])
    x[:] = np.arange(4)
    v = group.create_array("v", shape=(4,), chunks=(2,), dtype="f8", dimension_names=["x"])
    v[:] = np.arange(4)
    session.commit("made")

    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    assert "connect" in type(spark).__module__
    register(spark)
    reader = spark.read.format("icechunk")
    reader.load(url).createOrReplaceTempView("t")
    assert spark.sql("SELECT sum(v) FROM t WHERE x > 1").collect()[0][0] == 5.0
    assert reader.option("table", "snapshots").load(url).count() == 2
    register_functions(spark)
    call = f"icechunk_aggregate('{url}', 'v', 'max')"
    most = spark.sql(f"SELECT value FROM {call}")  # noqa: S608 -- the test's own
    assert most.collect()[0][0] == 3.0

    # The driver has no accumulators here, and learns from the log what was pruned.
    with pytest.raises(InvalidInputError, match="python_worker_logs"):
        watch_reads(spark)
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    few = spark.read.format("icechunk").option("where", "x < 2").load(url)
    assert few.count() == 2
    told = spark.tvf.python_worker_logs().where("logger = 'icechunk_async.spark.read.reader'")
    assert [row.msg for row in told.collect() if "2 of 4 rows" in row.msg]

    # The function is defined here, so it travels by value: a server has no such module.
    twice = NewArray("twice", (4,), (2,), "f8", ["x"])
    assert map_chunks(spark, repository, lambda block: block * 2, ["v"], twice).committed
    rows = spark.createDataFrame([(4, 40.0), (5, 50.0)], "x long, v double").coalesce(1)
    writer = rows.write.format("icechunk").mode("append").option("append-dim", "x")
    writer.option("txnAppId", "connect").option("txnVersion", "1").save(url)

    store = repository.readonly_session("main").store
    read = {name: zarr.open_array(store, path=name, mode="r")[:] for name in ("twice", "v")}
    np.testing.assert_array_equal(read["twice"], [0, 2, 4, 6, 0, 0])
    np.testing.assert_array_equal(read["v"], [0, 1, 2, 3, 40, 50])
    # Jobs ask the server whether it places rows by number, as Spark does.
    assert places_by_number(spark)
    assert not verify(spark, repository).result.findings
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

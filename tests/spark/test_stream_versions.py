"""Streams of every PySpark that we allow, also of those that cannot limit a batch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from icechunk_async.sync.xarray import to_icechunk

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async.sync import Repository

_BEFORE_4_2 = """
import logging, sys
import pyspark.sql.datasource  # where it has the module, it imports it
sys.modules["pyspark.sql.streaming.datasource"] = None  # imports of it fail
from icechunk_async.spark.stream import stream_reader
from icechunk_async.spark.stream.source import UnlimitedReader
from pyspark.sql.types import LongType, StructField, StructType
logging.basicConfig()
columns = StructType([StructField("time", LongType())])
reader = stream_reader({"path": sys.argv[1], "max-commits-per-trigger": "2"}, columns)
assert type(reader) is UnlimitedReader, reader
"""


def _append(repository: Repository, *times: int) -> None:
    session = repository.writable_session("main")
    dataset = xr.Dataset({"v": ("time", np.array(times, "f8"))}, coords={"time": list(times)})
    if len(list(repository.ancestry(branch="main"))) == 1:
        to_icechunk(dataset, session, mode="w")
    else:
        to_icechunk(dataset, session, append_dim="time")
    session.commit("appended")


def _stream(spark: SparkSession, url: str, checkpoint: Path) -> list[list[tuple[Any, ...]]]:
    """Run a query on what is there, and return the rows of each batch."""
    batches: list[list[tuple[Any, ...]]] = []

    def keep(frame: DataFrame, number: int) -> None:
        assert number >= 0
        rows: list[Any] = frame.collect()
        batches.append(sorted(map(tuple, rows)))

    writer = spark.readStream.format("icechunk").load(url).writeStream.foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    assert writer.start().awaitTermination(120)
    return batches


def test_a_query_reads_what_is_there_and_then_what_is_new(
    spark: SparkSession, repository: Repository, url: str, tmp_path: Path
) -> None:
    """All commits in one batch, since no limit was asked for."""
    _append(repository, 0, 1)
    _append(repository, 2)
    assert _stream(spark, url, tmp_path / "checkpoint") == [[(0, 0.0), (1, 1.0), (2, 2.0)]]
    _append(repository, 3)
    assert _stream(spark, url, tmp_path / "checkpoint") == [[(3, 3.0)]]


def test_before_pyspark_4_2_a_stream_has_no_limit_and_says_so(
    repository: Repository, url: str
) -> None:
    """Such a PySpark has no module for limits."""
    _append(repository, 0)
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE_4_2, url],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'max-commits-per-trigger' has no effect before PySpark 4.2" in done.stderr

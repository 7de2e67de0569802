"""Streams are written to arrays, each batch once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.spark.transactions import published_version
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

APP = "stations"


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Answer the URL of a repository with an array that has two times."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    time = group.create_array("time", shape=(2,), chunks=(4,), dtype="i8", dimension_names=["time"])
    time[:] = [0, 10]
    names = ["time", "x"]
    v = group.create_array("v", shape=(2, 3), chunks=(2, 3), dtype="f4", dimension_names=names)
    v[:] = 1
    session.commit("made")
    return url


def batch(directory: Path, name: str, times: list[int], value: float) -> None:
    """Put a file of rows where the stream finds it."""
    directory.mkdir(exist_ok=True)
    lines = [f"{time},{x},{value}" for time in times for x in range(3)]
    (directory / f".{name}").write_text("\n".join(lines))
    (directory / f".{name}").rename(directory / name)


def run(spark: SparkSession, source: Path, checkpoint: Path, url: str, **options: Any) -> None:
    """Run the query until it has seen all there is, one file in a batch."""
    frame = (
        spark.readStream.schema("time long, x long, v float")
        .option("maxFilesPerTrigger", 1)
        .csv(str(source))
        .coalesce(1)
    )
    writer = frame.writeStream.format("icechunk").option("append-dim", "time")
    writer = writer.option("checkpointLocation", str(checkpoint)).outputMode("append")
    for name, value in {"txnAppId": APP, **options}.items():
        writer = writer.option(name, value)
    query = writer.trigger(availableNow=True).start(url)
    query.awaitTermination(120)


def read(url: str) -> tuple[list[int], list[float]]:
    """Answer the times, and the first value of each."""
    group = zarr.open_group(Repository.open(url).readonly_session("main").store, mode="r")
    values: Any = np.asarray(group["v"][:, 0])  # type: ignore[index]
    return np.asarray(group["time"][:]).tolist(), values.tolist()  # type: ignore[index]


def test_each_batch_is_one_commit_and_is_not_written_again(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """Two batches; then the query forgets that the second was committed, and tries it again."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    batch(source, "a.csv", [20], 2)
    batch(source, "b.csv", [30, 40], 3)
    run(spark, source, checkpoint, place)
    expected = [0, 10, 20, 30, 40], [1, 1, 2, 3, 3]
    assert read(place) == expected
    tip = next(iter(Repository.open(place).ancestry(branch="main")))
    assert tip.metadata["spark-transaction"] == {"app-id": APP, "version": 1}
    assert tip.metadata["spark-transactions"] == {APP: 1}

    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    run(spark, source, checkpoint, place)
    assert read(place) == expected
    assert next(iter(Repository.open(place).ancestry(branch="main"))).id == tip.id
    assert published_version(Repository.open(place), "main", APP) == 1


def test_a_stream_must_be_named(spark: SparkSession, place: str, tmp_path: Path) -> None:
    """Else a batch could not be recognised."""
    batch(tmp_path / "source", "a.csv", [20], 2)
    with pytest.raises(Exception, match="txnAppId"):
        run(spark, tmp_path / "source", tmp_path / "checkpoint", place, txnVersion="3")
    assert read(place) == ([0, 10], [1, 1])


def test_a_batch_that_has_no_place_stops_the_query(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """A new one with times that are there; nothing is visible."""
    batch(tmp_path / "source", "a.csv", [10], 2)
    with pytest.raises(Exception, match="have already"):
        run(spark, tmp_path / "source", tmp_path / "checkpoint", place)
    assert read(place) == ([0, 10], [1, 1])

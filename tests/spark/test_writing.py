"""Rows of tables are written to arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr

from icechunk_async.errors import (
    DuplicateRowsError,
    InvalidInputError,
    MissingCoordinatesError,
    OutsideGridError,
)
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.task import write_batches
from tests.spark.weather import commits, dataset, load, make, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async.sync import Repository


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with the dataset, chunks of two by two."""
    make(repository)
    return url


def save(frame: DataFrame, url: str, mode: str, **options: Any) -> None:
    """Write rows, all in one task."""
    writer = frame.coalesce(1).write.format("icechunk").mode(mode)
    for name, value in options.items():
        writer = writer.option(name.replace("_", "-"), value)
    writer.save(url)


def test_overwriting_replaces_the_cells_of_rows_and_no_other(
    spark: SparkSession, place: str
) -> None:
    """Whole chunks, and parts of some; scale, offset and time are encoded; one commit."""
    new = dataset(seed=1)
    part = new.isel(time=slice(0, 3))
    save(table(spark, part), place, "overwrite", message="some days")
    expected = xr.concat([part, dataset().isel(time=slice(3, None))], "time")
    xr.testing.assert_equal(load(place), expected)
    assert commits(place) == 3


def test_appending_makes_every_array_longer(spark: SparkSession, place: str) -> None:
    """Times continue in equal steps, also across a gap; cells without rows have the fill value."""
    times = np.array(["2020-01-06", "2020-01-07", "2020-01-09"], "M8[ns]")
    new = dataset(times, seed=2)
    save(table(spark, new, ("t",)), place, "append", append_dim="time", fill_gaps="true")
    found = load(place)
    assert list(found.time.values) == list(
        np.arange("2020-01-01", "2020-01-10", dtype="M8[D]").astype("M8[ns]")
    )
    xr.testing.assert_equal(found.isel(time=slice(0, 5)), dataset())
    np.testing.assert_array_equal(found.t.sel(time=times), new.t)
    assert (found.p.sel(time=times) == 0).all()  # Zarr's fill value


def test_appended_coordinates_can_be_listed(spark: SparkSession, place: str) -> None:
    """They have no equal steps."""
    times = np.array(["2020-02-01", "2020-03-01"], "M8[ns]")
    new = dataset(times, seed=2)
    save(
        table(spark, new),
        place,
        "append",
        append_dim="time",
        append_values='["2020-02-01", "2020-03-01"]',
    )
    xr.testing.assert_equal(load(place), xr.concat([dataset(), new], "time"))


@pytest.mark.parametrize(
    ("what", "mode", "error", "words"),
    [
        ("twice", "overwrite", DuplicateRowsError, "cell"),
        ("outside", "overwrite", OutsideGridError, "not among the 4 coordinates"),
        ("null", "overwrite", MissingCoordinatesError, "Drop such rows"),
        ("there", "append", OutsideGridError, "have already"),
        ("no column", "overwrite", MissingCoordinatesError, "no column 'lon'"),
        ("unknown", "overwrite", InvalidInputError, "no arrays for the columns"),
        ("too large", "overwrite", InvalidInputError, "cannot hold"),
    ],
)
def test_rows_without_a_cell_are_refused(
    place: str, what: str, mode: str, error: type[Exception], words: str
) -> None:
    """By an error with a name; the task fails, so that nothing is committed."""
    frame = dataset().isel(time=[0]).to_dataframe().reset_index()
    match what:
        case "twice":
            frame = frame.iloc[[*range(len(frame)), 0]]
        case "outside":
            frame["lon"] = frame["lon"].replace(0.1, 0.15)
        case "null":
            frame["lon"] = frame["lon"].replace(0.1, None)
        case "no column":
            frame = frame.drop(columns="lon")
        case "unknown":
            frame = frame.rename(columns={"p": "q"})
        case "too large":
            frame["p"] = 1e6
        case _:
            pass
    rows = pa.Table.from_pandas(frame, preserve_index=False)
    options = {"path": place} | ({"append-dim": "time"} if mode == "append" else {})

    def write() -> None:
        overwrite = mode == "overwrite"
        plan = WritePlan.begin(WriteOptions.parse(options), rows.column_names, overwrite=overwrite)
        write_batches(plan, 0, iter(rows.to_batches()))

    with pytest.raises(error, match=words):
        write()


def test_row_without_a_cell_fails_the_job(spark: SparkSession, place: str) -> None:
    """The error is named in what Spark raises, and nothing is visible."""
    frame = table(spark, dataset().isel(time=[0]))
    with pytest.raises(Exception, match="DuplicateRowsError"):
        save(frame.unionAll(frame.limit(1)), place, "overwrite")
    assert commits(place) == 2


def test_plans_and_errors_of_writes_show_no_secret(
    spark: SparkSession, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its options, its logs, and the error of one that cannot open."""
    secret = {"storage.secret_key": "hunter2"}
    assert "hunter2" not in repr(WriteOptions.parse({"path": place, **secret}))
    frame = table(spark, dataset())
    with pytest.raises(Exception, match="data source") as caught:
        save(frame, place, "overwrite", **secret)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in caplog.text
    assert commits(place) == 2


def test_a_chunk_of_two_tasks_is_joined(spark: SparkSession, place: str) -> None:
    """Rows come in any partitioning; those of one cell in two tasks are named."""
    new = dataset(seed=5)
    frame = table(spark, new).repartition(2, "lat", "lon")
    frame.write.format("icechunk").mode("overwrite").save(place)
    xr.testing.assert_equal(load(place), new)
    assert commits(place) == 3
    again = frame.limit(1).unionAll(frame)
    with pytest.raises(Exception, match="Several rows have time="):
        again.write.format("icechunk").mode("overwrite").save(place)
    assert commits(place) == 3


def test_existing_values_can_be_an_error_or_skip_the_write(spark: SparkSession, place: str) -> None:
    """As Spark's modes error and ignore, which it does not pass on to data sources."""
    frame = table(spark, dataset(seed=3))
    with pytest.raises(Exception, match="AlreadyExistsError"):
        save(frame, place, "overwrite", if_written="error")
    save(frame, place, "overwrite", if_written="ignore")
    assert commits(place) == 2
    xr.testing.assert_equal(load(place), dataset())


def test_a_batch_with_a_version_is_written_once(spark: SparkSession, place: str) -> None:
    """Appending would fail the second time, if it was tried."""
    new = dataset(np.array(["2020-01-06", "2020-01-07"], "M8[ns]"), seed=4)
    for _ in range(2):
        save(table(spark, new), place, "append", append_dim="time", txnAppId="load", txnVersion="7")
    assert commits(place) == 3
    assert load(place).sizes["time"] == 7

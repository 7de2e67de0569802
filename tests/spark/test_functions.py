"""Table functions for SQL: aggregates from statistics, history, and rows of a state."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.errors import PySparkException

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import register_functions
from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.sql import _plan_read
from icechunk_async.sync import Repository
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import to_icechunk

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

NAMES = ("read_icechunk", "icechunk_history", "icechunk_aggregate")


def _from(spark: SparkSession, call: str) -> DataFrame:
    return spark.sql(f"SELECT * FROM {call}")  # noqa: S608 -- the tests' own


@pytest.fixture
def directory(spark: SparkSession, tmp_path: Path) -> Path:
    """Make a repository of two commits whose chunks are objects, and the functions."""
    storage = local_filesystem_storage(str(tmp_path / "r"))
    repository = Repository.create(storage)
    config = repository.config
    config.inline_chunk_threshold_bytes = 0
    repository = Repository.open(storage, config)
    time = np.datetime64("2020-01-01", "D") + np.arange(8)
    values: dict[str, Any] = {
        "t": (("time", "x"), np.arange(16.0).reshape(8, 2)),
        "n": (("time", "x"), np.arange(16).reshape(8, 2)),
        "cold": ("x", [True, False]),
        "large": ("x", np.array([2**64 - 1, 3], "u8")),
        "when": ("x", np.array(["2020-01-01T12", "2020-02-01"], "M8[s]")),
        "far": ("x", np.array(["30000-01-01", "2020-02-01"], "M8[s]")),
        "lasts": ("x", np.array([1, 3], "m8[h]")),
        "none": ("x", [np.nan, np.nan]),
        "word": ("x", np.array(["é" * 40, "z"], object)),
    }
    session = repository.writable_session("main")
    raw = {"when", "far", "lasts"}  # as times of NumPy, not of CF
    dataset = xr.Dataset({name: it for name, it in values.items() if name not in raw})
    dataset = dataset.assign_coords(time=time, x=[1, 2])
    to_icechunk(dataset, session, encoding={"t": {"chunks": (2, 2)}, "n": {"chunks": (2, 2)}})
    for name in raw:
        data = values[name][1]
        array = zarr.create_array(
            session.store, name=name, shape=(2,), chunks=(2,), dtype=data.dtype, fill_value=0
        )
        array[:] = data
    first = session.commit("first")
    repository.create_tag("v1", snapshot_id=first)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="t", mode="r+")[0, 0] = 99
    session.commit("second")
    assert register_functions(spark, options={"storage.durability": "none"}) == NAMES
    return tmp_path / "r"


@pytest.mark.parametrize(
    ("array", "function", "value"),
    [
        ("t", "max", 99.0),
        ("/t", "COUNT", 16),
        ("n", "sum", 120),
        ("n", "mean", 7.5),
        ("cold", "min", False),
        ("large", "max", Decimal(2**64 - 1)),
        ("large", "sum", Decimal(2**64 + 2)),
        ("when", "min", datetime(2020, 1, 1, 12)),
        ("lasts", "sum", timedelta(hours=4)),
        ("none", "max", None),
        ("word", "max", "é" * 40),
        ("word", "min", "z"),
        ("word", "count", 2),
    ],
)
def test_an_aggregate_is_a_value_of_its_type(
    spark: SparkSession, directory: Path, array: str, function: str, value: object
) -> None:
    """Exact, and null without values."""
    (row,) = _from(spark, f"icechunk_aggregate('{directory}', '{array}', '{function}')").collect()
    assert row.value == value
    assert type(row.value) is type(value)


def test_statistics_answer_aggregates_without_chunks(spark: SparkSession, directory: Path) -> None:
    """Of the state that was analyzed, even if all its chunks are gone; others read theirs."""
    Repository.open(str(directory)).analyze(ref="v1")
    call = f"icechunk_aggregate(url => '{directory}', array => 't', function => 'max'"
    (now,) = _from(spark, f"{call})").collect()
    assert (now.value, now.chunks_read, now.chunks, now.bytes_read > 0) == (99, 1, 4, True)
    for chunk in (directory / "chunks").iterdir():
        chunk.unlink()
    (old,) = _from(spark, f"{call}, version => 'v1')").collect()
    assert (old.value, old.chunks_read, old.bytes_read) == (15, 0, 0)
    (few,) = _from(spark, f"{call}, version => 'v1', where => 't < 0')").collect()
    assert (few.value, few["count"], few.chunks_read) == (None, 0, 0)


def test_rows_and_history_are_those_of_the_version(spark: SparkSession, directory: Path) -> None:
    """Resolved by each statement anew; pruned by `where`."""
    two = f"read_icechunk('{directory}') a", f"read_icechunk('{directory}', version => 'v1') b"
    both = _from(spark, f"{two[0]} JOIN {two[1]} USING (time, x) WHERE a.t != b.t")
    assert [tuple(it) for it in both.select("x", "b.t", "a.t").collect()] == [(1, 0.0, 99.0)]
    part = f"read_icechunk('{directory}', arrays => 'n', where => 'x = 2 and n > 9')"
    rows = _from(spark, part)
    assert rows.columns == ["time", "x", "n"]
    assert [it.n for it in rows.orderBy("n").collect()] == [11, 13, 15]

    def latest(version: str) -> str:
        log = _from(spark, f"icechunk_history('{directory}', version => '{version}')")
        return str(log.collect()[0].message)

    assert latest("v1") == "first"
    assert latest("main") == "second"
    session = Repository.open(str(directory)).writable_session("main")
    zarr.open_array(session.store, path="t", mode="r+")[0, 1] = 98
    session.commit("third")
    assert latest("main") == "third"
    assert latest("main~2") == "first"


def test_conditions_select_what_spark_selects_of_a_view(
    spark: SparkSession, directory: Path
) -> None:
    """Each statement has its conditions, so that none can miss what those of another left out."""
    Repository.open(str(directory)).analyze()
    conditions = (
        "x = 2 and n > 9",
        "time >= '2020-01-03 00:00:00'",
        "time = '2020-01-02 00:00:00' and t < 2.5",
        "t > 13.5",
        "n between 3 and 5",
        "n in (1, 5, 14)",
        "n not in (3, 4)",
        "t > 1000",
    )
    frame = spark.read.format("icechunk").option("arrays", "t,n").load(str(directory))
    frame.createOrReplaceTempView("whole")

    def rows(source: str) -> list[tuple[Any, ...]]:
        """Return the rows of all conditions, of one statement: a job costs more than the rows."""
        parts: list[str] = []
        for number, condition in enumerate(conditions):
            named = source.format(condition, condition.replace("'", "\\'"))
            parts.append(f"SELECT {number} AS number, time, x, t, n FROM {named}")  # noqa: S608 -- ours
        return sorted(tuple(it) for it in spark.sql(" UNION ALL ".join(parts)).collect())

    wanted = rows("whole WHERE {0}")
    found = rows(f"read_icechunk('{directory}', arrays => 't,n', where => '{{1}}')")
    assert found == wanted
    assert {it[0] for it in found} == set(range(len(conditions) - 1))


def test_what_cannot_be_asked_is_refused_before_tasks(spark: SparkSession, directory: Path) -> None:
    """With a sentence of ours, where Spark leaves the checking to the function."""
    refused = {
        f"icechunk_aggregate('{directory}', 't', 'maximum')": "There is no aggregate 'maximum'",
        f"icechunk_aggregate('{directory}', 'when', 'sum')": "times, which have no sum",
        f"icechunk_aggregate('{directory}', 'word', 'sum')": "text, which has no sum",
        f"icechunk_aggregate('{directory}', 'y', 'max')": "'/y'",
        f"icechunk_aggregate('{directory}', 't', 'max', where => 't <')": "where",
        f"read_icechunk('{directory}', version => 'v9')": "v9",
        f"read_icechunk('{directory}', vzersion => 'v1')": "vzersion",
        f"read_icechunk('{directory}', where => 'lat = 1')": "no column",
        "read_icechunk(3)": "'url' of read_icechunk must be constant text",
        "icechunk_history(url => NULL)": "needs the URL of a repository",
        "read_icechunk('dbfs:/mnt/x')": "one slash after its scheme",
        f"(SELECT '{directory}' AS u), LATERAL icechunk_history(u)": "must be constant text",
    }
    for call, why in refused.items():
        with pytest.raises(PySparkException, match=why):
            _from(spark, call).schema  # noqa: B018 -- what is analyzed
    with pytest.raises(InvalidInputError, match="option 'brxanch'"):
        register_functions(spark, options={"brxanch": "x"})
    far = _from(spark, f"icechunk_aggregate('{directory}', 'far', 'max')")
    with pytest.raises(PySparkException, match=r"is 30000-01-01.*timestamp_ntz cannot hold"):
        far.collect()


def test_options_that_choose_rows_are_refused() -> None:
    """Not followed by some of the functions: an aggregate would be of all rows, without a word."""
    spark: Any = None
    for name, value in {
        "where": "t < 5",
        "Group": "g",
        "arrays": "t",
        "table": "refs",
        "layout": "chunks",
    }.items():
        with pytest.raises(InvalidInputError, match="in each statement"):
            register_functions(spark, options={name: value})


def test_times_that_python_has_no_objects_for_are_refused(repository: Repository, url: str) -> None:
    """By a sentence that names the column; other columns and rows are read."""
    session = repository.writable_session("main")
    for name, data in {"t": np.arange(2), "when": np.array(["2020", "30000"], "M8[Y]")}.items():
        array = zarr.create_array(
            session.store,
            name=name,
            shape=(2,),
            chunks=(1,),
            dtype=data.astype("M8[s]").dtype if name == "when" else data.dtype,
            dimension_names=["x"],
            fill_value=0,
        )
        array[:] = data
    session.commit("far")

    def rows(**given: str) -> list[Any]:
        return list(_plan_read(ReadOptions.parse({"path": url, **given})).rows())

    assert rows(arrays="t") == [(0, 0), (1, 1)]
    assert rows(where="x = 0") == [(0, 0, datetime(2020, 1, 1))]
    with pytest.raises(InvalidInputError, match="'when' has times outside of the years 1 to 9999"):
        rows()


def test_too_many_rows_for_one_task_are_refused(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """By the plan, so that a condition on a dimension makes them few enough."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name, length, dims in (("x", 1001, ["x"]), ("y", 1000, ["y"])):
        array = group.create_array(
            name, shape=(length,), chunks=(length,), dtype="i8", dimension_names=dims
        )
        array[:] = np.arange(length)
    group.create_array(
        "t", shape=(1001, 1000), chunks=(7, 1000), dtype="i1", dimension_names=["x", "y"]
    )
    session.commit("large")
    register_functions(spark)
    with pytest.raises(PySparkException, match=r"return 1001000 rows.*most are 1000000.*views"):
        _from(spark, f"read_icechunk('{url}')")
    rows = _from(spark, f"read_icechunk('{url}', where => 'x = 3')")
    assert rows.where("y < 10").count() == 10


def test_no_plan_shows_options_of_the_storage(spark: SparkSession, directory: Path) -> None:
    """They travel with the function; credentials in a URL are refused."""
    for name, more in (("read_icechunk", ""), ("icechunk_aggregate", ", 't', 'max'")):
        found = _from(spark, f"{name}('{directory}'{more})")
        found.createOrReplaceTempView("found")
        for kind in ("EXTENDED", "FORMATTED"):
            (row,) = spark.sql(f"EXPLAIN {kind} TABLE found").collect()
            assert name in row[0]
            assert "durability" not in row[0]
    (row,) = spark.sql("DESCRIBE FUNCTION EXTENDED read_icechunk").select("*").limit(1).collect()
    assert "durability" not in str(row)
    register_functions(spark)
    # Without the driver of S3 that is missed first.
    with pytest.raises(PySparkException, match=r"holds no credentials|aiobotocore") as caught:
        _from(spark, "icechunk_history('s3://KEY:HUNTER2@bucket/x')")
    assert "HUNTER2" not in str(caught.value)

"""Schemas and tasks of Sail, which runs sources of Spark, too; tox's `sail` tests it itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pyspark.errors import UnsupportedOperationException
from pyspark.sql.types import StructType

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import tasks, verify, write_rows
from icechunk_async.spark.read.schemas import arrow_schema
from icechunk_async.spark.source import IcechunkSource
from icechunk_async.spark.write import by_chunk
from tests.spark.here import session_here
from tests.spark.weather import TIMES, commits, dataset, load, make, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from icechunk_async.spark.read.reader import IcechunkReader
    from icechunk_async.spark.write.rows import RowWriter
    from icechunk_async.sync import Repository


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with the small dataset."""
    make(repository)
    return url


def _rows(seed: int = 1) -> pa.Table:
    return pa.Table.from_pandas(dataset(seed=seed).to_dataframe().reset_index())


def test_columns_are_a_schema_of_arrow_as_well(place: str) -> None:
    """Of tables with instants too, for which Sail has no zone; for Spark nothing changes."""
    for options in ({}, {"table": "snapshots"}, {"layout": "chunks"}):
        found = IcechunkSource({"path": place, **options}).schema()
        plain = StructType(found.fields)
        assert isinstance(found, StructType)
        assert found.json() == plain.json()
        assert pa.schema(cast("Any", found)) == arrow_schema(plain)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "+02:00"])
def test_a_schema_of_arrow_is_followed_with_its_zone(place: str, zone: str) -> None:
    """Sail refuses batches of any other type than that which it asked for."""
    asked = pa.schema([("lat", pa.float32()), ("time", pa.timestamp("us", zone))])
    source = IcechunkSource({"path": place, "where": "lat = 30"})
    source.schema()
    reader = cast("IcechunkReader", source.reader(asked))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    found = pa.Table.from_batches(batches)
    assert found.schema == asked
    times = found.column("time").cast(pa.timestamp("us", "UTC")).unique()
    assert sorted(times.cast(pa.int64()).to_pylist()) == TIMES.astype("M8[us]").view("i8").tolist()


@pytest.mark.parametrize("layout", ["rows", "tiledb"])
def test_filters_without_their_casts_are_refused(place: str, layout: str) -> None:
    """Pushed down, they would leave out rows that the query selects."""
    source = IcechunkSource({"path": place, "layout": layout, "push-filters": "true"})
    with pytest.raises(InvalidInputError, match=r"does not go with Sail.*option 'where'"):
        source.reader(pa.schema([("t", pa.float32())]))


def test_rows_are_written_by_tasks_that_know_no_number(place: str) -> None:
    """The engine returns one message for each, by whose order they are told apart."""
    rows = _rows().select(["time", "lat", "lon", "t", "p"])
    source = IcechunkSource({"path": place, "txnAppId": "job", "txnVersion": "1"})
    writer = cast("RowWriter", source.writer(rows.schema, overwrite=True))
    parts = [rows.slice(at, 20) for at in range(0, len(rows), 20)]
    messages = [writer.write(iter(it.to_batches())) for it in parts]
    assert {it.answer.task for it in messages} == {-1}
    writer.commit(messages)
    assert load(place).equals(dataset(seed=1))
    again = IcechunkSource({"path": place, "txnAppId": "job", "txnVersion": "1"})
    again.writer(rows.schema, overwrite=True).commit(cast("Any", messages))
    assert commits(place) == 3  # of the beginning, of the data, and this one


def test_rows_need_not_be_placed_by_number(
    spark: SparkSession, place: str, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are placed by hash: those of a chunk are in one partition, others without any."""
    frame = table(spark, dataset(seed=2)).repartition(3)

    def places_by_number(_: SparkSession) -> bool:
        return False

    for module in (tasks, by_chunk):
        monkeypatch.setattr(module, "places_by_number", places_by_number)
    published = write_rows(frame, repository, mode="overwrite", tasks=5)
    assert published.committed
    assert load(place).equals(dataset(seed=2))
    report = verify(spark, repository)
    assert not report.result.findings


@pytest.mark.only_spark
def test_engines_are_asked_whether_they_place_rows_by_number(spark: SparkSession) -> None:
    """Only those behind Spark Connect, for which it costs a request."""

    class Sail:
        """Fails as Sail does when a plan is looked at."""

        def range(self, _: int) -> Sail:
            return self

        def selectExpr(self, _: str) -> Sail:  # noqa: N802 -- Spark's
            return self

        def repartitionById(self, *_: Any) -> Sail:  # noqa: N802 -- Spark's
            return self

        @property
        def schema(self) -> Any:
            raise UnsupportedOperationException("direct shuffle partition ID expression")

    Sail.__module__ = "pyspark.sql.connect.session"
    assert not tasks.places_by_number(cast("Any", Sail()))
    assert tasks.places_by_number(spark)
    assert tasks.places_by_number(session_here())


def test_a_report_without_rows_names_its_columns(repository: Repository) -> None:
    """Spark Connect makes no data frame of a table without rows by itself."""
    report = verify(session_here(), repository)
    assert not report.result.findings
    assert report.table.num_rows == 0
    assert "problem" in report.table.column_names

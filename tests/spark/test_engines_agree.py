"""Spark answers statements over arrays as DuckDB does, through the same planner of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import arrow
from tests.unit.arrow.queries import QUERIES, make_weather

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")


def _compare(spark: SparkSession, folder: Path, frame: DataFrame, asked: Iterable[str]) -> None:
    frame.createOrReplaceTempView("weather")
    connection = duckdb.connect()
    connection.register("weather", arrow.dataset(str(folder)))
    for statement in asked:
        expected = connection.sql(statement).to_arrow_table().to_pylist()
        found = [row.asDict() for row in spark.sql(statement).collect()]
        assert found == expected, statement


def test_spark_returns_the_rows_of_duckdb(spark: SparkSession, tmp_path: Path) -> None:
    """For fifty statements, with nulls, unsigned numbers, times and descending coordinates.

    Spark keeps the rows, which a source in Python hands over whole for each statement anyway: no
    filter and no column of a statement reaches it.
    """
    make_weather(tmp_path)
    frame = spark.read.format("icechunk").load(str(tmp_path)).coalesce(1).cache()
    _compare(spark, tmp_path, frame, QUERIES)
    frame.unpersist()


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(QUERIES[::25], id="some"),
        pytest.param(QUERIES, id="all", marks=pytest.mark.thorough),
    ],
)
def test_each_statement_reads_the_arrays(
    spark: SparkSession, tmp_path: Path, statements: Iterable[str]
) -> None:
    """Planned and read anew for each."""
    make_weather(tmp_path)
    frame = spark.read.format("icechunk").load(str(tmp_path))
    _compare(spark, tmp_path, frame, statements)

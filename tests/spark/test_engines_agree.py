"""Spark answers statements over arrays as DuckDB does, through the same planner of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import arrow
from tests.unit.arrow.queries import QUERIES, make_weather

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(QUERIES[::6], id="some"),
        pytest.param(QUERIES, id="all", marks=pytest.mark.thorough),
    ],
)
def test_spark_returns_the_rows_of_duckdb(
    spark: SparkSession, tmp_path: Path, statements: Sequence[str]
) -> None:
    """With nulls, unsigned numbers, times and descending coordinates."""
    repository = make_weather(tmp_path)
    spark.read.format("icechunk").load(str(tmp_path)).createOrReplaceTempView("weather")
    connection = duckdb.connect()
    connection.register("weather", arrow.dataset(repository))
    for statement in statements:
        expected = connection.sql(statement).to_arrow_table().to_pylist()
        found = [row.asDict() for row in spark.sql(statement).collect()]
        assert found == expected, statement

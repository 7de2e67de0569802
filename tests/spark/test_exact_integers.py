"""Integers of 64 bits of which some are missing, in Spark: exact, with null."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read.chunks import SUMMARY
from tests.spark.tables import make_reader, plan, read
from tests.unit.arrow.test_exact_integers import SIGNED, UNSIGNED, put

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture
def integers(tmp_path: Path) -> str:
    """Return a repository with signed and unsigned ones, of which 7 marks missing ones."""
    marks = {"_FillValue": 7}
    put(tmp_path / "r", i=(SIGNED, "i8", marks), u=(UNSIGNED, "u8", marks))
    return (tmp_path / "r").as_uri()


def test_rows_and_conditions_are_exact(integers: str) -> None:
    """Chunks are left out by exact bounds; the schema of earlier versions may be asked for."""
    found = read(integers)
    assert found.schema.field("i").type == pa.int64()
    assert found.schema.field("u").type == pa.decimal128(20, 0)
    for name, values in (("i", SIGNED), ("u", UNSIGNED)):
        assert found[name].to_pylist() == [None if it == 7 else it for it in values]
        for it in values:
            if it != 7:
                rows = read(integers, where=f"{name} = {it}")
                assert rows["x"].to_pylist() == [values.index(it)]
                assert (
                    sum(len(p.boxes) for p in plan(make_reader(integers, where=f"{name} = {it}")))
                    < 4
                )
    few = pa.schema([("i", pa.float64())])
    assert read(integers, where="x in (4, 6)", schema=few)["i"].to_pylist() == [None, 5.0]
    with pytest.raises(InvalidInputError, match="Read it as int64"):
        read(integers, schema=few)


def test_statistics_of_chunks_leave_out_marks(integers: str) -> None:
    """As of doubles: the chunk of two marks has no value."""
    schema = pa.schema([("array", pa.string()), ("chunk", pa.list_(pa.int64())), SUMMARY])
    rows = read(integers, layout="chunks", schema=schema).to_pylist()
    (row,) = [it for it in rows if it["array"] == "/i" and it["chunk"] == [2]]
    assert (row["statistics"]["valid"], row["statistics"]["missing"]) == (0, 2)
    (row,) = [it for it in rows if it["array"] == "/i" and it["chunk"] == [3]]
    assert (row["statistics"]["minimum"], row["statistics"]["missing"]) == (5.0, 0)


@pytest.mark.only_spark
def test_spark_sees_them_exactly(spark: SparkSession, integers: str) -> None:
    """In its own types, and in sums."""
    frame = spark.read.format("icechunk").load(integers)
    types = {it["name"]: it["type"] for it in json.loads(frame.schema.json())["fields"]}
    assert (types["i"], types["u"]) == ("long", "decimal(20,0)")
    assert [row.i for row in frame.orderBy("x").collect()] == [
        None if it == 7 else it for it in SIGNED
    ]
    assert frame.where("i = 9007199254740993").count() == 1
    assert frame.where("u is null").count() == 2

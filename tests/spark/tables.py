"""Reads with the reader itself, as a planning process and tasks of Spark do, without Spark."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.reader import IcechunkReader, Part, PushingReader, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.datasource import Filter

__all__ = ["make_reader", "plan", "read"]


def make_reader(
    url: str,
    *,
    schema: pa.Schema | None = None,
    filters: Sequence[Filter] = (),
    **options: str,
) -> IcechunkReader:
    """Return the reader of a query; ``_`` in names of options stands for ``-``."""
    given = {name.replace("_", "-"): text for name, text in options.items()}
    parsed = ReadOptions.parse({"path": url, **given})
    wanted = Reading.begin(parsed).spark_schema()
    if schema is not None:
        wanted = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    reader = PushingReader(parsed, wanted)
    assert list(reader.pushFilters(list(filters))) == list(filters)
    return reader


def plan(reader: IcechunkReader) -> list[Part]:
    """Return the partitions of a query."""
    parts = reader.partitions()
    assert all(isinstance(part, Part) for part in parts)
    return [part for part in parts if isinstance(part, Part)]


def read(url: str, **options: Any) -> pa.Table:
    """Return all rows of a query, in the order of the partitions."""
    reader = make_reader(url, **options)
    parts = plan(reader)
    copy: IcechunkReader = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in parts for batch in copy.read(pickle.loads(pickle.dumps(part)))]
    return pa.Table.from_batches(batches, reader.schema)

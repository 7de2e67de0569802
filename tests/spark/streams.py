"""Follows a branch with the streaming source itself, as Spark does, without Spark."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from icechunk_async.spark.stream import stream_reader
from icechunk_async.spark.stream.admitting import AdmittingReader
from icechunk_async.spark.stream.changes import ChangePart
from icechunk_async.spark.stream.source import stream_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["follow", "follower", "read_batch"]


def follower(url: str, schema: StructType | None = None, **options: str) -> AdmittingReader:
    """Return the reader of a stream; ``_`` in names of options stands for ``-``."""
    given = {"path": url, **{name.replace("_", "-"): text for name, text in options.items()}}
    columns = schema or stream_schema({"changes": "appended", **given})
    reader = stream_reader(given, columns)
    assert isinstance(reader, AdmittingReader)
    return reader


def read_batch(
    reader: AdmittingReader, start: dict[str, Any], end: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of a batch, as tasks read them."""
    parts = reader.partitions(start, end)
    copy: AdmittingReader = pickle.loads(pickle.dumps(reader))
    rows: list[dict[str, Any]] = []
    for part in parts:
        assert isinstance(part, ChangePart)
        for batch in copy.read(pickle.loads(pickle.dumps(part))):
            rows += batch.to_pylist()
    return rows


def follow(reader: AdmittingReader, start: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the rows of one batch with all that there is."""
    begin = reader.initialOffset() if start is None else start
    return read_batch(reader, begin, reader.latestOffset(begin, reader.getDefaultReadLimit()))

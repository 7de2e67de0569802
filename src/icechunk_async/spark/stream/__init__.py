"""Streams: the commits of a branch as a source, and a sink that writes each batch exactly once.

The data source uses `stream_reader` and `sink`. `source` is the streaming source, in `admitting`
for versions of PySpark that can limit a batch. `commits` walks a branch's history; `changes` finds
the rows and chunks that a commit changed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType

__all__ = ["stream_reader"]


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Return the source of a streaming query.

    PySpark cannot limit a batch before version 4.2.
    """
    from icechunk_async.spark.options import StreamOptions  # noqa: PLC0415 -- where queries begin

    parsed = StreamOptions.parse(options)
    parsed = replace(parsed, read=parsed.read.with_budget())
    if find_spec("pyspark.sql.streaming.datasource") is not None:
        from icechunk_async.spark.stream.admitting import AdmittingReader  # noqa: PLC0415

        return AdmittingReader(parsed, schema)
    from icechunk_async.spark.stream.source import UnlimitedReader  # noqa: PLC0415

    return UnlimitedReader(parsed, schema)

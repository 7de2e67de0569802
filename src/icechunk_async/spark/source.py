"""The data source ``icechunk`` of Spark: what PySpark asks for readers and writers.

Nothing alive is kept on a source or a reader: PySpark pickles them between short-lived processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyspark.sql.datasource import DataSource

from icechunk_async.spark.options import ReadOptions, names_stream_options

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from icechunk_async.spark.read.reader import PlannedRead

__all__ = ["IcechunkSource", "register"]

_REDACTION: Final = "spark.sql.redaction.options.regex"
_USUAL: Final = "(?i)url"
_HIDDEN: Final = r"(?i)storage\.|virtual-chunk-access"


class IcechunkSource(DataSource):
    """Arrays, chunks and history of an Icechunk repository as tables."""

    _pinned: str | None = None
    """Snapshot that the schema was taken from; the rows then come from the same one."""
    planned: ClassVar[Accumulator[list[PlannedRead]] | None] = None
    """Where to tell what is read, in a session that is watched."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "icechunk"

    def schema(self) -> StructType:
        """Return the columns of what the options name, and stay with the snapshot of now."""
        from icechunk_async.spark.read.reader import Reading  # noqa: PLC0415 -- not for writing

        if names_stream_options(self.options):
            columns: StructType = _part("stream.source").stream_schema(self.options)
            return columns
        reading = Reading.begin(self._read_options())
        self._pinned = reading.options.snapshot_id
        return reading.spark_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        from icechunk_async.spark.read.reader import (  # noqa: PLC0415 -- not without need
            IcechunkReader,
            PushingReader,
        )

        options = self._read_options()
        pushing = options.push_filters and options.table is None and options.layout == "rows"
        kind = PushingReader if pushing else IcechunkReader
        return kind(options, schema, self.planned)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Return the writer of a batch."""
        made: DataSourceWriter = _part("write.rows").batch_writer(
            self.options, schema, overwrite=overwrite
        )
        return made

    def streamWriter(  # noqa: N802 -- PySpark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        """Return the sink of a streaming query."""
        made: DataSourceStreamWriter = _part("stream.sink").stream_writer(
            self.options, schema, overwrite=overwrite
        )
        return made

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the source of a streaming query."""
        made: DataSourceStreamReader = _part("stream.source").stream_reader(self.options, schema)
        return made

    def _read_options(self) -> ReadOptions:
        return ReadOptions.parse(self.options, snapshot_id=self._pinned)


def _part(name: str) -> Any:
    """Import what only some queries need."""
    from importlib import import_module  # noqa: PLC0415

    return import_module(f"icechunk_async.spark.{name}")


def register(spark: SparkSession) -> None:
    """Make the format ``icechunk`` known to a Spark session.

    Spark finds it by itself in processes where this package is installed; this is for sessions
    that looked before it was, and for those of Spark Connect.

    It also keeps the options that may hold secrets out of the plans that the session shows, where
    Spark prints the options of streams: it adds them to ``spark.sql.redaction.options.regex``.

    Args:
        spark: the session; one of Spark Connect will do.
    """
    spark.dataSource.register(IcechunkSource)
    hidden = spark.conf.get(_REDACTION, _USUAL) or ""
    if _HIDDEN not in hidden:
        spark.conf.set(_REDACTION, f"{hidden}|{_HIDDEN}" if hidden else _HIDDEN)

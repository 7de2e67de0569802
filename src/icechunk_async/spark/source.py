"""The data source `icechunk` of Spark: what PySpark asks for readers and writers.

PySpark pickles sources and readers between short-lived processes, so they hold plain data only.
Parts are imported when a query needs them: each process would pay seconds for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyspark.accumulators import AccumulatorParam
from pyspark.sql.datasource import DataSource

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.options import ReadOptions, names_stream_options
from icechunk_async.spark.requests import SEEN_CORES, seen_cores

if TYPE_CHECKING:
    import pyarrow as pa
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
    from icechunk_async.tiledb.arrays.portable import PortableArray

__all__ = ["IcechunkSource", "register", "watch_reads"]

_REDACTION: Final = "spark.sql.redaction.options.regex"
# Spark's own default, which `conf.get` with another default does not return.
_DEFAULT_REDACTION: Final = "(?i)url"
# Keys of a storage, and the credentials of virtual chunk containers.
_HIDDEN: Final = r"(?i)storage\.|virtual-chunk-access"
# A notebook may watch for days, and the driver keeps what was gathered.
_KEPT_READS: Final = 1000


class IcechunkSource(DataSource):
    """Arrays, chunks and history of an Icechunk repository as tables, and TileDB arrays."""

    _pinned: str | None = None
    """Snapshot that the schema was taken from, so that rows come from the same one."""
    _seen: PortableArray | None = None
    """With the layout `tiledb`: what the schema was taken from."""
    planned: ClassVar[Accumulator[list[PlannedRead]] | None] = None
    """Receives planned reads in a session that watches them."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "icechunk"

    def schema(self) -> StructType:
        """Return the columns for the options, and pin the current snapshot."""
        if names_stream_options(self.options):
            columns: StructType = _part("stream.source").stream_schema(self.options)
            return columns
        options = self._read_options()
        if options.layout == "tiledb":
            module = _part("read.tiledb")
            # Spark pickles this object after `schema`, and asks a copy for the reader: what is
            # pinned here is what rows come from, whatever others commit in between.
            self._seen = module.pinned(options)
            found = module.spark_schema(options, self._seen)
        else:
            reading = _part("read.reader").Reading.begin(options)
            self._pinned = reading.options.snapshot_id
            found = reading.spark_schema()
        shown: StructType = _part("read.schemas").ArrowStructType(found.fields)
        return shown

    def reader(self, schema: StructType | pa.Schema) -> DataSourceReader:
        """Return the reader of a batch query. Sail hands over a schema of Arrow."""
        options = self._read_options()
        if options.push_filters:
            _part("read.schemas").check_pushing(schema)
        if options.layout == "tiledb":
            made: DataSourceReader = _part("read.tiledb").batch_reader(
                options, schema, self._seen, self.planned
            )
            return made
        pushing = options.push_filters and options.table is None and options.layout == "rows"
        module = _part("read.reader")
        # A class without `pushFilters` where nothing is to be pushed: with one, Spark refuses the
        # query unless `spark.sql.python.filterPushdown.enabled` is set.
        kind = module.PushingReader if pushing else module.IcechunkReader
        reader: DataSourceReader = kind(options, schema, self.planned)
        return reader

    def writer(
        self,
        schema: StructType | pa.Schema,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceWriter:
        """Return the writer of a batch."""
        writer: DataSourceWriter = _part("write.rows").batch_writer(
            self.options, schema, overwrite=overwrite
        )
        return writer

    def streamWriter(  # noqa: N802 -- PySpark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        """Return the sink of a streaming query."""
        writer: DataSourceStreamWriter = _part("stream.sink").stream_writer(
            self.options, schema, overwrite=overwrite
        )
        return writer

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the source of a streaming query."""
        reader: DataSourceStreamReader = _part("stream").stream_reader(self.options, schema)
        return reader

    def _read_options(self) -> ReadOptions:
        return ReadOptions.parse(self.options, snapshot_id=self._pinned)


def _part(name: str) -> Any:
    """Import a module that only some queries need."""
    from importlib import import_module  # noqa: PLC0415

    return import_module(f"icechunk_async.spark.{name}")


def register(spark: SparkSession) -> None:
    """Make the format `icechunk` known to a Spark session.

    Spark finds the format by itself in processes that start after this package was installed.
    Register it in sessions that started before, and in those of Spark Connect.

    Spark prints the options of streams in query plans. Registering also adds the options that may
    hold secrets to `spark.sql.redaction.options.regex`, and notes how many cores the cluster has,
    by which tasks divide their requests.

    Args:
        spark: the session, also one of Spark Connect.
    """
    spark.dataSource.register(IcechunkSource)
    # Setting it replaces Spark's own default, so that is kept beside ours.
    hidden = spark.conf.get(_REDACTION, _DEFAULT_REDACTION) or ""
    # Notebooks register again and again, which must not make the pattern longer each time.
    if _HIDDEN not in hidden:
        spark.conf.set(_REDACTION, f"{hidden}|{_HIDDEN}" if hidden else _HIDDEN)
    cores = seen_cores(spark)
    if cores:
        spark.conf.set(SEEN_CORES, str(cores))


class _Latest(AccumulatorParam[list["PlannedRead"]]):
    """Gathers planned reads in the driver, and forgets the oldest."""

    def zero(self, value: list[PlannedRead]) -> list[PlannedRead]:
        """Return the empty start of each task."""
        del value
        return []

    def addInPlace(  # noqa: N802 -- PySpark's name
        self, value1: list[PlannedRead], value2: list[PlannedRead]
    ) -> list[PlannedRead]:
        """Append, and keep the latest."""
        return [*value1, *value2][-_KEPT_READS:]


def watch_reads(spark: SparkSession) -> Accumulator[list[PlannedRead]]:
    """Register the format `icechunk` like `register`, and record which reads queries plan.

    Each query for rows is recorded once, at its first action. The Python process that plans its
    partitions reports through a Spark accumulator, so the record is there when the action
    returns. Call `register` again to stop.

    Args:
        spark: the session; Spark Connect has no accumulators.

    Returns:
        The accumulator. Its `value` holds the latest 1,000 reads, the oldest first.

    Raises:
        InvalidInputError: the session is one of Spark Connect. Nothing is registered.
    """
    if not hasattr(spark, "sparkContext"):
        raise InvalidInputError(
            "Spark Connect has no accumulators, through which planned reads reach the driver. Set "
            "spark.sql.pyspark.worker.logging.enabled to true and read "
            "spark.tvf.python_worker_logs() instead."
        )
    register(spark)
    gathered: Accumulator[list[PlannedRead]] = spark.sparkContext.accumulator([], _Latest())

    # A class that is made here travels by value, with the accumulator: cloudpickle would send the
    # name of one that a module has.
    class WatchedSource(IcechunkSource):
        planned = gathered

    spark.dataSource.register(WatchedSource)
    return gathered

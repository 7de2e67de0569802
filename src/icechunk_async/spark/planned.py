"""What queries were planned to read, and so what conditions spared them: for logs and programs."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.accumulators import AccumulatorParam

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.source import IcechunkSource, register

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

__all__ = ["PlannedRead", "report", "watch_reads"]

_log = logging.getLogger("icechunk_async.spark.reading")
_KEPT: Final = 1000
_WORKERS_ARE_HEARD: Final = "PYSPARK_SPARK_SESSION_UUID"
"""PySpark sets it in workers whose logs it keeps: ``spark.sql.pyspark.worker.logging.enabled``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """What one query reads of a group's table of rows."""

    snapshot_id: str | None
    group: str
    """As the option names it; empty for the root."""
    conditions: tuple[str, ...]
    """Columns that conditions are on, of the option ``where`` and of filters pushed down."""
    chunks: int
    """Chunks of the table's grid that are read, of each array."""
    all_chunks: int
    rows: int
    """Rows that Spark gets, before its own filters."""
    all_rows: int
    partitions: int

    def __str__(self) -> str:
        """Say it in a sentence."""
        return (
            f"Snapshot {self.snapshot_id}, group {self.group!r}: {self.chunks} of "
            f"{self.all_chunks} chunks of the grid are read, {self.rows} of {self.all_rows} rows, "
            f"in {self.partitions} partitions; conditions on "
            f"{', '.join(self.conditions) or 'nothing'}."
        )


class _Latest(AccumulatorParam[list[PlannedRead]]):
    """Gathers reads in the driver, and forgets the oldest."""

    def zero(self, value: list[PlannedRead]) -> list[PlannedRead]:
        """Begin with none."""
        del value
        return []

    def addInPlace(  # noqa: N802 -- PySpark's name
        self, value1: list[PlannedRead], value2: list[PlannedRead]
    ) -> list[PlannedRead]:
        """Append, and keep the latest."""
        return [*value1, *value2][-_KEPT:]


def watch_reads(spark: SparkSession) -> Accumulator[list[PlannedRead]]:
    """Register the format ``icechunk`` as :func:`register` does, and note what reads are planned.

    Each query for rows is noted at its first action, once. The process of Python that plans its
    partitions tells the driver through an accumulator of Spark, so the note is there when the
    action returns. Calling :func:`register` again ends it.

    Args:
        spark: the session; not one of Spark Connect, which has no accumulators.

    Returns:
        The accumulator. Its ``value`` is the latest 1,000 reads, the oldest first.

    Raises:
        InvalidInputError: the session is one of Spark Connect. Nothing is registered.
    """
    if not hasattr(spark, "sparkContext"):
        raise InvalidInputError(
            "Spark Connect has no accumulators, by which the driver could be told what was "
            "planned. Set spark.sql.pyspark.worker.logging.enabled to true and read "
            "spark.tvf.python_worker_logs() instead."
        )
    register(spark)
    gathered: Accumulator[list[PlannedRead]] = spark.sparkContext.accumulator([], _Latest())

    class WatchedSource(IcechunkSource):
        planned = gathered

    spark.dataSource.register(WatchedSource)
    return gathered


def report(read: PlannedRead, gathered: Accumulator[list[PlannedRead]] | None) -> None:
    """Log what is read and what is not, and tell the driver if it watches."""
    if _WORKERS_ARE_HEARD in os.environ and _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)  # else the root logger drops what the user asked PySpark for
    _log.info("%s", read)
    if gathered is not None:
        gathered.add([read])

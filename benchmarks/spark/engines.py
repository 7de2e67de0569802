"""Stand-ins for a Spark session, whose tasks a pool or Dask runs: the same jobs without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import dask
import pyarrow as pa
from dask.base import compute
from dask.delayed import delayed
from pyspark import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ProcessPoolExecutor

    from pyspark.sql import SparkSession

    type Run = Callable[[bytes, Sequence[pa.RecordBatch]], Sequence[pa.RecordBatch]]

__all__ = ["on_dask", "on_pool"]


def on_pool(pool: ProcessPoolExecutor, width: int) -> SparkSession:
    """Return a session whose tasks run in a pool."""

    def run(work: bytes, parts: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
        running = [pool.submit(_task, work, it) for it in parts]
        return [it.result() for it in running]

    return cast("SparkSession", _Session(run, width))


def on_dask(pool: ProcessPoolExecutor, width: int) -> SparkSession:
    """Return a session whose tasks Dask runs, in a pool."""

    def run(work: bytes, parts: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
        task: Any = delayed(_task, pure=False)
        with dask.config.set(pool=pool):
            found: tuple[pa.RecordBatch, ...] = compute(
                *(task(work, it) for it in parts), scheduler="processes"
            )
        return found

    return cast("SparkSession", _Session(run, width))


def _task(work: bytes, part: pa.RecordBatch) -> pa.RecordBatch:
    """Do the work of one part; runs in the pool."""
    (found,) = cloudpickle.loads(work)(iter([part]))
    return cast("pa.RecordBatch", found)


class _Conf:
    def __init__(self, width: int) -> None:
        self._settings = {"spark.default.parallelism": str(width)}

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._settings.get(name, default)


class _Frame:
    def __init__(self, run: Run, table: pa.Table) -> None:
        self._run = run
        self._table = table

    def repartitionById(self, count: int, _: str) -> _Frame:  # noqa: N802 -- Spark's
        """A row is a part."""
        assert count == self._table.num_rows
        return self

    def mapInArrow(self, work: Any, _: str) -> _Frame:  # noqa: N802 -- Spark's
        parts = [it for row in range(self._table.num_rows) for it in self._row(row)]
        done = self._run(cast("Any", cloudpickle).dumps(work), parts)
        return _Frame(self._run, pa.Table.from_batches(done))

    def _row(self, row: int) -> list[pa.RecordBatch]:
        return self._table.slice(row, 1).to_batches()

    def toArrow(self) -> pa.Table:  # noqa: N802 -- Spark's
        return self._table


class _Session:
    """As much of a session as jobs ask for; like that of Spark Connect it has no context."""

    def __init__(self, run: Run, width: int) -> None:
        self._run = run
        self.conf = _Conf(width)

    @property
    def sparkContext(self) -> Any:  # noqa: N802 -- Spark's
        raise NotImplementedError

    def createDataFrame(self, table: pa.Table, schema: Any = None) -> _Frame:  # noqa: N802 -- Spark's
        return _Frame(self._run, table)

"""A stand-in for a Spark session that runs jobs in this process, one task after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

__all__ = ["session_here"]


class _Conf:
    def get(self, name: str, default: str | None = None) -> str | None:
        return {"spark.master": "spark://elsewhere:7077"}.get(name, default)


class _Frame:
    def __init__(self, table: Any) -> None:
        self._table = table

    def mapInArrow(self, work: Callable[..., Iterator[Any]], _: str) -> _Frame:  # noqa: N802 -- Spark's
        return _Frame(pa.Table.from_batches(list(work(iter(self._table.to_batches())))))

    def repartitionById(self, _: int, __: str) -> _Frame:  # noqa: N802 -- Spark's
        return self

    def toArrow(self) -> Any:  # noqa: N802 -- Spark's
        return self._table


class _Session:
    conf = _Conf()

    @property
    def sparkContext(self) -> Any:  # noqa: N802 -- Spark's
        raise NotImplementedError

    def createDataFrame(self, table: Any, schema: Any = None) -> _Frame:  # noqa: N802 -- Spark's
        if not len(table) and schema is None:
            raise ValueError("CANNOT_INFER_EMPTY_SCHEMA, as Spark Connect says.")
        return _Frame(table)


def session_here() -> SparkSession:
    """Return a session of a cluster, as far as jobs ask; like Spark Connect it has no context."""
    return cast("SparkSession", _Session())

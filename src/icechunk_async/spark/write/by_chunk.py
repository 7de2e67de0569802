"""Bring the rows of each chunk to one task, in the JVM: no row passes through Python."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.tasks import default_tasks, places_by_number
from icechunk_async.spark.write.target import WriteTarget
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from pyspark.sql import Column, DataFrame

    from icechunk_async.spark.grid import Axis, ChunkGrid, Steps

__all__ = ["arrange", "repartition_by_chunk"]

_OWN: Final = "__icechunk_"
_DAY: Final = 86_400_000_000
_WHOLE: Final = (st.ByteType, st.ShortType, st.IntegerType, st.LongType)
_NUMBERS: Final = (*_WHOLE, st.FloatType, st.DoubleType, st.DecimalType)


def repartition_by_chunk(
    frame: DataFrame,
    repository: Repository | str,
    *,
    branch: str = "main",
    group: str = "",
    append_dim: str | None = None,
    append_values: Sequence[Any] | None = None,
    tasks: int | None = None,
) -> DataFrame:
    """Arrange rows for `df.write`: the rows of one chunk in one partition, contiguously.

    Rows need not be arranged to be written. Where they are, tasks store all chunks; elsewhere the
    commit joins, in one process, the rows of chunks that are in several tasks.

    Args:
        frame: rows with columns named like the arrays and their dimensions; also of a stream, whose
            rows are then not contiguous.
        repository: an open repository, or its URL.
        branch: the branch of the arrays.
        group: the group of the arrays.
        append_dim: the dimension to append along, like the option `append-dim`.
        append_values: its new coordinates, like the option `append-values`.
        tasks: number of partitions; by default one for each chunk, at most four for each core.

    Returns:
        The same rows and columns. Rows outside of the arrays are in any partition.

    Raises:
        InvalidInputError: columns and arrays do not go together.

    Cost: a shuffle, and a broadcast join with the coordinates of each dimension that has several
    chunks.
    """
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    options = WriteOptions(
        repo.storage,
        branch=branch,
        group=group.strip("/"),
        append_dim=append_dim,
        append_values=None if append_values is None else tuple(append_values),
    )
    options.check_mode(overwrite=append_dim is None)
    store = repo.readonly_session(branch).store
    target = WriteTarget.look(store, options, frame.columns)
    grid = target.grid(store)
    return arrange(frame, target, grid, tasks or default_tasks(frame.sparkSession, grid.chunks))


def arrange(frame: DataFrame, target: WriteTarget, grid: ChunkGrid, count: int) -> DataFrame:
    """Return rows in `count` partitions, the rows of each chunk contiguous in one of them."""
    columns = frame.columns
    numbers: list[tuple[Column, int]] = []
    for at, (axis, edges) in enumerate(zip(target.axes, grid.edges, strict=True)):
        if len(edges) > 2:
            frame, number = _along(frame, axis, edges, f"{_OWN}{at}")
            numbers.append((number, len(edges) - 1))
    # In expressions of the JVM: a function of Python would send each row there and back, which
    # costs three times a scan.
    chunk: Column = sf.lit(0).cast("long")
    for at, (number, _) in enumerate(numbers):
        chunk = chunk + number * prod(size for _, size in numbers[at + 1 :])
    name = f"{_OWN}chunk"
    frame = frame.withColumn(name, chunk)
    # By partition number: hashing would give some partitions several chunks and others none.
    number = sf.pmod(name, sf.lit(count)).cast("int")
    if places_by_number(frame.sparkSession):
        frame = frame.repartitionById(count, number)
    else:
        frame = frame.repartition(count, number)
    if not frame.isStreaming:  # Spark sorts no stream; each chunk is in one task all the same
        frame = frame.sortWithinPartitions(name)
    return frame.select(*[sf.col(f"`{it}`") for it in columns])


def _along(
    frame: DataFrame, axis: Axis, edges: npt.NDArray[np.int64], name: str
) -> tuple[DataFrame, Column]:
    """Return a frame, and a column of it with the index of each row's chunk along an axis.

    The index must be right for every row inside of the arrays, and may be anything for others.
    """
    key = _key(frame, axis)
    if key is None:  # one chunk index for all rows is always right, if slow
        return frame, sf.lit(0).cast("long")
    if axis.steps is not None:
        size = int(edges[1] - edges[0])
        place = sf.lit(len(axis.values) - 1) + _steps(key, axis.steps, axis.values.dtype.kind)
        return frame, sf.coalesce(sf.floor(place / sf.lit(size)).cast("long"), sf.lit(0))
    values, kept = axis.values, np.ones(len(axis.values), bool)
    if values.dtype.kind == "M":
        kept = ~np.isnat(values)
        values = values.astype(np.int64)
    elif values.dtype.kind in "iu":
        values = values.astype(np.int64)
    chunks = np.searchsorted(edges, np.arange(len(values)), side="right") - 1
    known = pa.array(values[kept].tolist() if values.dtype.kind in "OUT" else values[kept])
    table = pa.Table.from_pydict({f"{name}_key": known, name: pa.array(chunks[kept])})
    places = frame.sparkSession.createDataFrame(table)
    frame = frame.withColumn(f"{name}_key", key)
    # The coordinates of one dimension are few beside the rows. Without the hint Spark may shuffle
    # all rows once for each dimension.
    frame = frame.join(sf.broadcast(places), on=f"{name}_key", how="left")
    # Rows outside of the arrays are refused by their task, by name; here they need some partition.
    return frame, sf.coalesce(sf.col(name), sf.lit(0))


def _steps(key: Column, steps: Steps, kind: str) -> Column:
    """Return the number of steps from the last coordinate to each row's."""
    last, step = steps.last, steps.step
    if kind == "f":
        return sf.rint((key.cast("double") - sf.lit(float(last))) / sf.lit(float(step)))
    return (key - sf.lit(int(last.astype(np.int64)))) / sf.lit(int(step.astype(np.int64)))


def _key(frame: DataFrame, axis: Axis) -> Column | None:
    """Return a column converted to the type of an axis' coordinates; None if Spark cannot."""
    of, column = frame.schema[axis.name].dataType, sf.col(f"`{axis.name}`")
    dtype = axis.values.dtype
    if dtype.kind == "M":
        return _micros(column, of)
    if dtype.kind in "iu" and isinstance(of, _WHOLE):
        return column.cast("long")
    if dtype.kind == "f" and dtype.itemsize >= 4 and isinstance(of, _NUMBERS):
        return column.cast("float" if dtype.itemsize == 4 else "double")
    return column if dtype.kind in "OUT" and isinstance(of, st.StringType) else None


def _micros(column: Column, of: st.DataType) -> Column | None:
    if isinstance(of, st.TimestampType):
        return sf.unix_micros(column)
    if isinstance(of, st.DateType):
        return sf.unix_date(column).cast("long") * _DAY
    if isinstance(of, st.TimestampNTZType):
        # Through text: a cast would go through the session's time zone, which may have gaps.
        return sf.unix_micros(sf.concat(column.cast("string"), sf.lit("+00:00")).cast("timestamp"))
    return None

"""Rows of a table are written to arrays: Spark's writer of the format ``icechunk``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from icechunk_async.errors import IcechunkError, IncompleteWriteError
from icechunk_async.spark.arrays import open_array
from icechunk_async.spark.cooperative import Answer, CooperativeWrite
from icechunk_async.spark.encoding import coordinate_column, value_column
from icechunk_async.spark.row_places import ChunkAssembly
from icechunk_async.spark.write_options import WriteOptions
from icechunk_async.spark.write_plan import WritePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    import zarr
    from pyspark.sql.types import StructType

    from icechunk_async.spark.chunk_grid import ChunkGrid
    from icechunk_async.spark.row_places import Block
    from icechunk_async.spark.transactions import Published, Transaction
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["RowWriter", "RowsWritten", "batch_writer", "commit_rows", "write_batches"]


@dataclass
class RowsWritten(WriterCommitMessage):
    """What one task answers.

    Attributes:
        answer: what it wrote.
        length: how long the dimension that is appended to must be for it; 0 if there is none.
        refusal: why its rows cannot be written, where that may turn out not to matter.
        plan: what it wrote to, where the task has looked itself.
    """

    answer: Answer
    length: int
    refusal: IcechunkError | None = None
    plan: WritePlan | None = None


def batch_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceArrowWriter:
    """Answer the writer of a batch, as the data source is asked for it."""
    parsed = WriteOptions.parse(options)
    plan = WritePlan.begin(
        parsed,
        schema.names,
        overwrite=overwrite,
        transaction=parsed.transaction,
        cores=parsed.cores,
    )
    return RowWriter(plan)


class RowWriter(DataSourceArrowWriter):
    """Writes the rows of one batch, with one commit."""

    def __init__(self, plan: WritePlan) -> None:
        """Keep the plan: plain data."""
        self.plan = plan

    def write(  # type: ignore[override]  # batches, where the base of its base has rows
        self, iterator: Iterator[pa.RecordBatch]
    ) -> RowsWritten:
        """Write the rows of one partition, in a task."""
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        return write_batches(self.plan, context.partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish what all tasks wrote."""
        commit_rows(self.plan, messages, self.plan.options.transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Leave everything as it is.

        Spark aborts as well where the commit landed and its process was lost afterwards, so
        nothing may be deleted here; what tasks stored is garbage if nothing refers to it.
        """


def write_batches(plan: WritePlan, task: int, batches: Iterator[pa.RecordBatch]) -> RowsWritten:
    """Write the rows of one task to chunks.

    Raises:
        DuplicateRowsError, OutsideGridError, MissingCoordinatesError: rows have no place, or not
            one each.
        InvalidInputError: an array cannot hold a value.

    Memory: the rows of chunks that are not complete yet. Rows that come chunk by chunk need no
    more than one.
    """
    fork = plan.write.fork()
    target = plan.target
    if target is None:
        for _ in batches:
            pass
        return RowsWritten(Answer(task, CooperativeWrite.changes(fork)), 0)
    arrays = {it.name: open_array(fork.store, path, write=True) for path, it in target.variables}
    grid = target.grid(fork.store)
    assembly = ChunkAssembly(grid, next(iter(arrays)))
    finders = [it.finder() for it in target.axes]
    length = 0
    growth = target.growth
    old = None if growth is None else (target.axes.index(growth.axis), growth.length)
    for batch in batches:
        places = [
            finder.places(coordinate_column(batch.column(axis.name), axis.name))
            for axis, finder in zip(target.axes, finders, strict=True)
        ]
        columns = {
            it.name: it.encode(value_column(batch.column(it.name), it))
            for _, it in target.variables
        }
        if old is not None and batch.num_rows:
            length = max(length, int(places[old[0]].max()) + 1)
        for block in assembly.add(places, columns):
            _put(arrays, grid, block, old)
    for block in assembly.rest():
        _put(arrays, grid, block, old)
    return RowsWritten(Answer(task, CooperativeWrite.changes(fork)), length)


def _put(
    arrays: Mapping[str, zarr.Array[Any]],
    grid: ChunkGrid,
    block: Block,
    old: tuple[int, int] | None,
) -> None:
    """Write a chunk of every array, once; what has no row keeps its value.

    Args:
        arrays: by name.
        grid: of all of them.
        block: the rows of the chunk.
        old: the axis that is appended to and its length before, if there is one. What follows had
            no value, although the chunk may hold some from when the array was longer.
    """
    region = grid.region(block.chunk)
    shape = tuple(at.stop - at.start for at in region)
    for name, array in arrays.items():
        values = np.empty(shape, array.dtype) if block.whole else np.array(array[region])
        if old is not None and not block.whole:
            axis, length = old
            new = slice(max(0, length - region[axis].start), None)
            values[(*[slice(None)] * axis, new)] = array.fill_value
        values.reshape(-1)[block.cells] = block.values[name]
        array[region] = values


def commit_rows(
    plan: WritePlan,
    messages: Sequence[WriterCommitMessage | None],
    transaction: Transaction | None,
    *,
    metadata: Mapping[str, Any] | None = None,
    rebase_with: ConflictSolver | None = None,
) -> Published | None:
    """Publish what all tasks wrote; answer None if there was nothing to do, or no row.

    Args:
        plan: what they were given.
        messages: one of each task.
        transaction: names the write.
        metadata: properties of the snapshot.
        rebase_with: decides conflicts; without it as the plan's options say.

    Raises:
        IncompleteWriteError: a task did not answer.
        MergeFailedError: two tasks had rows of one chunk.
        ConflictError: another writer was first, or changed coordinates that rows found their
            places by.
    """
    written = [it for it in messages if isinstance(it, RowsWritten)]
    if len(written) < len(messages):
        raise IncompleteWriteError(
            f"{len(messages) - len(written)} of {len(messages)} tasks did not answer. Nothing was "
            "published; write again.",
            missing=[at for at, it in enumerate(messages) if it is None],
            repeated=[],
        )
    if plan.target is None or plan.write.is_done(transaction):
        return None
    for refusal in (it.refusal for it in written if it.refusal is not None):
        raise refusal
    growth = plan.target.growth
    length = max([it.length for it in written] + ([growth.length] if growth else []), default=0)
    if growth is not None and length == growth.length and transaction is None:
        return None

    def finish(store: IcechunkStore) -> None:
        if growth is not None:
            growth.finish(store, growth.most if growth.axis.steps is None else length)

    return plan.write.commit(
        [it.answer for it in written],
        len(written),
        plan.options.message,
        metadata=metadata,
        transaction=transaction,
        rebase_with=rebase_with or plan.options.solver,
        finish=finish,
        # Of a dimension without an array others may have made one.
        unchanged=[plan.options.path_of(axis.name) for axis in plan.target.axes],
    )

"""Write rows of a table to arrays."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from icechunk_async.errors import IcechunkError, IncompleteWriteError, InvalidInputError
from icechunk_async.spark.datasets import open_array
from icechunk_async.spark.grid.axes import Steps
from icechunk_async.spark.grid.chunks import ChunkAssembly
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write.by_chunk import arrange, default_tasks
from icechunk_async.spark.write.cooperative import Answer, CooperativeWrite, check_answers
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.target import (
    coordinate_column,
    coordinates_of,
    is_sorted,
    open_dataset,
    value_column,
)
from icechunk_async.spark.write.transactions import Published, is_published
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import zarr
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from icechunk_async.spark.grid.chunks import Block, ChunkGrid
    from icechunk_async.spark.write.transactions import Transaction
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["RowWriter", "RowsWritten", "batch_writer", "commit_rows", "write_batches", "write_rows"]


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
    """Return the writer of a batch, as the data source is asked for it."""
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


def write_rows(
    frame: DataFrame,
    repository: Repository | str,
    *,
    mode: Literal["append", "overwrite", "error", "ignore"] = "append",
    append_dim: str | None = None,
    append_values: Sequence[Any] | None = None,
    branch: str = "main",
    group: str = "",
    message: str = "Written by Spark",
    metadata: Mapping[str, Any] | None = None,
    transaction: Transaction | None = None,
    rebase_with: ConflictSolver | None = None,
    tasks: int | None = None,
) -> Published:
    """Arrange rows by chunk, write them to arrays, and commit once.

    It does what ``df.write`` does, and arranges rows before, finds out which coordinates to
    append, and answers which snapshot holds them.

    Args:
        frame: has columns named like arrays, and like their dimensions.
        repository: an open one, or its URL.
        mode: ``append`` along a dimension; ``overwrite`` the cells that rows are for; ``error`` or
            ``ignore`` the rows if one of the arrays has values already, else overwrite.
        append_dim: the dimension that is appended to.
        append_values: its new coordinates. Without them they go on in equal steps; where those
            that are there do not, they are looked up among the rows, by a job of its own.
        branch: is committed to.
        group: that the arrays are in.
        message: of the commit.
        metadata: of the commit.
        transaction: names the write: where the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits that came meanwhile; without it only those
            that touch nothing that is written are accepted.
        tasks: how many. Without it, one for each chunk, but four for each core at most.

    Raises:
        InvalidInputError: columns and arrays do not go together.
        MissingCoordinatesError, AmbiguousCoordinatesError, UnsortedCoordinatesError: so do
            coordinates.
        AlreadyExistsError: the mode is ``error``, and there are values; or a coordinate to append
            is there.
        ConflictError: another writer was first.
        PySparkException: a task failed too often; DuplicateRowsError, OutsideGridError or
            MissingCoordinatesError for a row without a place are in the message.

    After an error nothing is visible. Memory of a task: the rows of a chunk, and of those chunks
    that have not all.
    """
    if mode not in {"append", "overwrite", "error", "ignore"}:
        raise InvalidInputError(
            f"The mode {mode!r} is unknown. Give append, overwrite, error or ignore."
        )
    spark = frame.sparkSession
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    options = WriteOptions(
        repo.storage,
        branch=branch,
        group=group.strip("/"),
        append_dim=append_dim,
        append_values=None if append_values is None else tuple(append_values),
        if_written=mode if mode in {"error", "ignore"} else "replace",
        message=message,
    )
    if is_published(repo, branch, transaction):
        return Published(repo.lookup_branch(branch), committed=False)
    if mode == "append" and append_dim is not None and append_values is None:
        options = _with_values(frame, repo, options, append_dim)
    plan = WritePlan.begin(
        options,
        frame.columns,
        overwrite=mode != "append",
        repository=repo,
    )
    if plan.target is None:
        return Published(repo.lookup_branch(branch), committed=False)
    grid = plan.target.grid(plan.write.fork().store)
    count = tasks or default_tasks(spark, grid)
    written = _run(arrange(frame, plan.target, grid, count), plan)
    # Where it knows that there are no rows, Spark runs no task.
    check_answers([it.answer for it in written], count if written else 0)
    published = commit_rows(plan, written, transaction, metadata=metadata, rebase_with=rebase_with)
    return published or Published(repo.lookup_branch(branch), committed=False)


def _run(frame: DataFrame, plan: WritePlan) -> list[RowsWritten]:
    """Write the rows of each partition in a task."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        written = write_batches(plan, context.partitionId(), batches)
        yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(written)]})

    rows = frame.mapInArrow(each, "message binary").collect()
    return [pickle.loads(row["message"]) for row in rows]  # noqa: S301 -- from our own tasks


def _with_values(
    frame: DataFrame, repository: Repository, options: WriteOptions, dim: str
) -> WriteOptions:
    """Look up the coordinates to append among the rows, unless they go on in equal steps."""
    dataset = open_dataset(repository.readonly_session(options.branch).store, options.group)
    if dim not in dataset.variables or dim not in frame.columns:
        return options
    there = coordinates_of(dataset, dim)
    if Steps.after(there, 1) is not None:
        return options
    column = frame.select(dim).distinct().toArrow().column(dim).combine_chunks()
    new = np.unique(coordinate_column(column, dim))
    new = new[~np.isin(new, there)]
    if len(there) > 1 and is_sorted(there) and there[0] > there[-1]:
        new = new[::-1]
    return replace(options, append_values=tuple(new))

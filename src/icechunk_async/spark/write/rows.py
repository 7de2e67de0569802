"""Rows of a table written to arrays: the plan, the work of a task, and the commit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from icechunk_async.errors import (
    AlreadyExistsError,
    IcechunkError,
    IncompleteWriteError,
    InvalidInputError,
)
from icechunk_async.spark.grid.axes import Appended, Steps
from icechunk_async.spark.grid.chunks import ChunkAssembly
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.shared import has_chunks, open_array
from icechunk_async.spark.tasks import default_tasks
from icechunk_async.spark.write.by_chunk import arrange
from icechunk_async.spark.write.cooperative import Answer, CooperativeWrite, check_answers
from icechunk_async.spark.write.publish import Published, is_published
from icechunk_async.spark.write.target import (
    WriteTarget,
    coordinates_of,
    is_sorted,
    open_dataset,
)
from icechunk_async.spark.write.values import ValueRefusedError, coordinate_column, encode_column
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    import zarr
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from icechunk_async.spark.grid.chunks import Block, ChunkGrid
    from icechunk_async.spark.write.publish import Transaction
    from icechunk_async.sync import ForkSession
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "RowWriter",
    "RowsWritten",
    "WritePlan",
    "batch_writer",
    "commit_rows",
    "write_batches",
    "write_rows",
]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write of rows, prepared once and sent to every task as plain data.

    Attributes:
        write: the write in which tasks take part.
        options: the request.
        target: the arrays; None if there is nothing to do.
    """

    write: CooperativeWrite
    options: WriteOptions
    target: WriteTarget | None

    @classmethod
    def begin(
        cls,
        options: WriteOptions,
        columns: Sequence[str],
        *,
        overwrite: bool,
        transaction: Transaction | None = None,
        cores: int = 0,
        repository: Repository | None = None,
    ) -> WritePlan:
        """Look up the arrays, and begin a write.

        Args:
            options: the request.
            columns: names of the table's columns.
            overwrite: whether rows replace existing values; otherwise they are appended.
            transaction: names the write, if that is known yet.
            cores: tasks of one executor that share the budget; 0 if each has to ask Spark.
            repository: an open repository; by default that of the options is opened.

        Raises:
            InvalidInputError: columns and arrays do not go together; see also `WriteTarget.look`.
            AlreadyExistsError: an array has values, and the options refuse that.
        """
        options.check_mode(overwrite=overwrite)
        repository = repository or options.open()
        if is_published(repository, options.branch, transaction):
            return cls(CooperativeWrite.begin(repository, options.branch), options, None)
        looked: list[WriteTarget] = []

        def prepare(store: IcechunkStore) -> None:
            # At the snapshot at which the write begins, so that later changes are conflicts.
            target = WriteTarget.look(store, options, columns)
            looked.append(target)
            if target.growth is not None:
                target.growth.prepare(store)

        write = CooperativeWrite.begin(repository, options.branch, prepare=prepare, cores=cores)
        target = looked[0]
        skip = options.if_written != "replace" and _is_written(write.fork(), options, target)
        return cls(write, options, None if skip else target)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do."""
        return self.target is None


def _is_written(fork: ForkSession, options: WriteOptions, target: WriteTarget) -> bool:
    """Return whether an array already has values and the write is to be skipped.

    Raises:
        AlreadyExistsError: an array has values, and the options refuse that.
    """
    for path, _ in target.variables:
        if has_chunks(fork, path):
            if options.if_written == "ignore":
                return True
            raise AlreadyExistsError(
                f"{path!r} has values already, and the option 'if-written' makes that an error. "
                "Nothing was written.",
                path=path,
            )
    return False


@dataclass
class RowsWritten(WriterCommitMessage):
    """The result of one task.

    Attributes:
        answer: the changes it made.
        length: the length that its rows need along the appended dimension, or 0.
        refusal: why its rows cannot be written, if the batch may turn out to be written already.
        plan: the plan, if the task made it.
        appended: places and coordinates along the appended dimension, as the rows gave them.
    """

    answer: Answer
    length: int
    refusal: IcechunkError | None = None
    plan: WritePlan | None = None
    appended: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None = None


def batch_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceArrowWriter:
    """Return the writer of a batch."""
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
    """Writes the rows of one batch in one commit."""

    def __init__(self, plan: WritePlan) -> None:
        """Keep the plan."""
        self.plan = plan

    def write(  # type: ignore[override]  # an Arrow writer gets batches, its base class rows
        self, iterator: Iterator[pa.RecordBatch]
    ) -> RowsWritten:
        """Write the rows of one partition, in a task."""
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        return write_batches(self.plan, context.partitionId(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the changes of all tasks."""
        commit_rows(self.plan, messages, self.plan.options.transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing.

        Spark also aborts if its process is lost after the commit has landed, so nothing may be
        deleted here. Chunks without a reference are left to garbage collection.
        """


def write_batches(plan: WritePlan, task: int, batches: Iterator[pa.RecordBatch]) -> RowsWritten:
    """Write the rows of one task to chunks.

    Raises:
        DuplicateRowsError, OutsideGridError, MissingCoordinatesError: rows have no cell, or
            several have the same.
        InvalidInputError: an array cannot hold a value.

    Memory: the rows of incomplete chunks; of one chunk if rows come chunk by chunk.
    """
    fork = plan.write.fork()
    target = plan.target
    if target is None:
        for _ in batches:
            pass
        return RowsWritten(Answer(task, plan.write.changes(fork)), 0)
    arrays = {it.name: open_array(fork.store, path, write=True) for path, it in target.variables}
    grid = target.grid(fork.store)
    assembly = ChunkAssembly(grid, next(iter(arrays)))
    finders = [it.finder() for it in target.axes]
    length = 0
    growth = target.growth
    old = None if growth is None else (target.axes.index(growth.axis), growth.length)
    appended = None if growth is None else Appended(growth.axis, growth.length)
    for batch in batches:
        given = [coordinate_column(batch.column(it.name), it.name) for it in target.axes]
        places = [it.places(values) for it, values in zip(finders, given, strict=True)]
        columns = _encoded(batch, target, allow=plan.options.cast == "allow")
        if old is not None and batch.num_rows:
            length = max(length, int(places[old[0]].max()) + 1)
        if old is not None and appended is not None:
            appended.add(places[old[0]], given[old[0]])
        for block in assembly.add(places, columns):
            _put(arrays, grid, block, old)
    for block in assembly.rest():
        _put(arrays, grid, block, old)
    answer = Answer(task, plan.write.changes(fork))
    return RowsWritten(answer, length, appended=None if appended is None else appended.columns())


def _encoded(
    batch: pa.RecordBatch, target: WriteTarget, *, allow: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of values as the arrays store them.

    Raises:
        ValueRefusedError: an array cannot hold one; it says where in the table.
    """
    try:
        return {
            it.name: encode_column(batch.column(it.name), it, allow=allow)
            for _, it in target.variables
        }
    except ValueRefusedError as error:
        row = error.row or 0
        place = ", ".join(f"{it.name}={batch.column(it.name)[row].as_py()}" for it in target.axes)
        raise ValueRefusedError(
            f"{error.message} It is in the row of {place}. Nothing was published. Convert the "
            "column or filter such rows; option('cast', 'allow') converts them as NumPy does.",
            **error.context,
        ) from None


def _put(
    arrays: Mapping[str, zarr.Array[Any]],
    grid: ChunkGrid,
    block: Block,
    old: tuple[int, int] | None,
) -> None:
    """Write a chunk of every array once; cells without a row keep their values.

    Args:
        arrays: the arrays by name.
        grid: their common chunk grid.
        block: the rows of the chunk.
        old: the axis that is appended to, and its length before. Cells beyond that length had no
            value, although the chunk may hold some from when the array was longer.
    """
    region = grid.region(block.chunk)
    shape = tuple(at.stop - at.start for at in region)
    for name, array in arrays.items():
        # A chunk whose cells all have rows need not be read.
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
    """Publish the changes of all tasks; return None if there is nothing to do, or no row.

    Args:
        plan: the plan of the tasks.
        messages: the results of the tasks.
        transaction: names the write.
        metadata: properties of the snapshot.
        rebase_with: decides conflicts; by default the plan's options say how.

    Raises:
        IncompleteWriteError: a task did not answer.
        MergeFailedError: two tasks had rows of one chunk.
        ConflictError: another writer was first, or changed coordinates by which rows were placed.
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

    parts = [it.appended for it in written if it.appended is not None]
    new = None if growth is None else growth.filled(parts, fill_gaps=plan.options.fill_gaps)

    def finish(store: IcechunkStore) -> None:
        if growth is not None and new is not None:
            growth.finish(store, new)

    return plan.write.commit(
        [it.answer for it in written],
        len(written),
        plan.options.message,
        metadata=metadata,
        transaction=transaction,
        rebase_with=rebase_with or plan.options.solver,
        finish=finish,
        # Also dimensions without an array: another writer may have created one.
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
    cast: Literal["refuse", "allow"] = "refuse",
    max_append: int | None = None,
    fill_gaps: bool = False,
) -> Published:
    """Arrange rows by chunk, write them to arrays, and commit once.

    Like `df.write` after `repartition_by_chunk`. It also finds the coordinates to append, and
    returns the snapshot.

    Args:
        frame: rows with columns named like the arrays and their dimensions.
        repository: an open repository, or its URL.
        mode: `append` along a dimension; `overwrite` the cells of the rows; `error` or `ignore`
            if one of the arrays has values, else overwrite.
        append_dim: the dimension to append along.
        append_values: its new coordinates. By default they continue in equal steps; if the
            existing ones have no equal steps, a separate job collects them from the rows.
        branch: the branch to commit to.
        group: the group of the arrays.
        message: message of the commit.
        metadata: properties of the commit.
        transaction: names the write; if the branch holds it already, no job is run.
        rebase_with: decides conflicts with commits made since the start; by default only those
            that touch other chunks are accepted.
        tasks: number of tasks; by default one for each chunk, at most four for each core.
        cast: `allow` converts values that the arrays cannot hold exactly as NumPy does, in place
            of refusing them.
        max_append: the most coordinates to append; by default 1,000 or ten chunks.
        fill_gaps: whether to append coordinates that no row has and that lie before others.

    Raises:
        InvalidInputError: columns and arrays do not go together.
        MissingCoordinatesError, AmbiguousCoordinatesError, UnsortedCoordinatesError: coordinates
            and arrays do not go together.
        AlreadyExistsError: with the mode `error`, an array has values; or a coordinate to append
            exists.
        ConflictError: another writer was first.
        PySparkException: a task failed too often. The message has DuplicateRowsError,
            OutsideGridError or MissingCoordinatesError for rows that cannot be placed.

    After an error nothing is visible. Memory of a task: the rows of incomplete chunks.
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
        cast=cast,
        max_append=max_append,
        fill_gaps=fill_gaps,
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
    count = tasks or default_tasks(spark, grid.chunks)
    written = _run(arrange(frame, plan.target, grid, count), plan)
    # Spark runs no task at all if it knows that there are no rows.
    check_answers([it.answer for it in written], count if written else 0)
    published = commit_rows(plan, written, transaction, metadata=metadata, rebase_with=rebase_with)
    return published or Published(repo.lookup_branch(branch), committed=False)


def _run(frame: DataFrame, plan: WritePlan) -> list[RowsWritten]:
    """Run a task for each partition, and return their results."""

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
    """Add the coordinates to append, found among the rows, unless there are equal steps."""
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

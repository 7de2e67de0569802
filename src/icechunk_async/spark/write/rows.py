"""Rows of a table written to arrays: the batch writer of Spark, and `write_rows`."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.grid import Steps
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.tasks import default_tasks
from icechunk_async.spark.write.by_chunk import arrange
from icechunk_async.spark.write.commit import commit_rows
from icechunk_async.spark.write.cooperative import Published, check_answers, is_published
from icechunk_async.spark.write.growth import is_sorted
from icechunk_async.spark.write.plan import WritePlan, check_types
from icechunk_async.spark.write.target import coordinates_of, open_dataset
from icechunk_async.spark.write.task import numbered, this_task, write_batches
from icechunk_async.spark.write.values import coordinate_column
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from icechunk_async.spark.write.cooperative import Transaction
    from icechunk_async.spark.write.task import RowsWritten
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = ["RowWriter", "batch_writer", "write_rows"]


def batch_writer(
    options: Mapping[str, str], schema: StructType | pa.Schema, *, overwrite: bool
) -> DataSourceArrowWriter:
    """Return the writer of a batch."""
    check_types(schema)
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
        return write_batches(self.plan, this_task(), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the changes of all tasks."""
        commit_rows(self.plan, messages, self.plan.options.transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing.

        Spark also aborts if its process is lost after the commit has landed, so nothing may be
        deleted here. Chunks without a reference are left to garbage collection.
        """


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
    late_rows: Literal["fail", "overwrite", "drop"] = "fail",
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
        late_rows: with the mode `append`, what to do with rows whose coordinate along the
            appended dimension exists: refuse them, let them replace values, or leave them out.
            The commit counts them in its property `spark-late-rows`.

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
    check_types(frame.schema)
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
        late_rows=late_rows,
    )
    # Before arrays are looked at: coordinates of an append that landed exist, and would be refused.
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
    arranged = arrange(frame, plan.target, grid, count)
    # Not `df.write`, through which Spark hands no snapshot back.
    written = _run(arranged, replace(plan, write=plan.write.for_job(spark, count)))
    # Spark runs no task at all if it knows that there are no rows.
    check_answers([it.answer for it in written], count if written else 0)
    published = commit_rows(plan, written, transaction, metadata=metadata, rebase_with=rebase_with)
    return published or Published(repo.lookup_branch(branch), committed=False)


def _run(frame: DataFrame, plan: WritePlan) -> list[RowsWritten]:
    """Run a task for each partition, and return their results."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = write_batches(plan, this_task(), batches, arranged=True)
        yield pa.RecordBatch.from_pydict({"message": [pickle.dumps(written)]})

    rows = frame.mapInArrow(each, "message binary").collect()
    return numbered([pickle.loads(row["message"]) for row in rows])  # noqa: S301 -- our own tasks


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
    # Another job over all rows. Where coordinates have equal steps, each task counts on by itself.
    column = frame.select(dim).distinct().toArrow().column(dim).combine_chunks()
    new = np.unique(coordinate_column(column, dim))
    # Rows may be late as well; what to do with those is decided where they are placed.
    new = new[~np.isin(new, there)]
    # Latitudes often descend: what is appended continues the order that is there.
    if len(there) > 1 and is_sorted(there) and there[0] > there[-1]:
        new = new[::-1]
    return replace(options, append_values=tuple(new))

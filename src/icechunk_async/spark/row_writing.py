"""Rows of a table are written to arrays by a job of our own: what it did is answered."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.axes import Steps
from icechunk_async.spark.by_chunk import arrange, default_tasks
from icechunk_async.spark.cooperative import check_answers
from icechunk_async.spark.encoding import coordinate_column
from icechunk_async.spark.growing import is_sorted
from icechunk_async.spark.transactions import Published, is_published
from icechunk_async.spark.write_options import WriteOptions
from icechunk_async.spark.write_plan import WritePlan
from icechunk_async.spark.write_target import coordinates_of, open_dataset
from icechunk_async.spark.writing import commit_rows, write_batches
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from icechunk_async.spark.transactions import Transaction
    from icechunk_async.spark.writing import RowsWritten
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = ["write_rows"]


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

"""Batches of a stream are written to arrays, each exactly once.

Spark tells a sink the number of a batch and no name of the query: an option names the application,
and every commit carries the newest batch of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from icechunk_async.errors import ConflictError, IcechunkError, InvalidInputError
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write.cooperative import Answer, CooperativeWrite
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.spark.write.rows import RowsWritten, commit_rows, write_batches
from icechunk_async.spark.write.transactions import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

__all__ = ["BatchWritten", "StreamWriter", "stream_writer"]


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the sink of a streaming query, as the data source is asked for it.

    Raises:
        InvalidInputError: no application is named, or a version is; or an option would refuse a
            batch that is tried again after its commit landed.
    """
    parsed = WriteOptions.parse(options)
    if parsed.app_id is None or parsed.version is not None:
        raise InvalidInputError(
            "A stream needs the option 'txnAppId', which names the query for good, and no "
            "'txnVersion': that is the number of the batch."
        )
    if parsed.if_written != "replace" or parsed.append_values is not None:
        name = "if-written" if parsed.append_values is None else "append-values"
        raise InvalidInputError(
            f"The option {name!r} does not go with a stream: it speaks of one write, and what it "
            "asks for does not hold for the next batch, nor for one that is tried again. Leave it "
            "out; write_rows in foreachBatch, with a transaction, takes such options."
        )
    return StreamWriter(parsed, parsed.app_id, schema.names, overwrite=overwrite)


@dataclass
class BatchWritten(RowsWritten):
    """What one task of a batch answers, and how many rows came."""

    rows: int = 0


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of each batch, with one commit.

    Spark makes one for all batches of a query, so each task looks at the arrays as they are when
    its batch begins.
    """

    def __init__(
        self, options: WriteOptions, app_id: str, columns: Sequence[str], *, overwrite: bool
    ) -> None:
        """Keep plain data."""
        self.options = options
        self.app_id = app_id
        self.columns = tuple(columns)
        self.replaces = overwrite or options.append_dim is None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchWritten:  # type: ignore[override]
        """Write the rows of one partition, in a task.

        A task does not know the batch. Of one that is tried again after its commit landed the
        rows are there already: whether that is wrong is known when the batch is committed.
        """
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        task = context.partitionId()
        rows = _Counted(iterator)
        plan = WritePlan.begin(
            self.options, self.columns, overwrite=self.replaces, cores=self.options.cores
        )
        try:
            written = write_batches(plan, task, rows)
        except IcechunkError as error:
            nothing = CooperativeWrite.changes(plan.write.fork())
            written = RowsWritten(Answer(task, nothing), 0, error)
        return BatchWritten(written.answer, written.length, written.refusal, plan, rows.count)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 -- PySpark's name
        """Publish what all tasks wrote, unless the branch holds the batch; nothing if no row came.

        Commits that others made since the tasks began are no hindrance, unless they changed the
        same chunks, or the arrays.

        Raises:
            ConflictError: another writer changed the same, or none was to come between. Nothing
                was published; a query that is started again tries the batch again.
        """
        written = [it for it in messages if isinstance(it, BatchWritten)]
        plans = [it.plan for it in written if it.plan is not None]
        transaction = Transaction(self.app_id, batchId)
        if not any(it.rows for it in written) or plans[0].write.is_done(transaction):
            return
        plan = _oldest(plans, batchId)
        commit_rows(plan, [_under(plan, it) for it in messages], transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave everything as it is; see the writer of batches."""


class _Counted:
    """The batches of a partition; counts their rows."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self.count = 0
        self._batches = batches

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = next(self._batches)
        self.count += batch.num_rows
        return batch


def _oldest(plans: Sequence[WritePlan], batch: int) -> WritePlan:
    """Return the plan that began first: of its snapshot all that came since can be checked.

    Raises:
        ConflictError: tasks began at different snapshots that cannot be joined.
    """
    first = plans[0]
    bases = {plan.write.base_id: plan for plan in plans}
    if len(bases) == 1:
        return first
    branch, alike = first.options.branch, all(_alike(first, plan) for plan in plans)
    if alike and first.options.rebase:
        oldest: WritePlan | None = None
        for info in first.write.repository.ancestry(branch=branch):
            oldest = bases.pop(info.id, oldest)
            if not bases:
                assert oldest is not None  # the last one found
                return oldest
    raise ConflictError(
        f"Others committed to {branch!r} while the tasks of batch {batch} began, so that they "
        f"looked at different snapshots{'' if alike else ', with different arrays'}. Nothing was "
        "published; start the query again.",
        branch=branch,
    )


def _alike(one: WritePlan, other: WritePlan) -> bool:
    """Return whether tasks of two plans put every row into the same place."""
    a, b = one.target, other.target
    if a is None or b is None:
        return a is b
    same = (a.nodes, a.variables, a.growth is None) == (b.nodes, b.variables, b.growth is None)
    if a.growth is not None and b.growth is not None:
        same &= (a.growth.length, a.growth.most) == (b.growth.length, b.growth.most)
        same &= a.growth.arrays == b.growth.arrays
    return (
        same
        and len(a.axes) == len(b.axes)
        and all(
            mine.name == its.name and np.array_equal(mine.values, its.values)
            for mine, its in zip(a.axes, b.axes, strict=True)
        )
    )


def _under(plan: WritePlan, message: WriterCommitMessage | None) -> WriterCommitMessage | None:
    """Return a task's answer as if the task had been given this plan."""
    if not isinstance(message, RowsWritten):
        return message
    answer = replace(message.answer, changes=plan.write.adopt(message.answer.changes))
    return replace(message, answer=answer)

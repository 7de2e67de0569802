"""The sink: each batch of a stream is written to arrays exactly once.

Spark passes a sink the number of a batch, but no name of the query. The option `txnAppId` names
it, and every commit carries the newest batch of each name.
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
from icechunk_async.spark.write.publish import Transaction
from icechunk_async.spark.write.rows import RowsWritten, WritePlan, commit_rows, write_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

__all__ = ["BatchWritten", "StreamWriter", "stream_writer"]


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the sink of a streaming query.

    Raises:
        InvalidInputError: `txnAppId` is missing or `txnVersion` is given; or an option would refuse
            a batch that is tried again after its commit landed.
    """
    parsed = WriteOptions.parse(options)
    if parsed.app_id is None or parsed.version is not None:
        raise InvalidInputError(
            "A stream needs the option 'txnAppId', the lasting name of the query, and no "
            "'txnVersion', which is the number of the batch."
        )
    if parsed.if_written != "replace" or parsed.append_values is not None:
        name = "if-written" if parsed.append_values is None else "append-values"
        raise InvalidInputError(
            f"The option {name!r} does not go with a stream: it is about one write, and would "
            "refuse the next batch, or one that is tried again. Leave it out, or use write_rows "
            "with a transaction in foreachBatch, which takes such options."
        )
    return StreamWriter(parsed, parsed.app_id, schema.names, overwrite=overwrite)


@dataclass
class BatchWritten(RowsWritten):
    """The result of one task of a batch.

    Attributes:
        rows: how many rows it got.
    """

    rows: int = 0


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of each batch in one commit.

    Spark makes one writer for all batches of a query, so each task looks up the arrays when its
    batch begins.
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
        """Write the rows of one partition; called in a task.

        A task does not know the number of its batch. If the batch is tried again after its commit
        landed, its coordinates exist already; only the commit knows if that is an error.
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
            # Kept instead of raised: if the batch is written already, it does not matter.
            nothing = plan.write.changes(plan.write.fork())
            written = RowsWritten(Answer(task, nothing), 0, error)
        return BatchWritten(
            written.answer,
            written.length,
            written.refusal,
            plan,
            written.appended,
            rows=rows.count,
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 -- PySpark's name
        """Publish the changes of all tasks, unless there is no row or the branch has the batch.

        Commits made since the tasks began are accepted, unless they changed the same chunks or
        the arrays.

        Raises:
            ConflictError: another writer changed the same, or the option `rebase` refuses any
                other commit. Nothing was published; a restarted query tries the batch again.
        """
        written = [it for it in messages if isinstance(it, BatchWritten)]
        plans = [it.plan for it in written if it.plan is not None]
        transaction = Transaction(self.app_id, batchId)
        if not any(it.rows for it in written) or plans[0].write.is_done(transaction):
            return
        plan = _oldest(plans, batchId)
        commit_rows(plan, [_under(plan, it) for it in messages], transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing; see `RowWriter.abort`."""


class _Counted:
    """Counts the rows of the batches of a partition."""

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
    """Return the plan that began at the oldest snapshot: all later commits can be checked then.

    Raises:
        ConflictError: tasks began at different snapshots whose changes cannot be joined.
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
        f"Others committed to {branch!r} while the tasks of batch {batch} began, so that tasks "
        f"began at different snapshots{'' if alike else ', with different arrays'}. Nothing was "
        "published; start the query again.",
        branch=branch,
    )


def _alike(one: WritePlan, other: WritePlan) -> bool:
    """Return whether two plans put every row into the same cell."""
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
    """Return the result of a task as if it had been given this plan."""
    if not isinstance(message, RowsWritten):
        return message
    answer = replace(message.answer, changes=plan.write.adopt(message.answer.changes))
    return replace(message, answer=answer)

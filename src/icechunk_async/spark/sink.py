"""Batches of a stream are written to arrays, each exactly once.

Spark tells a sink the number of a batch and no name of the query: an option names the application,
and every commit carries the newest batch of each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from icechunk_async.errors import ConflictError, IcechunkError, InvalidInputError
from icechunk_async.spark.cooperative import Answer, CooperativeWrite
from icechunk_async.spark.transactions import Transaction
from icechunk_async.spark.write_options import WriteOptions
from icechunk_async.spark.write_plan import WritePlan
from icechunk_async.spark.writing import RowsWritten, commit_rows, write_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

__all__ = ["StreamWriter", "stream_writer"]


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Answer the sink of a streaming query, as the data source is asked for it.

    Raises:
        InvalidInputError: no application is named, or a version is.
    """
    parsed = WriteOptions.parse(options)
    if parsed.app_id is None or parsed.version is not None:
        raise InvalidInputError(
            "A stream needs the option 'txnAppId', which names the query for good, and no "
            "'txnVersion': that is the number of the batch."
        )
    return StreamWriter(parsed, parsed.app_id, schema.names, overwrite=overwrite)


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

    def write(  # type: ignore[override]  # batches, where the base of its base has rows
        self, iterator: Iterator[pa.RecordBatch]
    ) -> RowsWritten:
        """Write the rows of one partition, in a task.

        A task does not know the batch. Of one that is tried again after its commit landed the
        rows are there already: whether that is wrong is known when the batch is committed.
        """
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        task = context.partitionId()
        plan = WritePlan.begin(
            self.options, self.columns, overwrite=self.replaces, cores=self.options.cores
        )
        try:
            written = write_batches(plan, task, iterator)
        except IcechunkError as error:
            nothing = CooperativeWrite.changes(plan.write.fork())
            written = RowsWritten(Answer(task, nothing), 0, error)
        return replace(written, plan=plan)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 -- PySpark's name
        """Publish what all tasks wrote, unless the branch holds the batch.

        Raises:
            ConflictError: another writer committed while the tasks began; restart the query.
        """
        plans = [it.plan for it in messages if isinstance(it, RowsWritten) and it.plan is not None]
        if not plans:
            return
        first, transaction = plans[0], Transaction(self.app_id, batchId)
        if first.write.is_done(transaction):
            return
        bases = {plan.write.base_id for plan in plans}
        if len(bases) > 1:
            raise ConflictError(
                f"Others committed to {self.options.branch!r} while the tasks of batch {batchId} "
                "began, so that they looked at different snapshots. Nothing was published; start "
                "the query again.",
                branch=self.options.branch,
            )
        commit_rows(first, [_under(first, it) for it in messages], transaction)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave everything as it is; see the writer of batches."""


def _under(plan: WritePlan, message: WriterCommitMessage | None) -> WriterCommitMessage | None:
    """Answer a task's answer as if the task had been given this plan."""
    if not isinstance(message, RowsWritten):
        return message
    answer = replace(message.answer, changes=plan.write.adopt(message.answer.changes))
    return replace(message, answer=answer)

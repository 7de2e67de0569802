"""Batches of a stream are written to arrays, each exactly once.

Spark tells a sink the number of a batch and no name of the query: an option names the application,
and every commit carries the newest batch of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from icechunk_async.errors import IcechunkError, InvalidInputError
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
    replaces = overwrite or parsed.append_dim is None
    plan = WritePlan.begin(parsed, schema.names, overwrite=replaces, cores=parsed.cores)
    return StreamWriter(plan, parsed.app_id)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of each batch, with one commit."""

    def __init__(self, plan: WritePlan, app_id: str) -> None:
        """Keep the plan: plain data."""
        self.plan = plan
        self.app_id = app_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        """Write the rows of one partition, in a task.

        A task does not know the batch. Of one that is tried again after its commit landed the
        rows are there already: whether that is wrong is known when the batch is committed.
        """
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        task = context.partitionId()
        try:
            return write_batches(self.plan, task, iterator)
        except IcechunkError as error:
            nothing = CooperativeWrite.changes(self.plan.write.fork())
            return RowsWritten(Answer(task, nothing), 0, error)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 -- PySpark's name
        """Publish what all tasks wrote, unless the branch holds the batch."""
        commit_rows(self.plan, messages, Transaction(self.app_id, batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave everything as it is; see the writer of batches."""

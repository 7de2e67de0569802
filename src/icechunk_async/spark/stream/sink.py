"""The sink: each batch of a stream is written to arrays exactly once.

Spark passes a sink the number of a batch, but no name of the query. The option `txnAppId` names
it, and every commit carries the newest batch of each name.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    CheckpointLostError,
    ConflictError,
    IcechunkError,
    InvalidInputError,
)
from icechunk_async.spark.options import WriteOptions
from icechunk_async.spark.write.commit import check_complete, commit_rows
from icechunk_async.spark.write.cooperative import Transaction, published_version
from icechunk_async.spark.write.plan import WritePlan, check_types
from icechunk_async.spark.write.task import RowsWritten, write_batches
from icechunk_async.spark.write.values import coordinate_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from icechunk_async.sync import Repository

__all__ = ["BATCH", "BatchMark", "BatchWritten", "StreamWriter", "stream_writer"]


_WORD: Final = (1 << 64) - 1
BATCH: Final = "spark-batch"
"""Property of a commit: what tells the rows of its batch from others."""


def stream_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the sink of a streaming query.

    Args:
        options: as Spark hands them over.
        schema: the columns.
        overwrite: whether the output mode is `complete`.

    Raises:
        InvalidInputError: a column has a type that no array can hold; `txnAppId` is missing or
            `txnVersion` is given; an option would refuse a batch that is tried again after its
            commit landed; or the output mode is `complete`.
    """
    check_types(schema)
    parsed = WriteOptions.parse(options)
    if overwrite:
        raise InvalidInputError(
            "outputMode('complete') writes the whole result anew in each batch, and arrays keep "
            "cells that no row names any more. Use outputMode('update') without 'append-dim', "
            "which replaces the values of the rows that changed, or 'append' with it."
        )
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
    return StreamWriter(parsed, parsed.app_id, schema.names)


@dataclass
class BatchWritten(WriterCommitMessage):
    """The result of one task of a batch.

    Attributes:
        written: that of its rows.
        plan: by which it wrote.
        mark: tells its rows from others.
    """

    written: RowsWritten
    plan: WritePlan
    mark: BatchMark


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of each batch in one commit.

    Spark makes one writer for all batches of a query, so each task looks up the arrays when its
    batch begins.
    """

    def __init__(self, options: WriteOptions, app_id: str, columns: Sequence[str]) -> None:
        """Keep plain data."""
        self.options = options
        self.app_id = app_id
        self.columns = tuple(columns)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchWritten:  # type: ignore[override]
        """Write the rows of one partition; called in a task.

        A task does not know the number of its batch. If the batch is tried again after its commit
        landed, its coordinates exist already; only the commit knows if that is an error.
        """
        context = TaskContext.get()
        assert context is not None  # Spark runs it in a task
        task = context.partitionId()
        replaces = self.options.append_dim is None
        # At the tip of now. Tasks of one batch may begin at different snapshots, see `_oldest`.
        plan = WritePlan.begin(
            self.options, self.columns, overwrite=replaces, cores=self.options.cores
        )
        rows = _Marked(iterator, () if plan.target is None else plan.target.dimensions)
        try:
            written = write_batches(plan, task, rows)
        except IcechunkError as error:
            # Kept instead of raised: if the batch is written already, it does not matter.
            written = replace(RowsWritten.nothing(plan, task), refusal=error)
            # The mark covers all rows: the commit compares it with that of the batch on the branch.
            for _ in rows:
                pass
        return BatchWritten(written, plan, rows.mark)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 -- PySpark's name
        """Publish the changes of all tasks, unless there is no row or the branch has the batch.

        Commits made since the tasks began are accepted, unless they changed the same chunks or
        the arrays.

        Raises:
            IncompleteWriteError: a task did not answer. Nothing was published.
            CheckpointLostError: the branch has a later batch of this name, or another one of this
                number.
            ConflictError: another writer changed the same, or the option `rebase` refuses any
                other commit. Nothing was published; a restarted query tries the batch again.
        """
        # First: rows of a task that did not answer are in no mark, and the others may have none.
        check_complete(messages)
        written = [it for it in messages if isinstance(it, BatchWritten)]
        plans = [it.plan for it in written]
        mark = sum((it.mark for it in written), BatchMark())
        # A stream that lost its checkpoint counts from 0 again under the same name: the number
        # alone does not tell new rows from old.
        if not mark.rows or self._is_written(plans[0], batchId, mark):
            return
        # Tasks look up the arrays by themselves, and others may commit in between.
        plan = _oldest(plans, batchId)
        commit_rows(
            plan,
            [_under(plan, it) for it in messages],
            Transaction(self.app_id, batchId),
            metadata={BATCH: mark.properties()},
        )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing; see `RowWriter.abort`."""

    def _is_written(self, plan: WritePlan, batch: int, mark: BatchMark) -> bool:
        """Return whether the branch has a batch.

        A checkpoint tries its last batch again at most. An older one, or other rows under the
        number of the last, are of another checkpoint: these rows are not written yet.

        Raises:
            CheckpointLostError: it has a later one, or another one of this number.
        """
        repository, branch = plan.write.repository, plan.write.branch
        newest = published_version(repository, branch, self.app_id)
        if newest is None or newest < batch:
            return False
        if newest == batch:
            there = _mark_of(repository, branch, Transaction(self.app_id, batch))
            # A batch of an earlier version has no mark, and is believed by its number.
            if there is None or there == mark.properties():
                return True
        raise CheckpointLostError(
            f"The query tries batch {batch}, and {branch!r} has batch {newest} of "
            f"{self.app_id!r}{' with other rows' if newest == batch else ''}: its checkpoint is "
            "not the one that those were written with. Nothing of the batch was written. Bring "
            "that checkpoint back; or start the query with a new 'txnAppId', and with "
            "option('late-rows', 'drop') if its source begins again at rows that are written.",
            branch=branch,
            app_id=self.app_id,
            batch=batch,
            newest=newest,
        )


def _mark_of(
    repository: Repository, branch: str, transaction: Transaction
) -> Mapping[str, Any] | None:
    """Return the mark of the rows of a written batch; None if nobody knows it any more.

    Cost: one request with format version 2; one for each commit since with version 1.
    """
    own = {"app-id": transaction.app_id, "version": transaction.version}
    for info in repository.ancestry(branch=branch):
        if info.metadata.get("spark-transaction") == own:
            found: Mapping[str, Any] | None = info.metadata.get(BATCH)
            return found
    return None


@dataclass(frozen=True, slots=True)
class BatchMark:
    """The number of rows, and the sum of hashes of their coordinates, in any order.

    A batch that is tried again has the rows that it had. Their values may differ, where a query
    computes them from the time of day.
    """

    rows: int = 0
    coordinates: int = 0

    @classmethod
    def of(cls, columns: Sequence[npt.NDArray[Any]]) -> BatchMark:
        """Return the mark of rows, given the column of each coordinate."""
        rows = len(columns[0]) if columns else 0
        hashes = np.zeros(rows, np.uint64)
        for column in columns:
            # Multiplied, so that the cells (1, 2) and (2, 1) differ.
            hashes = _mixed(hashes * np.uint64(31) + _words(column))
        # A sum: a batch that is tried again has its rows in another order, and in other tasks.
        return cls(rows, int(hashes.sum(dtype=np.uint64)))

    def __add__(self, other: BatchMark) -> BatchMark:
        """Return the mark of the rows of both."""
        return BatchMark(self.rows + other.rows, (self.coordinates + other.coordinates) & _WORD)

    def properties(self) -> dict[str, Any]:
        """Return the mark as a snapshot keeps it."""
        return {"rows": self.rows, "coordinates": f"{self.coordinates:016x}"}


def _words(column: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a word for each value; numbers that are equal have the same in every type."""
    if column.dtype.kind in "biuf":
        floats = column.astype(np.float64) + 0.0  # one zero
        return floats.view(np.uint64)
    if column.dtype.kind in "mM":
        return column.astype(f"{column.dtype.kind}8[us]").view(np.uint64)
    found, which = np.unique(column.astype(str), return_inverse=True)
    words = [int.from_bytes(blake2b(it.encode(), digest_size=8).digest()) for it in found.tolist()]
    return np.array(words, np.uint64)[which]


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return well mixed bits (the last steps of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class _Marked:
    """Marks the rows of the batches of a partition."""

    def __init__(self, batches: Iterator[pa.RecordBatch], coordinates: Sequence[str]) -> None:
        self.mark = BatchMark()
        self._batches = batches
        self._coordinates = coordinates

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = next(self._batches)
        columns = [batch.column(it) for it in self._coordinates]
        if not columns or any(it.null_count for it in columns):  # such a batch is refused
            self.mark += BatchMark(batch.num_rows)
        else:
            named = zip(columns, self._coordinates, strict=True)
            self.mark += BatchMark.of([coordinate_column(it, name) for it, name in named])
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
            # Ancestry is newest first, so that the last base that is found is the oldest.
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
    # Ids of nodes too: an array that was deleted and created again has the same path, and other
    # chunks.
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


def _under(plan: WritePlan, message: WriterCommitMessage | None) -> RowsWritten | None:
    """Return the result of a task as if it had been given this plan."""
    if not isinstance(message, BatchWritten):
        return None
    written = message.written
    answer = replace(written.answer, changes=plan.write.adopt(written.answer.changes))
    return replace(written, answer=answer)

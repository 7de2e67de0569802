"""The commit of a write of rows: the chunks of all tasks, and those that tasks share."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import IncompleteWriteError
from icechunk_async.spark.shared import without_chunks
from icechunk_async.spark.write.cooperative import Answer
from icechunk_async.spark.write.join import Joiner, shared_chunks, twice_whole
from icechunk_async.spark.write.task import RowsWritten, numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql.datasource import WriterCommitMessage

    from icechunk_async.spark.write.plan import WritePlan
    from icechunk_async.spark.write.publish import Published, Transaction
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["LATE_ROWS", "commit_rows"]

_log = logging.getLogger(__name__)
LATE_ROWS: Final = "spark-late-rows"
"""Property of a commit: how many of its rows were late, and replaced values or were left out."""


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
        DuplicateRowsError: two tasks had rows of one cell.
        ConflictError: another writer was first, or changed coordinates by which rows were placed.

    Cost: reads, joins and writes each chunk of which several tasks had rows.
    """
    written = [it for it in messages if isinstance(it, RowsWritten)]
    if len(written) < len(messages):
        raise IncompleteWriteError(
            f"{len(messages) - len(written)} of {len(messages)} tasks did not answer. Nothing was "
            "published; write again.",
            missing=[at for at, it in enumerate(messages) if it is None],
            repeated=[],
        )
    written = numbered(written)
    target = plan.target
    if target is None or plan.write.is_done(transaction):
        return None
    for refusal in (it.refusal for it in written if it.refusal is not None):
        raise refusal
    if transaction is None and not any(it.rows for it in written):
        return None

    growth = target.growth
    appended = [it.appended for it in written if it.appended is not None]
    new = None
    if growth is not None:
        allow = plan.options.cast == "allow"
        new = growth.filled(appended, fill_gaps=plan.options.fill_gaps, allow=allow)
    joiner, shared = _joiner(plan, written)

    def finish(store: IcechunkStore) -> None:
        if joiner is not None:
            joiner.join(store, shared, target.old)
        if growth is not None and new is not None:
            growth.finish(store, new)

    late = sum(it.late for it in written)
    if late:
        how = "replaced values" if plan.options.late_rows == "overwrite" else "were left out"
        _log.warning("%d late rows %s.", late, how)
    return plan.write.commit(
        _without(written, joiner, shared),
        len(written),
        plan.options.message,
        metadata={**(metadata or {}), **({LATE_ROWS: late} if late else {})},
        transaction=transaction,
        rebase_with=rebase_with or plan.options.solver,
        finish=finish,
        # Also dimensions without an array: another writer may have created one.
        unchanged=[plan.options.path_of(axis.name) for axis in target.axes],
    )


def _joiner(plan: WritePlan, written: Sequence[RowsWritten]) -> tuple[Joiner | None, Any]:
    """Return the numbers of the chunks that tasks share, and their joiner if there is one.

    Raises:
        DuplicateRowsError: a task has every cell of a chunk, and another has some.
    """
    parts = [it.parts for it in written]
    shared, twice = shared_chunks(parts), twice_whole(parts)
    if plan.target is None or (not len(shared) and twice is None):
        return None, shared
    grid = plan.target.grid(plan.write.fork().store)
    changes = [it.answer.changes for it in written]
    joiner = Joiner(plan.write, plan.target, grid, parts, changes)
    if twice is not None:
        raise joiner.refuse_whole(twice)
    return joiner, shared


def _without(written: Sequence[RowsWritten], joiner: Joiner | None, shared: Any) -> list[Answer]:
    """Return the answers of tasks without the chunks that the commit writes."""
    if joiner is None:
        return [it.answer for it in written]
    found: list[Answer] = []
    for it in written:
        stored = it.parts.chunks[it.parts.stored]
        again = np.intersect1d(stored, shared)
        changes = it.answer.changes
        if len(again):
            coords = np.stack(np.unravel_index(again, joiner.grid.counts), axis=1)
            changes = without_chunks(changes, coords.astype(np.uint32))
        found.append(Answer(it.answer.task, changes))
    return found

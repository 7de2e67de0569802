"""The work of one task: rows to chunks, and what it hands over to the commit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from zarr.core.sync import sync

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import OutsideGridError
from icechunk_async.spark.grid import Appended, ChunkAssembly
from icechunk_async.spark.shared import open_array, store_object
from icechunk_async.spark.write.cooperative import Answer
from icechunk_async.spark.write.parts import Parts, PartWriter, put_block
from icechunk_async.spark.write.values import coordinate_column, encode_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.errors import IcechunkError
    from icechunk_async.spark.write.plan import WritePlan
    from icechunk_async.spark.write.target import WriteTarget

    type Ints = npt.NDArray[np.int64]

__all__ = ["RowsWritten", "numbered", "this_task", "write_batches"]

_DENSE: Final = 8
"""A task stores a chunk if it has this part of its cells, or more; so do few tasks at most."""
# No engine numbers a task so.
_UNKNOWN: Final = -1


def this_task() -> int:
    """Return the number of the calling task, or what `numbered` replaces if nobody knows it.

    Spark tells each task. Sail runs the same code, and has no contexts of tasks.
    """
    context = TaskContext.get()
    return _UNKNOWN if context is None else context.partitionId()


@dataclass
class RowsWritten(WriterCommitMessage):
    """The result of one task.

    Attributes:
        answer: the changes it made.
        parts: the chunks that it wrote, and rows of chunks that it hands over.
        rows: how many rows it wrote, or handed over.
        late: how many rows had coordinates that the appended dimension had already.
        refusal: why its rows cannot be written, if the batch may turn out to be written already.
        appended: places and coordinates along the appended dimension, as the rows gave them.
    """

    answer: Answer
    parts: Parts
    rows: int = 0
    late: int = 0
    refusal: IcechunkError | None = None
    appended: tuple[Ints, npt.NDArray[Any]] | None = None

    @classmethod
    def nothing(cls, plan: WritePlan, task: int) -> RowsWritten:
        """Return the result of a task that wrote nothing."""
        fork = plan.write.fork()
        parts = PartWriter(partial(store_object, fork)).finish([])
        return cls(Answer(task, plan.write.changes(fork)), parts)


def numbered(results: Sequence[RowsWritten]) -> list[RowsWritten]:
    """Return the results of all tasks with numbers: their own, or else those of their order. Pure.

    Args:
        results: one for each task, as the engine hands them over.
    """
    if all(it.answer.task != _UNKNOWN for it in results):
        return list(results)
    return [replace(it, answer=replace(it.answer, task=at)) for at, it in enumerate(results)]


def write_batches(
    plan: WritePlan, task: int, batches: Iterator[pa.RecordBatch], *, arranged: bool = False
) -> RowsWritten:
    """Write the rows of one task to chunks.

    Args:
        plan: the plan.
        task: number of the task.
        batches: the rows.
        arranged: the rows of a chunk are in one task, which stores the chunk in any case.

    Raises:
        DuplicateRowsError, OutsideGridError, MissingCoordinatesError: rows have no cell, or
            several have the same.
        InvalidInputError: an array cannot hold a value.

    Memory: the rows of incomplete chunks; of one chunk if rows come chunk by chunk.
    """
    target = plan.target
    if target is None:
        # Spark expects a task to read its input to the end.
        for _ in batches:
            pass
        return RowsWritten.nothing(plan, task)
    fork = plan.write.fork()
    arrays = {it.name: open_array(fork.store, path, write=True) for path, it in target.variables}
    grid = target.grid(fork.store)
    assembly = ChunkAssembly(grid, target.duplicate)
    parts = PartWriter(partial(store_object, fork))
    growth = target.growth
    appended = None if growth is None else Appended(growth.axis, growth.length)
    rows = _Rows(plan, target)
    for batch in batches:
        places, given, kept = rows.place(batch)
        if growth is not None and appended is not None:
            at = target.axes.index(growth.axis)
            # What rows say, not what steps compute: 0.1 + 0.2 is another coordinate than 0.3.
            appended.add(places[at], given[at])
        columns = _encoded(kept, target, allow=plan.options.cast == "allow")
        for block in assembly.add(places, columns):
            sync(put_block(arrays, grid, block, target.old))
    # A chunk without all of its rows is stored if it is dense, or if no other task has rows of it.
    # A thin one goes to the commit: else several tasks would store it, and the commit once more.
    for block in assembly.rest():
        stored = arranged or len(block.cells) * _DENSE >= assembly.size(block.chunk)
        if stored:
            sync(put_block(arrays, grid, block, target.old))
        parts.add(block, stored=stored)
    return RowsWritten(
        Answer(task, plan.write.changes(fork)),
        parts.finish(sorted(assembly.whole)),
        rows=rows.count,
        late=rows.late,
        appended=None if appended is None else appended.columns(),
    )


class _Rows:
    """Finds the places of rows, and counts the rows."""

    def __init__(self, plan: WritePlan, target: WriteTarget) -> None:
        self.count = 0
        self.late = 0
        self._target = target
        self._late_rows = plan.options.late_rows
        self._finders = [it.finder() for it in target.axes]

    def place(
        self, batch: pa.RecordBatch
    ) -> tuple[list[Ints], list[npt.NDArray[Any]], pa.RecordBatch]:
        """Return the places of rows along each axis, their coordinates, and the rows to write.

        Raises:
            OutsideGridError: a row is late, and the options refuse that.
        """
        target = self._target
        named = partial(_named, batch, target)
        given = [coordinate_column(batch.column(it), it, named) for it in target.dimensions]
        places = [it.places(of, named) for it, of in zip(self._finders, given, strict=True)]
        if target.growth is not None and batch.num_rows:
            at = target.axes.index(target.growth.axis)
            # With `append-values` the axis has the new coordinates as well, from `first` on.
            late = places[at] < target.growth.axis.first
            if late.any():
                self._take_late(batch, places, late)
                if self._late_rows == "drop":
                    batch = batch.filter(pa.array(~late))
                    given = [it[~late] for it in given]
                    places = [it[~late] for it in places]
        self.count += batch.num_rows
        return places, given, batch

    def _take_late(
        self, batch: pa.RecordBatch, places: Sequence[Ints], late: npt.NDArray[np.bool_]
    ) -> None:
        self.late += int(late.sum())
        growth = self._target.growth
        if self._late_rows != "fail" or growth is None:
            return
        row = int(np.flatnonzero(late)[0])
        name = growth.axis.name
        raise OutsideGridError(
            f"A row has {self._target.row_at([int(it[row]) for it in places])}, which the arrays "
            f"have already along {name!r}, and this write appends. Nothing was published. Let "
            "option('late-rows', 'overwrite') replace values by such rows or 'drop' leave them "
            "out, or use mode('overwrite').",
            dimension=name,
            value=str(batch.column(name)[row].as_py()),
        )


def _encoded(
    batch: pa.RecordBatch, target: WriteTarget, *, allow: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of values as the arrays store them.

    Raises:
        ValueRefusedError: an array cannot hold one.
    """
    named = partial(_named, batch, target)
    return {
        it.name: encode_column(batch.column(it.name), it, allow=allow, named=named)
        for _, it in target.variables
    }


def _named(batch: pa.RecordBatch, target: WriteTarget, row: int) -> str:
    """Return words for a row, as users know it: by its coordinates."""
    columns = ((it, batch.column(it)) for it in target.dimensions)
    return "of " + ", ".join(f"{name}={column[row].as_py()}" for name, column in columns)

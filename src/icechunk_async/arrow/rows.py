"""The rows of a table over arrays: planned in parts of whole chunks, and read part by part."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.blocking import portal
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.boxes import Grid, cut, grouped, num_rows
from icechunk_async.arrow.table import Cells

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    import xarray

    from icechunk_async.arrow.boxes import Box, Span
    from icechunk_async.arrow.table import Column, GroupSource, TableShape

    type Mask = npt.NDArray[np.bool_]
    type Keep = Callable[[int, Span], Mask | None]

__all__ = [
    "LOAD_BYTES",
    "TEXT_BYTES",
    "RowPlan",
    "grid_of",
    "whole_columns",
    "width_of",
]

LOAD_BYTES: Final = 32 << 20
"""Values that are held in memory at a time, approximately."""
TEXT_BYTES: Final = 32
"""Assumed size of a text in a column."""
_THREADS: Final = "icechunk-rows"


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The columns of a table that a query needs, and the cells that it may."""

    dataset: xarray.Dataset
    shape: TableShape
    schema: pa.Schema
    """The columns to return, in order."""
    grid: Grid
    source: GroupSource
    keep: Keep
    """Returns, for a dimension and a range of it, which indices a query may need; None for all."""

    @property
    def width(self) -> int:
        """The approximate size of a row in bytes."""
        return max(1, sum(width_of(field.type) for field in self.schema))

    def masks(self, box: Box) -> list[Mask | None]:
        """Return for each dimension which indices of a box are needed; None for all."""
        return [self.keep(axis, span) for axis, span in enumerate(box)]

    def parts(self, most_bytes: int) -> Iterator[tuple[Box, ...]]:
        """Return groups of boxes of whole chunks, each of about `most_bytes` or one chunk."""
        whole = tuple((0, length) for length in self.grid.shape)
        return self.grid.parts(self.masks(whole), max(1, most_bytes // self.width))

    def least_parts(self, most_bytes: int) -> int:
        """Return the least number of groups that `parts` makes if every cell is needed."""
        most = max(1, most_bytes // self.width, prod(self.grid.chunks))
        return -(-prod(self.grid.shape) // most)

    def parts_of_chunks(self, kept: Mask, most_bytes: int) -> Iterator[tuple[Box, ...]]:
        """Return groups of boxes of the chunks of a mask, as `parts` does of all."""
        most = max(1, most_bytes // self.width)
        boxes = self.grid.boxes_of_chunks(kept)
        return grouped((it for box in boxes for it in cut(box, self.grid.chunks, most)), most)

    def rows_in(self, size_bytes: int) -> int:
        """Return of how many rows the values to read never have more than a size; at least one.

        A column has no more values than rows, and no more than it has cells: coordinates are read
        once for many rows.
        """
        lengths = dict(zip(self.shape.dims, self.grid.shape, strict=True))
        columns = sorted(
            (prod(lengths[dim] for dim in self.shape.column(it.name).dims), width_of(it.type))
            for it in self.schema
        )
        width, whole = sum(width for _, width in columns), 0
        # From the smallest: as long as a column's cells are fewer than the rows, it counts once as
        # a whole, and no longer for each row.
        for cells, own in columns:
            if whole + width * cells >= size_bytes:
                break
            whole += own * cells
            width -= own
        return max(1, (size_bytes - whole) // width if width else prod(self.grid.shape))

    def rows(self, boxes: Iterable[Box]) -> Generator[pa.RecordBatch]:
        """Return the rows of boxes in batches, in C order within each box.

        The thread that asks for the first part reads it. From the second on, the next part is read
        on another thread while the rows of the last one are in use.

        Memory: about 32 MiB of values, or one chunk.
        """
        # Half, as two parts are in memory: the one in use, and the next.
        most = self.rows_in(LOAD_BYTES // 2)
        parts = (part for box in boxes for part in cut(box, self.grid.chunks, most))
        with closing(one_ahead(parts, self._load, lambda it: num_rows(it) <= most)) as found:
            while (cells := next(found, None)) is not None:
                yield from cells.batches()
                del cells  # before others are read

    def _load(self, part: Box) -> Cells:
        places = [
            np.arange(start, stop) if mask is None else start + np.flatnonzero(mask)
            for (start, stop), mask in zip(part, self.masks(part), strict=True)
        ]
        return Cells.load(self.dataset, self.shape, places, self.schema, self.source)


def grid_of(dataset: xarray.Dataset, shape: TableShape, columns: Iterable[Column]) -> Grid:
    """Return the chunk grid of a table: along each dimension the longest chunks of its arrays."""
    lengths = tuple(int(dataset.sizes[dim]) for dim in shape.dims)
    chunks = dict.fromkeys(shape.dims, 0)
    for name in whole_columns(shape, columns):
        variable = dataset.variables[name]
        stored: Any = variable.encoding.get("shards") or variable.encoding.get("chunks")
        for dim, size in zip(variable.dims, stored or variable.shape, strict=True):
            # Irregular grids list the size of every chunk.
            longest = int(np.max(size))
            chunks[str(dim)] = max(chunks[str(dim)], longest)
    sizes = tuple(
        chunks[dim] or max(1, length) for dim, length in zip(shape.dims, lengths, strict=True)
    )
    return Grid(lengths, sizes)


def whole_columns(shape: TableShape, columns: Iterable[Column]) -> Sequence[str]:
    """Return the names of those columns that are arrays with all dimensions of the table."""
    return [it.name for it in columns if it.variable and set(it.dims) == set(shape.dims)]


def width_of(kind: pa.DataType) -> int:
    """Return the approximate size in bytes of a value in a column."""
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return TEXT_BYTES


def one_ahead[T, R](
    items: Iterable[T], work: Callable[[T], R], is_small: Callable[[T], bool]
) -> Generator[R]:
    """Return the results of some work on items, in order.

    From the second item on, the next one is worked on meanwhile, on a thread. A caller that stops
    after the first result has caused no other work.

    Args:
        items: what to work on.
        work: called with an item, on one thread at a time, in a copy of the caller's context.
        is_small: whether an item may be worked on while the result of another is in use.

    Close the generator, or use it up: then no thread of it is left. If it is garbage collected,
    on any thread, work that has started ends by itself.

    Memory: two results of small items, or of one that is not and one that is.
    """
    rest = iter(items)
    item = next(rest, None)
    if item is not None:
        yield work(item)
        item = next(rest, None)
    if item is None:
        return
    pool = ThreadPoolExecutor(1, _THREADS)
    begun: Future[R] | None = None
    try:
        while item is not None:
            done = [work(item) if begun is None else begun.result()]
            item, begun = next(rest, None), None
            # Beside a large result a second one would break the bound on memory, so it waits.
            if item is not None and is_small(item):
                begun = pool.submit(copy_context().run, work, item)
            yield done.pop()  # which is not referred to here while it is in use
    finally:
        # Waiting on the thread that is waited for would never end.
        pool.shutdown(wait=_may_wait(), cancel_futures=True)


def _may_wait() -> bool:
    """Return whether this is no thread that the work needs: collection may run on these, too."""
    return not portal.is_here() and not threading.current_thread().name.startswith(_THREADS)

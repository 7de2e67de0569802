"""Chunks that a commit stored, replaced or removed, as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import NodeNotFoundError
from icechunk_async.format.manifest.row_index import rows_in
from icechunk_async.spark.datasets import arrays_of, nodes_of
from icechunk_async.spark.grid.boxes import boxes_of_cells, cut, grouped, outside
from icechunk_async.spark.read.chunks import (
    LOADED,
    chunk_bytes,
    chunk_shape,
    listed,
    loading,
    rows_of,
)
from icechunk_async.spark.stream.rows import APPENDED, DELETED, MIXED, UPDATED, ChangePart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    import pyarrow as pa

    from icechunk_async.engine.tree.listing import ChunkBatch
    from icechunk_async.format.snapshot import Node
    from icechunk_async.spark.grid.boxes import Box
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.stream.history import Commit

    type Rows = tuple[ChunkBatch, npt.NDArray[np.int64]]

__all__ = ["ChunksState", "changed_chunks", "chunk_parts"]


class ChunksState:
    """The arrays of a group as one snapshot has them."""

    def __init__(self, options: ReadOptions) -> None:
        """Look at a group; there may be none."""
        self.options = options
        self.nodes: Mapping[str, Node] = {}
        try:
            self.arrays = arrays_of(options)
        except NodeNotFoundError:
            self.arrays = {}
            return
        self.nodes = nodes_of(options)

    def grid(self, name: str) -> tuple[int, ...]:
        """Return the chunks of an array along each axis."""
        data = self.nodes[name].array
        assert data is not None  # it is no group
        return data.grid


def chunk_parts(
    before: ChunksState | None,
    after: ChunksState,
    touched: Mapping[str, npt.NDArray[np.uint32]],
    commit: Commit,
    *,
    schema: pa.Schema,
    every_change: bool,
) -> list[ChangePart]:
    """Plan which chunks tasks look up to tell what a commit did to them.

    Args:
        before: the arrays in the commit's parent; None if that has none.
        after: the arrays in the commit.
        touched: coordinates of chunks that were set or deleted, by name of the array.
        commit: the one.
        schema: columns that are wanted.
        every_change: also what it removed.
    """
    options = after.options
    found = options.arrays or sorted({*(before.arrays if before else ()), *after.arrays})
    loads = not LOADED.isdisjoint(schema.names)
    parts: list[ChangePart] = []
    for name in found:
        for kind, boxes in _changes(before, after, name, touched.get(name)):
            if kind == DELETED and not every_change:
                continue
            state = before if kind == DELETED and before is not None else after
            array = state.arrays[name]
            most = max(1, options.partition_bytes // chunk_bytes(array)) if loads else 1 << 20
            pieces = (part for box in boxes for part in cut(box, (1,) * len(box), most))
            groups = grouped(pieces, most)
            parts += [ChangePart(commit, kind, group, array=name) for group in groups]
    return parts


def _changes(
    before: ChunksState | None,
    after: ChunksState,
    name: str,
    touched: npt.NDArray[np.uint32] | None,
) -> Iterator[tuple[str, list[Box]]]:
    """Return the boxes of an array's grid with what may have changed; none twice."""
    old = before.grid(name) if before is not None and name in before.arrays else None
    new = after.grid(name) if name in after.arrays else None
    if before is None or old is None or new is None or len(old) != len(new):
        if old is not None:
            yield DELETED, [tuple((0, count) for count in old)]
        if new is not None:
            yield APPENDED, [tuple((0, count) for count in new)]
        return
    if not _same(before, after, name):
        yield MIXED, [tuple((0, max(pair)) for pair in zip(old, new, strict=True))]
        return
    kept = [np.ones(min(pair), np.bool_) for pair in zip(old, new, strict=True)]
    yield DELETED, list(outside(kept, old))
    if touched is not None and touched.shape[1] == len(new):
        cells = touched[(touched < np.array(new, np.int64)).all(axis=1)]
        boxes = boxes_of_cells(cells).tolist()
        yield MIXED, [tuple((start, stop) for start, stop in box) for box in boxes]


def _same(before: ChunksState, after: ChunksState, name: str) -> bool:
    """Return whether an array is the same one, cut in the same way."""
    return before.nodes[name].id == after.nodes[name].id and chunk_shape(
        before.arrays[name]
    ) == chunk_shape(after.arrays[name])


def changed_chunks(
    part: ChangePart, options: ReadOptions, schema: pa.Schema, *, every_change: bool
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Return the chunks of a part by what was done to them, in a task."""
    commit = part.commit
    new = options.pinned(commit.snapshot_id)
    old = None if commit.parent_id is None else options.pinned(commit.parent_id)
    arrays: dict[str, Any] = {}
    for box in part.boxes:
        after = [] if part.kind == DELETED else listed(new, part.array, box)
        before = [] if part.kind == APPENDED or old is None else listed(old, part.array, box)
        for kind, options_, (batch, places) in _sorted_out(before, after, old, new):
            if kind != APPENDED and not every_change:
                continue
            at = options_.snapshot_id or ""
            if at not in arrays:
                arrays[at] = arrays_of(options_)[part.array]
            loads, most = loading(arrays[at], schema)
            for first in range(0, len(places), most):
                rows = places[first : first + most]
                yield kind, rows_of(options_, part.array, arrays[at], (batch, rows), loads)


def _sorted_out(
    before: list[ChunkBatch], after: list[ChunkBatch], old: ReadOptions | None, new: ReadOptions
) -> Iterator[tuple[str, ReadOptions, Rows]]:
    """Tell chunks that are new, replaced and gone; none of them empty."""
    for batch in after:
        known = _within(batch, before)
        for kind, mask in ((APPENDED, ~known), (UPDATED, known)):
            if mask.any():
                yield kind, new, (batch, np.flatnonzero(mask))
    for batch in before:
        gone = ~_within(batch, after)
        if gone.any():
            assert old is not None  # it was listed
            yield DELETED, old, (batch, np.flatnonzero(gone))


def _within(batch: ChunkBatch, others: list[ChunkBatch]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(len(batch), np.bool_)
    for other in others:
        mask |= rows_in(batch.coords, other.coords)
    return mask

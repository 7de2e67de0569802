"""Rows that a commit appended, changed or removed: planned from its log, compared in tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from icechunk_async.errors import NodeNotFoundError
from icechunk_async.spark.datasets import nodes_of, open_group
from icechunk_async.spark.grid.boxes import (
    boxes_of_cells,
    cells_of_chunks,
    clipped,
    cut,
    grouped,
    inside,
    is_many,
    kept_cells,
    limited,
    outside,
    windows,
)
from icechunk_async.spark.read.reader import LOAD_BYTES, IcechunkReader, Part, grid_of, width_of
from icechunk_async.spark.read.schema import check_type, dimension_values, table_shape, to_arrow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import xarray
    from pyspark.sql.types import StructType

    from icechunk_async.format.snapshot import Node
    from icechunk_async.spark.grid.boxes import Box, Grid, Window
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.read.schema import Column, TableShape
    from icechunk_async.spark.stream.history import Commit

    type Masks = list[npt.NDArray[np.bool_]]

__all__ = [
    "APPENDED",
    "DELETED",
    "MIXED",
    "UPDATED",
    "ChangePart",
    "TableState",
    "changed_rows",
    "row_parts",
]


APPENDED: Final = "appended"
UPDATED: Final = "updated"
DELETED: Final = "deleted"
MIXED: Final = ""
"""The task finds out which chunks are what."""


class ChangePart(InputPartition):
    """What one commit did to boxes of a table's cells, or of the grid of an array's chunks."""

    def __init__(
        self,
        commit: Commit,
        kind: str,
        boxes: Sequence[Box],
        *,
        chunks: tuple[int, ...] = (),
        array: str = "",
        kept: tuple[Window, ...] | None = None,
    ) -> None:
        """Name the boxes.

        Args:
            commit: the one.
            kind: what it did to all of them; deleted is read from the parent, updated from both.
            boxes: disjoint.
            chunks: elements of a chunk of the table's grid.
            array: with the layout ``chunks`` its path.
            kept: along each dimension the places whose rows were there before and still are;
                only where boxes do not tell it.
        """
        super().__init__(None)
        self.commit = commit
        self.kind = kind
        self.boxes = tuple(boxes)
        self.chunks = chunks
        self.array = array
        self.kept = kept


_DECODING: Final = frozenset(
    {
        "_FillValue",
        "_Unsigned",
        "add_offset",
        "calendar",
        "coordinates",
        "dtype",
        "missing_value",
        "scale_factor",
        "units",
    }
)
"""Attributes that change what values are shown."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A table as one snapshot has it.

    Attributes:
        options: name the snapshot.
        dataset: its group.
        shape: its dimensions and columns.
        columns: those wanted.
        nodes: of its arrays, by name.
    """

    options: ReadOptions
    dataset: xarray.Dataset
    shape: TableShape
    columns: tuple[Column, ...]
    nodes: Mapping[str, Node]

    @classmethod
    def of(cls, options: ReadOptions, schema: pa.Schema) -> TableState | None:
        """Look at a table; answer None where a snapshot has no array for some column, or none.

        Raises:
            InvalidInputError: the snapshot has a column of a type other than wanted.
        """
        try:
            dataset = open_group(options)
        except NodeNotFoundError:
            return None
        names = {str(it) for it in dataset.variables}
        wanted = set(schema.names) - {str(it) for it in dataset.sizes}
        if not names or not wanted | set(options.arrays or ()) <= names:
            return None
        shape = table_shape(dataset, options.arrays, schema.names)
        columns = tuple(shape.column(name) for name in schema.names)
        for column in columns:
            check_type(column, schema.field(column.name).type)
        return cls(options, dataset, shape, columns, nodes_of(options))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cells along each dimension."""
        return tuple(int(self.dataset.sizes[dim]) for dim in self.shape.dims)

    def grid(self) -> Grid:
        """Return the chunks of the table."""
        return grid_of(self.dataset, self.shape, self.columns, self.options)

    def chunk_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the elements of a chunk of an array; None where chunks differ in size."""
        variable = self.dataset.variables[name]
        stored: Any = variable.encoding.get("shards") or variable.encoding.get("chunks")
        if any(np.ndim(size) for size in stored or ()):
            return None
        return tuple(map(int, stored or variable.shape))


def row_parts(
    before: TableState | None,
    after: TableState | None,
    touched: Mapping[str, npt.NDArray[np.uint32]],
    commit: Commit,
    *,
    every_change: bool,
) -> list[ChangePart]:
    """Plan which cells tasks read to tell what a commit did to a table.

    Args:
        before: the table in the commit's parent; None if it was none.
        after: the table in the commit; likewise.
        touched: coordinates of chunks that were set or deleted, by name of the array.
        commit: the one.
        every_change: also what it changed and removed.

    Cost: coordinates are read where the commit touched them; no value of any other array.
    """
    kept = None if before is None or after is None else _kept(before, after, touched)
    exact = kept if kept is not None and is_many(kept) else None
    parts: list[ChangePart] = []
    if after is not None:
        parts += _parts(after, commit, APPENDED, _others(after, kept), exact)
    if before is not None and every_change:
        parts += _parts(before, commit, DELETED, _others(before, kept), exact)
        if after is not None and kept is not None:
            rest = _candidates(before, after, touched, limited(kept, instead=True))
            parts += _parts(after, commit, UPDATED, rest, exact)
    return parts


def _others(state: TableState, kept: Masks | None) -> Iterator[Box]:
    """Return the boxes of what is in one state only; of what is kept also some, if it is much."""
    if kept is None:
        return iter([_whole(state)])
    return outside(limited(kept, instead=False), state.lengths)


def _whole(state: TableState) -> Box:
    return tuple((0, length) for length in state.lengths)


def _parts(
    state: TableState, commit: Commit, kind: str, boxes: Iterable[Box], kept: Masks | None
) -> Iterator[ChangePart]:
    found = list(boxes)
    if not found:
        return
    grid = state.grid()
    width = max(1, sum(width_of(column.type) for column in state.columns))
    rows = max(1, state.options.partition_bytes // width)
    pieces = (part for box in found for part in cut(box, grid.chunks, rows, grid.breaks))
    for group in grouped(pieces, rows):
        exact = None if kept is None else windows(kept, group)
        yield ChangePart(commit, kind, group, chunks=grid.chunks, kept=exact)


def _kept(
    before: TableState, after: TableState, touched: Mapping[str, npt.NDArray[np.uint32]]
) -> Masks | None:
    """Tell along each dimension which places are still the same; None if no row can be."""
    if before.shape.dims != after.shape.dims:
        return None
    masks: Masks = []
    for dim, old, new in zip(after.shape.dims, before.lengths, after.lengths, strict=True):
        common = min(old, new)
        columns = before.shape.column(dim), after.shape.column(dim)
        if columns[0].variable != columns[1].variable or columns[0].type != columns[1].type:
            return None
        mask = np.ones(common, np.bool_)
        if columns[0].variable and (dim in touched or _is_rewritten(before, after, dim)):
            values = [
                dimension_values(state.dataset, column, (0, common), state.options)
                for state, column in zip((before, after), columns, strict=True)
            ]
            mask = ~_differing(*values)
        masks.append(mask)
    return masks


def _candidates(
    before: TableState,
    after: TableState,
    touched: Mapping[str, npt.NDArray[np.uint32]],
    kept: Masks,
) -> list[Box]:
    """Return boxes of kept rows that may have other values now."""
    dims = after.shape.dims
    limits = inside(kept)
    if not dims:
        return limits  # one row
    common = tuple(map(len, kept))
    grid = after.grid()
    cells: list[npt.NDArray[np.int64]] = []
    for column in after.columns:
        if not column.variable or column.name in dims:
            continue
        sizes = after.chunk_shape(column.name)
        if _is_rewritten(before, after, column.name) or sizes is None:
            return limits
        if column.name not in touched:
            continue
        axes = [dims.index(dim) for dim in after.dataset.variables[column.name].dims]
        if len(axes) == len(dims):
            chunks = touched[column.name]
            cells.append(cells_of_chunks(chunks, sizes, axes, grid.chunks, common))
        else:
            box = _differing_box(before, after, column.name, axes, common)
            cells.append(_cells_of_box(box, grid.chunks))
    if not cells:
        return []
    steps = np.array(grid.chunks, np.int64).reshape(1, -1, 1)
    boxes = boxes_of_cells(np.unique(np.concatenate(cells), axis=0)) * steps
    return list(clipped((tuple(map(tuple, box)) for box in boxes.tolist()), limits))


def _differing_box(
    before: TableState, after: TableState, name: str, axes: list[int], common: tuple[int, ...]
) -> Box:
    """Return where values along some dimensions differ: the smallest box that has all."""
    at = tuple(slice(0, common[axis]) for axis in axes)
    values = [state.dataset.variables[name][at].to_numpy() for state in (before, after)]
    kind = after.shape.column(name).type
    flat = [to_arrow(it.reshape(-1), kind) for it in values]
    mask = _differing(*flat).reshape(values[1].shape)
    box = [(0, length) for length in common]
    places = np.nonzero(mask)
    for axis, found in zip(axes, places, strict=True):
        box[axis] = (int(found.min()), int(found.max()) + 1) if len(found) else (0, 0)
    if not axes and not mask.any():
        return tuple((0, 0) for _ in common)
    return tuple(box)


def _cells_of_box(box: Box, grid: tuple[int, ...]) -> npt.NDArray[np.int64]:
    ranges = [
        np.arange(start // size, -(-stop // size))
        for (start, stop), size in zip(box, grid, strict=True)
    ]
    return np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(grid))


def _is_rewritten(before: TableState, after: TableState, name: str) -> bool:
    """Return whether an array is another one, or shows its chunks in another way."""
    old, new = before.nodes.get(name), after.nodes.get(name)
    if old is None or new is None or old.id != new.id:
        return True
    return old.user_data != new.user_data and _document(old) != _document(new)


def _document(node: Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(node.user_data)
    attributes: dict[str, Any] = document.get("attributes") or {}
    shown = {name: value for name, value in attributes.items() if name in _DECODING}
    return {**document, "shape": None, "attributes": shown}


def _differing(old: pa.Array[Any], new: pa.Array[Any]) -> npt.NDArray[np.bool_]:
    """Tell which of two columns' values are not the same; NaN is NaN, and null is null."""
    same = pc.fill_null(pc.equal(old, new), False)  # noqa: FBT003 -- Arrow's
    if pa.types.is_floating(new.type):
        both = pc.and_(pc.is_nan(old), pc.is_nan(new))
        same = pc.or_(same, pc.fill_null(both, False))  # noqa: FBT003
    same = pc.or_(same, pc.and_(pc.is_null(old), pc.is_null(new)))
    return ~same.to_numpy(zero_copy_only=False).astype(np.bool_)


def changed_rows(
    part: ChangePart, options: ReadOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a part, in a task; of those that may have changed the ones that did.

    Memory: about 32 MiB of values at a time, twice for rows that may have changed.
    """
    commit = part.commit
    shown = commit.parent_id if part.kind == DELETED else commit.snapshot_id
    assert shown is not None  # what was deleted was there before
    new = IcechunkReader(options.pinned(shown), schema)
    if part.kind != UPDATED and part.kept is None:
        yield from new.read(Part(part.boxes))
        return
    old = None
    if part.kind == UPDATED:
        assert commit.parent_id is not None  # likewise
        old = IcechunkReader(options.pinned(commit.parent_id), schema)
    width = max(1, sum(width_of(it) for it in new.schema.types))
    for box in part.boxes:
        for piece in cut(box, part.chunks, max(1, LOAD_BYTES // width)):
            rows = _piece(new, piece)
            mask = np.ones(rows.num_rows, np.bool_)
            if old is not None:
                mask = _any_differing(_piece(old, piece), rows)
            if part.kept is not None:
                kept = kept_cells(part.kept, piece)
                mask &= kept if part.kind == UPDATED else ~kept
            yield from rows.filter(pa.array(mask)).to_batches(options.batch_rows)


def _piece(reader: IcechunkReader, piece: Box) -> pa.Table:
    return pa.Table.from_batches(reader.read(Part((piece,))), reader.schema)


def _any_differing(old: pa.Table, new: pa.Table) -> npt.NDArray[np.bool_]:
    mask = np.zeros(new.num_rows, np.bool_)
    for name in new.schema.names:
        mask |= _differing(*(it.column(name).combine_chunks() for it in (old, new)))
    return mask

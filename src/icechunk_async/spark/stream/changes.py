"""Rows and chunks that a commit appended, changed or removed.

The driver plans from the commit's transaction log, and reads coordinates only. Tasks read the
values, and compare them with the parent where the log is not enough.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.boxes import (
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
from icechunk_async.arrow.rows import LOAD_BYTES, width_of
from icechunk_async.arrow.table import (
    check_type,
    dimension_values,
    path_of,
    table_shape,
    to_arrow,
    values_of,
)
from icechunk_async.engine.versions.feed import changes_in_box
from icechunk_async.errors import (
    InvalidInputError,
    NodeNotFoundError,
    StreamSchemaChangedError,
)
from icechunk_async.spark.read.chunks import (
    LOADED,
    chunk_bytes,
    chunk_shape,
    loading,
    nodes_of,
    rows_of,
)
from icechunk_async.spark.read.opened import arrays_of, open_group
from icechunk_async.spark.read.reader import IcechunkReader, Part, grid_of
from icechunk_async.spark.read.schemas import arrow_schema
from icechunk_async.spark.stream.commits import snapshots_of
from icechunk_async.versions import ChunkChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt
    import xarray
    from pyspark.sql.types import StructType

    from icechunk_async.arrow.boxes import Box, Grid, Window
    from icechunk_async.arrow.table import Column, TableShape
    from icechunk_async.engine.tree.listing import ChunkBatch
    from icechunk_async.format.snapshot import Node
    from icechunk_async.repository import Repository
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.stream.commits import Commit
    from icechunk_async.versions import ChunkChanges

    type Masks = list[npt.NDArray[np.bool_]]
    type Rows = tuple[ChunkBatch, npt.NDArray[np.int64]]
    type Touched = Mapping[str, npt.NDArray[np.uint32]]

__all__ = [
    "APPENDED",
    "DELETED",
    "MIXED",
    "UPDATED",
    "ChangePart",
    "ChunksState",
    "TableState",
    "changed_chunks",
    "changed_rows",
    "chunk_parts",
    "row_parts",
    "schema_changed",
]


APPENDED: Final = "appended"
UPDATED: Final = "updated"
DELETED: Final = "deleted"
MIXED: Final = ""
"""The task finds out which chunks were appended, updated or deleted."""


class ChangePart(InputPartition):
    """The change of one commit in boxes of a table's cells, or of an array's chunk grid."""

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
        """Keep plain data.

        Args:
            commit: the commit.
            kind: its change, one for all boxes. Deleted rows are read from the parent, updated
                ones from both snapshots.
            boxes: disjoint boxes.
            chunks: chunk shape of the table's grid.
            array: with the layout `chunks`, the name of the array.
            kept: along each dimension the indices whose rows exist before and after, if that
                would make too many boxes.
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
"""Attributes that change how stored values are shown."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A table in one snapshot.

    Attributes:
        options: the request, pinned to the snapshot.
        dataset: the group.
        shape: its dimensions and columns.
        columns: the columns to return; with any schema, those that there are.
        nodes: the nodes of its arrays, by name.
        any_schema: whether other states of the table may have other columns.
    """

    options: ReadOptions
    dataset: xarray.Dataset
    shape: TableShape
    columns: tuple[Column, ...]
    nodes: Mapping[str, Node]
    any_schema: bool = False

    @classmethod
    def of(
        cls, options: ReadOptions, schema: pa.Schema, *, any_schema: bool = False
    ) -> TableState | None:
        """Return the table in a snapshot, or None if an array for some column is missing.

        With any schema, None is returned if the arrays for all columns are missing.

        Raises:
            StreamSchemaChangedError: a column is of another type than the schema says.
        """
        try:
            dataset = open_group(options)
        except NodeNotFoundError:
            return None
        names = {str(it) for it in dataset.variables}
        dims = {str(it) for it in dataset.sizes}
        wanted = set(schema.names) - dims
        if any_schema and wanted & names:
            given = tuple(it for it in options.arrays or () if it in names) or None
            options = replace(options, arrays=given)
            wanted &= names
        if not names or not wanted | set(options.arrays or ()) <= names:
            return None
        shape = table_shape(dataset, options.arrays, schema.names)
        known = {it.name for it in shape.columns}
        columns = tuple(shape.column(it) for it in schema.names if it in known or not any_schema)
        for column in columns:
            if not any_schema:
                _check_unchanged(column, schema.field(column.name).type, options)
        return cls(options, dataset, shape, columns, nodes_of(options), any_schema)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of cells along each dimension."""
        return tuple(int(self.dataset.sizes[dim]) for dim in self.shape.dims)

    def grid(self) -> Grid:
        """Return the chunk grid of the table."""
        return grid_of(self.dataset, self.shape, self.columns, self.options)

    def chunk_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the chunk shape of an array; None for an irregular grid."""
        variable = self.dataset.variables[name]
        stored: Any = variable.encoding.get("shards") or variable.encoding.get("chunks")
        if any(np.ndim(size) for size in stored or ()):
            return None
        return tuple(map(int, stored or variable.shape))


def _check_unchanged(column: Column, wanted: pa.DataType, options: ReadOptions) -> None:
    try:
        check_type(column, wanted)
    except InvalidInputError as error:
        raise schema_changed(
            f"In snapshot {options.snapshot_id} the column {column.name!r} is of the type "
            f"{column.type}, and this query reads it as {wanted}.",
            options.snapshot_id,
        ) from error


def schema_changed(why: str, snapshot_id: str | None) -> StreamSchemaChangedError:
    """Return the error for a stream whose table has other columns than before."""
    return StreamSchemaChangedError(
        f"{why} No row of that was read. To continue with the columns of now, start the query "
        "again with option('schema-change', 'latest'); to continue with those of before, name "
        "them with schema(...) or the option 'arrays'.",
        snapshot_id=snapshot_id,
    )


def row_parts(
    before: TableState | None,
    after: TableState | None,
    touched: Touched,
    commit: Commit,
    *,
    every_change: bool,
) -> list[ChangePart]:
    """Plan which cells tasks read to find the rows that a commit changed.

    Args:
        before: the table in the commit's parent, or None.
        after: the table in the commit, or None.
        touched: coordinates of chunks that the commit set or deleted, by name of the array.
        commit: the commit.
        every_change: include updated and deleted rows.

    Cost: reads coordinates that the commit touched, and no other array.
    """
    kept = None
    if before is not None and after is not None:
        kept = _kept(before, after, touched, commit)
    # Few boxes can say exactly which rows are kept. Many are replaced by larger ones, and tasks
    # leave out rows by the masks.
    exact = kept if kept is not None and is_many(kept) else None
    parts: list[ChangePart] = []
    if after is not None:
        parts += _parts(after, commit, APPENDED, _others(after, kept), exact)
    if before is not None and every_change:
        parts += _parts(before, commit, DELETED, _others(before, kept), exact)
        if after is not None and kept is not None:
            # Limited the other way than for appended rows: what is covered here too much is left
            # out by `kept`, and nothing may be missing.
            rest = _candidates(before, after, touched, limited(kept, instead=True))
            parts += _parts(after, commit, UPDATED, rest, exact)
    return parts


def _others(state: TableState, kept: Masks | None) -> Iterator[Box]:
    """Return boxes that cover all cells outside of the kept ones, and perhaps some kept ones."""
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


def _kept(before: TableState, after: TableState, touched: Touched, commit: Commit) -> Masks | None:
    """Return masks of indices with unchanged coordinates; None if no row can match.

    With any schema, rows stay at their place where a dimension gets coordinates, or other types.
    """
    if before.shape.dims != after.shape.dims:
        return None
    masks: Masks = []
    for dim, old, new in zip(after.shape.dims, before.lengths, after.lengths, strict=True):
        common = min(old, new)
        columns = before.shape.column(dim), after.shape.column(dim)
        mask = np.ones(common, np.bool_)
        if columns[0].variable != columns[1].variable or columns[0].type != columns[1].type:
            if not after.any_schema:
                raise schema_changed(
                    f"Commit {commit.snapshot_id} gave the dimension {dim!r} other coordinates: "
                    f"{_named(columns[0])} before, {_named(columns[1])} now.",
                    commit.snapshot_id,
                )
        elif columns[0].variable and (dim in touched or _is_rewritten(before, after, dim)):
            values = [
                dimension_values(state.dataset, column, (0, common), state.options)
                for state, column in zip((before, after), columns, strict=True)
            ]
            # A row is its coordinates. Where these differ, the old row is deleted and a new one
            # appended.
            mask = ~_differing(*values)
        masks.append(mask)
    return masks


def _named(column: Column) -> str:
    return f"values of {column.type}" if column.variable else "numbers from 0"


def _candidates(
    before: TableState,
    after: TableState,
    touched: Touched,
    kept: Masks,
) -> list[Box]:
    """Return boxes of kept rows whose values may have changed."""
    dims = after.shape.dims
    limits = inside(kept)
    if not dims:
        return limits  # a table of scalars has one row
    common = tuple(map(len, kept))
    grid = after.grid()
    cells: list[npt.NDArray[np.int64]] = []
    for column in after.columns:
        if column.name in dims and column != before.shape.column(column.name):
            return limits  # only with any schema
        if not column.variable or column.name in dims:
            continue
        sizes = after.chunk_shape(column.name)
        # All its values may differ, though no chunk was set: one such array makes every row a
        # candidate.
        if _is_rewritten(before, after, column.name) or sizes is None:
            return limits
        if column.name not in touched:
            continue
        axes = [dims.index(dim) for dim in after.dataset.variables[column.name].dims]
        if len(axes) == len(dims):
            chunks = touched[column.name]
            cells.append(cells_of_chunks(chunks, sizes, axes, grid.chunks, common))
        else:
            # A chunk of such an array is in many cells of the table. Its values are few, so they
            # are compared here, and tasks read only what they touch.
            box = _differing_box(before, after, column.name, axes, common)
            cells.append(_cells_of_box(box, grid.chunks))
    if not cells:
        return []
    # From chunks to cells: chunk [2, 3) of 4 is the cells [8, 12).
    steps = np.array(grid.chunks, np.int64).reshape(1, -1, 1)
    boxes = boxes_of_cells(np.unique(np.concatenate(cells), axis=0)) * steps
    return list(clipped((tuple(map(tuple, box)) for box in boxes.tolist()), limits))


def _differing_box(
    before: TableState, after: TableState, name: str, axes: list[int], common: tuple[int, ...]
) -> Box:
    """Return the smallest box around all differences of an array with fewer dimensions."""
    at = tuple(slice(0, common[axis]) for axis in axes)
    values = [values_of(state.dataset.variables[name][at]) for state in (before, after)]
    kind = after.shape.column(name).type
    flat = [to_arrow(it.reshape(-1), kind) for it in values]
    mask = _differing(*flat).reshape(values[1].shape)
    box = [(0, length) for length in common]
    places = np.nonzero(mask)
    for axis, found in zip(axes, places, strict=True):
        box[axis] = (int(found.min()), int(found.max()) + 1) if len(found) else (0, 0)
    # A scalar has no axis along which an empty range would say that nothing differs.
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
    """Return whether an array was replaced, or its metadata changes how chunks are decoded."""
    old, new = before.nodes.get(name), after.nodes.get(name)
    if old is None or new is None or old.id != new.id:
        return True
    return old.user_data != new.user_data and _document(old) != _document(new)


def _document(node: Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(node.user_data)
    attributes: dict[str, Any] = document.get("attributes") or {}
    shown = {name: value for name, value in attributes.items() if name in _DECODING}
    # A resize moves no value. Whether rows came or went is seen by the lengths.
    return {**document, "shape": None, "attributes": shown}


def _differing(old: pa.Array[Any], new: pa.Array[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of differing values; NaN equals NaN, and null equals null."""
    # Arrow's comparison with null is null, and NaN differs from itself: both would be changes in
    # every commit.
    same = pc.fill_null(pc.equal(old, new), False)  # noqa: FBT003 -- Arrow's
    if pa.types.is_floating(new.type):
        both = pc.and_(pc.is_nan(old), pc.is_nan(new))
        same = pc.or_(same, pc.fill_null(both, False))  # noqa: FBT003
    same = pc.or_(same, pc.and_(pc.is_null(old), pc.is_null(new)))
    return ~same.to_numpy(zero_copy_only=False).astype(np.bool_)


def changed_rows(
    part: ChangePart, options: ReadOptions, schema: StructType, *, any_schema: bool
) -> Iterator[pa.RecordBatch]:
    """Return the changed rows of a part; called in a task.

    Columns that a snapshot does not have are null in its rows, with any schema.

    Memory: about 32 MiB of values at a time, twice that for rows that are compared.
    """
    commit = part.commit
    shown = commit.parent_id if part.kind == DELETED else commit.snapshot_id
    assert shown is not None  # only a parent can have deleted rows
    make = _AnyReader if any_schema else partial(IcechunkReader, on_values=False)
    new = make(options.pinned(shown), schema)
    # Boxes are exact, so that rows need no mask and batches are those of a plain read.
    if part.kind != UPDATED and part.kept is None:
        yield from new.read(Part(part.boxes))
        return
    old = None
    if part.kind == UPDATED:
        assert commit.parent_id is not None  # only rows of a parent can be updated
        old = make(options.pinned(commit.parent_id), schema)
    width = max(1, sum(width_of(it) for it in new.schema.types))
    for box in part.boxes:
        for piece in cut(box, part.chunks, max(1, LOAD_BYTES // width)):
            rows = _piece(new, piece)
            mask = np.ones(rows.num_rows, np.bool_)
            if old is not None:
                mask = _any_differing(_piece(old, piece), rows)
            if part.kept is not None:
                kept = kept_cells(part.kept, piece)
                # Of rows that both snapshots have, only updates are told; appended and deleted rows
                # are all others.
                mask &= kept if part.kind == UPDATED else ~kept
            yield from rows.filter(pa.array(mask)).to_batches(options.batch_rows)


class _AnyReader:
    """A reader of the columns of a schema that a snapshot has; others are null."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Find the columns."""
        self.schema = arrow_schema(schema)
        state = TableState.of(options, self.schema, any_schema=True)
        assert state is not None  # its rows were planned
        types = {it.name: _readable(it, self.schema) for it in state.columns}
        own = from_arrow_schema(pa.schema(list(types.items())), prefer_timestamp_ntz=True)
        self._reader = IcechunkReader(state.options, own, on_values=False)

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition."""
        for batch in self._reader.read(part):
            columns = [_column_of(batch, it.name, it.type) for it in self.schema]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _readable(column: Column, schema: pa.Schema) -> pa.DataType:
    wanted = schema.field(column.name).type
    try:
        check_type(column, wanted)
    except InvalidInputError:
        return column.type
    return wanted


def _column_of(batch: pa.RecordBatch, name: str, wanted: pa.DataType) -> pa.Array[Any]:
    """Return a column as another type, rounded if that is of floating point, null if missing."""
    if name not in batch.schema.names:
        return pa.repeat(pa.scalar(None, wanted), batch.num_rows)
    column = batch.column(name)
    try:
        return column.cast(wanted, safe=not pa.types.is_floating(wanted))
    except pa.ArrowInvalid as error:
        raise InvalidInputError(
            f"The column {name!r} was {column.type} and is {wanted}, which cannot hold a value of "
            f"an earlier commit: {error}. Begin a new query with a new checkpoint, after the "
            "commit that changed it."
        ) from error


def _piece(reader: IcechunkReader | _AnyReader, piece: Box) -> pa.Table:
    return pa.Table.from_batches(reader.read(Part((piece,))), reader.schema)


def _any_differing(old: pa.Table, new: pa.Table) -> npt.NDArray[np.bool_]:
    mask = np.zeros(new.num_rows, np.bool_)
    for name in new.schema.names:
        mask |= _differing(*(it.column(name).combine_chunks() for it in (old, new)))
    return mask


class ChunksState:
    """The arrays of a group in one snapshot."""

    def __init__(self, options: ReadOptions) -> None:
        """Look up the arrays; a missing group has none."""
        self.options = options
        self.nodes: Mapping[str, Node] = {}
        self.arrays: Mapping[str, Any] = {}
        try:
            self.arrays = arrays_of(options)
        except NodeNotFoundError:
            return
        self.nodes = nodes_of(options)

    def grid(self, name: str) -> tuple[int, ...]:
        """Return the number of chunks of an array along each axis."""
        data = self.nodes[name].array
        assert data is not None  # nodes_of returns arrays only
        return data.grid


def chunk_parts(
    before: ChunksState | None,
    after: ChunksState,
    touched: Touched,
    commit: Commit,
    *,
    schema: pa.Schema,
    every_change: bool,
) -> list[ChangePart]:
    """Plan which chunks tasks look up to find those that a commit changed.

    Args:
        before: the arrays in the commit's parent; None if it has no parent.
        after: the arrays in the commit.
        touched: coordinates of chunks that the commit set or deleted, by name of the array.
        commit: the commit.
        schema: the columns to return.
        every_change: include deleted chunks.
    """
    options = after.options
    found = options.arrays or sorted({*(before.arrays if before else ()), *after.arrays})
    loads = not LOADED.isdisjoint(schema.names)
    parts: list[ChangePart] = []
    for name in found:
        for kind, boxes in _changed_boxes(before, after, name, touched.get(name)):
            if kind == DELETED and not every_change:
                continue
            state = before if kind == DELETED and before is not None else after
            array = state.arrays[name]
            most = max(1, options.partition_bytes // chunk_bytes(array)) if loads else 1 << 20
            pieces = (part for box in boxes for part in cut(box, (1,) * len(box), most))
            groups = grouped(pieces, most)
            parts += [ChangePart(commit, kind, group, array=name) for group in groups]
    return parts


def _changed_boxes(
    before: ChunksState | None,
    after: ChunksState,
    name: str,
    touched: npt.NDArray[np.uint32] | None,
) -> Iterator[tuple[str, list[Box]]]:
    """Return disjoint boxes of an array's chunk grid that may have changed, by kind."""
    old = before.grid(name) if before is not None and name in before.arrays else None
    new = after.grid(name) if name in after.arrays else None
    if before is None or old is None or new is None or len(old) != len(new):
        if old is not None:
            yield DELETED, [tuple((0, count) for count in old)]
        if new is not None:
            yield APPENDED, [tuple((0, count) for count in new)]
        return
    if not _is_same_array(before, after, name):
        # Another node, or chunks of another shape: references of one say nothing of the other, and
        # each chunk is compared.
        yield MIXED, [tuple((0, max(pair)) for pair in zip(old, new, strict=True))]
        return
    kept = [np.ones(min(pair), np.bool_) for pair in zip(old, new, strict=True)]
    yield DELETED, list(outside(kept, old))
    if touched is not None and touched.shape[1] == len(new):
        # The log may name chunks beyond the end, written before the array was made smaller in the
        # same commit.
        cells = touched[(touched < np.array(new, np.int64)).all(axis=1)]
        boxes = boxes_of_cells(cells).tolist()
        yield MIXED, [tuple((start, stop) for start, stop in box) for box in boxes]


def _is_same_array(before: ChunksState, after: ChunksState, name: str) -> bool:
    """Return whether an array is the same node with the same chunk shape."""
    return before.nodes[name].id == after.nodes[name].id and chunk_shape(
        before.arrays[name]
    ) == chunk_shape(after.arrays[name])


def changed_chunks(
    part: ChangePart, options: ReadOptions, schema: pa.Schema, *, every_change: bool
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Return the changed chunks of a part by kind of change; called in a task.

    Memory: the references of the manifests that hold a box, and about 32 MiB of chunks.
    """
    commit = part.commit
    new = options.pinned(commit.snapshot_id)
    old = None if commit.parent_id is None else options.pinned(commit.parent_id)
    arrays: dict[str, Any] = {}
    path = path_of(options, part.array)
    for box in part.boxes:
        found = options.repository.ask(partial(_changes_in, part, path, box))
        if found is None:
            continue
        for kind, options_, (batch, places) in _by_kind(found, old, new):
            if kind != APPENDED and not every_change:
                continue
            at = options_.snapshot_id or ""
            if at not in arrays:
                arrays[at] = arrays_of(options_)[part.array]
            loads, most = loading(arrays[at], schema)
            for first in range(0, len(places), most):
                rows = places[first : first + most]
                yield kind, rows_of(options_, part.array, arrays[at], (batch, rows), loads)


async def _changes_in(
    part: ChangePart, path: str, box: Box, repository: Repository
) -> ChunkChanges | None:
    """Return how the chunks of an array in a box of its grid changed."""
    before, after = await snapshots_of(repository, part.commit)
    return await changes_in_box(repository.engine, before, after, path, box)


def _by_kind(
    found: ChunkChanges, old: ReadOptions | None, new: ReadOptions
) -> Iterator[tuple[str, ReadOptions, Rows]]:
    """Return chunks that are new, replaced and gone, where there are any."""
    # `after` has a row for each change but removals, and `before` for each but additions: places
    # are counted among those.
    now = found.kinds[found.kinds != ChunkChange.REMOVED]
    for kind, change in ((APPENDED, ChunkChange.ADDED), (UPDATED, ChunkChange.CHANGED)):
        places = np.flatnonzero(now == change)
        if len(places):
            yield kind, new, (found.after, places)
    gone = np.flatnonzero(found.kinds[found.kinds != ChunkChange.ADDED] == ChunkChange.REMOVED)
    if len(gone):
        assert found.before is not None  # it was asked for
        assert old is not None  # without it, all is new
        yield DELETED, old, (found.before, gone)

"""The layout `tiledb`: cells of a TileDB array as rows, planned in the driver, read in tasks.

The driver lists the array, goes down the trees of boxes, and sends each task the footers of the
fragments that it reads: tasks list nothing, and all of a data frame sees one state of the array.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from icechunk_async._runtime.blocking.portal import blocking, run
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.boxes import clipped, cut, grouped, num_chunks, num_rows
from icechunk_async.arrow.rows import LOAD_BYTES, TEXT_BYTES
from icechunk_async.arrow.table import Column, check_type
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read.pushdown import fulfilled, of_filter
from icechunk_async.spark.read.reader import PlannedRead, report
from icechunk_async.spark.read.schemas import arrow_schema, as_asked
from icechunk_async.spark.read.tiledb_columns import (
    column_type,
    expression_of,
    span_of,
    to_column,
)
from icechunk_async.spark.requests import Budget
from icechunk_async.sync.errors import translated
from icechunk_async.tiledb.arrays.array import (
    CONCURRENT_REQUESTS,
    TileDBArray,
    open_folder,
    window_of,
)
from icechunk_async.tiledb.arrays.arrow import arrow_type, to_arrow
from icechunk_async.tiledb.arrays.cells import Cells
from icechunk_async.tiledb.arrays.dense import overlap
from icechunk_async.tiledb.arrays.portable import PortableArray, PortableFragment
from icechunk_async.zarr.queries.predicates import about, columns_of, combined, leaves

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt
    from pyspark.accumulators import Accumulator
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from icechunk_async.arrow.boxes import Box
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.tiledb.arrays.cells import Field
    from icechunk_async.tiledb.arrays.dense import DenseGrid
    from icechunk_async.tiledb.arrays.folder import Folder
    from icechunk_async.tiledb.arrays.sparse import ScanPart, SparseReader
    from icechunk_async.zarr.queries.predicates import Predicate, Where

__all__ = ["TileDBReader", "batch_reader", "pinned", "spark_schema"]

# Less than a partition: cells of several fragments are in memory together until they are merged.
_PART_BYTES: Final = 64 << 20
"""Bytes of the cells of a sparse array that a task holds in memory at a time, roughly."""


def _folder(options: ReadOptions) -> AbstractContextManager[Folder]:
    """Open the folder of the array, with the share of requests that this task has."""
    budget = Budget(CONCURRENT_REQUESTS, job_requests=options.max_requests or 0)
    share = budget.of_task().max_concurrent_requests
    return blocking(
        open_folder(options.url, options.storage, requests=share or CONCURRENT_REQUESTS)
    )


def pinned(options: ReadOptions) -> PortableArray:
    """Return the state of the array at the time that the options name, or now.

    Raises:
        IcechunkError: as `open_array`.
    """
    window = window_of(None, options.as_of)

    async def load(folder: Folder) -> PortableArray:
        with translated():
            return await PortableArray.of(await TileDBArray.load(folder, window))

    with translated(), _folder(options) as folder:
        return run(load(folder))


def _fields(array: PortableArray) -> pa.Schema:
    """Return the fields of an array, dimensions first, in Arrow's types."""
    known: list[Field] = [*array.schema.dimensions, *array.schema.attributes]
    return pa.schema([(it.name, arrow_type(it, array.enumerations.get(it.name))) for it in known])


def spark_schema(options: ReadOptions, array: PortableArray) -> StructType:
    """Return the columns that a query gets if it gives no schema: dimensions, then attributes.

    Raises:
        InvalidInputError: the option `arrays` names an attribute that does not exist.
    """
    fields = _fields(array)
    names = [it.name for it in array.schema.dimensions]
    names += (
        [it.name for it in array.schema.attributes]
        if options.arrays is None
        else [it for it in options.arrays if it not in names]
    )
    _check_names(names, fields)
    columns = pa.schema([(name, column_type(fields.field(name).type)) for name in names])
    return from_arrow_schema(columns, prefer_timestamp_ntz=True)


def _check_names(names: Iterable[str], fields: pa.Schema) -> None:
    missing = [it for it in names if it not in fields.names]
    if missing:
        raise InvalidInputError(
            f"The TileDB array has no dimension or attribute {missing[0]!r}. It has "
            f"{', '.join(map(repr, fields.names))}."
        )


def batch_reader(
    options: ReadOptions,
    schema: StructType | pa.Schema,
    array: PortableArray | None,
    planned: Accumulator[list[PlannedRead]] | None,
) -> TileDBReader:
    """Return the reader of one query.

    Args:
        options: what to read.
        schema: the columns.
        array: the array as its schema was taken, if it was.
        planned: receives the planned read.
    """
    kind = _PushingReader if options.push_filters else TileDBReader
    return kind(options, schema, pinned(options) if array is None else array, planned)


class TilePart(InputPartition):
    """One task: fragments, and parts of a scan or boxes of cells. Plain data."""

    def __init__(
        self,
        fragments: tuple[PortableFragment, ...],
        parts: tuple[ScanPart, ...] = (),
        boxes: tuple[Box, ...] = (),
    ) -> None:
        """Keep the fragments; parts name them by their place among these."""
        super().__init__(None)
        self.fragments = fragments
        self.parts = parts
        self.boxes = boxes


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: list[TilePart]
    tiles: int
    all_tiles: int
    rows: int
    all_rows: int


class TileDBReader(DataSourceReader):
    """The reader of one query; it pickles as plain data, with the options of the storage."""

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType | pa.Schema,
        array: PortableArray,
        planned: Accumulator[list[PlannedRead]] | None = None,
    ) -> None:
        """Keep the request and the state of the array; planned reads are added to `planned`."""
        self.options = options
        self.schema = arrow_schema(schema)
        self._asked = schema
        self.array = array
        self.predicates: tuple[Predicate, ...] = ()
        self._planned = planned

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions.

        Cost: a request for each footer, unless footers were consolidated. With conditions on a
        sparse array, one for each tree of boxes that is not in the same request, and for the
        statistics of each attribute that is compared.
        """
        fields = self._checked_fields()
        with translated(), _folder(self.options) as folder:
            plan = run(self._plan(folder, fields))
        conditions = columns_of(*self.options.where, *self.predicates)
        report(
            PlannedRead(
                snapshot_id=None,
                group=self.options.url,
                conditions=tuple(sorted(conditions)),
                chunks=plan.tiles,
                all_chunks=plan.all_tiles,
                rows=plan.rows,
                all_rows=plan.all_rows,
                partitions=len(plan.parts),
            ),
            self._planned,
        )
        return list(plan.parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition in batches, loading a few tiles at a time."""
        if not isinstance(partition, TilePart):
            return iter(())  # PySpark reads one empty partition if none was planned
        return as_asked(self._rows(partition), self._asked)

    def _rows(self, part: TilePart) -> Generator[pa.RecordBatch]:
        names = self._read_names()
        with translated(), _folder(self.options) as folder:
            array = run(self.array.open_with(folder, part.fragments))
            if array.schema.is_sparse:
                scan = self._sparse(array).scan(names)
                for it in part.parts:
                    yield from self._shown(run(scan.read(it)))
                return
            grid = array.grid()
            budget = max(1, LOAD_BYTES // self._width(names))
            for box in part.boxes:
                for piece in cut(box, grid.shape, budget):
                    yield from self._shown(run(self._dense(array, grid, piece, names)))

    def _checked_fields(self) -> pa.Schema:
        """Return the fields of the array, once those that are asked for exist in their types."""
        fields = _fields(self.array)
        _check_names(self.schema.names, fields)
        _check_names(columns_of(*self.options.where), fields)
        for wanted in self.schema:
            own = column_type(fields.field(wanted.name).type)
            check_type(Column(wanted.name, own, ()), wanted.type)
        return fields

    def _conditions(self) -> list[Where]:
        # Filters that Spark pushed may be on other columns than the array has; those of `where`
        # were checked.
        known = self.array.schema.fields.keys()
        return [it for it in (*self.options.where, *self.predicates) if known >= {*columns_of(it)}]

    def _read_names(self) -> list[str]:
        """Return the fields to read: the columns, and those that conditions compare."""
        compared = columns_of(*self._conditions())
        return list(dict.fromkeys((*self.schema.names, *compared)))

    def _width(self, names: Sequence[str]) -> int:
        found = 0
        for name in names:
            it = self.array.schema.fields[name]
            # Lengths of variable cells are known only to their tiles, and reading these to plan
            # would cost what the plan saves.
            found += TEXT_BYTES if it.is_variable else it.cell_bytes
        return max(1, found)

    async def _plan(self, folder: Folder, fields: pa.Schema) -> _Plan:
        array = await self.array.open(folder)
        if not array.schema.is_sparse:
            return self._plan_dense(array, fields)
        conditions, nan_as_null = self._conditions(), self.options.nan_as_null
        expression = expression_of(conditions, fields, nan_as_null=nan_as_null)
        names = self._read_names()
        scan = self._sparse(array).scan(names, expression)
        most = min(_PART_BYTES, self.options.partition_bytes)
        parts = await scan.plan(part_bytes=most)
        max_cells = max(1, self.options.partition_bytes // self._width(names))
        tiles = {(number, tile) for it in parts for number, held in it.tiles for tile in held}
        return _Plan(
            [_packed(array, it) for it in _groups(parts, max_cells)],
            len(tiles),
            sum(it.tile_count for it in array.fragments),
            sum(it.cells for it in parts),
            sum(it.cells_of(tile) for it in array.fragments for tile in range(it.tile_count)),
        )

    def _plan_dense(self, array: TileDBArray, fields: pa.Schema) -> _Plan:
        grid = array.grid()
        whole = _written(grid)
        if whole is None:
            return _Plan([], 0, 0, 0, 0)
        wanted: list[tuple[int, int]] = []
        conditions = self._conditions()
        for it, origin, span in zip(array.schema.dimensions, grid.origin, whole, strict=True):
            own = [part for each in conditions if (part := about(each, it.name)) is not None]
            low, high = span_of(own, fields.field(it.name).type)
            # Conditions name coordinates, boxes count cells from the first of the domain, and the
            # end is not included: coordinate 7 to 9 of a domain from 5 is [2, 5).
            first = span[0] if low is None else max(span[0], low - origin)
            end = span[1] if high is None else min(span[1], high - origin + 1)
            wanted.append((first, end))
        names = self._read_names()
        max_rows = max(1, self.options.partition_bytes // self._width(names))
        boxes = clipped([tuple(wanted)], [whole])
        pieces = [piece for it in boxes for piece in cut(it, grid.shape, max_rows)]
        parts: list[TilePart] = []
        # A task gets only the footers of fragments that it reads: with all of them the plan would
        # grow with their square.
        for group in grouped(pieces, max_rows):
            near = sorted({number for box in group for number in grid.fragments_in(box)})
            fragments = tuple(PortableFragment.of(array, number) for number in near)
            parts.append(TilePart(fragments, boxes=group))
        return _Plan(
            parts,
            num_chunks(pieces, grid.shape),
            num_chunks([whole], grid.shape),
            sum(map(num_rows, pieces)),
            num_rows(whole),
        )

    def _sparse(self, array: TileDBArray) -> SparseReader:
        # Imported late: tasks on dense arrays do not need Arrow's datasets.
        from icechunk_async.tiledb.arrays.sparse import SparseReader  # noqa: PLC0415

        return SparseReader(
            array.schema, array.fragments, array.window, array.deletions, self.array.enumerations
        )

    async def _dense(
        self, array: TileDBArray, grid: DenseGrid, box: Box, names: Sequence[str]
    ) -> pa.RecordBatch:
        """Return the cells of a box, in row-major order, with their coordinates."""
        attributes = {it.name for it in array.schema.attributes}
        cells = await array.read_cells(box, [it for it in names if it in attributes])
        for axis, dimension in enumerate(array.schema.dimensions):
            if dimension.name in names:
                cells[dimension.name] = Cells(dimension, _coordinates(grid, box, axis)[:, None])
        enumerations = self.array.enumerations
        columns = [to_arrow(cells[name], enumerations.get(name)) for name in names]
        return pa.RecordBatch.from_arrays(columns, names=list(names))

    def _shown(self, cells: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Return the rows of cells as Spark sees them, without those that conditions leave out."""
        if not cells.num_rows:
            return
        nan_as_null = self.options.nan_as_null
        columns: dict[str, pa.Array[Any]] = {}
        for name in cells.schema.names:
            values = cells.column(name)
            own = column_type(values.type)
            wanted = self.schema.field(name).type if name in self.schema.names else own
            # First what the field is to Spark, then what the query's schema asks for.
            columns[name] = to_column(values, own, nan_as_null=nan_as_null).cast(wanted)
        kept = np.ones(cells.num_rows, bool)
        given = {id(it) for it in leaves(*self.options.where)}

        def mask(it: Predicate) -> npt.NDArray[np.bool_]:
            return fulfilled(columns[it.column], it, exact=id(it) in given)

        for condition in self._conditions():
            kept &= combined(condition, mask)
        shown = [columns[name] for name in self.schema.names]
        batch = pa.RecordBatch.from_arrays(shown, schema=self.schema)
        if not kept.all():
            batch = batch.filter(pa.array(kept))
        for start in range(0, batch.num_rows, self.options.batch_rows):
            yield batch.slice(start, self.options.batch_rows)


class _PushingReader(TileDBReader):
    """A reader that also prunes by the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Keep the filters that are understood. Spark still applies all of them."""
        found = (of_filter(it) for it in filters)
        self.predicates = tuple(it for it in found if it is not None)
        return filters


def _written(grid: DenseGrid) -> Box | None:
    """Return the least box around all cells that were written; None if there is no cell."""
    if not grid.boxes:
        return None
    least = tuple(
        (min(low for low, _ in spans), max(high for _, high in spans))
        for spans in zip(*grid.boxes, strict=True)
    )
    return overlap(least, grid.domain)


def _coordinates(grid: DenseGrid, box: Box, axis: int) -> Any:
    """Return the coordinate of each cell of a box along a dimension, in row-major order."""
    low, high = box[axis]
    dtype = grid.schema.dimensions[axis].dtype
    values = (np.arange(low, high) + grid.origin[axis]).astype(dtype)
    shape = [stop - start for start, stop in box]
    placed = values.reshape([-1 if at == axis else 1 for at in range(len(box))])
    # For a box of 2 by 3, axis 0 gives a a a b b b, and axis 1 gives x y z x y z.
    return np.broadcast_to(placed, shape).reshape(-1)


def _groups(parts: Iterable[ScanPart], max_cells: int) -> Iterator[tuple[ScanPart, ...]]:
    """Group parts in order, each group with at most `max_cells` cells, or one part."""
    group: list[ScanPart] = []
    cells = 0
    for it in parts:
        if group and cells + it.cells > max_cells:
            yield tuple(group)
            group, cells = [], 0
        group.append(it)
        cells += it.cells
    if group:
        yield tuple(group)


def _packed(array: TileDBArray, parts: tuple[ScanPart, ...]) -> TilePart:
    """Return a task, with the fragments that its parts read."""
    numbers = sorted({number for it in parts for number, _ in it.tiles})
    # Parts name fragments by their place among those of the task, which has no others.
    places = {number: place for place, number in enumerate(numbers)}
    moved = tuple(
        replace(it, tiles=tuple((places[number], held) for number, held in it.tiles))
        for it in parts
    )
    return TilePart(tuple(PortableFragment.of(array, it) for it in numbers), moved)

"""Batch queries: partitions planned once, and read as Arrow batches in tasks."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow import rows
from icechunk_async.arrow.boxes import num_chunks, num_rows
from icechunk_async.arrow.guarantees import chunk_bounds, mask_of
from icechunk_async.arrow.table import (
    check_type,
    dimension_values,
    table_shape,
)
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read import chunks as chunk_rows
from icechunk_async.spark.read.opened import open_group
from icechunk_async.spark.read.pushdown import fulfilled, of_filter, possible
from icechunk_async.spark.read.schemas import arrow_schema, as_asked
from icechunk_async.spark.tasks import few
from icechunk_async.tables import schema_of, table_batches
from icechunk_async.zarr.queries.predicates import (
    about,
    columns_of,
    combined,
    leaves,
    split_by_column,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

    import numpy.typing as npt
    import xarray
    from pyspark.accumulators import Accumulator
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from icechunk_async.arrow.boxes import Box, Grid, Span
    from icechunk_async.arrow.table import Column, TableShape
    from icechunk_async.repository import Repository
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.zarr.queries.predicates import Predicate, Where

    type Mask = npt.NDArray[np.bool_]

__all__ = [
    "IcechunkReader",
    "Part",
    "PlannedRead",
    "PushingReader",
    "Reading",
    "grid_of",
    "report",
]


_MOST_CHUNKS: Final = 5_000_000
"""Chunks in a grid that is looked at chunk by chunk."""
_log = logging.getLogger("icechunk_async.spark.read.reader")
_WORKERS_ARE_HEARD: Final = "PYSPARK_SPARK_SESSION_UUID"
"""Set by PySpark in workers whose logs it keeps (`spark.sql.pyspark.worker.logging.enabled`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """The part of a group's table that one query reads, or of a TileDB array."""

    snapshot_id: str | None
    """None with the layout `tiledb`."""
    group: str
    """The group as the option names it; empty for the root. The URL of a TileDB array."""
    conditions: tuple[str, ...]
    """Columns with conditions, from the option `where` and from filters pushed down."""
    chunks: int
    """Chunks read of each array, counted on the table's grid; tiles of a TileDB array."""
    all_chunks: int
    rows: int
    """Rows returned to Spark, which then applies its filters."""
    all_rows: int
    partitions: int

    def __str__(self) -> str:
        """Describe the read in one sentence."""
        if self.snapshot_id is None:
            where, unit = f"TileDB array {self.group!r}", "tiles"
        else:
            where = f"Snapshot {self.snapshot_id}, group {self.group!r}"
            unit = "chunks of the grid"
        return (
            f"{where}: {self.chunks} of {self.all_chunks} {unit} are read, "
            f"{self.rows} of {self.all_rows} rows, in {self.partitions} partitions; conditions on "
            f"{', '.join(self.conditions) or 'nothing'}."
        )


def report(read: PlannedRead, gathered: Accumulator[list[PlannedRead]] | None) -> None:
    """Log a planned read, and send it to the driver if that gathers them."""
    if _WORKERS_ARE_HEARD in os.environ and _log.level == logging.NOTSET:
        # The user asked PySpark for these logs, and the root logger would drop them.
        _log.setLevel(logging.INFO)
    _log.info("%s", read)
    if gathered is not None:
        gathered.add([read])


class Part(InputPartition):
    """One task: boxes of a table's cells, or of an array's chunk grid. Plain data."""

    def __init__(self, boxes: tuple[Box, ...], array: str = "", of: int = 0) -> None:
        """Keep the boxes, with the layout `chunks` the array, and the number of parts if known."""
        super().__init__(None)
        self.boxes = boxes
        self.array = array
        self.of = of


@dataclass(frozen=True, slots=True)
class Reading:
    """A request whose snapshot has been resolved."""

    options: ReadOptions

    @classmethod
    def begin(cls, options: ReadOptions) -> Reading:
        """Resolve the snapshot that the options name.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.
        """
        if options.table in {"refs", "ops", "snapshots"}:
            return cls(options)  # these describe the repository itself, not one snapshot

        async def resolve(repository: Repository) -> str:
            branch = options.branch
            # A time needs a branch whose tip it asks for. Without either the session takes the
            # default.
            if options.as_of is not None and branch is None:
                branch = "main"
            session = await repository.readonly_session(
                branch,
                tag=options.tag,
                snapshot_id=options.snapshot_id,
                ref=options.ref,
                as_of=options.as_of,
            )
            return str(session.snapshot_id)

        # Once, before Spark asks for columns: schema, plan and each task read this snapshot.
        return cls(options.pinned(options.repository.ask(resolve)).with_budget())

    def spark_schema(self) -> StructType:
        """Return the columns that a query gets if it gives no schema."""
        if self.options.table is not None:
            schema = schema_of(self.options.table)
        elif self.options.layout == "chunks":
            schema = chunk_rows.DEFAULT
        else:
            shape = table_shape(open_group(self.options), self.options.arrays)
            schema = pa.schema([(column.name, column.type) for column in shape.columns])
        return from_arrow_schema(schema, prefer_timestamp_ntz=True)


class IcechunkReader(DataSourceReader):
    """The reader of one query; it pickles as plain data, with the options of the storage."""

    def __init__(
        self,
        options: ReadOptions,
        schema: StructType | pa.Schema,
        planned: Accumulator[list[PlannedRead]] | None = None,
        *,
        on_values: bool = True,
    ) -> None:
        """Pin the snapshot; planned reads are also added to `planned`.

        ``on_values`` allows conditions of the option `where` on others than dimensions, by which
        rows of a part are left out.
        """
        self.options = Reading.begin(options).options
        self.schema = arrow_schema(schema)
        self._asked = schema
        self.predicates: tuple[Predicate, ...] = ()
        self._planned = planned
        self._on_values = on_values

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions.

        Raises:
            InvalidInputError: there would be more than a million.

        Cost: reads coordinates with conditions, and no other array; statistics of chunks and the
        manifests of arrays with conditions.
        """
        if self.options.table is not None:
            return [Part((), of=1)]
        if self.options.layout == "chunks":
            found = list(chunk_rows.parts(self.options, self.schema))
            return [Part(boxes, array, len(found)) for array, boxes in found]
        plan = self._plan()
        for column in map(plan.shape.column, self.schema.names):
            check_type(column, self.schema.field(column.name).type)
        kept = self._by_statistics(plan)
        most = self.options.partition_bytes
        # Three ways, by what is known: a mask over single chunks; masks along dimensions, which
        # leave boxes; nothing, where the number of parts follows from the shape and is refused
        # beforehand.
        if kept is not None:
            parts = few(plan.parts_of_chunks(kept, most))
        elif self.options.where or self.predicates:
            parts = few(plan.parts(most))
        else:
            parts = few(plan.parts(most), plan.least_parts(most))
        self._report(plan.grid, parts)
        return [Part(boxes, of=len(parts)) for boxes in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition in batches, loading a few chunks at a time."""
        if not isinstance(partition, Part):
            return iter(())  # PySpark reads one empty partition if none was planned
        # Spark pickles the reader before it plans, when the number is not known.
        self.options = self.options.among(partition.of)
        if self.options.table is not None:
            found = _shown(table_batches_of(self.options), self.schema)
        elif self.options.layout == "chunks":
            part = partition.array, partition.boxes
            found = _shown(chunk_rows.read(self.options, *part, self.schema), self.schema)
        else:
            found = self._rows(partition.boxes)
        return as_asked(found, self._asked)

    def _rows(self, boxes: tuple[Box, ...]) -> Iterator[pa.RecordBatch]:
        plan = self._plan()
        on_values = self._on_rows(plan.shape)
        for batch in plan.rows(boxes):
            if not on_values:
                yield batch
                continue
            # Here, and not by Spark: the option is no filter of the query, so that nobody applies
            # it again.
            masks = [_kept_rows(batch, it) for it in on_values]
            yield batch.filter(pa.array(np.logical_and.reduce(masks))).select(self.schema.names)

    def _on_rows(self, shape: TableShape) -> list[Where]:
        """Return the conditions of the option that masks along dimensions do not decide."""
        return [it for it in self.options.where if not _is_on_dimension(it, shape)]

    def _plan(self) -> rows.RowPlan:
        """Return the reading of the columns that Spark asked for, and of those with conditions."""
        # Made in each task: nothing open travels with the reader, and a worker mostly has the group
        # open.
        dataset = open_group(self.options)
        named = dict.fromkeys((*self.schema.names, *columns_of(*self.options.where)))
        shape = table_shape(dataset, self.options.arrays, named)
        self._check_conditions(shape)
        schema = self.schema
        on_rows = columns_of(*self._on_rows(shape))
        for name in named:
            if name not in schema.names and (name not in shape.dims or name in on_rows):
                schema = schema.append(pa.field(name, shape.column(name).type))
        grid = grid_of(dataset, shape, map(shape.column, schema.names), self.options)
        keep = partial(self._mask, dataset, shape)
        return rows.RowPlan(dataset, shape, schema, grid, self.options, keep)

    def _check_conditions(self, shape: TableShape) -> None:
        types = {it.name: it.type for it in shape.columns}
        on_rows = self._on_rows(shape)
        if on_rows and not self._on_values:
            raise InvalidInputError(
                f"The option 'where' has a condition on {', '.join(columns_of(on_rows[0]))}, but a "
                f"stream takes only those on the dimensions: {', '.join(shape.dims)}, each on one "
                "of them. Filter the rest in the query."
            )
        for predicate in leaves(*on_rows):
            name = predicate.column
            if name not in types:
                raise InvalidInputError(
                    f"The option 'where' has a condition on {name!r}, which is no column. The "
                    f"table has {', '.join(types)}; other arrays are named by 'arrays'."
                )
            # Before any task runs: whether the literals can be compared.
            fulfilled(pa.array([], types[name]), predicate, exact=True)

    def _by_statistics(self, plan: rows.RowPlan) -> Mask | None:
        """Return which chunks may have rows; None if nothing is known.

        By their statistics, and of conditions on several columns by coordinates, too.
        """
        # Statistics are of values as xarray decodes them. Without decoding, rows have others.
        if not self.options.decode or not plan.shape.dims:
            return None
        columns = list(map(plan.shape.column, plan.schema.names))
        whole = set(rows.whole_columns(plan.shape, columns))
        given = [
            it
            for it in (*self.options.where, *self.predicates)
            if not _is_on_dimension(it, plan.shape)
            and not whole.union(plan.shape.dims).isdisjoint(columns_of(it))
        ]
        if not given:
            return None
        named = whole.intersection(columns_of(*given))
        asked = [
            replace(it, type=plan.schema.field(it.name).type) for it in columns if it.name in named
        ]
        # Coordinates alone would decide, chunk by chunk: beyond some millions, masks of that size
        # cost more than they save.
        if not asked and prod(plan.grid.counts) > _MOST_CHUNKS:
            return None
        chunks, bounds = chunk_bounds(self.options.session(), plan, asked)
        found = {it.column.name: it for it in bounds}

        def kept(where: Where) -> Mask:
            """Return which chunks may have rows that fulfil conditions on one column."""
            (column,) = columns_of(where)
            if column in found:
                return combined(where, lambda it: possible(found[column], it))
            if column in plan.shape.dims:
                axis = plan.shape.dims.index(column)
                return self._in_chunks(plan, axis, where)[chunks[:, axis]]
            return np.ones(len(chunks), bool)

        decides = {*found, *plan.shape.dims}
        parts = [it for it in given if not decides.isdisjoint(columns_of(it))]
        split = [split_by_column(it, lambda _, own: own) for it in parts]
        return mask_of(plan, chunks, [combined(it, kept) for it in split])

    def _in_chunks(self, plan: rows.RowPlan, axis: int, where: Where) -> Mask:
        """Return which chunks along a dimension have an index that fulfils conditions on it."""
        length, size = plan.grid.shape[axis], plan.grid.chunks[axis]
        mask = self._along(plan.dataset, plan.shape, axis, (0, length), where)
        # One entry for each chunk: with chunks of 4 in 10 indices the sums start at 0, 4 and 8.
        return np.logical_or.reduceat(mask, np.arange(0, length, size)) if length else mask

    def _mask(
        self, dataset: xarray.Dataset, shape: TableShape, axis: int, span: Span
    ) -> Mask | None:
        """Return which indices in a range of a dimension may match; None for all."""
        found: Mask | None = None
        for it in (*self.options.where, *self.predicates):
            own = about(it, shape.dims[axis])
            if own is not None:
                mask = self._along(dataset, shape, axis, span, own)
                found = mask if found is None else found & mask
        return found

    def _along(
        self, dataset: xarray.Dataset, shape: TableShape, axis: int, span: Span, own: Where
    ) -> Mask:
        """Return which indices in a range of a dimension fulfil conditions on it."""
        column = shape.column(shape.dims[axis])
        if column.name in self.schema.names:
            column = replace(column, type=self.schema.field(column.name).type)
        values = dimension_values(dataset, column, span, self.options)
        # Filters of Spark that cannot be compared keep all; Spark applies them again.
        given = {id(it) for it in leaves(*self.options.where)}
        return combined(own, lambda it: fulfilled(values, it, exact=id(it) in given))

    def _report(self, grid: Grid, parts: Sequence[tuple[Box, ...]]) -> None:
        boxes = [box for part in parts for box in part]
        whole = tuple((0, length) for length in grid.shape)
        conditions = columns_of(*self.options.where, *self.predicates)
        read = PlannedRead(
            snapshot_id=self.options.snapshot_id,
            group=self.options.group,
            conditions=tuple(sorted(conditions)),
            chunks=num_chunks(boxes, grid.chunks),
            all_chunks=num_chunks([whole], grid.chunks),
            rows=sum(map(num_rows, boxes)),
            all_rows=num_rows(whole),
            partitions=len(parts),
        )
        report(read, self._planned)


def _kept_rows(batch: pa.RecordBatch, where: Where) -> Mask:
    """Return which rows fulfil a condition of the option."""
    return combined(where, lambda it: fulfilled(batch.column(it.column), it, exact=True))


def _is_on_dimension(where: Where, shape: TableShape) -> bool:
    """Return whether conditions are on one dimension, so that a mask along it decides them."""
    columns = columns_of(where)
    return len(columns) == 1 and columns[0] in shape.dims


class PushingReader(IcechunkReader):
    """A reader that also prunes by the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Keep the filters that are understood. Spark still applies all of them."""
        found = (of_filter(it) for it in filters)
        self.predicates = tuple(it for it in found if it is not None)
        # All are returned as not handled. Masks keep whole chunks, or what cannot be compared, so
        # that only Spark's own pass is exact.
        return filters


def grid_of(
    dataset: xarray.Dataset, shape: TableShape, columns: Iterable[Column], options: ReadOptions
) -> Grid:
    """Return the chunk grid of a table, and where manifests begin along its first dimension."""
    wanted = tuple(columns)
    grid = rows.grid_of(dataset, shape, wanted)
    names = rows.whole_columns(shape, wanted)
    if not grid.chunks or not names:
        return grid
    return replace(grid, breaks=chunk_rows.manifest_breaks(options, names, grid.chunks[0]))


def table_batches_of(options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Return a table about the repository in batches."""

    async def begin(repository: Repository) -> AsyncGenerator[pa.RecordBatch]:
        return table_batches(
            repository,
            options.table or "",
            branch=options.branch,
            tag=options.tag,
            snapshot_id=options.snapshot_id,
            ref=options.ref,
            as_of=options.as_of,
            from_snapshot_id=options.from_snapshot_id,
            group=options.group,
        )

    # The generator lives on the loop of the repository; each batch is fetched from this thread, so
    # that the table is never in memory as a whole.
    found = options.repository.ask(begin)
    while (batch := run(_next(found))) is not None:
        yield batch


async def _next(batches: AsyncGenerator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return await anext(batches, None)


def _shown(found: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Return batches reduced to the columns of a schema."""
    for batch in found:
        missing = [name for name in schema.names if name not in batch.schema.names]
        if missing:
            raise InvalidInputError(
                f"There is no column {missing[0]!r}. The table has {', '.join(batch.schema.names)}."
            )
        # Spark stops if types are not exactly those of the schema that it was given.
        columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)

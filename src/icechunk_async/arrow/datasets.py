"""A group of arrays as a dataset of pyarrow, which DuckDB, Polars, DataFusion and others query."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.boxes import num_chunks, num_rows
from icechunk_async.arrow.guarantees import Filtered, axis_mask, chunk_mask, known_values
from icechunk_async.arrow.rows import RowPlan, grid_of
from icechunk_async.arrow.table import (
    ARROW_TYPES,
    dimension_values,
    open_group,
    table_shape,
)
from icechunk_async.datasets.rows import (
    BATCH_ROWS,
    RowDataset,
    RowFragment,
    RowScanner,
    needed_by,
)
from icechunk_async.errors import InvalidInputError
from icechunk_async.sync import Repository, Session
from icechunk_async.sync.errors import translated
from icechunk_async.sync.storage import Storage
from icechunk_async.sync.urls import session_at, with_ref
from icechunk_async.urls import IcechunkURL, is_icechunk_url
from icechunk_async.zarr.queries.expressions import joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt
    import xarray

    from icechunk_async.arrow.boxes import Box, Span
    from icechunk_async.arrow.table import TableShape
    from icechunk_async.datasets.rows import Columns

    type Mask = npt.NDArray[np.bool_]

__all__ = [
    "ArrayDataset",
    "ArrayFragment",
    "ArrayGroup",
    "PlannedRows",
    "dataset",
    "open_repository",
]


def dataset(
    source: str | PathLike[str] | Repository | Session,
    group: str = "",
    *,
    ref: str | None = None,
    arrays: Sequence[str] | None = None,
    decode: bool = True,
    nan_as_null: bool = True,
    fragment_bytes: int = 128 << 20,
    batch_rows: int = BATCH_ROWS,
    storage_options: Mapping[str, Any] | None = None,
) -> ArrayDataset:
    """Return the arrays of a group as a dataset of pyarrow: a row for each cell.

    The dataset is of one snapshot, whatever is committed later. It has the dimensions as columns,
    with their coordinates or else numbers from 0, then coordinates with other dimensions, then the
    arrays. Missing values and NaT are null.

    Args:
        source: the path or URL of a repository, or one that is open, or a read-only session. A URL
            may name a ref and a group as well, see `icechunk_async.urls`.
        group: path of the group, below that of the URL; the root if empty.
        ref: a branch, a tag, the id of a snapshot or its first letters, or steps back: `main~2` is
            two commits before the tip. By default `main`.
        arrays: names of the arrays, which must have the same dimensions; by default those with the
            most dimensions.
        decode: decode CF times, scales, offsets and fill values as xarray does.
        nan_as_null: NaN becomes null, which aggregates of SQL skip.
        fragment_bytes: the size of the rows of a fragment; always whole chunks.
        batch_rows: the most rows of a batch.
        storage_options: for the storage, with a URL.

    Raises:
        NotFoundError: there is no such repository, group or ref.
        InvalidInputError: arguments contradict each other, the session can write, or the arrays
            make no table.

    Cost: opens the repository if it is not, and reads the snapshot; no chunk.
    """
    if batch_rows < 1 or fragment_bytes < 1:
        raise InvalidInputError("batch_rows and fragment_bytes must be positive.")
    if isinstance(arrays, str):
        raise InvalidInputError(f"arrays={arrays!r} is one text. Give a list: arrays=[{arrays!r}].")
    if isinstance(source, PathLike):
        source = fspath(source)
    if isinstance(source, str) and is_icechunk_url(source):
        at = with_ref(IcechunkURL.parse(source), ref, group)
        repository = open_repository(at.location, storage_options)
        if ref is None:
            session = session_at(repository, at)
        else:
            session = repository.readonly_session(ref=ref)
        group = at.group
    else:
        session = _session(source, ref, storage_options)
    shown = ArrayGroup(session, group.strip("/"), decode, nan_as_null, batch_rows)
    chosen = None if arrays is None else tuple(arrays)
    with translated():
        return ArrayDataset(_Table.open(shown, chosen, fragment_bytes))


def _session(
    source: str | Repository | Session, ref: str | None, storage_options: Mapping[str, Any] | None
) -> Session:
    if storage_options and not isinstance(source, str):
        raise InvalidInputError("storage_options go with a URL; what is open has its storage.")
    if isinstance(source, Session):
        if ref is not None:
            raise InvalidInputError(
                f"The session is of snapshot {source.snapshot_id} already. Leave ref out, or give "
                "the repository."
            )
        if not source.read_only:
            raise InvalidInputError(
                "The session can write, and a dataset is of one snapshot. Commit, and give a "
                "read-only session."
            )
        return source
    repository = open_repository(source, storage_options)
    return repository.readonly_session(ref="main" if ref is None else ref)


def open_repository(
    source: str | PathLike[str] | Repository, storage_options: Mapping[str, Any] | None = None
) -> Repository:
    """Return a repository that is open, or open the one at a path or URL."""
    if not isinstance(source, str | PathLike):
        return source
    return Repository.open(Storage.from_url(source, **(storage_options or {})))


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """A group of one snapshot, and how its values are shown."""

    read_from: Session
    group: str
    decode: bool = True
    nan_as_null: bool = True
    batch_rows: int = BATCH_ROWS

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        return self.read_from.snapshot_id

    def session(self) -> Session:
        """Return the session of the snapshot."""
        return self.read_from


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The part of a dataset that is read for a filter."""

    chunks: int
    """Chunks read of each array with all dimensions."""
    all_chunks: int
    rows: int
    """The most rows that are read; the filter is applied to each."""
    all_rows: int

    def __str__(self) -> str:
        """Describe the part in one sentence."""
        return (
            f"{self.chunks:,} of {self.all_chunks:,} chunks are read of each array, and at most "
            f"{self.rows:,} of {self.all_rows:,} rows."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A group that has been opened as a table. It pickles as what opened it."""

    source: ArrayGroup
    arrays: tuple[str, ...] | None
    fragment_bytes: int
    dataset: xarray.Dataset
    shape: TableShape
    schema: pa.Schema

    @classmethod
    def open(cls, source: ArrayGroup, arrays: tuple[str, ...] | None, fragment_bytes: int) -> Self:
        """Open the group; reads no chunk."""
        dataset = open_group(source)
        shape = table_shape(dataset, arrays, types=ARROW_TYPES)
        schema = pa.schema([(column.name, column.type) for column in shape.columns])
        return cls(source, arrays, fragment_bytes, dataset, shape, schema)

    def __reduce__(self) -> tuple[Any, ...]:
        # The open group does not travel: another process opens it, of the same snapshot.
        return _Table.open, (self.source, self.arrays, self.fragment_bytes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of cells along each dimension."""
        return tuple(int(self.dataset.sizes[dim]) for dim in self.shape.dims)

    def scan(
        self,
        columns: Columns,
        expression: pc.Expression | None,
        batch_size: int | None,
        boxes: Sequence[Box] | None = None,
    ) -> RowScanner:
        """Return the scanner of some columns of the rows that pass a filter; of all boxes if None.

        Raises:
            InvalidInputError: there is no such column, or an expression cannot be computed.
        """
        filtered = None if expression is None else Filtered.by(expression, self.schema)
        wanted = set(needed_by(columns, self.schema))
        if filtered is not None:
            wanted.update(filtered.refers)
        # Rows have a number even if nothing of them is read.
        names = [it for it in self.schema.names if it in wanted] or self.schema.names[:1]
        plan = self._plan(names, filtered, batch_size)
        if boxes is None:
            boxes = [box for part in self._parts(plan, filtered) for box in part]
        return RowScanner(plan.schema, plan.rows(boxes), columns, expression, translated)

    def parts(self, expression: pc.Expression | None) -> list[tuple[Box, ...]]:
        """Return groups of boxes of whole chunks that may have rows which pass a filter."""
        filtered = None if expression is None else Filtered.by(expression, self.schema)
        return self._parts(self._plan(self.schema.names, filtered, None), filtered)

    def planned(self, expression: pc.Expression | None) -> PlannedRows:
        """Return the part that is read for the rows which pass a filter."""
        filtered = None if expression is None else Filtered.by(expression, self.schema)
        plan = self._plan(self.schema.names, filtered, None)
        boxes = [box for part in self._parts(plan, filtered) for box in part]
        whole = tuple((0, length) for length in plan.grid.shape)
        return PlannedRows(
            chunks=num_chunks(boxes, plan.grid.chunks),
            all_chunks=num_chunks([whole], plan.grid.chunks),
            rows=sum(map(num_rows, boxes)),
            all_rows=num_rows(whole),
        )

    def known(self, boxes: Sequence[Box]) -> pc.Expression:
        """Return an expression that the coordinates of all rows of some boxes fulfil."""
        found: pc.Expression = pc.scalar(True)  # noqa: FBT003 -- Arrow's
        for dim, spans in zip(self.shape.dims, zip(*boxes, strict=True), strict=True):
            # One range around all boxes: it may hold coordinates of none of them, and excludes no
            # row.
            reach = min(start for start, _ in spans), max(stop for _, stop in spans)
            known = known_values(dim, self._coordinates(dim, reach))
            found = found if known is None else found & known
        return found

    def _plan(
        self, names: Sequence[str], filtered: Filtered | None, batch_size: int | None
    ) -> RowPlan:
        """Return the reading of some columns of the rows that a filter may keep."""
        # Along each dimension for itself: whether a filter may keep an index, whatever the others
        # are.
        masks = [
            axis_mask(filtered, dim, self._coordinates(dim, (0, length)))
            if filtered is not None and dim in filtered.refers
            else None
            for dim, length in zip(self.shape.dims, self.lengths, strict=True)
        ]

        def keep(axis: int, span: Span) -> Mask | None:
            mask = masks[axis]
            return None if mask is None else mask[slice(*span)]

        rows = min(batch_size or self.source.batch_rows, self.source.batch_rows)
        return RowPlan(
            self.dataset,
            self.shape,
            pa.schema([self.schema.field(name) for name in names]),
            grid_of(self.dataset, self.shape, map(self.shape.column, names)),
            replace(self.source, batch_rows=rows),
            keep,
        )

    def _parts(self, plan: RowPlan, filtered: Filtered | None) -> list[tuple[Box, ...]]:
        """Return groups of boxes, without chunks whose statistics exclude them."""
        kept = None
        if filtered is not None and self.shape.dims and self.source.decode:
            columns = map(self.shape.column, filtered.refers)
            # The mask is of the table's chunk grid, of which other arrays have no chunks.
            whole = [it for it in columns if it.variable and set(it.dims) == set(self.shape.dims)]
            kept = chunk_mask(self.source.session(), plan, filtered, whole) if whole else None
        if kept is None:
            return list(plan.parts(self.fragment_bytes))
        return list(plan.parts_of_chunks(kept, self.fragment_bytes))

    def _coordinates(self, dim: str, span: Span) -> pa.Array[Any]:
        return dimension_values(self.dataset, self.shape.column(dim), span, self.source)


class ArrayDataset(RowDataset):
    """The cells of arrays as rows, read when they are asked for. Make one with `dataset`.

    It is a `pyarrow.dataset.Dataset`: engines take it where they take datasets. A filter first
    selects along the dimensions, by their coordinates; then among chunks, by the statistics that
    `Repository.analyze` stores; the rest is applied to the rows. Only columns that are asked for,
    or that the filter needs, are read. Rows come in C order within the chunks that are read
    together; sort where an order is needed.

    It pickles, with the storage options that opened it, secrets included.

    Cost: coordinates of filters are read whole; up to 16 MiB of each stay in memory. A scan holds
    about 32 MiB of values, or one chunk, and a batch. Half of that is read ahead on a thread, once
    the first half was used up.
    """

    def __init__(self, table: _Table, expression: pc.Expression | None = None) -> None:
        """Keep the table; use `dataset`."""
        super().__init__(table.schema)
        self._table = table
        self._filter = expression

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayDataset, (self._table, self._filter)

    def __repr__(self) -> str:
        table = self._table
        shape = ", ".join(
            f"{dim}: {length}" for dim, length in zip(table.shape.dims, table.lengths, strict=True)
        )
        return (
            f"<icechunk_async.arrow.ArrayDataset of {table.source.group or '/'!r} in snapshot "
            f"{self.snapshot_id}, ({shape})>\n{self.schema}"
        )

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the rows are of."""
        return self._table.source.snapshot_id

    def filter(self, expression: pc.Expression) -> ArrayDataset:
        """Return a dataset of those rows that a filter keeps, too."""
        return ArrayDataset(self._table, joined(self._filter, expression))

    def planned(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
    ) -> PlannedRows:
        """Return the number of chunks and rows that would be read with a filter.

        Raises:
            InvalidInputError: the filter names no column, or cannot be computed.

        Cost: reads coordinates and statistics of chunks that the filter needs, and no other chunk.
        """
        with translated():
            return self._table.planned(joined(self._filter, filter))

    def get_fragments(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
    ) -> Iterator[ArrayFragment]:
        """Return parts of whole chunks that can be read apart, without those a filter excludes."""
        with translated():
            parts = self._table.parts(joined(self._filter, filter))
        # A generator, but planned at once: errors come from this call.
        return (ArrayFragment(self._table, boxes, self._filter) for boxes in parts)

    def _translated(self) -> AbstractContextManager[None]:
        return translated()

    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        return self._table.scan(columns, expression, batch_size)

    def _count(self) -> int:
        return prod(self._table.lengths)


class ArrayFragment(RowFragment):
    """Rows of some whole chunks of an `ArrayDataset`, which can be read apart; it pickles."""

    def __init__(
        self, table: _Table, boxes: tuple[Box, ...], expression: pc.Expression | None
    ) -> None:
        """Keep the boxes; use `ArrayDataset.get_fragments`."""
        self._table = table
        self._boxes = boxes
        self._filter = expression

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayFragment, (self._table, self._boxes, self._filter)

    def __repr__(self) -> str:
        return f"<icechunk_async.arrow.ArrayFragment of {len(self._boxes)} boxes: {self._boxes[0]}>"

    @property
    def physical_schema(self) -> pa.Schema:
        """The columns."""
        return self._table.schema

    @property
    def partition_expression(self) -> pc.Expression:
        """Knowledge about all rows: the least and greatest coordinates."""
        return self._table.known(self._boxes)

    def _translated(self) -> AbstractContextManager[None]:
        return translated()

    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        # Statistics were asked when the fragments were found.
        return self._table.scan(columns, expression, batch_size, self._boxes)

    def _count(self) -> int:
        return sum(map(num_rows, self._boxes))

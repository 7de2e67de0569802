"""A group of arrays as a dataset of pyarrow, which DuckDB, Polars, DataFusion and others query."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async.arrow.guarantees import Filtered, axis_mask, chunk_mask, known_values
from icechunk_async.arrow.rows import RowPlan, grid_of
from icechunk_async.arrow.table import (
    ARROW_TYPES,
    dimension_values,
    open_group,
    table_shape,
)
from icechunk_async.engine.versions.naming import find_ref
from icechunk_async.errors import InvalidInputError
from icechunk_async.sync import Repository, Session
from icechunk_async.sync.bridge.portal import run
from icechunk_async.sync.datasets.rows import (
    BATCH_ROWS,
    RowDataset,
    RowFragment,
    RowScanner,
    needed_by,
)
from icechunk_async.sync.errors import translated
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    import xarray

    from icechunk_async.arrow.boxes import Box, Span
    from icechunk_async.arrow.table import TableShape
    from icechunk_async.session import AnySession
    from icechunk_async.sync.datasets.rows import Columns

    type Mask = npt.NDArray[np.bool_]

__all__ = [
    "ArrayDataset",
    "ArrayFragment",
    "ArrayGroup",
    "dataset",
    "open_repository",
    "session_at",
]


def dataset(
    source: str | Repository | Session,
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
        source: the URL of a repository, or one that is open, or a read-only session.
        group: path of the group; the root if empty.
        ref: a branch, a tag or the id of a snapshot, as `Repository.readonly_session` takes it;
            `main~2` is two commits before the tip. By default `main`.
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
    session = _session(source, ref, storage_options)
    return ArrayDataset(
        ArrayGroup(session, group.strip("/"), decode, nan_as_null, batch_rows),
        None if arrays is None else tuple(arrays),
        fragment_bytes,
    )


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
    return session_at(open_repository(source, storage_options), "main" if ref is None else ref)


def open_repository(
    source: str | Repository, storage_options: Mapping[str, Any] | None = None
) -> Repository:
    """Return a repository that is open, or open the one at a URL."""
    if not isinstance(source, str):
        return source
    return Repository.open(Storage.from_url(source, **(storage_options or {})))


def session_at(repository: Repository, ref: str) -> Session:
    """Return a read-only session of what a ref names now.

    Raises:
        NotFoundError: it names nothing.
    """
    snapshot_id = run(repository.handle.ask(lambda it: find_ref(it.engine, ref)))
    return repository.readonly_session(snapshot_id=str(snapshot_id))


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

    def path_of(self, name: str) -> str:
        """Return the path of an array of the group."""
        return f"/{self.group}/{name}" if self.group else f"/{name}"


@dataclass(frozen=True, slots=True)
class _Table:
    """A group that has been opened."""

    dataset: xarray.Dataset
    shape: TableShape
    schema: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        schema = pa.schema([(column.name, column.type) for column in self.shape.columns])
        object.__setattr__(self, "schema", schema)


class ArrayDataset(RowDataset):
    """The cells of arrays as rows, read when they are asked for. Make one with `dataset`.

    It is a `pyarrow.dataset.Dataset`: engines take it where they take datasets. A filter first
    selects along the dimensions, by their coordinates; then among chunks, by the statistics that
    `Repository.analyze` stores; the rest is applied to the rows. Only columns that are asked for,
    or that the filter needs, are read.

    It pickles, with the storage options that opened it, secrets included.

    Cost: coordinates of filters are read whole, once for each scan. A scan holds about 64 MiB of
    values, or two chunks, and a few batches.
    """

    def __init__(
        self, source: ArrayGroup, arrays: tuple[str, ...] | None, fragment_bytes: int
    ) -> None:  # pyright: ignore[reportMissingSuperCall]
        """Open the group; use `dataset`."""
        self._source = source
        self._arrays = arrays
        self._fragment_bytes = fragment_bytes
        self._filter: pc.Expression | None = None
        opened = open_group(source)
        self._table = _Table(opened, table_shape(opened, arrays, types=ARROW_TYPES))
        super().__init__(self._table.schema)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._source, self._arrays, self._fragment_bytes, self._filter)

    def __repr__(self) -> str:
        shape = ", ".join(f"{dim}: {self._table.dataset.sizes[dim]}" for dim in self._dims)
        source = self._source
        return (
            f"<icechunk_async.arrow.ArrayDataset of {source.group or '/'!r} in snapshot "
            f"{source.snapshot_id}, ({shape})>\n{self.schema}"
        )

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the rows are of."""
        return self._source.snapshot_id

    @property
    def _dims(self) -> tuple[str, ...]:
        return self._table.shape.dims

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(int(self._table.dataset.sizes[dim]) for dim in self._dims)

    def filter(self, expression: pc.Expression) -> ArrayDataset:
        """Return a dataset of those rows that a filter keeps, too."""
        joined = self._joined(expression)
        return _reopened(self._source, self._arrays, self._fragment_bytes, joined)

    def count_rows(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
        **options: Any,
    ) -> int:
        """Return the number of rows; without a filter nothing is read."""
        if self._joined(filter) is None:
            return prod(self._lengths)
        return super().count_rows(filter, **options)

    def get_fragments(
        self,
        filter: pc.Expression | None = None,  # noqa: A002 -- pyarrow's
    ) -> Iterator[ArrayFragment]:
        """Return parts of whole chunks that can be read apart, without those a filter excludes."""
        with translated():
            _, parts = self._plan(_Query(None, self._joined(filter), None))
        return (ArrayFragment(self, boxes) for boxes in parts)

    def _joined(self, given: pc.Expression | None) -> pc.Expression | None:
        if given is None or self._filter is None:
            return self._filter if given is None else given
        return self._filter & given

    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        return self._scan_boxes(_Query(columns, self._joined(expression), batch_size))

    def _scan_boxes(self, query: _Query, boxes: Sequence[Box] | None = None) -> RowScanner:
        """Return the scanner of a query, over some boxes or over all."""
        plan, parts = self._plan(query, boxes)
        rows = plan.rows(box for part in parts for box in part)
        return RowScanner(plan.schema, rows, query.columns, query.filter)

    def _plan(
        self, query: _Query, boxes: Sequence[Box] | None = None
    ) -> tuple[RowPlan, list[tuple[Box, ...]]]:
        """Return the reading of a query: a plan, and the groups of boxes that may have its rows."""
        table, shape = self._table, self._table.shape
        filtered = None if query.filter is None else Filtered.by(query.filter, self.schema)
        names = query.names(self.schema, () if filtered is None else filtered.refers)
        schema = pa.schema([self.schema.field(name) for name in names])
        grid = grid_of(table.dataset, shape, map(shape.column, names))
        masks = self._masks(filtered)

        def keep(axis: int, span: Span) -> Mask | None:
            mask = masks[axis]
            return None if mask is None else mask[slice(*span)]

        rows = min(query.batch_size or self._source.batch_rows, self._source.batch_rows)
        source = replace(self._source, batch_rows=rows)
        plan = RowPlan(table.dataset, shape, schema, grid, source, keep)
        if boxes is not None:  # of a fragment, which `get_fragments` found by statistics as well
            return plan, [tuple(boxes)]
        kept = self._kept(plan, filtered)
        if kept is None:
            return plan, plan.parts(self._fragment_bytes)
        return plan, plan.parts_of_chunks(kept, self._fragment_bytes)

    def _masks(self, filtered: Filtered | None) -> list[Mask | None]:
        """Return for each dimension which indices a filter may keep; None for all."""
        masks: list[Mask | None] = []
        for dim, length in zip(self._dims, self._lengths, strict=True):
            if filtered is None or dim not in filtered.refers:
                masks.append(None)
                continue
            column = self._table.shape.column(dim)
            values = dimension_values(self._table.dataset, column, (0, length), self._source)
            masks.append(axis_mask(filtered, dim, values))
        return masks

    def _kept(self, plan: RowPlan, filtered: Filtered | None) -> Mask | None:
        """Return which chunks a filter may keep by statistics; None if they say nothing."""
        if filtered is None or not self._dims or not self._source.decode:
            return None
        columns = map(self._table.shape.column, filtered.refers)
        whole = [it for it in columns if it.variable and set(it.dims) == set(self._dims)]
        if not whole:
            return None

        async def ask(session: AnySession) -> Mask | None:
            return await chunk_mask(session, plan, filtered, whole)

        return run(self._source.read_from.handle.ask(ask))

    def _known(self, box: Box) -> pc.Expression:
        """Return an expression that the coordinates of a box fulfil."""
        found: pc.Expression = pc.scalar(True)  # noqa: FBT003 -- Arrow's
        for dim, span in zip(self._dims, box, strict=True):
            column = self._table.shape.column(dim)
            values = dimension_values(self._table.dataset, column, span, self._source)
            known = known_values(dim, values)
            found = found if known is None else found & known
        return found


class ArrayFragment(RowFragment):
    """Rows of some whole chunks of an `ArrayDataset`, which can be read apart; it pickles."""

    def __init__(self, dataset: ArrayDataset, boxes: tuple[Box, ...]) -> None:
        """Keep the boxes; use `ArrayDataset.get_fragments`."""
        self._dataset = dataset
        self._boxes = boxes

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayFragment, (self._dataset, self._boxes)

    def __repr__(self) -> str:
        return f"<icechunk_async.arrow.ArrayFragment of {len(self._boxes)} boxes: {self._boxes[0]}>"

    @property
    def physical_schema(self) -> pa.Schema:
        """The columns."""
        return self._dataset.schema

    @property
    def partition_expression(self) -> pc.Expression:
        """Knowledge about all rows: the least and greatest coordinates."""
        spans = zip(*self._boxes, strict=True)
        return self._dataset._known(  # noqa: SLF001 -- both are of this module  # pyright: ignore[reportPrivateUsage]
            tuple((min(a for a, _ in it), max(b for _, b in it)) for it in spans)
        )

    def _scan(
        self, columns: Columns, expression: pc.Expression | None, batch_size: int | None
    ) -> RowScanner:
        dataset = self._dataset
        query = _Query(columns, dataset._joined(expression), batch_size)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return dataset._scan_boxes(query, self._boxes)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _Query:
    """Columns, and a filter, of one scan."""

    columns: Columns
    filter: pc.Expression | None
    batch_size: int | None

    def names(self, schema: pa.Schema, refers: Sequence[str]) -> list[str]:
        """Return the columns to read, at least one.

        Args:
            schema: all columns.
            refers: those that the filter refers to.

        Raises:
            InvalidInputError: there is no such column.
        """
        wanted = {*refers, *needed_by(self.columns, schema)}
        # Rows have a number even if nothing of them is read.
        return [name for name in schema.names if name in wanted] or schema.names[:1]


def _reopened(
    source: ArrayGroup,
    arrays: tuple[str, ...] | None,
    fragment_bytes: int,
    expression: pc.Expression | None,
) -> ArrayDataset:
    found = ArrayDataset(source, arrays, fragment_bytes)
    found._filter = expression  # noqa: SLF001 -- it is of this module  # pyright: ignore[reportPrivateUsage]
    return found

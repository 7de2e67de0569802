"""Which cells a filter cannot keep, from coordinates and from the statistics of chunks.

A filter is an expression of Arrow, and Arrow itself decides: it simplifies the filter by what is
known of a range of cells, and a range for which nothing but false is left has no row. Ranges that
stay may hold rows that the filter drops, never the other way round.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xarray
from xarray.conventions import decode_cf_variable

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow.table import (
    path_of,
    stored_attributes,
    times_decoder,
    to_arrow,
    values_of,
)
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.statistics import HIGH_CUT, text_of
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.expressions import between, may_match, needed_columns
from icechunk_async.zarr.queries.measuring import successor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.arrow.boxes import Span
    from icechunk_async.arrow.rows import RowPlan
    from icechunk_async.arrow.table import Column, GroupSource
    from icechunk_async.format.statistics import Rows
    from icechunk_async.session import AnySession
    from icechunk_async.sync.session import Session

    type Mask = npt.NDArray[np.bool_]
    type Chunks = npt.NDArray[np.int64]

__all__ = [
    "ChunkBounds",
    "Filtered",
    "axis_mask",
    "chunk_bounds",
    "chunk_mask",
    "known_values",
    "mask_of",
]

_WIDE: Final = 512
"""Ranges of a dimension that are looked at before only the edges of those kept are."""
_MOST_CHUNKS: Final = 20_000
"""Chunks of an array whose statistics are looked at: a second of work."""
_MOST_CELLS: Final = 5_000_000
"""Chunks in the grid of an array whose statistics are looked at: more take gigabytes."""
_CONCURRENT: Final = 8


@dataclass(frozen=True, slots=True)
class Filtered:
    """A filter, and the columns that it may refer to."""

    expression: pc.Expression
    schema: pa.Schema
    refers: tuple[str, ...]
    """The columns that it does refer to."""

    @classmethod
    def by(cls, expression: pc.Expression, schema: pa.Schema) -> Self:
        """Find the columns of a filter.

        Raises:
            InvalidInputError: there is no such column, or the filter cannot be applied.
        """
        return cls(expression, schema, tuple(needed_columns(expression, schema)))


def axis_mask(filtered: Filtered, name: str, values: pa.Array[Any]) -> Mask:
    """Return which indices along a dimension may have rows that a filter keeps.

    Args:
        filtered: the filter, which refers to the dimension.
        name: the dimension.
        values: its coordinates, as rows have them.

    Cost: some 50 microseconds for each range that is looked at, at most a few thousand: ranges are
    halved, and beyond 512 of them only those at the edges of what is kept.
    """
    mask = np.zeros(len(values), bool)
    spans: list[Span] = [(0, len(values))] if len(values) else []
    # Halved level by level, and all ranges of a level are asked about together: a call of Arrow
    # costs more than a range.
    while spans:
        kept = may_match(
            filtered.expression,
            filtered.schema,
            [known_values(name, values.slice(start, stop - start)) for start, stop in spans],
        )
        spans = [span for span, keeps in zip(spans, kept.tolist(), strict=True) if keeps]
        if len(spans) <= _WIDE:
            halved: list[Span] = spans
            whole: list[Span] = []
        else:
            # Matches in a row are mostly whole. Only where a run of them begins or ends is it worth
            # looking closer.
            halved, whole = _edges(spans)
        for start, stop in whole:
            mask[start:stop] = True
        spans = []
        for start, stop in halved:
            if stop - start == 1:
                mask[start] = True
            else:
                middle = (start + stop) // 2
                spans += [(start, middle), (middle, stop)]
    return mask


def _edges(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the spans at the ends of each row of adjacent ones, and the others."""
    edges: list[Span] = []
    inner: list[Span] = []
    for at, (start, stop) in enumerate(spans):
        follows = at > 0 and spans[at - 1][1] == start
        goes_on = at + 1 < len(spans) and spans[at + 1][0] == stop
        (inner if follows and goes_on else edges).append((start, stop))
    return edges, inner


def known_values(name: str, values: pa.Array[Any]) -> pc.Expression | None:
    """Return an expression that all values of a column fulfil; None if nothing is known."""
    if values.null_count == len(values):
        return pc.field(name).is_null()
    if pa.types.is_floating(values.type):
        is_nan = pc.fill_null(pc.is_nan(values), fill_value=False)
        if is_nan.to_numpy(zero_copy_only=False).any():
            return None  # NaN is in no order
    bounds: Any = pc.min_max(values)
    return between(name, bounds["min"], bounds["max"], nullable=values.null_count > 0)


def chunk_mask(
    session: Session, plan: RowPlan, filtered: Filtered, columns: Sequence[Column]
) -> Mask | None:
    """Return which chunks of a table's grid may have rows that a filter keeps, by statistics.

    Args:
        session: of the snapshot.
        plan: the rows; its masks say which chunks are asked about.
        filtered: the filter.
        columns: those of the filter that are arrays with all dimensions of the table.

    Returns:
        A mask of the shape of the chunk grid; None if nothing is known, or there are more than
        20,000 chunks.

    Cost: for each column one listing, and one request for each manifest and each object with
    statistics that is not cached; some 50 microseconds for each chunk.
    """
    candidates = np.argwhere(_by_axes(plan))
    if len(candidates) > _MOST_CHUNKS:
        return None
    found = _bounds(session, plan, columns, candidates)
    masks = [may_match(filtered.expression, filtered.schema, it.facts()) for it in found]
    return mask_of(plan, candidates, masks)


def chunk_bounds(
    session: Session, plan: RowPlan, columns: Sequence[Column]
) -> tuple[Chunks, list[ChunkBounds]]:
    """Return the chunks of a table's grid that dimensions leave, and what is known of them.

    Args:
        session: of the snapshot.
        plan: the rows; its masks say which chunks are asked about.
        columns: arrays with all dimensions of the table.

    Returns:
        The places of the chunks in the grid, ``(n, rank)``; and for each column of which anything
        is known the bounds of all these chunks.

    Cost: for each column one listing, and one request for each manifest and each object with
    statistics that is not cached; some 700 bytes for each chunk of it.
    """
    candidates = np.argwhere(_by_axes(plan))
    return candidates, _bounds(session, plan, columns, candidates)


def mask_of(plan: RowPlan, chunks: Chunks, masks: Sequence[Mask]) -> Mask | None:
    """Return a mask of a table's chunk grid, of what all masks keep; None without masks."""
    if not masks:
        return None
    mask = np.zeros(plan.grid.counts, bool)
    mask[tuple(chunks.T)] = np.logical_and.reduce(masks)
    return mask


def _bounds(
    session: Session, plan: RowPlan, columns: Sequence[Column], candidates: Chunks
) -> list[ChunkBounds]:
    if not len(candidates) or prod(plan.grid.counts) > _MOST_CELLS:
        return []

    async def find(native: AnySession) -> list[_Known | None]:
        async def one(column: Column) -> _Known | None:
            return await _known(native, plan, column, candidates)

        return await bounded_map(one, columns, limit=_CONCURRENT)

    # The loop only reads: what takes long is decided in the thread that asks.
    found = run(session.handle.ask(find))
    return [it.bounds(plan.source) for it in found if it is not None]


def _by_axes(plan: RowPlan) -> Mask:
    """Return which chunks of the grid the masks of the dimensions leave."""
    whole = tuple((0, length) for length in plan.grid.shape)
    found = np.ones((), bool)
    for (_, length), chunk, mask in zip(whole, plan.grid.chunks, plan.masks(whole), strict=True):
        starts = np.arange(0, length, chunk)
        some = np.ones(len(starts), bool)
        if mask is not None and length:
            some = np.logical_or.reduceat(mask, starts)
        found = found[..., np.newaxis] & some
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBounds:
    """Knowledge of the values of one column in some chunks, as the table shows them."""

    column: Column
    known: Mask
    """Of which chunks anything is known, ``(n,)``; the rest of these is about them."""
    has_values: Mask
    has_nulls: Mask
    low: pa.Array[Any]
    """The least value of chunks that have one; NaN does not count."""
    high: pa.Array[Any]

    def facts(self) -> list[pc.Expression | None]:
        """Return for each chunk an expression that its rows fulfil; None where nothing is known."""
        name = self.column.name
        facts: list[pc.Expression | None] = []
        for at, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not self.known[at]:
                facts.append(None)
            elif not self.has_values[at]:
                facts.append(pc.field(name).is_null())
            else:
                facts.append(between(name, low, high, nullable=bool(self.has_nulls[at])))
        return facts


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The statistics of some chunks of one column."""

    column: Column
    array: QueriedArray
    rows: Rows
    known: Mask

    def bounds(self, source: GroupSource) -> ChunkBounds:
        """Return the statistics in values as a table shows them."""
        rows, known = self.rows, self.known
        if not source.nan_as_null:
            known = known & (rows["nulls"] == 0)  # NaN is in no order
        has_values = known & (rows["count"] > 0)
        if self.array.meaning.is_text:
            low, high = self._shown_texts(has_values)
        else:
            low = self._shown(rows["low"], has_values)
            high = self._shown(rows["high"], has_values)
        if self.array.meaning.is_reversed:
            # Packed by a negative scale: the least stored number is the greatest value.
            low, high = high, low
        unshown: Any = pc.or_(low.is_null(), high.is_null())
        # A bound that the table has no value for, such as a time beyond its type, says nothing.
        known = known & ~(has_values & unshown.to_numpy(zero_copy_only=False))
        return ChunkBounds(self.column, known, has_values, rows["nulls"] > 0, low, high)

    def _shown(self, bounds: npt.NDArray[Any], chosen: Mask) -> pa.Array[Any]:
        """Return bounds of stored numbers as the table has them: xarray decodes them as values."""
        meaning = self.array.meaning
        # Chunks without values have bytes that mean nothing, and may not decode.
        numbers = np.where(chosen, bounds, bounds.dtype.type(0)).astype(meaning.numbers)
        if self.column.marked and not pa.types.is_floating(self.column.type):
            return to_arrow(numbers, self.column.type)  # decoding would make doubles of them
        stored = numbers.view(meaning.stored.newbyteorder("="))
        variable = xarray.Variable(("chunk",), stored, stored_attributes(self.array.array))
        decode = cast("Any", decode_cf_variable)
        decoded = decode(self.column.name, variable, decode_times=times_decoder(decode=True))
        return to_arrow(values_of(decoded), self.column.type)

    def _shown_texts(self, chosen: Mask) -> tuple[pa.Array[Any], pa.Array[Any]]:
        """Return bounds of text as text; null where nothing can be said."""
        rows = self.rows
        lows = [text_of(it) for it in np.where(chosen, rows["low"], b"").tolist()]
        highs: list[str | None] = [
            text_of(it) for it in np.where(chosen, rows["high"], b"").tolist()
        ]
        for at in np.flatnonzero(chosen & (rows["cut"] & HIGH_CUT > 0)).tolist():
            # A bound that was cut is less than the text it stands for. Its successor is not.
            highs[at] = successor(highs[at] or "")
        return pa.array(lows, pa.string()), pa.array(highs, pa.string())


async def _known(
    session: AnySession, plan: RowPlan, column: Column, candidates: Chunks
) -> _Known | None:
    """Return the statistics of chunks of a column; None if no chunk has any."""
    try:
        array = await QueriedArray.open(session.store, path_of(plan.source, column.name))
    except InvalidInputError:
        return None  # its values have no order
    order = [plan.shape.dims.index(dim) for dim in column.dims]
    # Statistics are of the array's chunks, and the mask is of the table's grid.
    if array.chunks != tuple(plan.grid.chunks[axis] for axis in order):
        return None
    if array.meaning.is_text and column.type != pa.string():
        return None  # it is decoded to something else
    chunks = await array.known_chunks(session.store)
    rows, known = chunks.statistics(candidates[:, order])
    return _Known(column, array, rows, known) if known.any() else None

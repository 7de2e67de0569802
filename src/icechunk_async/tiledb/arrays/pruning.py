"""Find the tiles that may hold rows of a filter, from boxes and bounds, by Arrow's own logic.

`icechunk_async.zarr.queries.expressions` decides from what is known of a tile: the bounds of its
coordinates, and of its values by the statistics in fragment metadata. Those of TileDB have faults,
which is why some are not used: those of text that may be null before version 21, of dense text, of
floats with a NaN or an overflow among them, and of fields with a filter that loses precision.
Bounds include cells that were deleted, or written later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.arrays.arrow import to_arrow
from icechunk_async.tiledb.arrays.cells import Cells
from icechunk_async.tiledb.format.filters.pipeline import FilterCode
from icechunk_async.tiledb.format.types import TEXT, Datatype, is_time, stored_dtype
from icechunk_async.zarr.queries.expressions import between, may_match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.cells import Field
    from icechunk_async.tiledb.arrays.fragments import Fragment
    from icechunk_async.tiledb.format.fragment import Boxes, RTree
    from icechunk_async.tiledb.format.schema import Attribute

__all__ = ["TileBounds", "attribute_bounds", "known_range", "matching_tiles"]

_TRUSTED_TEXT_SINCE: Final = 21
_LIMIT: Final = np.finfo(np.float64).max
_GIVE_UP_SHARE: Final = 0.9
"""If a level of the tree drops less than one box in ten, the levels below are not looked at."""
_GIVE_UP_BOXES: Final = 1000


@dataclass(frozen=True, slots=True)
class TileBounds:
    """Bounds of the values of one field in each of some tiles."""

    lows: npt.NDArray[Any]
    """The least values: stored numbers, or objects of `bytes`."""
    highs: npt.NDArray[Any]
    known: npt.NDArray[np.bool_]
    """Where the bounds hold; elsewhere nothing is known."""
    nulls: npt.NDArray[np.bool_]
    """Where there may be nulls."""
    only_nulls: npt.NDArray[np.bool_]
    """Where all cells are null, so that there are no bounds."""

    def grouped(self, fanout: int) -> TileBounds:
        """Return the bounds of groups of ``fanout`` tiles each, the last one shorter."""
        starts = np.arange(0, len(self.lows), fanout)
        empty = self.only_nulls
        lows, highs = self.lows, self.highs
        if empty.any() and not empty.all():
            # Tiles without values must not widen the bounds of their group.
            first = int(np.flatnonzero(~empty)[0])
            lows, highs = lows.copy(), highs.copy()
            index = _nearest(~empty, fanout, first)
            lows[empty], highs[empty] = lows[index[empty]], highs[index[empty]]
        known = np.logical_and.reduceat(self.known | empty, starts)
        return TileBounds(
            np.minimum.reduceat(lows, starts),
            np.maximum.reduceat(highs, starts),
            known,
            np.logical_or.reduceat(self.nulls, starts),
            np.logical_and.reduceat(empty, starts),
        )


def _nearest(has: npt.NDArray[np.bool_], fanout: int, first: int) -> npt.NDArray[np.int64]:
    """Return for each tile one with values, of its group if the group has any."""
    numbers = np.arange(len(has))
    groups = numbers // fanout
    known = np.full(int(groups[-1]) + 1, first)
    known[groups[has][::-1]] = numbers[has][::-1]
    return known[groups]


async def attribute_bounds(fragment: Fragment, it: Attribute) -> TileBounds | None:
    """Return the bounds of an attribute in each tile of a sparse fragment; None if unknown.

    Cost: up to four blocks of the fragment's metadata.
    """
    own = fragment.schema.fields.get(it.name)
    # Statistics of tiles exist since version 11.
    if own is None or fragment.version < 11 or not _has_bounds(it, fragment.version):
        return None
    stored = await fragment.extremes(it.name)
    if stored is None:
        return None
    count = fragment.tile_count
    ones = np.ones(count, bool)
    nulls = only = ~ones
    if it.is_nullable:
        counts = await fragment.null_counts(it.name)
        if counts is None or len(counts) < count:
            return None
        nulls = counts[:count] > 0
        # Tiles of a sparse fragment are full but for the last one. Where all cells are null, TileDB
        # stores zeros as both bounds.
        cells = np.full(count, fragment.schema.capacity, np.uint64)
        cells[-1:] = fragment.footer.last_tile_cells
        only = counts[:count] >= cells
    pair = [_values(side, it, count) for side in stored]
    lows, highs = pair
    if lows is None or highs is None:
        return None
    known = ones & ~only
    if lows.dtype.kind == "f":
        # A NaN makes TileDB forget numbers before it, so that bounds are too narrow: of 1 to 10
        # with a NaN in place of 5 it stores 6 as the least. The sum tells whether there was one.
        sums = await fragment.sums(it)
        if sums is None or len(sums) < count:
            return None
        # A sum that overflows, or has an infinity, stops at the limit.
        known &= np.isfinite(sums[:count]) & (np.abs(sums[:count]) < _LIMIT)
        known &= ~(np.isnan(lows) | np.isnan(highs))
    known &= lows <= highs
    return TileBounds(lows, highs, known, nulls, only)


def _has_bounds(it: Attribute, version: int) -> bool:
    if any(f.code in (FilterCode.FLOAT_SCALE, FilterCode.WEBP) for f in it.filters):
        return False  # they are of the values before the filter
    if it.enumeration is not None:
        return False  # bounds are of the numbers, and filters are about the values
    if it.datatype is Datatype.STRING_ASCII:
        return not it.is_nullable or version >= _TRUSTED_TEXT_SINCE
    if it.values != 1 or it.datatype in TEXT:
        return False
    return is_time(it.datatype) or (
        it.datatype <= Datatype.UINT64 and stored_dtype(it.datatype).kind in "iuf"
    )


def _values(side: Any, it: Attribute, count: int) -> npt.NDArray[Any] | None:
    if it.datatype is not Datatype.STRING_ASCII:
        found: npt.NDArray[Any] = side.numbers(it.dtype)
        return found[:count] if len(found) >= count else None
    if it.is_variable:
        items = side.items()
    else:
        width = it.cell_bytes
        items = [side.fixed[at : at + width] for at in range(0, len(side.fixed), width)]
    if items is None or len(items) < count:
        return None
    column = np.empty(count, object)
    column[:] = items[:count]
    return column


@dataclass(frozen=True, slots=True)
class _Known:
    """Bounds of one column in some boxes."""

    column: str
    field: Field
    bounds: TileBounds

    def expressions(self, rows: Sequence[int]) -> list[pc.Expression | None]:
        """Return the knowledge about the column in some boxes; None if nothing is known."""
        field, bounds = self.field, self.bounds
        lows, highs = _scalars(field, bounds.lows[rows]), _scalars(field, bounds.highs[rows])
        is_null = pc.field(self.column).is_null()
        found: list[pc.Expression | None] = []
        for at, row in enumerate(rows):
            low, high = lows[at], highs[at]
            if bounds.only_nulls[row]:
                found.append(is_null)
            elif not bounds.known[row] or low is None or high is None:
                found.append(None)
            else:
                found.append(between(self.column, low, high, nullable=bool(bounds.nulls[row])))
        return found


def _scalars(field: Field, values: npt.NDArray[Any]) -> list[pa.Scalar[Any] | None]:
    """Return stored values as scalars of the type of the column; None where they are not text."""
    if values.dtype != object:
        return list(to_arrow(Cells(field, np.ascontiguousarray(values)[:, None])))
    found: list[pa.Scalar[Any] | None] = []
    for value in values.tolist():
        if field.is_variable:
            # Text that is not valid cannot be compared, and readers of the tile will say so.
            try:
                found.append(pa.scalar(value.decode(), pa.large_string()))
            except UnicodeDecodeError:
                found.append(None)
        else:
            found.append(pa.scalar(value, pa.binary(len(value))))
    return found


def known_range(field: Field, low: Any, high: Any) -> pc.Expression | None:
    """Return that coordinates lie in a range, both ends included; None if it cannot be said."""
    dtype = np.dtype(object) if field.is_variable else field.dtype
    ends = np.empty(2, dtype)
    ends[:] = [low, high]
    first, last = _scalars(field, ends)
    if first is None or last is None:
        return None
    return between(field.name, first, last)


def matching_tiles(
    expression: pc.Expression,
    schema: pa.Schema,
    tree: RTree,
    dimensions: Mapping[int, Field],
    attributes: Mapping[str, tuple[Field, TileBounds]],
) -> npt.NDArray[np.intp]:
    """Return the tiles of a fragment that may hold rows of a filter, by going down its tree.

    Args:
        expression: the filter.
        schema: the columns.
        tree: the boxes of coordinates.
        dimensions: the dimensions that the filter refers to, by their number.
        attributes: bounds of attributes in each tile.

    Cost: some 50 microseconds for each box that is looked at: those below boxes that match.
    """
    levels = tree.levels
    if not levels:
        return np.zeros(0, np.intp)
    bounds = _by_level(tree, attributes)
    rows = np.arange(len(levels[0]))
    for number, boxes in enumerate(levels):
        if number:
            children = rows[:, None] * tree.fanout + np.arange(tree.fanout)
            rows = children.reshape(-1)
            rows = rows[rows < len(boxes)]
        known = _known(boxes, dimensions, bounds[number])
        kept = may_match(expression, schema, _joined(known, rows.tolist()))
        dropped = len(rows) - int(kept.sum())
        # Each level costs Arrow's look at every box, so do not look at levels that drop nothing.
        is_useless = len(rows) >= _GIVE_UP_BOXES and dropped < (1 - _GIVE_UP_SHARE) * len(rows)
        rows = rows[kept]
        if is_useless and number + 1 < len(levels):
            return _leaves(rows, tree, number)
    return rows


def _leaves(rows: npt.NDArray[np.intp], tree: RTree, number: int) -> npt.NDArray[np.intp]:
    """Return all tiles below some boxes of a level."""
    for boxes in tree.levels[number + 1 :]:
        rows = (rows[:, None] * tree.fanout + np.arange(tree.fanout)).reshape(-1)
        rows = rows[rows < len(boxes)]
    return rows


def _by_level(
    tree: RTree, attributes: Mapping[str, tuple[Field, TileBounds]]
) -> list[dict[str, tuple[Field, TileBounds]]]:
    """Return the bounds of attributes for the boxes of each level."""
    found = [dict(attributes)]
    for _ in tree.levels[1:]:
        found.append(
            {name: (field, it.grouped(tree.fanout)) for name, (field, it) in found[-1].items()}
        )
    return found[::-1]


def _known(
    boxes: Boxes,
    dimensions: Mapping[int, Field],
    attributes: Mapping[str, tuple[Field, TileBounds]],
) -> list[_Known]:
    count = len(boxes)
    yes, no = np.ones(count, bool), np.zeros(count, bool)
    return [
        *(
            _Known(
                field.name, field, TileBounds(boxes.lows[number], boxes.highs[number], yes, no, no)
            )
            for number, field in dimensions.items()
        ),
        *(_Known(name, field, bounds) for name, (field, bounds) in attributes.items()),
    ]


def _joined(known: Sequence[_Known], rows: Sequence[int]) -> list[pc.Expression | None]:
    """Return all that is known of each box."""
    columns = [it.expressions(rows) for it in known]
    if not columns:
        return [None] * len(rows)
    found: list[pc.Expression | None] = []
    for parts in zip(*columns, strict=True):
        joined: pc.Expression | None = None
        for part in parts:
            if part is not None:
                joined = part if joined is None else joined & part
        found.append(joined)
    return found

"""Find the tiles that may hold rows of a filter, from boxes and bounds, by Arrow's own logic.

`icechunk_async.zarr.queries.expressions` decides from what is known of a tile: the bounds of its
coordinates and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.arrays.arrow import to_arrow
from icechunk_async.tiledb.arrays.cells import Cells
from icechunk_async.tiledb.arrays.statistics import TileBounds
from icechunk_async.zarr.queries.expressions import between, may_match

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.cells import Field
    from icechunk_async.tiledb.format.fragment import Boxes, RTree

__all__ = ["known_range", "matching_tiles"]

_GIVE_UP_SHARE: Final = 0.9
"""If a level of the tree drops less than one box in ten, the levels below are not looked at."""
_GIVE_UP_BOXES: Final = 1000


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

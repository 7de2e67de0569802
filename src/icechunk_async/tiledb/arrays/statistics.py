"""Bounds of the values of tiles, from statistics in fragment metadata, as far as they hold.

Statistics of TileDB have faults, which is why some are not used: those of text that may be null
before version 21, of dense text, of floats with a NaN or an overflow among them, and of fields with
a filter that loses precision. Bounds include cells that were deleted, or written later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.format.filters.pipeline import FilterCode
from icechunk_async.tiledb.format.types import TEXT, Datatype, is_time, stored_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.tiledb.arrays.fragments import Fragment
    from icechunk_async.tiledb.format.schema import Attribute

__all__ = ["TileBounds", "attribute_bounds"]

_TRUSTED_TEXT_SINCE: Final = 21
_LIMIT: Final = np.finfo(np.float64).max


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
        cells = np.full(count, fragment.schema.capacity, np.uint64)
        cells[-1:] = fragment.footer.last_tile_cells
        only = counts[:count] >= cells
    pair = [_values(side, it, count) for side in stored]
    lows, highs = pair
    if lows is None or highs is None:
        return None
    known = ones & ~only
    if lows.dtype.kind == "f":
        sums = await fragment.sums(it)
        if sums is None or len(sums) < count:
            return None
        # A NaN makes the sum one, and the sum of an overflow stops at the limit.
        known &= np.isfinite(sums[:count]) & (np.abs(sums[:count]) < _LIMIT)
        known &= ~(np.isnan(lows) | np.isnan(highs))
    known &= lows <= highs
    return TileBounds(lows, highs, known, nulls, only)


def _has_bounds(it: Attribute, version: int) -> bool:
    if any(f.code in (FilterCode.FLOAT_SCALE, FilterCode.WEBP) for f in it.filters):
        return False
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

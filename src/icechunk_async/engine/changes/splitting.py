"""Plan manifests: which one holds which chunk, and which ones a commit must rewrite.

The grid of an array is cut into cells by rules of the configuration; a manifest holds the
references of one cell (spec, "Manifest splitting"). Pure: takes
configuration and boxes, and returns plans.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.config import ManifestSplittingConfig
    from icechunk_async.format.manifest.chunk import Coordinates, Extents
    from icechunk_async.format.snapshot import ArrayData, ManifestRef

__all__ = ["CellPlan", "SplitPlan", "plan_manifests", "split_sizes"]

# The official engine's default: chunk coordinates have 32 bits, so nothing is divided.
_UNSPLIT: Final = (1 << 32) - 1


def split_sizes(
    path: str, array: ArrayData, config: ManifestSplittingConfig | None
) -> tuple[int, ...]:
    """Return the cell size along each axis, in chunks.

    Rules are tried in order; each axis takes the first one that fits it.
    """
    rank = len(array.dimensions)
    sizes: list[int | None] = [None] * rank
    for condition, rules in config.effective_split_sizes if config is not None else ():
        if not condition.matches(path):
            continue
        for axis in range(rank):
            if sizes[axis] is None:
                name = array.dimension_names[axis] if array.dimension_names else None
                sizes[axis] = next((size for dim, size in rules if dim.matches(axis, name)), None)
    return tuple(size or _UNSPLIT for size in sizes)


@dataclass(slots=True)
class CellPlan:
    """One cell to write: references of ``sources`` within ``box``, overlaid with ``changes``."""

    box: Extents
    sources: list[ManifestRef] = field(default_factory=list["ManifestRef"])
    changes: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of the session's changes that lie in the cell."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The manifests of an array that stay, and the cells that are written."""

    reused: list[ManifestRef]
    cells: list[CellPlan]


def plan_manifests(
    grid: Coordinates,
    sizes: Sequence[int],
    old: Sequence[ManifestRef],
    changed: npt.NDArray[np.uint32],
    *,
    kept: Coordinates | None = None,
    rewrite_all: bool = False,
) -> SplitPlan:
    """Decide which manifests stay and which cells are written.

    A cell with changes is written as one manifest. In a cell without changes, a manifest that lies
    wholly inside is reused; one that reaches beyond its cell is cut to it.

    Args:
        grid: chunks along each axis now; references outside of it are dropped.
        sizes: cell size along each axis.
        old: the array's manifests.
        changed: coordinates of the session's changes, ``(n, rank)``.
        kept: the grid in which old references still count, where that is smaller.
        rewrite_all: write every cell.
    """
    touched = _rows_by_cell(changed, sizes)
    # A cell that is written has the box of the whole grid: ``kept`` limits only what comes from old
    # manifests, and the session may have written beyond it after the array grew again.
    cells = {
        cell: CellPlan(_box(cell, sizes, grid), changes=rows) for cell, rows in touched.items()
    }
    kept = grid if kept is None else tuple(min(a, b) for a, b in zip(grid, kept, strict=True))
    reused: list[ManifestRef] = []
    cut: list[CellPlan] = []
    # Extents are those of the references, not of cells: of 10 chunks in cells of 4, chunks 0, 1, 5
    # and 9 are in manifests of [0, 2), [5, 6) and [9, 10).
    for ref in old:
        for cell in _cells_of(ref.extents, sizes, kept):
            if cell in cells:
                cells[cell].sources.append(ref)
            elif rewrite_all:
                cells[cell] = CellPlan(_box(cell, sizes, grid), [ref])
            elif _contains(_box(cell, sizes, kept), ref.extents):
                reused.append(ref)
            else:
                cut.append(CellPlan(_box(cell, sizes, kept), [ref]))
    return SplitPlan(reused, [*cells.values(), *cut])


def _rows_by_cell(
    coords: npt.NDArray[np.uint32], sizes: Sequence[int]
) -> dict[Coordinates, npt.NDArray[np.int64]]:
    if len(coords) == 0:
        return {}
    if coords.shape[1] == 0:
        return {(): np.arange(len(coords))}
    cells = coords // np.array(sizes, np.uint32)
    if (cells == cells[0]).all():
        only: list[int] = cells[0].tolist()
        return {tuple(only): np.arange(len(coords))}
    distinct, codes = np.unique(cells, axis=0, return_inverse=True)
    # Stable, because the rows of each cell must stay in ascending order to be merged.
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes))
    groups: list[npt.NDArray[np.int64]] = np.split(order, ends[:-1])
    names: list[list[int]] = distinct.tolist()
    return {tuple(cell): rows for cell, rows in zip(names, groups, strict=True)}


def _box(cell: Coordinates, sizes: Sequence[int], grid: Coordinates) -> Extents:
    return tuple(
        (at * size, min((at + 1) * size, stop))
        for at, size, stop in zip(cell, sizes, grid, strict=True)
    )


def _cells_of(extents: Extents, sizes: Sequence[int], grid: Coordinates) -> Iterator[Coordinates]:
    """Iterate over the cells that a box meets, within the grid."""
    ranges = [
        range(start // size, -(-min(stop, limit) // size)) if start < limit else range(0)
        for (start, stop), size, limit in zip(extents, sizes, grid, strict=True)
    ]
    shape = tuple(len(axis) for axis in ranges)
    for place in np.ndindex(shape):  # lazy, where itertools.product would list every axis
        indices: tuple[int, ...] = place
        yield tuple(axis[index] for axis, index in zip(ranges, indices, strict=True))


def _contains(box: Extents, inner: Extents) -> bool:
    return all(
        low <= start and stop <= high for (low, high), (start, stop) in zip(box, inner, strict=True)
    )

"""Plan manifests: which one holds which chunk, and which ones a commit must rewrite.

The grid of an array is cut into cells by rules of the configuration; a manifest holds the
references of one cell (spec, "Manifest splitting"). Pure: takes
configuration and boxes, and returns plans.
"""

from __future__ import annotations

from dataclasses import field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.config import ManifestSplittingConfig
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.chunk import Coordinates, Extents
    from icechunk_async.format.snapshot import ArrayData, ManifestRef

__all__ = [
    "MOST_CELLS",
    "CellPlan",
    "SplitPlan",
    "most_cells",
    "occupied_cells",
    "plan_manifests",
    "split_sizes",
    "wide_manifests",
]

MOST_CELLS: Final = 4096
"""Cells of an array that are planned by boxes alone, at most, besides one for each manifest.

A box costs a snapshot a few bytes and may claim ``2**31`` chunks along each axis, however few
references the manifest has. Beyond this bound, references say which cells are planned.
"""

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
    occupied: Mapping[ManifestId, npt.NDArray[np.int64]] | None = None,
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
        occupied: cells with references of the manifests that `wide_manifests` names.
    """
    touched = _rows_by_cell(changed, sizes)
    # A cell that is written has the box of the whole grid: ``kept`` limits only what comes from old
    # manifests, and the session may have written beyond it after the array grew again.
    cells = {
        cell: CellPlan(_box(cell, sizes, grid), changes=rows) for cell, rows in touched.items()
    }
    kept = _limits(grid, kept)
    reused: list[ManifestRef] = []
    cut: list[CellPlan] = []
    # Extents are those of the references, not of cells: of 10 chunks in cells of 4, chunks 0, 1, 5
    # and 9 are in manifests of [0, 2), [5, 6) and [9, 10).
    for ref in old:
        ranges = _ranges(ref.extents, sizes, kept)
        found = None if occupied is None else occupied.get(ref.manifest_id)
        for cell in _all_cells(ranges) if found is None else _some_cells(ranges, found):
            if cell in cells:
                cells[cell].sources.append(ref)
            elif rewrite_all:
                cells[cell] = CellPlan(_box(cell, sizes, grid), [ref])
            elif _contains(_box(cell, sizes, kept), ref.extents):
                reused.append(ref)
            else:
                cut.append(CellPlan(_box(cell, sizes, kept), [ref]))
    return SplitPlan(reused, [*cells.values(), *cut])


def wide_manifests(
    grid: Coordinates,
    sizes: Sequence[int],
    old: Sequence[ManifestRef],
    *,
    kept: Coordinates | None = None,
) -> list[ManifestId]:
    """Return the manifests whose boxes meet too many cells to plan each of them.

    They are read before `plan_manifests`, for `occupied_cells`. All of them are divided, so each
    cell with references is written from them in any case.
    """
    limits = _limits(grid, kept)
    counts = [prod(map(len, _ranges(ref.extents, sizes, limits))) for ref in old]
    # A manifest within one cell needs one plan, however many there are.
    divided = {ref.manifest_id: None for ref, count in zip(old, counts, strict=True) if count > 1}
    return list(divided) if sum(count for count in counts if count > 1) > MOST_CELLS else []


def occupied_cells(
    coords: npt.NDArray[np.uint32],
    sizes: Sequence[int],
    grid: Coordinates,
    *,
    kept: Coordinates | None = None,
) -> npt.NDArray[np.int64]:
    """Return the cells that have references within the grid, each once and in order."""
    limits = np.array(_limits(grid, kept), np.int64)
    inside = coords[(coords < limits).all(axis=1)]
    cells = inside.astype(np.int64) // np.array(sizes, np.int64)
    cells = cells[np.lexsort(cells.T[::-1])]  # by far faster than `np.unique` along an axis
    first = np.ones(len(cells), bool)
    first[1:] = (cells[1:] != cells[:-1]).any(axis=1)
    return cells[first]


def most_cells(
    grid: Coordinates, sizes: Sequence[int], old: Iterable[tuple[ManifestRef, int]]
) -> int:
    """Count the cells that references of manifests may be in, at most.

    Args:
        grid: chunks along each axis.
        sizes: cell size along each axis.
        old: manifests, each with the number of its references.
    """
    met = sum(min(prod(map(len, _ranges(ref.extents, sizes, grid))), refs) for ref, refs in old)
    return min(met, prod(-(-stop // size) for stop, size in zip(grid, sizes, strict=True)))


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


def _limits(grid: Coordinates, kept: Coordinates | None) -> Coordinates:
    return grid if kept is None else tuple(min(a, b) for a, b in zip(grid, kept, strict=True))


def _ranges(extents: Extents, sizes: Sequence[int], grid: Coordinates) -> list[range]:
    """Return the cells that a box meets within the grid, as a range along each axis."""
    return [
        range(start // size, -(-min(stop, limit) // size)) if start < limit else range(0)
        for (start, stop), size, limit in zip(extents, sizes, grid, strict=True)
    ]


def _all_cells(ranges: Sequence[range]) -> Iterable[Coordinates]:
    # `product` lists every axis first, also where another one is empty.
    return product(*ranges) if all(ranges) else ()


def _some_cells(ranges: Sequence[range], cells: npt.NDArray[np.int64]) -> Iterable[Coordinates]:
    """Return those of the given cells that are within ranges, in the order of `_all_cells`."""
    starts, stops = np.array([(it.start, it.stop) for it in ranges], np.int64).T
    found: list[list[int]] = cells[((cells >= starts) & (cells < stops)).all(axis=1)].tolist()
    return map(tuple, found)


def _contains(box: Extents, inner: Extents) -> bool:
    return all(
        low <= start and stop <= high for (low, high), (start, stop) in zip(box, inner, strict=True)
    )

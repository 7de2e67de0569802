"""Which cells of a growing table are new, gone or touched: boxes, from masks and chunks."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.spark.planning import Box, Span

    type Window = tuple[int, bytes]

__all__ = [
    "boxes_of_cells",
    "cells_of_chunks",
    "clipped",
    "inside",
    "is_many",
    "kept_cells",
    "limited",
    "outside",
    "runs",
    "windows",
]

_MAX_BOXES: Final = 1024


def runs(mask: npt.NDArray[np.bool_]) -> list[Span]:
    """Answer the ranges where a mask is true."""
    padded = np.concatenate([[False], mask, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
    return [(start, stop) for start, stop in edges.tolist()]


def is_many(kept: Sequence[npt.NDArray[np.bool_]]) -> bool:
    """Tell whether masks make more boxes than a plan should have."""
    return prod(max(1, len(runs(mask))) for mask in kept) > _MAX_BOXES


def limited(kept: Sequence[npt.NDArray[np.bool_]], *, instead: bool) -> list[npt.NDArray[np.bool_]]:
    """Answer masks that make few boxes: where they would make many, a dimension is all one.

    Args:
        kept: the masks.
        instead: whether such a dimension keeps all or nothing. Boxes then have places that they
            should not, and who reads them leaves out what `windows` tells.
    """
    masks = list(kept)
    while is_many(masks):
        worst = max(range(len(masks)), key=lambda axis: len(runs(masks[axis])))
        masks[worst] = np.full_like(masks[worst], instead)
    return masks


def windows(kept: Sequence[npt.NDArray[np.bool_]], boxes: Sequence[Box]) -> tuple[Window, ...]:
    """Answer the part of each mask that boxes span, as plain data of a bit for each place."""
    found: list[Window] = []
    for axis, mask in enumerate(kept):
        start = min(box[axis][0] for box in boxes)
        stop = max(box[axis][1] for box in boxes)
        found.append((start, np.packbits(mask[start:stop]).tobytes()))
    return tuple(found)


def kept_cells(kept: Sequence[Window], box: Box) -> npt.NDArray[np.bool_]:
    """Tell of each cell of a box, in C order, whether every dimension keeps its place."""
    cells = np.ones((), np.bool_)
    for (first, packed), (start, stop) in zip(kept, box, strict=True):
        # What follows the end of a mask is not kept.
        bits = np.zeros(stop - start, np.bool_)
        known = np.unpackbits(np.frombuffer(packed, np.uint8))[start - first : stop - first]
        bits[: len(known)] = known
        cells = cells[..., np.newaxis] & bits
    return cells.reshape(-1)


def inside(kept: Sequence[npt.NDArray[np.bool_]]) -> list[Box]:
    """Answer the boxes of places that every dimension keeps."""
    return list(product(*map(runs, kept)))


def outside(kept: Sequence[npt.NDArray[np.bool_]], shape: Sequence[int]) -> Iterator[Box]:
    """Answer the boxes of places that some dimension does not keep; none twice.

    Args:
        kept: for each dimension which of its first places are; what follows is not.
        shape: of the whole.
    """
    for axis, (mask, length) in enumerate(zip(kept, shape, strict=True)):
        lost = np.ones(length, np.bool_)
        lost[: len(mask)] = ~mask
        before = [runs(it) for it in kept[:axis]]
        after = [[(0, size)] for size in shape[axis + 1 :]]
        yield from product(*before, runs(lost), *after)


def cells_of_chunks(
    chunks: npt.NDArray[np.integer],
    sizes: Sequence[int],
    axes: Sequence[int],
    grid: Sequence[int],
    shape: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Answer which cells of a table's grid some chunks of an array lie in; ``(n, dimensions)``.

    Args:
        chunks: coordinates of the chunks, ``(n, rank)``.
        sizes: elements of a chunk of the array along each of its axes.
        axes: of each of its axes the number of the table's dimension; all are named.
        grid: elements of the grid along each dimension, at least those of the array's chunks.
        shape: of the table; what lies outside is left out.
    """
    count = len(chunks)
    if not count or not sizes:
        return np.zeros((count, len(grid)), np.int64)
    start = np.zeros((count, len(grid)), np.int64)
    start[:, list(axes)] = chunks.astype(np.int64) * np.array(sizes, np.int64)
    steps = np.array(grid, np.int64)
    lengths = np.zeros(len(grid), np.int64)
    lengths[list(axes)] = sizes
    ends = np.array(shape, np.int64)
    within = (start < ends).all(axis=1)
    first = start[within] // steps
    last = (np.minimum(start[within] + lengths, ends) - 1) // steps
    # A chunk is no longer than a cell of the grid, so that it lies in two of them at most.
    sides = product(*([first[:, axis], last[:, axis]] for axis in range(len(grid))))
    return np.unique(np.concatenate([np.stack(side, axis=1) for side in sides]), axis=0)


def boxes_of_cells(cells: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Put cells together to boxes that have exactly these; ``(n, dimensions, 2)``, half-open.

    Args:
        cells: coordinates, ``(n, dimensions)``, each once.
    """
    found = np.stack([cells, cells.astype(np.int64) + 1], axis=2).astype(np.int64)
    for axis in reversed(range(found.shape[1])):
        found = _joined(found, axis)
    return found


def _joined(boxes: npt.NDArray[np.int64], axis: int) -> npt.NDArray[np.int64]:
    """Join boxes that follow each other along one axis and are alike along the others."""
    if len(boxes) < 2:
        return boxes
    others = np.delete(boxes, axis, axis=1).reshape(len(boxes), -1)
    order = np.lexsort((boxes[:, axis, 0], *others.T[::-1]))
    boxes, others = boxes[order], others[order]
    follows = (others[1:] == others[:-1]).all(axis=1)
    follows &= boxes[1:, axis, 0] == boxes[:-1, axis, 1]
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = boxes[starts].copy()
    joined[:, axis, 1] = boxes[np.append(starts[1:], len(boxes)) - 1, axis, 1]
    return joined


def clipped(boxes: Iterable[Box], limits: Sequence[Box]) -> Iterator[Box]:
    """Answer the parts of boxes that lie in others; none is empty."""
    for box in boxes:
        for limit in limits:
            part = tuple(
                (max(a, low), min(b, high)) for (a, b), (low, high) in zip(box, limit, strict=True)
            )
            if all(start < stop for start, stop in part):
                yield part

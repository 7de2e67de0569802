"""Boxes of cells: from conditions or changes to parts of a table, sized by rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    type Window = tuple[int, bytes]

__all__ = [
    "Box",
    "Grid",
    "boxes_of",
    "boxes_of_cells",
    "cells_of_chunks",
    "clipped",
    "cut",
    "grouped",
    "inside",
    "is_many",
    "kept_cells",
    "limited",
    "num_chunks",
    "num_rows",
    "outside",
    "runs",
    "spans_of",
    "windows",
]


type Span = tuple[int, int]
type Box = tuple[Span, ...]
"""Elements along each dimension, half-open."""

_MAX_BOXES: Final = 1024


def num_rows(box: Box) -> int:
    """Count the cells of a box."""
    return prod(stop - start for start, stop in box)


def num_chunks(boxes: Iterable[Box], chunks: Sequence[int]) -> int:
    """Count the chunks that boxes touch."""
    return sum(
        prod(
            -(-stop // size) - start // size
            for (start, stop), size in zip(box, chunks, strict=True)
        )
        for box in boxes
    )


def spans_of(mask: npt.NDArray[np.bool_], chunk: int) -> list[Span]:
    """Return the ranges of one dimension that hold its matches.

    Chunks without a match lie in none; ranges end at the first and last match of their chunks.
    """
    starts = np.arange(0, len(mask), chunk)
    if not len(starts) or not mask.any():
        return []
    kept = np.concatenate([[False], np.logical_or.reduceat(mask, starts), [False]])
    edges = np.flatnonzero(kept[1:] != kept[:-1])
    spans: list[Span] = []
    for first, last in edges.reshape(-1, 2).tolist():
        matches = np.flatnonzero(mask[first * chunk : last * chunk])
        offset = first * chunk
        spans.append((offset + int(matches[0]), offset + int(matches[-1]) + 1))
    return spans


def boxes_of(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Return the boxes that ranges of each dimension make, in the order of the array's cells.

    Where there would be very many, ranges are joined: a plan stays small, and more is read.
    """
    joined = [list(it) for it in spans]
    while prod(map(len, joined)) > _MAX_BOXES:
        longest = max(joined, key=len)
        joined[joined.index(longest)] = [(longest[0][0], longest[-1][1])]
    return list(product(*joined))


def cut(
    box: Box, chunks: Sequence[int], max_rows: int, breaks: Sequence[int] = ()
) -> Iterator[Box]:
    """Cut a box into parts of whole chunks with at most so many rows, or of one chunk.

    Args:
        box: what to cut; none of its parts is empty if it is not.
        chunks: elements of a chunk along each dimension.
        max_rows: rows of a part.
        breaks: places of the first dimension, ascending, where parts better end: where one
            manifest ends and another begins.
    """
    yield from _cut(box, chunks, max_rows, breaks, 0)


def _cut(
    box: Box, chunks: Sequence[int], max_rows: int, breaks: Sequence[int], axis: int
) -> Iterator[Box]:
    rows = num_rows(box)
    if not rows:
        return
    if rows <= max_rows or axis == len(box):
        yield box
        return
    start, stop = box[axis]
    row_per_element = rows // (stop - start)
    count = max(1, max_rows // (row_per_element * chunks[axis]))
    for part in _pieces(start, stop, chunks[axis], count, breaks if axis == 0 else ()):
        yield from _cut((*box[:axis], part, *box[axis + 1 :]), chunks, max_rows, (), axis + 1)


def _pieces(start: int, stop: int, chunk: int, count: int, breaks: Sequence[int]) -> Iterator[Span]:
    """Cut a range into runs of ``count`` chunks; one ends at a break that it has half-way."""
    while start < stop:
        end = (start // chunk + count) * chunk
        half = start + (end - start + 1) // 2
        place = int(np.searchsorted(breaks, end, side="right")) - 1
        if place >= 0 and breaks[place] >= half:
            end = breaks[place]
        yield start, min(end, stop)
        start = end


def grouped(boxes: Iterable[Box], max_rows: int) -> Iterator[tuple[Box, ...]]:
    """Put small boxes together, in order, until they have so many rows."""
    group: list[Box] = []
    rows = 0
    for box in boxes:
        if group and rows + num_rows(box) > max_rows:
            yield tuple(group)
            group, rows = [], 0
        group.append(box)
        rows += num_rows(box)
    if group:
        yield tuple(group)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a table, and the chunks they are stored in."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Of the array with the coarsest ones; the last one along a dimension may be smaller."""
    breaks: tuple[int, ...] = ()

    def parts(
        self, masks: Sequence[npt.NDArray[np.bool_] | None], max_rows: int
    ) -> list[tuple[Box, ...]]:
        """Return groups of boxes, each for one partition.

        Args:
            masks: for each dimension what may match; None is all of it.
            max_rows: rows of a partition; more only where one chunk has more.
        """
        spans: list[list[Span]] = []
        for length, chunk, mask in zip(self.shape, self.chunks, masks, strict=True):
            whole = [(0, length)] if length else []
            spans.append(whole if mask is None else spans_of(mask, chunk))
        parts = (
            part for box in boxes_of(spans) for part in cut(box, self.chunks, max_rows, self.breaks)
        )
        return list(grouped(parts, max_rows))


def runs(mask: npt.NDArray[np.bool_]) -> list[Span]:
    """Return the ranges where a mask is true."""
    padded = np.concatenate([[False], mask, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
    return [(start, stop) for start, stop in edges.tolist()]


def is_many(kept: Sequence[npt.NDArray[np.bool_]]) -> bool:
    """Return whether masks make more boxes than a plan should have."""
    return prod(max(1, len(runs(mask))) for mask in kept) > _MAX_BOXES


def limited(kept: Sequence[npt.NDArray[np.bool_]], *, instead: bool) -> list[npt.NDArray[np.bool_]]:
    """Return masks that make few boxes: where they would make many, a dimension is all one.

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
    """Return the part of each mask that boxes span, as plain data of a bit for each place."""
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
    """Return the boxes of places that every dimension keeps."""
    return list(product(*map(runs, kept)))


def outside(kept: Sequence[npt.NDArray[np.bool_]], shape: Sequence[int]) -> Iterator[Box]:
    """Return the boxes of places that some dimension does not keep; none twice.

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
    """Return which cells of a table's grid some chunks of an array lie in; ``(n, dimensions)``.

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
    """Return the parts of boxes that lie in others; none is empty."""
    for box in boxes:
        for limit in limits:
            part = tuple(
                (max(a, low), min(b, high)) for (a, b), (low, high) in zip(box, limit, strict=True)
            )
            if all(start < stop for start, stop in part):
                yield part

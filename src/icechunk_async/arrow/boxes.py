"""Boxes of cells: made from conditions or changes, and cut into parts of a table by size."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass

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
"""A half-open range along each dimension."""

# Plans are kept in one process, and travel: a filter that matches every second index must not make
# one as large as the data.
_MAX_BOXES: Final = 1024


def num_rows(box: Box) -> int:
    """Return the number of cells of a box."""
    return prod(stop - start for start, stop in box)


def num_chunks(boxes: Iterable[Box], chunks: Sequence[int]) -> int:
    """Return the number of chunks that boxes touch."""
    return sum(
        prod(
            -(-stop // size) - start // size
            for (start, stop), size in zip(box, chunks, strict=True)
        )
        for box in boxes
    )


def spans_of(mask: npt.NDArray[np.bool_], chunk: int) -> list[Span]:
    """Return ranges of one dimension that cover all matches of a mask.

    Chunks without a match are in no range. Each range begins and ends at a match.
    """
    starts = np.arange(0, len(mask), chunk)
    if not len(starts) or not mask.any():
        return []
    # With chunks of 4, matches at 1, 2 and 9 keep chunks 0 and 2. The spans are [1, 3) and [9, 10).
    kept = np.concatenate([[False], np.logical_or.reduceat(mask, starts), [False]])
    edges = np.flatnonzero(kept[1:] != kept[:-1])
    spans: list[Span] = []
    for first, last in edges.reshape(-1, 2).tolist():
        matches = np.flatnonzero(mask[first * chunk : last * chunk])
        offset = first * chunk
        spans.append((offset + int(matches[0]), offset + int(matches[-1]) + 1))
    return spans


def boxes_of(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Return the product of the ranges of each dimension as boxes, in C order.

    If there would be too many, ranges are joined: the plan stays small, and more is read.
    """
    joined = [list(it) for it in spans]
    while prod(map(len, joined)) > _MAX_BOXES:
        # The dimension with the most ranges becomes one range from its first to its last.
        longest = max(joined, key=len)
        joined[joined.index(longest)] = [(longest[0][0], longest[-1][1])]
    return list(product(*joined))


def cut(
    box: Box, chunks: Sequence[int], max_rows: int, breaks: Sequence[int] = ()
) -> Iterator[Box]:
    """Cut a box into parts of whole chunks with at most `max_rows` rows, or of one chunk.

    Args:
        box: the box; if it is not empty, no part is.
        chunks: shape of the chunks.
        max_rows: rows of a part.
        breaks: ascending indices of the first dimension at which parts should rather end: the
            boundaries between manifests.
    """
    yield from _cut(box, chunks, max_rows, breaks, 0)


def _cut(
    box: Box, chunks: Sequence[int], max_rows: int, breaks: Sequence[int], axis: int
) -> Iterator[Box]:
    rows = num_rows(box)
    if not rows:
        return
    # Small enough, or cut along every axis: then it is one chunk, which is never divided.
    if rows <= max_rows or axis == len(box):
        yield box
        return
    start, stop = box[axis]
    row_per_element = rows // (stop - start)
    # Whole runs of the first axes: parts are long along the last ones, where cells lie side by
    # side.
    count = max(1, max_rows // (row_per_element * chunks[axis]))
    for part in _pieces(start, stop, chunks[axis], count, breaks if axis == 0 else ()):
        yield from _cut((*box[:axis], part, *box[axis + 1 :]), chunks, max_rows, (), axis + 1)


def _pieces(start: int, stop: int, chunk: int, count: int, breaks: Sequence[int]) -> Iterator[Span]:
    """Cut a range into runs of `count` chunks; a run ends at a break in its second half."""
    while start < stop:
        # At a multiple of the chunk, also if the range begins within one: 5 of chunks of 4 ends at
        # 8.
        end = (start // chunk + count) * chunk
        # In the second half only, so that many small manifests do not make many small parts.
        half = start + (end - start + 1) // 2
        place = int(np.searchsorted(breaks, end, side="right")) - 1
        if place >= 0 and breaks[place] >= half:
            end = breaks[place]
        yield start, min(end, stop)
        start = end


def grouped(boxes: Iterable[Box], max_rows: int) -> Iterator[tuple[Box, ...]]:
    """Group boxes in order, each group with at most `max_rows` rows or one box."""
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
    """The cells of a table, and the chunks in which they are stored."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """The largest chunks of all arrays; the last one along a dimension may be smaller."""
    breaks: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.chunks, strict=True))

    def boxes_of_chunks(self, kept: npt.NDArray[np.bool_]) -> list[Box]:
        """Return disjoint boxes that cover exactly the chunks of a mask, in C order."""
        joined = boxes_of_cells(np.argwhere(kept)) if self.shape else np.zeros((1, 0, 2), np.int64)
        sizes = np.array(self.chunks, np.int64).reshape(-1, 1)
        ends = np.array(self.shape, np.int64).reshape(-1, 1)
        cells = np.minimum(joined * sizes, ends)
        return [tuple((start, stop) for start, stop in box) for box in cells.tolist()]

    def parts(
        self, masks: Sequence[npt.NDArray[np.bool_] | None], max_rows: int
    ) -> Iterator[tuple[Box, ...]]:
        """Return groups of boxes, each for one partition, made one by one.

        Args:
            masks: for each dimension the indices that may match; None for all.
            max_rows: rows of a partition; more only if one chunk has more.
        """
        spans: list[list[Span]] = []
        for length, chunk, mask in zip(self.shape, self.chunks, masks, strict=True):
            whole = [(0, length)] if length else []
            spans.append(whole if mask is None else spans_of(mask, chunk))
        parts = (
            part for box in boxes_of(spans) for part in cut(box, self.chunks, max_rows, self.breaks)
        )
        return grouped(parts, max_rows)


def runs(mask: npt.NDArray[np.bool_]) -> list[Span]:
    """Return the ranges in which a mask is true."""
    padded = np.concatenate([[False], mask, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
    return [(start, stop) for start, stop in edges.tolist()]


def is_many(kept: Sequence[npt.NDArray[np.bool_]]) -> bool:
    """Return whether masks make more boxes than a plan should have."""
    return prod(max(1, len(runs(mask))) for mask in kept) > _MAX_BOXES


def limited(kept: Sequence[npt.NDArray[np.bool_]], *, instead: bool) -> list[npt.NDArray[np.bool_]]:
    """Return masks that make few boxes, by setting whole dimensions to one value.

    Args:
        kept: the masks.
        instead: the value. The boxes then cover too many cells, and readers of the boxes leave
            out cells by what `windows` returns.
    """
    masks = list(kept)
    while is_many(masks):
        worst = max(range(len(masks)), key=lambda axis: len(runs(masks[axis])))
        masks[worst] = np.full_like(masks[worst], instead)
    return masks


def windows(kept: Sequence[npt.NDArray[np.bool_]], boxes: Sequence[Box]) -> tuple[Window, ...]:
    """Return the part of each mask that boxes span, packed as one bit for each index."""
    found: list[Window] = []
    for axis, mask in enumerate(kept):
        start = min(box[axis][0] for box in boxes)
        stop = max(box[axis][1] for box in boxes)
        found.append((start, np.packbits(mask[start:stop]).tobytes()))
    return tuple(found)


def kept_cells(kept: Sequence[Window], box: Box) -> npt.NDArray[np.bool_]:
    """Return a mask of the cells of a box, in C order, that every dimension keeps."""
    cells = np.ones((), np.bool_)
    for (first, packed), (start, stop) in zip(kept, box, strict=True):
        # Indices beyond the end of a mask are not kept.
        bits = np.zeros(stop - start, np.bool_)
        known = np.unpackbits(np.frombuffer(packed, np.uint8))[start - first : stop - first]
        bits[: len(known)] = known
        cells = cells[..., np.newaxis] & bits
    return cells.reshape(-1)


def inside(kept: Sequence[npt.NDArray[np.bool_]]) -> list[Box]:
    """Return the boxes of cells that every dimension keeps."""
    return list(product(*map(runs, kept)))


def outside(kept: Sequence[npt.NDArray[np.bool_]], shape: Sequence[int]) -> Iterator[Box]:
    """Return disjoint boxes of the cells that some dimension does not keep.

    Args:
        kept: for each dimension a mask of its first indices; later ones are not kept.
        shape: shape of the whole.
    """
    for axis, (mask, length) in enumerate(zip(kept, shape, strict=True)):
        lost = np.ones(length, np.bool_)
        lost[: len(mask)] = ~mask
        before = [runs(it) for it in kept[:axis]]
        after = [[(0, size)] for size in shape[axis + 1 :]]
        # Each cell is in one box: that of its first axis that does not keep it. Axes before are
        # kept, and those after may be either.
        yield from product(*before, runs(lost), *after)


def cells_of_chunks(
    chunks: npt.NDArray[np.integer],
    sizes: Sequence[int],
    axes: Sequence[int],
    grid: Sequence[int],
    shape: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Return the chunks of a table's grid that overlap chunks of an array; `(n, dimensions)`.

    Args:
        chunks: coordinates of the array's chunks, `(n, rank)`.
        sizes: chunk shape of the array.
        axes: for each axis of the array the number of the table's dimension, each once.
        grid: chunk shape of the table, at least as large as that of the array.
        shape: shape of the table; chunks outside are left out.
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
    # A chunk of the array is not larger than one of the grid, so it overlaps at most two along
    # each dimension: those of its first and its last element.
    sides = product(*([first[:, axis], last[:, axis]] for axis in range(len(grid))))
    return np.unique(np.concatenate([np.stack(side, axis=1) for side in sides]), axis=0)


def boxes_of_cells(cells: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Join cells into half-open boxes that cover exactly these; `(n, dimensions, 2)`.

    Args:
        cells: distinct coordinates, `(n, dimensions)`.
    """
    found = np.stack([cells, cells.astype(np.int64) + 1], axis=2).astype(np.int64)
    # Along the last axis first, as C order has neighbours there: (0, 0), (0, 1), (1, 0), (1, 1)
    # become two rows, and these one box.
    for axis in reversed(range(found.shape[1])):
        found = _joined(found, axis)
    return found


def _joined(boxes: npt.NDArray[np.int64], axis: int) -> npt.NDArray[np.int64]:
    """Join boxes that are adjacent along one axis and equal along the others."""
    if len(boxes) < 2:
        return boxes
    others = np.delete(boxes, axis, axis=1).reshape(len(boxes), -1)
    # The last key counts most: sorted by the other axes, then along this one, so that neighbours
    # are adjacent rows.
    order = np.lexsort((boxes[:, axis, 0], *others.T[::-1]))
    boxes, others = boxes[order], others[order]
    follows = (others[1:] == others[:-1]).all(axis=1)
    follows &= boxes[1:, axis, 0] == boxes[:-1, axis, 1]
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    joined = boxes[starts].copy()
    joined[:, axis, 1] = boxes[np.append(starts[1:], len(boxes)) - 1, axis, 1]
    return joined


def clipped(boxes: Iterable[Box], limits: Sequence[Box]) -> Iterator[Box]:
    """Return the non-empty intersections of boxes with some limits."""
    for box in boxes:
        for limit in limits:
            part = tuple(
                (max(a, low), min(b, high)) for (a, b), (low, high) in zip(box, limit, strict=True)
            )
            if all(start < stop for start, stop in part):
                yield part

"""From conditions on coordinates to parts of a table: boxes of whole chunks, sized by rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

__all__ = ["Box", "Grid", "boxes_of", "cut", "grouped", "num_chunks", "num_rows", "spans_of"]

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
    """Answer the ranges of one dimension that hold its matches.

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
    """Answer the boxes that ranges of each dimension make, in the order of the array's cells.

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
        """Answer groups of boxes, each for one partition.

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

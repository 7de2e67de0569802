"""Copy tables of one file into a vector of another, with new ones between them.

In files that we write each table is a block of bytes that depends on nothing else, and blocks
follow one another in order. All that lies between two new tables is copied in one piece, and the
result is the same, byte for byte, as if all tables had been written anew.

Other writers let tables share things, such as vtables, and put them in another order. The region
that holds all of their tables is copied in one piece, and new tables are put before it.

A table can be copied unchanged with all that it refers to, its span, if that overlaps no other:
offsets are relative, so nothing in it depends on where it goes, provided that the new place is as
well aligned as the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.flatbuffers.buffer import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.blocks import Part
    from icechunk_async.format.flatbuffers.buffer import Positions
    from icechunk_async.format.flatbuffers.reading import Tables, Vectors

__all__ = ["FEWEST_COPIED", "NewTable", "Source", "Spans", "Spliced", "place_before", "weave"]

FEWEST_COPIED: Final = 32
"""To write fewer tables anew takes no longer than to look where the old ones lie."""
_MAX_WASTE: Final = 4
"""Of what is copied from other writers' files, one part in four may be something else, such as
tables that were replaced. Beyond that all tables are written anew."""
_BLOCK_BYTES: Final = 8
"""Blocks are multiples of this long, and lie at multiples of it."""
_HEAD_BYTES: Final = 4
"""The offset to its vtable that a table begins with, or the two sizes that a vtable begins with."""
_PADDING: Final = 8
"""The most zeros at the end of a block that we write."""


class Spans:
    """The lowest and the highest place of each of some tables; grows as parts are added."""

    def __init__(self, tables: Tables, *, vtables: bool) -> None:
        """Begin with the tables themselves, and with their vtables if those are to be copied too.

        Many tables may share a vtable, and then lie far from it.
        """
        # Of tables and vtables four bytes are read, whatever size those declare.
        table_sizes, vtable_sizes = (np.maximum(it, _HEAD_BYTES) for it in tables.sizes())
        self.low: Positions = np.array(tables.positions)
        self.high: Positions = self.low + table_sizes
        if vtables:
            np.maximum(self.high, tables.vtable_places + vtable_sizes, out=self.high)
            np.minimum(self.low, tables.vtable_places, out=self.low)

    @classmethod
    def of(cls, vectors: Vectors, *, ended: bool = False) -> Self:
        """Begin with a vector of each table, which has one; as `cover`."""
        spans = cls.__new__(cls)
        starts = as_array(vectors.places)
        spans.low = starts - 4
        spans.high = starts + vectors.counts * vectors.item_size + ended
        return spans

    def overlap(self, others: Spans) -> npt.NDArray[np.bool_]:
        """Return which rows have bytes in common with the same row of others."""
        found: npt.NDArray[np.bool_] = (self.low < others.high) & (others.low < self.high)
        return found

    @property
    def are_blocks(self) -> bool:
        """Whether tables lie in order, each by itself in a block, as in the files that we write."""
        gaps = self.low[1:] - self.high[:-1]
        aligned = not (self.low & (_PADDING - 1)).any()
        return aligned and bool(((gaps >= 0) & (gaps <= _PADDING)).all())

    def cover(self, vectors: Vectors, *, ended: bool = False) -> None:
        """Add a vector of each table, or a string, which is ``ended`` by a zero.

        Rows without one add nothing.
        """
        starts = as_array(vectors.places)
        # Rows without a vector start at 0, see `Tables.vector`.
        there = starts > 0
        ends = starts + vectors.counts * vectors.item_size + ended
        if there.all():
            np.minimum(self.low, starts - 4, out=self.low)
            np.maximum(self.high, ends, out=self.high)
        elif there.any():
            self.low[there] = np.minimum(self.low[there], starts[there] - 4)
            self.high[there] = np.maximum(self.high[there], ends[there])

    def cover_items(self, counts: Positions, items: Spans) -> None:
        """Add tables of a vector: ``counts`` of them for each table, one after the other."""
        rows = np.flatnonzero(counts)
        if len(rows) == 0:
            return
        # `reduceat` takes an empty slice for its first item, so tables without items are left out.
        firsts = (np.cumsum(counts) - counts)[rows]
        self.low[rows] = np.minimum(self.low[rows], np.minimum.reduceat(items.low, firsts))
        self.high[rows] = np.maximum(self.high[rows], np.maximum.reduceat(items.high, firsts))

    def cover_tables(self, rows: npt.NDArray[np.int64], others: Spans) -> None:
        """Add one other table to each of some tables."""
        self.low[rows] = np.minimum(self.low[rows], others.low)
        self.high[rows] = np.maximum(self.high[rows], others.high)


class NewTable(NamedTuple):
    """A table to be put among others."""

    place: int
    """Before which of the old ones, in the order of the vector."""
    data: bytes
    """Its block."""
    entry: int
    """Where offsets to it point."""


@dataclass(frozen=True, slots=True)
class Source:
    """The tables of a vector that may be copied."""

    payload: memoryview
    positions: Positions
    """Where the tables begin."""
    spans: Spans
    """Where their bytes lie, with their vtables."""


@dataclass(frozen=True, slots=True)
class Spliced:
    """The tables of a new vector."""

    parts: list[Part]
    """Their bytes, in pieces that follow one another."""
    positions: Positions
    """Where each of them begins, in their order."""
    shifts: Positions
    """For each of the old tables: how far its bytes are from where they were."""


def weave(source: Source, gone: npt.NDArray[np.bool_], new: Sequence[NewTable]) -> Spliced:
    """Put new tables where they belong among old ones, which lie in order, each by itself.

    Args:
        source: the old tables; see `Spans.are_blocks`.
        gone: those to leave out.
        new: the new ones, in order.
    """
    low, high = source.spans.low, source.spans.high
    out, shifts = _Parts(), np.zeros(len(gone), np.int64)
    positions: list[int] = []

    def copy(first: int, stop: int) -> None:
        start = low.item(first)
        # Up to where the next table begins, padding included: what is copied has the length of
        # whole blocks and stays aligned.
        end = low.item(stop) if stop < len(low) else high.item(stop - 1)
        shifts[first:stop] = out.add(source.payload[start:end]) - start

    left_out: list[int] = np.flatnonzero(gone).tolist()
    # New tables go before the old one at their place, also if that is left out.
    # False sorts before True: a new table precedes the old one that it replaces.
    steps = [(it.place, False, index) for index, it in enumerate(new)]
    at = 0
    for place, is_gone, index in sorted([*steps, *((it, True, 0) for it in left_out)]):
        if at < place:
            copy(at, place)
        at = place + is_gone
        if not is_gone:
            positions.append(out.add(new[index].data) + new[index].entry)
    if at < len(gone):
        copy(at, len(gone))
    moved = source.positions + shifts
    return Spliced(out.parts, _merged(moved, ~gone if left_out else None, new, positions), shifts)


def place_before(
    source: Source,
    bare: Spans,
    order: npt.NDArray[np.int64],
    gone: npt.NDArray[np.bool_],
    new: Sequence[NewTable],
) -> Spliced | None:
    """Put new tables before old ones, which are copied in one piece with what is between them.

    Args:
        source: the old tables.
        bare: their spans without vtables, which they may share.
        order: their rows in the order of the vector.
        gone: the rows to leave out.
        new: the new tables, in order.

    Returns:
        None if too much else would be copied, or nothing is left to copy.
    """
    kept = ~gone
    if not kept.any():
        return None
    # A multiple of 8, as the place where it goes: all that is in between keeps its alignment.
    start = int(source.spans.low[kept].min()) & -_BLOCK_BYTES
    end = int(source.spans.high[kept].max())
    used = int((bare.high - bare.low)[kept].sum())
    # Otherwise each commit would carry along what earlier ones replaced, and files would only grow.
    if (end - start) - used > (end - start) // _MAX_WASTE:
        return None
    out = _Parts()
    positions = [out.add(it.data) + it.entry for it in new]
    shifts = np.full(len(gone), out.add(source.payload[start:end]) - start)
    stays = ~gone[order]
    moved = (source.positions + shifts)[order]
    return Spliced(out.parts, _merged(moved, stays, new, positions), shifts)


def _merged(
    old: Positions,
    stays: npt.NDArray[np.bool_] | None,
    new: Sequence[NewTable],
    positions: list[int],
) -> Positions:
    """Return where all tables begin, in the order of the vector: those that stay, and new ones.

    ``stays`` is None if all do.
    """
    places = np.array([it.place for it in new], np.intp)
    if stays is not None:
        old = old[stays]
        # From a number among all old tables to one among those that stay: old 0 1 2 3 without 1,
        # and a new one before 2: it is placed before the second that stays, 1.
        places = np.concatenate([[0], np.cumsum(stays)])[places]
    places += np.arange(len(new))
    found = np.empty(len(old) + len(new), np.int64)
    is_old = np.ones(len(found), bool)
    is_old[places] = False
    found[places] = positions
    found[is_old] = old
    return found


class _Parts:
    """Pieces of a file, one after the other."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._size = 0

    def add(self, part: Part) -> int:
        """Append a piece, fill it up to the length of whole blocks, and return where it is."""
        at = self._size
        gap = -len(part) % _BLOCK_BYTES
        self.parts += [part, bytes(gap)] if gap else [part]
        self._size += len(part) + gap
        return at

"""Merge changes into the references of an array."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.format.manifest.chunk import Kind, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import Coordinates, Extents

__all__ = ["merge"]

_FEW: Final = 40
"""Up to here it is quicker to merge references one by one, and by far for a dozen."""
_FEW_CHANGED: Final = 16
"""So few are looked up one by one, however many references there are."""


def merge(parts: Sequence[ChunkRefs], changed: ChunkRefs, box: Extents) -> ChunkRefs:
    """Return references inside of a box as changes leave them, sorted by coordinates.

    Args:
        parts: references of one array, each of other chunks; those of other ranks are left out.
        changed: new references of the array, sorted, and deletions; all of them in the box.
        box: what else is kept.

    Cost: no Python object per reference if there are many. Where a few of them are replaced by
    others, a copy of each column that changes.
    """
    if parts and sum(map(len, parts)) + len(changed) <= _FEW:
        return _one_by_one(parts, changed, box)
    if len(parts) == 1 and len(changed) <= _FEW_CHANGED:
        replaced = _replaced(parts[0], changed, box)
        if replaced is not None:
            return replaced
    kept: list[ChunkRefs] = []
    for part in parts:
        keep = part.inside(box)
        if len(changed):  # deletions included, which are dropped below
            # Before joining, so that a reference which is replaced takes its location and bytes
            # along no further.
            keep &= ~rows_in(part.coords, changed.coords)
        kept.append(part if keep.all() else part.take(keep))
    there = changed.kinds != Kind.DELETED
    if not there.all():
        changed = changed.take(there)
    return ChunkRefs.concat([*kept, changed]).sort()


def _replaced(part: ChunkRefs, changed: ChunkRefs, box: Extents) -> ChunkRefs | None:
    """Return the references of a part, some replaced by others; None if more than that changes.

    Pools keep what is no longer referred to, as after `ChunkRefs.take`.
    """
    # Checksums, virtual references and deletions have more to merge. What is left are chunks that
    # were written again, the usual small update.
    if part.sums is not None or changed.sums is not None:
        return None
    native = changed.kinds == Kind.NATIVE
    if not (native | (changed.kinds == Kind.INLINE)).all():
        return None
    # A box that cuts something off, or rows out of order, of which `find` would miss some.
    if not part.inside(box).all() or part.sort() is not part:
        return None
    coords: list[list[int]] = changed.coords.tolist()
    rows: list[int] = []
    for each in coords:
        row = part.find(tuple(each))
        if row is None:
            return None
        rows.append(row)

    def column(name: str, moved: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        old: npt.NDArray[Any] = getattr(part, name)
        new: npt.NDArray[Any] = getattr(changed, name) if moved is None else moved
        if (old[rows] == new).all():  # often, and some columns take no memory
            return old
        old = np.array(old)
        old[rows] = new
        return old

    # The new pools follow the old ones.
    objects = np.where(native, changed.objects + np.uint32(len(part.chunk_ids)), np.uint32(0))
    offsets = changed.offsets + np.where(native, np.uint64(0), np.uint64(len(part.inline)))
    ids = [pool for pool in (part.chunk_ids, changed.chunk_ids) if len(pool)]
    return replace(
        part,
        kinds=column("kinds"),
        objects=column("objects", objects),
        offsets=column("offsets", offsets),
        lengths=column("lengths"),
        etags=column("etags"),
        modified=column("modified"),
        chunk_ids=np.concatenate(ids) if ids else part.chunk_ids,
        inline=memoryview(b"".join((part.inline, changed.inline))),
    )


def _one_by_one(parts: Sequence[ChunkRefs], changed: ChunkRefs, box: Extents) -> ChunkRefs:
    sources = [*(part for part in parts if part.rank == len(box)), changed]
    numbers: dict[Coordinates, int] = {}  # which of the references of all sources counts
    first = 0
    for source in sources:
        coords = map(tuple, source.coords.tolist())
        numbered = zip(coords, range(first, first + len(source)), strict=True)
        # The box limits old references alone: all new ones are in it. The later number wins, so a
        # new reference replaces an old one, and a deletion as well.
        is_old = source is not changed
        numbers.update(compress(numbered, source.inside(box).tolist()) if is_old else numbered)
        first += len(source)
    kinds = np.concatenate([source.kinds for source in sources])
    rows = np.array([numbers[coords] for coords in sorted(numbers)], np.intp)
    rows = rows[kinds[rows] != Kind.DELETED]
    if not len(rows):
        return ChunkRefs.empty(changed.rank)
    kinds = kinds[rows]
    if (kinds == Kind.VIRTUAL).any() or any(source.sums is not None for source in sources):
        return _collected(sources, rows)
    return _gathered(sources, rows, kinds)


def _collected(sources: Sequence[ChunkRefs], rows: npt.NDArray[np.intp]) -> ChunkRefs:
    """Return rows, numbered over all sources, of which each reference is made an object."""
    every = [(source, row) for source in sources for row in range(len(source))]
    numbers: list[int] = rows.tolist()
    chosen = [every[number] for number in numbers]
    coords = [tuple(source.coords[row].tolist()) for source, row in chosen]
    refs = [source.ref(row) for source, row in chosen]
    merged = ChunkRefs.from_mapping(sources[0].rank, dict(zip(coords, refs, strict=True)))
    cut = any(isinstance(ref, VirtualChunk) and ref.seconds_cut for ref in refs)
    return replace(merged, seconds_cut=True) if cut else merged


def _gathered(
    sources: Sequence[ChunkRefs], rows: npt.NDArray[np.intp], kinds: npt.NDArray[np.uint8]
) -> ChunkRefs:
    """Return rows, numbered over all sources, of inline and native references without sums."""

    def column(name: str) -> npt.NDArray[Any]:
        gathered: npt.NDArray[Any] = np.concatenate([getattr(it, name) for it in sources])[rows]
        return gathered

    columns: dict[str, Any] = {"lengths": column("lengths"), "offsets": column("offsets")}
    inline, native = kinds == Kind.INLINE, kinds == Kind.NATIVE
    if inline.any():
        every = [it.inline for it in sources for _ in range(len(it))]
        sizes = columns["lengths"][inline]
        numbers: list[int] = rows[inline].tolist()
        firsts: list[int] = columns["offsets"][inline].tolist()
        lengths: list[int] = sizes.tolist()
        places = zip(numbers, firsts, lengths, strict=True)
        data = b"".join([every[number][at : at + size] for number, at, size in places])
        columns["inline"] = memoryview(data)
        columns["offsets"][inline] = np.cumsum(sizes) - sizes
    if native.any():
        # Each source numbers its ids from zero. Pools without rows may have any width, and are left
        # out.
        pools = [it.chunk_ids for it in sources]
        before = accumulate(map(len, pools[:-1]), initial=0)
        moved = [it.objects + np.uint32(count) for it, count in zip(sources, before, strict=True)]
        ids = np.concatenate([pool for pool in pools if len(pool)])
        columns["chunk_ids"] = ids[np.concatenate(moved)[rows[native]]]
        columns["objects"] = np.zeros(len(rows), np.uint32)
        columns["objects"][native] = np.arange(len(columns["chunk_ids"]))
    return ChunkRefs.build(column("coords"), kinds, **columns)

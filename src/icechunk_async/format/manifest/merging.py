"""Merge changes into the references of an array."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Final

from icechunk_async.format.manifest.refs import ChunkRefs, Kind, VirtualChunk
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates, Extents

__all__ = ["merge"]

_FEW: Final = 40
"""Up to here it is quicker to merge references one by one, and by far for a dozen."""


def merge(parts: Sequence[ChunkRefs], changed: ChunkRefs, box: Extents) -> ChunkRefs:
    """Return references inside of a box as changes leave them, sorted by coordinates.

    Args:
        parts: references of one array, each of other chunks; those of other ranks are left out.
        changed: new references of the array, sorted, and deletions; all of them in the box.
        box: what else is kept.

    Cost: no Python object per reference if there are many.
    """
    if parts and sum(map(len, parts)) + len(changed) <= _FEW:
        return _one_by_one(parts, changed, box)
    kept: list[ChunkRefs] = []
    for part in parts:
        keep = part.inside(box)
        if len(changed):  # deletions included, which are dropped below
            keep &= ~rows_in(part.coords, changed.coords)
        kept.append(part if keep.all() else part.take(keep))
    there = changed.kinds != Kind.DELETED
    if not there.all():
        changed = changed.take(there)
    return ChunkRefs.concat([*kept, changed]).sort()


def _one_by_one(parts: Sequence[ChunkRefs], changed: ChunkRefs, box: Extents) -> ChunkRefs:
    refs: dict[Coordinates, ChunkRef | None] = {}
    for part in parts:
        refs.update(compress(_items(part), part.inside(box).tolist()))
    refs.update(_items(changed))
    left = {coords: refs[coords] for coords in sorted(refs) if refs[coords] is not None}
    if not left:
        return ChunkRefs.empty(changed.rank)
    merged = ChunkRefs.from_mapping(changed.rank, left)
    cut = any(isinstance(ref, VirtualChunk) and ref.seconds_cut for ref in left.values())
    return replace(merged, seconds_cut=True) if cut else merged


def _items(refs: ChunkRefs) -> Iterator[tuple[Coordinates, ChunkRef | None]]:
    for row, coords in enumerate(refs.coords.tolist()):
        yield tuple(coords), refs.ref(row)

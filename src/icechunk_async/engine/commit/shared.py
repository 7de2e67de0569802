"""Decide which arrays share a manifest, and when those that stayed in an old one move out.

A manifest may hold the references of several arrays. A commit that writes many small arrays puts
them together, so that it stores a few objects and not one for each. Pure: takes references, and
returns groups of them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import ArrayData

__all__ = [
    "MOST_REFS",
    "MOST_REFS_OF_ONE",
    "Waiting",
    "grouped",
    "is_mostly_garbage",
    "length_for_appends",
    "may_share",
    "size_of",
]

# The bounds and their reasons: decision 32.
MOST_REFS: Final = 1000
"""References in a shared manifest. Readers preload coordinates from manifests up to this size."""
_MOST_ARRAYS: Final = 64
_MOST_BYTES: Final = 1 << 16
"""Bytes of a shared manifest before it is compressed, roughly: a reader of one array gets all."""
MOST_REFS_OF_ONE: Final = 100
_MOST_BYTES_OF_ONE: Final = 1 << 14
_REFS_OF_LAST_CELLS: Final = 2048
"""References that all last cells of an archive have together, at most: some 32 KB."""
_BYTES_PER_REF: Final = 44
"""The bytes of a reference in a file besides inline bytes and its location."""


def length_for_appends(arrays: Iterable[ArrayData], dimension: str) -> int | None:
    """Return the chunks along a growing dimension that a manifest should span.

    An append writes the last cells of all arrays: they should be few references, and those of
    each array few enough to share. None if no array has the dimension.
    """
    of_a_step = [
        prod(
            max(1, chunks)
            for chunks, name in zip(array.grid, array.dimension_names, strict=True)
            if name != dimension
        )
        for array in arrays
        if array.dimension_names is not None and dimension in array.dimension_names
    ]
    if not of_a_step:
        return None
    # Those that cannot share even for one step need not be short for it.
    # 100 arrays of one chunk a step: 2048 // 100 = 20 steps, below the 100 that an array may share.
    shared = MOST_REFS_OF_ONE // max(of_a_step) or _REFS_OF_LAST_CELLS
    return max(1, min(shared, _REFS_OF_LAST_CELLS // sum(of_a_step)))


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """All references of one array, or of a cell of it, which wait for a manifest."""

    node_id: NodeId
    refs: ChunkRefs
    size_bytes: int
    """Their size in a file, roughly."""
    replaces: bool
    """Whether the array had others before, so that it is likely to change again."""


def may_share(refs: ChunkRefs) -> int | None:
    """Return the bytes that references take in a shared manifest; None if they are too many."""
    kinds = refs.kinds
    inline = kinds == Kind.INLINE
    size = size_of(len(refs), int(refs.lengths[inline].sum()) if inline.any() else 0)
    if size is None:
        return None
    virtual = kinds == Kind.VIRTUAL
    if virtual.any():
        for pool, used in (
            (refs.locations, refs.objects[virtual]),
            (refs.etag_pool, refs.etags[virtual]),
        ):
            size += sum(len(pool.get(it)) for it in set(used.tolist()) if it >= 0)
    return size if size <= _MOST_BYTES_OF_ONE else None


def size_of(count: int, inline_bytes: int) -> int | None:
    """Return the bytes of references without locations; as `may_share`."""
    size = _BYTES_PER_REF * count + inline_bytes
    return size if count <= MOST_REFS_OF_ONE and size <= _MOST_BYTES_OF_ONE else None


def grouped(waiting: Iterable[Waiting]) -> Iterator[list[Waiting]]:
    """Divide arrays among manifests, in the order given: neighbours are often read together."""
    group: list[Waiting] = []
    arrays: set[NodeId] = set()
    refs = size = 0
    for it in waiting:
        refs += len(it.refs)
        size += it.size_bytes
        full = len(group) == _MOST_ARRAYS or refs > MOST_REFS or size > _MOST_BYTES
        if group and (full or it.node_id in arrays):  # an array has all its references together
            yield group
            group, refs, size = [], len(it.refs), it.size_bytes
            arrays.clear()
        group.append(it)
        arrays.add(it.node_id)
    if group:
        yield group


def is_mostly_garbage(manifest: Manifest, used: Sequence[ChunkRefs]) -> bool:
    """Return whether less than half of a manifest is in use: of its references, or their bytes.

    Collection keeps all chunks that a manifest refers to, also for arrays that moved out of it.

    Args:
        manifest: all of it.
        used: the references of those arrays that still use it.
    """
    # Half, so that each reference that is moved is paid for by one that went: a commit writes at
    # most twice what changed.
    if 2 * sum(map(len, used)) < len(manifest):
        return True
    stored = sum(map(_native_bytes, manifest.arrays.values()))
    return 2 * sum(map(_native_bytes, used)) < stored


def _native_bytes(refs: ChunkRefs) -> int:
    return int(refs.lengths[refs.kinds == Kind.NATIVE].sum(dtype=np.uint64))

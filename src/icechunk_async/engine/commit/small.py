"""Find the references of small arrays after a commit, for all of them at once.

Most arrays of a large hierarchy are small, and a commit may touch a thousand of them. One by one
each takes dozens of calls of NumPy on a dozen references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.splitting import split_sizes
from icechunk_async.engine.commit.shared import MOST_REFS, MOST_REFS_OF_ONE, Waiting, size_of
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.several import merge_several

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.engine.changes.change_set import ArrayChanges
    from icechunk_async.format.config import ManifestSplittingConfig
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.snapshot import ManifestFileInfo, ManifestRef, Node

__all__ = ["Small", "merged", "small_array"]

_MOST_INLINE: Final = 1 << 20
"""Inline bytes of an array, from which it is merged by itself."""
_MOST_BYTES: Final = 1 << 17
"""Bytes of a stored manifest, from which its arrays are merged one by one: those of many arrays are
in memory together. Manifests that arrays share have half of it before they are compressed."""


@dataclass(frozen=True, slots=True)
class Small:
    """An array of few references, all of which are in one cell."""

    node_id: NodeId
    source: ManifestId | None
    """The manifest that has its references in the base; None if it has no references there."""
    changes: ArrayChanges
    grid: Coordinates


def small_array(
    node: Node,
    changes: ArrayChanges,
    old: Sequence[ManifestRef],
    manifests: Mapping[ManifestId, ManifestFileInfo],
    splitting: ManifestSplittingConfig | None,
) -> Small | None:
    """Return an array that is merged together with others; None if it may be large.

    Args:
        node: the array, as the session left it.
        changes: its changed chunks.
        old: its manifests in the base.
        manifests: all manifests of the base.
        splitting: how manifests are split.
    """
    array = node.array
    assert array is not None
    # What was cut off, or has other axes, needs the boxes of `plan_manifests`.
    if changes.kept_grid is not None or not 0 < changes.count() <= MOST_REFS_OF_ONE:
        return None
    grid = array.grid
    if splitting is not None:
        sizes = split_sizes(node.path, array, splitting)
        if any(chunks > size for chunks, size in zip(grid, sizes, strict=True)):
            return None
    if not old:
        return Small(node.id, None, changes, grid)
    info = manifests.get(old[0].manifest_id)
    # Several manifests are cells of an earlier rule, or were laid out by another writer. One that
    # is not listed is an error, which is raised where arrays are written one by one.
    if len(old) > 1 or info is None or info.num_chunk_refs > MOST_REFS:
        return None
    if info.size_bytes > _MOST_BYTES:
        return None
    return Small(node.id, info.id, changes, grid)


def merged(
    arrays: Iterable[Small], manifests: Mapping[ManifestId, Manifest]
) -> dict[NodeId, Waiting | None]:
    """Return the references of small arrays, None where nothing is left.

    Arrays are left out that turn out to be large, or to have virtual references.
    """
    by_rank: dict[int, list[tuple[Small, ChunkRefs, ChunkRefs]]] = {}
    for it in arrays:
        rank = len(it.grid)
        changed = it.changes.columns()
        if it.source is None:
            old = ChunkRefs.empty(rank)
        else:
            old = manifests[it.source].refs(it.node_id, rank)
        few = len(old) + len(changed) <= MOST_REFS_OF_ONE and len(old.inline) <= _MOST_INLINE
        if few and not len(old.locations) and not len(changed.locations):
            by_rank.setdefault(rank, []).append((it, old, changed))
    found: dict[NodeId, Waiting | None] = {}
    for alike in by_rank.values():
        # None if there are virtual references after all: then these arrays are left out, too.
        several = merge_several(
            [old for _, old, _ in alike],
            [changed for _, _, changed in alike],
            [it.grid for it, _, _ in alike],
        )
        for (it, _, _), (refs, inline_bytes) in zip(alike, several or (), strict=False):
            size_bytes = size_of(len(refs), inline_bytes)
            if len(refs) == 0:
                found[it.node_id] = None
            elif size_bytes is not None:
                replaces = it.source is not None
                found[it.node_id] = Waiting(it.node_id, refs, size_bytes, replaces)
    return found

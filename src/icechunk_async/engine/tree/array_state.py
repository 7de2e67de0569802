"""The chunks of one array at one moment: the base's manifests, and what the session changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.manifest.refs import Kind
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.manifest.refs import ChunkRefs, Extents
    from icechunk_async.format.snapshot import ManifestRef, Node, Snapshot

__all__ = ["ArrayState"]


@dataclass(frozen=True, slots=True)
class ArrayState:
    """The chunks of an array at one moment, unaffected by later changes."""

    node: Node
    """As the session sees it."""
    source: Node
    """As the base has it; as the session sees it if the array is new."""
    base: Snapshot
    manifests: tuple[ManifestRef, ...]
    """Of the base, in order of their boxes; none if the array has another number of axes now."""
    box: Extents
    """Where the base's chunks still count."""
    ours: ChunkRefs
    """References that the session set or deleted, in ascending order."""
    revision: int
    """Of the session's changes, see ``ArrayChanges``."""

    def counting(self, manifest: ManifestRef, refs: ChunkRefs) -> ChunkRefs:
        """Return those references of a manifest that the session did not replace or cut off."""
        keep = refs.inside(self.box)
        ours = self._ours_within(manifest)
        if len(ours):
            keep &= ~rows_in(refs.coords, ours)
        return refs if keep.all() else refs.take(keep)

    def _ours_within(self, manifest: ManifestRef) -> npt.NDArray[np.uint32]:
        """Return the coordinates of the session's changes that a manifest may have, too."""
        coords = self.ours.coords
        if not manifest.extents or not len(coords):
            return coords
        start, stop = np.searchsorted(coords[:, 0], manifest.extents[0])
        return coords[start:stop]

    def set_chunks(self) -> ChunkRefs:
        """Return the references that the session set."""
        return self.ours.take(self.ours.kinds != Kind.DELETED)

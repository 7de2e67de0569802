"""The chunks of one array: those that it has at one moment, and those that it can have.

It has those of the base's manifests, and what the session changed. The grid of its shape says which
it can have; chunks outside of that are refused when they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidCoordinatesError, InvalidInputError
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import Coordinates, Extents
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import ArrayData, ManifestRef, Node, Snapshot

__all__ = ["ArrayState", "bad_rank", "covers", "in_grid", "no_bytes", "outside"]


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
        from icechunk_async.format.manifest.row_index import rows_in  # noqa: PLC0415 -- on use

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
        # In ascending order, those within the extents of the first axis are a run.
        start, stop = np.searchsorted(coords[:, 0], manifest.extents[0])
        return coords[start:stop]

    def set_chunks(self) -> ChunkRefs:
        """Return the references that the session set."""
        return self.ours.take(self.ours.kinds != Kind.DELETED)


def in_grid(coords: Coordinates, array: ArrayData) -> bool:
    """Return whether an array can have a chunk at ``coords``."""
    if len(coords) != len(array.dimensions):
        return False
    # A loop, because every chunk that is read or written comes through here, and `all` with a
    # generator takes nearly twice as long.
    for at, dimension in zip(coords, array.dimensions, strict=True):
        if not 0 <= at < dimension.num_chunks:
            return False
    return True


def covers(extents: Extents, coords: Coordinates) -> bool:
    """Return whether a box holds ``coords``; one of another number of axes does not."""
    if len(extents) != len(coords):
        return False
    for at, (start, stop) in zip(coords, extents, strict=True):  # noqa: SIM110 -- hot
        if not start <= at < stop:
            return False
    return True


def bad_rank(path: str, found: int, rank: int) -> InvalidCoordinatesError:
    """Return the error for coordinates with another number of axes than the array."""
    return InvalidCoordinatesError(
        f"A chunk of {path!r} was named by {found} coordinates, and the array has {rank} axes.",
        path=path,
    )


def outside(
    path: str, coords: Coordinates, grid: Coordinates, *, count: int = 1
) -> InvalidCoordinatesError:
    """Return the error for ``count`` chunks outside of the grid, ``coords`` the first of them."""
    more = f" ({count} such chunks)" if count > 1 else ""
    return InvalidCoordinatesError(
        f"Chunk {coords} lies outside of the grid of {path!r}, which has {grid} chunks{more}. "
        "Nothing was stored. Resize the array first.",
        path=path,
        coords=coords,
    )


def no_bytes(path: str) -> InvalidInputError:
    """Return the error for a chunk without bytes."""
    return InvalidInputError(
        f"A chunk of {path!r} was given no bytes. Delete the chunk instead, if it should hold "
        "fill values.",
        code="zero-length-chunk",
    )

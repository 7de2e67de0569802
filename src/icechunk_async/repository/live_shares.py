"""How much of each chunk object a snapshot refers to, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.format.chunk_refs import Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.chunk_refs import ChunkRefs
    from icechunk_async.format.id_set import Ids

    type Names = npt.NDArray[np.uint64]
    """The first eight bytes of ids. Two that are alike make a share wrong, and nothing else."""

__all__ = ["LiveShares"]


class LiveShares:
    """Objects with their lengths, and the bytes of each that are referred to."""

    def __init__(self, ids: Ids, sizes: npt.NDArray[np.int64]) -> None:
        """Begin with objects, ``(n, 12)`` and ``(n,)``, to which nothing refers."""
        names = _names(ids)
        order = np.argsort(names)
        self._names, self._sizes = names[order], sizes[order]
        self._live = np.zeros(len(names), np.int64)

    def count(self, refs: ChunkRefs) -> None:
        """Count the references of one array; bytes that several of them share count once."""
        rows, places = self._places(refs)
        ranges = np.stack(
            [places, refs.offsets[rows].astype(np.int64), refs.lengths[rows].astype(np.int64)]
        )
        distinct = np.unique(ranges, axis=1)
        np.add.at(self._live, distinct[0], distinct[2])

    def _places(self, refs: ChunkRefs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Answer which references are to these objects, and to which."""
        rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
        if not len(rows) or not len(self._names):
            return rows[:0], rows[:0]
        names = _names(refs.chunk_ids)[refs.objects[rows]]
        places = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
        known = self._names[places] == names
        return rows[known], places[known]

    def sparse(self, min_share: float) -> npt.NDArray[np.bool_]:
        """Answer which objects are referred to, but to less than this share of their bytes."""
        return (self._live > 0) & (self._live < min_share * self._sizes)

    def sizes(self, objects: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Answer how long some objects are together, and how much of them is referred to."""
        return int(self._sizes[objects].sum()), int(self._live[objects].sum())

    def within(self, refs: ChunkRefs, objects: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Answer which references are to some objects, in the order of their bytes there."""
        rows, places = self._places(refs)
        chosen = objects[places] & (refs.lengths[rows] > 0)  # else there is nothing to write anew
        rows, places = rows[chosen], places[chosen]
        return rows[np.lexsort((refs.offsets[rows], places))]


def _names(ids: npt.NDArray[Any]) -> Names:
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64)[:, 0]

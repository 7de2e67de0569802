"""Which objects the references of manifests need, as columns, each object once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from icechunk_async.format.chunk_refs import Kind, VirtualChunk
from icechunk_async.format.id_set import IdSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.format.chunk_refs import ChunkRefs
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.manifest import Manifest

    type Problem = Literal["missing", "too short", "changed", "unreadable"]
    type ObjectKind = Literal["snapshot", "transaction log", "manifest", "chunk", "virtual"]
    type VirtualObject = tuple[str, str | None, int]
    """Location, ETag, and time of the guard; 0 for none."""

__all__ = ["BrokenReference", "NeededChunks", "NeededObjects", "guarded", "needed_by"]


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """An object that is referred to and cannot serve those who do."""

    kind: ObjectKind
    location: str
    """Its key in the repository; its URL where it is virtual."""
    problem: Problem
    detail: str
    references: int
    """How many chunks refer to it, in all manifests; 0 where it holds no chunks."""


@dataclass(frozen=True, slots=True)
class NeededChunks:
    """Chunk objects of the repository, ascending by id."""

    ids: Ids
    """``(n, 12)``."""
    sizes: npt.NDArray[np.uint64]
    """How many bytes each must have at least."""
    counts: npt.NDArray[np.int64]
    """How many references there are to each."""

    @classmethod
    def joined(cls, parts: Sequence[NeededChunks]) -> Self:
        """Answer the objects of all parts, each once."""
        ids = np.concatenate([np.empty((0, 12), np.uint8), *(it.ids for it in parts)])
        sizes = np.concatenate([np.empty(0, np.uint64), *(it.sizes for it in parts)])
        counts = np.concatenate([np.empty(0, np.int64), *(it.counts for it in parts)])
        found = IdSet()
        found.add(ids)
        rows = found.find(ids)
        most = np.zeros(len(found), np.uint64)
        total = np.zeros(len(found), np.int64)
        np.maximum.at(most, rows, sizes)
        np.add.at(total, rows, counts)
        return cls(found.ids(), most, total)

    def take(self, rows: npt.NDArray[Any]) -> NeededChunks:
        """Answer some of the objects."""
        return NeededChunks(self.ids[rows], self.sizes[rows], self.counts[rows])


@dataclass(frozen=True, slots=True)
class NeededObjects:
    """All objects that chunks need."""

    chunks: NeededChunks
    virtual: dict[VirtualObject, tuple[int, int]]
    """For each: how many bytes it must have at least, and how many references there are to it."""

    @classmethod
    def joined(cls, parts: Iterable[NeededObjects]) -> Self:
        """Answer the objects of all parts, each once."""
        given = list(parts)
        virtual: dict[VirtualObject, tuple[int, int]] = {}
        for part in given:
            for it, (size, count) in part.virtual.items():
                known = virtual.get(it, (0, 0))
                virtual[it] = (max(size, known[0]), count + known[1])
        return cls(NeededChunks.joined([it.chunks for it in given]), virtual)


def needed_by(manifest: Manifest) -> NeededObjects:
    """Answer what one manifest refers to, of whatever array and rank."""
    refs = [*manifest.arrays.values(), *manifest.strays.values()]
    native = NeededChunks.joined([_native(it) for it in refs])
    return NeededObjects.joined(
        [NeededObjects(native, {}), *(NeededObjects(_NONE, _virtual(it)) for it in refs)]
    )


_NONE = NeededChunks(np.empty((0, 12), np.uint8), np.empty(0, np.uint64), np.empty(0, np.int64))


def _native(refs: ChunkRefs) -> NeededChunks:
    rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
    ends = refs.offsets[rows] + refs.lengths[rows]
    return NeededChunks(
        refs.chunk_ids[refs.objects[rows]], ends.astype(np.uint64), np.ones(len(rows), np.int64)
    )


def _virtual(refs: ChunkRefs) -> dict[VirtualObject, tuple[int, int]]:
    rows = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
    if not len(rows):
        return {}
    places, pool = refs.locations.distinct()
    states = np.stack(
        [places[refs.objects[rows]].astype(np.int64), refs.etags[rows], refs.modified[rows]], axis=1
    )
    distinct, codes = np.unique(states, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    ends = np.zeros(len(distinct), np.uint64)
    np.maximum.at(ends, codes, refs.offsets[rows] + refs.lengths[rows])
    counts = np.bincount(codes)
    found: dict[VirtualObject, tuple[int, int]] = {}
    rows_of_states: list[list[int]] = distinct.tolist()
    for (place, etag, modified), end, count in zip(
        rows_of_states, ends.tolist(), counts.tolist(), strict=True
    ):
        guard = refs.etag_pool.get(etag) if etag >= 0 else None
        key: VirtualObject = (pool.strings[place], guard, modified)
        known = found.get(key, (0, 0))
        found[key] = (max(end, known[0]), count + known[1])
    return found


def guarded(it: VirtualObject) -> VirtualChunk:
    """Answer a reference to a whole object with its guard."""
    location, etag, modified = it
    return VirtualChunk(location, 0, 0, etag, modified or None)

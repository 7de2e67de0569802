"""Ranges of objects that hold chunks, as columns: each once, however many snapshots need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.layout import chunk_key
from icechunk_async.format.manifest.chunk import Kind, VirtualChunk
from icechunk_async.format.manifest.refs import NO_ETAG

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.sums import Codes

    type VirtualObject = tuple[str, str | None, int, bool]
    """Location, ETag, and time of the guard, which is 0 for none and may be rounded down."""
    type Column = npt.NDArray[Any]

__all__ = [
    "NO_CODECS",
    "NO_SUM",
    "NeededObjects",
    "Pieces",
    "VirtualObject",
    "VirtualPieces",
    "guarded",
]

NO_CODECS: Final = (1 << 32) - 1
"""In a column of codecs: no array is known that needs these bytes."""
NO_SUM: Final = 0
"""In a column of checksums: none is known."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes ``[offset, offset + length)`` of chunk objects, ascending by object and offset.

    About 52 bytes of memory each.
    """

    ids: Ids
    """``(n, 12)``."""
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    codecs: npt.NDArray[np.uint32]
    """Which decoders are to accept the bytes: an index into a list that the caller keeps."""
    sums: Codes
    """Codes of checksums, see `format.crc`, or `NO_SUM`."""
    counts: npt.NDArray[np.int64]
    """The number of references to each."""
    manifests: npt.NDArray[np.uint32]
    """A manifest that refers to each: an index into a list that the caller keeps."""
    rows: npt.NDArray[np.uint32]
    """The reference in that manifest, counting through its arrays."""

    @classmethod
    def empty(cls) -> Self:
        """Return none."""
        none = np.empty(0, np.uint64)
        few = np.empty(0, np.uint32)
        many = np.empty(0, np.int64)
        return cls(np.empty((0, 12), np.uint8), none, none, few, none, many, few, few)

    @classmethod
    def of(cls, refs: ChunkRefs, *, codec: int, manifest: int, first_row: int) -> Self:
        """Return the native references of an array, repeated ones included.

        Args:
            refs: the references.
            codec: see ``codecs``.
            manifest: see ``manifests``.
            first_row: the number of references of the manifest before these.
        """
        rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
        count = len(rows)
        return cls(
            refs.chunk_ids[refs.objects[rows]].reshape(-1, ChunkId.size_bytes),
            refs.offsets[rows].astype(np.uint64),
            refs.lengths[rows].astype(np.uint64),
            np.full(count, codec, np.uint32),
            np.full(count, NO_SUM, np.uint64) if refs.sums is None else refs.sums[rows],
            np.ones(count, np.int64),
            np.full(count, manifest, np.uint32),
            (rows + first_row).astype(np.uint32),
        )

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.ids)

    def take(self, rows: Column) -> Pieces:
        """Return some of the pieces."""
        return Pieces(
            self.ids[rows],
            self.offsets[rows],
            self.lengths[rows],
            self.codecs[rows],
            self.sums[rows],
            self.counts[rows],
            self.manifests[rows],
            self.rows[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return the pieces of all parts, each once."""
        parts = [it for it in parts if len(it)]
        if not parts:
            return cls.empty()
        names = ("ids", "offsets", "lengths", "codecs", "sums", "counts", "manifests", "rows")
        whole = cls(*(np.concatenate([getattr(it, name) for it in parts]) for name in names))
        high, low = _columns(whole.ids)
        keys = (whole.sums, whole.codecs, whole.lengths, whole.offsets, low, high)
        # By object and offset, and then by what else differs: one range with two sums stays two
        # pieces, of which one will be found wrong.
        order = np.lexsort(keys)
        first = np.ones(len(order), bool)
        # One column at a time, so that no second copy of all of them is made.
        different = np.zeros(len(order) - 1, bool)
        for key in keys:
            different |= key[order][1:] != key[order][:-1]
        first[1:] = different
        starts = np.flatnonzero(first)
        merged = whole.take(order[starts])
        counts = np.add.reduceat(whole.counts[order], starts)
        return cls(
            merged.ids,
            merged.offsets,
            merged.lengths,
            merged.codecs,
            merged.sums,
            counts,
            merged.manifests,
            merged.rows,
        )

    def objects(self) -> Pieces:
        """Return one piece for each object, from its first byte to the last that is needed."""
        if not len(self):
            return self
        starts = np.flatnonzero(self.new_objects())
        # Offsets and lengths are below 2^63, see `format.manifest`, so their sum does not wrap.
        ends = np.maximum.reduceat(self.offsets + self.lengths, starts)
        found = self.take(starts)
        return Pieces(
            found.ids,
            np.zeros(len(starts), np.uint64),
            ends,
            found.codecs,
            found.sums,
            np.add.reduceat(self.counts, starts),
            found.manifests,
            found.rows,
        )

    def new_objects(self) -> npt.NDArray[np.bool_]:
        """Return which pieces are the first of their object."""
        first = np.ones(len(self), bool)
        first[1:] = np.any(self.ids[1:] != self.ids[:-1], axis=1)
        return first

    def draws(self, seed: int) -> npt.NDArray[np.uint64]:
        """Return a number for each piece that looks random, equal for equal seeds and pieces."""
        high, low = _columns(self.ids)
        # A hash of the piece, so that machines that share a verification draw the same.
        mixed = high ^ (low << np.uint64(32)) ^ _mix(self.offsets + np.uint64(seed & _MASK))
        return _mix(mixed)

    def key(self, row: int) -> str:
        """Return the key of a piece's object."""
        return chunk_key(ChunkId(self.ids[row].tobytes()))

    def after(self, cursor: str) -> Pieces:
        """Return the pieces of objects behind the one that a `cursor` stands for."""
        high, low = _columns(np.frombuffer(bytes.fromhex(cursor), np.uint8).reshape(1, 12))
        highs, lows = _columns(self.ids)
        return self.take(np.flatnonzero((highs > high) | ((highs == high) & (lows > low))))

    def cursor(self, row: int) -> str:
        """Return a text that stands for a piece's object and all before it."""
        raw: bytes = self.ids[row].tobytes()
        return raw.hex()


_MASK: Final = (1 << 63) - 1


def _columns(ids: Ids) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Split ids into numbers that are in the same order as the ids."""
    # Big-endian, so that numbers are in the order of bytes, which is that of keys.
    words = np.ascontiguousarray(ids).reshape(-1, ChunkId.size_bytes).view(">u4").astype(np.uint64)
    return words[:, 0] << np.uint64(32) | words[:, 1], words[:, 2]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble numbers (the finaliser of SplitMix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class VirtualPieces:
    """Ranges of objects outside of the repository, each once."""

    found: dict[VirtualObject, dict[tuple[int, int, int], tuple[int, int, int]]]
    """For each object: offset, length and codecs of its pieces, and for each of these the number
    of references, and a manifest and row as of `Pieces`."""

    @classmethod
    def of(
        cls, refs: ChunkRefs, *, codec: int, manifest: int, first_row: int, whole_objects: bool
    ) -> Self:
        """Return the virtual references of an array.

        ``whole_objects`` joins those of one object to one piece, from its first byte to the last
        that is needed. Other arguments as `Pieces.of`.
        """
        rows = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
        if not len(rows):
            return cls({})
        places, pool = refs.locations.distinct()
        offsets, lengths = (it[rows].astype(np.int64) for it in (refs.offsets, refs.lengths))
        etags, modified = refs.etags[rows].astype(np.int64), refs.modified[rows].astype(np.int64)
        columns = [places[refs.objects[rows]].astype(np.int64), etags, modified]
        if not whole_objects:
            columns += [offsets, lengths]
        # Rows that differ in location, guard or range, each once; `codes` tells which one each
        # reference is.
        distinct, first, codes = np.unique(
            np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True
        )
        codes = codes.reshape(-1)
        ends = np.zeros(len(distinct), np.int64)
        np.maximum.at(ends, codes, offsets + lengths)
        starts = np.zeros_like(ends) if whole_objects else distinct[:, 3]
        found: dict[VirtualObject, dict[tuple[int, int, int], tuple[int, int, int]]] = {}
        states: list[list[int]] = distinct[:, :3].tolist()
        for (place, etag, time), start, end, count, row in zip(
            states,
            starts.tolist(),
            ends.tolist(),
            np.bincount(codes).tolist(),
            rows[first].tolist(),
            strict=True,
        ):
            guard = refs.etag_pool.get(etag) if etag != NO_ETAG else None
            pieces = found.setdefault((pool.strings[place], guard, time, refs.seconds_cut), {})
            piece = (start, end - start, codec)
            known = pieces.get(piece, (0, 0, 0))[0]
            pieces[piece] = (known + count, manifest, first_row + row)
        return cls(found)

    @classmethod
    def joined(cls, parts: Iterable[VirtualPieces]) -> Self:
        """Return the pieces of all parts, each once."""
        found: dict[VirtualObject, dict[tuple[int, int, int], tuple[int, int, int]]] = {}
        for part in parts:
            for it, pieces in part.found.items():
                known = found.setdefault(it, {})
                for piece, (count, manifest, row) in pieces.items():
                    before = known.get(piece, (0, 0, 0))[0]
                    known[piece] = (before + count, manifest, row)
        return cls(found)

    def objects(self) -> dict[VirtualObject, tuple[int, int]]:
        """Return for each object the bytes that it must have, and the number of references."""
        return {
            it: (
                max(offset + length for offset, length, _ in pieces),
                sum(count for count, _, _ in pieces.values()),
            )
            for it, pieces in self.found.items()
        }


def guarded(it: VirtualObject, offset: int = 0, length: int = 0) -> VirtualChunk:
    """Return a reference to a part of an object, with its guard."""
    location, etag, modified, seconds_cut = it
    return VirtualChunk(location, offset, length, etag, modified or None, seconds_cut)


@dataclass(frozen=True, slots=True)
class NeededObjects:
    """The objects that manifests refer to."""

    native: Pieces
    virtual: VirtualPieces

    @classmethod
    def joined(cls, parts: Sequence[NeededObjects]) -> Self:
        """Return the objects of all parts, each piece once."""
        return cls(
            Pieces.joined([it.native for it in parts]),
            VirtualPieces.joined([it.virtual for it in parts]),
        )

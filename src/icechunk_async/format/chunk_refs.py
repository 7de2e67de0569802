"""References to the chunks of one array: NumPy columns, a row a chunk.

A reference says where the bytes of one chunk are: inline in the manifest, in a chunk object of
the repository (native), or in somebody else's object (virtual). Columns are never turned into
Python objects wholesale; :meth:`ChunkRefs.ref` makes one on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.flat_write import copy_pieces
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.locations import EMPTY_POOL, StringPool, merge_pools
from icechunk_async.format.row_index import RowIndex
from icechunk_async.format.single_refs import (
    NO_ETAG,
    ChunkRef,
    Coordinates,
    Extents,
    InlineChunk,
    Kind,
    NativeChunk,
    VirtualChunk,
    columns_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "ChunkRef",
    "ChunkRefs",
    "Coordinates",
    "Extents",
    "InlineChunk",
    "Kind",
    "NativeChunk",
    "VirtualChunk",
]

_NOTHING: Final = memoryview(b"")
_COLUMNS: Final = ("coords", "kinds", "objects", "offsets", "lengths", "etags", "modified")
_INLINE, _NATIVE, _VIRTUAL = map(int, (Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL))
"""Plain numbers, since each chunk that is read is compared with them."""


def _constant(value: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """Answer a column of one value, which takes no memory."""
    return np.broadcast_to(np.array(value, dtype), count)


@dataclass(frozen=True)
class ChunkRefs:
    """Columns of ``n`` references of one array of ``rank`` axes."""

    coords: npt.NDArray[np.uint32]
    """``(n, rank)``."""
    kinds: npt.NDArray[np.uint8]
    """:class:`Kind`, ``(n,)``."""
    objects: npt.NDArray[np.uint32]
    """Native: index into ``chunk_ids``. Virtual: index into ``locations``. Else unused."""
    offsets: npt.NDArray[np.uint64]
    """First byte in the object; for inline chunks, in ``inline``."""
    lengths: npt.NDArray[np.uint64]
    """Bytes of the chunk."""
    etags: npt.NDArray[np.int32]
    """Virtual: index into ``etag_pool``, or -1."""
    modified: npt.NDArray[np.uint32]
    """Virtual: seconds since the epoch, or 0."""
    chunk_ids: npt.NDArray[np.uint8] = field(
        default_factory=lambda: np.empty((0, ChunkId.size_bytes), np.uint8)
    )
    """``(k, 12)``."""
    locations: StringPool = EMPTY_POOL
    etag_pool: StringPool = EMPTY_POOL
    inline: memoryview = _NOTHING

    @classmethod
    def build(
        cls,
        coords: npt.NDArray[np.uint32],
        kinds: npt.NDArray[np.uint8] | Kind,
        **columns: Any,
    ) -> Self:
        """Make columns; those not given are constant."""
        count = len(coords)
        if isinstance(kinds, Kind):
            kinds = _constant(kinds, count, "u1")
        columns.setdefault("objects", _constant(0, count, "u4"))
        columns.setdefault("offsets", _constant(0, count, "u8"))
        columns.setdefault("lengths", _constant(0, count, "u8"))
        columns.setdefault("etags", _constant(NO_ETAG, count, "i4"))
        columns.setdefault("modified", _constant(0, count, "u4"))
        return cls(coords, kinds, **columns)

    @classmethod
    def empty(cls, rank: int) -> Self:
        """Answer no references."""
        return cls.build(np.empty((0, rank), np.uint32), Kind.NATIVE)

    @classmethod
    def from_mapping(cls, rank: int, refs: Mapping[Coordinates, ChunkRef | None]) -> Self:
        """Make columns of single references; None is a deleted chunk."""
        coords, kinds, columns = columns_of(rank, refs)
        return cls.build(coords, kinds, **columns)

    def __len__(self) -> int:
        """Count the references."""
        return len(self.coords)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return int(self.coords.shape[1])

    def ref(self, row: int) -> ChunkRef | None:
        """Answer one reference as an object; None if it is a deletion."""
        offset, length = self.offsets.item(row), self.lengths.item(row)
        kind = self.kinds.item(row)  # item() is several times as fast as indexing
        if kind == _NATIVE:
            chunk_id = ChunkId(self.chunk_ids[self.objects.item(row)].tobytes())
            return NativeChunk(chunk_id, offset, length)
        if kind == _INLINE:
            return InlineChunk(self.inline[offset : offset + length])
        if kind == _VIRTUAL:
            etag, modified = self.etags.item(row), self.modified.item(row)
            return VirtualChunk(
                self.locations.get(self.objects.item(row)),
                offset,
                length,
                None if etag == NO_ETAG else self.etag_pool.get(etag),
                modified or None,
            )
        return None

    def take(self, rows: npt.NDArray[Any] | slice) -> ChunkRefs:
        """Answer some rows: indices, a mask, or a slice, which copies nothing.

        Pools are shared with the original.
        """
        return replace(
            self,
            coords=self.coords[rows],
            kinds=self.kinds[rows],
            objects=self.objects[rows],
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            etags=self.etags[rows],
            modified=self.modified[rows],
        )

    def inside(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """Answer which references lie in a box; none in one of another number of axes."""
        if len(extents) != self.rank:
            return np.zeros(len(self), bool)
        within = np.ones(len(self), bool)
        for axis, (start, stop) in enumerate(extents) if len(self) else ():
            column = self.coords[:, axis]  # by far faster than all axes at once
            if start > int(column.min()):
                within &= column >= start
            if stop <= int(column.max()):
                within &= column < stop
        return within

    def extents(self) -> Extents:
        """Answer the smallest box that holds every reference; there must be one."""
        columns = (self.coords[:, axis] for axis in range(self.rank))
        return tuple((int(column.min()), int(column.max()) + 1) for column in columns)

    def find(self, coords: Coordinates) -> int | None:
        """Answer the row of a chunk; rows must be sorted, see :meth:`sort`.

        Cost: a few comparisons; constant time where the references fill their box.
        """
        return self._index.find(coords)

    @cached_property
    def _index(self) -> RowIndex:
        return RowIndex.of(self.coords)

    def sort(self) -> ChunkRefs:
        """Order rows by coordinates; of rows with equal coordinates the last one stays."""
        if len(self) < 2:
            return self
        if self.rank == 0:
            return self.take(np.array([len(self) - 1]))
        if self._index.ascending:  # mostly; and lookups want the index anyway
            return self
        order = np.lexsort(self.coords.T[::-1])
        ordered = self.coords[order]
        last = np.ones(len(order), bool)
        last[:-1] = np.any(ordered[1:] != ordered[:-1], axis=1)
        return self.take(order[last])

    def check_sorted(self) -> None:
        """Refuse rows that are not strictly ascending by coordinates."""
        if len(self) < 2:
            return
        if not self._index.ascending:
            raise FormatError(
                "The chunk references of a manifest are not in ascending order, or repeat."
            )

    @classmethod
    def concat(cls, parts: Sequence[ChunkRefs]) -> ChunkRefs:
        """Join references of one array; pools are joined and inline bytes are copied.

        Where nothing is left the result has the rank of the last part.
        """
        parts = [part for part in parts if len(part)] or parts[-1:]
        if len(parts) == 1:
            return parts[0]
        parts = [part.narrow().compact() for part in parts]
        location_maps, locations = merge_pools([part.locations for part in parts])
        etag_maps, etag_pool = merge_pools([part.etag_pool for part in parts])
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
        }
        begin = id_base = inline_base = 0
        for part, location_map, etag_map in zip(parts, location_maps, etag_maps, strict=True):
            end = begin + len(part)
            objects, offsets, etags = (
                columns[name][begin:end] for name in ("objects", "offsets", "etags")
            )
            if id_base:
                np.add(objects, np.uint32(id_base), out=objects, where=part.kinds == Kind.NATIVE)
            if inline_base:
                inline = part.kinds == Kind.INLINE
                np.add(offsets, np.uint64(inline_base), out=offsets, where=inline)
            if len(location_map):
                virtual = part.kinds == Kind.VIRTUAL
                objects[virtual] = location_map[objects[virtual]]
            if len(etag_map):
                guarded = etags != NO_ETAG
                etags[guarded] = etag_map[etags[guarded]]
            begin, id_base = end, id_base + len(part.chunk_ids)
            inline_base += len(part.inline)
        return cls.build(
            **columns,
            chunk_ids=np.concatenate([part.chunk_ids for part in parts]),
            locations=locations,
            etag_pool=etag_pool,
            inline=memoryview(b"".join([part.inline for part in parts])),
        )

    def narrow(self) -> ChunkRefs:
        """Drop what no row refers to from the pools, which :meth:`take` leaves whole."""
        ids, id_rows = _used(self.objects, self.kinds == Kind.NATIVE, len(self.chunk_ids))
        names, name_rows = _used(self.objects, self.kinds == Kind.VIRTUAL, len(self.locations))
        etags, etag_rows = _used(self.etags, self.etags != NO_ETAG, len(self.etag_pool))
        if id_rows is None and name_rows is None and etag_rows is None:
            return self
        return replace(
            self,
            objects=np.where(self.kinds == Kind.NATIVE, ids, names),
            etags=etags,
            chunk_ids=self.chunk_ids if id_rows is None else self.chunk_ids[id_rows],
            locations=self.locations if name_rows is None else self.locations.take(name_rows),
            etag_pool=self.etag_pool if etag_rows is None else self.etag_pool.take(etag_rows),
        )

    def compact(self) -> ChunkRefs:
        """Drop what no row refers to from the inline bytes, so that old buffers can go."""
        rows = np.flatnonzero(self.kinds == Kind.INLINE)
        used = int(self.lengths[rows].sum())
        if used == len(self.inline):
            return self
        offsets = np.array(self.offsets)
        starts, sizes = offsets[rows].astype(np.int64), self.lengths[rows].astype(np.int64)
        places = np.cumsum(sizes) - sizes
        packed = np.empty(used, np.uint8)
        copy_pieces(packed, places, np.frombuffer(self.inline, np.uint8), starts, sizes)
        offsets[rows] = places
        return replace(self, offsets=offsets, inline=packed.data)


def _used(
    indices: npt.NDArray[Any], chosen: npt.NDArray[np.bool_], size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64] | None]:
    """Renumber the chosen indices into a pool without its unused part.

    Returns:
        The indices, and which of the pool's ``size`` items stay; None if all do.
    """
    if size == 0:
        return indices, None
    used = np.zeros(size, bool)
    used[indices if chosen.all() else indices[chosen]] = True
    if used.all():
        return indices, None
    places = np.cumsum(used) - 1
    renumbered = np.array(indices)
    renumbered[chosen] = places[indices[chosen]]
    return renumbered, np.flatnonzero(used)

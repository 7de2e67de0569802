"""References to the chunks of one array: NumPy columns, one row a chunk.

A reference says where the bytes of one chunk are: inline in the manifest, in a chunk object of
the repository (native), or in somebody else's object (virtual). Columns are never turned into
Python objects wholesale; `ChunkRefs.ref` makes one on demand. Such
objects (`chunk`) are short-lived: results of lookups, or changes that are not in columns yet.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cache, cached_property
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.flatbuffers.writing import copy_pieces
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.locations import EMPTY_POOL, StringPool, Strings, merge_pools
from icechunk_async.format.manifest.row_index import RowIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates, Extents

    type _Rows = npt.NDArray[np.bool_] | slice

__all__ = [
    "NO_ETAG",
    "ChunkRefs",
    "columns_of",
    "constant",
    "disorder",
]


NO_ETAG: Final = -1
"""In a column of ETags: none."""


def columns_of(
    rank: int, refs: Mapping[Coordinates, ChunkRef | None]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], dict[str, Any]]:
    """Return coordinates, kinds, and by name all other columns of ``ChunkRefs`` that vary.

    Cost: a quarter of a microsecond for each native reference, since no step of the interpreter
    is taken for each reference and column.
    """
    coords = np.fromiter(chain.from_iterable(refs), np.uint32).reshape(len(refs), rank)
    kinds = np.fromiter(map(_KINDS.__getitem__, map(type, refs.values())), np.uint8, len(refs))
    return coords, kinds, _SingleColumns(list(refs.values()), kinds).fill()


_KINDS: Final[dict[type, Kind]] = {
    InlineChunk: Kind.INLINE,
    NativeChunk: Kind.NATIVE,
    VirtualChunk: Kind.VIRTUAL,
    type(None): Kind.DELETED,
}


class _SingleColumns:
    """Columns made of single references, those of each kind at once."""

    def __init__(self, refs: list[ChunkRef | None], kinds: npt.NDArray[np.uint8]) -> None:
        self._refs = refs
        self._kinds = kinds
        self._columns: dict[str, Any] = {}

    def fill(self) -> dict[str, Any]:
        """Return all columns but coordinates and kinds; what no kind needs is left out."""
        types = set(map(type, self._refs))
        for kind, fill in (
            (InlineChunk, self._inline),
            (NativeChunk, self._native),
            (VirtualChunk, self._virtual),
        ):
            if kind not in types:
                continue
            if len(types) == 1:
                fill(self._refs, slice(None))
            else:
                rows = self._kinds == _KINDS[kind]
                fill(list(compress(self._refs, rows.tolist())), rows)
        return self._columns

    def _column(self, name: str, dtype: str, default: int = 0) -> npt.NDArray[Any]:
        if name not in self._columns:
            self._columns[name] = np.full(len(self._refs), default, dtype)
        column: npt.NDArray[Any] = self._columns[name]
        return column

    def _inline(self, refs: list[Any], rows: _Rows) -> None:
        data = list(map(attrgetter("data"), refs))
        sizes = np.fromiter(map(len, data), np.uint64, len(data))
        self._column("lengths", "u8")[rows] = sizes
        self._column("offsets", "u8")[rows] = np.cumsum(sizes) - sizes
        # One after the other, in the order of rows: `offsets` are their places.
        self._columns["inline"] = memoryview(b"".join(data))

    def _native(self, refs: list[Any], rows: _Rows) -> None:
        # Ids have 12 bytes in the formats of the spec, and may have 16 in layouts before it.
        ids = np.frombuffer(b"".join(map(attrgetter("chunk_id"), refs)), np.uint8)
        width = len(refs[0].chunk_id) if refs else ChunkId.size_bytes
        if len(ids) != width * len(refs):
            raise InvalidInputError(
                "The ids of some chunk objects have another length: they are of another repository."
            )
        self._columns["chunk_ids"] = ids.reshape(len(refs), width)
        self._column("objects", "u4")[rows] = np.arange(len(refs))
        self._places(refs, rows)
        sums = np.fromiter(map(attrgetter("sum"), refs), np.uint64, len(refs))
        if sums.any():
            self._column("sums", "u8")[rows] = sums

    def _virtual(self, refs: list[Any], rows: _Rows) -> None:
        objects, self._columns["locations"] = Strings.factorize([it.location for it in refs])
        self._column("objects", "u4")[rows] = objects
        self._places(refs, rows)
        guarded = [it.etag is not None for it in refs]
        if any(guarded):
            etags, self._columns["etag_pool"] = Strings.factorize([it.etag or "" for it in refs])
            # An empty ETag is a guard that no source passes, and not the same as none.
            codes = np.where(guarded, etags.astype(np.int32), NO_ETAG)
            self._column("etags", "i4", NO_ETAG)[rows] = codes
        # The file has no other way to say "no time" than 0: the epoch itself cannot be a guard.
        modified = [it.last_modified or 0 for it in refs]
        self._column("modified", "u4")[rows] = np.array(modified, np.uint32)

    def _places(self, refs: list[Any], rows: _Rows) -> None:
        for column, name in (("offsets", "offset"), ("lengths", "length")):
            values = np.fromiter(map(attrgetter(name), refs), np.uint64, len(refs))
            self._column(column, "u8")[rows] = values


_NOTHING: Final = memoryview(b"")
_COLUMNS: Final = ("coords", "kinds", "objects", "offsets", "lengths", "etags", "modified")
_CONSTANTS: Final = {
    "objects": (0, "u4"),
    "offsets": (0, "u8"),
    "lengths": (0, "u8"),
    "etags": (NO_ETAG, "i4"),
    "modified": (0, "u4"),
}
"""The columns that references may do without: their value, and its type."""
_INLINE, _NATIVE, _VIRTUAL = map(int, (Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL))
"""Plain numbers, since each chunk that is read is compared with them."""


def constant(value: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """Return a column of one value, which takes no memory."""
    return np.ndarray((count,), dtype, _constant_bytes(value, dtype), 0, (0,))


@cache
def _constant_bytes(value: int, dtype: str) -> bytes:
    return np.array(value, dtype).tobytes()


@dataclass(frozen=True)
class ChunkRefs:
    """Columns of ``n`` references of one array of ``rank`` axes."""

    coords: npt.NDArray[np.uint32]
    """``(n, rank)``."""
    kinds: npt.NDArray[np.uint8]
    """The `Kind` of each, ``(n,)``."""
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
    """``(k, 12)``, or as wide as the ids of the repository's layout; without rows any width."""
    locations: StringPool = EMPTY_POOL
    etag_pool: StringPool = EMPTY_POOL
    inline: memoryview = _NOTHING
    sums: npt.NDArray[np.uint64] | None = None
    """Codes of the checksums of native chunks, see `format.crc`; 0 if unknown. None: all are."""
    seconds_cut: bool = False
    """Whether some ``modified`` may have been rounded down, as other writers do."""

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
            kinds = constant(kinds, count, "u1")
        # Constants take no memory, and most references have neither ETags nor times.
        for name, (value, dtype) in _CONSTANTS.items():
            if name not in columns:
                columns[name] = constant(value, count, dtype)
        return cls(coords, kinds, **columns)

    @classmethod
    def empty(cls, rank: int) -> Self:
        """Return no references."""
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
        """Return one reference as an object; None if it is a deletion."""
        offset, length = self.offsets.item(row), self.lengths.item(row)
        kind = self.kinds.item(row)  # item() is several times as fast as indexing
        # The commonest first: every chunk that is read passes here.
        if kind == _NATIVE:
            chunk_id = ChunkId(self.chunk_ids[self.objects.item(row)].tobytes())
            return NativeChunk(
                chunk_id, offset, length, 0 if self.sums is None else self.sums.item(row)
            )
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
                self.seconds_cut,
            )
        return None

    def take(self, rows: npt.NDArray[Any] | slice) -> ChunkRefs:
        """Return some rows: indices, a mask, or a slice, which copies nothing.

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
            sums=None if self.sums is None else self.sums[rows],
        )

    def inside(self, extents: Extents) -> npt.NDArray[np.bool_]:
        """Return which references lie in a box; none in one of another number of axes."""
        if len(extents) != self.rank:
            return np.zeros(len(self), bool)
        # Bounds of each axis first, since most boxes hold all references of a manifest.
        within = np.ones(len(self), bool)
        for axis, (start, stop) in enumerate(extents) if len(self) else ():
            column = self.coords[:, axis]  # by far faster than all axes at once
            if start > int(column.min()):
                within &= column >= start
            if stop <= int(column.max()):
                within &= column < stop
        return within

    def extents(self) -> Extents:
        """Return the smallest box that holds every reference; there must be one."""
        columns = (self.coords[:, axis] for axis in range(self.rank))
        return tuple((int(column.min()), int(column.max()) + 1) for column in columns)

    def find(self, coords: Coordinates) -> int | None:
        """Return the row of a chunk; rows must be sorted, see `sort`.

        Cost: a few comparisons; constant time if the references fill their box.
        """
        return self._index.find(coords)

    @cached_property
    def _index(self) -> RowIndex:
        return RowIndex.of(self.coords)

    def sort(self) -> ChunkRefs:
        """Order rows by coordinates; of rows with equal coordinates the last one stays."""
        if len(self) < 2:
            return self
        # All coordinates are equal, so the last one counts; `lexsort` has no keys to sort by.
        if self.rank == 0:
            return self.take(np.array([len(self) - 1]))
        if self._index.ascending:  # mostly; and lookups want the index anyway
            return self
        # The last key of lexsort counts most, so the axes go in from the last to the first. It is
        # stable: of equal rows the one that was written last stays last.
        order = np.lexsort(self.coords.T[::-1])
        ordered = self.coords[order]
        last = np.ones(len(order), bool)
        last[:-1] = np.any(ordered[1:] != ordered[:-1], axis=1)
        return self.take(order[last])

    def check_sorted(self) -> None:
        """Raise FormatError unless rows are strictly ascending by coordinates."""
        if len(self) < 2:
            return
        # Lookups bisect. In a file out of order they would miss chunks that exist, and readers
        # would get the fill value in place of data.
        if not self._index.ascending:
            raise disorder()

    @classmethod
    def concat(cls, parts: Sequence[ChunkRefs]) -> ChunkRefs:
        """Join references of one array; pools are joined and inline bytes are copied.

        Where nothing is left the result has the rank of the last part.
        """
        parts = [part for part in parts if len(part)] or parts[-1:]
        if len(parts) == 1:
            return parts[0]
        # Pools are shared by `take`: unless trimmed, each commit would carry along those of all
        # manifests that its rows once came from.
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
            chunk_ids=_joined_ids(parts),
            locations=locations,
            etag_pool=etag_pool,
            inline=memoryview(b"".join([part.inline for part in parts])),
            sums=_joined_sums(parts),
            seconds_cut=any(part.seconds_cut for part in parts),
        )

    @property
    def has_cut_seconds(self) -> bool:
        """Whether a time that may have been rounded down guards a reference."""
        return self.seconds_cut and bool((self.modified > 0).any())

    def narrow(self) -> ChunkRefs:
        """Drop entries that no row refers to from the pools, which `take` leaves whole."""
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
        """Drop bytes that no row refers to from the inline data, so that old buffers can go."""
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


def disorder() -> FormatError:
    """Return the error for references that lookups could not find."""
    return FormatError("The chunk references of a manifest are not in ascending order, or repeat.")


def _joined_ids(parts: Sequence[ChunkRefs]) -> npt.NDArray[np.uint8]:
    """Join the ids of chunk objects; parts without any have no width."""
    found = [part.chunk_ids for part in parts if len(part.chunk_ids)]
    return np.concatenate(found) if found else parts[0].chunk_ids


def _joined_sums(parts: Sequence[ChunkRefs]) -> npt.NDArray[np.uint64] | None:
    if all(part.sums is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(len(part), np.uint64) if part.sums is None else part.sums for part in parts]
    )


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
    # By a mask over the pool, in time that is linear in both; `np.unique` would sort.
    used[indices if chosen.all() else indices[chosen]] = True
    if used.all():
        return indices, None
    places = np.cumsum(used) - 1
    renumbered = np.array(indices)
    renumbered[chosen] = places[indices[chosen]]
    return renumbered, np.flatnonzero(used)

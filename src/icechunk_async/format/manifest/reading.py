"""Decode manifest files: the chunk references of one or more arrays (spec, "Chunk manifest files").

References are decoded a block at a time into columns allocated for the whole array, so that
intermediate results stay in the processor's cache and take no memory.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import FEWEST, Buffer
from icechunk_async.format.flatbuffers.reading import Tables, Vectors
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import StoredStrings, join_stored
from icechunk_async.format.manifest.refs import ChunkRefs, disorder
from icechunk_async.format.manifest.row_index import ascends

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.locations import StringPool

    type Column = npt.NDArray[Any]
    type Rows = npt.NDArray[np.int64] | slice
    """Indices in ascending order, or a slice: all rows."""

__all__ = [
    "Manifest",
    "Room",
    "beyond_objects",
    "decode_array",
    "decode_manifest",
    "decode_rows",
    "listed_twice",
    "location_dictionary",
]

_ZSTD: Final = 1
_BLOCK: Final = 1 << 16
"""References that are decoded at a time."""
_MIN_REF_BYTES: Final = 16
"""A reference's offset, the distance to its vtable, and an empty vector of coordinates."""
_COMPARED_BYTES: Final = 256
"""Locations up to this size are compared with the one before while they are decoded."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The references of each array, in ascending order of coordinates."""

    id: ManifestId
    arrays: Mapping[NodeId, ChunkRefs]
    """Where the references of an array differ in rank, those of the commonest."""
    strays: Mapping[tuple[NodeId, int], ChunkRefs] = field(
        default_factory=dict[tuple[NodeId, int], ChunkRefs]
    )
    """Those of other ranks, by array and rank."""

    @property
    def weight(self) -> int:
        """As ``HeldManifest``; an empty manifest counts, too."""
        return 1 + len(self)

    @property
    def is_whole(self) -> bool:
        """As ``HeldManifest``: it is."""
        return True

    @property
    def columns(self) -> Manifest:
        """As ``HeldManifest``: itself."""
        return self

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | None:
        """Return the reference of a chunk; None if the manifest has none."""
        refs = self.refs(node_id, len(coords))
        row = refs.find(coords)
        return None if row is None else refs.ref(row)

    def expand(self, node_id: NodeId | None = None) -> Manifest:
        """As ``HeldManifest``: there is no fuller form."""
        del node_id
        return self

    def refs(self, node_id: NodeId, rank: int) -> ChunkRefs:
        """Return the references of an array of ``rank`` axes.

        References of another rank do not belong to the array: the official engine stores
        coordinates of any rank, and keeps them when an array changes its rank.
        """
        refs = self.arrays.get(node_id)
        if refs is None or refs.rank != rank:
            refs = self.strays.get((node_id, rank))
        return ChunkRefs.empty(rank) if refs is None else refs

    def __len__(self) -> int:
        """Count the references of all arrays."""
        return sum(len(refs) for refs in self.arrays.values())


def decode_manifest(payload: bytes | memoryview, *, seconds_cut: bool = False) -> Manifest:
    """Read a manifest; columns may keep ``payload`` alive.

    Args:
        payload: the FlatBuffer.
        seconds_cut: see `ChunkRefs.seconds_cut`.

    Raises:
        FormatError: the payload is damaged, or breaks the order that lookups rely on.

    Cost: time and memory in proportion to the references; strings are decoded when asked for.
    """
    root = Tables.root(Buffer(payload))
    identifier = ManifestId(root.struct(0, ManifestId.size_bytes, field="id").tobytes())
    arrays = root.vector(1, 4, 4, required="arrays").tables()
    dictionary = location_dictionary(root)
    nodes = arrays.struct(0, NodeId.size_bytes, field="node_id")
    refs = arrays.vector(1, 4, 4, required="refs")
    # Of all arrays together: each vector may be sound, and all of them the same.
    refs.check_tables()
    decoded: dict[NodeId, ChunkRefs] = {}
    strays: dict[tuple[NodeId, int], ChunkRefs] = {}
    together = _decode_small_arrays(refs, dictionary)
    for row in range(len(arrays)):
        node = NodeId(nodes[row].tobytes())
        if node in decoded:
            raise listed_twice(identifier, node)
        parts = decode_array(refs.row(row), dictionary) if together is None else [together[row]]
        for plain in parts:
            found = replace(plain, seconds_cut=True) if seconds_cut else plain
            # The first is the commonest rank, see `decode_array`.
            if decoded.setdefault(node, found) is not found:
                strays[node, found.rank] = found
    return Manifest(identifier, decoded, strays)


def _decode_small_arrays(vectors: Vectors, dictionary: bytes | None) -> list[ChunkRefs] | None:
    """Read the references of small arrays that share a manifest, those of one rank together.

    None if it is one array, if they are many, or if an array has none or some of several ranks:
    such are read array by array.

    Raises:
        FormatError: as `decode_array`.

    Cost: ten microseconds for each array, a tenth of what it takes by itself.
    """
    arrays, counts = len(vectors), vectors.counts
    # More references than a block are decoded block by block, which keeps intermediate results in
    # the cache.
    if arrays < 2 or not counts.all() or int(counts.sum()) > _BLOCK:
        return None
    tables = vectors.tables()
    index = tables.vector(0, 4, 4, required="index")
    # The rank of an array is that of its first reference; all others of it must agree here.
    firsts = np.cumsum(counts) - counts
    ranks = index.counts[firsts]
    if int(ranks.max()) > MAX_RANK or (index.counts != np.repeat(ranks, counts)).any():
        return None
    found: dict[int, ChunkRefs] = {}
    for rank in set(ranks.tolist()):
        chosen = np.flatnonzero(ranks == rank)
        rows = np.flatnonzero(index.counts == rank)
        ((_, coords),) = index.select(rows).matrices(MAX_RANK)
        refs = decode_rows(tables.select(rows), coords, dictionary)
        ends = np.cumsum(counts[chosen])
        before = ascends(coords)
        # Order is promised within an array only.
        before[ends[:-1] - 1] = True  # the next row is of another array
        if not before.all():
            raise disorder()
        found.update(zip(chosen.tolist(), _divided(refs, ends.tolist()), strict=True))
    return [found[array] for array in range(arrays)]


def _divided(refs: ChunkRefs, ends: list[int]) -> Iterator[ChunkRefs]:
    """Iterate over the arrays of which decoded references are, given where each ends.

    Each has only the ids of its chunks; other pools are shared.
    """
    native = refs.kinds == Kind.NATIVE
    ids = [0, *np.cumsum(native)[np.array(ends) - 1].tolist()]
    start = 0
    for number, end in enumerate(ends):
        part = refs.take(slice(start, end))
        first, stop = ids[number], ids[number + 1]
        objects = part.objects
        if first and stop > first:
            objects = objects - np.uint32(first) * native[start:end]
        yield replace(part, objects=objects, chunk_ids=refs.chunk_ids[first:stop])
        start = end


def decode_array(vector: Vectors, dictionary: bytes | None) -> list[ChunkRefs]:
    """Read the references of one array: those of each rank, the most common rank first.

    Args:
        vector: the only row is their vector, checked by `Vectors.check_tables`.
        dictionary: the `location_dictionary` of the file.

    Raises:
        FormatError: one of them is damaged, or they are not in order.
    """
    blocks = list(vector.blocks(_BLOCK))
    room = _room(vector) if len(blocks) > 1 else None
    by_rank: dict[int, list[ChunkRefs]] = {}
    unfolded = too_many_axes = 0
    for block in blocks:
        tables = block.tables()
        index = tables.vector(0, 4, 4, required="index")
        if len(index) and index.counts.min() > MAX_RANK:
            too_many_axes = int(index.counts[0])
            continue
        for rows, coords in index.matrices(MAX_RANK):
            unfolded += coords.nbytes  # the bound is on the array, not on each block
            block.buffer.check_unfolded(unfolded)
            part = decode_rows(tables if rows is None else tables.select(rows), coords, dictionary)
            if room is not None and room.rank == part.rank:
                room.put(part)
            else:
                by_rank.setdefault(part.rank, []).append(part)
    found = [_join(by_rank.pop(rank)) for rank in sorted(by_rank)]
    if room is not None and len(room):
        found.append(room.refs())
    if not found:
        raise FormatError(f"A file has chunk coordinates of {too_many_axes} axes.")
    for refs in found:
        refs.check_sorted()
    return sorted(found, key=lambda refs: (-len(refs), refs.rank))


def _room(vector: Vectors) -> Room | None:
    """Make room for the references of an array, assuming the rank of its first reference.

    None if the file is too small for that many references of that rank: the first one may be a
    stray, and the declared count must not make us allocate more than the file can fill.
    """
    count = vector.counts.item()
    first = next(vector.blocks(1)).tables().vector(0, 4, 4, required="index")
    rank = first.counts.item()
    if rank > MAX_RANK or count * (_MIN_REF_BYTES + 4 * rank) > vector.buffer.size:
        return None
    return Room(rank, count)


class Room:
    """Columns for the references of one array and one rank, filled in order.

    All of it is allocated at the start; the system provides pages as they are written.
    """

    def __init__(self, rank: int, count: int) -> None:
        """Make room for ``count`` references of ``rank`` axes."""
        self.rank = rank
        self._size = 0
        self._coords = np.empty((count, rank), np.uint32)
        self._kinds = np.empty(count, np.uint8)
        self._objects = np.empty(count, np.uint32)
        self._offsets = np.zeros(count, np.uint64)  # zeros take no memory until they are written
        self._lengths = np.empty(count, np.uint64)
        self._chunk_ids = [np.empty((0, ChunkId.size_bytes), np.uint8)]
        self._locations: list[StringPool] = []
        self._etag_pools: list[StringPool] = []
        self._etags: list[Column] = []
        self._modified: list[Column] = []
        self._inline = memoryview(b"")
        self._num_ids = self._num_locations = self._num_etags = 0

    def __len__(self) -> int:
        """Count the references put here."""
        return self._size

    def put(self, part: ChunkRefs) -> None:
        """Append references, all of one file."""
        rows = slice(self._size, self._size + len(part))
        self._size = rows.stop
        self._coords[rows] = part.coords
        self._kinds[rows] = part.kinds
        if part.offsets.any():
            self._offsets[rows] = part.offsets
        self._lengths[rows] = part.lengths
        self._objects[rows] = part.objects
        if self._num_ids or self._num_locations:  # the part numbers its objects from zero
            names, ids = np.uint32(self._num_locations), np.uint32(self._num_ids)
            self._objects[rows] += np.where(part.kinds == Kind.VIRTUAL, names, ids)
        self._etags.append(_moved(part.etags, self._num_etags))
        self._modified.append(part.modified)
        self._chunk_ids.append(part.chunk_ids)
        self._locations.append(part.locations)
        self._etag_pools.append(part.etag_pool)
        self._num_ids += len(part.chunk_ids)
        self._num_locations += len(part.locations)
        self._num_etags += len(part.etag_pool)
        # A part with inline chunks refers to the whole payload, every other part to nothing.
        self._inline = max(self._inline, part.inline, key=len)

    def refs(self) -> ChunkRefs:
        """Return the references; there must be some."""
        return ChunkRefs.build(
            self._filled(self._coords),
            self._filled(self._kinds),
            objects=self._filled(self._objects),
            offsets=self._filled(self._offsets),
            lengths=self._filled(self._lengths),
            etags=_concatenated(self._etags),
            modified=_concatenated(self._modified),
            chunk_ids=np.concatenate(self._chunk_ids),
            locations=join_stored(self._locations),
            etag_pool=join_stored(self._etag_pools),
            inline=self._inline,
        )

    def _filled(self, column: Column) -> Column:
        """Return the filled rows: a view, unless that would keep mostly unused memory alive."""
        filled = column[: self._size]
        return filled.copy() if 2 * self._size < len(column) else filled


def _join(parts: list[ChunkRefs]) -> ChunkRefs:
    """Join parts of one array and rank, decoded from one file; their columns are copied."""
    if len(parts) == 1 and len(parts[0]) < FEWEST:  # it holds no views of the payload's words
        return parts[0]
    room = Room(parts[0].rank, sum(map(len, parts)))
    for part in parts:
        room.put(part)
    return room.refs()


def _concatenated(columns: list[Column]) -> Column:
    """Join pieces of a column; a value that all rows share still takes no memory."""
    first = columns[0]
    if all(it.strides == (0,) and it[0] == first[0] for it in columns):
        return np.broadcast_to(first[0], sum(map(len, columns)))
    return np.concatenate(columns)


def _moved(etags: Column, base: int) -> Column:
    """Count ETags on from ``base``; rows without one keep a negative number."""
    if base == 0 or etags.strides == (0,):  # a constant column: no row has an ETag
        return etags
    return np.where(etags >= 0, etags + np.int32(base), etags)


def location_dictionary(root: Tables) -> bytes | None:
    """Return the dictionary that locations are compressed with; None if they are not."""
    # Zstd is the algorithm's default, so that files which have neither field name it, too.
    if root.has(2)[0] and int(root.scalar(3, 1, _ZSTD)[0]) == _ZSTD:
        return bytes(root.vector(2, 1, 1).raw(0))
    return None


def decode_rows(
    tables: Tables, coords: npt.NDArray[np.uint32], dictionary: bytes | None
) -> ChunkRefs:
    """Read ChunkRef tables of one array and one rank, whose coordinates are known.

    Raises:
        FormatError: a table is damaged.
    """
    count = len(tables)
    native, packed, plain, inline = (tables.has(slot) for slot in (4, 8, 5, 1))
    # Never stored, so it marks what no field decides.
    kinds = np.full(count, Kind.DELETED, np.uint8)
    # The official reader looks at the last of these fields first.
    for kind, present in (
        (Kind.INLINE, inline),
        (Kind.VIRTUAL, packed),
        (Kind.VIRTUAL, plain),
        (Kind.NATIVE, native),
    ):
        if present.any():
            kinds[slice(None) if present.all() else present] = kind
    if np.any(kinds == Kind.DELETED):
        raise FormatError("A manifest has a chunk reference that refers to nothing.")
    offsets, lengths = tables.scalar(2, 8), tables.scalar(3, 8)
    # With Python's numbers: in 64 bits the sum of hostile ones could wrap round to a small one.
    if len(offsets) and int(offsets.max()) + int(lengths.max()) >= 1 << 63:
        raise beyond_objects()
    objects = np.zeros(count, np.uint32)
    columns: dict[str, Any] = {}

    rows = _rows(kinds, Kind.NATIVE)
    if rows is not None:
        ids = _some(tables, rows).struct(4, ChunkId.size_bytes, field="chunk_id")
        columns["chunk_ids"] = ids
        objects[rows] = np.arange(len(ids))

    rows = _rows(kinds, Kind.VIRTUAL)
    if rows is not None:
        runs, found = _virtual(tables, rows, packed[rows], dictionary)
        objects[rows] = runs
        columns |= found

    rows = _rows(kinds, Kind.INLINE)
    if rows is not None:
        data = _some(tables, rows).vector(1, 1, 1)
        # Vectors of a hostile file may overlap: many references to the same bytes must not be
        # copied to more than the file could hold.
        tables.buffer.check_unfolded(int(data.counts.sum()))
        tables.buffer.require(data.starts, data.counts)
        # Inline bytes are not copied. Columns have their places in the payload, and keep it alive.
        offsets, lengths = np.array(offsets), np.array(lengths)
        offsets[rows], lengths[rows] = data.starts, data.counts
        columns["inline"] = tables.buffer.payload

    return ChunkRefs.build(
        coords, kinds, objects=objects, offsets=offsets, lengths=lengths, **columns
    )


def beyond_objects() -> FormatError:
    """Return the error for a chunk that ends where no object has bytes."""
    return FormatError("A manifest has a chunk reference beyond any object's size.")


def listed_twice(manifest_id: ManifestId, node_id: NodeId) -> FormatError:
    """Return the error for two lists of references of one array."""
    return FormatError(f"Manifest {manifest_id} lists the array {node_id} twice.")


def _virtual(
    tables: Tables, rows: Rows, packed: npt.NDArray[np.bool_], dictionary: bytes | None
) -> tuple[npt.NDArray[np.uint32], dict[str, Any]]:
    """Read what only virtual references have: the location of each, and columns."""
    virtual = _some(tables, rows)
    if packed.any() and not packed.all():
        raw = virtual.vector(5, 1, 1).where(packed, virtual.vector(8, 1, 1))
        different = raw.changes(_COMPARED_BYTES)
        different[1:] |= packed[1:] != packed[:-1]
        raw = raw.select(different)
    else:
        raw, different = virtual.distinct_vectors(
            8 if packed.all() else 5, _COMPARED_BYTES, field="location"
        )
    # Chunks that follow each other mostly lie in one object, so few locations are different.
    runs = np.cumsum(different, dtype=np.uint32) - np.uint32(1)
    names = StoredStrings(raw, packed[different], dictionary)
    columns: dict[str, Any] = {"locations": names}
    modified = virtual.scalar(7, 4)
    if modified.any():
        columns["modified"] = _scatter(rows, modified, len(tables), 0, "u4")
    guarded = virtual.has(6)
    if guarded.any():
        guarded_rows = np.flatnonzero(guarded)
        etags = virtual.select(guarded_rows).vector(6, 1, 1)
        columns["etag_pool"] = StoredStrings(etags, np.zeros(len(etags), bool))
        chosen = np.arange(len(tables))[rows][guarded_rows]
        columns["etags"] = _scatter(chosen, np.arange(len(etags)), len(tables), -1, "i4")
    return runs, columns


def _rows(kinds: npt.NDArray[np.uint8], kind: Kind) -> Rows | None:
    """Return which references are of a kind; None if no one is."""
    chosen = kinds == kind
    if not chosen.any():
        return None
    return slice(None) if chosen.all() else np.flatnonzero(chosen)


def _some(tables: Tables, rows: Rows) -> Tables:
    """Return the tables of some rows."""
    return tables if isinstance(rows, slice) else tables.select(rows)


def _scatter(
    rows: Rows, values: npt.NDArray[Any], count: int, fill: int, dtype: str
) -> npt.NDArray[Any]:
    column = np.full(count, fill, dtype)
    column[rows] = values
    return column

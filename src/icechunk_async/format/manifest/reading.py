"""Decode manifest files: the chunk references of one or more arrays (spec, "Chunk manifest files").

Room for all of them is asked for at the start; the system gives it as it is filled. Two threads
fill a part of it each, and the second does not know how many objects and strings the first will
find: that is added to its numbers when both are done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import FEWEST, Buffer
from icechunk_async.format.flatbuffers.reading import Tables, Vectors
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest.halves import both
from icechunk_async.format.manifest.locations import StoredStrings, join_stored
from icechunk_async.format.manifest.refs import ChunkRefs, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.locations import StringPool

    type Column = npt.NDArray[Any]
    type Rows = npt.NDArray[np.int64] | slice
    """Indices in ascending order, or a slice: all rows."""

__all__ = [
    "MAX_RANK",
    "Gathered",
    "Manifest",
    "Room",
    "decode_manifest",
    "decode_rows",
    "joined",
    "location_dictionary",
]


class Room:
    """Columns for references of one array and one rank."""

    def __init__(self, rank: int, count: int) -> None:
        """Make room for ``count`` references of ``rank`` axes."""
        self.rank = rank
        self.coords = np.empty((count, rank), np.uint32)
        self.kinds = np.empty(count, np.uint8)
        self.objects = np.empty(count, np.uint32)
        self.offsets = np.zeros(count, np.uint64)  # which take no memory while none is written
        self.lengths = np.empty(count, np.uint64)

    def count_on(self, rows: slice, before: npt.NDArray[np.int64]) -> None:
        """Count the objects of some rows on from so many chunk ids and locations."""
        ids, names = before[:2].astype(np.uint32)
        if ids or names:
            self.objects[rows] += np.where(self.kinds[rows] == Kind.VIRTUAL, names, ids)


class Gathered:
    """What one thread put into a part of the room, in order."""

    def __init__(self, room: Room, first: int) -> None:
        """Begin with nothing, at row ``first``."""
        self.room = room
        self.rows = slice(first, first)
        """Where the references are."""
        self.ids = [np.empty((0, ChunkId.size_bytes), np.uint8)]
        self.locations: list[StringPool] = []
        self.etag_pools: list[StringPool] = []
        self.etags: list[Column] = []
        self.modified: list[Column] = []
        self.inline = memoryview(b"")
        self.counts = np.zeros(3, np.int64)
        """How many chunk ids, locations and ETags there are."""

    def put(self, part: ChunkRefs) -> None:
        """Copy references, all of one file, behind those that are here."""
        room, rows = self.room, slice(self.rows.stop, self.rows.stop + len(part))
        room.coords[rows] = part.coords
        room.kinds[rows] = part.kinds
        if part.offsets.any():
            room.offsets[rows] = part.offsets
        room.lengths[rows] = part.lengths
        room.objects[rows] = part.objects
        self.rows = slice(self.rows.start, rows.stop)
        room.count_on(rows, self.counts)
        self.etags.append(_moved(part.etags, int(self.counts[2])))
        self.modified.append(part.modified)
        self.ids.append(part.chunk_ids)
        self.locations.append(part.locations)
        self.etag_pools.append(part.etag_pool)
        self.counts += [len(part.chunk_ids), len(part.locations), len(part.etag_pool)]
        self.inline = max(self.inline, part.inline, key=len)  # all of the file, or nothing


def joined(some: Sequence[Gathered]) -> ChunkRefs | None:
    """Return the references in parts of one room, in order; None if nothing was put there."""
    before = np.zeros(3, np.int64)
    etags: list[Column] = []
    for it in some:
        it.room.count_on(it.rows, before)
        etags += [_moved(column, int(before[2])) for column in it.etags]
        before += it.counts
    if not etags:
        return None
    room = some[0].room
    rows = [it.rows for it in some if it.rows.start < it.rows.stop]
    return ChunkRefs.build(
        _of_rows(room.coords, rows),
        _of_rows(room.kinds, rows),
        objects=_of_rows(room.objects, rows),
        offsets=_of_rows(room.offsets, rows),
        lengths=_of_rows(room.lengths, rows),
        etags=_concatenated(etags),
        modified=_concatenated([column for it in some for column in it.modified]),
        chunk_ids=np.concatenate([ids for it in some for ids in it.ids]),
        locations=join_stored([pool for it in some for pool in it.locations]),
        etag_pool=join_stored([pool for it in some for pool in it.etag_pools]),
        inline=max((it.inline for it in some), key=len),
    )


def _of_rows(column: Column, rows: Sequence[slice]) -> Column:
    """Return rows of a column; a view of it where they are most of it, with nothing between."""
    if not rows:
        return column[:0]
    start, stop = rows[0].start, rows[-1].stop
    if 2 * (stop - start) < len(column) or any(a.stop != b.start for a, b in pairwise(rows)):
        return np.concatenate([column[it] for it in rows])
    return column[start:stop]


def _concatenated(columns: list[Column]) -> Column:
    """Join pieces of a column; one value for all rows goes on taking no memory."""
    first = columns[0]
    if all(it.strides == (0,) and it[0] == first[0] for it in columns):
        return np.broadcast_to(first[0], sum(map(len, columns)))
    return np.concatenate(columns)


def _moved(etags: Column, base: int) -> Column:
    """Count ETags on from ``base``; rows without one keep a negative number."""
    if base == 0 or etags.strides == (0,):  # then no row has one
        return etags
    return np.where(etags >= 0, etags + np.int32(base), etags)


_ZSTD: Final = 1
MAX_RANK: Final = 64
"""NumPy has no arrays of more axes, so Zarr has none either."""
_BLOCK: Final = 1 << 16
"""References that are decoded at a time."""
_SHARED_BLOCKS: Final = 4
"""From so many on, two threads share them; of smaller manifests there may be many at once."""
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

    def refs(self, node_id: NodeId, rank: int) -> ChunkRefs:
        """Return the references of an array of ``rank`` axes.

        Others that the file lists for it are no chunks of it: the official engine stores
        coordinates of any rank, and keeps them when an array changes its rank.
        """
        refs = self.arrays.get(node_id)
        if refs is None or refs.rank != rank:
            refs = self.strays.get((node_id, rank))
        return ChunkRefs.empty(rank) if refs is None else refs

    def __len__(self) -> int:
        """Count the references of all arrays."""
        return sum(len(refs) for refs in self.arrays.values())


def decode_manifest(payload: bytes | memoryview) -> Manifest:
    """Read a manifest; columns may keep ``payload`` alive.

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
    refs.check_tables()
    decoded: dict[NodeId, ChunkRefs] = {}
    strays: dict[tuple[NodeId, int], ChunkRefs] = {}
    for row in range(len(arrays)):
        node = NodeId(nodes[row].tobytes())
        if node in decoded:
            raise FormatError(f"Manifest {identifier} lists the array {node} twice.")
        for found in _decode_array(refs.row(row), dictionary):
            if decoded.setdefault(node, found) is not found:
                strays[node, found.rank] = found
    return Manifest(identifier, decoded, strays)


def _decode_array(vector: Vectors, dictionary: bytes | None) -> list[ChunkRefs]:
    """Read the references of one array: those of each rank, the commonest first.

    They are read a block at a time, so that what is computed on the way stays in the processor's
    cache and takes no memory; many of them on two threads.
    """
    blocks = list(vector.blocks(_BLOCK))
    room = _room(vector) if len(blocks) > 1 else None
    if len(blocks) < _SHARED_BLOCKS:
        halves = [_Half(room, 0, dictionary, 1).decode(blocks)]
    else:
        middle = len(blocks) // 2
        first, second = (_Half(room, row, dictionary, 2) for row in (0, middle * _BLOCK))
        halves = [
            *both(lambda: first.decode(blocks[:middle]), lambda: second.decode(blocks[middle:]))
        ]
    by_rank: dict[int, list[ChunkRefs]] = {}
    for half in halves:
        for part in half.others:
            by_rank.setdefault(part.rank, []).append(part)
    found = [_join(by_rank.pop(rank)) for rank in sorted(by_rank)]
    usual = joined([half.usual for half in halves if half.usual is not None])
    if usual is not None:
        found.append(usual)
    if not found:
        raise FormatError(f"A file has chunk coordinates of {halves[0].axes} axes.")
    for refs in found:
        refs.check_sorted()
    return sorted(found, key=lambda refs: (-len(refs), refs.rank))


def _room(vector: Vectors) -> Room | None:
    """Make room for the references of an array, which mostly are of the rank of the first one.

    None where the file is too small for as many of that rank: the first one may be a stray.
    """
    count = vector.counts.item()
    first = next(vector.blocks(1)).tables().vector(0, 4, 4, required="index")
    rank = first.counts.item()
    if rank > MAX_RANK or count * (_MIN_REF_BYTES + 4 * rank) > vector.buffer.size:
        return None
    return Room(rank, count)


class _Half:
    """What one of as many ``threads`` reads of an array, beginning at a row."""

    def __init__(self, room: Room | None, row: int, dictionary: bytes | None, threads: int) -> None:
        self.usual = None if room is None else Gathered(room, row)
        """References that there is room for."""
        self.others: list[ChunkRefs] = []
        """Parts of other ranks; all where there is no room."""
        self.axes = 0
        """Of a reference that has too many, if one has."""
        self._dictionary = dictionary
        self._threads = threads

    def decode(self, blocks: Sequence[Vectors]) -> _Half:
        """Read blocks of references.

        All threads read as much, which counts: what an array unfolds to has one bound.
        """
        unfolded = 0
        for block in blocks:
            tables = block.tables()
            index = tables.vector(0, 4, 4, required="index")
            if len(index) and index.counts.min() > MAX_RANK:
                self.axes = int(index.counts[0])
                continue
            for rows, coords in index.matrices(MAX_RANK):
                unfolded += coords.nbytes
                block.buffer.check_unfolded(self._threads * unfolded)
                chosen = tables if rows is None else tables.select(rows)
                self._keep(decode_rows(chosen, coords, self._dictionary))
        return self

    def _keep(self, part: ChunkRefs) -> None:
        if self.usual is not None and self.usual.room.rank == part.rank:
            self.usual.put(part)
        else:
            self.others.append(part)


def _join(parts: list[ChunkRefs]) -> ChunkRefs:
    """Join parts of one array and rank, decoded from one file; their columns are copied."""
    if len(parts) == 1 and len(parts[0]) < FEWEST:  # it has no views but of a word
        return parts[0]
    gathered = Gathered(Room(parts[0].rank, sum(map(len, parts))), 0)
    for part in parts:
        gathered.put(part)
    found = joined([gathered])
    assert found is not None
    return found


def location_dictionary(root: Tables) -> bytes | None:
    """Return what locations are compressed with, if they are."""
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
    if len(offsets) and int(offsets.max()) + int(lengths.max()) >= 1 << 63:
        raise FormatError("A manifest has a chunk reference beyond any object's size.")
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
        tables.buffer.check_unfolded(int(data.counts.sum()))
        tables.buffer.require(data.starts, data.counts)
        offsets, lengths = np.array(offsets), np.array(lengths)
        offsets[rows], lengths[rows] = data.starts, data.counts
        columns["inline"] = tables.buffer.payload

    return ChunkRefs.build(
        coords, kinds, objects=objects, offsets=offsets, lengths=lengths, **columns
    )


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

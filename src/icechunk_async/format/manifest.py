"""Manifest files: the chunk references of one or more arrays (spec, "Chunk manifest files")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.chunk_refs import ChunkRefs, Kind
from icechunk_async.format.flat import Buffer
from icechunk_async.format.halves import both
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.locations import StoredStrings, join_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flat import Tables, Vectors

__all__ = ["MAX_RANK", "Manifest", "decode_manifest", "decode_rows", "location_dictionary"]

_ZSTD: Final = 1
MAX_RANK: Final = 64
"""NumPy has no arrays of more axes, so Zarr has none either."""
_BLOCK: Final = 1 << 15
"""References that are decoded at a time."""
_SHARED_BLOCKS: Final = 4
"""From so many on, two threads share them; of smaller manifests there may be many at once."""
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
        """Answer the references of an array of ``rank`` axes.

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
    root = Buffer(payload).root()
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
    middle = len(blocks) // 2 if len(blocks) >= _SHARED_BLOCKS else len(blocks)
    if middle == len(blocks):
        parts, axes = _decode_blocks(blocks, dictionary, 1)
    else:
        (parts, axes), (others, _) = both(
            lambda: _decode_blocks(blocks[:middle], dictionary, 2),
            lambda: _decode_blocks(blocks[middle:], dictionary, 2),
        )
        parts += others
    if not parts:
        raise FormatError(f"A file has chunk coordinates of {axes} axes.")
    by_rank: dict[int, list[ChunkRefs]] = {}
    for part in parts:
        by_rank.setdefault(part.rank, []).append(part)
    found = [_join(by_rank.pop(rank)) for rank in sorted(by_rank)]
    for refs in found:
        refs.check_sorted()
    return sorted(found, key=len, reverse=True)


def _decode_blocks(
    blocks: Sequence[Vectors], dictionary: bytes | None, threads: int
) -> tuple[list[ChunkRefs], int]:
    """Read blocks of references; answer, too, the axes of one that has too many, if one has.

    As many ``threads`` read as much each, which counts: what an array unfolds to has one bound.
    """
    parts: list[ChunkRefs] = []
    axes = unfolded = 0
    for block in blocks:
        tables = block.tables()
        index = tables.vector(0, 4, 4, required="index")
        if len(index) and index.counts.min() > MAX_RANK:
            axes = int(index.counts[0])
            continue
        for rows, coords in index.matrices(MAX_RANK):
            unfolded += coords.nbytes
            block.buffer.check_unfolded(threads * unfolded)
            chosen = tables if rows is None else tables.select(rows)
            parts.append(decode_rows(chosen, coords, dictionary))
    return parts, axes


def _join(parts: list[ChunkRefs]) -> ChunkRefs:
    """Join parts of one array and rank, decoded from one file."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {
        name: _joined([getattr(part, name) for part in parts])
        for name in ("offsets", "lengths", "modified", "chunk_ids")
    }
    objects: list[npt.NDArray[np.uint32]] = []
    etags: list[npt.NDArray[np.int32]] = []
    ids = names = guards = 0
    for part in parts:
        virtual = part.kinds == Kind.VIRTUAL
        objects.append(part.objects + np.where(virtual, np.uint32(names), np.uint32(ids)))
        etags.append(part.etags if guards == 0 else _moved(part.etags, guards))
        ids += len(part.chunk_ids)
        names += len(part.locations)
        guards += len(part.etag_pool)
    return ChunkRefs.build(
        np.concatenate([part.coords for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        objects=np.concatenate(objects),
        etags=_joined(etags),
        locations=join_stored([part.locations for part in parts]),
        etag_pool=join_stored([part.etag_pool for part in parts]),
        inline=max((part.inline for part in parts), key=len),  # of all parts the file, or nothing
        **columns,
    )


def _joined(columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join pieces of a column; one value for all rows goes on taking no memory."""
    first = columns[0]
    if all(it.strides == (0,) and it[0] == first[0] for it in columns):
        return np.broadcast_to(first[0], sum(map(len, columns)))
    return np.concatenate(columns)


def _moved(etags: npt.NDArray[np.int32], base: int) -> npt.NDArray[np.int32]:
    return np.where(etags >= 0, etags + np.int32(base), etags)


def location_dictionary(root: Tables) -> bytes | None:
    """Answer what locations are compressed with, if they are."""
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
    # The official reader looks at the last of these fields first.
    kinds = np.full(count, Kind.DELETED, np.uint8)
    kinds[inline] = Kind.INLINE
    kinds[packed | plain] = Kind.VIRTUAL
    kinds[native] = Kind.NATIVE
    if np.any(kinds == Kind.DELETED):
        raise FormatError("A manifest has a chunk reference that refers to nothing.")
    offsets, lengths = tables.scalar(2, 8), tables.scalar(3, 8)
    if len(offsets) and int(offsets.max()) + int(lengths.max()) >= 1 << 63:
        raise FormatError("A manifest has a chunk reference beyond any object's size.")
    objects = np.zeros(count, np.uint32)
    columns: dict[str, Any] = {}

    rows = np.flatnonzero(kinds == Kind.NATIVE)
    columns["chunk_ids"] = _some(tables, rows).struct(4, ChunkId.size_bytes, field="chunk_id")
    objects[rows] = np.arange(len(rows))

    rows = np.flatnonzero(kinds == Kind.VIRTUAL)
    if len(rows):
        runs, found = _virtual(tables, rows, packed[rows], dictionary)
        objects[rows] = runs
        columns |= found

    rows = np.flatnonzero(kinds == Kind.INLINE)
    if len(rows):
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
    tables: Tables,
    rows: npt.NDArray[np.int64],
    packed: npt.NDArray[np.bool_],
    dictionary: bytes | None,
) -> tuple[npt.NDArray[np.uint32], dict[str, Any]]:
    """Read what only virtual references have: the location of each, and columns."""
    virtual = _some(tables, rows)
    raw = virtual.vector(8 if packed.all() else 5, 1, 1)
    if packed.any() and not packed.all():
        raw = raw.where(packed, virtual.vector(8, 1, 1))
    # Chunks that follow each other mostly lie in one object, so few locations are different.
    different = raw.changes(_COMPARED_BYTES)
    different[1:] |= packed[1:] != packed[:-1]
    runs = np.cumsum(different, dtype=np.uint32) - np.uint32(1)
    names = StoredStrings(raw.select(different), packed[different], dictionary)
    columns: dict[str, Any] = {"locations": names}
    modified = virtual.scalar(7, 4)
    if modified.any():
        columns["modified"] = _scatter(rows, modified, len(tables), 0, "u4")
    guarded = virtual.has(6)
    if guarded.any():
        guarded_rows = np.flatnonzero(guarded)
        etags = virtual.select(guarded_rows).vector(6, 1, 1)
        columns["etag_pool"] = StoredStrings(etags, np.zeros(len(etags), bool))
        columns["etags"] = _scatter(
            rows[guarded_rows], np.arange(len(etags)), len(tables), -1, "i4"
        )
    return runs, columns


def _some(tables: Tables, rows: npt.NDArray[np.int64]) -> Tables:
    """Answer the tables of some ascending rows."""
    return tables if len(rows) == len(tables) else tables.select(rows)


def _scatter(
    rows: npt.NDArray[np.int64], values: npt.NDArray[Any], count: int, fill: int, dtype: str
) -> npt.NDArray[Any]:
    column = np.full(count, fill, dtype)
    column[rows] = values
    return column

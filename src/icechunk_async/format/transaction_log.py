"""Transaction logs: the changes of one commit, for rebase, diff and status.

Spec, "Transaction logs". Chunk coordinates are columns: a commit may touch millions.
"""

from __future__ import annotations

from dataclasses import field
from functools import cache, lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.flatbuffers.writing import BLOCK, Layout, vtable
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.row_index import RowIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.writing import Output

    type CoordinateColumns = npt.NDArray[np.uint32]

__all__ = [
    "Move",
    "TransactionLog",
    "decode_transaction_log",
    "encode_transaction_log",
    "fitting_level",
    "in_stored_order",
    "unique_coordinates",
]

_LIKE_THE_FIRST: Final = (2, 3, 4)
_FEW: Final = 32
"""So many arrays and chunks are written one by one in less time than by columns."""
_NODE_VTABLE, _CHUNK_VTABLE, _ROOT_AT, _MOVES_AT, _HEAD_BYTES = 30, 38, 56, 100, 128
"""Places in a log without ids of nodes: two vtables, the root, its offset of the moves, and the
vector of arrays."""
_NODE: Final = Struct("<i8sII")
"""The table of an array, and the count of its chunks: the distance back to the vtable, the node,
and that to the count."""
_WORD: Final = Struct("<I")
_NONE: Final = bytes(4)
"""An empty vector."""
_SMALL: Final = 512
"""Chunks of an array up to which they are written together with those of others."""
_TABLE_BYTES: Final = 20
"""Of an array: the distance to its vtable, its id, that to its vector, and the vector's count."""
_RECORD_BYTES: Final = 12
"""Of a chunk, besides its entry in the vector and its coordinates."""
_NO_IDS: Final[frozenset[NodeId]] = frozenset()
# Slots of the six lists of node ids. Groups come first, but for those that were updated.
_LISTS: Final = {
    1: "new_groups",
    2: "new_arrays",
    3: "deleted_groups",
    4: "deleted_arrays",
    5: "updated_arrays",
    6: "updated_groups",
}


@dataclass(frozen=True, slots=True)
class Move:
    """A node that was renamed."""

    source: str
    target: str
    node_id: NodeId
    is_array: bool


@dataclass(frozen=True, slots=True)
class TransactionLog:
    """The changes of a commit: ids of nodes, and coordinates of chunks set or deleted."""

    id: SnapshotId
    new_groups: frozenset[NodeId] = _NO_IDS
    new_arrays: frozenset[NodeId] = _NO_IDS
    deleted_groups: frozenset[NodeId] = _NO_IDS
    deleted_arrays: frozenset[NodeId] = _NO_IDS
    updated_groups: frozenset[NodeId] = _NO_IDS
    """Their metadata document changed."""
    updated_arrays: frozenset[NodeId] = _NO_IDS
    """Their metadata document changed."""
    updated_chunks: Mapping[NodeId, CoordinateColumns] = field(
        default_factory=dict[NodeId, "CoordinateColumns"]
    )
    """``(n, rank)``, each row once, in ascending order."""
    moves: tuple[Move, ...] = ()
    stray_chunks: Mapping[tuple[NodeId, int], CoordinateColumns] = field(
        default_factory=dict[tuple[NodeId, int], "CoordinateColumns"]
    )
    """Coordinates of another rank than the commonest, by node and rank. Read, never written."""

    def chunks_of(self, node_id: NodeId, rank: int) -> CoordinateColumns:
        """Return the touched chunks of an array of ``rank`` axes."""
        coords = self.updated_chunks.get(node_id)
        if coords is None or coords.shape[1] != rank:
            coords = self.stray_chunks.get((node_id, rank))
        return np.empty((0, rank), np.uint32) if coords is None else coords

    def is_empty(self) -> bool:
        """Return whether nothing was touched."""
        lists = (getattr(self, name) for name in _LISTS.values())
        return not any(lists) and not self.updated_chunks and not self.moves

    def merge(self, later: TransactionLog) -> TransactionLog:
        """Return one log for two commits, as amending does; ``later``'s id stays.

        Lists are joined without cancelling: a node may be both new and deleted. Moves of a
        node become one, from where it first was to where it last is.
        """
        chunks = dict(self.updated_chunks)
        for node, coords in later.updated_chunks.items():
            earlier = self.chunks_of(node, coords.shape[1])
            chunks[node] = unique_coordinates(np.concatenate([earlier, coords]))
        # The first source and the last target of each node; one that came back has not moved.
        first = {move.node_id: move for move in reversed(self.moves + later.moves)}
        last = {move.node_id: move for move in self.moves + later.moves}
        return TransactionLog(
            later.id,
            **{name: getattr(self, name) | getattr(later, name) for name in _LISTS.values()},
            updated_chunks=chunks,
            moves=tuple(
                Move(first[node].source, move.target, node, move.is_array)
                for node, move in last.items()
                if first[node].source != move.target
            ),
        )


def unique_coordinates(coords: CoordinateColumns) -> CoordinateColumns:
    """Return rows in ascending order, each once."""
    if len(coords) < 2:
        return coords
    if coords.shape[1] == 0:
        return coords[:1]
    if RowIndex.of(coords).ascending:  # as in logs that were written so
        return coords
    ordered = coords[np.lexsort(coords.T[::-1])]
    keep = np.ones(len(ordered), bool)
    keep[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    return ordered[keep]


def decode_transaction_log(payload: bytes | memoryview) -> TransactionLog:
    """Read a transaction log.

    Raises:
        FormatError: the payload is damaged.
    """
    root = Tables.root(Buffer(payload))
    chunks = root.vector(7, 4, 4, required="updated_chunks").tables()
    nodes = chunks.struct(0, NodeId.size_bytes, field="node_id")
    indices = chunks.vector(1, 4, 4, required="chunks")
    indices.check_tables()
    updated: dict[NodeId, CoordinateColumns] = {}
    strays: dict[tuple[NodeId, int], CoordinateColumns] = {}
    for row in range(len(chunks)):
        vectors = indices.row(row).tables().vector(0, 4, 4, required="coords")
        node = NodeId(nodes[row].tobytes())
        if node in updated:
            raise FormatError(f"A transaction log lists the chunks of {node} twice.")
        # An array has one rank, but nothing in the format says that all coordinates of a list have
        # it. Those of another rank can be of no chunk, and must not stop who reads the others.
        for _, coords in vectors.matrices(MAX_RANK):
            found = unique_coordinates(coords)
            if updated.setdefault(node, found) is not found:
                strays[node, found.shape[1]] = found
    return TransactionLog(
        SnapshotId(root.struct(0, SnapshotId.size_bytes, field="id").tobytes()),
        **{name: _ids(root, slot, name) for slot, name in _LISTS.items()},
        updated_chunks=updated,
        moves=tuple(_moves(root)),
        stray_chunks=strays,
    )


def _ids(root: Tables, slot: int, name: str) -> frozenset[NodeId]:
    vector = root.vector(slot, NodeId.size_bytes, 1, required=name)
    if vector.counts.item() == 0:  # as most of them
        return _NO_IDS
    rows = vector.structs()
    return frozenset(NodeId(row.tobytes()) for row in rows)


def _moves(root: Tables) -> Iterable[Move]:
    moved = root.vector(8, 4, 4)
    if moved.counts.item() == 0:
        return
    tables = moved.tables()
    sources = tables.strings(0, required="from")
    targets = tables.strings(1, required="to")
    nodes = tables.struct(2, NodeId.size_bytes, field="node_id")
    kinds = tables.scalar(3, 1).tolist()
    if any(kind > 1 for kind in kinds):
        raise FormatError("A transaction log has a moved node of unknown type.")
    # 1 is an array here, and a group is 0: this enumeration is not the union of a snapshot's nodes.
    for row, kind in enumerate(kinds):
        yield Move(sources[row], targets[row], NodeId(nodes[row].tobytes()), kind == 1)


def in_stored_order(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return moves as a stored log has them: by where they lead to, parents first."""
    # Segment by segment: `/a/b` before `/a-b`. The nodes of a snapshot are in another order, that
    # of the bytes of their paths.
    return tuple(sorted(moves, key=lambda move: move.target.split("/")))


def encode_transaction_log(log: TransactionLog, spec_version: int) -> memoryview:
    """Return the FlatBuffer of a transaction log.

    Cost: no Python object per chunk, unless there are few.
    """
    del spec_version  # both versions write the same fields; spec 1 readers skip the moves
    return _encode_few(log) or _encode(log)


def _encode_few(log: TransactionLog) -> memoryview | None:
    """Return the same bytes as `_encode`; None if there is more than a few chunks."""
    if log.moves or any(getattr(log, name) for name in _LISTS.values()):
        return None
    nodes = sorted(log.updated_chunks)
    if len(nodes) + sum(map(len, log.updated_chunks.values())) > _FEW:
        return None
    at = _HEAD_BYTES + 4 + 4 * len(nodes)
    entries: list[int] = [len(nodes)]
    parts: list[bytes] = []
    for place, node in enumerate(nodes):
        # Written out by hand for the usual small commit: the layout is `_encode`'s, and tests
        # compare the two byte for byte.
        coords = log.updated_chunks[node]
        count, rank = coords.shape
        entries.append(at - _HEAD_BYTES - 4 - 4 * place)
        parts.append(_NODE.pack(at - _NODE_VTABLE, node, 4, count))
        pack, size = _chunk(rank)
        first = at + _NODE.size + 4 * count
        parts += [_WORD.pack(4 * (count - row) + size * row) for row in range(count)]
        parts += [
            pack(first + size * row - _CHUNK_VTABLE, 4, rank, *each)
            for row, each in enumerate(coords.tolist())
        ]
        at = first + size * count
    before, between, after = _head()
    vector = Struct(f"<{len(entries)}I").pack(*entries)
    pieces = (before, log.id, between, _WORD.pack(at - _MOVES_AT), after, vector, *parts, _NONE)
    return memoryview(b"".join(pieces))


@cache
def _head() -> tuple[bytes, bytes, bytes]:
    """Return the bytes before, between and after the id and the offset of the moves."""
    data = bytes(_encode(TransactionLog(SnapshotId(bytes(SnapshotId.size_bytes)))))
    id_at = _ROOT_AT + 4
    after_id = id_at + SnapshotId.size_bytes
    return data[:id_at], data[after_id:_MOVES_AT], data[_MOVES_AT + 4 : _HEAD_BYTES]


@lru_cache(maxsize=64)
def _chunk(rank: int) -> tuple[Callable[..., bytes], int]:
    """Return the packer of a chunk's table, coordinates included, and its size."""
    record = Struct(f"<iII{rank}I")
    return record.pack, record.size


def _encode(log: TransactionLog) -> memoryview:
    layout = Layout()
    tables = _vtables(layout)
    root = layout.place(48, 4)
    lists = {
        slot: (layout.place_vector(len(getattr(log, name)), 8, 1), sorted(getattr(log, name)))
        for slot, name in _LISTS.items()
    }
    vector = layout.place_vector(len(log.updated_chunks), 4, 4)
    chunks = _Chunks(layout, log.updated_chunks)
    moves = in_stored_order(log.moves)
    moves_at = layout.place_vector(len(moves), 4, 4)
    move_blocks = [_MoveBlock(layout, move) for move in moves]

    out = layout.output()
    for at, raw in tables.values():
        out.put(at, raw)
    out.table(root, tables["root"][0])
    out.put(root + 4, log.id)
    for slot, (at, ids) in lists.items():
        out.offset(root + 12 + 4 * slot, at)
        out.word(at, len(ids))
        out.put(at + 4, b"".join(ids))
    out.offset(root + 40, vector)
    out.offset_vector(vector, chunks.tables)
    chunks.fill(out, tables["node"][0], tables["chunk"][0])
    out.offset(root + 44, moves_at)
    out.offset_vector(moves_at, np.array([block.table for block in move_blocks], np.int64))
    for move_block in move_blocks:
        move_block.fill(out, tables["move"][0])
    return out.finish(root)


def fitting_level(log: TransactionLog, level: int) -> int:
    """Return the zstd level that a log is compressed with where ``level`` is configured.

    Chunks along one axis are increasing numbers: level 1 compresses them as well as level 3, which
    searches further back in vain, in half the time.
    """
    axes = [coords.shape[1] for coords in log.updated_chunks.values()]
    return 1 if axes == [1] and level in _LIKE_THE_FIRST else level


def _vtables(layout: Layout) -> dict[str, tuple[int, bytes]]:
    raw = {
        # Lists in slots 1 to 6 at 16 to 36, chunks at 40, moves at 44.
        "root": vtable({0: 4, **{slot: 12 + 4 * slot for slot in range(1, 9)}}, 48),
        "node": vtable({0: 4, 1: 12}, 16),
        "chunk": vtable({0: 4}, 8),
        "move": vtable({0: 4, 1: 8, 2: 12, 3: 20}, 24),
    }
    return {name: (layout.place(len(table), 2), table) for name, table in raw.items()}


class _Chunks:
    """The touched chunks of all arrays: ChunkIndices tables, each with its coordinates."""

    def __init__(self, layout: Layout, chunks: Mapping[NodeId, CoordinateColumns]) -> None:
        self.nodes = sorted(chunks)
        self.coords = [chunks[node] for node in self.nodes]
        count = len(self.nodes)
        self.counts = np.fromiter(map(len, self.coords), np.int64, count)
        self.ranks = np.fromiter((it.shape[1] for it in self.coords), np.int64, count)
        sizes = _TABLE_BYTES + self.counts * (4 + _RECORD_BYTES + 4 * self.ranks)
        first = layout.place(int(sizes.sum()), 4)
        self.tables: npt.NDArray[np.int64] = first + np.cumsum(sizes) - sizes

    def fill(self, out: Output, node_vtable: int, chunk_vtable: int) -> None:
        """Write them; those of small arrays together."""
        words = out.data[: len(out.data) & ~3].view("<u4")
        at = self.tables >> 2
        words[at] = self.tables - node_vtable
        ids = np.frombuffer(b"".join(self.nodes), "<u4").reshape(-1, 2)
        words[at + 1], words[at + 2] = ids[:, 0], ids[:, 1]
        words[at + 3] = 4  # from the field to the vector right behind it
        words[at + 4] = self.counts
        # One by itself is quicker as if it were large.
        small = (self.counts <= _SMALL) & (len(self.nodes) > 1)
        for rank in np.unique(self.ranks[small]).tolist():
            chosen = np.flatnonzero(small & (self.ranks == rank))
            parts = np.cumsum(self.counts[chosen]) // BLOCK
            for arrays in np.split(chosen, np.flatnonzero(np.diff(parts)) + 1):
                self._fill_small(words, arrays, rank, chunk_vtable)
        for array in np.flatnonzero(~small).tolist():
            self._fill_large(out, array, chunk_vtable)

    def _fill_small(
        self, words: npt.NDArray[Any], arrays: npt.NDArray[np.intp], rank: int, chunk_vtable: int
    ) -> None:
        """Write the coordinates of arrays of one rank."""
        counts = self.counts[arrays]
        owners = np.repeat(np.arange(len(arrays)), counts)
        numbers = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        firsts = self.tables[arrays] + _TABLE_BYTES
        entries = firsts[owners] + 4 * numbers
        records = (firsts + 4 * counts)[owners] + (_RECORD_BYTES + 4 * rank) * numbers
        words[entries >> 2] = records - entries
        block = np.empty((len(owners), 3 + rank), np.uint32)
        block[:, 0] = records - chunk_vtable
        block[:, 1] = 4  # from the field to the vector right behind it
        block[:, 2] = rank
        chosen: list[int] = arrays.tolist()
        block[:, 3:] = np.concatenate([self.coords[array] for array in chosen])
        words[(records >> 2)[:, None] + np.arange(3 + rank)] = block

    def _fill_large(self, out: Output, array: int, chunk_vtable: int) -> None:
        """Write the coordinates of one array, some at a time."""
        coords = self.coords[array]
        count, rank = coords.shape
        dtype = np.dtype(
            [("vtable", "<i4"), ("offset", "<u4"), ("rank", "<u4"), ("coords", "<u4", (rank,))]
        )
        vector = int(self.tables[array]) + _TABLE_BYTES - 4
        first = vector + 4 + 4 * count
        entries = out.offsets(vector, count)
        records = out.records(first, count, dtype)
        for start in range(0, count, BLOCK):
            rows = slice(start, min(start + BLOCK, count))
            tables = first + np.arange(rows.start, rows.stop) * dtype.itemsize
            entries.put(rows, tables)
            record = records[rows]
            record["vtable"] = tables - chunk_vtable
            record["offset"] = 4
            record["rank"] = rank
            record["coords"] = coords[rows]


class _MoveBlock:
    """One MoveOperation table and its two paths."""

    def __init__(self, layout: Layout, move: Move) -> None:
        self.move = move
        self.texts = [move.source.encode(), move.target.encode()]
        self.table = layout.place(24, 4)
        self.strings = [layout.place(4 + len(text) + 1, 4) for text in self.texts]

    def fill(self, out: Output, move_vtable: int) -> None:
        out.table(self.table, move_vtable)
        for field_at, at, text in zip(
            (self.table + 4, self.table + 8), self.strings, self.texts, strict=True
        ):
            out.offset(field_at, at)
            out.word(at, len(text))
            out.put(at + 4, text)
        out.put(self.table + 12, self.move.node_id)
        out.word(self.table + 20, int(self.move.is_array), 1)

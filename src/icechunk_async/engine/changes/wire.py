"""Documents that travel between processes: changes of forks here, and how all of them are packed.

One msgpack document in a zstd frame with a checksum. Chunk references are columns, and a column
of one value is that value; equal changes give equal bytes. Bytes from elsewhere are not trusted:
every value is checked, and reading never runs code.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack
import numpy as np
import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.envelope import decompress
from icechunk_async.format.flatbuffers.writing import copy_pieces
from icechunk_async.format.ids import ChunkId, NodeId, SnapshotId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.paths import check_path
from icechunk_async.format.snapshot import ArrayData, Dimension, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.manifest.locations import StringPool
    from icechunk_async.format.sums import Codes

__all__ = [
    "ForkState",
    "Lineage",
    "Membership",
    "Parcel",
    "counts_of",
    "counts_to",
    "decode_fork",
    "encode_fork",
    "list_of",
    "rows_of",
    "stamps_of",
    "stamps_to",
    "table_of",
    "typed",
]

_LEVEL: Final = 3
_SESSION_BYTES: Final = 12
_MAX_BYTES: Final = 1 << 63
"""Beyond any object's size."""
_FORK_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class Parcel:
    """One kind of document that travels."""

    magic: bytes
    """The bytes that all begin with."""
    version: int
    """Of its encoding; others are refused."""
    name: str
    """As errors call it, after an article."""

    def pack(self, document: Mapping[str, object]) -> bytes:
        """Return the bytes of a document."""
        # Parcels travel through queues and files of others; the checksum finds bytes that were
        # damaged there.
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        packed = compressor.compress(msgpack.packb(document))
        return self.magic + bytes([self.version]) + packed

    def unpack[T](self, data: bytes | memoryview, parse: Callable[[dict[str, object]], T]) -> T:
        """Return the result of ``parse``, which takes the document.

        Raises:
            FormatError: the bytes are damaged, hostile, or of another version.
        """
        view, start = memoryview(data), len(self.magic) + 1
        if bytes(view[: start - 1]) != self.magic or len(view) <= start:
            raise FormatError(f"These bytes are not a {self.name}, or only the beginning of one.")
        if view[start - 1] != self.version:
            raise FormatError(
                f"A {self.name} was written in version {view[start - 1]} of its encoding, and this "
                f"library reads version {self.version}. Use the same version of icechunk-async "
                "everywhere."
            )
        try:
            # `decompress` believes a frame only as much as its length allows.
            return parse(table_of(msgpack.unpackb(bytes(decompress(view[start:], self.name)))))
        # An `OverflowError` is NumPy's, for a constant that does not fit its column. msgpack raises
        # `ValueError` for whatever it cannot read, also for documents that nest too deeply.
        except (ValueError, KeyError, TypeError, OverflowError, InvalidInputError) as error:
            raise FormatError(f"The bytes of a {self.name} are damaged: {error!r}.") from error
        except RecursionError as error:
            raise FormatError(f"The bytes of a {self.name} nest too deeply.") from error


_PARCEL: Final = Parcel(b"ICAFORK", 2, "fork")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which fork this is, and which others it answers for. Every copy of a fork has one lineage."""

    fork_id: bytes = b""
    merged: frozenset[bytes] = frozenset()
    """Forks whose changes it holds."""
    missing: frozenset[bytes] = frozenset()
    """Forks of it that were handed out and not merged into it."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a fork in a session with a lease, to which it can publish its changes."""

    session_id: bytes
    """Names the session, and so its lease."""
    base_id: SnapshotId
    """The snapshot that the session builds on."""
    generation: int
    """The generation of forks that it belongs to, see `LeaseRecord.generation`."""
    turn: int
    """Counts the processes that have held the session, up to the one that made the fork."""
    number: int = 0
    """The number of its publications."""
    refreshed: bool = False
    """Whether it stands on the session's base, with what others published among its changes."""
    clock: int = 0
    """The highest stamp that it has seen."""
    stamps: Mapping[NodeId, int] = field(default_factory=dict["NodeId", "int"])
    """When arrays were changed last, as it has seen them."""
    taken: Mapping[bytes, int] = field(default_factory=dict["bytes", "int"])
    """The number of publications of each other fork that it has seen."""
    known: ChangeSet = field(default_factory=ChangeSet)
    """The part of its changes that others know: what it published, and what it read of others."""


@dataclass(frozen=True, slots=True)
class ForkState:
    """The part of a fork that travels."""

    session_id: bytes
    """Names the session that all its forks, and forks of these, come from."""
    base_id: SnapshotId
    changes: ChangeSet
    lineage: Lineage = Lineage()
    membership: Membership | None = None
    """None if its session has no lease."""
    deduplicate: bool = False
    """Whether it stores no bytes that are there already."""


def encode_fork(state: ForkState) -> bytes:
    """Return the bytes of a fork. Cost: about 25 bytes a native chunk before compression."""
    lineage, membership = state.lineage, state.membership
    document: dict[str, object] = {
        "session": state.session_id,
        "base": bytes(state.base_id),
        "fork": [lineage.fork_id, sorted(lineage.merged), sorted(lineage.missing)],
    }
    if membership is None:
        document |= _document(state.changes)
    else:
        noted = _noted(state.changes, membership.known)
        document |= _document(state.changes, but=noted)
        document["lease"] = {
            "session": membership.session_id,
            "base": bytes(membership.base_id),
            "generation": membership.generation,
            "turn": membership.turn,
            "number": membership.number,
            "refreshed": membership.refreshed,
            "clock": membership.clock,
            "stamps": stamps_to(membership.stamps),
            "taken": counts_to(membership.taken),
            "known": _document(membership.known),
            "noted": [
                [bytes(node_id), it.rank, _optional_list(kept), _columns(it.columns())]
                for node_id, (it, kept) in sorted(noted.items())
            ],
        }
    if state.deduplicate:
        document["deduplicate"] = True
    return _PARCEL.pack(document)


def _noted(
    changes: ChangeSet, known: ChangeSet
) -> dict[NodeId, tuple[ArrayChanges, Coordinates | None]]:
    """Return the journals of arrays that a state has changes of, and their kept grids."""
    found: dict[NodeId, tuple[ArrayChanges, Coordinates | None]] = {}
    for node_id, it in changes.chunks.items():
        was = known.chunks.get(node_id)
        if was is not None and was.rank == it.rank and it.journal is not None:
            found[node_id] = it.journal, it.kept_grid
    return found


def _document(changes: ChangeSet, but: Collection[NodeId] = ()) -> dict[str, object]:
    """Return changes as a document, but for the chunks of some arrays."""
    document: dict[str, object] = {
        "new": _nodes(changes.new.values()),
        "updated": _nodes(changes.updated.values()),
        "deleted": sorted(
            [gone.path, bytes(node_id), gone.is_array] for node_id, gone in changes.deleted.items()
        ),
        "chunks": [
            [bytes(node_id), it.rank, _optional_list(it.kept_grid), _columns(it.columns())]
            for node_id, it in sorted(changes.chunks.items())
            if node_id not in but and not (it.is_empty() and it.kept_grid is None)
        ],
    }
    if changes.sources:
        document["sources"] = sorted(map(bytes, changes.sources))
    return document


def stamps_to(stamps: Mapping[NodeId, int]) -> list[list[object]]:
    """Return the stamps of arrays as plain rows."""
    return [[bytes(node_id), stamp] for node_id, stamp in sorted(stamps.items())]


def counts_to(counts: Mapping[bytes, int]) -> list[list[object]]:
    """Return numbers of publications by fork as plain rows."""
    return [[fork_id, count] for fork_id, count in sorted(counts.items())]


def stamps_of(value: object) -> dict[NodeId, int]:
    """Read `stamps_to`; raise FormatError or InvalidInputError if it is something else."""
    return {NodeId(typed(it, bytes)): _natural(stamp) for it, stamp in rows_of(value, 2)}


def counts_of(value: object) -> dict[bytes, int]:
    """Read `counts_to`; raise FormatError if it is something else."""
    found: dict[bytes, int] = {}
    for fork_id, count in rows_of(value, 2):
        if len(typed(fork_id, bytes)) != _FORK_BYTES:
            raise FormatError("A fork is named by other bytes than a fork can be.")
        found[fork_id] = -1 if count == -1 else _natural(count)
    return found


def _nodes(nodes: Iterable[Node]) -> list[list[object]]:
    return [
        [
            node.path,
            bytes(node.id),
            node.user_data,
            None
            if node.array is None
            else [
                [[it.array_length, it.num_chunks] for it in node.array.dimensions],
                _optional_list(node.array.dimension_names),
            ],
        ]
        for node in sorted(nodes, key=lambda node: node.path)
    ]


def _optional_list(values: Iterable[object] | None) -> list[object] | None:
    return None if values is None else list(values)


def _columns(refs: ChunkRefs) -> dict[str, object]:
    """Return plain columns; what a kind of chunk does not use is left out, for equal bytes."""
    native, virtual, inline = (
        refs.kinds == kind for kind in (Kind.NATIVE, Kind.VIRTUAL, Kind.INLINE)
    )
    guarded = virtual & (refs.etags >= 0)
    locations, location_of = _sorted_pool(refs.locations, refs.objects[virtual])
    etags, etag_of = _sorted_pool(refs.etag_pool, refs.etags[guarded])
    document: dict[str, object] = {
        "coords": [_column(axis, "<u4") for axis in refs.coords.T],
        "count": len(refs),
        "kinds": _column(refs.kinds, "u1"),
        "lengths": _column(np.where(refs.kinds == Kind.DELETED, 0, refs.lengths), "<u8"),
        "offsets": _column(np.where(native | virtual, refs.offsets, 0), "<u8"),
        "ids": refs.chunk_ids[refs.objects[native]].tobytes(),
        "locations": locations,
        "location_of": _column(location_of, "<u4"),
        "guarded": _column(guarded, "u1"),
        "etags": etags,
        "etag_of": _column(etag_of, "<u4"),
        "modified": _column(np.where(virtual, refs.modified, 0), "<u4"),
        "inline": _inline_bytes(refs, inline),
    }
    if refs.sums is not None and refs.sums[native].any():
        document["sums"] = _column(np.where(native, refs.sums, 0), "<u8")
    return document


def _column(values: npt.NDArray[Any], dtype: str) -> int | bytes:
    values = np.ascontiguousarray(values, dtype)
    if len(values) and (values == values[0]).all():
        return int(values[0])
    return values.tobytes()


def _sorted_pool(
    pool: StringPool, rows: npt.NDArray[Any]
) -> tuple[list[str], npt.NDArray[np.uint32]]:
    """Return the strings that rows refer to, in order, and each row's index into them."""
    indices, distinct = pool.take(rows.astype(np.int64)).distinct()
    strings = sorted(distinct.strings)
    places = {string: place for place, string in enumerate(strings)}
    order = np.array([places[string] for string in distinct.strings], np.uint32)
    return strings, order[indices]


def _inline_bytes(refs: ChunkRefs, inline: npt.NDArray[np.bool_]) -> bytes:
    """Return the bytes of inline chunks, one row's after the other's."""
    starts, sizes = refs.offsets[inline].astype(np.int64), refs.lengths[inline].astype(np.int64)
    packed = np.empty(int(sizes.sum()), np.uint8)
    source = np.frombuffer(refs.inline, np.uint8)
    copy_pieces(packed, np.cumsum(sizes) - sizes, source, starts, sizes)
    return packed.tobytes()


def decode_fork(data: bytes | memoryview) -> ForkState:
    """Read the bytes of a fork.

    Raises:
        FormatError: they are damaged, hostile, or of a newer version of this library.
    """
    return _PARCEL.unpack(data, _state)


def typed[T](value: object, kind: type[T]) -> T:
    """Return a value that has to be of a type.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"The bytes hold a {type(value).__name__} in place of a {kind.__name__}.")
    return value


def table_of(value: object) -> dict[str, object]:
    """Return a value that has to be a table; errors as `typed`."""
    return cast("dict[str, object]", typed(value, dict))


def list_of(value: object) -> list[object]:
    """Return a value that has to be a list; errors as `typed`."""
    return cast("list[object]", typed(value, list))


def rows_of(value: object, width: int) -> list[list[Any]]:
    """Return a value that has to be a list of lists of ``width`` values; errors as `typed`."""
    found: list[list[Any]] = [list_of(row) for row in list_of(value)]
    if any(len(row) != width for row in found):
        raise FormatError("The bytes hold a row of another width.")
    return found


def _state(document: dict[str, object]) -> ForkState:
    changes, membership = _change_set(document), None
    if (lease := document.get("lease")) is not None:
        membership = _membership(table_of(lease))
        _continue(changes, membership.known, rows_of(table_of(lease)["noted"], 4))
    return ForkState(
        _session(document),
        SnapshotId(typed(document["base"], bytes)),
        changes,
        _lineage(document["fork"]),
        membership,
        typed(document.get("deduplicate", False), bool),
    )


def _continue(changes: ChangeSet, known: ChangeSet, rows: list[list[Any]]) -> None:
    """Add the chunks of arrays that are given by what was set since a state."""
    for row in rows:
        node_id, noted = _changes(*row)
        was = known.chunks.get(node_id)
        if was is None or was.rank != noted.rank or node_id in changes.chunks:
            raise FormatError("A fork continues an array that it does not know.")
        it = changes.chunks[node_id] = was.copy()
        it.set_many(noted.columns())
        # The grid is that of the whole state. A journal has none: `news_since` compares grids by
        # itself.
        it.kept_grid, noted.kept_grid = noted.kept_grid, None
        it.journal = noted


def _session(document: dict[str, object]) -> bytes:
    session_id = typed(document["session"], bytes)
    if len(session_id) != _SESSION_BYTES:
        raise FormatError("A fork names no session.")
    return session_id


def _membership(document: dict[str, object]) -> Membership:
    return Membership(
        _session(document),
        SnapshotId(typed(document["base"], bytes)),
        _natural(document["generation"]),
        _natural(document["turn"]),
        _natural(document["number"]),
        typed(document["refreshed"], bool),
        _natural(document["clock"]),
        stamps_of(document["stamps"]),
        counts_of(document["taken"]),
        _change_set(table_of(document["known"])),
    )


def _change_set(document: dict[str, object]) -> ChangeSet:
    new = [_node(*row) for row in rows_of(document["new"], 4)]
    updated = [_node(*row) for row in rows_of(document["updated"], 4)]
    changes = ChangeSet(
        {node.path: node for node in new},
        {node.id: node for node in updated},
        {
            NodeId(typed(node_id, bytes)): Deleted(_path(path), typed(is_array, bool))
            for path, node_id, is_array in rows_of(document["deleted"], 3)
        },
        dict(_changes(*row) for row in rows_of(document["chunks"], 4)),
        sources=frozenset(
            SnapshotId(typed(source, bytes)) for source in list_of(document.get("sources", []))
        ),
    )
    if len(changes.new) != len(new) or len(changes.updated) != len(updated):
        # Of two with one name the mappings keep one: changes would be lost without an error.
        raise FormatError("A fork lists a node twice.")
    return changes


def _lineage(value: object) -> Lineage:
    ((fork_id, merged, missing),) = rows_of([value], 3)
    known, lost = (frozenset(typed(it, bytes) for it in list_of(ids)) for ids in (merged, missing))
    return Lineage(typed(fork_id, bytes), known, lost)


def _path(value: object) -> str:
    path = typed(value, str)
    if not path.startswith("/") or check_path(path) != path:
        raise FormatError(f"A fork holds a node at {path[:100]!r}, which is no path.")
    return path


def _node(path: object, node_id: object, user_data: object, array: object) -> Node:
    found = None
    if array is not None:
        ((dimensions, names),) = rows_of([array], 2)
        found = ArrayData(
            tuple(
                Dimension(_natural(length), _natural(count))
                for length, count in rows_of(dimensions, 2)
            ),
            None if names is None else tuple(_name(name) for name in list_of(names)),
        )
        if len(found.dimensions) > MAX_RANK:
            raise FormatError(f"A fork holds an array of {len(found.dimensions)} axes.")
    return Node(NodeId(typed(node_id, bytes)), _path(path), typed(user_data, bytes), found)


def _natural(value: object) -> int:
    number = typed(value, int)
    if not 0 <= number < _MAX_BYTES:
        raise FormatError(f"A fork holds the number {number} where it cannot be.")
    return number


def _name(value: object) -> str | None:
    return None if value is None else typed(value, str)


def _changes(
    node_id: object, rank: object, kept_grid: object, columns: object
) -> tuple[NodeId, ArrayChanges]:
    axes = _natural(rank)
    changes = ArrayChanges(axes)
    if kept_grid is not None:
        kept = tuple(_natural(size) for size in list_of(kept_grid))
        if len(kept) != axes:
            raise FormatError("A fork shrinks an array to a grid of another rank.")
        changes.kept_grid = kept
    refs = _refs(table_of(columns), axes)
    if len(refs):
        changes.set_many(refs)
    return NodeId(typed(node_id, bytes)), changes


class _Columns:
    """The columns of a document, each checked for its length."""

    def __init__(self, columns: dict[str, object]) -> None:
        self.columns = columns
        self.count = _natural(columns["count"])

    def read(self, value: object, dtype: str, count: int | None = None) -> npt.NDArray[Any]:
        count = self.count if count is None else count
        if isinstance(value, int):
            # Repeated without memory, which is why `_check_count` bounds the number of rows first.
            return np.broadcast_to(np.array(value, dtype), count)
        column = np.frombuffer(typed(value, bytes), dtype)
        if len(column) != count:
            raise FormatError(f"A fork holds a column of {len(column)} rows in place of {count}.")
        return column

    def named(self, name: str, dtype: str, count: int | None = None) -> npt.NDArray[Any]:
        return self.read(self.columns[name], dtype, count)

    def strings(self, name: str) -> Strings:
        values = list_of(self.columns[name])
        return Strings(tuple(typed(value, str) for value in values))


def _refs(document: dict[str, object], rank: int) -> ChunkRefs:
    columns = _Columns(document)
    axes = list_of(document["coords"])
    if len(axes) != rank or rank > MAX_RANK:
        raise FormatError(f"A fork holds coordinates of {len(axes)} axes in place of {rank}.")
    _check_count(columns, axes)
    coords = np.empty((columns.count, rank), np.uint32)
    for axis, values in enumerate(axes):
        coords[:, axis] = columns.read(values, "<u4")
    kinds = columns.named("kinds", "u1")
    # A copy of the offsets: those of inline chunks are filled in below, and a column is a view of
    # the bytes or one number for all rows.
    lengths, offsets = columns.named("lengths", "<u8"), np.array(columns.named("offsets", "<u8"))
    if columns.count and (
        kinds.max() > Kind.DELETED
        or np.any((lengths == 0) & (kinds != Kind.DELETED))
        # As Python's numbers, since the sum of hostile ones could wrap round in 64 bits.
        or int(lengths.max()) + int(offsets.max()) >= _MAX_BYTES
    ):
        raise FormatError("A fork holds a chunk reference that cannot be.")
    objects = np.zeros(columns.count, np.uint32)
    native, virtual, inline = (kinds == kind for kind in (Kind.NATIVE, Kind.VIRTUAL, Kind.INLINE))
    ids = _ids(typed(document["ids"], bytes), int(native.sum()))
    objects[native] = np.arange(len(ids))
    locations, etag_pool = columns.strings("locations"), columns.strings("etags")
    objects[virtual] = _below(
        columns.named("location_of", "<u4", int(virtual.sum())), len(locations)
    )
    guarded = virtual & (columns.named("guarded", "u1") != 0)
    etags = np.full(columns.count, -1, np.int32)
    etags[guarded] = _below(columns.named("etag_of", "<u4", int(guarded.sum())), len(etag_pool))
    data = typed(document["inline"], bytes)
    sizes = lengths[inline].astype(np.int64)
    # The largest first: the sum of hostile sizes could wrap round to the right one.
    if (len(sizes) and int(sizes.max()) > len(data)) or int(sizes.sum()) != len(data):
        raise FormatError("A fork holds other inline bytes than its chunks have.")
    offsets[inline] = np.cumsum(sizes) - sizes
    refs = ChunkRefs.build(
        coords,
        np.array(kinds),
        objects=objects,
        offsets=offsets,
        lengths=lengths,
        etags=etags,
        modified=columns.named("modified", "<u4"),
        chunk_ids=ids,
        locations=locations,
        etag_pool=etag_pool,
        inline=memoryview(data),
        sums=_sums(columns, native),
    )
    # Lookups bisect, and rows that repeat would make two chunks of one.
    refs.check_sorted()
    return refs


def _ids(data: bytes, count: int) -> npt.NDArray[np.uint8]:
    """Return the ids of chunk objects; all of a repository's have the same length."""
    width = len(data) // count if count else ChunkId.size_bytes
    if width not in ChunkId.sizes_bytes or len(data) != width * count:
        raise FormatError(f"A fork holds {len(data)} bytes of ids for {count} native chunks.")
    return np.frombuffer(data, np.uint8).reshape(count, width)


def _sums(columns: _Columns, native: npt.NDArray[np.bool_]) -> Codes | None:
    """Return the codes of checksums; None if the fork knows of none."""
    if "sums" not in columns.columns:
        return None
    codes: Codes = columns.named("sums", "<u8")
    known = codes != 0
    # A code is a checksum of 32 bits with a bit above it that says that it is known.
    if np.any(known & ~native) or np.any(codes[known] >> np.uint64(32) != 1):
        raise FormatError("A fork holds a checksum that cannot be.")
    return codes


def _check_count(columns: _Columns, axes: list[object]) -> None:
    """Refuse more rows than the columns can tell apart: constants alone take no bytes."""
    told = [len(axis) // 4 for axis in axes if isinstance(axis, bytes)]
    if columns.count > max(told, default=1):
        raise FormatError(f"A fork claims {columns.count} chunks and does not list them.")


def _below(indices: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    if len(indices) and int(indices.max()) >= size:
        raise FormatError("A fork refers beyond its strings.")
    return indices

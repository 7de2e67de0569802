"""Chunk manifests of the first draft (its spec, "Chunk Manifest Files"): Parquet, a row a chunk.

Rows ascend by array and coordinates, so that the statistics of a group of rows tell which chunks
can be in it. A chunk file that is a URL is outside of the repository.

Of large files only the metadata is read, and the groups of rows asked for. The metadata has the
smallest and the greatest array and coordinates of each group, if its writer stored them. A group
whose bounds leave a chunk out is not read.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.draft.coordinates import decode_columns, encode_columns, encode_coords
from icechunk_async.format.draft.names import chunk_ids, chunk_names, is_url
from icechunk_async.format.draft.pages import read_footer
from icechunk_async.format.draft.parquet import ParquetReader, distinct, numbers, write_parquet
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.held import EXPAND, Undecided
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from icechunk_async.format.draft.pages import Group
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.held import Extent

__all__ = [
    "MANIFEST",
    "MANIFEST_SCHEMA",
    "READ_SCHEMA",
    "UNSIZED_TAIL",
    "decode_manifest",
    "encode_manifest",
    "longer_tail",
    "open_pieces",
]

MANIFEST: Final = "chunk manifest"
MANIFEST_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.uint32(), nullable=False),
        pa.field("array_id", pa.uint32(), nullable=False),
        pa.field("coord", pa.binary(), nullable=False),
        pa.field("inline_data", pa.binary()),
        pa.field("chunk_file", pa.string()),
        pa.field("offset", pa.uint64()),
        pa.field("length", pa.uint32(), nullable=False),
    ]
)
READ_SCHEMA: Final = pa.schema([field for field in MANIFEST_SCHEMA if field.name != "id"])
"""The columns that a reader needs: chunks are found by their coordinates."""
_MAX_LENGTH: Final = (1 << 32) - 1
"""Bytes of a chunk."""
_MAX_OFFSET: Final = 1 << 62
_GROUP_ROWS: Final = 1 << 14
"""Rows that are read to find one chunk."""
_GROUP_BYTES: Final = 1 << 20
_FEWEST_ROWS: Final = 256
_MAX_ROWS: Final = (1 << 32) - 1
UNSIZED_TAIL: Final = 1 << 17
"""Bytes at the end of a file that are read first; smaller files are read whole by that."""
_TRAILER: Final = 8
"""The length of the metadata, and the letters that end a file."""
_MOST_GROUPS: Final = 4
"""Groups that a chunk may be in; if there are more, the whole file is read."""
_BYTES_PER_GROUP: Final = 40


def decode_manifest(manifest_id: ManifestId, data: bytes | memoryview) -> Manifest:
    """Read a manifest.

    Args:
        manifest_id: the id that stands for its name, which its file does not have.
        data: its file.

    Raises:
        FormatError: it is damaged.
    """
    return decode_groups(manifest_id, ParquetReader(data, MANIFEST, schema=READ_SCHEMA))


def decode_groups(
    manifest_id: ManifestId, reader: ParquetReader, groups: list[int] | None = None
) -> Manifest:
    """Read some groups of rows of a manifest, by default all; as `decode_manifest`."""
    table = reader.read(groups)
    arrays: dict[NodeId, ChunkRefs] = {}
    strays: dict[tuple[NodeId, int], ChunkRefs] = {}
    for number, refs in sorted(_arrays(table), key=lambda it: (it[0], -len(it[1]), it[1].rank)):
        node_id = NodeId(number.to_bytes(NodeId.size_bytes))
        if arrays.setdefault(node_id, refs) is not refs:
            strays[node_id, refs.rank] = refs
    return Manifest(manifest_id, arrays, strays)


def _arrays(table: pa.Table) -> list[tuple[int, ChunkRefs]]:
    """Return the references of each array and rank."""
    numbers_of = numbers(table["array_id"], pa.uint32(), MANIFEST)
    coord_rows, bounds, data = distinct(table["coord"], pa.binary(), MANIFEST)
    if (coord_rows < 0).any():
        raise FormatError(f"A {MANIFEST} has chunks without coordinates.")
    columns = _columns(table)
    found: list[tuple[int, ChunkRefs]] = []
    for values, coords in decode_columns(data, bounds):
        place_of = np.full(len(bounds) - 1, -1, np.int64)
        place_of[values] = np.arange(len(values))
        places = place_of[coord_rows]
        rows = np.flatnonzero(places >= 0)
        for number in np.unique(numbers_of[rows]).tolist():
            chosen = rows[numbers_of[rows] == number]
            refs = ChunkRefs.build(
                coords[places[chosen]],
                **{name: it[chosen] for name, it in columns.rows.items()},
                **columns.pools,
            )
            ordered = refs.sort()
            if len(ordered) != len(refs):
                raise FormatError(f"A {MANIFEST} has two references for one chunk.")
            found.append((number, ordered))
    return found


class _Columns:
    def __init__(self, rows: dict[str, npt.NDArray[Any]], pools: dict[str, Any]) -> None:
        self.rows = rows
        self.pools = pools


def _columns(table: pa.Table) -> _Columns:
    """Return the columns of all references but their coordinates, and what they refer to."""
    inline_rows, inline_bounds, inline = distinct(table["inline_data"], pa.binary(), MANIFEST)
    file_rows, file_bounds, text = distinct(table["chunk_file"], pa.string(), MANIFEST)
    offsets = numbers(table["offset"], pa.uint64(), MANIFEST, null=0)
    lengths = numbers(table["length"], pa.uint32(), MANIFEST).astype(np.uint64)
    is_inline = inline_rows >= 0
    # Both or none: the specification wants one of them, and a reader that guessed could return
    # another chunk's bytes.
    if (is_inline == (file_rows >= 0)).any():
        raise FormatError(f"A {MANIFEST} has a chunk that is not in one place.")
    if (offsets >= _MAX_OFFSET).any():
        raise FormatError(f"A {MANIFEST} has a chunk beyond the end of any file.")
    places = inline_rows[is_inline]
    if (inline_bounds[places + 1] - inline_bounds[places] != lengths[is_inline]).any():
        raise FormatError(f"A {MANIFEST} has inline chunks of another length than it says.")
    offsets = offsets.copy()
    offsets[is_inline] = inline_bounds[places]
    names = _texts(file_bounds, text)
    outside = np.fromiter(map(is_url, names), bool, len(names))
    objects = np.where(outside, np.cumsum(outside), np.cumsum(~outside)) - 1
    ids = chunk_ids([name for name, it in zip(names, outside, strict=True) if not it])
    urls = tuple(name for name, it in zip(names, outside, strict=True) if it)
    kinds = np.full(len(file_rows), Kind.INLINE, np.uint8)
    in_files = np.flatnonzero(~is_inline)
    row_objects = np.zeros(len(file_rows), np.uint32)
    if len(in_files):
        used = file_rows[in_files]
        kinds[in_files] = np.where(outside[used], Kind.VIRTUAL, Kind.NATIVE)
        row_objects[in_files] = objects[used]
    return _Columns(
        {"kinds": kinds, "objects": row_objects, "offsets": offsets, "lengths": lengths},
        {"chunk_ids": ids, "locations": Strings(urls), "inline": memoryview(inline).toreadonly()},
    )


def _texts(bounds: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> list[str]:
    raw = data.tobytes()
    places: list[int] = bounds.tolist()
    try:
        return [raw[a:b].decode() for a, b in pairwise(places)]
    except UnicodeDecodeError as error:
        raise FormatError(f"A {MANIFEST} has names that are not UTF-8.") from error


def encode_manifest(arrays: Mapping[NodeId, ChunkRefs], level: int) -> bytes:
    """Return the file of a manifest.

    Args:
        arrays: references of each array, sorted by coordinates, without deletions or checksums of
            virtual chunks.
        level: of compression.

    Raises:
        InvalidInputError: an array's id is no number, a chunk is too large, or there are too many.
    """
    parts = [_table(node_id, refs) for node_id, refs in sorted(arrays.items())]
    table = pa.concat_tables(parts) if parts else READ_SCHEMA.empty_table()
    if table.num_rows > _MAX_ROWS:
        raise InvalidInputError(f"A {MANIFEST} holds at most {_MAX_ROWS} chunks; split it.")
    ids = pa.array(np.arange(table.num_rows, dtype=np.uint32))
    table = table.add_column(0, MANIFEST_SCHEMA.field("id"), ids)
    # Groups with inline chunks have fewer rows, so that finding one chunk reads a megabyte at most.
    average = max(64, table.nbytes // max(1, table.num_rows))
    is_shared = any(len(refs.locations) for refs in arrays.values())
    return write_parquet(
        table,
        level,
        rows=max(_FEWEST_ROWS, min(_GROUP_ROWS, _GROUP_BYTES // average)),
        statistics=("array_id", "coord"),
        repeated=("array_id", "chunk_file") if is_shared else ("array_id",),
    )


def _table(node_id: NodeId, refs: ChunkRefs) -> pa.Table:
    """Return the rows of an array without ids."""
    number = int.from_bytes(node_id)
    if number >= 1 << 32:
        raise InvalidInputError(f"The array {node_id} has an id that is no number.")
    if (refs.lengths > _MAX_LENGTH).any():
        raise InvalidInputError(f"A chunk of {int(refs.lengths.max())} bytes is too large.")
    refs = refs.narrow().compact()
    count = len(refs)
    data, bounds = encode_columns(refs.coords)
    is_inline = refs.kinds == Kind.INLINE
    inline: list[bytes | None] = [None] * count
    for row in np.flatnonzero(is_inline).tolist():
        offset, length = refs.offsets.item(row), refs.lengths.item(row)
        inline[row] = bytes(refs.inline[offset : offset + length])
    ids = chunk_names(refs.chunk_ids) if len(refs.chunk_ids) else []
    locations = [refs.locations.get(at) for at in range(len(refs.locations))]
    objects = refs.objects.astype(np.int64) + np.where(refs.kinds == Kind.VIRTUAL, len(ids), 0)
    files = pa.array([*ids, *locations], pa.string())
    columns = [
        pa.array(np.full(count, number, np.uint32)),
        _binary(data, bounds),
        pa.array(inline, pa.binary()),
        files.take(pa.array(objects, mask=is_inline)),
        pa.array(refs.offsets, mask=is_inline),
        pa.array(refs.lengths.astype(np.uint32)),
    ]
    return pa.Table.from_arrays(columns, schema=READ_SCHEMA)


def _binary(data: npt.NDArray[np.uint8], bounds: npt.NDArray[np.int64]) -> Any:
    places = bounds.astype(np.int32)
    if bounds[-1] >= 1 << 31:
        raise InvalidInputError(f"A {MANIFEST} cannot hold coordinates of 2 GiB; split it.")
    buffers = [None, pa.py_buffer(places), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def longer_tail(size_bytes: int, tail: bytes | memoryview) -> Extent | None:
    """Return the end of a file that holds its metadata; None if ``tail`` does, or is damaged."""
    length = int.from_bytes(tail[-_TRAILER:-4], "little") + _TRAILER
    if len(tail) < _TRAILER or len(tail) >= length or length > size_bytes:
        return None
    return size_bytes - length, size_bytes


def open_pieces(
    manifest_id: ManifestId, size_bytes: int, tail: bytes | memoryview
) -> PiecewiseManifest | None:
    """Open a manifest by the end of its file; None if that does not hold its metadata."""
    try:
        return PiecewiseManifest(manifest_id, size_bytes, tail)
    except FormatError:
        return None  # the whole file decides


class PiecewiseManifest:
    """A `HeldManifest` of which only some groups of rows are in memory."""

    is_whole = False
    columns = None

    def __init__(self, manifest_id: ManifestId, size_bytes: int, tail: bytes | memoryview) -> None:
        """Read the metadata; as `open_pieces`.

        Raises:
            FormatError: it is damaged, or not in ``tail``.
        """
        self.id = manifest_id
        footer = read_footer(memoryview(tail), size_bytes, MANIFEST)
        # pyarrow reads a file as a whole buffer; of this one only those pages exist that were
        # filled.
        self._data = np.zeros(size_bytes, np.uint8)  # takes no memory where nothing is put
        self._put(size_bytes - len(tail), tail)
        self._reader = ParquetReader(self._data, MANIFEST, schema=READ_SCHEMA, footer=footer)
        self._groups = [_Bounds(it) for it in footer.groups]
        self._extents = [_extent(it) for it in footer.groups]
        self._held: Mapping[int, Manifest] = {}
        self._lock = threading.Lock()

    @property
    def weight(self) -> int:
        """As ``HeldManifest``."""
        groups = 1 + len(self._groups) * _BYTES_PER_GROUP
        return groups + sum(it.weight for it in self._held.values())

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided | None:
        """As ``HeldManifest``: the groups that the chunk may be in are asked for."""
        number, raw = int.from_bytes(node_id), encode_coords(coords)
        groups = [at for at, it in enumerate(self._groups) if it.may_hold(number, raw)]
        # Bounds that overlap, as of a writer that does not sort: requests for each would cost more
        # than the file.
        if len(groups) > _MOST_GROUPS:
            return EXPAND
        held = self._held
        for group in groups:
            found = held[group].lookup(node_id, coords) if group in held else None
            if found is not None:
                return found
        absent = {self._extents[group]: group for group in groups if group not in held}

        def fill(extent: Extent, data: bytes | memoryview) -> None:
            self._fill(absent[extent], extent, data)

        return Undecided(tuple(absent), fill) if absent else None

    def _fill(self, group: int, extent: Extent, data: bytes | memoryview) -> None:
        start, stop = extent
        if len(data) != stop - start:
            raise FormatError(f"A {MANIFEST} ends before its group of rows {group} does.")
        # Loops of several threads may fetch one group at once: without the lock the first to finish
        # would clear the bytes that the other decodes.
        with self._lock:
            if group in self._held:
                return
            self._put(start, data)
            decoded = decode_groups(self.id, self._reader, [group])
            self._held = {**self._held, group: decoded}
            # The columns are decoded; the bytes of the group would stay as long as the manifest.
            self._data[start:stop] = 0

    def _put(self, start: int, data: bytes | memoryview) -> None:
        if not 0 <= start <= len(self._data) - len(data):
            raise FormatError(f"A {MANIFEST} has another size than it was said to have.")
        self._data[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def expand(self, node_id: NodeId | None = None) -> Manifest:
        """As ``HeldManifest``, for whole manifests; this one never is."""
        del node_id
        raise AssertionError("a manifest in pieces has no fuller form without its file")


class _Bounds:
    """The arrays and coordinates that a group of rows can have."""

    def __init__(self, group: Group) -> None:
        self._empty = not group.num_rows
        self._arrays: tuple[int, int] | None = None
        self._coords: tuple[bytes, bytes] | None = None
        for column in group.columns:
            if column.path == "coord":
                self._coords = column.bounds
            elif column.path == "array_id" and column.bounds is not None:
                least, most = (int.from_bytes(it, "little") for it in column.bounds)
                self._arrays = least, most

    def may_hold(self, number: int, coords: bytes) -> bool:
        """Return whether a chunk may be in the group."""
        arrays, between = self._arrays, self._coords
        return (
            not self._empty
            and (arrays is None or arrays[0] <= number <= arrays[1])
            and (between is None or between[0] <= coords <= between[1])
        )


def _extent(group: Group) -> Extent:
    """Return the bytes of a group's columns that are read."""
    columns = [it for it in group.columns if it.path in READ_SCHEMA.names]
    if not columns:
        raise FormatError(f"A {MANIFEST} has none of the columns that it needs.")
    return min(it.start for it in columns), max(it.stop for it in columns)

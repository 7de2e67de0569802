"""Writing seekable manifests: pieces that end where tables begin, and fences between references.

The layout is that of docs/reference/seekable-manifests.md.

`patch_manifest` changes a few references without decoding or encoding the others. The new ones are
appended to the payload as a second manifest, and the old vector is made to refer to its tables;
FlatBuffers allow tables anywhere ahead. So only few pieces change: those with the id and the
entries of the vector, and the previously last one. All others are copied in compressed form. The
room of the old references is lost until the manifest is written anew, so this is done only a few
times in a row.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FileType,
    decompress,
    file_header,
    pack,
)
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.seekable.index import ArrayFences, SeekIndex
from icechunk_async.format.manifest.seekable.pieces import (
    compress_each,
    compress_pieces,
    decompress_piece,
)
from icechunk_async.format.manifest.seekable.reading import AbsentPiecesError, SeekableManifest
from icechunk_async.format.manifest.writing import encode_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.refs import ChunkRefs

__all__ = [
    "MAX_PATCHED_REFS",
    "MIN_SEEKABLE_BYTES",
    "PatchedManifest",
    "pack_manifest",
    "pack_seekable",
    "patch_manifest",
]

MIN_SEEKABLE_BYTES: Final = 2 << 20
"""Manifests from this size, before compression, are written seekable."""
_STEP: Final = 4096
"""References from one fence to the next; their records make about one piece."""
_PIECE_BYTES: Final = 1 << 18
_ENTRIES: Final = _PIECE_BYTES // 4
"""Entries of a vector of references that make a piece."""
_MIN_PIECE_BYTES: Final = 1 << 14
_MAX_ARRAYS: Final = 64
MAX_PATCHED_REFS: Final = 256
_ENTRY_BYTES: Final = 4
"""Of a vector that refers to tables."""
_MAX_TAIL_BYTES: Final = 1 << 14
_MAX_TAILS: Final = 16
"""Changes of a manifest until it is written anew. Pieces as small as tails are nothing else."""
_FRAME_HEADERS: Final = {9: b"\x28\xb5\x2f\xfd\xa0", 10: b"\x28\xb5\x2f\xfd\x80"}
"""By length: of one segment, or with a window; either ends with a size of four bytes."""


def pack_manifest(payload: memoryview, spec_version: int, *, level: int) -> bytes:
    """Wrap the FlatBuffer of a manifest, seekable where that pays.

    Errors as `format.envelope.pack`.
    """
    if len(payload) >= MIN_SEEKABLE_BYTES:
        packed = pack_seekable(payload, spec_version, level=level)
        if packed is not None:
            return packed
    return pack(payload, FileType.MANIFEST, spec_version, level=level)


def pack_seekable(payload: memoryview, spec_version: int, *, level: int) -> bytes | None:
    """Wrap the FlatBuffer of a manifest so that parts of it can be read.

    Args:
        payload: a manifest, its references in ascending order.
        spec_version: 1 or 2.
        level: zstd compression level.

    Returns:
        The file; None if this manifest, or this zstd library, is not fit for it. Every piece was
        decoded by itself and compared.

    Raises:
        InvalidInputError: the payload is too large for the format.

    Cost: half as much time again as compression alone.
    """
    header = file_header(len(payload), FileType.MANIFEST, spec_version)
    found = _arrays(payload)
    if found is None:
        return None
    # Cut where tables begin, so that those of a stretch of rows lie in few pieces.
    cuts = _cut(len(payload), [mark for _, it in found for mark in it.marks()])
    pieces = compress_pieces(payload, cuts, level)
    checksums = None if pieces is None else pieces.checksums(payload)
    # The pieces did not decode alone: then a plain file is right, and nothing but speed is lost.
    if pieces is None or checksums is None:
        return None
    sizes = np.array([len(blocks) for blocks in pieces.blocks], np.int64)
    begin = HEADER_BYTES + len(pieces.header)
    index = SeekIndex(
        places=begin + np.concatenate([[0], np.cumsum(sizes)]),
        cuts=np.array(cuts, np.int64),
        checksums=np.array(checksums, np.uint32),
        step=_STEP,
        arrays={node_id: it.fences(cuts) for node_id, it in found},
    )
    return b"".join([header, *pieces.frame(), index.encode()])


class _Array:
    """The references of one array, and a table in every `_STEP`."""

    def __init__(self, first: int, count: int, tables: Tables) -> None:
        self.first = first
        self.count = count
        self._tables = tables
        self._coords = tables.vector(0, 4, 4, required="index")

    @property
    def is_regular(self) -> bool:
        """Whether the coordinates of the sampled tables are all of one length."""
        counts = self._coords.counts
        return bool((counts == counts[0]).all()) and counts[0] <= MAX_RANK

    def marks(self) -> list[int]:
        """Return where it is good to cut: at tables, and at their entries in the vector."""
        entries = range(self.first, self.first + 4 * self.count, 4 * _ENTRIES)
        return [*entries, self.first + 4 * self.count, *self._tables.positions.tolist()]

    def fences(self, cuts: list[int]) -> ArrayFences:
        """Return the array's part of the index."""
        plain, packed = (self._tables.vector(slot, 1, 1).starts for slot in (5, 8))
        texts = np.maximum(plain, packed)  # 0 without a location
        tables = self._tables.positions
        places = np.stack([tables, np.where(texts > 0, texts, tables)], axis=1)
        pieces = np.searchsorted(cuts, places, side="right") - 1
        coords = self._coords.words().reshape(len(tables), -1)
        shape = bisect_right(cuts, self._tables.first_vtable) - 1
        return ArrayFences(self.first, self.count, coords, pieces.astype(np.uint32), shape)


def _arrays(payload: memoryview) -> list[tuple[NodeId, _Array]] | None:
    """Find the arrays of a manifest; None if they are not fit for an index."""
    arrays = Tables.root(Buffer(payload)).vector(1, 4, 4, required="arrays")
    if not 0 < int(arrays.counts[0]) <= _MAX_ARRAYS:
        return None
    tables = arrays.tables()
    nodes = tables.struct(0, NodeId.size_bytes, field="node_id")
    refs = tables.vector(1, 4, 4, required="refs")
    found: list[tuple[NodeId, _Array]] = []
    for row, node in enumerate(nodes):
        first, count = int(refs.starts[row]), int(refs.counts[row])
        if count == 0:
            continue
        entries = first + 4 * np.arange(0, count, _STEP, dtype=np.int64)
        array = _Array(first, count, Tables(tables.buffer, tables.buffer.targets(entries)))
        # Fences are a matrix; strays of another rank have no row in it.
        if not array.is_regular:
            return None
        found.append((NodeId(node.tobytes()), array))
    return found


def _cut(size: int, marks: list[int]) -> list[int]:
    """Choose where pieces begin: at marks, and between those that are far apart."""
    chosen = [0]
    for mark in sorted(marks):
        if mark - chosen[-1] >= _MIN_PIECE_BYTES and size - mark >= _MIN_PIECE_BYTES:
            chosen.append(mark)
    # A mark too close to the last one is left out. Pieces smaller than that are the tails of
    # patches, by which `_Patch` counts how often a file was changed.
    chosen.append(size)
    cuts: list[int] = []
    for start, stop in pairwise(chosen):
        parts = max(1, round((stop - start) / _PIECE_BYTES))
        cuts += [start + (stop - start) * part // parts for part in range(parts)]
    return [*cuts, size]


@dataclass(frozen=True, slots=True)
class PatchedManifest:
    """A manifest in which some references are others."""

    data: bytes
    """The new file."""
    rows: list[int]
    """The places of the changed references among all, in the order that they were given in."""
    count: int
    """The number of all references."""


class _UnfitError(Exception):
    """The manifest cannot be changed like this."""


def patch_manifest(
    data: bytes | memoryview,
    ids: tuple[ManifestId, ManifestId],
    node_id: NodeId,
    refs: ChunkRefs,
    spec_version: int,
    *,
    level: int,
) -> PatchedManifest | None:
    """Return a manifest in which some references of its only array are others.

    Args:
        data: the file of the old manifest.
        ids: those of the old and of the new one.
        node_id: the array.
        refs: the new references, sorted, without deletions; at most `MAX_PATCHED_REFS`.
        spec_version: 1 or 2.
        level: zstd compression level.

    Returns:
        The new manifest; None where all has to be written anew: the file has no sound index, or
        other arrays; a chunk is not there yet; too much was changed like this before.

    Cost: time for decompressing the file, to make sure of the result.
    """
    try:
        index = SeekIndex.decode(data, len(data))
        old_id, new_id = ids
        patch = _Patch(memoryview(data), index, old_id, node_id)
        return patch.apply(new_id, refs, spec_version, level)
    except (FormatError, _UnfitError):
        return None


class _Patch:
    """One change of one file."""

    def __init__(
        self, data: memoryview, index: SeekIndex, old_id: ManifestId, node_id: NodeId
    ) -> None:
        self._data = data
        self._index = index
        self._node_id = node_id
        self._manifest = SeekableManifest(old_id, index)
        # Only frames as this library makes them: of their headers nothing but the size changes.
        header = bytes(data[HEADER_BYTES : int(index.places[0])])
        # Written pieces have `_MIN_PIECE_BYTES` at least, and a tail has less.
        tails = int(np.count_nonzero(np.diff(index.cuts) < _MAX_TAIL_BYTES))
        known = header[:5] == _FRAME_HEADERS.get(len(header))
        if not known or list(index.arrays) != [node_id] or tails >= _MAX_TAILS:
            raise _UnfitError

    def apply(
        self, new_id: ManifestId, refs: ChunkRefs, spec_version: int, level: int
    ) -> PatchedManifest:
        """Return the new manifest."""
        if refs.has_cut_seconds:  # that is noted for a whole file
            raise _UnfitError
        index, size = self._index, int(self._index.cuts[-1])
        entries = [self._entry(tuple(row)) for row in refs.coords.tolist()]
        begin = size + -size % 8  # the alignment that tables were written for
        tail = bytes(begin - size) + encode_manifest(new_id, {self._node_id: refs})
        if len(tail) >= _MAX_TAIL_BYTES or size + len(tail) > MAX_PAYLOAD_BYTES:
            raise _UnfitError
        changes = [(self._manifest.id_place(), bytes(new_id))]
        # The tail is a manifest that nothing refers to: only its tables are used, by offsets from
        # the old vector. They point ahead, as FlatBuffers demand.
        for entry, table in zip(entries, _tables(tail[begin - size :]), strict=True):
            changes.append((entry, (begin + table - entry).to_bytes(4, "little")))
        raws = self._changed(changes)
        numbers = sorted(raws)
        # One stream for all that is new. The last part, the tail, ends the frame.
        blocks = compress_each([*(raws[number] for number in numbers), tail], level)
        if blocks is None:
            raise _UnfitError
        # They were compressed as a frame for themselves; its header makes way for the real one.
        blocks[0] = blocks[0][zstandard.frame_header_size(blocks[0]) :]
        parts = [self._blocks(piece) for piece in range(len(index))]
        checksums = index.checksums.tolist()
        for number, block in zip(numbers, blocks[:-1], strict=True):
            parts[number], checksums[number] = memoryview(block), zlib.crc32(raws[number])
        parts.append(memoryview(blocks[-1]))
        checksums.append(zlib.crc32(tail))
        cuts = [*index.cuts.tolist(), size + len(tail)]
        # Both ways in which the file is read are tried before anybody can see it: each new piece
        # alone, then the frame as a whole, where a copied piece might decode to other bytes than
        # alone.
        self._check_alone([*numbers, len(index)], parts, cuts, checksums)
        frame = b"".join([self._frame_header(cuts[-1]), *parts])
        _check_whole(frame, cuts, checksums)
        ends = np.cumsum([int(index.places[0]), *map(len, parts)])
        # Fences stay: no row comes or goes. Those of changed rows name the piece of the old table,
        # and a wrong guess costs one more round.
        new = SeekIndex(
            ends, np.array(cuts), np.array(checksums, np.uint32), index.step, index.arrays
        )
        header = file_header(cuts[-1], FileType.MANIFEST, spec_version)
        fences = index.arrays[self._node_id]
        rows = [(entry - fences.first) // _ENTRY_BYTES for entry in entries]
        return PatchedManifest(header + frame + new.encode(), rows, fences.count)

    def _entry(self, coords: tuple[int, ...]) -> int:
        """Return where the vector refers to a chunk that is there."""
        entry = self._have(lambda: self._manifest.entry(self._node_id, coords))
        if entry is None:
            raise _UnfitError
        return entry

    def _have[T](self, ask: Callable[[], T]) -> T:
        """Return the result of a search, decoding the pieces that it needs."""
        # Each round fetches at least one absent piece, so there are no more rounds than pieces.
        for _ in range(len(self._index) + 1):
            try:
                return ask()
            except AbsentPiecesError as absent:
                for extent in self._manifest.extents(absent.pieces):
                    self._manifest.fill(extent, self._data[slice(*extent)])
        raise _UnfitError

    def _changed(self, changes: Sequence[tuple[int, bytes]]) -> dict[int, bytes]:
        """Return the pieces that change: the last one, and those of bytes to replace."""
        last = len(self._index) - 1
        # The last piece ended the frame, which the new tail does now, so it must be compressed
        # again without that end.
        raws = {0: bytearray(self._piece(0)), last: bytearray(self._piece(last))}
        for position, new in changes:
            pieces = self._index.covering(position, position + len(new))
            # Bytes across a cut: rare, and writing anew is always right.
            if len(pieces) != 1:
                raise _UnfitError
            number = pieces.start
            raw = raws.setdefault(number, bytearray(self._piece(number)))
            at = position - int(self._index.cuts[number])
            raw[at : at + len(new)] = new
        return {number: bytes(raw) for number, raw in raws.items()}

    def _piece(self, number: int) -> bytes:
        return self._have(lambda: self._manifest.piece(number))

    def _blocks(self, piece: int) -> memoryview:
        start, stop = self._index.places[piece : piece + 2].tolist()
        return self._data[start:stop]

    def _frame_header(self, size: int) -> bytes:
        old = self._data[HEADER_BYTES : int(self._index.places[0])]
        return bytes(old[:-4]) + size.to_bytes(4, "little")

    def _check_alone(
        self,
        numbers: Sequence[int],
        parts: Sequence[memoryview],
        cuts: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        """Make sure that each new piece decodes by itself."""
        decompressor = zstandard.ZstdDecompressor()
        for number in numbers:
            size, last = cuts[number + 1] - cuts[number], number == len(parts) - 1
            decompress_piece(
                parts[number], size, checksums[number], last=last, decompressor=decompressor
            )


def _check_whole(frame: bytes, cuts: Sequence[int], checksums: Sequence[int]) -> None:
    """Make sure that the frame is what its pieces are, for readers that know of none."""
    payload = memoryview(decompress(memoryview(frame), "manifest"))
    if len(payload) != cuts[-1]:
        raise _UnfitError
    for number, checksum in enumerate(checksums):
        if zlib.crc32(payload[cuts[number] : cuts[number + 1]]) != checksum:
            raise _UnfitError


def _tables(payload: bytes) -> list[int]:
    """Return where the references are in a manifest of one array."""
    arrays = Tables.root(Buffer(payload)).vector(1, 4, 4, required="arrays").tables()
    tables = arrays.vector(1, 4, 4, required="refs").tables()
    positions: list[int] = tables.positions.tolist()
    return positions

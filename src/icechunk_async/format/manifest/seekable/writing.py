"""Writing seekable manifests: pieces that end where tables begin, and fences between references.

The layout is that of docs/reference/seekable-manifests.md.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Final

import numpy as np

from icechunk_async.format.envelope import HEADER_BYTES, FileType, file_header, pack
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import NodeId
from icechunk_async.format.manifest.reading import MAX_RANK
from icechunk_async.format.manifest.seekable.index import ArrayFences, SeekIndex
from icechunk_async.format.manifest.seekable.pieces import compress_pieces

__all__ = ["MIN_SEEKABLE_BYTES", "pack_manifest", "pack_seekable"]

MIN_SEEKABLE_BYTES: Final = 2 << 20
"""Manifests from this size, before compression, are written seekable."""
_STEP: Final = 4096
"""References from one fence to the next; their records make about one piece."""
_PIECE_BYTES: Final = 1 << 18
_ENTRIES: Final = _PIECE_BYTES // 4
"""Entries of a vector of references that make a piece."""
_MIN_PIECE_BYTES: Final = 1 << 14
_MAX_ARRAYS: Final = 64


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
    cuts = _cut(len(payload), [mark for _, it in found for mark in it.marks()])
    pieces = compress_pieces(payload, cuts, level)
    checksums = None if pieces is None else pieces.checksums(payload)
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
    chosen.append(size)
    cuts: list[int] = []
    for start, stop in pairwise(chosen):
        parts = max(1, round((stop - start) / _PIECE_BYTES))
        cuts += [start + (stop - start) * part // parts for part in range(parts)]
    return [*cuts, size]

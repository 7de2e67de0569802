"""Seekable manifests to test with, and a search that reads its pieces from bytes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.seekable.index import SeekIndex
from icechunk_async.format.manifest.seekable.reading import AbsentPiecesError, SeekableManifest
from icechunk_async.format.manifest.seekable.writing import pack_seekable
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.samples import manifest_id, node_id

if TYPE_CHECKING:
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

__all__ = [
    "MANIFEST",
    "NODE",
    "Reader",
    "every_second",
    "mixed",
    "natives",
    "seekable",
    "virtuals",
]

MANIFEST = manifest_id(5)
NODE = node_id(1)


def natives(count: int, rank: int = 1) -> ChunkRefs:
    """Return native references with holes between them."""
    numbers = 3 * np.arange(count, dtype=np.uint32)
    coords = np.stack([numbers // 1000 ** (rank - 1 - axis) % 1000 for axis in range(rank)], axis=1)
    coords[:, 0] = numbers // 1000 ** (rank - 1)
    ids = np.random.default_rng(1).integers(0, 256, (count, 12), np.uint8)
    objects, lengths = np.arange(count, dtype=np.uint32), numbers.astype(np.uint64) + 1
    return ChunkRefs.build(coords, Kind.NATIVE, objects=objects, lengths=lengths, chunk_ids=ids)


def every_second(count: int) -> ChunkRefs:
    """Return a native reference to every second chunk of one axis."""
    numbers = np.arange(count, dtype=np.uint32)
    ids = np.random.default_rng(1).integers(0, 256, (count, 12), np.uint8)
    lengths = numbers.astype(np.uint64) + 1
    columns: dict[str, Any] = {"objects": numbers, "lengths": lengths, "chunk_ids": ids}
    return ChunkRefs.build(numbers[:, None] * 2, Kind.NATIVE, **columns)


def virtuals(count: int, files: int) -> ChunkRefs:
    """Return virtual references to a number of files."""
    coords = np.arange(count, dtype=np.uint32)[:, None]
    objects = (coords[:, 0] % files).astype(np.uint32)
    names = Strings(tuple(f"s3://bucket/{number * 7919 % 100003}.nc" for number in range(files)))
    offsets = coords[:, 0].astype(np.uint64) * 100
    return ChunkRefs.build(
        coords,
        Kind.VIRTUAL,
        objects=objects,
        offsets=offsets,
        lengths=offsets // 100 + 1,
        locations=names,
    )


def mixed(count: int) -> ChunkRefs:
    """Return references of every kind by turns."""
    inline = ChunkRefs.build(
        3 * np.arange(count, dtype=np.uint32)[:, None] + 1,
        Kind.INLINE,
        offsets=np.arange(count, dtype=np.uint64) % 200,
        lengths=np.full(count, 50, np.uint64),
        inline=memoryview(bytes(range(250))),
    )
    virtual = virtuals(count, 30)
    apart = ChunkRefs.build(
        3 * virtual.coords + 2,
        Kind.VIRTUAL,
        objects=virtual.objects,
        offsets=virtual.offsets,
        lengths=virtual.lengths,
        locations=virtual.locations,
        modified=np.arange(count, dtype=np.uint32) % 3,
    )
    return ChunkRefs.concat([natives(count), inline, apart]).sort()


def seekable(refs: ChunkRefs) -> tuple[memoryview, bytes]:
    """Return the payload of a manifest of one array, and its seekable file."""
    payload = encode_manifest(MANIFEST, {NODE: refs})
    packed = pack_seekable(payload, 2, level=3)
    assert packed is not None
    return payload, packed


class Reader:
    """Searches a file and counts what it takes."""

    def __init__(self, packed: bytes, name: ManifestId = MANIFEST) -> None:
        """Read the index."""
        self.packed = packed
        self.manifest = SeekableManifest(name, SeekIndex.decode(packed, len(packed)))
        self.read_bytes = 0
        self.rounds = 0

    def find(self, coords: Coordinates, node: NodeId = NODE) -> ChunkRef | None:
        """Find a reference, reading pieces until it is there."""
        wanted = list(self.manifest.likely(node, coords))
        while True:
            self.rounds += bool(wanted)
            for start, stop in self.manifest.extents(wanted):
                self.manifest.fill((start, stop), self.packed[start:stop])
                self.read_bytes += stop - start
            try:
                return self.manifest.find(node, coords)
            except AbsentPiecesError as absent:
                wanted = list(absent.pieces)

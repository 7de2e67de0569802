"""Changing a few references in a seekable file: the same as writing all anew, or not done."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.seekable import writing as manifest_patch
from icechunk_async.format.manifest.seekable.writing import pack_seekable, patch_manifest
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.samples import chunk_id, manifest_id, node_id
from tests.unit.format.seekable import MANIFEST, NODE, Reader, mixed, natives, seekable, virtuals

if TYPE_CHECKING:
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

COUNT = 20_000
NEW: list[ChunkRef] = [
    NativeChunk(chunk_id(7), 3, 5),
    InlineChunk(b"inline bytes"),
    VirtualChunk("s3://bucket/new", 1, 2, etag="tag"),
    VirtualChunk("s3://bucket/new", 9, 2, last_modified=77),
]


def changed(refs: ChunkRefs, changes: dict[Coordinates, ChunkRef]) -> ChunkRefs:
    """Return references with changes, the slow way."""
    return ChunkRefs.concat([refs, ChunkRefs.from_mapping(refs.rank, dict(changes))]).sort()


def patch(
    packed: bytes, changes: dict[Coordinates, ChunkRef], old: ManifestId, new: ManifestId
) -> bytes | None:
    """Change some references of a file."""
    rank = len(next(iter(changes)))
    refs = ChunkRefs.from_mapping(rank, dict(changes)).sort()
    patched = patch_manifest(packed, (old, new), NODE, refs, 2, level=3)
    return None if patched is None else patched.data


def same(packed: bytes, expected: ManifestId, refs: ChunkRefs) -> bool:
    """Return whether a file, read whole, holds these references."""
    manifest = decode_manifest(unpack(packed, FileType.MANIFEST).payload)
    found = manifest.refs(NODE, refs.rank)
    columns = ("coords", "kinds", "lengths", "modified")
    return (
        manifest.id == expected
        and all(np.array_equal(getattr(found, it), getattr(refs, it)) for it in columns)
        and all(found.ref(row) == refs.ref(row) for row in range(0, len(refs), 31))
    )


@pytest.mark.parametrize("name", ["native", "virtual", "mixed"])
def test_patched_manifest_has_the_new_references(name: str) -> None:
    """Whole and in pieces, one change upon the other, until all is better written anew."""
    shapes = {"native": natives(COUNT, 2), "virtual": virtuals(COUNT, 100)}
    refs = shapes.get(name) or mixed(COUNT // 3)
    _, packed = seekable(refs)
    chance = random.Random(1)
    known = MANIFEST
    changes: dict[Coordinates, ChunkRef] = {}
    for turn in range(16):
        rows = chance.sample(range(len(refs)), chance.choice([1, 2, 20]))
        changes = {tuple(refs.coords[row].tolist()): chance.choice(NEW) for row in rows}
        new_name = manifest_id(100 + turn)
        patched = patch(packed, changes, known, new_name)
        assert patched is not None
        refs = changed(refs, changes)
        packed, known = patched, new_name
        reader = Reader(packed, known)
        for row in [*rows, *chance.sample(range(len(refs)), 3)]:
            coords = tuple(refs.coords[row].tolist())
            assert reader.find(coords) == refs.ref(row)
    assert same(packed, known, refs)
    assert patch(packed, changes, known, MANIFEST) is None


def test_patching_copies_most_of_the_file() -> None:
    """Only the pieces that hold what changed are compressed again."""
    refs = virtuals(100_000, 100)
    _, packed = seekable(refs)
    patched = patch(packed, {(50_000,): NEW[0]}, MANIFEST, manifest_id(9))
    assert patched is not None
    before, after = Reader(packed).manifest.index, Reader(patched, manifest_id(9)).manifest.index
    assert len(after) == len(before) + 1
    same = [
        packed[slice(*before.places[piece : piece + 2])]
        == patched[slice(*after.places[piece : piece + 2])]
        for piece in range(len(before))
    ]
    assert same.count(False) <= 3
    assert len(patched) < len(packed) + 2000


def test_unfit_manifests_are_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are not there, files without an index or with more arrays, other files."""
    refs = natives(COUNT)
    payload, packed = seekable(refs)
    change: dict[Coordinates, ChunkRef] = {(3,): NEW[0]}
    new = manifest_id(9)
    assert patch(packed, change, MANIFEST, new) is not None
    assert patch(packed, {(4,): NEW[0]}, MANIFEST, new) is None  # a hole
    assert patch(packed, {(3, 0): NEW[0]}, MANIFEST, new) is None  # of another rank
    assert patch(packed, change, manifest_id(8), new) is None
    assert patch(pack(payload, FileType.MANIFEST, 2), change, MANIFEST, new) is None
    two = encode_manifest(MANIFEST, {NODE: refs, node_id(2): natives(5)})
    packed_two = pack_seekable(two, 2, level=3)
    assert packed_two is not None
    assert patch(packed_two, change, MANIFEST, new) is None
    assert patch(packed, {(3,): InlineChunk(bytes(1 << 14))}, MANIFEST, new) is None
    monkeypatch.setattr(manifest_patch, "compress_each", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert patch(packed, change, MANIFEST, new) is None


def test_damaged_file_is_not_patched() -> None:
    """Every piece of the result is checked, those that were copied, too."""
    refs = natives(COUNT)
    _, packed = seekable(refs)
    chance = random.Random(2)
    for _ in range(100):
        damaged = bytearray(packed)
        damaged[chance.randrange(39, len(packed))] ^= 1 << chance.randrange(8)
        assert patch(bytes(damaged), {(3 * 777,): NEW[0]}, MANIFEST, manifest_id(9)) is None


def test_compressed_afresh_pieces_do_not_refer_back() -> None:
    """However much alike they are; each one is looked at alone and in its frame."""
    refs = virtuals(60_000, 1)  # more than zstd's window
    _, packed = seekable(refs)
    rows = np.linspace(0, 59_999, 100, dtype=int).tolist()
    changes: dict[Coordinates, ChunkRef] = {(row,): NEW[1] for row in rows}
    patched = patch(packed, changes, MANIFEST, manifest_id(9))
    assert patched is not None
    expected = changed(refs, changes)
    assert same(patched, manifest_id(9), expected)

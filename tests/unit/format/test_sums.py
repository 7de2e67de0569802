"""Checksums of chunks, and the sidecars that keep them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.crc import KNOWN, crc_of, sum_of
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest.chunk import ChunkRef, InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.sums import ArraySums, ManifestSums, without_sum

DIGEST = hashlib.sha256(b"the manifest").digest()


def native(data: bytes, *, known: bool = True) -> NativeChunk:
    """Return a reference to a chunk in a separate object."""
    return NativeChunk(ChunkId.random(), 0, len(data), sum_of(data) if known else 0)


def refs_of(*refs: ChunkRef | None) -> ChunkRefs:
    """Return references of an array of one axis, a chunk after the other."""
    return ChunkRefs.from_mapping(1, {(place,): ref for place, ref in enumerate(refs)})


def a_manifest(*refs: ChunkRef, more: ChunkRefs | None = None) -> Manifest:
    """Return a manifest of one array, or of two."""
    arrays = {NodeId(b"array  1"): refs_of(*refs)}
    if more is not None:
        arrays[NodeId(b"array  2")] = more
    return Manifest(ManifestId.random(), arrays)


def some_manifest() -> Manifest:
    """Return a manifest with chunks of every kind; the sum of one native chunk is unknown."""
    virtual = VirtualChunk("s3://bucket/key", 0, 7)
    chunks = (native(b"one"), InlineChunk(b"x"), virtual, native(b"two", known=False))
    return a_manifest(*chunks, native(b"three"), more=refs_of(*[native(b"four")] * 17))


def sealed(data: bytes) -> bytes:
    """Return bytes with the digest that ends a sidecar."""
    return data + hashlib.sha256(data).digest()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_sum_is_the_crc_32c_of_the_bytes(kind: type) -> None:
    """The test vector of RFC 3720, B.4, whatever holds the bytes."""
    assert crc_of(sum_of(kind(b"123456789"))) == 0xE3069283
    assert sum_of(kind(b"")) == KNOWN


def test_columns_keep_the_sum_of_each_chunk() -> None:
    """Through making, taking, joining and sorting; unknown ones stay unknown."""
    known, unknown = native(b"a"), native(b"b", known=False)
    refs = refs_of(known, InlineChunk(b"x"), unknown)
    assert refs.sums is not None
    assert refs.sums.tolist() == [sum_of(b"a"), 0, 0]
    other = ChunkRefs.from_mapping(1, {(0,): native(b"c"), (9,): native(b"d", known=False)})
    joined = ChunkRefs.concat([refs, other]).sort()
    assert joined.sums is not None
    assert joined.sums.tolist() == [sum_of(b"c"), 0, 0, 0]
    taken = refs.take(slice(0, 1)).ref(0)
    assert isinstance(taken, NativeChunk)
    assert taken.sum == sum_of(b"a")


def test_columns_without_any_sum_have_no_column_of_sums() -> None:
    """So nothing is paid for by those who keep no sums."""
    refs = refs_of(native(b"a", known=False), native(b"b", known=False))
    assert refs.sums is None
    assert ChunkRefs.concat([refs, refs]).sums is None
    assert refs.take(np.array([0])).sums is None


def test_sidecar_gives_back_the_sums_of_a_manifest() -> None:
    """Of two arrays with chunks of all kinds."""
    manifest = some_manifest()
    data = ManifestSums.of(manifest, DIGEST).encode()
    found = ManifestSums.decode(data, manifest.id)
    assert found.head.manifest_digest == DIGEST
    assert not found.head.is_complete
    assert found.known == 2 + 17
    plain = replace(
        manifest, arrays={key: replace(it, sums=None) for key, it in manifest.arrays.items()}
    )
    for key, refs in found.attached_to(plain).arrays.items():
        original = manifest.arrays[key].sums
        assert refs.sums is not None
        assert original is not None
        assert refs.sums.tolist() == original.tolist()
    assert found.encode() == data


def test_sidecar_is_complete_when_every_native_chunk_has_a_sum() -> None:
    """Inline and virtual chunks never have one."""
    virtual = VirtualChunk("s3://bucket/key", 0, 7)
    whole = a_manifest(native(b"a"), InlineChunk(b"x"), virtual)
    assert ManifestSums.of(whole, DIGEST).head.is_complete
    part = a_manifest(native(b"a"), native(b"b", known=False))
    assert not ManifestSums.of(part, DIGEST).head.is_complete
    (refs,) = part.arrays.values()
    assert without_sum(refs).tolist() == [False, True]


def test_sidecar_takes_at_most_five_bytes_a_chunk() -> None:
    """And nothing but a bit for chunks that have no sum."""
    count = 100_000
    coords = np.arange(count, dtype=np.uint32)[:, None]
    codes = np.arange(count, dtype=np.uint64) | np.uint64(KNOWN)
    refs = ChunkRefs.build(
        coords, np.ones(count, np.uint8), chunk_ids=np.zeros((1, 12), np.uint8), sums=codes
    )
    manifest = Manifest(ManifestId.random(), {NodeId.random(): refs})
    assert len(ManifestSums.of(manifest, DIGEST).encode()) < 5 * count
    (key,) = manifest.arrays
    plain = Manifest(manifest.id, {key: replace(refs, sums=None)})
    assert len(ManifestSums.of(plain, DIGEST).encode()) < count / 8 + 200


def test_sidecar_of_another_manifest_is_refused() -> None:
    """Whether it lies under the wrong name, or its manifest has other chunks."""
    manifest, other = some_manifest(), some_manifest()
    data = ManifestSums.of(manifest, DIGEST).encode()
    with pytest.raises(FormatError, match=f"about manifest {manifest.id}"):
        ManifestSums.decode(data, other.id)
    found = ManifestSums.decode(data, manifest.id)
    with pytest.raises(FormatError, match="cannot be those of"):
        found.attached_to(other)
    longer = Manifest(manifest.id, {key: refs_of(native(b"a")) for key in manifest.arrays})
    with pytest.raises(FormatError, match="which has 1"):
        found.attached_to(longer)


def test_damaged_sidecar_is_refused_wherever_it_is_damaged() -> None:
    """Each bit of it, and each length that it can be cut off at."""
    manifest = some_manifest()
    data = ManifestSums.of(manifest, DIGEST).encode()
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1 << place % 8
        with pytest.raises(FormatError):
            ManifestSums.decode(wrong, manifest.id)
        with pytest.raises(FormatError):
            ManifestSums.decode(data[:place], manifest.id)
    with pytest.raises(FormatError):
        ManifestSums.decode(data + b"\0", manifest.id)


@pytest.mark.parametrize(
    ("rows", "body", "why"),
    [
        (1 << 60, b"", "more chunks than there are bytes"),
        (8, b"\xff", "mark more chunks"),
        (3, b"\x08" + bytes(4), "do not list"),
        (8, b"\x01" + bytes(8), "more bytes than sums"),
    ],
)
def test_forged_sidecar_is_refused_before_anything_is_allocated(
    rows: int, body: bytes, why: str
) -> None:
    """Its digest is right, and what it lists cannot be."""
    manifest_id = ManifestId.random()
    head = struct.pack("<8s12sBB2s32sII", b"ICASUMS1", manifest_id, 1, 0, b"", DIGEST, 1, 0)
    array = struct.pack("<8sIIQ", b"12345678", 1, 0, rows)
    with pytest.raises(FormatError, match=why):
        ManifestSums.decode(sealed(head + array + body), manifest_id)


def test_forged_arrays_are_refused() -> None:
    """More than there is room for, one twice, and one of too many axes."""
    manifest_id = ManifestId.random()

    def forged(count: int, *arrays: bytes) -> bytes:
        head = struct.pack("<8s12sBB2s32sII", b"ICASUMS1", manifest_id, 1, 0, b"", DIGEST, count, 0)
        return sealed(head + b"".join(arrays))

    array = struct.pack("<8sIIQ", b"12345678", 1, 0, 0)
    assert ManifestSums.decode(forged(1, array), manifest_id).known == 0
    for data, why in (
        (forged((1 << 32) - 1, array), "more arrays"),
        (forged(2, array, array), "out of order"),
        (forged(1, struct.pack("<8sIIQ", b"12345678", 65, 0, 0)), "cannot exist"),
    ):
        with pytest.raises(FormatError, match=why):
            ManifestSums.decode(data, manifest_id)


def test_sidecar_of_a_newer_version_says_what_to_do() -> None:
    """It is no damage."""
    manifest = some_manifest()
    data = bytearray(ManifestSums.of(manifest, DIGEST).encode())
    data[7:8] = b"2"
    with pytest.raises(FormatError, match="Upgrade it"):
        ManifestSums.decode(data, manifest.id)


def test_codes_survive_packing_at_every_length() -> None:
    """Known and unknown ones, around whole bytes of marks."""
    rng = np.random.default_rng(1)
    for count in range(20):
        codes = rng.integers(0, 1 << 32, count).astype(np.uint64) | np.uint64(KNOWN)
        codes[rng.random(count) < 0.5] = 0
        assert ArraySums.of(codes).codes().tolist() == codes.tolist()

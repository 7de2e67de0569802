"""Looking into seekable manifests: the same answers from a few pieces, or none."""

from __future__ import annotations

import mmap
import random
import zlib
from dataclasses import replace
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.manifest.chunk import InlineChunk, Kind
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.seekable import writing as manifest_seek_write
from icechunk_async.format.manifest.seekable.index import SeekIndex, index_size
from icechunk_async.format.manifest.seekable.pieces import Pieces
from icechunk_async.format.manifest.seekable.reading import (
    AbsentPiecesError,
    SeekableManifest,
    _PartialBuffer,
    _untouched,
)
from icechunk_async.format.manifest.seekable.writing import pack_manifest, pack_seekable
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from tests.unit.format.samples import node_id
from tests.unit.format.seekable import MANIFEST, NODE, Reader, mixed, natives, seekable, virtuals

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.manifest.refs import ChunkRefs

STATM = Path("/proc/self/statm")
COUNT = 30_000
SHAPES: dict[str, Callable[[], ChunkRefs]] = {
    "native": lambda: natives(COUNT),
    "native, three axes": lambda: natives(COUNT, 3),
    "virtual, one file": lambda: virtuals(COUNT, 1),
    "virtual, all different": lambda: virtuals(COUNT, COUNT),
    "mixed": lambda: mixed(COUNT // 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_reference_is_found_in_its_pieces(name: str) -> None:
    """At the borders of pieces and between fences, with all its fields; and nothing else is."""
    refs = SHAPES[name]()
    payload, packed = seekable(refs)
    assert unpack(packed, FileType.MANIFEST).payload == payload.tobytes()
    reader = Reader(packed)
    rows = {0, 1, 4095, 4096, 4097, 8191, 8192, len(refs) - 1, *range(0, len(refs), 397)}
    for row in sorted(rows, key=lambda it: it * 7919 % 10007):
        coords = tuple(refs.coords[row].tolist())
        assert reader.find(coords) == refs.ref(row)
        absent = (*coords[:-1], coords[-1] + 1)
        expected = refs.find(absent)
        assert reader.find(absent) == (None if expected is None else refs.ref(expected))
    top = tuple(refs.coords[-1].tolist())
    for coords in ((*top[:-1], top[-1] + 9), (*top, 0), ()):
        assert reader.find(coords) is None
    assert reader.find(top, node_id(2)) is None


def test_many_reads_at_once_lack_what_one_after_the_other_would() -> None:
    """The pieces of the first that is not there; whatever is present, in any order, of any size."""
    _, packed = seekable(natives(COUNT))
    rng = np.random.default_rng(0)
    size = index_size(packed)
    assert size is not None
    index = SeekIndex.decode(packed[-size:], len(packed))
    outcomes = set()
    for _ in range(300):
        buffer = _PartialBuffer(index)
        share = rng.choice([0.0, 0.5, 0.9, 1.0])
        buffer.present[:] = (rng.random(len(index)) < share).astype(np.uint8).tobytes()
        count = int(rng.integers(0, 6))
        sizes = rng.integers(0, 2 * 65536, count) * rng.integers(0, 2, count)  # some are nothing
        starts = rng.integers(0, buffer.size - sizes + 1)
        wanted = None
        try:
            for start, length in zip(starts.tolist(), sizes.tolist(), strict=True):
                buffer.need(start, length)
        except AbsentPiecesError as error:
            wanted = error.pieces
        found = None
        try:
            buffer.require(starts, sizes)
        except AbsentPiecesError as error:
            found = error.pieces
        assert found == wanted
        outcomes.add(found is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "mixed"])
def test_a_first_lookup_takes_one_round_and_few_bytes(name: str) -> None:
    """The pieces of the vector, of the references and of their locations; neighbours are free."""
    refs = SHAPES[name]()
    _, packed = seekable(refs)
    row = len(refs) // 2
    reader = Reader(packed)
    assert reader.find(tuple(refs.coords[row].tolist())) == refs.ref(row)
    assert reader.rounds == 1
    assert reader.manifest.present_bytes < 4 << 18
    before = reader.read_bytes
    reader.find(tuple(refs.coords[row + 1].tolist()))
    assert reader.read_bytes == before


def test_references_of_different_shapes_take_a_few_rounds() -> None:
    """They lie apart, each shape in separate pieces; one round names all candidates."""
    refs = mixed(COUNT // 3)
    _, packed = seekable(refs)
    for row in range(0, len(refs), 997):
        reader = Reader(packed)
        assert reader.find(tuple(refs.coords[row].tolist())) == refs.ref(row)
        assert reader.rounds <= 5


def test_several_arrays_and_compressed_locations_are_searched() -> None:
    """Each array has its own fences; the dictionary is in some piece like everything else."""
    arrays = {node_id(1): virtuals(20_000, 500), node_id(2): natives(20_000), node_id(3): mixed(50)}
    payload = encode_manifest(MANIFEST, arrays, location_dictionary=LocationDictionary())
    packed = pack_seekable(payload, 2, level=3)
    assert packed is not None
    reader = Reader(packed)
    for node, refs in arrays.items():
        for row in range(0, len(refs), 1 + len(refs) // 20):
            assert reader.find(tuple(refs.coords[row].tolist()), node) == refs.ref(row)


def test_small_manifests_have_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """There an index would only be in the way."""
    payload = encode_manifest(MANIFEST, {NODE: natives(15_000)})
    assert index_size(pack_manifest(payload, 2, level=3)) is None
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", len(payload))
    assert index_size(pack_manifest(payload, 2, level=3)) is not None


def test_manifests_split_as_advised_have_an_index() -> None:
    """At 100,000 references a change of one manifest leaves the others unchanged."""
    payload = encode_manifest(MANIFEST, {NODE: virtuals(100_000, 100)})
    assert index_size(pack_manifest(payload, 2, level=1)) is not None
    payload = encode_manifest(MANIFEST, {NODE: virtuals(10_000, 10)})
    assert index_size(pack_manifest(payload, 2, level=1)) is None


def test_irregular_manifests_have_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """No arrays, too many, or pieces that did not stand the check; the file is whole anyway."""
    many = {node_id(number): natives(1) for number in range(65)}
    for arrays in ({}, many):
        assert pack_seekable(encode_manifest(MANIFEST, arrays), 2, level=3) is None
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 0)
    payload = encode_manifest(MANIFEST, {NODE: natives(15_000)})

    def fail(_pieces: Pieces, _payload: memoryview) -> None:
        """Find that a piece does not stand alone."""

    monkeypatch.setattr(Pieces, "checksums", fail)
    packed = pack_manifest(payload, 1, level=3)
    assert index_size(packed) is None
    assert unpack(packed, FileType.MANIFEST).payload == payload.tobytes()


def test_most_of_the_payload_takes_no_memory_and_many_lookups_wear_it_out() -> None:
    """After that the whole file is better decoded."""
    refs = virtuals(100_000, 100)
    _, packed = seekable(refs)
    reader = Reader(packed)
    assert reader.manifest.present_bytes == 0
    for row in range(50_000, 50_195):
        assert not reader.manifest.worn_out
        reader.find((row,))
    assert reader.manifest.worn_out
    assert 40 * reader.manifest.weight <= reader.manifest.present_bytes + 40 < 1 << 20
    reader = Reader(packed)
    for row in range(0, 40_000, 4096):
        reader.find((row,))
    assert reader.manifest.worn_out


@pytest.mark.skipif(not STATM.exists(), reason="reads memory in use from /proc")
def test_touched_pages_are_small() -> None:
    """Huge ones, which NumPy asks for, would take many times as much as the pieces."""
    data = _untouched(256 << 20)
    assert not data[::4096].any()
    data = _untouched(256 << 20)
    before = _resident_bytes()
    data[:: 8 << 20] = 1
    assert _resident_bytes() - before < 4 << 20


def _resident_bytes() -> int:
    return int(STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_absent_pieces_are_asked_for_and_never_read_as_zeros() -> None:
    """The search names every missing piece."""
    refs = mixed(COUNT // 3)
    _, packed = seekable(refs)
    chance = random.Random(3)
    for _ in range(20):
        manifest = SeekableManifest(MANIFEST, SeekIndex.decode(packed, len(packed)))
        row = chance.randrange(len(refs))
        coords = tuple(refs.coords[row].tolist())
        for _ in range(10):
            try:
                found = manifest.find(NODE, coords)
            except AbsentPiecesError as absent:
                [*wanted] = chance.sample(list(absent.pieces), 1)
                for start, stop in manifest.extents(wanted):
                    manifest.fill((start, stop), packed[start:stop])
            else:
                assert found == refs.ref(row)
                break
        else:
            raise AssertionError("no answer from ten pieces")


def _answer(packed: bytes, coords: tuple[int, ...]) -> object:
    """Search a file that may be damaged; None where the whole file has to be read."""
    try:
        return Reader(packed).find(coords)
    except FormatError:
        return None


@pytest.fixture(scope="module")
def sample() -> tuple[ChunkRefs, bytes]:
    """Return references of every kind and their seekable file."""
    refs = mixed(5000)
    return refs, seekable(refs)[1]


def test_damaged_pieces_are_refused(sample: tuple[ChunkRefs, bytes]) -> None:
    """Any bytes changed, in the index or in a piece: the right answer or none."""
    refs, packed = sample
    size = index_size(packed)
    assert size is not None
    chance = random.Random(5)
    answered = 0
    for turn in range(400):
        damaged = bytearray(packed)
        start = len(packed) - size if turn % 2 else 0
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(start, len(packed))] ^= 1 << chance.randrange(8)
        row = chance.randrange(len(refs))
        found = _answer(bytes(damaged), tuple(refs.coords[row].tolist()))
        assert found in (None, refs.ref(row))
        answered += found is not None
    assert 5 < answered < 200  # where the damage was elsewhere


def test_every_byte_of_an_index_counts(sample: tuple[ChunkRefs, bytes]) -> None:
    """If any byte differs, the index is not used."""
    _, packed = sample
    size = index_size(packed)
    assert size is not None
    for at in range(1, size + 1):
        damaged = bytearray(packed)
        damaged[-at] ^= 0x10
        with pytest.raises(FormatError):
            SeekIndex.decode(bytes(damaged), len(damaged))


_TRAILER = Struct("<6I8s")


def _signed(index: bytearray) -> bytes:
    """Give a forged index the right checksum."""
    *numbers, _, magic = _TRAILER.unpack(index[-32:])
    checksum = zlib.crc32(_TRAILER.pack(*numbers, 0, magic), zlib.crc32(index[8:-32]))
    return bytes(index[:-32]) + _TRAILER.pack(*numbers, checksum, magic)


def test_a_forged_index_cannot_make_a_search_err(sample: tuple[ChunkRefs, bytes]) -> None:
    """Its checksum is right and its numbers are not: the right answer or none, at once."""
    refs, packed = sample
    size = index_size(packed)
    assert size is not None
    body, index = packed[:-size], packed[-size:]
    chance = random.Random(6)
    extremes = (0, 1, 2, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
    answered = 0
    for _ in range(600):
        forged = bytearray(index)
        for _ in range(chance.randint(1, 2)):
            at = chance.choice([chance.randrange(8, size - 12, 4), size - chance.randint(4, 8) * 4])
            old = int.from_bytes(forged[at : at + 4], "little")
            new = chance.choice([*extremes, old + 1, max(0, old - 1), old ^ 1 << 18])
            forged[at : at + 4] = (new & 0xFFFFFFFF).to_bytes(4, "little")
        row = chance.randrange(len(refs))
        found = _answer(body + _signed(forged), tuple(refs.coords[row].tolist()))
        assert found in (None, refs.ref(row))
        answered += found is not None
    assert answered > 40


def test_an_index_of_another_file_is_refused(sample: tuple[ChunkRefs, bytes]) -> None:
    """It does not add up, or the pieces have other checksums."""
    refs, packed = sample
    size = index_size(packed)
    assert size is not None
    _, other = seekable(natives(15_000))
    assert _answer(other + packed[-size:], tuple(refs.coords[5].tolist())) is None
    renamed = encode_manifest(MANIFEST, {NODE: natives(15_000)})
    packed_renamed = pack_seekable(renamed, 2, level=3)
    assert packed_renamed is not None
    manifest = SeekableManifest(type(MANIFEST)(bytes(12)), Reader(packed_renamed).manifest.index)
    everything = (0, int(manifest.index.places[-1]))
    manifest.fill(everything, packed_renamed[: everything[1]])
    with pytest.raises(FormatError, match="calls itself"):
        manifest.find(NODE, (0,))


def test_whole_file_is_read_with_any_index(sample: tuple[ChunkRefs, bytes]) -> None:
    """Reading all of a manifest does not use the index."""
    refs, packed = sample
    size = index_size(packed)
    assert size is not None
    ruined = packed[:-size] + packed[-size : -size + 8] + bytes(size - 8)
    manifest = decode_manifest(unpack(ruined, FileType.MANIFEST).payload)
    assert np.array_equal(manifest.refs(NODE, 1).coords, refs.coords)
    for cut in (1, size - 1, size + 1):
        with pytest.raises(FormatError):
            unpack(packed[:-cut], FileType.MANIFEST)
    with pytest.raises(FormatError):
        unpack(packed + b"\0", FileType.MANIFEST)


def test_kinds_are_as_many_as_they_should_be() -> None:
    """The samples hold what they promise."""
    kinds = set(np.unique(mixed(10).kinds).tolist())
    assert kinds == {Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL}


def test_an_index_claims_no_more_than_there_is(sample: tuple[ChunkRefs, bytes]) -> None:
    """Neither references beyond the payload nor more between two fences than a lookup can read."""
    _, data = sample
    size = index_size(data)
    assert size is not None
    index = SeekIndex.decode(data, len(data))
    fences = index.arrays[NODE]
    most = (1 << 32) - 1
    few = replace(fences, count=most, coords=fences.coords[:1], pieces=fences.pieces[:1])
    long = replace(index, step=most, arrays={NODE: few})
    every = -(-most // (1 << 16))
    wide = replace(
        fences,
        count=most,
        coords=np.repeat(fences.coords[:1], every, axis=0),
        pieces=np.repeat(fences.pieces[:1], every, axis=0),
    )
    for forged in (long, replace(index, step=1 << 16, arrays={NODE: wide})):
        whole = data[:-size] + forged.encode()
        with pytest.raises(FormatError):
            SeekIndex.decode(whole, len(whole))


def test_returned_inline_bytes_are_read_only() -> None:
    """It is part of what other lookups read."""
    refs = mixed(20_000)
    _, packed = seekable(refs)
    row = int(np.flatnonzero(refs.kinds == Kind.INLINE)[5])
    found = Reader(packed).find(tuple(refs.coords[row].tolist()))
    assert isinstance(found, InlineChunk)
    assert memoryview(found.data).readonly


def test_a_vtable_is_not_read_from_bytes_that_are_not_here() -> None:
    """Zeros in place of its second half would be taken for fields that are not there."""
    _, packed = seekable(natives(COUNT))
    index = SeekIndex.decode(packed, len(packed))
    reader = Reader(packed)
    reader.find((0,))
    buffer = reader.manifest._buffer
    present = [piece for piece in range(len(index)) if buffer.present[piece]]
    absent = next(piece for piece in range(len(index)) if not buffer.present[piece])
    assert present
    at = int(index.cuts[absent])
    at -= at % 2
    with pytest.raises(AbsentPiecesError):
        buffer.shorts(at, 2)

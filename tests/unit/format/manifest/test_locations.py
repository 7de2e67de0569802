"""Locations of virtual references: plain, compressed with a dictionary, or some of each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import zstandard

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.manifest.chunk import (
    ChunkRef,
    Coordinates,
    Kind,
    NativeChunk,
    VirtualChunk,
)
from icechunk_async.format.manifest.locations import Strings, merge_pools
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import as_dict, chunk_id, manifest_id, node_id, refs_of
from tests.unit.format.wire import Table, root

if TYPE_CHECKING:
    from icechunk_async.format.manifest.refs import ChunkRefs

NAMES = [f"s3://bucket/model/run-{at % 7}/member-{at % 13:03}/{at:06}.nc" for at in range(1200)]
MANIFEST = manifest_id(5)
NODE = node_id(1)


@pytest.mark.parametrize("runs", [[], [1], [500], [64, 64, 64], [63, 65, 1, 200, 3, 7, 129]])
def test_each_value_has_the_index_of_its_string(runs: list[int]) -> None:
    """Whether or not neighbours are alike, and whether or not they are one object."""
    values = [f"name {row % 3}" for row, times in enumerate(runs) for _ in range(times)]
    values += [f"{row}" for row in range(100)] * 2
    indices, pool = Strings.factorize(values)
    assert [pool.strings[index] for index in indices.tolist()] == values
    assert pool.strings == tuple(dict.fromkeys(values))


def virtual_refs(names: list[str]) -> ChunkRefs:
    """Return a reference to each name."""
    return refs_of(1, {(row,): VirtualChunk(name, row, 1) for row, name in enumerate(names)})


def encoded(names: list[str], settings: LocationDictionary | None = None) -> bytes:
    """Write a manifest that compresses locations."""
    return bytes(
        encode_manifest(
            MANIFEST,
            {NODE: virtual_refs(names)},
            location_dictionary=settings or LocationDictionary(),
        )
    )


def names_in(payload: bytes) -> list[str]:
    """Read every location."""
    refs = decode_manifest(payload).arrays[NODE]
    return [refs.locations.get(int(at)) for at in refs.objects]


def refs_in(payload: bytes) -> list[Table]:
    """Return the ChunkRef tables."""
    return root(payload).tables(1)[0].tables(1)


def small_dictionary() -> bytes:
    """Train a dictionary on the names."""
    samples: list[bytes | bytearray | memoryview] = [name.encode() for name in NAMES]
    return zstandard.train_dictionary(2048, samples).as_bytes()


def compressor(dictionary: bytes, *, size: bool = True) -> zstandard.ZstdCompressor:
    """Return a compressor with a dictionary."""
    data = zstandard.ZstdCompressionDict(dictionary)
    return zstandard.ZstdCompressor(dict_data=data, write_content_size=size)


def test_compressed_locations_are_laid_out_as_specified() -> None:
    """A dictionary, no algorithm (1 is the default), no plain location, complete frames."""
    payload = encoded(NAMES)
    table = root(payload)
    assert table.slots == {0, 1, 2}
    dictionary = table.blob(2)
    assert dictionary is not None
    assert dictionary[:4].hex() == "37a430ec"
    assert len(dictionary) <= 2048
    assert {frozenset(ref.slots) for ref in refs_in(payload)} == {frozenset({0, 2, 3, 8})}
    for ref, name in list(zip(refs_in(payload), NAMES, strict=True))[::100]:
        frame = ref.blob(8)
        assert frame is not None
        assert frame[:4].hex() == "28b52ffd"
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == len(name.encode())
        assert parameters.dict_id == zstandard.ZstdCompressionDict(dictionary).dict_id()


def test_compressed_locations_read_back() -> None:
    """One by one and all at once."""
    payload = encoded(NAMES)
    assert names_in(payload) == NAMES
    codes, pool = decode_manifest(payload).arrays[NODE].locations.distinct()
    assert [pool.get(code) for code in codes.tolist()] == NAMES
    assert len(payload) < len(encoded(NAMES, LocationDictionary(min_refs=9999)))


def test_few_references_are_not_compressed() -> None:
    """The limit counts virtual references, also those that share a location."""
    assert root(encoded(NAMES[:999])).slots == {0, 1, 3}
    assert root(encoded(NAMES[:1000])).slots == {0, 1, 2}
    natives: dict[Coordinates, ChunkRef | None] = {
        (row,): NativeChunk(chunk_id(row), 0, 1) for row in range(2000)
    }
    payload = encode_manifest(
        MANIFEST, {NODE: refs_of(1, natives)}, location_dictionary=LocationDictionary()
    )
    assert root(payload).slots == {0, 1, 3}


def test_short_locations_are_not_compressed() -> None:
    """They are short if at least half of the sample is below 8 bytes."""
    short = [f"s3:{at}" for at in range(1000)]
    assert root(encoded(short)).slots == {0, 1, 3}
    assert names_in(encoded(short)) == short


def test_locations_without_common_parts_stay_plain() -> None:
    """Training may fail; plain is always right."""
    same = ["s3://bucket/the-only-one"] * 1000
    assert names_in(encoded(same)) == same
    settings = LocationDictionary(min_refs=1, max_bytes=1)
    assert names_in(encoded(NAMES[:3], settings)) == NAMES[:3]


def test_locations_longer_than_1024_bytes_stay_plain() -> None:
    """The official reader refuses to decompress more; the limit is in bytes, not letters."""
    at_limit, beyond = "s3://b/" + "x" * 1017, "s3://b/" + "é" * 509
    assert (len(at_limit.encode()), len(beyond.encode())) == (1024, 1025)
    names = [*NAMES, at_limit, beyond]
    payload = encoded(names)
    assert [8 in ref.slots for ref in refs_in(payload)][-3:] == [True, True, False]
    assert refs_in(payload)[-1].string(5) == beyond
    assert names_in(payload) == names


def test_equal_locations_share_one_frame() -> None:
    """The frame is decoded once."""
    payload = encoded([*NAMES, *NAMES])
    assert len(payload) < 1.8 * len(encoded(NAMES))
    codes, pool = decode_manifest(payload).arrays[NODE].locations.distinct()
    assert (len(codes), len(pool)) == (2400, 1200)


def test_manifests_of_other_writers_repeat_frames() -> None:
    """Equal frames stored one by one are one location."""
    dictionary = small_dictionary()
    pack = compressor(dictionary).compress
    other = OtherManifest()
    frames = [other.out.blob(pack(NAMES[row % 3].encode())) for row in range(9)]
    other.array(NODE, [other.ref((row,), {8: frame}) for row, frame in enumerate(frames)])
    refs = decode_manifest(other.finish(MANIFEST, dictionary=dictionary)).arrays[NODE]
    codes, pool = refs.locations.distinct()
    assert len(pool) == 3
    assert [pool.get(code) for code in codes.tolist()] == NAMES[:3] * 3


def test_plain_and_compressed_locations_mix() -> None:
    """In one array; each is read by what it is."""
    dictionary = small_dictionary()
    frame = compressor(dictionary).compress(NAMES[0].encode())
    other = OtherManifest()
    plain, packed = other.out.string(NAMES[1]), other.out.blob(frame)
    other.array(
        NODE,
        [
            other.ref((0,), {5: plain}),
            other.ref((1,), {8: packed}),
            other.native((2,), chunk_id(3)),
            other.ref((3,), {5: plain, 8: packed}),
        ],
    )
    payload = other.finish(MANIFEST, dictionary=dictionary)
    refs = decode_manifest(payload).arrays[NODE]
    assert refs.kinds.tolist() == [Kind.VIRTUAL, Kind.VIRTUAL, Kind.NATIVE, Kind.VIRTUAL]
    assert refs.ref(0) == VirtualChunk(NAMES[1], 0, 0)
    assert refs.ref(1) == VirtualChunk(NAMES[0], 0, 0)
    assert refs.ref(3) == VirtualChunk(NAMES[0], 0, 0)
    again = encode_manifest(MANIFEST, {NODE: refs})
    assert as_dict(decode_manifest(again).arrays[NODE]) == as_dict(refs)


@pytest.mark.parametrize("algorithm", [None, 0, 1])
def test_files_without_a_dictionary_read_whatever_the_algorithm(algorithm: int | None) -> None:
    """Release 1 writes no algorithm, which reads as zstd; release 2 writes 0."""
    other = OtherManifest()
    other.array(NODE, [other.ref((0,), {5: other.out.string("s3://b/x")})])
    payload = other.finish(MANIFEST, algorithm=algorithm)
    assert names_in(payload) == ["s3://b/x"]


@pytest.mark.parametrize("algorithm", [0, 2])
def test_a_dictionary_of_another_algorithm_is_not_used(algorithm: int) -> None:
    """Its locations cannot be read; plain ones can."""
    dictionary = small_dictionary()
    other = OtherManifest()
    plain = other.out.string("s3://b/x")
    frame = other.out.blob(compressor(dictionary).compress(b"s3://b/y"))
    other.array(NODE, [other.ref((0,), {5: plain}), other.ref((1,), {8: frame})])
    payload = other.finish(MANIFEST, dictionary=dictionary, algorithm=algorithm)
    refs = decode_manifest(payload).arrays[NODE]
    assert refs.ref(0) == VirtualChunk("s3://b/x", 0, 0)
    with pytest.raises(FormatError, match="no dictionary"):
        refs.ref(1)


def test_frames_need_not_say_their_size() -> None:
    """Official writers do; it is optional in zstd."""
    dictionary = small_dictionary()
    other = OtherManifest()
    frame = compressor(dictionary, size=False).compress(b"s3://b/unsized")
    other.array(NODE, [other.ref((0,), {8: other.out.blob(frame)})])
    assert names_in(other.finish(MANIFEST, dictionary=dictionary)) == ["s3://b/unsized"]


def test_an_empty_location_may_be_compressed() -> None:
    """A frame of nothing is a location of nothing."""
    dictionary = small_dictionary()
    other = OtherManifest()
    other.array(NODE, [other.ref((0,), {8: other.out.blob(compressor(dictionary).compress(b""))})])
    assert names_in(other.finish(MANIFEST, dictionary=dictionary)) == [""]


def test_locations_are_decoded_when_asked_for() -> None:
    """A damaged one harms only those who need it."""
    payload = bytearray(encode_manifest(MANIFEST, {NODE: virtual_refs(["s3://b/x", "s3://b/y"])}))
    payload[payload.index(b"s3://b/x")] = 0xFF
    refs = decode_manifest(bytes(payload)).arrays[NODE]
    assert refs.ref(1) == VirtualChunk("s3://b/y", 1, 1)
    with pytest.raises(FormatError, match="cannot be decoded"):
        refs.ref(0)


def test_threads_share_a_dictionary() -> None:
    """A zstd context serves one at a time, which nobody has to know."""
    refs = decode_manifest(encoded(NAMES)).arrays[NODE]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(refs.locations.get, range(len(NAMES)))) == NAMES


def test_merged_pools_know_where_each_string_went() -> None:
    """Stored and in memory alike."""
    stored = decode_manifest(encoded(NAMES)).arrays[NODE].locations
    pools = [Strings(("a", NAMES[3], "a")), stored, Strings()]
    maps, joint = merge_pools(pools)
    for pool, places in zip(pools, maps, strict=True):
        assert [joint.get(place) for place in places.tolist()] == [
            pool.get(row) for row in range(len(pool))
        ]
    assert len(set(joint.strings)) == len(joint)


def test_manifest_too_costly_for_readers_is_refused() -> None:
    """The official reader counts a shared string once for each reference to it."""
    name = "s3://b/" + "x" * 60_000
    refs = virtual_refs([name] * 40_000)
    with pytest.raises(InvalidInputError, match="splitting"):
        encode_manifest(MANIFEST, {NODE: refs})

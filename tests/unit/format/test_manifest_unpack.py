"""Whole manifests: halves of a seekable one are decompressed at once, to the same effect."""

from __future__ import annotations

import threading
import zlib
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard

from icechunk_async.errors import FormatError, UnsupportedSpecVersionError
from icechunk_async.format.envelope import HEADER_BYTES, FileType, file_header, pack, unpack
from icechunk_async.format.manifest.seekable import unpacking as manifest_unpack
from icechunk_async.format.manifest.seekable.index import SeekIndex
from icechunk_async.format.manifest.seekable.pieces import compress_pieces, decompress_run
from icechunk_async.format.manifest.seekable.unpacking import unpack_manifest
from tests.unit.format.seekable import natives, seekable

if TYPE_CHECKING:
    type Runs = list[tuple[int, str]]


@pytest.fixture(scope="module")
def file() -> bytes:
    """Return a seekable file of a dozen pieces."""
    return seekable(natives(60_000))[1]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Share small payloads, too; note the size and the thread of each half."""
    found: Runs = []

    def note(blocks: memoryview, payload: memoryview, *, last: bool) -> None:
        found.append((len(payload), threading.current_thread().name))
        decompress_run(blocks, payload, last=last)

    monkeypatch.setattr(manifest_unpack, "_SHARED_BYTES", 1 << 20)
    monkeypatch.setattr(manifest_unpack, "decompress_run", note)
    return found


def test_two_threads_take_half_each(file: bytes, runs: Runs) -> None:
    """What they answer is the frame's contents, and cannot be changed."""
    whole = unpack(file, FileType.MANIFEST)
    found = unpack_manifest(file)
    assert found.spec_version == whole.spec_version
    assert bytes(found.payload) == bytes(whole.payload)
    assert isinstance(found.payload, memoryview)
    assert found.payload.readonly
    (first, one), (second, other) = runs
    assert one != other
    assert first + second == len(whole.payload)
    assert abs(first - second) < len(whole.payload) // 4


def test_small_and_other_files_are_read_at_once(
    file: bytes, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other writers, and those that are not worth a thread."""
    payload = unpack(file, FileType.MANIFEST).payload
    other = pack(payload, FileType.MANIFEST, 2)
    assert bytes(unpack_manifest(other).payload) == bytes(payload)
    monkeypatch.setattr(manifest_unpack, "_SHARED_BYTES", len(payload) + 1)
    assert bytes(unpack_manifest(file).payload) == bytes(payload)
    assert runs == []


@pytest.mark.parametrize("lie", ["checksums", "places", "frame"])
def test_an_index_that_does_not_fit_costs_time_and_nothing_else(file: bytes, lie: str) -> None:
    """Its own checksum is right each time, as nobody but a writer could make it."""
    index = SeekIndex.decode(file, len(file))
    payload = bytes(unpack(file, FileType.MANIFEST).payload)
    frame = file[: int(index.places[-1])]
    match lie:
        case "checksums":
            wrong = replace(index, checksums=index.checksums ^ np.uint32(1))
        case "places":
            places = index.places.copy()
            places[1:-1] += 1
            wrong = replace(index, places=places)
        case _:
            # The same payload in one piece: no half of it decodes by itself.
            frame = pack(payload, FileType.MANIFEST, 2)
            places = np.linspace(HEADER_BYTES + 9, len(frame), len(index.places)).astype(np.int64)
            wrong = replace(index, places=places)
    assert bytes(unpack_manifest(frame + wrong.encode()).payload) == payload


@pytest.mark.parametrize("between", [0, 300_000])
def test_blocks_that_mean_something_else_alone_are_decoded_with_those_before(between: int) -> None:
    """The last piece repeats at the distance of the first one, which it does not say again.

    Whether it follows at once, or after one that repeats nothing and is right by itself.
    """
    random = np.random.default_rng(1)
    sizes = [700_000, between, 700_000 - between]
    periods = [random.integers(0, 256, size, np.uint8) for size in (3000, max(between, 1), 3000)]
    raws = [np.resize(*it).tobytes() for it in zip(periods, sizes, strict=True) if it[1]]
    stream = zstandard.ZstdCompressor(level=3).compressobj(size=1_400_000)
    blocks = [stream.compress(it) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for it in raws]
    blocks[-1] += stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)
    alone = memoryview(bytearray(700_000))
    decompress_run(memoryview(b"".join(blocks[1:])), alone, last=True)
    assert alone != b"".join(raws[1:])
    file = with_index(blocks, raws)
    assert bytes(unpack_manifest(file).payload) == b"".join(raws)


def with_index(blocks: list[bytes], raws: list[bytes], junk: bytes = b"") -> bytes:
    """Return a file of given pieces, the first with a frame's header, and its index."""
    header = file_header(sum(map(len, raws)), FileType.MANIFEST, 2)
    begin = len(header) + zstandard.frame_header_size(blocks[0])
    ends = np.cumsum([len(header) + len(blocks[0]), *map(len, blocks[1:])])
    ends[-1] += len(junk)
    index = SeekIndex(
        places=np.array([begin, *ends]),
        cuts=np.cumsum([0, *map(len, raws)]),
        checksums=np.array([zlib.crc32(raw) for raw in raws], np.uint32),
        step=4096,
        arrays={},
    )
    return b"".join([header, *blocks, junk, index.encode()])


def test_bytes_between_the_frame_and_its_index_are_refused() -> None:
    """Though the index counts them in."""
    raws = [bytes(700_000), bytes(700_000)]
    pieces = compress_pieces(memoryview(b"".join(raws)), [0, 700_000, 1_400_000], 3)
    assert pieces is not None
    blocks = [pieces.header + pieces.blocks[0], pieces.blocks[1]]
    assert bytes(unpack_manifest(with_index(blocks, raws)).payload) == b"".join(raws)
    with pytest.raises(FormatError):
        unpack_manifest(with_index(blocks, raws, b"junk"))


def test_blocks_inside_of_a_block_are_not_taken_for_the_frame() -> None:
    """The index says that the first piece begins in what the frame holds as it is."""
    size, raws = 1_400_000, [bytes(700_000), bytes(700_000)]
    pieces = compress_pieces(memoryview(b"".join(raws)), [0, 700_000, size], 3)
    assert pieces is not None
    inner = b"".join(pieces.blocks)
    outer = [block_header(len(inner), kind=0) + inner]
    left = size - len(inner)
    while left:
        some = min(left, 1 << 17)
        left -= some
        outer.append(block_header(some, kind=1, last=not left) + b"x")
    frame = pieces.header + b"".join(outer)
    header = file_header(size, FileType.MANIFEST, 2)
    begin = len(header) + len(pieces.header) + 3
    index = SeekIndex(
        places=np.array([begin, begin + len(pieces.blocks[0]), len(header) + len(frame)]),
        cuts=np.array([0, 700_000, size]),
        checksums=np.array([zlib.crc32(raw) for raw in raws], np.uint32),
        step=4096,
        arrays={},
    )
    found = unpack_manifest(header + frame + index.encode())
    assert bytes(found.payload) == inner + b"x" * (size - len(inner))


def block_header(size: int, *, kind: int, last: bool = False) -> bytes:
    """Return the header of a block (RFC 8878, 3.1.1.2): kind 0 is raw, 1 a repeated byte."""
    return (size << 3 | kind << 1 | last).to_bytes(3, "little")


def test_without_memory_the_answer_is_that_of_other_files(
    file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may need less of it at a time."""
    payload = bytes(unpack(file, FileType.MANIFEST).payload)

    def refuse(*_arguments: object, **_named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(manifest_unpack, "decompress_run", refuse)
    assert bytes(unpack_manifest(file).payload) == payload


def test_damage_is_refused_as_without_an_index(file: bytes) -> None:
    """Anywhere in the headers; but for the frame's window, of which no half needs all."""
    window = HEADER_BYTES + 5
    places = (0, 20, *range(36, window), *range(window + 1, window + 5))
    for place, mask in product(places, (0x55, 0x04)):
        damaged = bytearray(file)
        damaged[place] ^= mask
        try:
            expected = bytes(unpack(bytes(damaged), FileType.MANIFEST).payload)
        except (FormatError, UnsupportedSpecVersionError) as error:
            with pytest.raises(type(error)):
                unpack_manifest(bytes(damaged))
        else:
            assert bytes(unpack_manifest(bytes(damaged)).payload) == expected
    for end in (0, 38, 50, len(file) // 2):
        with pytest.raises(FormatError):
            unpack_manifest(file[:end])


def test_random_damage_never_does_more_than_refuse(file: bytes) -> None:
    """Or answer other bytes, as a frame without a checksum allows; always as many."""
    size = len(unpack(file, FileType.MANIFEST).payload)
    random = np.random.default_rng(7)
    for place in random.integers(HEADER_BYTES, len(file), 60).tolist():
        damaged = bytearray(file)
        damaged[place] ^= 1 << int(random.integers(8))
        try:
            found = unpack_manifest(bytes(damaged))
        except FormatError:
            continue
        assert len(found.payload) == size


def test_a_run_of_pieces_is_of_the_size_that_was_asked_for() -> None:
    """Fewer or more bytes are refused, and so are blocks that refer to what came before."""
    raw = memoryview(np.resize(np.arange(3000, dtype=np.uint16), 500_000).view(np.uint8))
    cuts = [0, 250_000, 600_000, len(raw)]
    pieces = compress_pieces(raw, cuts, 3)
    assert pieces is not None
    blocks = memoryview(b"".join(pieces.blocks[1:]))
    found = memoryview(bytearray(len(raw) - 250_000))
    decompress_run(blocks, found, last=True)
    assert found == raw[250_000:]
    for size in (len(found) - 1, len(found) + 1):
        with pytest.raises(FormatError):
            decompress_run(blocks, memoryview(bytearray(size)), last=True)
    with pytest.raises(FormatError):
        decompress_run(blocks[:-10], memoryview(bytearray(len(found))), last=True)

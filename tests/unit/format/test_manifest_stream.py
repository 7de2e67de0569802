"""Passing through manifests without holding them: the same answers in little memory, or none."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
import zstandard

from icechunk_async.errors import FormatError, UnsupportedSpecVersionError
from icechunk_async.format.envelope import HEADER_BYTES, FileType, pack
from icechunk_async.format.manifest import stream as manifest_stream
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.stream import open_streamed
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import node_id
from tests.unit.format.seekable import MANIFEST, NODE, mixed, natives, virtuals
from tests.unit.format.table_builder import Scalar, Struct

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from icechunk_async.format.manifest.refs import ChunkRefs, Coordinates
    from icechunk_async.format.manifest.stream import StreamedManifest
    from tests.unit.format.table_builder import Field, Offset

COUNT = 5000
LENGTHS = range(1, COUNT + 1)


@pytest.fixture(autouse=True)
def _of_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small manifests take many windows, and little of them be kept."""
    monkeypatch.setattr(manifest_stream, "_WINDOW_BYTES", 1 << 12)
    monkeypatch.setattr(manifest_stream, "_HEAD_BYTES", 1 << 10)
    monkeypatch.setattr(manifest_stream, "_TAIL_BYTES", 1 << 13)
    monkeypatch.setattr(manifest_stream, "_STEP", 64)


def others() -> bytes:
    """Return a manifest as other writers lay it out: from its end, texts beside references."""
    written = OtherManifest()
    refs: list[Offset] = []
    for number in range(COUNT):
        fields: dict[int, Field] = {3: Scalar(number + 1, 8)}
        if number % 50 == 49:
            fields[4] = Struct(number.to_bytes(12))
        else:
            fields[2] = Scalar(number % 700, 8)
            fields[5] = written.out.string(f"s3://bucket/{number // 700}.nc")
        refs.append(written.ref((number // 100, number % 100), fields))
    written.array(NODE, refs)
    return written.finish(MANIFEST)


OTHERS = others()


def streamed(payload: bytes | memoryview) -> StreamedManifest:
    """Pass through a manifest."""
    found = open_streamed(pack(payload, FileType.MANIFEST, 2))
    assert found is not None
    return found


def lengths(manifest: StreamedManifest, numbers: range) -> list[int | None]:
    """Look chunks of the other writer's manifest up; answer their lengths."""
    found = [manifest.find(NODE, (it // 100, it % 100)) for it in numbers]
    return [None if it is None else getattr(it, "length") for it in found]  # noqa: B009


SHAPES: dict[str, Callable[[], ChunkRefs]] = {
    "native": lambda: natives(COUNT),
    "native, three axes": lambda: natives(COUNT, 3),
    "virtual, one file": lambda: virtuals(COUNT, 1),
    "virtual, all different": lambda: virtuals(COUNT, COUNT),
    "another writer": lambda: decode_manifest(OTHERS).refs(NODE, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_found_is_right_and_nothing_else_is(name: str) -> None:
    """Everywhere in a manifest, with all fields; whoever looks for too much is told nothing."""
    refs = SHAPES[name]()
    payload = OTHERS if name == "another writer" else encode_manifest(MANIFEST, {NODE: refs})
    rows = {0, 1, 63, 64, 65, len(refs) - 1, *range(0, len(refs), len(refs) // 40)}
    for row in rows:
        manifest = streamed(payload)
        coords = tuple(refs.coords[row].tolist())
        assert manifest.find(NODE, coords) == refs.ref(row)
        absent = (*coords[:-1], coords[-1] + 1)
        there = refs.find(absent)
        assert manifest.find(NODE, absent) in {None, None if there is None else refs.ref(there)}
        for missing in ((), (*coords, 0), tuple(it + 10**6 for it in coords)):
            assert manifest.find(NODE, missing) is None
        assert manifest.find(node_id(2), coords) is None


def test_little_is_held() -> None:
    """The vector, a part of the references, and those beside the one that was looked for."""
    manifest = streamed(OTHERS)
    held = manifest.weight * 40 - len(manifest.data)
    assert held < 4 * COUNT + len(OTHERS) // 3
    assert lengths(manifest, range(2000, 2001)) == [2001]
    assert manifest.weight * 40 - len(manifest.data) < held + (1 << 14)


def passages(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Count the passages from now on."""
    counted: list[None] = []
    windows = manifest_stream._Passage.windows

    def noted(passage: manifest_stream._Passage) -> object:
        counted.append(None)
        return windows(passage)

    monkeypatch.setattr(manifest_stream._Passage, "windows", noted)
    return counted


def test_neighbours_take_no_passage_and_others_take_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for more than a few stretches is better served by the whole file."""
    counted = passages(monkeypatch)
    manifest = streamed(OTHERS)
    assert len(counted) == 1
    assert lengths(manifest, range(10)) == [*LENGTHS[:10]]  # the other writer begins at the end
    assert len(counted) == 1
    assert lengths(manifest, range(2000, 2020)) == [*LENGTHS[2000:2020]]
    assert len(counted) == 2
    assert lengths(manifest, range(4000, 4001)) == [4001]
    assert len(counted) == 3
    assert lengths(manifest, range(3000, 3001)) == [None]
    assert len(counted) == 3
    assert lengths(manifest, range(2000, 2020)) == [*LENGTHS[2000:2020]]


def test_a_passage_ends_where_nothing_more_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer's last references are the first of its file."""
    manifest = streamed(OTHERS)
    taken: list[int] = []
    take = manifest_stream._Passage.take

    def noted(passage: manifest_stream._Passage, start: int, window: np.ndarray) -> None:
        taken.append(start)
        take(passage, start, window)

    monkeypatch.setattr(manifest_stream._Passage, "take", noted)
    assert lengths(manifest, range(COUNT - 700, COUNT - 699)) == [COUNT - 699]
    assert max(taken) < len(OTHERS) // 3


def test_nobody_waits_for_the_passage_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several that look for chunks in different places need the whole file: at once."""
    manifest = streamed(OTHERS)
    begun, go_on = threading.Event(), threading.Event()
    take = manifest_stream._Passage.take

    def slow(passage: manifest_stream._Passage, start: int, window: np.ndarray) -> None:
        begun.set()
        assert go_on.wait(10)
        take(passage, start, window)

    monkeypatch.setattr(manifest_stream._Passage, "take", slow)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.extend(lengths(manifest, range(2000, 2001))))
    thread.start()
    assert begun.wait(10)
    assert lengths(manifest, range(4000, 4001)) == [None]
    assert lengths(manifest, range(3)) == [1, 2, 3]  # which are here
    go_on.set()
    thread.join()
    assert found == [2001]


def test_other_layouts_are_left_to_the_whole_file() -> None:
    """Several arrays, several ranks, vtables before what uses them, and files that are small."""
    refs = natives(COUNT)
    apart = encode_manifest(MANIFEST, {NODE: mixed(COUNT // 3)})
    assert open_streamed(pack(apart, FileType.MANIFEST, 2)) is None
    several = encode_manifest(MANIFEST, {NODE: refs, node_id(2): refs})
    assert open_streamed(pack(several, FileType.MANIFEST, 2)) is None
    written = OtherManifest()
    strays = [written.native((it,) * (1 + it // 2500)) for it in range(COUNT)]
    written.array(NODE, strays)
    assert open_streamed(pack(written.finish(MANIFEST), FileType.MANIFEST, 2)) is None
    small = encode_manifest(MANIFEST, {NODE: natives(3)})
    assert open_streamed(pack(small, FileType.MANIFEST, 2)) is None


def test_bombs_and_damaged_files_are_left_to_the_whole_file() -> None:
    """Which says what is wrong; only the header is told of here."""
    packed = pack(OTHERS, FileType.MANIFEST, 2)
    header, frame = packed[:HEADER_BYTES], packed[HEADER_BYTES:]
    for size in (0, 1, 100, len(frame) // 2, len(frame) - 1):
        assert open_streamed(header + frame[:size]) is None
    far = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=far)
    looks_back = compressor.compress(OTHERS + bytes(1 << 25))
    assert open_streamed(header + looks_back) is None
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert open_streamed(header + bomb) is None
    with pytest.raises(UnsupportedSpecVersionError):
        open_streamed(header[:36] + b"\x09" + header[37:] + frame)
    with pytest.raises(FormatError, match="truncated"):
        open_streamed(header[:20])


def test_mutated_files_answer_something_or_nothing() -> None:
    """Whatever the bytes say: no other error, and no reading outside of them."""
    chance = random.Random(3)
    payloads = [OTHERS, bytes(encode_manifest(MANIFEST, {NODE: virtuals(COUNT, 30)}))]
    wanted: list[Coordinates] = [(0, 0), (3, 7), (20, 0), (49, 99), (0,), (2500,), (4999,)]
    opened = 0
    for _ in range(300):
        payload = bytearray(chance.choice(payloads))
        for _ in range(chance.choice([1, 1, 4, 40])):
            place = chance.choice([chance.randrange(len(payload)), chance.randrange(200)])
            payload[place] = chance.choice([0, 0xFF, 0x80, chance.randrange(256)])
        manifest = open_streamed(pack(bytes(payload), FileType.MANIFEST, 2))
        if manifest is not None:
            opened += 1
            for coords in wanted:
                manifest.find(NODE, coords)
    assert opened > 30


def test_what_is_kept_is_known_byte_by_byte() -> None:
    """However stretches overlap; a read needs all of its bytes."""
    chance = random.Random(4)
    for _ in range(200):
        buffer = manifest_stream._KeptBuffer(60)
        here: set[int] = set()
        for _ in range(chance.randrange(6)):
            start = chance.randrange(60)
            stop = chance.randrange(start, 61)
            if start < stop:
                buffer.keep(start, stop)
                here |= set(range(start, stop))
        assert buffer.kept_bytes == len(here)
        for start in range(61):
            for size in {0, 1, 2, 7, 60 - start}:
                if start + size <= 60:
                    if here.issuperset(range(start, start + size)):
                        buffer.need(start, size)
                    else:
                        with pytest.raises(manifest_stream._AbsentBytesError):
                            buffer.need(start, size)

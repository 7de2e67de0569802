"""The envelope: header, one zstd frame, and what readers must refuse."""

from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError, InvalidInputError, UnsupportedSpecVersionError
from icechunk_async.format import envelope
from icechunk_async.format.envelope import HEADER_BYTES, FileType, pack, unpack
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.transaction_log import (
    TransactionLog,
    decode_transaction_log,
    encode_transaction_log,
)
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = FileType.TRANSACTION_LOG
PAYLOAD = bytes(range(256)) * 3
MAGIC = bytes.fromhex("494345f09fa78a4348554e4b")

# The transaction log of the first snapshot, as release 2.3.0 writes it.
OFFICIAL_HEADER = bytes.fromhex(
    "494345f09fa78a4348554e4b69632d322e332e3020202020202020202020202020202020020401"
)
OFFICIAL_PAYLOAD = bytes.fromhex(
    "200000004963686b0000160030000400100014001800"
    "1c002000240028002c00160000000b1cc8d6787580f0e33a65343c000000340000002c000000"
    "2400000018000000180000000c00000004000000" + "00" * 32
)


@pytest.fixture(scope="module", autouse=True, params=["as small files", "as large files"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Large files are decompressed to memory of another kind; all holds for both."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as large files":
            patch.setattr(envelope, "_LARGE_BYTES", 1)
        yield


def frame(payload: bytes, *, size: bool = True, checksum: bool = False) -> bytes:
    """Return a zstd frame."""
    compressor = zstandard.ZstdCompressor(write_content_size=size, write_checksum=checksum)
    return compressor.compress(payload)


def file_of(
    zstd: bytes,
    *,
    magic: bytes = MAGIC,
    stamp: bytes = b"test".ljust(24),
    spec: int = 2,
    kind: int = LOG,
    compression: int = 1,
) -> bytes:
    """Return a file with any header in front of any frame."""
    return magic + stamp + bytes([spec, kind, compression]) + zstd


@pytest.mark.parametrize("spec_version", [1, 2])
@pytest.mark.parametrize("file_type", list(FileType))
def test_a_packed_file_unpacks(spec_version: int, file_type: FileType) -> None:
    """The payload and the version come back."""
    envelope = unpack(pack(PAYLOAD, file_type, spec_version), file_type)
    assert (envelope.payload, envelope.spec_version) == (PAYLOAD, spec_version)


def test_the_header_is_laid_out_as_specified() -> None:
    """Magic, 24 bytes of stamp, version, type, compression, then the frame."""
    data = pack(PAYLOAD, FileType.MANIFEST, 1)
    assert data[:12] == MAGIC
    assert data[12:16] == b"ica-"
    assert data[12:36] == data[12:36].rstrip(b" ").ljust(24)
    assert tuple(data[36:39]) == (1, 2, 1)
    assert zstandard.ZstdDecompressor().decompress(data[HEADER_BYTES:]) == PAYLOAD


def test_file_types_are_numbered_as_specified() -> None:
    """1 snapshot, 2 manifest, 4 transaction log, 6 repo info."""
    assert {it.name: it.value for it in FileType} == {
        "SNAPSHOT": 1,
        "MANIFEST": 2,
        "TRANSACTION_LOG": 4,
        "REPO_INFO": 6,
    }


def test_frames_declare_their_size() -> None:
    """The official reader checks it where it is there."""
    data = pack(PAYLOAD, LOG, 2)
    assert zstandard.get_frame_parameters(data[HEADER_BYTES:]).content_size == len(PAYLOAD)


def test_the_level_is_passed_on() -> None:
    """A higher level makes smaller files."""
    payload = b" ".join(b"%d" % (number * number) for number in range(20_000))
    assert len(pack(payload, LOG, 2, level=19)) < len(pack(payload, LOG, 2, level=1))


def test_the_official_test_vector_reads() -> None:
    """An empty log for the well-known first snapshot."""
    envelope = unpack(OFFICIAL_HEADER + frame(OFFICIAL_PAYLOAD), LOG)
    assert envelope.spec_version == 2
    log = decode_transaction_log(envelope.payload)
    assert log == TransactionLog(INITIAL_SNAPSHOT_ID)
    assert log.is_empty()


def test_our_empty_log_has_the_fields_of_the_official_one() -> None:
    """The same slots in the same table, each an empty vector."""
    ours = root(encode_transaction_log(TransactionLog(INITIAL_SNAPSHOT_ID), 2))
    official = root(OFFICIAL_PAYLOAD)
    assert ours.slots == official.slots == set(range(9))
    for slot in range(1, 9):
        assert ours.structs(slot, 4, 4) == official.structs(slot, 4, 4) == []


@pytest.mark.parametrize("length", [0, 1, 12, 38])
def test_a_file_shorter_than_its_header_is_refused(length: int) -> None:
    """The message says how many bytes there are."""
    with pytest.raises(FormatError, match=f"truncated: {length} bytes"):
        unpack(pack(PAYLOAD, LOG, 2)[:length], LOG)


def test_another_magic_is_refused() -> None:
    """One wrong bit is enough."""
    with pytest.raises(FormatError, match="Not an Icechunk transaction log"):
        unpack(file_of(frame(PAYLOAD), magic=MAGIC[:-1] + b"k"), LOG)


def test_the_stamp_is_ignored() -> None:
    """It may be any bytes, UTF-8 or not."""
    assert unpack(file_of(frame(PAYLOAD), stamp=b"\xff" * 24), LOG).payload == PAYLOAD


@pytest.mark.parametrize("version", [3, 4, 255])
def test_a_newer_version_is_refused_by_name(version: int) -> None:
    """The error tells the version found and the newest supported one."""
    with pytest.raises(UnsupportedSpecVersionError, match=f"version {version}.*up to 2") as caught:
        unpack(file_of(frame(PAYLOAD), spec=version), LOG)
    assert caught.value.context == {"found": version, "supported": 2}


def test_version_zero_is_refused() -> None:
    """It never existed, so no newer library could read it."""
    with pytest.raises(FormatError, match="version 0") as caught:
        unpack(file_of(frame(PAYLOAD), spec=0), LOG)
    assert not isinstance(caught.value, UnsupportedSpecVersionError)


@pytest.mark.parametrize(("kind", "name"), [(1, "snapshot"), (2, "manifest"), (3, "3"), (9, "9")])
def test_another_file_type_is_refused(kind: int, name: str) -> None:
    """Known or unknown; the message names both."""
    with pytest.raises(FormatError, match=f"transaction log file, found one of type {name}"):
        unpack(file_of(frame(PAYLOAD), kind=kind), LOG)


@pytest.mark.parametrize("compression", [0, 2, 255])
def test_another_compression_is_refused(compression: int) -> None:
    """None at all is defined, but no reader accepts it."""
    data = PAYLOAD if compression == 0 else frame(PAYLOAD)
    with pytest.raises(FormatError, match=f"unknown compression {compression}"):
        unpack(file_of(data, compression=compression), LOG)


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_content_size_and_checksum_are_optional(*, size: bool, checksum: bool) -> None:
    """Writers before 2.3.0 declare no size; a checksum is allowed."""
    assert unpack(file_of(frame(PAYLOAD, size=size, checksum=checksum)), LOG).payload == PAYLOAD


@pytest.mark.parametrize("size", [True, False])
def test_a_wrong_checksum_is_refused(*, size: bool) -> None:
    """It is checked where it is there."""
    zstd = bytearray(frame(PAYLOAD, size=size, checksum=True))
    zstd[-1] ^= 1
    with pytest.raises(FormatError, match="cannot be decompressed"):
        unpack(file_of(bytes(zstd)), LOG)


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("tail", [b"\0", b"trailing", frame(b"second"), frame(b"", size=False)])
def test_bytes_after_the_frame_are_refused(*, size: bool, checksum: bool, tail: bytes) -> None:
    """A second frame too, whether or not the first declares its size."""
    with pytest.raises(FormatError, match=r"unused data|after its zstd frame"):
        unpack(file_of(frame(PAYLOAD, size=size, checksum=checksum) + tail), LOG)


@pytest.mark.parametrize("size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_truncated_frame_is_refused_wherever_it_is_cut(*, size: bool, checksum: bool) -> None:
    """Every proper prefix is an error."""
    zstd = frame(PAYLOAD, size=size, checksum=checksum)
    for length in range(len(zstd)):
        with pytest.raises(FormatError):
            unpack(file_of(zstd[:length]), LOG)


@pytest.mark.parametrize("declared", [1, 700, 767, 769, 1000])
def test_a_wrong_declared_size_is_refused(declared: int) -> None:
    """Too small or too large."""
    zstd = bytearray(frame(PAYLOAD))
    assert int.from_bytes(zstd[5:7], "little") == len(PAYLOAD) - 256  # two bytes hold size - 256
    zstd[5:7] = max(declared - 256, 0).to_bytes(2, "little")
    with pytest.raises(FormatError):
        unpack(file_of(bytes(zstd)), LOG)


@pytest.mark.parametrize("size", [True, False])
def test_a_frame_of_nothing_is_refused(*, size: bool) -> None:
    """No FlatBuffer is empty; what follows such a frame would go unseen."""
    zstd = frame(b"", size=size)
    with pytest.raises(FormatError):
        decode_transaction_log(unpack(file_of(zstd), LOG).payload)
    with pytest.raises(FormatError):
        unpack(file_of(zstd + b"tail"), LOG)


def test_a_skippable_frame_is_no_frame() -> None:
    """The library would pass over it."""
    skippable = bytes.fromhex("502a4d1805000000") + b"hello"
    for zstd in (skippable, skippable + frame(PAYLOAD)):
        with pytest.raises(FormatError):
            unpack(file_of(zstd), LOG)


def test_views_are_read_as_bytes_are() -> None:
    """Storages answer memory views."""
    data = memoryview(bytearray(pack(PAYLOAD, LOG, 2)))
    assert unpack(data, LOG).payload == PAYLOAD


@pytest.mark.parametrize("length", [1, 1 << 17, (1 << 17) + 1, 3_000_000])
def test_frames_without_a_size_may_have_many_blocks(length: int) -> None:
    """The blocks say how much room is needed."""
    payload = (b"%07d" * (length // 7 + 1) % tuple(range(length // 7 + 1)))[:length]
    assert unpack(file_of(frame(payload, size=False)), LOG).payload == payload


@pytest.mark.parametrize("size", [True, False])
def test_a_decompression_bomb_is_refused_before_it_expands(*, size: bool) -> None:
    """A few kilobytes that would unfold to 256 megabytes cost what is believed of their size."""
    compressor = zstandard.ZstdCompressor(write_content_size=size)
    stream = compressor.compressobj(size=1 << 28 if size else -1)
    zeros = bytes(1 << 20)
    bomb = b"".join([*(stream.compress(zeros) for _ in range(1 << 8)), stream.flush()])
    assert len(bomb) < 40_000
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            unpack(file_of(bomb), LOG)
        believed = 0 if size else 1 << 14
        assert tracemalloc.get_traced_memory()[1] < believed * len(bomb) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_contents_that_repeat_themselves_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a snapshot of many nodes with equal documents: thousands of bytes for each of the file."""
    monkeypatch.setattr(envelope, "_FLOOR_BYTES", 1 << 20)
    document = random.Random(1).randbytes(200)
    payload = document * 100_000
    data = pack(payload, LOG, 2)
    assert len(payload) > 4000 * len(data)
    assert unpack(data, LOG).payload == payload


def test_what_no_reader_believes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit must not refer to it."""
    monkeypatch.setattr(envelope, "_FLOOR_BYTES", 1 << 20)
    with pytest.raises(InvalidInputError, match="no reader believes"):
        pack(bytes(1 << 25), LOG, 2)
    monkeypatch.undo()
    assert unpack(pack(bytes(1 << 25), LOG, 2), LOG).payload == bytes(1 << 25)


@pytest.mark.parametrize("declared", [1 << 32, (1 << 63) + 5, (1 << 64) - 2])
def test_a_claim_of_exabytes_reserves_nothing(declared: int) -> None:
    """The size that a frame declares is not believed."""
    header = bytes.fromhex("28b52ffde0") + declared.to_bytes(8, "little")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"claims to hold|cannot be decompressed"):
            unpack(file_of(header + bytes.fromhex("010000")), LOG)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=80))
def test_random_bytes_after_a_good_header_are_refused(tail: bytes) -> None:
    """Nothing but a FormatError comes of them."""
    with pytest.raises(FormatError):
        decode_transaction_log(unpack(file_of(tail), LOG).payload)


def test_a_failed_decode_leaves_no_state() -> None:
    """Files of a thread share what decompresses them."""
    good = pack(PAYLOAD, LOG, 2)
    for _ in range(2):
        with pytest.raises(FormatError):
            unpack(good[:-5], LOG)
        assert unpack(good, LOG).payload == PAYLOAD
        assert pack(PAYLOAD, LOG, 2) == good


def test_threads_do_not_share_contexts() -> None:
    """A context serves one thread at a time, so each thread keeps its own."""
    both = Barrier(2)

    def mine(_: int) -> tuple[object, object]:
        both.wait(240)
        first, second = (
            (envelope._contexts.decompressor, envelope._contexts.compressor(3)) for _ in range(2)
        )
        assert first == second
        return first

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(mine, range(2))
    assert one[0] is not other[0]
    assert one[1] is not other[1]

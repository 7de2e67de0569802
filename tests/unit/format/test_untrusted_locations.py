"""Compressed locations that were made by hand: garbage, lies and bombs."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope, FileType
from icechunk_async.format.manifest.reading import decode_manifest
from tests.unit.format.damage import look_at, within_bounds
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import manifest_id, node_id

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 3000


@pytest.fixture(autouse=True)
def _memory_is_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def opens(payload: bytes) -> bool:
    """Read a manifest within bounds. Return whether it could be opened."""
    opened: list[bool] = []
    within_bounds(
        lambda: opened.append(look_at(Envelope(2, payload), FileType.MANIFEST)), len(payload)
    )
    return opened[0]


def compressed(frames: list[bytes], dictionary: bytes | None) -> bytes:
    """Return a manifest with these compressed locations."""
    other = OtherManifest()
    refs = [other.ref((row,), {8: other.out.blob(frame)}) for row, frame in enumerate(frames)]
    other.array(node_id(1), refs)
    return other.finish(manifest_id(1), dictionary=dictionary)


def refused_locations(payload: bytes) -> None:
    """Make sure that a manifest opens and that no location of it can be read."""
    assert opens(payload)
    (refs,) = decode_manifest(payload).arrays.values()
    for row in range(len(refs)):
        with pytest.raises(FormatError):
            refs.ref(row)
    with pytest.raises(FormatError):
        refs.locations.distinct()


def trained() -> bytes:
    """Return a dictionary."""
    samples: list[bytes | bytearray | memoryview] = [
        b"s3://bucket/file-%06d.nc" % row for row in range(1000)
    ]
    return zstandard.train_dictionary(2048, samples).as_bytes()


@pytest.mark.parametrize(
    "dictionary",
    [b"", b"x", b"\x37\xa4\x30\xec", b"\x37\xa4\x30\xec" + b"\xff" * 100, bytes(2048), None],
)
def test_garbage_as_a_dictionary_is_refused(dictionary: bytes | None) -> None:
    """When a location is asked for; too short, with a true beginning, or none."""
    data = zstandard.ZstdCompressionDict(trained())
    frame = zstandard.ZstdCompressor(dict_data=data).compress(b"s3://bucket/file-000001.nc")
    refused_locations(compressed([frame], dictionary))


def test_frames_of_another_dictionary_are_refused() -> None:
    """They name the dictionary that they need."""
    data = zstandard.ZstdCompressionDict(trained())
    frame = zstandard.ZstdCompressor(dict_data=data).compress(b"s3://bucket/file-000001.nc")
    foreign = zstandard.train_dictionary(2048, [b"%d/" % (row * row) * 9 for row in range(999)])
    refused_locations(compressed([frame], foreign.as_bytes()))


@pytest.mark.parametrize("size", [1025, 65_537, 2**31, 2**40, 2**64 - 2])
def test_a_location_that_claims_gigabytes_reserves_nothing(size: int) -> None:
    """Its frame says so and holds next to nothing."""
    header = bytes.fromhex("28b52ffde0") + size.to_bytes(8, "little")
    refused_locations(compressed([header + bytes.fromhex("010000")], trained()))


def test_a_location_that_unfolds_without_saying_its_size_is_refused() -> None:
    """A megabyte in a frame of a few bytes."""
    for sized in (True, False):
        frame = zstandard.ZstdCompressor(write_content_size=sized).compress(bytes(1 << 20))
        assert len(frame) < 100
        refused_locations(compressed([frame], trained()))


def test_many_locations_that_unfold_are_refused_together() -> None:
    """Each alone is within its limit."""
    pack_one = zstandard.ZstdCompressor().compress
    frames = [pack_one(b"%06d" % row + b"x" * 65_000) for row in range(MANY)]
    payload = compressed(frames, trained())
    assert opens(payload)
    (refs,) = decode_manifest(payload).arrays.values()
    with pytest.raises(FormatError, match="dwarf"):
        refs.locations.distinct()


@pytest.mark.parametrize("tail", [b"x", b"\x28\xb5\x2f\xfd"])
def test_bytes_after_a_location_are_refused(tail: bytes) -> None:
    """One frame only."""
    frame = zstandard.ZstdCompressor().compress(b"s3://bucket/x")
    refused_locations(compressed([frame + tail, frame[:-1], b"", b"\xff" * 30], trained()))

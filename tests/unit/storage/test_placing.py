"""The parts of a large read end in one place, and are in memory once."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import ByteRange
from icechunk_async.storage.extensions import PlacedRange, room
from icechunk_async.storage.policies.cache import CacheStatistics
from icechunk_async.storage.policies.coalesce import Coalescing
from icechunk_async.storage.policies.hedge import Hedged
from icechunk_async.storage.policies.values import CoalescePolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import Retrieved, Version
from tests.unit.storage.cache_tools import cache_of, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import RangeRequest, Storage

MIB = 1 << 20
BODY = bytes(range(256)) * 4
KEY = "chunks/a"
SMALL = CoalescePolicy(part_bytes=100)


class Receiving(PassingStorage):
    """Returns parts of one large object of zeros, and records the requests.

    The parts are in places, as from an S3 bucket, or in separate bytes.
    """

    def __init__(self, storage: Storage, size_bytes: int, *, places: bool = True) -> None:
        super().__init__(storage)
        self.size_bytes, self.places = size_bytes, places
        self.asked: list[RangeRequest] = []

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return a part, 64 KiB after 64 KiB."""
        del key
        self.asked.append(byte_range)
        assert isinstance(byte_range, ByteRange)
        assert byte_range.stop is not None
        stop = min(byte_range.stop, self.size_bytes)
        length = max(0, stop - byte_range.start)
        data: bytes | memoryview = bytes(0)
        if not self.places or not isinstance(byte_range, PlacedRange) or stop != byte_range.stop:
            data = bytes(length)
        else:
            data = byte_range.into
            for start in range(0, length, 1 << 16):
                piece = min(1 << 16, length - start)
                data[start : start + piece] = bytes(piece)
        return Retrieved(data, Version("1"), self.size_bytes)


@pytest.fixture
async def plain() -> AsyncIterator[Storage]:
    """Open a storage with an object."""
    async with opened() as storage:
        await storage.put(KEY, BODY)
        yield storage


@pytest.mark.parametrize(("places", "most"), [(True, 1.1), (False, 1.5)])
async def test_a_split_read_copies_each_byte_once(
    plain: Storage, *, places: bool, most: float
) -> None:
    """Apart from one part, where the storage knows no places."""
    length = 16 * MIB
    coalescing = Coalescing(
        Receiving(plain, length, places=places), CoalescePolicy(part_bytes=4 * MIB)
    )
    tracemalloc.start()
    try:
        answer = await coalescing.get(KEY, ByteRange(0, length))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(answer.data) == length
    assert length <= peak < length * most


async def test_the_parts_are_in_order_and_cannot_be_changed(plain: Storage) -> None:
    """The bytes may be shared with other readers."""
    answer = await Coalescing(plain, SMALL).get(KEY, ByteRange(7, 1001))
    assert bytes(answer.data) == BODY[7:1001]
    assert isinstance(answer.data, memoryview)
    assert answer.data.readonly


@pytest.mark.parametrize("size", [0, 50, 150, 999])
async def test_a_short_object_returns_only_its_bytes(plain: Storage, size: int) -> None:
    """Nothing of the memory that was meant for the rest."""
    answer = await Coalescing(Receiving(plain, size), SMALL).get(KEY, ByteRange(0, 1000))
    assert bytes(answer.data) == bytes(size)
    assert answer.size_bytes == size


async def test_an_untrue_length_allocates_no_memory(plain: Storage) -> None:
    """A manifest may say anything; what counts is what arrives."""
    assert room(1 << 40) is None
    backend = Receiving(plain, 1000)
    tracemalloc.start()
    try:
        answer = await Coalescing(backend).get(KEY, ByteRange(0, 1 << 40))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(answer.data) == bytes(1000)
    assert peak < MIB
    assert not any(isinstance(it, PlacedRange) for it in backend.asked)


async def test_only_one_request_fills_a_buffer(plain: Storage) -> None:
    """A storage that may ask twice asks without, and so does one that keeps what it gets."""
    wanted = PlacedRange(0, 4, into=memoryview(bytearray(4)))
    backend = Receiving(plain, 1000)
    for storage in (Hedged(backend, lambda _: True), cache_of(backend)):
        assert bytes((await storage.get(KEY, wanted)).data) == bytes(4)
    assert [type(it) for it in backend.asked] == [ByteRange, ByteRange]
    cached = cache_of(plain)
    for _ in range(2):
        assert (await cached.get(KEY, wanted)).data == BODY[:4]
    assert cached.statistics != CacheStatistics()


def test_a_buffer_does_not_change_a_ranges_identity() -> None:
    """Ranges are compared, and used as keys."""
    wanted = PlacedRange(1, 5, into=memoryview(bytearray(4)))
    assert wanted == ByteRange(1, 5) == wanted.unplaced()
    assert hash(wanted) == hash(ByteRange(1, 5))
    assert wanted != ByteRange(1, 6)
    assert wanted != (1, 5)
    assert "into" not in repr(wanted)

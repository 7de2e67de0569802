"""How often the bytes of a large object are copied, and whose they are."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from icechunk_async.errors import IcechunkError, StorageUnavailableError
from icechunk_async.storage import ByteRange, open_storage
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async_s3.transport import as_bytes, body_to_send
from tests.servers.s3.running import KEYS
from tests.unit.backends.loopback import serving

MIB = 1 << 20


@pytest.fixture
def body() -> np.ndarray[Any, Any]:
    """Make something large, of which no two MiB are alike."""
    return np.arange(8 * MIB // 4, dtype=np.uint32)


class Bucket:
    """One object, whose parts come as told."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.way = "honest"
        self.digest = ""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Return one request, and hold on to nothing."""
        if request.method == "PUT":
            digest = hashlib.sha256()
            async for piece in request.content.iter_any():
                digest.update(piece)
            self.digest = digest.hexdigest()
            assert request.headers["x-amz-content-sha256"] == self.digest
            return web.Response(headers={"etag": '"1"'})
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        start, stop = int(first), int(last) + 1
        if self.way == "all":
            return web.Response(body=self.body, headers={"etag": '"1"'})
        if self.way == "missing":
            return web.Response(status=404, body=b"?" * (stop - start))
        told = f"bytes {start}-{stop - 1}/{len(self.body)}"
        response = web.StreamResponse(status=206, headers={"etag": '"1"', "content-range": told})
        response.content_length = stop - start
        more = {"longer": 10, "shorter": -10}.get(self.way, 0)
        response.content_length += more
        if self.way == "chunked":
            response.content_length = None
            response.enable_chunked_encoding()
        await response.prepare(request)
        length = (stop - start + more) // 2 if self.way == "cut" else stop - start + more
        for place in range(start, start + length, 1 << 16):
            await response.write(self.body[place : min(place + (1 << 16), start + length)])
        if self.way == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response


def _opened(url: str, **options: Any) -> Any:
    given = {"endpoint_url": url, "region": "us-east-1", "allow_http": True, **KEYS, **options}
    return open_storage("s3://bucket", **given)


@pytest.mark.parametrize("way", ["honest", "chunked", "all"])
async def test_a_part_is_put_in_its_place(way: str, body: np.ndarray[Any, Any]) -> None:
    """As it comes, where its length is told; else it comes as always, and the place stays."""
    bucket = Bucket(body.tobytes())
    into = memoryview(bytearray(MIB))
    async with serving(bucket) as url, _opened(url) as storage:
        bucket.way = way
        answer = await storage.get("key", PlacedRange(MIB, 2 * MIB, into=into))
        assert bytes(answer.data) == bucket.body[MIB : 2 * MIB]
        assert (answer.data is into) == (way == "honest")
        assert (bytes(into) == bytes(MIB)) == (way != "honest")


@pytest.mark.parametrize("way", ["longer", "shorter", "missing", "cut"])
async def test_other_bytes_than_requested_are_refused(way: str, body: np.ndarray[Any, Any]) -> None:
    """It never gets to the place, unless it breaks off."""
    bucket = Bucket(body.tobytes())
    bucket.way = way
    into = memoryview(bytearray(MIB))
    async with serving(bucket) as url, _opened(url) as storage:
        error = StorageUnavailableError if way == "cut" else IcechunkError
        with pytest.raises(error):
            await storage.get("key", PlacedRange(0, MIB, into=into))
        assert way == "cut" or bytes(into) == bytes(MIB)
        bucket.way = "honest"
        answer = await storage.get("key", ByteRange(0, MIB))
        assert answer.data == bucket.body[:MIB]


async def test_a_placed_part_takes_no_memory_of_its_own(body: np.ndarray[Any, Any]) -> None:
    """Only what is on its way, on both ends."""
    bucket = Bucket(body.tobytes())
    into = memoryview(bytearray(len(bucket.body)))
    async with serving(bucket) as url, _opened(url) as storage:
        await storage.get("key", ByteRange(0, 1))
        tracemalloc.start()
        try:
            await storage.get("key", PlacedRange(0, len(into), into=into))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert into == bucket.body
    assert peak < 4 * MIB


async def test_an_array_is_not_copied_to_be_written(body: np.ndarray[Any, Any]) -> None:
    """It is sent piece by piece. The signature covers all of it."""
    bucket = Bucket(b"")
    async with serving(bucket) as url, _opened(url) as storage:
        await storage.put("key", b"first")
        tracemalloc.start()
        try:
            await storage.put("key", memoryview(body).cast("B"))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert bucket.digest == hashlib.sha256(body).hexdigest()
    assert peak < 4 * MIB


async def test_a_body_in_flight_does_not_change_with_the_array(
    body: np.ndarray[Any, Any],
) -> None:
    """After a cancellation, a connection still sends what it was given."""
    view = as_bytes(memoryview(body))
    expected = body.tobytes()
    pieces = body_to_send(view)
    assert not isinstance(pieces, bytes)
    first = await anext(pieces)
    small = body_to_send(view[:1000])
    body[:] = 0
    assert first == expected[: len(first)]
    assert small == expected[:1000]


def test_resizable_buffers_are_copied() -> None:
    """A write that was cancelled leaves nothing behind that would hinder it."""
    data = bytearray(MIB)
    kept = [as_bytes(data), as_bytes(memoryview(data))]
    data.clear()
    assert [len(it) for it in kept] == [MIB, MIB]


@pytest.mark.parametrize("shape", ["empty", "transposed", "items"])
def test_arrays_of_any_shape_are_their_bytes(shape: str) -> None:
    """In C order."""
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    array = {"empty": array[:0], "transposed": array.T, "items": array}[shape]
    assert bytes(as_bytes(memoryview(array))) == array.tobytes()

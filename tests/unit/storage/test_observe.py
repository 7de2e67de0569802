"""Counts, latencies and hooks, which cannot break a request."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.errors import ObjectNotFoundError, ThrottledError
from icechunk_async.storage import ByteRange, open_storage
from icechunk_async.storage.policies.observe import Observations, Observed, RequestEnd
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url
from tests.unit.storage.scripted import Scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage


class Spans:
    """A hook that keeps everything."""

    def __init__(self) -> None:
        self.open: list[tuple[str, str]] = []
        self.ended: list[tuple[object, RequestEnd]] = []

    def on_start(self, operation: str, key: str, /) -> object:
        """Keep it."""
        self.open.append((operation, key))
        return len(self.open)

    def on_end(self, started: Any, end: RequestEnd, /) -> None:
        """Keep it."""
        self.ended.append((started, end))


@pytest.fixture
async def plain() -> AsyncIterator[Storage]:
    """Open an empty storage."""
    async with open_storage(memory_url()) as storage:
        yield storage


async def test_requests_bytes_and_errors_are_counted(plain: Storage) -> None:
    """They are counted by operation, and errors by kind. The result is plain data that pickles."""
    storage = Observed(plain)
    version = await storage.put("key", memoryview(b"0123456789"))
    await storage.get("key")
    await storage.get("key", ByteRange(2, 5))
    assert await storage.get_if_changed("key", version) is None
    await storage.copy("key", "copy")
    await storage.delete(["copy", "other"])
    await storage.sync()
    with pytest.raises(ObjectNotFoundError):
        await storage.get("missing")
    assert len([entry async for entry in storage.list_prefix()]) == 1
    snapshot = storage.observations.snapshot()
    counts = {name: (it.requests, it.bytes_in, it.bytes_out) for name, it in snapshot.items()}
    assert counts == {
        "copy": (1, 0, 0),
        "delete": (1, 0, 0),
        "get": (3, 13, 0),
        "get_if_changed": (1, 0, 0),
        "list_prefix": (1, 0, 0),
        "put": (1, 0, 10),
        "sync": (1, 0, 0),
    }
    assert snapshot["get"].errors == {"object-not-found": 1}
    assert sum(snapshot["get"].histogram) == 3
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert asdict(snapshot["put"])["bytes_out"] == 10


async def test_latencies_are_measured(plain: Storage) -> None:
    """Their sum, the slowest, and quantiles that are right up to a factor of two."""
    storage = Observed(LatencyStorage(plain, seconds=0.02))
    await storage.put("key", b"x")
    await asyncio.gather(*(storage.get("key") for _ in range(10)))
    counts = storage.observations.snapshot()["get"]
    assert counts.requests == 10
    assert counts.seconds >= 0.19
    assert counts.slowest_seconds >= 0.019
    assert 0.019 <= counts.quantile(0.5) <= counts.slowest_seconds
    assert counts.quantile(0.5) <= counts.quantile(1.0) <= counts.slowest_seconds


async def test_a_listing_is_timed_without_its_reader(plain: Storage) -> None:
    """The reader's time between entries does not count. Leaving the listing early is no error."""
    for number in range(3):
        await plain.put(f"key-{number}", b"")
    storage = Observed(plain)
    began = time.perf_counter()
    entries = storage.list_prefix()
    await anext(entries)
    await asyncio.sleep(0.05)
    await entries.aclose()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - began
    counts = storage.observations.snapshot()["list_prefix"]
    assert (counts.requests, dict(counts.errors)) == (1, {})
    assert counts.seconds < seconds - 0.045


async def test_hooks_are_told_of_the_start_and_the_end(plain: Storage) -> None:
    """The end comes with what the start answered, and with the error."""
    spans = Spans()
    storage = Observed(plain, Observations([spans]))
    await storage.put("key", b"body")
    with pytest.raises(ObjectNotFoundError):
        await storage.get("missing")
    assert spans.open == [("put", "key"), ("get", "missing")]
    (first, put), (second, get) = spans.ended
    assert (first, second) == (1, 2)
    assert (put.operation, put.key, put.bytes_out, put.error) == ("put", "key", 4, None)
    assert isinstance(get.error, ObjectNotFoundError)
    assert get.seconds >= 0


async def test_a_hook_that_fails_breaks_nothing(plain: Storage) -> None:
    """The request and the other hooks succeed. The failure is counted."""

    class Broken:
        def on_start(self, operation: str, key: str, /) -> object:
            """Fail for some."""
            if operation == "put":
                raise RuntimeError("no span today")
            return None

        def on_end(self, started: Any, end: RequestEnd, /) -> None:
            """Fail."""
            raise RuntimeError("no end either")

    spans = Spans()
    storage = Observed(plain, Observations([Broken(), spans]))
    await storage.put("key", b"body")
    assert (await storage.get("key")).data == b"body"
    with pytest.raises(ObjectNotFoundError):
        await storage.get("missing")
    assert len(spans.ended) == 3
    assert storage.observations.failed_hooks == 3


async def test_a_cancelled_request_is_seen(plain: Storage) -> None:
    """It is counted as an error with its own name."""
    spans = Spans()
    storage = Observed(LatencyStorage(plain, seconds=60), Observations([spans]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await storage.get("key")
    assert storage.observations.snapshot()["get"].errors == {"CancelledError": 1}
    assert isinstance(spans.ended[0][1].error, asyncio.CancelledError)


async def test_several_storages_share_what_is_seen(plain: Storage) -> None:
    """Of one repository and its virtual sources, for example."""
    seen = Observations()
    busy = Scripted(plain, [ThrottledError("busy")])
    with pytest.raises(ThrottledError):
        await Observed(busy, seen).get("key")
    with pytest.raises(ObjectNotFoundError):
        await Observed(plain, seen).get("key")
    assert seen.snapshot()["get"].errors == {"throttled": 1, "object-not-found": 1}

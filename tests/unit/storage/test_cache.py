"""The cache: hits, entries, evictions and deletions."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import (
    InvalidInputError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    StorageClosedError,
)
from icechunk_async.storage import ByteRange, CacheOptions, SuffixRange, open_storage
from icechunk_async.storage.policies.cache import CacheStatistics
from icechunk_async.storage.policies.disk_cache import DiskTier
from icechunk_async.testing.cancellation import at_every_wait
from tests.helpers import memory_url
from tests.unit.storage.cache_tools import Counting, cache_of, files_of, get, is_empty, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import RangeRequest, Retrieved

KEY = "chunks/a"
BODY = bytes(range(100))


@pytest.fixture
async def storage() -> AsyncIterator[Counting]:
    """Open a storage with one object that never changes, and one that does."""
    async with opened() as storage:
        await storage.put(KEY, BODY)
        await storage.put("repo", BODY)
        yield storage


async def test_a_repeated_read_is_served_from_the_cache(storage: Counting, tmp_path: Path) -> None:
    """Bytes, version, size and time, from memory and from disk, without a request."""
    for options in ({"memory_bytes": 1 << 20}, {"memory_bytes": 0, "directory": tmp_path}):
        cached = cache_of(storage, **options)
        for request in (None, ByteRange(10, 20), ByteRange(90, 200), SuffixRange(5)):
            before = storage.reads
            first = await cached.get(KEY, request)
            assert await cached.get(KEY, request) == first
            assert first == await storage.get(KEY, request)
            assert first.last_modified is not None
            assert storage.reads <= before + 2


async def test_mutable_objects_are_not_cached(storage: Counting, tmp_path: Path) -> None:
    """Every read of them is a request, and sees the latest bytes."""
    cached = cache_of(storage, directory=tmp_path)
    for body in (b"one", b"two"):
        await cached.put("repo", body)
        assert await get(cached, "repo") == body
    assert storage.reads == 2
    assert cached.statistics == CacheStatistics()
    assert not files_of(tmp_path)


@pytest.mark.parametrize(
    "request_",
    [
        *(ByteRange(0), ByteRange(7), ByteRange(0, 50), ByteRange(99, 200), ByteRange(200, 300)),
        *(ByteRange(50, 50), SuffixRange(0), SuffixRange(1), SuffixRange(1000)),
    ],
)
async def test_a_cached_object_serves_its_ranges(
    storage: Counting, tmp_path: Path, request_: RangeRequest
) -> None:
    """Both tiers return the bytes that the storage would return."""
    expected = await storage.get(KEY, request_)
    for options in ({"memory_bytes": 1 << 20}, {"memory_bytes": 0, "directory": tmp_path}):
        cached = cache_of(storage, **options)
        await cached.get(KEY)
        before = storage.reads
        found = await cached.get(KEY, request_)
        assert bytes(found.data) == expected.data
        assert replace(found, data=expected.data) == expected
        assert storage.reads == before


async def test_a_range_that_is_the_whole_object_is_kept_as_such(storage: Counting) -> None:
    """Manifests are asked for by their known size."""
    cached = cache_of(storage)
    await cached.get(KEY, ByteRange(0, 100))
    assert await get(cached, KEY) == BODY
    assert await get(cached, KEY, ByteRange(3, 5)) == BODY[3:5]
    assert storage.reads == 1


async def test_ranges_of_one_object_are_kept_apart(storage: Counting, tmp_path: Path) -> None:
    """Chunks in a packed object each have their own range."""
    cached = cache_of(storage, memory_bytes=0, directory=tmp_path)
    ranges = [ByteRange(n, n + 10) for n in range(0, 100, 10)]
    for _ in range(2):
        for part in ranges:
            assert await get(cached, KEY, part) == BODY[part.start : part.stop]
    assert storage.reads == len(ranges)
    huge = ByteRange(0, 10**80)  # too long for the name of a file
    assert await get(cached, KEY, huge) == BODY


async def test_a_disk_hit_is_promoted_to_memory(
    storage: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is looked at once."""
    await cache_of(storage, directory=tmp_path).get(KEY)
    cached = cache_of(storage, directory=tmp_path)
    assert await get(cached, KEY, ByteRange(1, 4)) == BODY[1:4]
    monkeypatch.setattr(DiskTier, "read", None)
    assert await get(cached, KEY) == BODY
    assert storage.reads == 1
    found = cached.statistics
    assert (found.memory_hits, found.disk_hits, found.misses) == (1, 1, 0)


async def test_missing_objects_are_not_cached(storage: Counting, tmp_path: Path) -> None:
    """A miss is not cached; a bad key raises its own error."""
    cached = cache_of(storage, directory=tmp_path)
    for _ in range(2):
        with pytest.raises(ObjectNotFoundError):
            await cached.get("chunks/b")
    assert storage.reads == 2
    for key in ("chunks/../x", "chunks/\ud800"):
        with pytest.raises(InvalidObjectKeyError):
            await cached.get(key)
        with pytest.raises(InvalidObjectKeyError):
            await cached.delete([KEY, key])


async def test_writes_are_not_cached(storage: Counting, tmp_path: Path) -> None:
    """Writers seldom read what they wrote."""
    cached = cache_of(storage, directory=tmp_path)
    await cached.put("chunks/new", b"new")
    assert cached.statistics.memory_bytes == 0
    assert not files_of(tmp_path)


async def test_statistics_count_reads_and_bytes(storage: Counting, tmp_path: Path) -> None:
    """Of each tier; a part counts with its own size."""
    cached = cache_of(storage, directory=tmp_path)
    await cached.get(KEY)
    await cached.get(KEY)
    await cached.get(KEY, ByteRange(0, 10))
    found = cached.statistics
    assert 100 < found.memory_bytes < 2000
    assert replace(found, memory_bytes=0) == CacheStatistics(2, 0, 1, 110, 100, 0)


async def test_memory_tier_never_exceeds_its_capacity(storage: Counting) -> None:
    """At any time; what was used longest ago leaves first, tiny objects count as well."""
    cached = cache_of(storage, memory_bytes=20_000)
    for number in range(40):
        await storage.put(f"chunks/{number}", b"x" * (number * 37 % 4000))
        await cached.get(f"chunks/{number}")
        await cached.get("chunks/0")
        assert cached.statistics.memory_bytes <= 20_000
    assert storage.reads == 40  # what is used all the time never left
    before = storage.reads
    await cached.get("chunks/0")
    await cached.get("chunks/39")
    assert storage.reads == before
    await cached.get("chunks/1")
    assert storage.reads == before + 1
    for number in range(1000):
        await storage.put(f"chunks/empty-{number}", b"")
        await cached.get(f"chunks/empty-{number}")
    assert len(cached._memory._entries) < 20
    assert len(cached._memory._parts) == len(cached._memory._entries)


async def test_an_oversized_object_evicts_nothing(storage: Counting) -> None:
    """It is not kept at all."""
    cached = cache_of(storage, memory_bytes=10_000)
    await cached.get(KEY)
    await storage.put("chunks/large", bytes(20_000))
    await cached.get("chunks/large")
    before = storage.reads
    await cached.get(KEY)
    assert storage.reads == before


async def test_the_cache_owns_its_bytes(storage: Counting) -> None:
    """A view of a buffer that the storage uses again is copied."""
    buffer = bytearray(BODY)

    class Reusing(Counting):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            return replace(await super().get(key, byte_range), data=memoryview(buffer))

    cached = cache_of(Reusing(storage))
    await cached.get(KEY)
    buffer[:] = bytes(100)
    assert await get(cached, KEY) == BODY


async def test_a_reply_of_the_wrong_length_is_not_cached(storage: Counting, tmp_path: Path) -> None:
    """A truncated body is the storage's fault once, not ours for ever."""

    class Truncating(Counting):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            return replace(await super().get(key, byte_range), data=b"short")

    cached = cache_of(Truncating(storage), directory=tmp_path)
    await cached.get(KEY, ByteRange(0, 50))
    assert cached.statistics.memory_bytes == 0
    assert not files_of(tmp_path)


async def test_a_deleted_object_is_gone_from_both_tiers(storage: Counting, tmp_path: Path) -> None:
    """With all its ranges, and nothing else with it."""
    cached = cache_of(storage, directory=tmp_path)
    await storage.put("chunks/other", BODY)
    for key in (KEY, "chunks/other"):
        await cached.get(key, ByteRange(1, 2))
        await cached.get(key)
    assert await cached.delete([KEY, "repo", "chunks/never-there"]) == []
    for request in (None, ByteRange(1, 2)):
        with pytest.raises(ObjectNotFoundError):
            await cached.get(KEY, request)
    before = storage.reads
    await cached.get("chunks/other", ByteRange(1, 2))
    assert storage.reads == before
    assert len(files_of(tmp_path)) == 2


async def test_a_read_racing_a_deletion_is_not_cached(storage: Counting, tmp_path: Path) -> None:
    """An answer that was under way when the object went may be given, but once."""
    cached = cache_of(storage, directory=tmp_path)
    storage.gate, storage.reached = asyncio.Event(), asyncio.Event()
    reading = asyncio.create_task(cached.get(KEY))
    await storage.reached.wait()
    assert await cached.delete([KEY]) == []
    storage.gate.set()
    assert (await reading).data == BODY
    with pytest.raises(ObjectNotFoundError):
        await cached.get(KEY)
    assert not files_of(tmp_path)


async def test_a_disk_write_racing_a_deletion_is_removed(
    storage: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote it looks once more."""
    cached = cache_of(storage, directory=tmp_path)
    publish = DiskTier._publish

    def slow(self: DiskTier, *arguments: object) -> None:
        asyncio.run_coroutine_threadsafe(_delete(), loop).result(240)
        publish(self, *arguments)  # type: ignore[arg-type]

    async def _delete() -> None:
        await cached.delete([KEY])

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(DiskTier, "_publish", slow)
    await cached.get(KEY)
    with pytest.raises(ObjectNotFoundError):
        await cached.get(KEY)
    assert not files_of(tmp_path)


async def test_a_cancelled_deletion_leaves_no_stale_entry(
    storage: Counting, tmp_path: Path
) -> None:
    """After a cancellation at any point reads agree with the storage and fill the cache again."""
    cached = cache_of(storage, directory=tmp_path)

    async def delete(_: int) -> None:
        await cached.delete([KEY])

    await cached.get(KEY)
    async for _ in at_every_wait(delete):
        with suppress(ObjectNotFoundError):
            await storage.get(KEY)
            assert await get(cached, KEY) == BODY
            continue
        with pytest.raises(ObjectNotFoundError):
            await cached.get(KEY)
    await storage.put(KEY, BODY)
    await cached.get(KEY)
    before = storage.reads
    await cached.get(KEY)
    assert storage.reads == before


async def test_a_cancelled_read_leaves_the_cache_right(storage: Counting, tmp_path: Path) -> None:
    """After a cancellation at any point the next read returns the object."""
    numbers = iter(range(1000))

    async def read(_: int) -> None:
        cached = cache_of(storage, memory_bytes=0, directory=tmp_path / str(next(numbers)))
        await cached.get(KEY)
        await cached.get(KEY)

    async for n in at_every_wait(read):
        cached = cache_of(storage, memory_bytes=0, directory=tmp_path / str(n))
        assert await get(cached, KEY) == BODY
        assert await get(cached, KEY) == BODY


async def test_several_loops_share_one_cache(storage: Counting, tmp_path: Path) -> None:
    """Each reads right, while another deletes and writes."""
    cached = cache_of(storage, memory_bytes=5_000, directory=tmp_path, disk_bytes=40_000)

    async def work(name: str) -> None:
        for number in range(60):
            key = f"chunks/{name}-{number % 7}"
            await cached.put(key, key.encode() * 100)
            assert await get(cached, key) == key.encode() * 100
            assert await get(cached, KEY) == BODY
            await cached.delete([key])
            with pytest.raises(ObjectNotFoundError):
                await cached.get(key)

    def run(name: str) -> None:
        asyncio.run(work(name))

    await asyncio.gather(*(asyncio.to_thread(run, name) for name in "ab"), work("c"))
    assert cached.statistics.memory_bytes <= 5_000


async def test_files_are_touched_on_threads_only(
    storage: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop never waits for a disk."""
    called: list[str] = []
    for name in ("read", "write", "drop"):
        original = getattr(DiskTier, name)

        def watch(*arguments: object, _original: object = original, **keywords: object) -> object:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            called.append(_original.__name__)  # type: ignore[attr-defined]
            return _original(*arguments, **keywords)  # type: ignore[operator]

        monkeypatch.setattr(DiskTier, name, watch)
    cached = cache_of(storage, directory=tmp_path)
    assert is_empty(tmp_path)
    await cached.get(KEY)
    await cached.delete([KEY])
    assert called == ["read", "write", "drop"]


async def test_a_closed_cache_refuses_reads(storage: Counting) -> None:
    """It refuses reads from memory too, and frees that memory."""
    cached = cache_of(storage)
    await cached.get(KEY)
    cached.close()
    with pytest.raises(StorageClosedError):
        await cached.get(KEY)
    assert cached.statistics.memory_bytes == 0


async def test_storages_of_one_process_are_not_kept_on_disk(tmp_path: Path) -> None:
    """The same URL names other objects in another process."""
    async with open_storage(memory_url()) as plain:
        await plain.put(KEY, BODY)
        cached = cache_of(plain, directory=tmp_path)
        await cached.get(KEY)
        await cached.get(KEY)
        assert cached.statistics.memory_hits == 1
    assert is_empty(tmp_path)


async def test_a_cache_reports_the_storage_it_wraps(storage: Counting) -> None:
    """Description and promises are those of what is wrapped."""
    cached = cache_of(storage)
    assert cached.description == storage.description
    assert cached.capabilities == storage.capabilities


def test_options_are_plain_data_and_checked(tmp_path: Path) -> None:
    """They travel to workers; nonsense is refused where it is written."""
    options = CacheOptions(memory_bytes=1, directory=tmp_path, disk_bytes=2)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(InvalidInputError, match="memory_bytes=-1"):
        CacheOptions(memory_bytes=-1)
    with pytest.raises(InvalidInputError, match="disk_bytes=-1"):
        CacheOptions(disk_bytes=-1)

"""Reads that are joined and split give what they would have given alone."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import ObjectNotFoundError, ThrottledError
from icechunk_async.storage import ByteRange, SuffixRange, open_storage
from icechunk_async.storage.policies.coalesce import Coalescing, join_ranges, split_range
from icechunk_async.storage.policies.values import CoalescePolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url
from tests.unit.storage.scripted import Scripted, in_virtual_time, with_memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import RangeRequest, Retrieved, Storage

BODY = bytes(range(256)) * 4
SMALL = CoalescePolicy(gap_bytes=10, part_bytes=100, max_parts=4)


@pytest.fixture
async def backend() -> AsyncIterator[Scripted]:
    """Open a storage that writes down what it is asked, with one object."""
    async with open_storage(memory_url()) as plain:
        await plain.put("key", BODY)
        yield Scripted(plain)


def _asked(backend: Scripted) -> list[object]:
    return [what[2] for what in backend.asked]


async def _together(storage: Storage, *ranges: RangeRequest) -> list[Retrieved]:
    """Ask for several ranges in one turn."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(storage.get("key", wanted)) for wanted in ranges]
    return [task.result() for task in tasks]


_ranges = st.builds(
    lambda start, length: ByteRange(start, start + length),
    st.integers(0, 500),
    st.integers(0, 120),
)


@given(st.lists(_ranges), st.integers(0, 50), st.integers(1, 150))
def test_joined_ranges_cover_what_was_asked(
    ranges: list[ByteRange], gap: int, longest: int
) -> None:
    """Within the bound of memory, dropping no more than the gaps, and never overlapping."""
    joined = join_ranges(ranges, gap_bytes=gap, max_bytes=longest)
    assert set(joined) == set(ranges)
    for one, whole in joined.items():
        assert one.stop is not None
        assert whole.stop is not None
        assert whole.start <= one.start
        assert one.stop <= whole.stop
        if whole != one:
            assert whole.stop - whole.start <= longest
    for whole in set(joined.values()):
        covered = sorted(
            (it.start, it.stop or 0) for it, target in joined.items() if target == whole
        )
        reached = whole.start
        for start, stop in covered:
            assert start - reached <= gap
            reached = max(reached, stop)


@given(st.integers(0, 1000), st.integers(1, 5000), st.integers(1, 700), st.integers(1, 20))
def test_parts_follow_one_another(start: int, length: int, part: int, most: int) -> None:
    """They are of nearly equal length, and not too many."""
    parts = split_range(ByteRange(start, start + length), part_bytes=part, max_parts=most)
    assert len(parts) <= most
    assert [it.start for it in parts] == [start, *(it.stop for it in parts[:-1])]
    assert parts[-1].stop == start + length
    lengths = [(it.stop or 0) - it.start for it in parts]
    assert max(lengths) - min(lengths) <= 1
    assert len(parts) == most or max(lengths) <= part


async def test_near_ranges_of_one_turn_are_one_request(backend: Scripted) -> None:
    """Far ones are not; each reader gets its own bytes, and the size of the object."""
    answers = await _together(
        Coalescing(backend, SMALL),
        ByteRange(30, 40),
        ByteRange(0, 20),
        ByteRange(15, 25),
        ByteRange(300, 310),
        ByteRange(1020, 1030),
        ByteRange(2000, 2010),
    )
    assert len(backend.asked) == 4
    assert set(_asked(backend)) == {
        ByteRange(0, 40),
        ByteRange(300, 310),
        ByteRange(1020, 1030),
        ByteRange(2000, 2010),
    }
    assert [bytes(it.data) for it in answers] == [
        BODY[30:40],
        BODY[0:20],
        BODY[15:25],
        BODY[300:310],
        BODY[1020:],
        b"",
    ]
    assert {it.size_bytes for it in answers} == {len(BODY)}
    assert len({it.version for it in answers}) == 1


async def test_a_joined_read_at_the_end_of_an_object_is_cut_like_the_others(
    backend: Scripted,
) -> None:
    """Ranges behave like slices, also those that were joined."""
    wanted = [ByteRange(1000, 1010), ByteRange(1015, 1040), ByteRange(1030, 1050)]
    answers = await _together(Coalescing(backend, SMALL), *wanted)
    assert _asked(backend) == [ByteRange(1000, 1050)]
    assert [bytes(it.data) for it in answers] == [BODY[1000:1010], BODY[1015:], b""]


async def test_version_time_and_etag_come_with_every_part(backend: Scripted) -> None:
    """Version, time and ETag, of reads that were joined and of one that was split."""

    class Telling(PassingStorage):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            return replace(await self.wrapped.get(key, byte_range), etag="theirs")

    plain = await backend.get("key")
    storage = Coalescing(Telling(backend), SMALL)
    for found in await _together(storage, ByteRange(0, 5), ByteRange(7, 9), ByteRange(300, 900)):
        assert replace(found, data=plain.data) == replace(plain, etag="theirs")


async def test_equal_reads_of_one_turn_are_one_request(backend: Scripted) -> None:
    """This holds for every kind of range."""
    storage = Coalescing(backend, SMALL)
    for wanted in (None, SuffixRange(5), ByteRange(7), ByteRange(3, 9), ByteRange(4, 4)):
        backend.asked.clear()
        answers = await _together(storage, *[wanted] * 5)
        assert _asked(backend) == [wanted]
        assert len({bytes(it.data) for it in answers}) == 1


async def test_a_reader_does_not_keep_the_bytes_of_the_others(backend: Scripted) -> None:
    """It gets a copy, not a view of the joined reply."""
    answers = await _together(Coalescing(backend, SMALL), ByteRange(0, 5), ByteRange(5, 90))
    assert all(type(it.data) is bytes for it in answers)


async def test_a_read_never_joins_a_request_in_flight() -> None:
    """It may carry the bytes from before a put that has returned since."""
    has_read, may_answer = asyncio.Event(), asyncio.Event()

    class LateAnswers(PassingStorage):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            """Read at once, and answer later."""
            retrieved = await self.wrapped.get(key, byte_range)
            has_read.set()
            await may_answer.wait()
            return retrieved

    async with open_storage(memory_url()) as plain:
        await plain.put("key", b"old")
        storage = Coalescing(LateAnswers(plain), SMALL)
        first = asyncio.ensure_future(_together(storage, None, None))
        await has_read.wait()
        await storage.put("key", b"new")
        second = asyncio.ensure_future(_together(storage, None, None))
        await asyncio.sleep(0)
        may_answer.set()
        assert [it.data for it in await first] == [b"old", b"old"]
        assert [it.data for it in await second] == [b"new", b"new"]


async def test_a_read_after_a_put_sees_it_in_every_order_of_turns(backend: Scripted) -> None:
    """Readers come and go in every turn while the object is replaced."""
    storage = Coalescing(backend, SMALL)
    newest = 0

    async def read(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(50):
            known = newest
            retrieved = await storage.get("key", ByteRange(0, 8))
            assert int(bytes(retrieved.data)) >= known

    async def write() -> None:
        nonlocal newest
        for number in range(1, 60):
            await storage.put("key", b"%d" % number)
            newest = number

    await storage.put("key", b"0")
    async with asyncio.TaskGroup() as group:
        for turns in range(8):
            group.create_task(read(turns))
        group.create_task(write())


async def test_cancelling_one_reader_does_not_disturb_the_others(backend: Scripted) -> None:
    """Whenever it leaves, and also the one that came first."""
    for leaving in range(4):
        for turns in range(6):
            storage = Coalescing(backend, SMALL)
            wanted = [ByteRange(n, n + 5) for n in range(4)]
            tasks = [asyncio.ensure_future(storage.get("key", it)) for it in wanted]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[leaving].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(results):
                if isinstance(result, asyncio.CancelledError):
                    assert number == leaving
                else:
                    assert not isinstance(result, BaseException)
                    assert bytes(result.data) == BODY[number : number + 5]
            assert not storage._turns


async def test_cancelling_all_readers_cancels_the_request(backend: Scripted) -> None:
    """No request runs without a reader."""
    storage = Coalescing(LatencyStorage(backend, seconds=60), SMALL)
    before = asyncio.all_tasks()
    tasks = [asyncio.ensure_future(storage.get("key", ByteRange(n, n + 5))) for n in range(4)]
    for turns in range(4):
        await asyncio.sleep(0)
        tasks[turns].cancel()
    await asyncio.wait(tasks)
    assert asyncio.all_tasks() == before


async def test_an_error_reaches_every_reader(backend: Scripted) -> None:
    """The next turn sends a new request."""
    storage = Coalescing(backend, SMALL)
    backend.script = [ThrottledError("busy")]
    tasks = [asyncio.ensure_future(storage.get("key", ByteRange(n, n + 5))) for n in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(it) for it in results] == [ThrottledError] * 3
    with pytest.raises(ObjectNotFoundError):
        await storage.get("missing", ByteRange(0, 5))
    assert len(await _together(storage, ByteRange(0, 5), ByteRange(1, 6))) == 2


def test_a_long_read_is_sent_in_parts_at_once() -> None:
    """It takes the time of one of them; the answer is of one piece."""

    async def scenario() -> tuple[Retrieved, int]:
        async def use(plain: Storage) -> tuple[Retrieved, int]:
            await plain.put("key", BODY)
            late = LatencyStorage(plain, seconds=1)
            answer = await Coalescing(late, SMALL).get("key", ByteRange(10, 395))
            return answer, late.requests["get"]

        return await with_memory(use)

    (answer, requests), seconds = in_virtual_time(scenario)
    assert (bytes(answer.data), answer.size_bytes) == (BODY[10:395], len(BODY))
    assert (requests, seconds) == (4, 1.0)


async def test_equal_long_reads_share_their_parts(backend: Scripted) -> None:
    """Joined first, split then."""
    answers = await _together(Coalescing(backend, SMALL), *[ByteRange(0, 400)] * 3)
    assert len(backend.asked) == 4
    assert {bytes(it.data) for it in answers} == {BODY[:400]}


async def test_parts_of_two_versions_are_read_again_as_a_whole() -> None:
    """An answer is of one version, though the object was replaced between its parts."""

    class Replacing(Scripted):
        replaced = False

        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            """Replace the object after the first answer."""
            retrieved = await super().get(key, byte_range)
            if not self.replaced:
                self.replaced = True
                await self.wrapped.put(key, b"n" * len(BODY))
            return retrieved

    async with open_storage(memory_url()) as plain:
        await plain.put("key", BODY)
        backend = Replacing(plain)
        answer = await Coalescing(backend, SMALL).get("key", ByteRange(0, 400))
        assert bytes(answer.data) == b"n" * 400
        assert _asked(backend)[-1] == ByteRange(0, 400)
        assert answer.version == (await plain.get("key")).version


def test_event_loops_are_kept_apart() -> None:
    """Readers on two loops never wait for each other's requests."""

    async def read_many(storage: Storage) -> None:
        for _ in range(100):
            answers = await _together(storage, *(ByteRange(n, n + 5) for n in range(8)))
            assert [bytes(it.data) for it in answers] == [BODY[n : n + 5] for n in range(8)]

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            await plain.put("key", BODY)
            storage = Coalescing(plain, SMALL)
            failures: list[BaseException] = []

            def work() -> None:
                try:
                    asyncio.run(read_many(storage))
                except BaseException as error:  # noqa: BLE001 -- shown below
                    failures.append(error)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            await read_many(storage)
            for thread in threads:
                await asyncio.to_thread(thread.join, 60)
            assert not failures
            assert not storage._turns

    asyncio.run(scenario())


def test_a_stopped_loop_does_not_block_readers_on_another() -> None:
    """Its reads are not joined with those of another loop."""

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            await plain.put("key", BODY)
            storage = Coalescing(plain, SMALL)
            other = asyncio.new_event_loop()
            stopped = other.create_task(storage.get("key", ByteRange(0, 5)))
            other.call_soon(other.stop)
            await asyncio.to_thread(other.run_forever)
            first = asyncio.ensure_future(storage.get("key", ByteRange(0, 5)))
            await asyncio.sleep(0)
            assert len(storage._turns) == 2
            assert (await asyncio.wait_for(first, 60)).data == BODY[:5]
            answer = await asyncio.to_thread(other.run_until_complete, stopped)
            assert answer.data == BODY[:5]
            other.close()
            assert not storage._turns

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", [{"gap_bytes": -1}, {"part_bytes": 0}, {"max_parts": 0}], ids=str)
def test_meaningless_packing_sizes_are_refused(wrong: dict[str, int]) -> None:
    """When the policy is made, not when it is used."""
    with pytest.raises(ValueError, match="gap"):
        CoalescePolicy(**wrong)

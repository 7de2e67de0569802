"""Small chunks share objects: how many there are, when they are stored, and what failures leave."""

from __future__ import annotations

import asyncio
import pickle
import threading
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio
import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import ForkSession, Packing, Repository, RepositoryConfig
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.config import StorageRetriesSettings, StorageSettings
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.files.packs import MAX_UNSTORED, Packs
from icechunk_async.errors import (
    OutcomeUnknownError,
    SessionStateError,
    StorageUnavailableError,
    UnsupportedBySpecError,
)
from icechunk_async.storage import ByteRange, open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import cancelled_when, make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path
    from typing import Any

    from icechunk_async.conflicts import Answer, Clash
    from icechunk_async.session import AnySession
    from icechunk_async.storage import Data, Expected, Retrieved, Storage, Version

SMALL = Packing(target_bytes=10_000, max_chunk_bytes=2_000)
"""Ten chunks of `chunk` to an object."""
COUNT = 95


def chunk(number: int, size_bytes: int = 1_000) -> bytes:
    """Return bytes that no other chunk has, more than are stored inline."""
    return number.to_bytes(4) * (size_bytes // 4)


async def fill(session: AnySession, numbers: range = range(COUNT), limit: int = 10) -> None:
    """Make an array and write some of its chunks."""
    await make_array(session, "a", (1_000,), (1,))
    await bounded_map(lambda it: write(session, f"a/c/{it}", chunk(it)), numbers, limit=limit)


async def check(session: AnySession, numbers: range = range(COUNT)) -> None:
    """Compare chunks with what `fill` wrote."""
    for number in numbers:
        assert await read(session, f"a/c/{number}") == chunk(number), number


async def chunk_sizes(repository: Repository) -> list[int]:
    """Return the lengths of all chunk objects."""
    found = await objects(repository.storage)
    return sorted(len(data) for key, data in found.items() if key.startswith("chunks/"))


class Faulty(WrappedStorage):
    """Counts requests, and refuses to store chunks while it is told to."""

    broken: Callable[[str], Exception] | None = None
    reads = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.puts: list[str] = []

    async def get(self, key: str, byte_range: Any = None) -> Retrieved:
        """Count, and read."""
        self.reads += 1
        return await super().get(key, byte_range)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Count, and write; or fail."""
        await anyio.lowlevel.checkpoint()
        if self.broken is not None and key.startswith("chunks/"):
            raise self.broken(key)
        self.puts.append(key.partition("/")[0])
        return await super().put(key, data, if_version=if_version)


@asynccontextmanager
async def faulty_repository(spec: int = 2) -> AsyncGenerator[tuple[Faulty, Repository]]:
    """Open an empty repository that packs, on a storage that can be broken."""
    async with open_storage(memory_url()) as plain:
        storage = Faulty(plain)
        config = RepositoryConfig(
            storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1))
        )
        async with Repository.create(
            storage, spec_version=spec, packing=SMALL, config=config
        ) as repository:
            storage.puts.clear()
            yield storage, repository


def unavailable(key: str) -> Exception:
    """Return the error of a busy service."""
    return StorageUnavailableError(f"{key!r}: busy (on purpose)")


def unknown(key: str) -> Exception:
    """Return the error of a request without a reply."""
    return OutcomeUnknownError(f"{key!r}: no answer came (on purpose)", key=key)


@pytest.mark.parametrize("spec", [1, 2])
async def test_chunks_share_objects(spec: int) -> None:
    """Objects are as few as their size allows; each is stored once, most before the commit."""
    async with faulty_repository(spec) as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session)
        assert storage.puts == ["chunks"] * 9
        await check(session)
        await session.commit("packed")
        assert storage.puts[:10] == ["chunks"] * 10, (
            "chunks are stored before all that refers to them"
        )
        assert storage.puts.count("chunks") == 10
        assert await chunk_sizes(repository) == [5_000] + [10_000] * 9
        await check(await repository.readonly_session("main"))
        stats = await repository.chunk_storage_stats()
        assert stats.native_bytes == COUNT * 1_000
        async with Repository.open(storage) as again:
            await check(await again.readonly_session("main"))


async def test_unstored_chunks_are_read_from_memory() -> None:
    """A session reads its own chunks, also parts, without a request."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session, range(5))
        before = storage.reads
        await check(session, range(5))
        part = await session.workspace.read_chunk("/a", (3,), ByteRange(2, 6))
        assert part == chunk(3)[2:6]
        assert await session.store.getsize("a/c/3") == 1_000
        assert (storage.reads, storage.puts) == (before, [])
        await session.commit("packed")
        assert await session.workspace.read_chunk("/a", (3,), ByteRange(2, 6)) == chunk(3)[2:6]
        assert storage.reads > before


async def test_large_and_inline_chunks_are_not_packed() -> None:
    """Long ones get an object each, short ones stay inline, and off means off."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", chunk(0, 2_004))
        assert await chunk_sizes(repository) == [2_004]
        await write(session, "a/c/1", b"inline")
        await write(session, "a/c/2", chunk(2, 2_000))
        assert session.has_pending_chunks
        await session.commit("mixed")
        assert await chunk_sizes(repository) == [2_000, 2_004]
        async with Repository.open(repository.storage, packing=Packing.off()) as plain:
            session = await plain.writable_session("main")
            await write(session, "a/c/3", chunk(3))
            assert len(await chunk_sizes(repository)) == 3
            assert not session.has_pending_chunks


async def test_the_last_write_of_a_chunk_counts() -> None:
    """Overwritten and deleted chunks of the session are garbage within their object."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(8))
        await write(session, "a/c/1", chunk(77))
        await write(session, "a/c/1", chunk(78))
        await session.store.delete("a/c/2")
        assert await read(session, "a/c/1") == chunk(78)
        await session.commit("packed")
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/1") == chunk(78)
        assert await read(session, "a/c/2") is None
        assert await chunk_sizes(repository) == [10_000]
        assert (await repository.chunk_storage_stats()).native_bytes == 7_000


async def test_discarded_chunks_leave_garbage_only() -> None:
    """The session can continue; objects stored before are collected."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(25))
        session.discard_changes()
        await fill(session, range(100, 105))
        await session.commit("second thoughts")
        session = await repository.readonly_session("main")
        await check(session, range(100, 105))
        assert await read(session, "a/c/3") is None
        dropped = await repository.writable_session("main")
        await write(dropped, "a/c/4", chunk(4))  # and it is never committed
        report = await repository.garbage_collect(datetime.now(UTC))
        assert report.chunks_deleted == 2
        await check(await repository.readonly_session("main"), range(100, 105))


@pytest.mark.parametrize("failure", [unavailable, unknown])
async def test_a_commit_fails_whole_where_chunks_are_not_stored(
    failure: Callable[[str], Exception],
) -> None:
    """Nothing is published, nothing is in doubt, no chunk is lost; the next commit stores them."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session, range(7))
        storage.broken = failure
        for _ in range(2):
            with pytest.raises(StorageUnavailableError):
                await session.commit("too early")
        assert storage.puts == []
        await check(session, range(7))
        storage.broken = None
        await write(session, "a/c/7", chunk(7))
        await session.commit("in time")
        assert len([it async for it in repository.ancestry(branch="main")]) == 2
        await check(await repository.readonly_session("main"), range(8))


async def test_writer_gets_the_error_of_storing_its_pack() -> None:
    """Its chunk is unchanged, others' are kept, and memory does not grow with further writes."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session, range(10))
        storage.broken = unavailable
        for number in range(10, 40):
            with pytest.raises(StorageUnavailableError):
                await write(session, f"a/c/{number}", chunk(number))
            assert await read(session, f"a/c/{number}") is None
        packs = session.workspace.packs
        assert packs is not None
        assert packs.count <= 2
        await check(session, range(10))
        storage.broken = None
        await write(session, "a/c/10", chunk(10))
        await session.commit("in the end")
        await check(await repository.readonly_session("main"), range(11))


async def test_a_cancelled_write_changes_nothing_and_loses_nothing() -> None:
    """After a cancellation at any point the chunk is unchanged and the others are stored."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(10))

        async def start(_: int) -> None:
            await write(session, "a/c/500", chunk(500))

        waits = 0
        async for _ in at_every_wait(start):
            waits += 1
            assert await read(session, "a/c/500") is None
        assert waits > 0
        assert await read(session, "a/c/500") == chunk(500)
        await session.commit("after all")
        await check(await repository.readonly_session("main"), range(10))


async def test_a_cancelled_commit_loses_nothing() -> None:
    """After a cancellation at any point the next commit publishes every chunk."""
    for stop in range(40):
        async with faulty_repository() as (_, repository):
            session = await repository.writable_session("main")
            await fill(session, range(23))
            done = True
            async for n in at_every_wait(lambda _, it=session: it.commit("packed")):  # type: ignore[misc]
                done = n < stop
                if not done:
                    break
            if not session.read_only:
                await session.commit("packed")
            await check(await repository.readonly_session("main"), range(23))
        if done:
            return
    raise AssertionError("a commit waits more often than that")


def test_writers_wait_for_a_slow_storage() -> None:
    """However many write at a time, few packs are in memory."""

    async def scenario() -> None:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.create(storage, packing=SMALL) as repository:
                session = await repository.writable_session("main")
                packs = session.workspace.packs
                assert packs is not None
                most = 0

                async def write_one(number: int) -> None:
                    nonlocal most
                    await write(session, f"a/c/{number}", chunk(number))
                    most = max(most, packs.count)

                await make_array(session, "a", (1_000,), (1,))
                storage.forget()
                begin = asyncio.get_running_loop().time()
                await bounded_map(write_one, range(400), limit=200)
                assert most == MAX_UNSTORED
                # 39 objects, five at a time beside the open one.
                assert asyncio.get_running_loop().time() - begin == pytest.approx(8)
                await session.commit("packed")
                assert storage.requests["put"] == 40 + 4
                await check(session, range(400))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())


async def test_threads_and_loops_write_at_once(tmp_path: Path) -> None:
    """Zarr's fused pipeline writes from threads, and its own loop beside this one."""
    async with Repository.create(tmp_path / "r", packing=SMALL) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1_000,), (1,))
        store = session.store
        make = default_buffer_prototype().buffer.from_bytes

        def directly(number: int) -> None:
            store.set_sync(f"a/c/{number}", make(chunk(number)))
            found = store.get_sync(f"a/c/{number}")
            assert found is not None
            assert found.to_bytes() == chunk(number)

        def on_a_loop(numbers: range) -> None:
            async def all_of_them() -> None:
                await bounded_map(
                    lambda it: write(session, f"a/c/{it}", chunk(it)), numbers, limit=20
                )

            asyncio.run(all_of_them())

        def work() -> None:
            with ThreadPoolExecutor(8) as pool:
                looping = [pool.submit(on_a_loop, range(a, a + 200)) for a in (0, 200)]
                list(pool.map(directly, range(400, 800)))
                for it in looping:
                    it.result()

        await asyncio.gather(
            asyncio.to_thread(work),
            bounded_map(
                lambda it: write(session, f"a/c/{it}", chunk(it)), range(800, 900), limit=9
            ),
        )
        await session.commit("from everywhere")
        reader = await repository.readonly_session("main")
        await bounded_map(lambda it: check(reader, range(it, it + 1)), range(900), limit=20)
        assert len(await chunk_sizes(repository)) == 90


async def test_a_loop_that_ended_does_not_hold_up_others() -> None:
    """The next writer stores the pack that the loop was storing."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session, range(10))
        hold, reached = threading.Event(), threading.Event()

        class Stuck(WrappedStorage):
            async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
                if not hold.is_set():
                    reached.set()
                    await asyncio.Event().wait()
                return await super().put(key, data, if_version=if_version)

        assets = session.workspace.assets
        whole, assets.storage = assets.storage, Stuck(repository.storage)

        def leave() -> None:
            asyncio.run(cancelled_when(write(session, "a/c/10", chunk(10)), reached.is_set))

        await asyncio.to_thread(leave)
        hold.set()
        assets.storage = whole
        await session.commit("by another")
        await check(await repository.readonly_session("main"), range(10))
        assert storage.puts.count("chunks") == 2


async def test_neighbours_are_read_in_one_request() -> None:
    """Chunks that lie side by side in an object, and are asked for at a time, share a request."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session)
        await session.commit("packed")
        session = await repository.readonly_session("main")
        await read(session, "a/c/0")  # the manifest is known
        before = storage.reads
        reads = await bounded_map(lambda it: read(session, f"a/c/{it}"), range(COUNT), limit=COUNT)
        assert reads == [chunk(it) for it in range(COUNT)]
        assert storage.reads - before == 10


class Nowhere:
    """Takes objects and forgets them."""

    stored_bytes = 0

    async def get(self, key: str, byte_range: Any = None) -> Retrieved:
        """Refuse: nobody reads."""
        raise AssertionError(key)

    async def put(self, key: str, data: Data) -> Version:
        """Count the bytes."""
        assert isinstance(data, memoryview), "of the pack, not of a copy"
        self.stored_bytes += len(data)
        return None  # type: ignore[return-value]  # nobody looks at it

    async def sync(self) -> None:
        """Refuse: only those sync who publish."""
        raise AssertionError


async def test_each_byte_is_copied_once() -> None:
    """A chunk is copied into its pack, and the pack is handed to the storage without a copy."""
    packs, storage, data = Packs(Packing(), BinaryLayout(2)), Nowhere(), b"x" * 100_000
    await packs.add(data, storage)
    tracemalloc.start()
    try:
        for _ in range(500):
            await packs.add(data, storage)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert storage.stored_bytes == 49_800_000  # six packs of 83
    assert peak < 2.1 * Packing().target_bytes  # the pack being stored, and the next
    await packs.store_all(storage)
    assert storage.stored_bytes == 501 * 100_000
    assert packs.are_stored


async def test_a_fork_sees_what_its_session_has_not_stored() -> None:
    """Forking stores chunks first, as the fork's owner may be anywhere."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(3))
        fork = await session.fork()
        assert not session.has_pending_chunks
        away: ForkSession = pickle.loads(pickle.dumps(fork))
        async with away.attached(repository.storage):
            await check(away, range(3))


async def test_forks_store_their_chunks_before_they_travel() -> None:
    """At the end of being attached, when they are merged, or when asked; else they refuse."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await make_array(session, "a", (1_000,), (1,))
        here, there = await session.fork(), await session.fork()
        away: ForkSession = pickle.loads(pickle.dumps(there))
        async with away.attached(repository.storage):
            await write(away, "a/c/0", chunk(0))
            with pytest.raises(SessionStateError, match="store_pending_chunks"):
                away.to_bytes()
        await write(here, "a/c/1", chunk(1))
        with pytest.raises(SessionStateError, match="wait in memory"):
            pickle.dumps(here)
        await here.store_pending_chunks()
        assert not here.has_pending_chunks
        back: ForkSession = pickle.loads(pickle.dumps(here))
        await write(there, "a/c/2", chunk(2))
        await session.merge(ForkSession.from_bytes(away.to_bytes()), back, there)
        await session.commit("together")
        await check(await repository.readonly_session("main"), range(3))


async def _write_and_fail(fork: ForkSession, storage: Storage) -> None:
    async with fork.attached(storage):
        await write(fork, "a/c/0", chunk(0))
        raise KeyError


async def test_a_fork_whose_block_failed_keeps_its_chunks() -> None:
    """It refuses to travel until it was attached again and its chunks are stored."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await make_array(session, "a", (1_000,), (1,))
        fork = ForkSession.from_bytes((await session.fork()).to_bytes())
        with pytest.raises(KeyError):
            await _write_and_fail(fork, repository.storage)
        assert fork.has_pending_chunks
        storage.broken = unavailable
        with pytest.raises(StorageUnavailableError):
            async with fork.attached(repository.storage):
                await write(fork, "a/c/1", chunk(1))
        for attempt in (session.merge(fork), fork.store_pending_chunks()):
            with pytest.raises(SessionStateError, match="wait in memory"):
                await attempt
        with pytest.raises(SessionStateError, match="wait in memory"):
            fork.to_bytes()
        storage.broken = None
        async with fork.attached(repository.storage):
            await check(fork, range(2))
        await session.merge(fork)
        await session.commit("late")
        await check(await repository.readonly_session("main"), range(2))


async def test_pack_of_a_gone_session_is_stored_by_the_merging_one() -> None:
    """Chunks that a root and its forks packed are readable."""
    async with faulty_repository() as (_, repository):
        root = await (await repository.writable_session("main")).fork()
        await fill(root, range(3))
        fork = await root.fork()
        await write(fork, "a/c/3", chunk(3))
        session = await repository.writable_session("main")
        await session.resume(root, fork)
        await session.commit("for another")
        await check(await repository.readonly_session("main"), range(4))


async def test_a_lost_race_stores_no_chunk_again() -> None:
    """Chunks are stored once, however often a commit is tried."""
    async with faulty_repository() as (storage, repository):
        session = await repository.writable_session("main")
        await fill(session, range(3))
        await session.commit("array")
        first, second = [await repository.writable_session("main") for _ in range(2)]
        await write(first, "a/c/3", chunk(3))
        await write(second, "a/c/4", chunk(4))
        storage.puts.clear()
        await first.commit("first")
        await second.commit("second", rebase_with=ConflictDetector())
        assert storage.puts.count("chunks") == 2
        await check(await repository.readonly_session("main"), range(5))


async def test_solvers_see_what_is_not_stored() -> None:
    """While a session is rebased its chunks may be in memory still."""

    class Joining:
        """Puts both versions into one."""

        async def solve(self, clash: Clash) -> list[Answer]:
            """Join the halves."""
            (conflict,) = clash.conflicts
            ours, theirs = [
                await side.read_chunk("/a", (3,)) or b"" for side in (clash.ours, clash.theirs)
            ]
            assert ours == chunk(33)
            return [dict.fromkeys(conflict.coords, ours[:500] + theirs[:500])]

    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(3))
        await session.commit("array")
        ours, theirs = [await repository.writable_session("main") for _ in range(2)]
        await write(ours, "a/c/3", chunk(33))
        await write(theirs, "a/c/3", chunk(3))
        await theirs.commit("theirs")
        await ours.rebase(Joining())
        assert ours.has_pending_chunks
        await ours.commit("joined")
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/3") == chunk(33)[:500] + chunk(3)[:500]


async def test_amending_and_flushing_store_chunks_first() -> None:
    """Amending and flushing do this as committing does."""
    async with faulty_repository() as (_, repository):
        session = await repository.writable_session("main")
        await fill(session, range(2))
        await session.commit("array")
        session = await repository.writable_session("main")
        await write(session, "a/c/2", chunk(2))
        await session.amend("more")
        session = await repository.writable_session("main")
        await write(session, "a/c/3", chunk(3))
        loose = await session.flush("unpublished")
        await check(await repository.readonly_session("main"), range(3))
        await check(await repository.readonly_session(snapshot_id=loose), range(4))


async def test_the_setting_is_kept_with_a_repository_of_format_2() -> None:
    """It is an item of the metadata. A value given at opening applies to that handle."""
    url = memory_url()
    async with Repository.create(url) as repository:
        assert repository.packing == Packing.off()
        assert await repository.get_metadata() == {}
        await repository.update_metadata({"owner": "me", "icechunk-async": {"later": 1}})
        async with Repository.open(url, packing=SMALL) as again:
            assert again.packing == SMALL
            await again.save_packing()
    async with Repository.open(url) as repository:
        assert repository.packing == SMALL
        assert await repository.get_metadata() == {
            "owner": "me",
            "icechunk-async": {
                "later": 1,
                "packing": {"target_bytes": 10_000, "max_chunk_bytes": 2_000},
            },
        }
        await repository.set_metadata({"icechunk-async": {"packing": {"target_bytes": "many"}}})
    async with Repository.open(url) as repository:
        assert repository.packing == Packing.off()
    url = memory_url()
    async with Repository.create(url, packing=Packing(123, 45)):
        pass
    async with Repository.open_or_create(url) as repository:
        assert repository.packing == Packing(123, 45)


async def test_format_1_has_no_place_for_the_setting() -> None:
    """It is given at each opening."""
    url = memory_url()
    async with Repository.create(url, spec_version=1, packing=SMALL) as repository:
        assert repository.packing == SMALL
        with pytest.raises(UnsupportedBySpecError):
            await repository.save_packing()
    async with Repository.open(url) as repository:
        assert repository.packing == Packing.off()


@pytest.mark.parametrize(
    "wrong", [{"target_bytes": 0}, {"max_chunk_bytes": -1}, {"target_bytes": 5}]
)
def test_meaningless_packing_sizes_are_refused(wrong: dict[str, int]) -> None:
    """Such as chunks that are longer than an object."""
    with pytest.raises(ValueError, match="allowed: from"):
        Packing(**wrong)


@pytest.mark.blocks_the_loop
async def test_a_fork_never_leaves_without_what_a_thread_writes_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fused pipeline of Zarr writes on threads, perhaps while the fork is made into bytes."""
    async with Repository.create(memory_url(), packing=SMALL) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (100,), (1,))
        fork = await session.fork()
        store, late = fork.store, default_buffer_prototype().buffer.from_bytes(chunk(7))
        taken, looked = ChangeSet.copy, vars(ForkSession)["has_pending_chunks"].fget
        written: list[Future[None]] = []

        with ThreadPoolExecutor(1) as thread:

            def take(self: ChangeSet) -> ChangeSet:  # the thread waits until they are taken
                written.append(thread.submit(store.set_sync, "a/c/7", late))
                return taken(self)

            def look(self: ForkSession) -> bool:
                for one in written:
                    one.result()
                return bool(looked(self))

            monkeypatch.setattr(ChangeSet, "copy", take)
            monkeypatch.setattr(ForkSession, "has_pending_chunks", property(look))
            with pytest.raises(SessionStateError, match="wait in memory"):
                fork.to_bytes()
            assert written

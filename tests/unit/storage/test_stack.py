"""The policies of an opened repository, and the settings that control them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.engine.policies import policies_of
from icechunk_async.errors import OutcomeUnknownError, ThrottledError
from icechunk_async.format.config import (
    RepositoryConfig,
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
    StorageTimeoutSettings,
)
from icechunk_async.format.layout import is_written_once
from icechunk_async.storage import BlockingStorage, ByteRange, HedgePolicy, open_storage
from icechunk_async.storage.policies.limit import Budget, Limited
from icechunk_async.storage.policies.stack import with_policies
from icechunk_async.storage.policies.values import Policies, RetryPolicy
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, read, write
from tests.unit.storage.scripted import Scripted, in_virtual_time, with_memory

if TYPE_CHECKING:
    from icechunk_async.storage import Data, Expected, Storage, Version

QUICK = RepositoryConfig(
    storage=StorageSettings(retries=StorageRetriesSettings(max_tries=5, initial_backoff_ms=0))
)


def _wrap(storage: Storage, budget: Budget, settings: StorageSettings) -> Storage:
    return with_policies(storage, budget, policies_of(settings), immutable=is_written_once)


class Busy(WrappedStorage):
    """Turns away every second request."""

    requests = 0

    async def before(self, operation: str, key: str) -> None:
        """Count, and refuse."""
        self.requests += 1
        if self.requests % 2:
            raise ThrottledError("busy")


async def test_a_busy_service_costs_time_only() -> None:
    """From the first read on, which comes before any stored setting is known."""
    async with open_storage(memory_url()) as plain:
        busy = Busy(plain)
        async with Repository.create(busy, config=QUICK) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            await write(session, "a/c/0", b"x" * 1000)
            await session.commit("first")
        async with Repository.open(busy, config=QUICK) as repository:
            session = await repository.readonly_session("main")
            assert await read(session, "a/c/0") == b"x" * 1000


async def test_lost_replies_of_immutable_objects_do_not_fail_a_commit() -> None:
    """Chunks, manifests, snapshots and logs are written again; references are read back."""

    class Lossy(WrappedStorage):
        lost = 0

        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            """Carry out the first write of a key, and lose its answer."""
            version = await super().put(key, data, if_version=if_version)
            self.lost += 1
            if self.lost % 2 and if_version is None:
                raise OutcomeUnknownError("no answer", key=key)
            return version

    async with (
        open_storage(memory_url()) as plain,
        Repository.create(plain, config=QUICK),
        Repository.open(lossy := Lossy(plain)) as repository,
    ):
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/0", b"x" * 1000)
        await session.commit("first")
        assert lossy.lost > 4
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/0") == b"x" * 1000


async def test_memory_and_local_disks_are_only_limited(tmp_path: Any) -> None:
    """They do not throttle, and each layer would cost them more than it saves."""
    for url in (memory_url(), str(tmp_path)):
        async with open_storage(url) as plain:
            assert isinstance(plain, BlockingStorage)
            wrapped = _wrap(plain, Budget(4), StorageSettings())
            assert type(wrapped) is Limited
            assert wrapped.wrapped is plain


def test_a_pause_holds_no_place_of_the_budget() -> None:
    """Others are served while a request waits for its next try."""

    async def scenario() -> float:
        async def use(plain: Storage) -> float:
            await plain.put("key", b"x")
            slow_down = Scripted(plain, [ThrottledError("busy", retry_after_seconds=100)])
            storage = _wrap(slow_down, Budget(1), StorageSettings())
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as group:
                group.create_task(storage.get("key"))
                await asyncio.sleep(1)
                await storage.get("key", ByteRange(0, 1))
                return loop.time()

        return await with_memory(use)

    ended, all_ended = in_virtual_time(scenario)
    assert ended == 1.0
    assert all_ended >= 100


def test_every_part_and_every_try_takes_a_place() -> None:
    """The budget counts what is sent, not what is asked for."""

    async def scenario() -> None:
        async def use(plain: Storage) -> None:
            await plain.put("key", b"x" * 1000)
            concurrency = StorageConcurrencySettings(
                ideal_concurrent_request_size=100, max_concurrent_requests_for_object=10
            )
            late = LatencyStorage(plain, seconds=1)
            storage = _wrap(late, Budget(2), StorageSettings(concurrency=concurrency))
            assert (await storage.get("key", ByteRange(0, 1000))).data == b"x" * 1000
            assert late.requests["get"] == 10

        await with_memory(use)

    assert in_virtual_time(scenario)[1] == 5.0


def test_the_budget_settles_at_the_rate_of_a_throttling_service() -> None:
    """Every read succeeds, and the budget settles near what the service takes."""

    class Small(WrappedStorage):
        running = refused = 0

        async def before(self, operation: str, key: str) -> None:
            """Serve eight at a time, for a second each."""
            if self.running >= 8:
                self.refused += 1
                raise ThrottledError("slow down")
            self.running += 1
            await asyncio.sleep(1)
            self.running -= 1

    async def scenario() -> None:
        async def use(plain: Storage) -> None:
            for number in range(400):
                await plain.put(f"chunks/{number}", b"x")
            budget, service = Budget(64), Small(plain)
            storage = _wrap(service, budget, StorageSettings())
            async with asyncio.TaskGroup() as group:
                for number in range(400):
                    group.create_task(storage.get(f"chunks/{number}"))
            assert budget.limit <= 10
            assert service.refused < 200

        await with_memory(use)

    _, seconds = in_virtual_time(scenario)
    assert seconds < 100  # 50 at best


async def test_neighbouring_chunks_of_a_foreign_file_are_one_request() -> None:
    """In HDF5 files chunks follow one another."""
    async with open_storage(memory_url()) as plain:
        await plain.put("file.nc", bytes(range(100)))
        late = LatencyStorage(plain, seconds=0)
        storage = with_policies(late, Budget(8), Policies(), immutable=lambda _: False)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(storage.get("file.nc", ByteRange(n, n + 10)))
                for n in range(0, 100, 10)
            ]
        assert b"".join(task.result().data for task in tasks) == bytes(range(100))
        assert late.requests["get"] == 1


def test_retry_settings_have_the_official_names_and_defaults() -> None:
    """With the official engine's names and defaults."""
    assert policies_of(StorageSettings()).retry == RetryPolicy()
    settings = StorageSettings(
        retries=StorageRetriesSettings(max_tries=3, initial_backoff_ms=20, max_backoff_ms=700),
        timeouts=StorageTimeoutSettings(operation_timeout_ms=1500),
    )
    assert policies_of(settings).retry == RetryPolicy(3, 0.02, 0.7, 1.5)


async def test_retries_can_be_switched_off() -> None:
    """Some callers retry by themselves."""
    once = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))
    async with open_storage(memory_url()) as plain:
        busy = Busy(plain)
        with pytest.raises(ThrottledError):
            async with Repository.open(busy, config=once):
                pass
        assert busy.requests <= 3  # the three that opening sends at once


class LateOnce(WrappedStorage):
    """Serves the first read of a chunk after a minute, and every other read at once."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.chunk_reads = 0
        self.ref_reads = 0

    async def before(self, operation: str, key: str) -> None:
        """Count reads, and delay one."""
        if not operation.startswith("get"):
            return
        if key.startswith("chunks/"):
            self.chunk_reads += 1
            if self.chunk_reads == 1:
                await asyncio.sleep(60)
        elif key == "repo":
            self.ref_reads += 1
            await asyncio.sleep(2)


@pytest.mark.parametrize("hedge", [None, HedgePolicy(after_seconds=1)])
def test_a_slow_read_is_hedged_once_if_the_repository_is_opened_so(
    hedge: HedgePolicy | None,
) -> None:
    """Hedging is off by default; references, which change, are always read once."""

    async def scenario() -> tuple[int, float]:
        async def use(plain: Storage) -> tuple[int, float]:
            async with Repository.create(plain) as repository:
                session = await repository.writable_session("main")
                await make_array(session, "a", (4,), (1,))
                await write(session, "a/c/0", b"x" * 1000)
                await session.commit("first")
            late = LateOnce(plain)
            async with Repository.open(late, hedge=hedge) as repository:
                session = await repository.readonly_session("main")
                refs = late.ref_reads
                began = asyncio.get_running_loop().time()
                assert await read(session, "a/c/0") == b"x" * 1000
                seconds = asyncio.get_running_loop().time() - began
                assert refs == late.ref_reads <= 2
            return late.chunk_reads, seconds

        return await with_memory(use)

    (reads, seconds), _ = in_virtual_time(scenario)
    assert (reads, seconds) == ((1, 60) if hedge is None else (2, 1))

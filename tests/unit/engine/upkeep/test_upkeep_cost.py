"""The number of requests that upkeep makes, and of those that are sequential."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from icechunk_async import Repository
from icechunk_async.format.ids import ChunkId
from icechunk_async.storage import BlockingStorage, open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async_local.storage import LocalStorage
from tests.helpers import make_array, memory_url, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered, now

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from datetime import tzinfo
    from pathlib import Path

    from icechunk_async.storage import Data, RangeRequest, Retrieved, Storage, Version
    from icechunk_async.storage.extensions import ObjectStates

    type Prepare = Callable[[Storage], Awaitable[object]]
    type Operate = Callable[[Repository], Awaitable[object]]


NOTE = 1
"""Sessions that are open learn the cutoff from a note; old ones are looked for at the same time."""
LEASES = 1
"""Where nobody holds a lease, that takes one listing."""
TRIALS = 1
"""Objects by which killed processes tried the storage are looked for."""
STATISTICS = 1
"""Statistics of arrays that are gone are looked for, while old snapshots are."""
PINNED = 1
"""Snapshots that open proposals need are looked for, beside the leases."""
PROPOSALS = PINNED + 1
"""Those that ended are looked for at the end."""
CLOCK = 1
"""Where no snapshot is newer than the cutoff the storage is asked for the time: an object is
written, listed and deleted."""


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop whose clock jumps, so that seconds count requests in a row."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def measure(
    spec: int, operate: Operate, prepare: Prepare | None = None
) -> tuple[float, Counter[str], list[tuple[str, str]]]:
    """Return the seconds, at one a request, and the requests."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain:
        if prepare is not None:
            await prepare(plain)
        storage = LatencyStorage(plain, seconds=1)
        async with Repository.open(storage) as repository:
            storage.forget()
            begin = asyncio.get_running_loop().time()
            await operate(repository)
            return asyncio.get_running_loop().time() - begin, storage.requests, storage.log


async def collect(repository: Repository) -> None:
    """Collect all that is garbage now."""
    report = await repository.garbage_collect(now())
    assert not report.failures


def test_expiration_is_one_change_of_the_repo_info() -> None:
    """Format 2: leases, then look, back up, write."""

    async def operate(repository: Repository) -> None:
        assert await repository.expire_snapshots(now())

    seconds, requests, _ = run(measure(2, operate))
    assert seconds == 3 + LEASES
    assert requests == {"list_prefix": LEASES + PINNED, "get_if_changed": 1, "copy": 1, "put": 1}


def test_collection_reads_each_file_once_and_deletes_by_the_folder() -> None:
    """Format 2: everything in use once, at once; six listings and more; four deletions; time."""
    seconds, requests, log = run(measure(2, collect))
    snapshots = [key for operation, key in log if operation == "get" and key[:5] == "snaps"]
    manifests = [key for operation, key in log if operation == "get" and key[:5] == "manif"]
    assert len(snapshots) == len(set(snapshots)) == 6
    assert len(manifests) == len(set(manifests)) == 5
    assert requests == {
        # Snapshots twice: those that are old are found out first.
        "list_prefix": 6 + CLOCK + NOTE + LEASES + TRIALS + STATISTICS + PROPOSALS,
        "get_if_changed": 2,
        "get": 11,
        "copy": 1,
        "put": 1 + CLOCK + NOTE,
        "delete": 4 + CLOCK,
    }
    # List what is old beside the leases, look; snapshots, manifests; look again, back up, write;
    # list all five folders at once, delete in four; trials beside the proposals that ended.
    assert seconds == 2 + 2 + 3 + 1 + 4 + 3 * CLOCK + NOTE + 1


def test_collection_probes_the_clock_only_if_needed() -> None:
    """One that is newer than the cutoff: by the storage's clock that is over."""
    cutoff = now() - timedelta(hours=1)

    async def operate(repository: Repository) -> None:
        await repository.garbage_collect(cutoff)

    _, requests, _ = run(measure(2, operate))
    assert (requests["put"], requests["delete"]) == (1 + NOTE, 0)
    assert requests["list_prefix"] == 6 + NOTE + LEASES + TRIALS + STATISTICS + PROPOSALS


def test_a_dry_run_only_reads() -> None:
    """It reads the history once."""

    async def operate(repository: Repository) -> None:
        assert (await repository.garbage_collect(now(), dry_run=True)).chunks_deleted

    _, requests, _ = run(measure(2, operate))
    assert requests.keys() == {"list_prefix", "get_if_changed", "get"}
    assert requests["get_if_changed"] == 1


class _Earlier(datetime):
    """A clock that is late.

    Otherwise one of these objects may be written in the first microsecond of a second, which upkeep
    takes for a time of which no more is known.
    """

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        """Return the time of a minute ago."""
        return datetime.now(tz) - timedelta(minutes=1)


async def litter(storage: Storage, count: int) -> None:
    """Write chunks that nothing refers to, a minute ago."""
    with patch("icechunk_async_memory.datetime", _Earlier):
        for _ in range(count):
            await storage.put(f"chunks/{ChunkId.random()}", b"")


@pytest.mark.parametrize(("strays", "deletions"), [(1000, 1), (1001, 2), (4096, 5)])
def test_deletions_are_made_by_the_thousand_and_side_by_side(strays: int, deletions: int) -> None:
    """However many batches there are, they take no longer than one."""

    async def prepare(plain: Storage) -> None:
        async with Repository.open(plain) as repository:
            await repository.garbage_collect(datetime.now(UTC))
        await litter(plain, strays)

    seconds, requests, _ = run(measure(2, collect, prepare))
    assert requests["delete"] == deletions + CLOCK
    # The rest of the chunks is listed after the first thousand.
    assert seconds == 2 + 2 + 3 + 1 + 1 + 1 + 3 * CLOCK + NOTE + 1


def test_a_large_folder_is_listed_in_parts_side_by_side() -> None:
    """Beyond ten thousand objects: 32 parts, 16 at a time, kept or deleted."""
    strays = 12_000

    async def prepare(plain: Storage) -> None:
        await litter(plain, strays)

    async def operate(repository: Repository) -> None:
        report = await repository.garbage_collect(now())
        assert report.chunks_deleted == strays + 4
        assert (await repository.chunk_storage_stats()).native_bytes
        assert (await repository.garbage_collect(now())).chunks_deleted == 0

    _, _, log = run(measure(2, operate, prepare))
    parts = [key for operation, key in log if operation == "list_prefix" and "chunks/" in key]
    assert parts[0] == parts[1] == parts[-1] == "chunks/"  # the first thousand, and what follows
    assert 2 <= len(parts[2:-1]) <= 10  # those that the first ten thousand did not reach
    assert all(len(part) == len("chunks/X") for part in parts[2:-1])
    batches = [key.count(",") + 1 for operation, key in log if operation == "delete"]
    assert max(batches) == 1000


class AtOnce(LatencyStorage):
    """Also answers on the calling thread, as memory and local disks do."""

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it, on this thread."""
        assert isinstance(self.wrapped, BlockingStorage)
        return self.wrapped.get_blocking(key, byte_range)

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole object, on this thread."""
        assert isinstance(self.wrapped, BlockingStorage)
        return self.wrapped.put_blocking(key, data)


def test_a_large_folder_of_a_local_disk_is_listed_once() -> None:
    """Each listing would read all of it."""

    async def scenario() -> tuple[int, int]:
        url, _ = await littered(2)
        async with open_storage(url) as plain:
            await litter(plain, 11_000)
            storage = AtOnce(plain, seconds=0)
            async with Repository.open(storage) as repository:
                storage.forget()
                report = await repository.garbage_collect(now())
                return report.chunks_deleted, storage.requests["list_prefix"]

    assert run(scenario()) == (11_004, 6 + CLOCK + NOTE + LEASES + TRIALS + STATISTICS + PROPOSALS)


def test_statistics_read_each_manifest_once(spec: int) -> None:
    """However many snapshots share it."""
    counts: list[int] = []

    async def scenario() -> None:
        url = memory_url()
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.create(storage, spec_version=spec) as repository:
                for number in range(3):
                    await commit(repository, number, "chunk")
                for number in range(5):
                    session = await repository.writable_session("main")
                    await session.commit(f"empty {number}", allow_empty=True)
                storage.forget()
                stats = await repository.chunk_storage_stats()
                assert stats.native_bytes == 3 * len(CHUNK)
                counts.append(sum(key.startswith("manifests/") for _, key in storage.log))
                counts.append(sum(key.startswith("snapshots/") for _, key in storage.log))

    run(scenario())
    assert counts == [3, 9]


async def test_a_local_folder_is_listed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and time are read only for files to delete. The listing is not sorted."""
    asked: list[str] = []
    walked: list[str] = []
    states, list_prefix = LocalStorage.states, LocalStorage.list_prefix

    async def noted(storage: LocalStorage, folder: str, names: Sequence[str]) -> ObjectStates:
        asked.extend(f"{folder}/{name}" for name in names)
        return await states(storage, folder, names)

    def listed(storage: LocalStorage, prefix: str = "", **more: Any) -> Any:
        walked.append(prefix)
        return list_prefix(storage, prefix, **more)

    monkeypatch.setattr(LocalStorage, "states", noted)
    monkeypatch.setattr(LocalStorage, "list_prefix", listed)
    async with Repository.create(tmp_path) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", bytes(1000))
        await session.commit("kept")
        async with open_storage(tmp_path) as storage:
            for _ in range(3):
                await storage.put(f"chunks/{ChunkId.random()}", b"12345")
            await storage.put("chunks/of-somebody-else", b"")
            report = await repository.garbage_collect(now())
            left = [it async for it in storage.list_prefix("chunks/")]
    assert (report.chunks_deleted, report.bytes_deleted) == (3, 15)
    assert len(left) == 2
    assert len(asked) == 3
    assert "chunks/" not in walked[:-1]

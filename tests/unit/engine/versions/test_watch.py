"""Watching a branch, and finding who wrote which chunk."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import InvalidInputError, NodeNotFoundError, StreamPositionLostError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import group_document, make_array, memory_url, write

if TYPE_CHECKING:
    from icechunk_async import SnapshotId


async def commit(repository: Repository, number: int, branch: str = "main") -> SnapshotId:
    """Commit a chunk of the array ``a``, which the first commit makes."""
    session = await repository.writable_session(branch)
    if number == 0:
        await write(session, "zarr.json", group_document())
        await make_array(session, "a", (100,), (10,))
    await write(session, f"a/c/{number % 10}", bytes([number]) * 10)
    return await session.commit(f"commit {number}")


async def test_every_commit_comes_once_and_in_order(repository: Repository) -> None:
    """Also those that were made before the watcher began, after the one that it knows."""
    known = await commit(repository, 0)
    await commit(repository, 1)
    seen: list[str] = []

    async def follow() -> None:
        async for info in repository.watch("main", since=known, poll_seconds=0.001):
            seen.append(info.message)
            if info.message == "commit 4":
                return

    async with asyncio.timeout(60):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow())
            for number in range(2, 5):
                await commit(repository, number)
    assert seen == [f"commit {number}" for number in range(1, 5)]
    again = repository.watch("main", since="main~2", poll_seconds=0.001)
    assert [(await anext(again)).message for _ in range(2)] == ["commit 3", "commit 4"]
    await again.aclose()  # type: ignore[attr-defined]


async def test_a_lost_position_is_an_error_that_says_why(repository: Repository) -> None:
    """Nothing is skipped in silence."""
    first = await commit(repository, 0)
    lost = await commit(repository, 1)
    await repository.reset_branch("main", first)
    await commit(repository, 2)
    watcher = repository.watch("main", since=lost, poll_seconds=0.001)
    with pytest.raises(StreamPositionLostError, match="the branch was reset"):
        await anext(watcher)
    await commit(repository, 3)
    await repository.expire_snapshots(datetime.now(UTC))
    await commit(repository, 4)
    watcher = repository.watch("main", since=first, poll_seconds=0.001)
    with pytest.raises(StreamPositionLostError, match="begin again"):
        await anext(watcher)
    with pytest.raises(InvalidInputError, match="poll_seconds"):
        await anext(repository.watch("main", poll_seconds=0))


async def test_commits_that_expired_before_they_were_told_are_not_skipped_in_silence() -> None:
    """The error names the first of them, and the snapshot that has what they changed."""
    async with Repository.create(memory_url()) as repository:
        begin = await repository.lookup_branch("main")
        gone = [await commit(repository, number) for number in range(2)]
        tip = await commit(repository, 2)
        await repository.expire_snapshots(datetime.now(UTC))
        watcher = repository.watch("main", since=begin, poll_seconds=0.001)
        with pytest.raises(StreamPositionLostError, match=f"2 commit.*{gone[0]}.*{tip} by changes"):
            await anext(watcher)
        await commit(repository, 3)
        again = repository.watch("main", since=tip, poll_seconds=0.001)
        assert (await anext(again)).message == "commit 3"
        await again.aclose()  # type: ignore[attr-defined]


def test_looking_costs_a_request_and_grows_rare_while_nothing_happens() -> None:
    """Twenty minutes of silence: counted in virtual time."""

    async def main() -> tuple[int, int]:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=0)
            async with Repository.create(storage, probe=False) as repository:
                await commit(repository, 0)
                storage.forget()
                watcher = repository.watch("main", poll_seconds=1, max_poll_seconds=30)
                waiting = asyncio.ensure_future(anext(watcher))
                await asyncio.sleep(1200)
                quiet = storage.requests.total()
                last = await commit(repository, 1)
                assert (await waiting).id == last
                return quiet, storage.requests["get"]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        quiet, _ = runner.run(main())
    assert 40 <= quiet <= 55  # every 30 seconds in the end, and a few looks before


async def test_blame_names_the_commit_that_wrote_each_chunk(repository: Repository) -> None:
    """The last one that touched it; regions are told in elements."""
    for number in (0, 1, 2, 11, 3):
        await commit(repository, number)
    found = await repository.blame("a")
    assert found.coords.tolist() == [[0], [1], [2], [3]]
    names = [found.commits[at].message for at in found.written_by]
    assert names == ["commit 0", "commit 11", "commit 2", "commit 3"]
    assert [it.message for it in found.commits] == [
        "commit 3",
        "commit 11",
        "commit 2",
        "commit 0",
    ]
    part = await repository.blame("/a", [slice(15, 25)])
    assert part.coords.tolist() == [[1], [2]]
    old = await repository.blame("a", ref="main~2")
    assert [old.commits[at].message for at in old.written_by][1] == "commit 1"
    by = found.of((1,))
    assert by is not None
    assert by.message == "commit 11"
    assert found.of((9,)) is None
    with pytest.raises(NodeNotFoundError):
        await repository.blame("nowhere")
    with pytest.raises(InvalidInputError, match="1 axes"):
        await repository.blame("a", [slice(0, 1), slice(0, 1)])


async def test_blame_says_unknown_where_history_expired() -> None:
    """A guess would name somebody who did not write it."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        for number in (0, 1, 2):
            await commit(repository, number)
        await repository.expire_snapshots(datetime.now(UTC))
        found = await repository.blame("a")
        assert found.written_by.tolist() == [-1, -1, 0]
        assert found.of((0,)) is None

"""Others at work while garbage is collected and history expires: nothing of theirs is damaged."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import BasicConflictSolver, VersionSelection
from icechunk_async.errors import ConflictError, SnapshotNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url, objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered, now, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async import Session
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

    type Work = Callable[[], Awaitable[object]]

MOST_WAITS = 200
STEP = 1 if os.environ.get("EXAMPLES") == "all" else 2
"""Of the waits every second by default; which ones differs from test to test."""
SEEDS = range(int(os.environ.get("HISTORY_SEEDS", "1")))


class Interrupted(WrappedStorage):
    """Lets something else run to its end where the n-th request begins."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.at = -1
        self.work: Work | None = None

    async def before(self, operation: str, key: str) -> None:
        """Count, and interrupt."""
        self.at -= 1
        if self.at < 0 and self.work is not None:
            work, self.work = self.work, None
            await work()


async def everywhere(
    spec: int,
    prepare: Callable[[Repository, list[SnapshotId]], Awaitable[Work]],
    operate: Callable[[Repository], Awaitable[object]],
    *,
    begin_at: int,
) -> int:
    """Interrupt an operation at each of its waits by other work; all that is left must be whole.

    Args:
        spec: the format version.
        prepare: begins with the other work, before the operation; answers the rest of it.
        operate: the operation.
        begin_at: the wait to begin with.

    Returns:
        At how many waits the other work was done.
    """
    first, line = await littered(spec)
    async with open_storage(first) as plain:
        contents = await objects(plain)
    for count, place in enumerate(range(begin_at % STEP, MOST_WAITS, STEP)):
        async with open_storage(memory_url()) as plain:
            for key, data in contents.items():
                await plain.put(key, data)
            storage = Interrupted(plain)
            async with Repository.open(plain) as other, Repository.open(storage) as repository:
                work = await prepare(other, line)
                storage.at, storage.work = place, work
                await operate(repository)
                reached, storage.work = storage.work is None, None
                if reached:
                    assert not (await repository.garbage_collect(now())).failures
                    await read_all(plain)
        if not reached:
            return count
    raise AssertionError("the operation does not end")


async def collect(repository: Repository) -> None:
    """Collect what is older than this moment."""
    await repository.garbage_collect(now())


async def expire(repository: Repository) -> None:
    """Expire what is older than this moment."""
    await repository.expire_snapshots(now())


@pytest.mark.sampled
@pytest.mark.parametrize("operate", [collect, expire])
async def test_a_commit_made_at_any_moment_stays(
    spec: int, operate: Callable[[Repository], Awaitable[object]]
) -> None:
    """One that begins, writes chunks and lands while the other operation waits."""
    made: list[str] = []

    async def prepare(other: Repository, line: list[SnapshotId]) -> Work:
        del line

        async def work() -> None:
            made.append(str(await commit(other, 60, "at any moment")))

        return work

    waits = await everywhere(spec, prepare, operate, begin_at=spec)
    assert len(made) == waits >= 2


async def test_a_session_that_began_before_the_cutoff_may_commit_later(spec: int) -> None:
    """Its objects are younger than the cutoff, and its base is in use."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        cutoff = now()
        session = await repository.writable_session("main")
        await write(session, "a/c/61", CHUNK)
        await repository.garbage_collect(cutoff)
        await repository.expire_snapshots(cutoff)
        await session.commit("late")
    await read_all(url)


async def _shift_here(session: Session) -> None:
    await session.shift_array("/a", (1,))


async def _shift_in_a_fork(session: Session) -> None:
    fork = await session.fork()
    await write(session, "a/c/70", CHUNK)
    inner = pickle.loads(pickle.dumps(await session.fork()))
    async with inner.attached():
        await inner.shift_array("/a", (1,))
    await session.merge(fork, pickle.loads(pickle.dumps(inner)))


@pytest.mark.parametrize("how", ["commit", "amend", "flush"])
@pytest.mark.parametrize("shift", [_shift_here, _shift_in_a_fork])
@pytest.mark.parametrize("is_collected", [True, False], ids=["collected", "kept"])
async def test_chunks_that_were_moved_are_there_or_nothing_is_published(
    spec: int, how: str, shift: Callable[[Session], Awaitable[None]], *, is_collected: bool
) -> None:
    """The snapshot in which they moved is gone and no longer the base of the session."""
    if how == "amend" and spec == 1:
        pytest.skip("format version 1 has no amendments")
    url, _ = await littered(spec)
    ours = BasicConflictSolver(on_chunk_conflict=VersionSelection.USE_OURS)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await shift(session)
        other = await repository.writable_session("main")
        await other.store.delete_dir("a/c")
        await other.commit("cleared")
        await session.rebase(ours)
        if is_collected:
            await expire(repository)
            await collect(repository)
        work = {"commit": session.commit, "amend": session.amend, "flush": session.flush}[how]
        if is_collected:
            with pytest.raises(SnapshotNotFoundError, match="moved chunks to other places"):
                await work("moved")
            session.discard_changes()
        else:
            snapshot_id = await work("moved")
            moved = await repository.readonly_session(snapshot_id=snapshot_id)
            assert await read(moved, "a/c/2") == b"commit 1".ljust(len(CHUNK))
    await read_all(url)


async def test_a_flush_onto_what_was_collected_is_refused(spec: int) -> None:
    """Its parent would be missing."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/61", CHUNK)
        await commit(repository, 62, "newer")
        await expire(repository)
        await collect(repository)
        with pytest.raises(SnapshotNotFoundError, match="There is no snapshot"):
            await session.flush("too late")


@pytest.mark.parametrize("kind", ["branch", "amend"])
async def test_a_ref_onto_garbage_is_refused_or_saves_it(kind: str) -> None:
    """Format 2: whenever it is created, what it points at is whole, or it is not created."""
    outcomes: list[bool] = []

    async def prepare(other: Repository, line: list[SnapshotId]) -> Work:
        await other.create_branch("doomed", line[2])
        doomed = await commit(other, 62, "doomed", "doomed")
        await other.delete_branch("doomed")
        del line

        async def work() -> None:
            try:
                if kind == "branch":
                    await other.create_branch("saved", doomed)
                else:
                    await other.reset_branch("side", doomed)
                    session = await other.writable_session("side")
                    await write(session, "a/c/63", CHUNK)
                    await session.amend("saved")
                outcomes.append(True)
            except SnapshotNotFoundError:
                outcomes.append(False)

        return work

    waits = await everywhere(2, prepare, collect, begin_at=len(kind))
    assert len(outcomes) == waits
    assert outcomes[0]
    assert not outcomes[-1]


async def test_under_format_1_a_ref_made_before_the_first_deletion_saves_what_it_names() -> None:
    """Refs are looked at a second time, after all was read."""
    url, line = await littered(1)
    async with open_storage(url) as plain, Repository.open(plain) as other:
        await other.create_branch("doomed", line[2])
        doomed = await commit(other, 62, "doomed", "doomed")
        await other.delete_branch("doomed")

        class Late(WrappedStorage):
            """Creates the ref while the last manifest is read."""

            done = False

            async def before(self, operation: str, key: str) -> None:
                if key.startswith("manifests/") and not self.done:
                    self.done = True
                    await other.create_branch("saved", doomed)

        async with Repository.open(Late(plain)) as repository:
            report = await repository.garbage_collect(now())
        assert report.snapshots_deleted == 2  # those of "lost"
    assert str(doomed) in await read_all(url)


async def _committer(storage: Storage, number: int, rng: random.Random) -> int:
    """Commit, branch and tag for a while; answer how many commits were made."""
    made = 0
    async with Repository.open(storage) as repository:
        for count in range(6):
            await anyio.sleep(rng.random() * 3)
            try:
                session = await repository.writable_session(rng.choice(["main", "side"]))
                await write(session, f"a/c/{number * 10 + count}", CHUNK)
                await anyio.sleep(rng.random() * 3)
                tip = await session.commit("one of many", rebase_with=BasicConflictSolver())
                made += 1
                if rng.random() < 0.3:
                    await repository.create_tag(f"t{number}-{count}", tip)
                if rng.random() < 0.2:
                    await repository.reset_branch("side", tip)
            except ConflictError:
                continue
    return made


async def _many(seed: int, spec: int) -> int:
    url, _ = await littered(spec)
    made = 0
    async with open_storage(url) as plain:
        cutoff = now()
        storage = LatencyStorage(plain, seconds=0.01, jitter_seconds=0.5, seed=seed)

        async def committer(number: int) -> None:
            nonlocal made
            made += await _committer(storage, number, random.Random(f"{seed}/{number}"))

        async def upkeep() -> None:
            rng = random.Random(seed)
            async with Repository.open(storage) as repository:
                for _ in range(5):
                    await anyio.sleep(rng.random() * 2)
                    # What came after the cutoff may be part of a session that is still open.
                    await repository.expire_snapshots(cutoff)
                    report = await repository.garbage_collect(cutoff)
                    assert not report.failures

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(committer, number)
            tasks.start_soon(upkeep)
            tasks.start_soon(upkeep)
        await read_all(plain)
        async with Repository.open(plain) as repository:
            await repository.garbage_collect(now())
        await read_all(plain)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS)
def test_writers_beside_upkeep_lose_nothing(seed: int, spec: int) -> None:
    """Random schedules: committers, refs, and two that expire and collect all the time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(_many(seed, spec)) > 3

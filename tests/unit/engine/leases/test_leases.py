"""Leases: what holds one, what renews it, and how a session without one is stopped."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.engine.leases import keeper
from icechunk_async.engine.leases.register import SessionState
from icechunk_async.errors import (
    InvalidInputError,
    LeaseExpiredError,
    LeaseLostError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.format.layout import LEASED_SESSIONS, lease_key
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url, objects, read, until, write
from tests.unit.engine.leases.lease_tools import CHUNK, DAY, HOUR, MINUTE, World, filled, process

if TYPE_CHECKING:
    from icechunk_async.storage import Data, Expected, Storage, Version


@pytest.mark.parametrize("skew", [timedelta(0), 5 * MINUTE, -5 * MINUTE], ids=str)
@pytest.mark.parametrize("tells_on_read", [True, False], ids=["told", "listed"])
async def test_a_session_idle_for_less_than_its_lease_goes_on(
    spec: int, skew: timedelta, *, tells_on_read: bool
) -> None:
    """However wrong this machine's clock is."""
    world = World()
    async with filled(world, spec, tells_on_read=tells_on_read) as storage:
        with world.clock_wrong_by(skew):
            async with process(storage, lease=HOUR) as (repository, session):
                world.wait(HOUR - timedelta(seconds=1))
                await write(session, "a/c/1", CHUNK)
                tip = await session.commit("in time")
                assert await repository.lookup_branch("main") == tip


@pytest.mark.parametrize("skew", [timedelta(0), 5 * MINUTE, -5 * MINUTE], ids=str)
async def test_a_session_idle_for_its_lease_neither_writes_nor_commits(
    spec: int, skew: timedelta
) -> None:
    """However wrong this machine's clock is."""
    world = World()
    async with filled(world, spec) as storage:
        with world.clock_wrong_by(skew):
            async with process(storage, lease=HOUR) as (repository, session):
                tip = await repository.lookup_branch("main")
                await write(session, "a/c/1", CHUNK)
                world.wait(HOUR)
                with pytest.raises(LeaseExpiredError, match="renewed last 3600 s ago"):
                    await write(session, "a/c/2", CHUNK)
                with pytest.raises(LeaseExpiredError) as refused:
                    await session.commit("too late")
                assert refused.value.context == {"session_id": str(session.session_id)}
                for publish in (session.amend, session.flush):
                    with pytest.raises(LeaseExpiredError):
                        await publish("too late")
                assert await repository.lookup_branch("main") == tip
                assert await read(session, "a/c/1") == CHUNK
                assert [it.state for it in await repository.sessions()] == [SessionState.EXPIRED]


async def test_a_clock_that_is_set_while_the_session_runs_changes_nothing() -> None:
    """Forward by a year it does not expire; backward it does not live longer."""
    world = World()
    async with filled(world) as storage:
        with world.clock_wrong_by(timedelta(0)):
            opened = process(storage, lease=HOUR)
            repository, session = await opened.__aenter__()
        with world.clock_wrong_by(timedelta(days=365)):
            await write(session, "a/c/1", CHUNK)
            world.wait(HOUR)
        with world.clock_wrong_by(timedelta(days=-365)):
            with pytest.raises(LeaseExpiredError):
                await session.commit("late")
            assert (await repository.sessions())[0].state is SessionState.EXPIRED
            await opened.__aexit__(None, None, None)


@pytest.mark.parametrize(
    "lease", [timedelta(days=7, seconds=1), timedelta(seconds=59), timedelta(-1), None, 5]
)
async def test_a_lease_of_another_length_is_refused(lease: timedelta) -> None:
    """Nothing is stored."""
    world = World()
    async with filled(world) as storage, Repository.open(storage) as repository:
        with pytest.raises(InvalidInputError, match="one minute to 7 days"):
            await repository.writable_session("main", lease=lease)
        assert await repository.sessions() == []


async def test_sessions_lists_owner_base_branch_and_times_of_the_storage() -> None:
    """By the storage's clock, oldest first; a plain session is not listed."""
    world = World()
    async with filled(world) as storage, Repository.open(storage) as repository:
        began = world.now
        with world.clock_wrong_by(3 * DAY):
            first = await repository.writable_session("main", lease=True, owner="nightly ingest")
            await repository.writable_session("main")
        world.wait(MINUTE)
        second = await repository.writable_session("main", lease=HOUR)
        world.wait(MINUTE)
        assert first.spiller is not None
        await write(first, "a/c/1", CHUNK)
        await first.spiller.beat()
        world.wait(MINUTE)
        one, other = await repository.sessions()
        assert (one.session_id, one.owner, one.branch) == (
            first.session_id,
            "nightly ingest",
            "main",
        )
        assert one.base_id == first.snapshot_id
        assert (one.began_at, one.heartbeat_at) == (began, began + 2 * MINUTE)
        assert (one.expires_at, one.age) == (began + 2 * MINUTE + DAY, 3 * MINUTE)
        assert one.state is SessionState.LIVE
        assert (other.session_id, other.age) == (second.session_id, 2 * MINUTE)
        assert "process" in other.owner
        assert first.has_lease
        assert not (await repository.writable_session("main")).has_lease


async def test_use_renews_and_idleness_does_not() -> None:
    """Reading is use as well; a session that nobody uses sends nothing."""
    world = World()
    async with filled(world) as storage, process(storage) as (repository, session):
        spiller = session.spiller
        assert spiller is not None
        storage.forget()
        await spiller.beat()
        assert not storage.requests
        for use in (read(session, "a/c/0"), read(session, "a/zarr.json")):
            world.wait(HOUR)
            await use
            await spiller.beat()
            assert (await repository.sessions())[0].heartbeat_at == world.now


async def test_the_repository_renews_in_the_background_until_the_session_is_dropped() -> None:
    """While it is used; a session that is dropped sends nothing more."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain):
            pass
        world = World()
        storage = _Counting(plain)
        with patch.object(keeper, "_LONGEST_BEAT_SECONDS", 0.001):
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main", lease=True)
                began = storage.renewals
                while storage.renewals < began + 3:
                    await read(session, "zarr.json")
                    await asyncio.sleep(0.001)
                del session, world
                gc.collect()
                await until(lambda: not repository.engine.background._tasks)


class _Counting(WrappedStorage):
    renewals = 0

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("leases/"):
            self.renewals += 1


async def test_a_failure_to_renew_is_tried_again_at_the_next_beat() -> None:
    """The background survives a storage that is away for a while."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain):
            pass
        storage = _Away(plain)
        with patch.object(keeper, "_LONGEST_BEAT_SECONDS", 0.001):
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main", lease=True)
                storage.away, storage.refused, renewed = True, 0, storage.renewals
                while storage.refused < 2 or storage.renewals == renewed:
                    storage.away = storage.refused < 2
                    await read(session, "zarr.json")
                    await asyncio.sleep(0.001)


class _Away(_Counting):
    away = False
    refused = 0

    async def before(self, operation: str, key: str) -> None:
        if self.away and key.startswith("leases/"):
            self.refused += 1
            raise StorageUnavailableError("away")
        await super().before(operation, key)


async def test_beginning_costs_three_requests_more_and_committing_two(spec: int) -> None:
    """Beginning: store, read its time, look at the branch again. Committing: renew and close."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        counts = []
        for lease in (False, False, True):  # the first one reads what the others find cached
            storage.forget()
            session = await repository.writable_session("main", lease=lease)
            begun = storage.requests.total()
            await write(session, "a/c/1", CHUNK)
            storage.forget()
            await session.commit("counted")
            counts.append((begun, storage.requests.total()))
        assert (counts[2][0] - counts[1][0], counts[2][1] - counts[1][1]) == (3, 2)


async def test_a_committed_session_says_so_and_an_ended_one_cannot_commit(spec: int) -> None:
    """A job that is started again sees its commit."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        await write(session, "a/c/1", CHUNK)
        tip = await session.commit("done")
        done = (await repository.sessions())[0]
        assert (done.state, done.snapshot_id) == (SessionState.COMMITTED, tip)
        await repository.end_session(done.session_id)  # nothing to do
        assert (await repository.sessions())[0].state is SessionState.COMMITTED

        world.wait(MINUTE)
        other = await repository.writable_session("main", lease=True)
        await write(other, "a/c/2", CHUNK)
        await repository.end_session(str(other.session_id))
        with pytest.raises(LeaseLostError, match="was ended"):
            await other.commit("ended")
        with pytest.raises(LeaseLostError, match="was ended"):
            await write(other, "a/c/3", CHUNK)
        assert await repository.lookup_branch("main") == tip
        assert (await repository.sessions())[1].state is SessionState.ENDED
        with pytest.raises(LeaseNotFoundError, match="lists those"):
            await repository.end_session("0" * 20)


async def test_a_lost_lease_file_costs_nothing(spec: int) -> None:
    """It is written again: the session is as good as before."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        await write(session, "a/c/1", CHUNK)
        await storage.delete([lease_key(session.session_id)])
        await session.commit("committed")
        assert (await repository.sessions())[0].state is SessionState.COMMITTED


@pytest.mark.parametrize("landed", [True, False])
async def test_a_lost_reply_to_a_renewal_is_settled_by_reading_back(*, landed: bool) -> None:
    """Whether it landed or not the session commits."""
    world = World()
    async with filled(world) as plain:
        storage = _Replyless(plain, landed=landed)
        async with process(storage) as (repository, session):
            await write(session, "a/c/1", CHUNK)
            storage.lose = True
            tip = await session.commit("committed")
            assert storage.lost
            assert await repository.lookup_branch("main") == tip
            assert (await repository.sessions())[0].state is SessionState.COMMITTED


async def test_a_renewal_that_was_lost_does_not_shorten_what_collection_spares() -> None:
    """The lease that is read back after it may not say yet when the session began."""
    world = World()
    async with filled(world) as plain:
        storage = _Replyless(plain, landed=False)
        async with process(storage) as (_, session):
            await write(session, "a/c/1", CHUNK)
            world.wait(HOUR)
            storage.lose = True
            await session.spill()
            assert storage.lost
            with world.clock_wrong_by(timedelta(0)):
                async with Repository.open(plain) as collector:
                    (told,) = await collector.sessions()
                    assert told.age == HOUR
                    assert (await collector.garbage_collect(world.now)).chunks_deleted == 0
            await session.commit("whole")


class _Replyless(WrappedStorage):
    lose = lost = False

    def __init__(self, storage: Storage, *, landed: bool) -> None:
        super().__init__(storage)
        self._landed = landed

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        if self.lose and key.startswith(LEASED_SESSIONS):
            self.lose, self.lost = False, True
            if self._landed:
                await super().put(key, data, if_version=if_version)
            raise OutcomeUnknownError("no reply")
        return await super().put(key, data, if_version=if_version)


async def test_a_session_that_expires_while_it_stores_its_commit_is_not_published() -> None:
    """The lease is looked at last before the branch moves."""
    world = World()
    async with filled(world) as plain:
        storage = _SlowManifests(plain, world)
        async with process(storage, lease=HOUR) as (repository, session):
            tip = await repository.lookup_branch("main")
            await write(session, "a/c/1", CHUNK)
            with pytest.raises(LeaseExpiredError):
                await session.commit("slow")
            assert await repository.lookup_branch("main") == tip


class _SlowManifests(WrappedStorage):
    def __init__(self, storage: Storage, world: World) -> None:
        super().__init__(storage)
        self._world = world

    async def after(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("manifests/"):
            self._world.wait(HOUR)


async def test_a_base_that_moves_while_the_lease_is_written_is_left() -> None:
    """The session builds on what the branch shows once the lease is there."""
    world = World()
    async with filled(world) as plain, Repository.open(plain) as other:
        storage = _Committing(plain, other)
        async with process(storage) as (repository, session):
            assert storage.tip == session.snapshot_id
            assert (await repository.sessions())[0].base_id == storage.tip


class _Committing(WrappedStorage):
    tip: object = None

    def __init__(self, storage: Storage, repository: Repository) -> None:
        super().__init__(storage)
        self._repository = repository

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith("leases/") and self.tip is None:
            session = await self._repository.writable_session("main")
            await write(session, "a/c/9", CHUNK)
            self.tip = await session.commit("in between")


async def test_a_leased_session_rebases_and_keeps_its_marks_out_of_others_way(spec: int) -> None:
    """Two leased sessions of one branch, the later one rebasing."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        other = await repository.writable_session("main", lease=True)
        await write(other, "a/c/2", CHUNK)
        await write(session, "a/c/1", CHUNK)
        await other.commit("first")
        tip = await session.commit("second", rebase_with=ConflictDetector())
        marks = (await repository.lookup_snapshot(tip)).metadata["__icechunk"]
        assert marks == {
            "rebase_attempts": 1,
            "session": str(session.session_id),
            "session_turn": 1,
        }


async def test_a_plain_session_leaves_no_trace_under_leases(spec: int) -> None:
    """Nothing changes for those who ask for no lease."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", CHUNK)
        tip = await session.commit("plain")
        assert not [key for key in await objects(storage) if key.startswith("leases/")]
        assert "__icechunk" not in (await repository.lookup_snapshot(tip)).metadata

"""Garbage collection and expiration spare sessions with leases, and remove dead leases."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.leases.register import SessionState
from icechunk_async.errors import LeaseLostError, PermissionDeniedError, StorageFullError
from icechunk_async.format.ids import SessionId
from icechunk_async.format.layout import lease_key, spill_prefix
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, objects, read, write
from tests.unit.engine.leases.lease_tools import CHUNK, DAY, HOUR, MINUTE, World, filled, process

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.session import Session
    from icechunk_async.storage import Storage


async def _collect(storage: Storage, world: World, cutoff: datetime | None = None) -> None:
    """Collect as another process whose clock is right."""
    with world.clock_wrong_by(timedelta(0)):
        async with Repository.open(storage) as repository:
            report = await repository.garbage_collect(cutoff or world.now)
            assert not report.failures


async def _chunks(storage: Storage) -> int:
    return sum(key.startswith("chunks/") for key in await objects(storage))


@pytest.mark.parametrize("skew", [timedelta(0), 5 * MINUTE, -5 * MINUTE], ids=str)
async def test_collection_spares_what_a_leased_session_wrote_whatever_the_cutoff(
    spec: int, skew: timedelta
) -> None:
    """A plain session beside it would lose its chunks, too, but for the lease."""
    world = World()
    async with filled(world, spec) as storage:
        with world.clock_wrong_by(skew):
            async with process(storage) as (repository, session):
                await write(session, "a/c/1", CHUNK)
                world.wait(10 * MINUTE)
                await _collect(storage, world)
                tip = await session.commit("kept")
                reader = await repository.readonly_session(snapshot_id=tip)
                assert await read(reader, "a/c/1") == CHUNK


async def test_without_a_lease_the_same_collection_deletes_the_chunks(spec: int) -> None:
    """So that the test above shows something."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", CHUNK)
        world.wait(10 * MINUTE)
        await _collect(storage, world)
        assert await _chunks(storage) == 1


async def test_collection_spares_packs_and_what_forks_begin_at(spec: int) -> None:
    """Manifests and the unpublished snapshot of a fork, and the objects that chunks share."""
    world = World()
    async with filled(world, spec) as storage:
        packing = Packing(target_bytes=4096, max_chunk_bytes=1024)
        async with Repository.open(storage, packing=packing) as repository:
            session = await repository.writable_session("main", lease=True)
            await write(session, "a/c/1", CHUNK)
            fork = await session.fork()
            await write(fork, "a/c/2", CHUNK)
            await fork.store_pending_chunks()
            world.wait(10 * MINUTE)
            await _collect(storage, world)
            async with Repository.open(storage) as elsewhere:
                there = type(fork).from_bytes(fork.to_bytes())
                async with there.attached(storage):
                    await write(there, "a/c/3", CHUNK)
                del elsewhere
            await session.merge(there)
            tip = await session.commit("kept")
            reader = await repository.readonly_session(snapshot_id=tip)
            assert [await read(reader, f"a/c/{n}") for n in (1, 2, 3)] == [CHUNK] * 3


async def test_a_lease_protects_until_an_hour_after_it_expired_and_no_longer(spec: int) -> None:
    """A commit that began in time may be under way; then the chunks are garbage."""
    world = World()
    async with filled(world, spec) as storage, process(storage, lease=HOUR) as (_, session):
        await write(session, "a/c/1", CHUNK)
        world.wait(2 * HOUR)
        await _collect(storage, world)
        assert await _chunks(storage) == 2
        world.wait(timedelta(seconds=1))
        await _collect(storage, world)
        assert await _chunks(storage) == 1


@pytest.mark.parametrize("kind", ["expired", "committed", "ended", "damaged"])
async def test_dead_leases_are_removed_after_a_time_of_grace(kind: str) -> None:
    """With what was spilled; until then they can be looked at."""
    world = World()
    async with filled(world) as storage, process(storage, lease=HOUR) as (repository, session):
        key = lease_key(session.session_id)
        await storage.put(f"{spill_prefix(session.session_id)}0", b"spilled")
        await write(session, "a/c/1", CHUNK)
        if kind == "committed":
            await session.commit("committed")
        elif kind == "ended":
            await repository.end_session(session.session_id)
        elif kind == "damaged":
            await storage.put(key, b"damaged")
        kept = {"expired": DAY + 2 * HOUR, "damaged": 8 * DAY + HOUR}.get(kind, 7 * DAY)
        world.wait(kept)
        await _collect(storage, world)
        assert key in await objects(storage)
        world.wait(timedelta(seconds=1))
        async with Repository.open(storage) as other:
            with world.clock_wrong_by(timedelta(0)):
                await other.garbage_collect(world.now, dry_run=True)
        assert key in await objects(storage)
        await _collect(storage, world)
        assert not [key for key in await objects(storage) if key.startswith("leases/")]


@pytest.mark.parametrize(
    ("waited", "cutoff", "is_removed"),
    [
        (7 * DAY + HOUR, 7 * DAY + HOUR, False),
        (30 * DAY, 7 * DAY + HOUR, False),
        (7 * DAY + HOUR + MINUTE, 7 * DAY + HOUR + MINUTE, True),
    ],
    ids=["as young as a lease can be", "young by the cutoff", "old"],
)
async def test_what_was_published_after_its_lease_was_removed_is_removed_when_it_is_old(
    waited: timedelta, cutoff: timedelta, *, is_removed: bool
) -> None:
    """A publisher that is killed before it reads its lease leaves an object that nobody knows."""
    world = World()
    async with filled(world) as storage:
        left = spill_prefix(SessionId.random())
        await storage.put(f"{left}0", b"an older one")
        world.wait(30 * DAY)
        await storage.put(f"{left}1", b"published late")
        written_at = world.now
        world.wait(waited)
        await _collect(storage, world, written_at + cutoff)
        found = {key for key in await objects(storage) if key.startswith(left)}
        assert found == (set() if is_removed else {f"{left}0", f"{left}1"})


async def test_what_a_session_spilled_stays_as_long_as_its_lease_can_be_looked_at() -> None:
    """However old it is."""
    world = World()
    async with filled(world) as storage, process(storage, lease=7 * DAY) as (repository, session):
        spilled = f"{spill_prefix(session.session_id)}0"
        await storage.put(spilled, b"spilled")
        world.wait(5 * DAY)
        await repository.end_session(session.session_id)
        world.wait(5 * DAY)
        await _collect(storage, world)
        assert spilled in await objects(storage)


async def test_a_damaged_lease_protects_as_long_as_any_could(spec: int) -> None:
    """Nobody knows how long it held."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (_, session):
        await write(session, "a/c/1", CHUNK)
        await storage.put(lease_key(session.session_id), b"damaged")
        world.wait(7 * DAY + HOUR)
        await _collect(storage, world)
        assert await _chunks(storage) == 2
        world.wait(timedelta(seconds=1))
        await _collect(storage, world)
        assert await _chunks(storage) == 1


async def test_collection_deletes_nothing_if_the_leases_cannot_be_read(spec: int) -> None:
    """It cannot know what to spare."""
    world = World()
    async with filled(world, spec) as plain, process(plain) as (_, session):
        await write(session, "a/c/1", CHUNK)
        world.wait(10 * MINUTE)
        before = await objects(plain)
        with pytest.raises(PermissionDeniedError):
            await _collect(_NoLeases(plain), world)
        assert (await objects(plain)).keys() >= before.keys()


class _NoLeases(WrappedStorage):
    async def before(self, operation: str, key: str) -> None:
        if operation == "get" and key.startswith("leases/"):
            raise PermissionDeniedError("not allowed")


async def _line(repository: Repository, world: World, count: int) -> None:
    for number in range(count):
        world.wait(HOUR)
        session = await repository.writable_session("main")
        await write(session, f"a/c/{10 + number}", CHUNK)
        await session.commit(f"commit {number}")


async def test_expiration_keeps_the_base_of_a_leased_session_in_the_history(spec: int) -> None:
    """So that it can commit over everything that was committed and expired meanwhile."""
    world = World()
    async with filled(world, spec) as storage:
        with world.clock_wrong_by(timedelta(0)):
            async with process(storage, lease=7 * DAY) as (repository, session):
                await write(session, "a/c/1", CHUNK)
                await _line(repository, world, 3)
                world.wait(HOUR)
                async with Repository.open(storage) as other:
                    gone = await other.expire_snapshots(world.now)
                    line = [it.id async for it in other.ancestry(branch="main")]
                assert session.snapshot_id in line
                assert session.snapshot_id not in gone
                assert len(gone) == (2 if spec == 2 else 0)
                await _collect(storage, world)
                tip = await session.commit("over the gap", rebase_with=ConflictDetector())
                reader = await repository.readonly_session(snapshot_id=tip)
                for chunk in (0, 1, 10, 11, 12):
                    assert await read(reader, f"a/c/{chunk}") == CHUNK


async def test_expiration_keeps_a_branch_on_whose_tip_a_leased_session_builds(spec: int) -> None:
    """Though branches that are old are to be deleted."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        with world.clock_wrong_by(timedelta(0)):
            await _line(repository, world, 1)
            tip = await repository.lookup_branch("main")
            for name in ("used", "unused"):
                await repository.create_branch(name, tip)
                side = await repository.writable_session(name)
                await write(side, "a/c/50", CHUNK)
                await side.commit(name)
            session = await repository.writable_session("used", lease=True)
            await write(session, "a/c/51", CHUNK)
            world.wait(HOUR)
            await repository.expire_snapshots(world.now, delete_expired_branches=True)
            assert await repository.list_branches() == {"main", "used"}
            await session.commit("kept")


@pytest.mark.parametrize("how", ["amended", "reset"])
async def test_collection_spares_the_base_though_no_branch_leads_to_it(how: str) -> None:
    """The session reads on; that it cannot commit is another matter."""
    world = World()
    async with filled(world) as storage:
        with world.clock_wrong_by(timedelta(0)):
            async with Repository.open(storage) as repository:
                first = await repository.lookup_branch("main")
                await _line(repository, world, 1)
            async with process(storage, lease=7 * DAY) as (repository, session):
                if how == "amended":
                    other = await repository.writable_session("main")
                    await write(other, "a/c/10", CHUNK + b"amended")
                    await other.amend("amended")
                else:
                    await repository.reset_branch("main", first)
                world.wait(DAY)
                await _collect(storage, world)
                assert await read(session, "a/c/10") == CHUNK
                async with Repository.open(storage) as fresh:
                    base = await fresh.readonly_session(snapshot_id=session.snapshot_id)
                    assert await read(base, "a/c/10") == CHUNK


async def test_a_base_that_is_gone_does_not_stop_collection() -> None:
    """Another engine may have collected it."""
    world = World()
    async with filled(world) as storage:
        with world.clock_wrong_by(timedelta(0)):
            async with Repository.open(storage) as repository:
                first = await repository.lookup_branch("main")
                await _line(repository, world, 1)
            async with process(storage, lease=7 * DAY) as (repository, session):
                await repository.reset_branch("main", first)
                world.wait(DAY)
                with patch("icechunk_async.engine.upkeep.own_files.spared", _blind):
                    await _collect(storage, world)
                assert f"snapshots/{session.snapshot_id}" not in await objects(storage)
                await _collect(storage, world)


async def _blind(*_: object) -> object:
    from icechunk_async.engine.leases.register import Spared

    return Spared()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(it, marks=pytest.mark.thorough) for it in range(3, 1000))]
)
async def test_histories_of_writers_and_collectors_lose_nothing_of_leased_sessions(
    seed: int,
) -> None:
    """Leased and plain sessions, collection and expiration at cutoff = now, and waits, at random.

    Every commit of a leased session that was acknowledged is read back, chunk by chunk.
    """
    chance, world = random.Random(seed), World()
    skews = [timedelta(0), 5 * MINUTE, -5 * MINUTE]
    expected: dict[int, bytes] = {0: CHUNK}
    async with (
        filled(world, chance.choice([1, 2])) as storage,
        Repository.open(storage) as repository,
    ):
        await _arrays(repository, world)
        open_sessions: list[tuple[Session, dict[int, bytes]]] = []
        chunk = 1
        for _ in range(40):
            with world.clock_wrong_by(chance.choice(skews)):
                match chance.choice(["begin", "write", "write", "commit", "collect", "wait"]):
                    case "begin":
                        session = await repository.writable_session("main", lease=7 * DAY)
                        open_sessions.append((session, {}))
                    case "write" if open_sessions:
                        session, wrote = chance.choice(open_sessions)
                        wrote[chunk] = str(chunk).encode().ljust(600, b"-")
                        await write(session, f"b/c/{chunk}", wrote[chunk])
                        chunk += 1
                    case "commit" if open_sessions:
                        session, wrote = open_sessions.pop(chance.randrange(len(open_sessions)))
                        if wrote:
                            await session.commit("all", rebase_with=ConflictDetector())
                            expected |= wrote
                    case "collect":
                        if chance.random() < 0.5:
                            await repository.expire_snapshots(clock.from_us(clock.now_us()))
                        await _collect(storage, world)
                    case _:
                        world.wait(timedelta(minutes=chance.randrange(1, 600)))
        await _collect(storage, world)
        reader = await repository.readonly_session("main")
        del expected[0]
        for number, data in expected.items():
            assert await read(reader, f"b/c/{number}") == data


async def _arrays(repository: Repository, world: World) -> None:
    with world.clock_wrong_by(timedelta(0)):
        session = await repository.writable_session("main")
        await make_array(session, "b", (100,), (1,))
        await session.commit("an array")


async def test_on_a_full_storage_collection_spares_leases_as_if_all_were_live(spec: int) -> None:
    """It cannot ask for the time, and deletes what is older than the sessions."""
    world = World()
    async with filled(world, spec) as plain, Repository.open(plain) as repository:
        garbage = await repository.writable_session("main")
        await write(garbage, "a/c/1", CHUNK)
        world.wait(DAY)
        with world.clock_wrong_by(timedelta(0)):
            await _line(repository, world, 1)
        async with process(plain, lease=HOUR) as (_, session):
            await write(session, "a/c/2", CHUNK)
            world.wait(DAY)
            full = _Full(plain)
            await _collect(full, world, world.now - DAY - MINUTE)
            assert await _chunks(plain) == 3


class _Full(WrappedStorage):
    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and key.startswith(".icechunk-probe"):
            raise StorageFullError("no room")


async def test_the_collector_cannot_revive_or_end_what_it_only_looks_at() -> None:
    """Neither collection nor listing writes a lease."""
    world = World()
    async with filled(world) as storage, process(storage) as (repository, session):
        before = storage.times[lease_key(session.session_id)]
        world.wait(HOUR)
        await repository.sessions()
        await _collect(storage, world)
        assert storage.times[lease_key(session.session_id)] == before
        await repository.end_session(session.session_id)
        with pytest.raises(LeaseLostError):
            await session._lease.renew()  # type: ignore[union-attr]
        assert (await repository.sessions())[0].state is SessionState.ENDED

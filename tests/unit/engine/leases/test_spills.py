"""Sessions that are spilled and continued elsewhere: the same bytes, one holder, no damage."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from icechunk_async import Repository
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.changes.wire import ForkState, encode_fork
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.leases import keeper, spiller
from icechunk_async.engine.leases.record import encode_document
from icechunk_async.engine.leases.register import SessionState
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    LeaseExpiredError,
    LeaseLostError,
    LeaseNotFoundError,
    NodeExistsError,
    PermissionDeniedError,
    SessionStateError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import spill_prefix
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import array_document, group_document, make_array, objects, read, write
from tests.unit.engine.leases.lease_tools import CHUNK, DAY, HOUR, MINUTE, World, filled, process

if TYPE_CHECKING:
    from icechunk_async.session import Session


def state(session: Session) -> bytes:
    """Return all changes of a session as bytes; equal changes give equal bytes."""
    workspace = session.workspace
    with workspace.lock:
        changes = workspace.changes
        return encode_fork(ForkState(bytes(12), workspace.base.id, changes))


async def contents(session: Session) -> dict[str, bytes | None]:
    """Read everything that a session sees."""
    return {key: await read(session, key) async for key in session.store.list()}


async def test_a_session_is_continued_in_another_process_byte_for_byte(spec: int) -> None:
    """Nodes, chunks in objects and in manifests, deletions; and then it commits."""
    world = World()
    async with filled(world, spec) as storage:
        async with process(storage) as (_, session):
            await make_array(session, "g/b", (10,), (1,))
            await write(session, "a/c/1", CHUNK)
            await write(session, "a/c/2", b"inline")
            await session.store.delete("a/c/0")
            await session.spill()
            await write(session, "g/b/c/3", CHUNK)
            await session.spill()
            before, seen, session_id = state(session), await contents(session), session.session_id
        world.wait(HOUR)
        async with Repository.open(storage) as repository:
            resumed = await repository.resume_session(str(session_id), owner="second")
            assert state(resumed) == before
            assert await contents(resumed) == seen
            assert resumed.session_id == session_id
            listed = (await repository.sessions())[0]
            assert (listed.owner, listed.segments) == ("second", 2)
            tip = await resumed.commit("resumed")
            reader = await repository.readonly_session(snapshot_id=tip)
            assert await contents(reader) == seen
            assert (await repository.sessions())[0].state is SessionState.COMMITTED
            assert not [it for it in await objects(storage) if it.startswith("leases/spills/")]


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(it, marks=pytest.mark.thorough) for it in range(6, 600))]
)
async def test_whatever_is_changed_between_spills_is_there_after_the_resume(seed: int) -> None:
    """Changes of every kind at random, with spills in between and packs, rebases and forks."""
    chance, world = random.Random(seed), World()
    packing = Packing(target_bytes=2048, max_chunk_bytes=1024) if chance.random() < 0.5 else None
    most = chance.choice([2, 64])
    async with filled(world, chance.choice([1, 2])) as storage:
        async with Repository.open(storage, packing=packing) as repository:
            with patch.object(spiller, "_MOST_SEGMENTS", most):
                session = await repository.writable_session("main", lease=True)
                for step in range(40):
                    await _change(repository, session, chance, step)
                    if chance.random() < 0.2:
                        await session.spill()
                        if chance.random() < 0.3:
                            before = state(session)
                            async with Repository.open(storage, packing=packing) as other:
                                resumed = await other.resume_session(session.session_id)
                                assert state(resumed) == before
                            # And back, as the first process is not dead.
                            session = await repository.resume_session(session.session_id)
                            assert state(session) == before
                await session.spill()
                before, seen = state(session), await contents(session)
                assert len((await repository.sessions())[0].owner)
        async with Repository.open(storage) as repository:
            resumed = await repository.resume_session(session.session_id)
            assert state(resumed) == before
            assert await contents(resumed) == seen


async def _change(
    repository: Repository, session: Session, chance: random.Random, step: int
) -> None:
    """Make one change; several of them exclude one another."""
    chunk = f"{chance.choice('ab')}/c/{chance.randrange(20)}"
    data = str(step).encode().ljust(chance.choice([5, 600]), b".")
    try:
        match chance.randrange(12):
            case 0:
                size = chance.choice([10, 100])
                await make_array(session, chance.choice("ab"), (size,), (1,))
            case 1:
                await session.store.delete_dir(chance.choice(["b", "g"]))
            case 2:
                await session.store.delete(chunk)
            case 3:
                await write(session, f"g/{chance.randrange(3)}/zarr.json", group_document(n=step))
            case 4 if chance.random() < 0.3:
                session.discard_changes()
            case 5:
                fork = await session.fork()
                await write(fork, chunk, data)
                await session.merge(fork)
            case 6:
                other = await repository.writable_session("main")
                await write(other, f"other{step}/zarr.json", group_document())
                await other.commit("other")
                await session.rebase(ConflictDetector())
            case 7:
                await write(session, "a/zarr.json", array_document((10, 10), (1, 1)))
            case _:
                await write(session, chunk, data)
    except (NodeExistsError, KeyError, ValueError):
        pass


async def test_a_spill_holds_only_what_changed_since_the_last(spec: int) -> None:
    """Two requests; its length is that of the new changes."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        await make_array(session, "big", (5000,), (1,))
        for chunk in range(3000):
            await write(session, f"big/c/{chunk}", b"%d" % chunk)
        await session.spill()
        await write(session, "big/c/4000", b"x")
        storage.forget()
        await session.spill()
        assert storage.requests == {"put": 2}
        prefix = spill_prefix(session.session_id)
        sizes = sorted(
            len(data) for key, data in (await objects(storage)).items() if key.startswith(prefix)
        )
        assert len(sizes) == 2
        assert sizes[0] < 1000 < sizes[1]
        storage.forget()
        await session.spill()  # nothing new: the lease is renewed
        assert storage.requests == {"put": 1}
        assert (await repository.sessions())[0].segments == 2


async def test_spills_and_publications_take_12_to_25_bytes_for_each_chunk() -> None:
    """Of chunks that are stored as objects, of three lengths."""
    world, count = World(), 2000
    async with filled(world) as storage, process(storage) as (_, session):
        await make_array(session, "big", (2 * count,), (1,))
        fork = await session.fork()
        prefix = spill_prefix(session.session_id)
        for author, store, first in (
            (session, session.spill, 0),
            (fork, fork.publish, count),
        ):
            before = (await objects(storage)).keys()
            for chunk in range(first, first + count):
                await write(author, f"big/c/{chunk}", CHUNK[chunk % 3 :])
            await store()
            (stored,) = [
                data
                for key, data in (await objects(storage)).items()
                if key.startswith(prefix) and key not in before
            ]
            assert 12 <= len(stored) / count <= 25


async def test_many_segments_become_one(spec: int) -> None:
    """So that resuming stays cheap; the old ones are deleted."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        with patch.object(spiller, "_MOST_SEGMENTS", 3):
            for chunk in range(1, 9):
                await write(session, f"a/c/{chunk}", CHUNK)
                await session.spill()
                assert (await repository.sessions())[0].segments <= 3
        prefix = spill_prefix(session.session_id)
        assert sum(key.startswith(prefix) for key in await objects(storage)) <= 3
        before = state(session)
        assert state(await repository.resume_session(session.session_id)) == before


async def test_the_old_holder_can_neither_spill_nor_commit_after_a_resume(spec: int) -> None:
    """It is told who continues the session."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        await write(session, "a/c/1", CHUNK)
        await session.spill()
        tip = await repository.lookup_branch("main")
        async with Repository.open(storage) as elsewhere:
            resumed = await elsewhere.resume_session(session.session_id, owner="the second")
            with pytest.raises(LeaseLostError, match="'the second' continues"):
                await session.spill()
            with pytest.raises(LeaseLostError, match="'the second' continues"):
                await session.commit("old")
            with pytest.raises(LeaseLostError):
                await write(session, "a/c/2", CHUNK)
            assert await repository.lookup_branch("main") == tip
            await resumed.commit("new")


async def test_of_two_that_resume_at_once_one_succeeds(spec: int) -> None:
    """The other one is told."""
    world = World()
    async with filled(world, spec) as storage:
        async with process(storage) as (_, session):
            await write(session, "a/c/1", CHUNK)
            await session.spill()
        async with Repository.open(storage) as one, Repository.open(storage) as two:
            results = await asyncio.gather(
                one.resume_session(session.session_id),
                two.resume_session(session.session_id),
                return_exceptions=True,
            )
            failed = [it for it in results if isinstance(it, LeaseLostError)]
            assert len(failed) == 1
            (winner,) = (it for it in results if not isinstance(it, BaseException))
            await winner.commit("once")


async def test_a_commit_of_the_old_holder_that_lands_late_is_the_only_one(spec: int) -> None:
    """It renewed its lease before the resume and published after it: the new holder is refused."""
    world = World()
    async with filled(world, spec) as plain:
        storage = _Pausing(plain)
        async with process(storage) as (repository, session), Repository.open(plain) as elsewhere:
            await write(session, "a/c/1", CHUNK)
            await session.spill()
            storage.pause = True
            committing = asyncio.create_task(session.commit("old"))
            await storage.paused.wait()
            resumed = await elsewhere.resume_session(session.session_id)
            await write(resumed, "a/c/2", CHUNK)
            storage.resume.set()
            tip = await committing
            for solver in (None, ConflictDetector()):
                with pytest.raises(LeaseLostError, match="committed") as refused:
                    await resumed.commit("new", rebase_with=solver)
            assert refused.value.context["snapshot_id"] == str(tip)
            assert await repository.lookup_branch("main") == tip


class _Pausing(WrappedStorage):
    """Holds the first snapshot back until it may continue."""

    pause = False

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self.paused, self.resume = asyncio.Event(), asyncio.Event()

    async def before(self, operation: str, key: str) -> None:
        if self.pause and operation == "put" and key.startswith("snapshots/"):
            self.paused.set()
            await self.resume.wait()


async def test_a_process_that_died_after_its_commit_is_found_out(spec: int) -> None:
    """Its lease does not say so yet; the history does."""
    world = World()
    async with filled(world, spec) as storage:
        async with process(storage) as (_, session):
            await write(session, "a/c/1", CHUNK)
            await session.spill()
            with patch.object(keeper.Lease, "close", _nothing):
                tip = await session.publisher.commit("died")
        async with Repository.open(storage) as repository:
            with pytest.raises(LeaseLostError) as refused:
                await repository.resume_session(session.session_id)
            assert refused.value.context["snapshot_id"] == str(tip)
            listed = (await repository.sessions())[0]
            assert (listed.state, listed.snapshot_id) == (SessionState.COMMITTED, tip)
            with pytest.raises(LeaseLostError) as again:
                await repository.resume_session(session.session_id)
            assert again.value.context["snapshot_id"] == str(tip)


async def _nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("skew", [timedelta(0), 5 * MINUTE, -5 * MINUTE], ids=str)
@pytest.mark.parametrize("tells_on_read", [True, False], ids=["told", "listed"])
async def test_what_expired_ended_or_never_was_is_not_resumed(
    skew: timedelta, *, tells_on_read: bool
) -> None:
    """By the storage's clock, however wrong this machine's is."""
    world = World()
    async with filled(world, tells_on_read=tells_on_read) as storage:
        with world.clock_wrong_by(skew):
            async with process(storage, lease=HOUR) as (repository, session):
                await write(session, "a/c/1", CHUNK)
                await session.spill()
                world.wait(HOUR - timedelta(seconds=1))
                await repository.resume_session(session.session_id)
                world.wait(HOUR)
                with pytest.raises(LeaseExpiredError, match="cannot be resumed"):
                    await repository.resume_session(session.session_id)
                ended = await repository.writable_session("main", lease=True)
                await repository.end_session(ended.session_id)
                with pytest.raises(LeaseLostError, match="was ended"):
                    await repository.resume_session(ended.session_id)
                with pytest.raises(LeaseNotFoundError):
                    await repository.resume_session("0" * 20)


async def test_without_a_lease_there_is_nothing_to_spill_to(spec: int) -> None:
    """And a session that was not spilled resumes at its beginning."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        plain = await repository.writable_session("main")
        with pytest.raises(SessionStateError, match="without a lease"):
            await plain.spill()
        await write(session, "a/c/1", CHUNK)
        resumed = await repository.resume_session(session.session_id)
        assert not resumed.has_uncommitted_changes


async def test_collection_spares_what_a_dead_process_spilled(spec: int) -> None:
    """Until the lease expires it can be resumed, whatever the cutoff."""
    world = World()
    async with filled(world, spec) as storage:
        with world.clock_wrong_by(timedelta(0)):
            async with process(storage, lease=DAY) as (_, session):
                await write(session, "a/c/1", CHUNK)
                await session.spill()
            world.wait(12 * HOUR)
            async with Repository.open(storage) as repository:
                await repository.garbage_collect(world.now)
                resumed = await repository.resume_session(session.session_id)
                tip = await resumed.commit("spared")
                reader = await repository.readonly_session(snapshot_id=tip)
                assert await read(reader, "a/c/1") == CHUNK


async def test_a_session_goes_on_after_its_repository_was_migrated() -> None:
    """Its old handle says so; resumed it has what was spilled and what forks published."""
    world = World()
    async with filled(world, 1) as storage, process(storage) as (_, session):
        await write(session, "a/c/1", CHUNK)
        fork = await session.fork()
        await write(fork, "a/c/2", CHUNK)
        await fork.publish()
        await upgrade(storage)
        with pytest.raises(ConflictError, match="migrated to format version 2"):
            await session.commit("refused", rebase_with=ConflictDetector())
        async with Repository.open(storage) as migrated:
            await migrated.garbage_collect(world.now)
            resumed = await migrated.resume_session(session.session_id)
            await resumed.commit("after the migration")
            reader = await migrated.readonly_session("main")
            found = [await read(reader, f"a/c/{it}") for it in range(4)]
            assert found == [CHUNK, CHUNK, CHUNK, None]


async def test_a_failed_spill_loses_nothing(spec: int) -> None:
    """The next one begins anew."""
    world = World()
    async with filled(world, spec) as plain:
        storage = _Refusing(plain)
        async with process(storage) as (repository, begun):
            session = begun
            await write(session, "a/c/1", CHUNK)
            await session.spill()
            for refused in ("leases/spills/", "leases/sessions/"):
                await write(session, f"a/c/{len(refused)}", CHUNK)
                storage.refused = refused
                with pytest.raises(PermissionDeniedError):
                    await session.spill()
                storage.refused = None
                await session.spill()
                before = state(session)
                session = await repository.resume_session(session.session_id)
                assert state(session) == before


class _Refusing(WrappedStorage):
    refused: str | None = None

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and self.refused is not None and key.startswith(self.refused):
            raise PermissionDeniedError("not now")


async def test_a_session_in_use_spills_by_itself(spec: int) -> None:
    """At each beat, and at once after many writes."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        with patch.object(keeper, "MANY_USES", 50):  # the next beat would be in a minute
            session = await repository.writable_session("main", lease=True)
            await asyncio.sleep(0)
            for chunk in range(50):
                await write(session, f"a/c/{chunk}", b"x")
            async with asyncio.timeout(240):
                while not (await repository.sessions())[0].segments:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        assert session.spiller is not None
        await write(session, "a/c/60", b"x")
        await session.spiller.beat()
        before = state(session)
        assert state(await repository.resume_session(session.session_id)) == before


@pytest.mark.parametrize("seed", range(3))
async def test_damaged_spills_are_format_errors_and_take_the_session_from_nobody(seed: int) -> None:
    """Any changed bit, any cut, a missing file, and what cannot be."""
    chance, world = random.Random(seed), World()
    async with filled(world) as storage, process(storage) as (repository, session):
        await write(session, "a/c/1", CHUNK)
        await write(session, "g/zarr.json", group_document())
        await session.spill()
        prefix = spill_prefix(session.session_id)
        (key,) = (it for it in await objects(storage) if it.startswith(prefix))
        data = bytes((await storage.get(key)).data)
        damages = [data[: chance.randrange(len(data))] for _ in range(10)]
        for _ in range(30):
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            damages.append(bytes(flipped))
        lists: dict[str, Any] = {
            name: [] for name in ("whole", "not_new", "not_updated", "not_deleted")
        }
        stranger = encode_fork(ForkState(bytes(12), session.snapshot_id, ChangeSet()))
        other_base = encode_fork(ForkState(session.session_id, SnapshotId.random(), ChangeSet()))
        mine = encode_fork(ForkState(session.session_id, session.snapshot_id, ChangeSet()))
        for changes, more in (
            (stranger, {}),
            (other_base, {}),
            (b"", {}),
            (mine, {"whole": [b"short"]}),
            (mine, {"not_new": [5]}),
            (mine, {"whole": None}),
        ):
            damages.append(encode_document("spill", {"changes": changes, **lists, **more}))
        for damaged in damages:
            await storage.put(key, damaged)
            with pytest.raises(FormatError):
                await repository.resume_session(session.session_id)
        await storage.delete([key])
        with pytest.raises(FormatError, match="is missing"):
            await repository.resume_session(session.session_id)
        lease = session._lease
        assert lease is not None
        await lease.renew(lambda it: replace(it, spilled=("../../repo",)))
        with pytest.raises(FormatError, match="names a file"):
            await repository.resume_session(session.session_id)
        await session.spill()  # still its holder; from its memory it is whole again
        await session.commit("committed")

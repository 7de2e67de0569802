"""Publications when something goes wrong: lost replies, cancellation, late comers, damage."""

from __future__ import annotations

import asyncio
import pickle
import random
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.changes.wire import ForkState, Lineage, decode_fork, encode_fork
from icechunk_async.engine.leases.record import decode_document, encode_document
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    LeaseExpiredError,
    LeaseLostError,
    MergeFailedError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import spill_prefix
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write
from tests.unit.engine.leases.lease_tools import CHUNK, DAY, HOUR, MINUTE, World, filled, process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.session import Session
    from icechunk_async.storage import Storage

ONE, TWO = b"1" * 600, b"2" * 600


async def insisted[T](doing: Callable[[], Awaitable[T]]) -> T:
    """Try again until the storage lets it be done."""
    while True:
        with suppress(StorageError):
            return await doing()


async def resumed(repository: Repository, session: Session) -> Session:
    """Resume a session; a try of ours that lands late looks like another process."""
    try:
        return await repository.resume_session(session.session_id)
    except LeaseLostError as error:
        raise StorageUnavailableError("try again") from error


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(it, marks=pytest.mark.thorough) for it in range(3, 300))]
)
async def test_whatever_replies_are_lost_each_publication_counts_once_in_order(seed: int) -> None:
    """Writes that are lost, landed, or land late; trying again leads to where others end."""
    chance, world = random.Random(seed), World()
    rates = FaultRates(lost_replies=0.1, lost_requests=0.1, late_writes=0.1, refusals=0.05)
    async with filled(world, 1 + seed % 2) as plain:
        storage = FaultyStorage(
            plain, rates, seed=seed, affects=lambda key: key.startswith("leases/")
        )
        async with Repository.open(plain) as repository:
            session = await repository.writable_session("main", lease=True)
            expected: dict[str, bytes] = {}
        async with Repository.open(storage) as repository:
            session = await insisted(partial(resumed, repository, session))
            forks = [await insisted(session.fork) for _ in range(3)]
            for fork in forks:
                await insisted(fork.publish)
            for step in range(25):
                world.wait(timedelta(seconds=1))
                fork = chance.choice(forks)
                await insisted(fork.refresh)
                key = f"a/c/{chance.randrange(4)}"
                await write(fork, key, b"%d" % step)
                expected[key] = b"%d" % step
                tries = chance.randrange(3)
                for extra in range(tries):  # more is written between tries that fail
                    with suppress(StorageError):
                        await fork.publish()
                    await write(fork, f"a/c/{10 + extra}", b"%d" % step)
                    expected[f"a/c/{10 + extra}"] = b"%d" % step
                await insisted(fork.publish)
                if chance.random() < 0.3:
                    await insisted(session.refresh)
                    for key, value in expected.items():
                        assert await read(session, key) == value, key
            await insisted(lambda: session.commit("all"))
            reader = await repository.readonly_session("main")
            for key, value in expected.items():
                assert await read(reader, key) == value, key


async def test_what_was_taken_in_and_could_not_be_stored_is_neither_lost_nor_missing(
    spec: int,
) -> None:
    """The next refresh stores it; until then forks see what they saw, and a resume finds it."""
    world = World()
    async with filled(world, spec) as plain:
        storage = FaultyStorage(plain, FaultRates(), seed=1)
        async with process(storage) as (repository, session), Repository.open(plain) as elsewhere:
            one, two = await session.fork(), await session.fork()
            await write(one, "a/c/1", ONE)
            await one.publish()
            with (
                patch.object(FaultyStorage, "put", side_effect=PermissionDeniedError("full")),
                pytest.raises(PermissionDeniedError),
            ):
                await session.refresh()
            assert await read(session, "a/c/1") == ONE
            assert session.unmerged_forks == (two.fork_id,)
            await two.refresh()
            assert await read(two, "a/c/1") == ONE
            await write(two, "a/c/1", TWO)
            await two.publish()
            await session.spill()  # and the publications that nobody stored elsewhere stay
            resumed = await elsewhere.resume_session(session.session_id)
            assert await read(resumed, "a/c/1") == TWO
            last = await repository.resume_session(session.session_id)
            await last.commit("all")
            assert await read(last, "a/c/1") == TWO


class _Pausing(WrappedStorage):
    """Holds requests back until they may continue."""

    def __init__(self, storage: Storage, operation: str, begin: str) -> None:
        super().__init__(storage)
        self._what = (operation, begin)
        self.active = False
        self.paused, self.resume = asyncio.Event(), asyncio.Event()

    async def before(self, operation: str, key: str) -> None:
        """Wait if it is the kind of request that is held back."""
        if self.active and operation == self._what[0] and key.startswith(self._what[1]):
            self.paused.set()
            await self.resume.wait()


@pytest.mark.parametrize("lands", [True, False])
async def test_a_fork_that_publishes_while_its_session_commits_finds_out_what_became_of_it(
    spec: int, *, lands: bool
) -> None:
    """Too late for this commit: if that fails it counts, else it is told."""
    world = World()
    async with filled(world, spec) as plain:
        storage = _Pausing(plain, "put", "snapshots/")
        async with process(storage) as (repository, session):
            fork, early = await session.fork(), await session.fork()
            async with pickle.loads(pickle.dumps(fork)).attached(plain) as late:
                await write(early, "a/c/1", ONE)
                await early.publish()
                if not lands:
                    other = await repository.writable_session("main")
                    await write(other, "a/c/9", TWO)
                    await other.commit("other")
                storage.active = True
                committing = asyncio.create_task(session.commit("x", allow_missing_forks=True))
                await storage.paused.wait()
                await write(late, "a/c/2", TWO)
                for _ in range(2):
                    with pytest.raises(OutcomeUnknownError, match="being committed"):
                        await late.publish()
                storage.resume.set()
                if lands:
                    await committing
                    with pytest.raises(LeaseLostError, match="was committed as"):
                        await late.publish()
                    assert late.has_uncommitted_changes
                    reader = await repository.readonly_session("main")
                    assert [await read(reader, f"a/c/{it}") for it in (1, 2)] == [ONE, None]
                else:
                    with pytest.raises(ConflictError):
                        await committing
                    assert await late.publish()
                    await session.refresh()
                    assert [await read(session, f"a/c/{it}") for it in (1, 2)] == [ONE, TWO]


class _Interrupted(WrappedStorage):
    """Does something else before or after its n-th request."""

    def __init__(self, storage: Storage, other: Callable[[], Awaitable[object]]) -> None:
        super().__init__(storage)
        self.left: int | None = None
        self._other = other

    async def before(self, operation: str, key: str) -> None:
        """Count, and perhaps let the other one do all it has to do."""
        del operation, key
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                await self._other()

    async def after(self, operation: str, key: str) -> None:
        """Count as well."""
        await self.before(operation, key)


class _KilledError(Exception):
    pass


async def _told(fork: ForkSession) -> list[bool]:
    """Return the reply to a publication; none if the fork has to ask again."""
    try:
        return [await fork.publish()]
    except LeaseLostError:
        return [False]
    except OutcomeUnknownError:
        return []


async def _has_all(session: Session, fork: ForkSession) -> bool:
    """Merge a fork by hand and commit; return whether the session had what it published."""
    await session.refresh()
    had = await read(session, "a/c/1") == ONE
    await write(fork, "a/c/2", TWO)
    await session.merge(fork)
    await session.commit("all")
    assert [await read(session, f"a/c/{it}") for it in (1, 2)] == [ONE, TWO]
    return had


async def _raced(how: str, place: int) -> tuple[bool, bool]:
    """Let a fork publish while another process resumes its session.

    Returns: whether the fork was told that it published, and whether the two met.
    """
    world = World()
    async with filled(world) as plain, process(plain) as (_, session):
        parcel = pickle.dumps(await session.fork())
        found: list[Session] = []
        told: list[bool] = []

        async def publish() -> None:
            told.extend(await _told(fork))

        async def resume() -> None:
            with suppress(_KilledError):
                found.append(await repository.resume_session(session.session_id))

        async def publish_amid() -> None:
            await publish()
            if how == "the resume is killed":
                raise _KilledError

        publishing, resuming = _Interrupted(plain, resume), _Interrupted(plain, publish_amid)
        async with (
            Repository.open(resuming) as repository,
            pickle.loads(parcel).attached(publishing) as fork,
        ):
            await write(fork, "a/c/1", ONE)
            if how == "the publication is interrupted":
                storage, doing, other = publishing, publish, resume
            else:
                storage, doing, other = resuming, resume, publish
            storage.left = place
            await doing()
            met = storage.left is None
            storage.left = None
            if not met:
                await other()
            if how in ("the resume is killed", "another resume follows"):
                await resume()  # by a process that knows nothing of what the first one did
            if not told:
                await publish()
            assert told == [await _has_all(found[-1], fork)], place
            assert not [it for it in await objects(plain) if it.startswith("leases/spills/")]
            return told[0], met


@pytest.mark.parametrize(
    "how",
    [
        "the publication is interrupted",
        "the resume is killed",
        pytest.param("the resume is interrupted", marks=pytest.mark.thorough),
        pytest.param("another resume follows", marks=pytest.mark.thorough),
    ],
)
async def test_a_fork_is_told_the_truth_while_its_session_is_resumed(how: str) -> None:
    """At any request of either: what counts is there, what does not is not, and can be merged."""
    met, place, answers = True, 0, set[bool]()
    while met:
        answer, met = await _raced(how, place)
        answers.add(answer)
        place += 1
    assert place > 4
    assert answers == {True, False}


async def test_a_publication_in_doubt_that_the_commit_has_is_found_out(spec: int) -> None:
    """Its lease could not be read; the commit has it, and says so to those who ask."""
    world = World()
    async with filled(world, spec) as plain, process(plain) as (_, session):
        storage = FaultyStorage(plain, FaultRates(), seed=1)
        async with pickle.loads(pickle.dumps(await session.fork())).attached(storage) as fork:
            await write(fork, "a/c/1", ONE)
            broken = PermissionDeniedError("broken")
            with (
                patch.object(FaultyStorage, "get", side_effect=broken),
                pytest.raises(PermissionDeniedError),
            ):
                await fork.publish()
            assert fork.has_uncommitted_changes
            await session.commit("with it")
            assert await read(session, "a/c/1") == ONE
            assert await fork.publish()
            assert not fork.has_uncommitted_changes
            assert not await fork.publish()
            await write(fork, "a/c/2", ONE)
            with pytest.raises(LeaseLostError):
                await fork.publish()


@pytest.mark.parametrize("seed", range(4))
def test_what_was_told_to_be_published_is_in_the_commit_whenever_that_comes(seed: int) -> None:
    """Forks that publish all the time on a slow storage, and a commit at some moment."""

    async def run() -> None:
        chance = random.Random(seed)
        async with open_storage(memory_url()) as memory:
            storage = LatencyStorage(memory, seconds=0.05)
            async with Repository.create(storage) as repository:
                session = await repository.writable_session("main")
                await make_array(session, "a", (400,), (1,))
                await session.commit("array")
                session = await repository.writable_session("main", lease=True)
                told: list[int] = []
                refused: list[int] = []

                async def work(place: int, fork: ForkSession) -> None:
                    for number in range(place * 100, place * 100 + 100):
                        await asyncio.sleep(chance.random() * 0.1)
                        await write(fork, f"a/c/{number}", b"x")
                        try:
                            await fork.publish()
                        except (OutcomeUnknownError, LeaseLostError):
                            refused.append(number)
                            return
                        told.append(number)

                async with asyncio.TaskGroup() as tasks:
                    for place in range(4):
                        tasks.create_task(work(place, await session.fork()))
                    await asyncio.sleep(1 + chance.random())
                    if seed % 2:
                        await session.refresh()
                    await session.commit("all", allow_missing_forks=True)
                reader = await repository.readonly_session("main")
                there = {it for it in range(400) if await read(reader, f"a/c/{it}") is not None}
                assert told
                assert set(told) <= there <= {*told, *refused}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("what", ["publish", "refresh", "session"])
async def test_cancelled_anywhere_it_can_be_done_again(what: str) -> None:
    """Nothing is lost and nothing counts twice; the others continue."""
    world = World()
    async with filled(world) as storage, process(storage) as (_, session):
        one, two = await session.fork(), await session.fork()
        doing = {"publish": one.publish, "refresh": two.refresh, "session": session.refresh}[what]

        async def change(step: int) -> None:
            await write(one, "a/c/1", b"%d" % step)
            if what != "publish":
                await one.publish()

        async def run(_: int) -> None:
            await doing()

        await write(two, "a/c/2", TWO)
        await change(step := 0)
        async for _ in at_every_wait(run):
            await change(step := step + 1)
        assert step
        await session.refresh()
        await two.refresh()
        assert await read(session, "a/c/1") == b"%d" % step
        assert [await read(two, f"a/c/{it}") for it in (1, 2)] == [b"%d" % step, TWO]
        await two.publish()
        await session.commit("all")
        assert await read(session, "a/c/2") == TWO


async def test_a_commit_cancelled_anywhere_is_done_again_with_what_was_published(
    spec: int,
) -> None:
    """Forks can publish again at once, unless the commit may have landed."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        fork = await session.fork()
        step = 0

        async def run(_: int) -> None:
            if not session.read_only:
                await session.commit("cancelled")

        await write(fork, "a/c/1", b"0")
        await fork.publish()
        async for _ in at_every_wait(run):
            if not (session.outcome_unknown or session.read_only):
                await write(fork, "a/c/1", b"%d" % (step + 1))
                assert session.spiller is not None
                await session.spiller.beat()
                await fork.publish()
                step += 1
        assert step > 2
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/1") == b"%d" % step


async def test_publishing_keeps_the_lease_of_an_idle_session_alive(spec: int) -> None:
    """And collection spares what forks write, in other processes, as long as they publish."""
    world = World()
    async with (
        filled(world, spec) as storage,
        process(storage, lease=HOUR) as (repo, session),
    ):
        parcel = pickle.dumps(await session.fork())
        async with pickle.loads(parcel).attached(storage) as fork:
            for step in range(1, 11):
                world.wait(HOUR - MINUTE)
                await write(fork, f"a/c/{step}", CHUNK)
                await fork.publish()
                async with Repository.open(storage) as collector:
                    await collector.garbage_collect(world.now)
                assert session.spiller is not None
                await session.spiller.beat()
        world.wait(HOUR - MINUTE)
        await session.commit("after ten hours")
        reader = await repo.readonly_session("main")
        assert [await read(reader, f"a/c/{it}") for it in range(1, 11)] == [CHUNK] * 10


@pytest.mark.parametrize("skew", [timedelta(0), 5 * MINUTE, -5 * MINUTE], ids=str)
@pytest.mark.parametrize("tells_on_read", [True, False], ids=["told", "listed"])
async def test_a_fork_publishes_until_the_lease_ends_however_wrong_its_clock_is(
    skew: timedelta, *, tells_on_read: bool
) -> None:
    """A second before it does, and not when it has."""
    world = World()
    async with filled(world, tells_on_read=tells_on_read) as storage:
        async with process(storage, lease=HOUR) as (_, session):
            parcel = pickle.dumps(await session.fork())
        for wait, late in ((HOUR - timedelta(seconds=1), False), (HOUR, True)):
            world.wait(wait)
            with world.clock_wrong_by(skew):
                async with pickle.loads(parcel).attached(storage) as fork:
                    await write(fork, "a/c/1", CHUNK)
                    if late:
                        with pytest.raises(LeaseExpiredError, match="has expired"):
                            await fork.publish()
                    else:
                        assert await fork.publish()
            parcel = pickle.dumps(fork)


async def test_a_lease_that_only_its_forks_kept_alive_is_resumed(spec: int) -> None:
    """The process of the session died at once; what forks published is spared and comes back."""
    world = World()
    async with filled(world, spec) as storage:
        async with process(storage, lease=HOUR) as (_, session):
            await make_array(session, "b", (40,), (1,))
            parcel = pickle.dumps(await session.fork())
        async with pickle.loads(parcel).attached(storage) as fork:
            for step in range(5):
                world.wait(HOUR - MINUTE)
                await write(fork, f"b/c/{step}", CHUNK)
                await fork.publish()
        async with Repository.open(storage) as repository:
            await repository.garbage_collect(world.now)
            resumed = await repository.resume_session(session.session_id)
            await resumed.commit("resumed")
            reader = await repository.readonly_session("main")
            assert [await read(reader, f"b/c/{it}") for it in range(5)] == [CHUNK] * 5
            lost = await repository.writable_session("main", lease=HOUR)
            parcel = pickle.dumps(await lost.fork())
        async with pickle.loads(parcel).attached(storage) as fork:
            await write(fork, "a/c/1", CHUNK)
            world.wait(HOUR)
            with pytest.raises(LeaseExpiredError, match="has expired"):
                await fork.publish()
            world.wait(8 * DAY)
            async with Repository.open(storage) as repository:
                await repository.garbage_collect(world.now - DAY)
            assert not [it for it in await objects(storage) if it.startswith("leases/")]


@pytest.mark.parametrize("seed", range(3))
async def test_damaged_publications_are_format_errors_and_change_nothing(seed: int) -> None:
    """Any changed bit, any cut, and what cannot be; for the session, forks and who resumes."""
    chance, world = random.Random(seed), World()
    async with filled(world) as storage, process(storage) as (repository, session):
        one, two = await session.fork(), await session.fork()
        await write(one, "a/c/1", CHUNK)
        await write(one, "a/zarr.json", await read(one, "a/zarr.json") or b"")
        await make_array(one, "b", (4,), (1,))
        await one.publish()
        prefix = spill_prefix(session.session_id)
        (key,) = (it for it in await objects(storage) if it.startswith(prefix))
        data = bytes((await storage.get(key)).data)
        damages = [data[: chance.randrange(len(data))] for _ in range(5)]
        for _ in range(10):
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            damages.append(bytes(flipped))
        document = decode_document("publication", data, key)
        state = decode_fork(document["changes"])  # type: ignore[arg-type]
        lineage = state.lineage

        def forged(changes: ForkState | bytes | None = None, **more: Any) -> bytes:
            given = document["changes"] if changes is None else changes
            raw = encode_fork(given) if isinstance(given, ForkState) else given
            return encode_document("publication", {**document, "changes": raw, **more})

        base, mine = state.base_id, state.session_id
        (node,) = state.changes.new.values()
        damages += [
            forged(ForkState(bytes(12), base, ChangeSet(), lineage)),
            forged(ForkState(mine, SnapshotId.random(), ChangeSet(), lineage)),
            forged(ForkState(mine, base, ChangeSet(), Lineage(b"x" * 6))),
            forged(ForkState(mine, base, ChangeSet(updated={node.id: node}), lineage)),
            forged(ForkState(mine, base, ChangeSet(new={"/a": node}), lineage)),
            forged(b""),
            forged(number=1),
            forged(number=None),
            forged(stamp=0),
            forged(stamp=1 << 62),
            forged(stamp="now"),
            forged(serial=None),
            forged(digests=None),
            forged(digests=[1]),
            forged(digests=[[b"short", b""]]),
            forged(stamps=[[b"short", 1]]),
            forged(stamps=None),
            forged(seen=[[b"x", 1]]),
            forged(seen=[[b"x" * 6, -2]]),
            encode_document("spill", document),
        ]
        for damaged in damages:
            await storage.put(key, damaged)
            with pytest.raises((FormatError, MergeFailedError)) as refused:
                await session.refresh()
            with pytest.raises(type(refused.value)):
                await two.refresh()
            assert not session.has_uncommitted_changes
            assert not two.has_uncommitted_changes
        with pytest.raises(FormatError):
            await repository.resume_session(session.session_id)

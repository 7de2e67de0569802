"""Forks that publish to the lease of their session: who sees what, what counts, what clashes."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.engine.files.packing import Packing
from icechunk_async.errors import (
    ConflictError,
    InvalidInputError,
    LeaseExpiredError,
    LeaseLostError,
    MergeFailedError,
    RebaseFailedError,
    SessionStateError,
)
from icechunk_async.format.layout import spill_prefix
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import array_document, group_document, make_array, objects, read, write
from tests.unit.engine.changes.fork_cases import CLASHES, TOGETHER, steps
from tests.unit.engine.leases.lease_tools import CHUNK, HOUR, MINUTE, World, filled, process

if TYPE_CHECKING:
    from icechunk_async.conflicts import MergeClash
    from icechunk_async.session import AnySession, Session
    from icechunk_async.storage import RangeRequest, Retrieved

ONE, TWO = b"1" * 600, b"2" * 600


async def chunks(session: AnySession, *numbers: int) -> list[bytes | None]:
    """Read chunks of the array ``a``."""
    return [await read(session, f"a/c/{number}") for number in numbers]


def sent(fork: ForkSession) -> ForkSession:
    """Return the fork as it arrives in another process."""
    away: ForkSession = pickle.loads(pickle.dumps(fork))
    return away


async def test_what_a_fork_publishes_others_see_when_they_refresh(spec: int) -> None:
    """All of it at once, in the session and in other forks, and the commit has it, once."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one, two = await session.fork(), await session.fork()
        async with sent(one).attached(storage) as away:
            await write(away, "a/c/1", ONE)
            await write(away, "a/c/2", b"inline")
            await make_array(away, "b", (4,), (1,))
            await write(away, "b/c/0", ONE)
            assert await away.publish()
            assert not away.has_uncommitted_changes
            for other in (session, two):
                assert await chunks(other, 1) == [None]
                await other.refresh()
                assert await chunks(other, 0, 1, 2) == [CHUNK, ONE, b"inline"]
                assert await read(other, "b/c/0") == ONE
            await write(two, "b/c/1", TWO)  # in an array of another fork's
            await two.publish()
            assert await away.refresh()
            assert await read(away, "b/c/1") == TWO
        tip = await session.commit("cooperative")
        reader = await repository.readonly_session("main")
        assert await chunks(reader, 0, 1, 2) == [CHUNK, ONE, b"inline"]
        assert [await read(reader, f"b/c/{it}") for it in range(2)] == [ONE, TWO]
        line = [info.id async for info in repository.ancestry(branch="main")]
        assert (line[0], len(line)) == (tip, 3)
        log = await repository.diff(from_snapshot_id=session.snapshot_id, to_branch="main")
        assert not log.updated_chunks
        assert not [it for it in await objects(storage) if it.startswith("leases/spills/")]


async def test_publishing_costs_two_requests_and_refreshing_one_if_nothing_is_new(
    spec: int,
) -> None:
    """The object and a look at the lease; a listing. Only what is new is stored and read."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (_, session):
        await make_array(session, "big", (9000,), (1,))
        one, two = await session.fork(), await session.fork()
        for chunk in range(3000):
            await write(one, f"big/c/{chunk}", b"%d" % chunk)
        await one.publish()
        await two.refresh()
        await write(one, "big/c/5000", b"new")
        storage.forget()
        await one.publish()
        assert storage.requests == {"put": 1, "get": 1}
        storage.forget()
        assert not await one.publish()  # nothing is new: a look at the lease
        assert storage.requests == {"get": 1}
        prefix = spill_prefix(session.session_id)
        sizes = sorted(
            len(data)
            for key, data in (await objects(storage)).items()
            if key.startswith(prefix) and "-" in key
        )
        assert sizes[0] < 1200 < sizes[1]
        storage.forget()
        assert await two.refresh()
        assert storage.requests == {"list_prefix": 1, "get": 2}  # the lease, what is new
        storage.forget()
        assert not await two.refresh()
        assert storage.requests == {"list_prefix": 1}
        await session.refresh()
        storage.forget()
        await session.refresh()
        assert storage.requests == {"list_prefix": 1}
        storage.forget()
        await session.fork()  # others see all of the session already
        assert not [key for _, key in storage.log if key.startswith("leases/")]


async def test_the_first_publication_in_a_process_finds_out_how_old_the_lease_is(
    *, spec: int
) -> None:
    """One listing, since this storage does not tell the time; and renews it if it is old."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        parcel = pickle.dumps(await session.fork())
        away: ForkSession = pickle.loads(parcel)
        async with away.attached(storage):
            await write(away, "a/c/1", ONE)
            storage.forget()
            await away.publish()
            assert storage.requests == {"put": 1, "get": 1, "list_prefix": 1}
            before = (await repository.sessions())[0].heartbeat_at
            world.wait(2 * MINUTE)
            await write(away, "a/c/2", ONE)
            storage.forget()
            await away.publish()
            assert storage.requests == {"put": 2, "get": 1}
            renewed = (await repository.sessions())[0].heartbeat_at
            assert renewed - before == 2 * MINUTE


async def prepare(repository: Repository) -> None:
    """Make what the cases of forks begin with."""
    session = await repository.writable_session("main")
    await write(session, "a/zarr.json", array_document((10,), (1,)))
    for chunk in range(2):
        await write(session, f"a/c/{chunk}", bytes([chunk]))
    await write(session, "g/zarr.json", group_document())
    await session.commit("prepared")


@pytest.mark.parametrize("name", CLASHES)
async def test_two_publications_that_clash_are_refused_by_name(name: str) -> None:
    """By the session and by other forks, which stay unchanged; one can be given up."""
    first, second, clashes = CLASHES[name]
    expected = sorted((kind.name, path, coords) for kind, path, coords in clashes)
    world = World()
    async with filled(world) as storage, Repository.open(storage) as repository:
        await prepare(repository)
        session = await repository.writable_session("main", lease=True)
        one, two, other = [await session.fork() for _ in range(3)]
        await steps(one, first)
        await one.publish()
        await steps(two, second)
        with pytest.raises(MergeFailedError) as raised:  # before it is published
            await two.refresh()
        assert described(raised.value) == expected
        world.wait(MINUTE)
        await two.publish()
        for reader in (session, other):
            with pytest.raises(MergeFailedError) as raised:
                await reader.refresh()
            assert described(raised.value) == expected
            assert {it.fork_id for it in clashes_of(raised.value)} == {two.fork_id}
            assert two.fork_id in str(raised.value)
            assert not reader.has_uncommitted_changes
        with pytest.raises(MergeFailedError):
            await session.commit("both")
        assert await repository.lookup_branch("main") == session.snapshot_id
        session.discard_fork(two)
        with pytest.raises(InvalidInputError):
            session.discard_fork(two)
        await session.refresh()
        await other.refresh()
        with pytest.raises(SessionStateError, match="gave up fork"):
            await two.publish()
        assert session.unmerged_forks == (other.fork_id,)
        session.discard_fork(other)
        await session.commit("the first")
        reader = await repository.readonly_session("main")
        assert await contents(reader) == await contents(session)


def clashes_of(error: MergeFailedError) -> list[MergeClash]:
    """Return the clashes that an error reports."""
    clashes: Any = error.context["clashes"]
    return list(clashes)


def described(error: MergeFailedError) -> list[tuple[str, str, Any]]:
    """Return the clashes that an error reports, without their forks."""
    return sorted((it.kind.name, it.path, it.coords) for it in clashes_of(error))


async def contents(session: AnySession) -> dict[str, bytes | None]:
    """Read everything that a session sees."""
    return {key: await read(session, key) async for key in session.store.list()}


@pytest.mark.parametrize(
    "way",
    ["seen", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("unseen", "packed"))],
)
@pytest.mark.parametrize("name", TOGETHER)
async def test_what_goes_together_by_hand_goes_together_published(name: str, way: str) -> None:
    """The later publication counts, whether its fork had seen the earlier one or not."""
    first, second, expected = TOGETHER[name]
    world, packing = World(), Packing(4096, 1024) if way == "packed" else None
    async with filled(world) as storage, Repository.open(storage, packing=packing) as repository:
        await prepare(repository)
        session = await repository.writable_session("main", lease=True)
        one, two, third = [await session.fork() for _ in range(3)]
        await steps(one, first)
        await one.publish()
        world.wait(MINUTE)
        if len(name) % 2:
            await session.refresh()
        await steps(two, second)
        if way == "seen":
            await two.refresh()
            assert {key: await read(two, key) for key in expected} == expected
        await two.publish()
        for reader in (third, session, one):
            await reader.refresh()
            assert {key: await read(reader, key) for key in expected} == expected, reader
        await session.commit("all", allow_missing_forks=True)
        committed = await repository.readonly_session("main")
        assert {key: await read(committed, key) for key in expected} == expected


async def test_what_is_not_published_lies_above_what_is_read(spec: int) -> None:
    """In a fork and in the session; nobody else sees it, also after a spill."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one, two = await session.fork(), await session.fork()
        for fork, data in ((one, ONE), (two, TWO)):
            for chunk in (1, 2):
                await write(fork, f"a/c/{chunk}", data)
        await one.publish()
        await write(session, "a/c/1", CHUNK)
        await session.spill()  # others do not see it yet, so it is not published
        await two.refresh()
        assert await chunks(two, 1, 2) == [TWO, TWO]
        await one.refresh()
        assert await chunks(one, 1, 2) == [ONE, ONE]
        await session.refresh()
        assert await chunks(session, 1, 2) == [CHUNK, ONE]
        await one.refresh()
        assert await chunks(one, 1, 2) == [CHUNK, ONE]
        await two.refresh()
        assert await chunks(two, 1, 2) == [TWO, TWO]
        two.discard_changes()
        assert await chunks(two, 1, 2) == [CHUNK, ONE]
        await write(one, "a/c/1", ONE)  # with the session's in view
        await write(one, "a/c/3", ONE)
        await one.publish()
        await write(session, "a/c/3", CHUNK)  # later than the publication
        await session.commit("all", allow_missing_forks=True)
        reader = await repository.readonly_session("main")
        assert await chunks(reader, 1, 2, 3) == [ONE, ONE, CHUNK]


@pytest.mark.parametrize("hours", [-3, 3])
async def test_what_was_written_with_another_in_view_counts_whatever_the_clocks_say(
    hours: int,
) -> None:
    """A fork far behind or ahead; clocks decide only between two that did not know each other."""
    world = World()
    async with filled(world) as storage, process(storage) as (_, session):
        one, two, other = [await session.fork() for _ in range(3)]
        with world.clock_wrong_by(timedelta(hours=-hours)):
            await write(one, "a/c/1", ONE)
            await write(one, "a/c/2", ONE)
            await one.publish()
        with world.clock_wrong_by(timedelta(hours=hours)):
            await write(other, "a/c/2", CHUNK)  # it did not see the other
            await other.publish()
            await two.refresh()
            await write(two, "a/c/1", TWO)
            await two.publish()
        await session.refresh()
        raced = CHUNK if hours > 0 else ONE
        assert await chunks(session, 1, 2) == [TWO, raced]
        await one.refresh()
        assert await chunks(one, 1, 2) == [TWO, raced]


async def test_a_fork_discarded_while_its_session_refreshes_stays_out(spec: int) -> None:
    """Its publication is not taken in any more, those of others are."""
    world = World()
    async with filled(world, spec) as storage:
        reading, go_on = anyio.Event(), anyio.Event()

        class Slow(LatencyStorage):
            async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
                if one_name in key:
                    reading.set()
                    await go_on.wait()
                return await super().get(key, byte_range)

        one_name = "no fork has this id"
        async with process(Slow(storage, seconds=0)) as (_, session):
            one, two = await session.fork(), await session.fork()
            one_name = one.fork_id
            for fork, number in ((one, 1), (two, 2)):
                async with sent(fork).attached(storage) as away:
                    await write(away, f"a/c/{number}", ONE)
                    await away.publish()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.refresh)
                await reading.wait()
                session.discard_fork(one)
                go_on.set()
            assert await chunks(session, 1, 2) == [None, ONE]
            await session.refresh()
            assert await chunks(session, 1, 2) == [None, ONE]
            await session.commit("without the first")


async def test_a_fork_that_published_need_not_be_merged(spec: int) -> None:
    """It counts as merged, also if it changed nothing; forks that it merged do as well."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one, idle, missing = [await session.fork() for _ in range(3)]
        inner, lost = await one.fork(), await one.fork()
        await write(inner, "a/c/1", ONE)
        await one.merge(inner)
        await one.publish()
        await idle.publish()
        with pytest.raises(SessionStateError) as refused:
            await session.commit("too early")
        missed = refused.value.context["forks"]
        assert missed == tuple(sorted([missing.fork_id, lost.fork_id]))
        await missing.publish()
        session.discard_fork(lost)
        await session.commit("all")
        assert await chunks(await repository.readonly_session("main"), 1) == [ONE]


async def test_what_was_published_and_merged_by_hand_is_applied_once(spec: int) -> None:
    """The merge brings what was not published, also where it began at changes of the session."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        await make_array(session, "b", (4,), (1,))
        one, two = await session.fork(), await session.fork()
        before = one.to_bytes()
        await write(one, "b/c/0", ONE)
        stale = one.to_bytes()
        await one.publish()
        await two.refresh()
        await write(two, "b/c/0", TWO)
        await two.publish()
        await write(one, "b/c/1", ONE)
        back = sent(one)
        await session.merge(back)
        assert [await read(session, f"b/c/{it}") for it in range(2)] == [TWO, ONE]
        with pytest.raises(SessionStateError, match="published more than this copy"):
            await session.merge(ForkSession.from_bytes(stale))
        await session.merge(ForkSession.from_bytes(before))  # it brings nothing
        await one.publish()  # what was merged: the later publication counts, and it is the same
        await session.commit("all")
        reader = await repository.readonly_session("main")
        assert [await read(reader, f"b/c/{it}") for it in range(2)] == [TWO, ONE]


async def test_a_fork_that_published_is_merged_into_its_session_only() -> None:
    """Other forks, and sessions that begin anew with forks, refuse and say where it belongs."""
    world = World()
    async with filled(world) as storage, process(storage) as (repository, session):
        one, two, reads = [await session.fork() for _ in range(3)]
        await write(one, "a/c/1", ONE)
        await one.publish()
        await reads.refresh()
        await write(two, "a/c/2", TWO)
        for fork in (one, reads):
            with pytest.raises(SessionStateError, match="into its session"):
                await two.merge(fork)
            with pytest.raises(SessionStateError, match="into its session"):
                await sent(two).merge(sent(fork))
        anew = await repository.writable_session("main")
        with pytest.raises(SessionStateError, match="resume_session"):
            await anew.resume(two, one)
        await anew.resume(reads)  # with all that it sees
        assert await chunks(anew, 1) == [ONE]
        session.abandon()


async def test_forks_of_forks_publish_if_others_know_what_they_began_with() -> None:
    """Else they are merged into the fork they came from."""
    world = World()
    async with filled(world) as storage, process(storage) as (_, session):
        one = await session.fork()
        clean = await one.fork()
        await write(one, "a/c/1", ONE)
        dirty = await one.fork()
        await write(dirty, "a/c/2", ONE)
        for doing in (dirty.publish, dirty.refresh):
            with pytest.raises(SessionStateError, match="fork of a fork"):
                await doing()
        await one.merge(dirty)
        await one.publish()
        later = await one.fork()
        await write(later, "a/c/1", TWO)
        await later.publish()
        await write(clean, "a/c/3", TWO)
        await clean.publish()
        await session.refresh()
        assert await chunks(session, 1, 2, 3) == [TWO, ONE, TWO]
        plain = await session.fork()
        assert session.unmerged_forks == (plain.fork_id,)


async def test_without_a_lease_nobody_publishes(spec: int) -> None:
    """The message says how to begin."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:
        session = await repository.writable_session("main")
        fork = await session.fork()
        for doing in (fork.publish, fork.refresh, session.refresh):
            with pytest.raises(SessionStateError, match="lease=True"):
                await doing()
        with pytest.raises(SessionStateError, match="attached"):
            await sent(fork).publish()


async def test_a_fork_travels_with_what_it_sees_and_what_it_has_yet_to_publish(spec: int) -> None:
    """Also with chunks that it set to what they were already."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (_, session):
        one, two = await session.fork(), await session.fork()
        await write(one, "a/c/1", b"1")
        await make_array(one, "b", (4,), (1,))
        await write(one, "b/c/0", ONE)
        await one.publish()
        await two.refresh()
        await write(two, "b/c/1", TWO)
        await write(two, "a/c/1", b"1")  # again
        await write(two, "b/zarr.json", array_document((4,), (1,), attributes={"by": 2}))
        await write(one, "a/c/1", b"not seen")
        await one.publish()
        data = two.to_bytes()
        assert ForkSession.from_bytes(data).to_bytes() == data
        away = sent(sent(two))
        assert away.has_uncommitted_changes
        async with away.attached(storage):
            assert away.to_bytes() == data
            assert await contents(away) == await contents(two)
            world.wait(MINUTE)
            await away.publish()
            assert not away.has_uncommitted_changes
        assert not sent(away).has_uncommitted_changes
        await session.refresh()
        assert [await read(session, f"b/c/{it}") for it in range(2)] == [ONE, TWO]
        assert await read(session, "a/c/1") == b"1"
        assert b'"by": 2' in (await read(session, "b/zarr.json") or b"")


async def test_of_two_copies_of_a_fork_the_second_to_publish_is_told(spec: int) -> None:
    """It takes in what the first published, and continues from there; a task that is done again."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (_, session):
        parcel = pickle.dumps(await session.fork())
        first, second, third = (pickle.loads(parcel) for _ in range(3))
        async with first.attached(storage), second.attached(storage):
            await write(first, "a/c/1", ONE)
            await write(first, "a/c/2", ONE)
            await first.publish()
            await write(second, "a/c/1", TWO)
            for _ in range(2):
                with pytest.raises(SessionStateError, match="Another copy of fork"):
                    await second.publish()
            await second.refresh()
            assert await chunks(second, 1, 2) == [TWO, ONE]
            await second.publish()
            await write(first, "a/c/3", ONE)
            with pytest.raises(SessionStateError, match="Another copy of fork"):
                await first.publish()
        await session.refresh()  # it has the publications now, whose objects are gone
        assert await chunks(session, 1, 2) == [TWO, ONE]
        async with third.attached(storage):
            await write(third, "a/c/4", ONE)
            for _ in range(2):
                with pytest.raises(SessionStateError, match="Another copy of fork"):
                    await third.publish()
            await third.refresh()
            await write(third, "a/c/4", CHUNK)
            await third.publish()
        await session.commit("copies")
        assert await chunks(session, 1, 2, 3, 4) == [TWO, ONE, None, CHUNK]


async def test_publishing_to_a_session_that_is_over_says_why_and_loses_nothing(spec: int) -> None:
    """Committed, ended, expired, or continued by somebody else."""
    world = World()
    async with filled(world, spec) as storage, Repository.open(storage) as repository:

        async def begun() -> tuple[Session, ForkSession]:
            session = await repository.writable_session("main", lease=HOUR)
            fork = sent(await session.fork())
            return session, fork

        async def refused(fork: ForkSession, error: type[Exception], match: str) -> None:
            async with fork.attached(storage):
                await write(fork, "a/c/1", ONE)
                for _ in range(2):
                    with pytest.raises(error, match=match):
                        await fork.publish()
                if error is not LeaseExpiredError:
                    with pytest.raises(error, match=match):
                        await fork.refresh()
                assert await chunks(fork, 1) == [ONE]
            assert sent(fork).has_uncommitted_changes
            assert not [it for it in await objects(storage) if "-" in it.split("/")[-1]]

        session, fork = await begun()
        tip = await session.commit("done", allow_empty=True, allow_missing_forks=True)
        await refused(fork, LeaseLostError, f"was committed as {tip}")

        session, fork = await begun()
        await repository.end_session(session.session_id)
        await refused(fork, LeaseLostError, "was ended")

        session, fork = await begun()
        world.wait(HOUR)
        await refused(fork, LeaseExpiredError, "has expired")

        session, fork = await begun()
        resumed = await repository.resume_session(session.session_id, owner="the second")
        await refused(fork, LeaseLostError, "'the second' continues session")
        await resumed.merge(fork)  # as the message says
        assert await chunks(resumed, 1) == [ONE]
        await resumed.commit("with the fork")

        session, fork = await begun()
        other = await repository.writable_session("main")
        await make_array(other, "other", (1,), (1,))
        await other.commit("other")
        await session.rebase(ConflictDetector())
        await session.spill()
        await refused(fork, SessionStateError, "was rebased")

        session, fork = await begun()
        await write(session, "a/c/5", ONE)
        session.discard_changes()
        await session.spill()
        await refused(fork, SessionStateError, "were discarded")


async def test_resuming_brings_what_forks_had_published(spec: int) -> None:
    """Whether the session had taken it in or not, spilled it or not; each once."""
    world = World()
    async with filled(world, spec) as storage:
        async with process(storage) as (_, session):
            one, two = await session.fork(), await session.fork()
            await write(one, "a/c/1", ONE)
            await one.publish()
            await session.refresh()
            await write(session, "a/c/2", CHUNK)
            await session.spill()
            await two.refresh()
            await write(two, "a/c/1", TWO)
            await write(two, "a/c/2", TWO)  # the session's is newer, and nobody sees it yet
            await two.publish()
        async with Repository.open(storage) as repository:
            resumed = await repository.resume_session(session.session_id)
            assert await chunks(resumed, 1, 2) == [TWO, CHUNK]
            resumed = await repository.resume_session(session.session_id)
            assert await chunks(resumed, 1, 2) == [TWO, CHUNK]
            fork = await resumed.fork()
            await write(two, "a/c/9", TWO)
            with pytest.raises(LeaseLostError):
                await two.publish()
            await resumed.merge(two)
            await write(fork, "a/c/3", ONE)
            await fork.publish()
            await resumed.commit("resumed")
            reader = await repository.readonly_session("main")
            assert await chunks(reader, 1, 2, 3, 9) == [TWO, CHUNK, ONE, TWO]


async def test_a_session_whose_forks_clash_is_resumed_without_and_names_them(spec: int) -> None:
    """The resume neither fails at nor forgets publications that clash."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one, two = await session.fork(), await session.fork()
        for fork in (one, two):
            world.wait(MINUTE)
            await make_array(fork, "n", (4,), (1,))
            await fork.publish()
        resumed = await repository.resume_session(session.session_id)
        for _ in range(2):
            with pytest.raises(MergeFailedError, match="created by both"):
                await resumed.refresh()
            await resumed.spill()
        resumed.discard_fork(two.fork_id)
        await resumed.commit("one")
        assert await read(await repository.readonly_session("main"), "n/zarr.json")


async def test_a_commit_that_fails_lets_forks_go_on(spec: int) -> None:
    """A lost race takes in what was published; the next commit has that and what comes later."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one = await session.fork()
        await write(one, "a/c/1", ONE)
        await one.publish()
        await write(session, "a/c/5", CHUNK)
        other = await repository.writable_session("main")
        await write(other, "a/c/7", TWO)
        await other.commit("other")
        with pytest.raises(ConflictError):
            await session.commit("lost")
        await write(one, "a/c/2", ONE)
        await one.publish()
        assert await one.refresh()
        assert await chunks(one, 1, 2, 5) == [ONE, ONE, None]  # the session did not refresh
        await session.commit("won", rebase_with=ConflictDetector())
        reader = await repository.readonly_session("main")
        assert await chunks(reader, 1, 2, 5, 7) == [ONE, ONE, CHUNK, TWO]


async def test_a_rebase_takes_in_what_was_published_and_ends_the_forks(spec: int) -> None:
    """Also one that fails halfway, as part of a commit; new forks continue."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one = await session.fork()
        await write(one, "a/c/1", ONE)
        await one.publish()
        for chunk in (3, 1):
            other = await repository.writable_session("main")
            await write(other, f"a/c/{chunk}", TWO)
            await other.commit("other")
        with pytest.raises(RebaseFailedError):  # it stands on the first of the two
            await session.commit("clashes", rebase_with=ConflictDetector())
        await write(one, "a/c/2", ONE)
        with pytest.raises(SessionStateError, match="was rebased"):
            await one.publish()
        two = await session.fork()
        await write(two, "a/c/4", TWO)
        await two.publish()
        await session.refresh()
        assert await chunks(session, 1, 3, 4) == [ONE, TWO, TWO]
        resumed = await repository.resume_session(session.session_id)
        assert await chunks(resumed, 1, 3, 4) == [ONE, TWO, TWO]


async def test_discarding_forgets_what_was_published_and_ends_the_forks(spec: int) -> None:
    """Of the session: all; of a fork: what it did not publish."""
    world = World()
    async with filled(world, spec) as storage, process(storage) as (repository, session):
        one, two = await session.fork(), await session.fork()
        await write(one, "a/c/1", ONE)
        await one.publish()
        await write(one, "a/c/2", ONE)
        one.discard_changes()
        assert await chunks(one, 1, 2) == [ONE, None]
        assert not one.has_uncommitted_changes
        await session.refresh()
        session.discard_changes()
        await write(two, "a/c/3", TWO)
        await two.publish()  # the lease does not say so yet
        await session.refresh()
        assert await chunks(session, 1, 3) == [None, None]
        with pytest.raises(SessionStateError, match="were discarded"):
            await one.publish()
        new = await session.fork()
        await write(new, "a/c/4", TWO)
        await new.publish()
        await session.commit("the new one", allow_missing_forks=True)
        reader = await repository.readonly_session("main")
        assert await chunks(reader, 1, 3, 4) == [None, None, TWO]


async def test_segments_stay_few_and_what_was_taken_in_is_deleted() -> None:
    """However often forks publish and the session refreshes."""
    world = World()
    async with filled(world) as storage, process(storage) as (_, session):
        fork, watcher = await session.fork(), await session.fork()
        for step in range(140):
            await write(fork, f"a/c/{step % 100}", b"%d" % step)
            await fork.publish()
            if step % 2:
                await session.refresh()
                names = [it for it in await objects(storage) if it.startswith("leases/spills/")]
                assert len(names) <= 65
            if step % 40 == 0:
                await watcher.refresh()
                assert await chunks(watcher, step % 100) == [b"%d" % step]
        await watcher.refresh()
        assert await chunks(watcher, 99, 39) == [b"99", b"139"]

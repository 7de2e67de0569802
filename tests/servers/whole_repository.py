"""Whole repositories on a server: the tests that every backend with a server has to pass.

A test file gives one fixture, ``server``, and names the classes it wants::

    class TestS3Repository(WholeRepository):
        @pytest.fixture
        def server(self, ministack: Ministack) -> Server: ...

    class TestS3Histories(FaultyHistories): ...     # the same fixture
    class TestS3ThroughFaults(ConformanceThroughFaults): ...

What differs between servers is data: ``busy`` and ``failed`` are the answers with which the
service turns requests away or fails, ``no_restart`` why its server cannot be restarted, ``faults``
what goes wrong on the network.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest

from icechunk_async import Repository, SnapshotId
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.commit.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.errors import ConflictError, OutcomeUnknownError, RebaseFailedError
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from datetime import datetime

    from icechunk_async.storage import Storage

__all__ = ["BothSpecs", "Location", "NewestSpec", "Server", "WholeRepository", "opened"]

WRITERS = 12
"""On one branch at once: the time that races take grows with the square of it."""


@dataclass(frozen=True, slots=True)
class Location:
    """An empty place on a server, as a caller of the library gives it."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Server(Protocol):
    """A server on loopback that a test may use."""

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1; the same after a restart."""
        ...

    def location(self, endpoint: str) -> Location:
        """Return a fresh, empty place on it, with options that reach it through ``endpoint``.

        ``endpoint`` is the server's own address, or that of a proxy: ``http://127.0.0.1:1234``.
        """
        ...

    async def restart(self) -> None:
        """End the server in the middle of what it does, and start it again with its objects.

        Returns when it answers again. Not called where ``no_restart`` of the tests says why.
        """
        ...


@asynccontextmanager
async def opened(location: Location) -> AsyncIterator[Storage]:
    """Open a location; a repository on it retries by itself."""
    async with open_storage(location.url, **location.options) as storage:
        yield storage


class BothSpecs:
    """Each test runs on both versions of the format, in a fresh place."""

    no_restart: ClassVar[str | None] = None
    """Why the server cannot be restarted in a test; None if it can."""

    @pytest.fixture
    def server(self) -> Server:
        """Return the server; test files override this."""
        raise NotImplementedError

    @pytest.fixture
    def location(self, server: Server) -> Location:
        """Return a fresh place on it."""
        return server.location(f"http://127.0.0.1:{server.port}")

    @pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
    def spec(self, request: pytest.FixtureRequest) -> int:
        """Return the version of the format."""
        version: int = request.param
        return version


class NewestSpec(BothSpecs):
    """Tests on a further service run on the newest version of the format, and thoroughly on both.

    What the versions ask of a service is in the shared suite; that both work on one is shown
    where tests of repositories run on either.
    """

    @pytest.fixture(params=[pytest.param(1, marks=pytest.mark.thorough), 2], ids=["spec1", "spec2"])
    def spec(self, request: pytest.FixtureRequest) -> int:
        """Return the version of the format."""
        version: int = request.param
        return version


class WholeRepository(BothSpecs):
    """Common operations of a repository, on a server without faults."""

    async def test_what_was_committed_is_read_at_any_time(
        self, location: Location, spec: int
    ) -> None:
        """Create, commit, open again, read the present and the past."""
        async with _created(location, spec, chunks=2) as repository:
            ids: list[SnapshotId] = []
            times: list[datetime] = []
            for number in range(3):
                session = await repository.writable_session("main")
                await write(session, "a/c/0", b"state %d" % number * 100)
                ids.append(await session.commit(f"state {number}"))
                times.append((await repository.lookup_snapshot(ids[-1])).written_at)
            await repository.create_tag("v1", ids[1])
        options = dict(location.options)
        async with Repository.open(location.url, storage_options=options) as repository:
            assert repository.spec_version == spec
            for number, (snapshot_id, moment) in enumerate(zip(ids, times, strict=True)):
                expected = b"state %d" % number * 100
                by_id = await repository.readonly_session(snapshot_id=snapshot_id)
                by_time = await repository.readonly_session("main", as_of=moment)
                assert await read(by_id, "a/c/0") == expected
                assert await read(by_time, "a/c/0") == expected
            tagged = await repository.readonly_session(tag="v1")
            assert await read(tagged, "a/c/0") == b"state 1" * 100
            assert await Repository.exists(location.url, storage_options=options)

    async def test_writers_at_once_all_land_in_one_line(
        self, location: Location, spec: int
    ) -> None:
        """Each with a separate handle and separate chunks, by rebasing."""
        async with _created(location, spec, chunks=WRITERS):
            pass

        async def commit(storage: Storage, chunk: int) -> None:
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                await write(session, f"a/c/{chunk}", b"%d" % chunk * 300)
                await session.commit(f"chunk {chunk}", rebase_with=ConflictDetector())

        async with opened(location) as storage:
            await bounded_map(lambda it: commit(storage, it), range(WRITERS), limit=WRITERS)
            async with Repository.open(storage) as repository:
                infos = [info async for info in repository.ancestry(branch="main")]
                names = [f"chunk {chunk}" for chunk in range(WRITERS)]
                assert sorted(info.message for info in infos[:-2]) == sorted(names)
                assert [it.parent_id for it in infos[:-1]] == [it.id for it in infos[1:]]
                reader = await repository.readonly_session("main")
                for chunk in range(WRITERS):
                    assert await read(reader, f"a/c/{chunk}") == b"%d" % chunk * 300

    async def test_one_of_two_writers_of_a_chunk_is_told(
        self, location: Location, spec: int
    ) -> None:
        """The later commit is refused, its changes kept; a solver may decide that it wins."""
        async with _created(location, spec, chunks=2) as repository:
            first = await repository.writable_session("main")
            second = await repository.writable_session("main")
            await write(first, "a/c/0", b"first" * 200)
            await write(second, "a/c/0", b"second" * 200)
            landed = await first.commit("first")
            with pytest.raises(ConflictError):
                await second.commit("second")
            with pytest.raises(RebaseFailedError):
                await second.commit("second", rebase_with=ConflictDetector())
            assert await repository.lookup_branch("main") == landed
            await second.commit("second", rebase_with=BasicConflictSolver())
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0") == b"second" * 200
            messages = [info.message async for info in repository.ancestry(branch="main")]
            assert messages[:2] == ["second", "first"]

    async def test_refs_are_listed_and_deleted(self, location: Location, spec: int) -> None:
        """Every branch and tag, more than a few; objects come in the order of their bytes."""
        branches = {f"branch-{number:02}" for number in range(12)}
        tags = {f"v{major}.{minor}" for major in range(3) for minor in range(4)}
        async with _created(location, spec, chunks=1) as repository:
            tip = await repository.lookup_branch("main")
            for name in sorted(branches):
                await repository.create_branch(name, tip)
            for name in sorted(tags):
                await repository.create_tag(name, tip)
            await repository.delete_branch("branch-03")
            await repository.delete_tag("v1.1")
        async with opened(location) as storage:
            async with Repository.open(storage) as repository:
                assert await repository.list_branches() == branches - {"branch-03"} | {"main"}
                assert await repository.list_tags() == tags - {"v1.1"}
            keys = list(await objects(storage))
            assert keys == sorted(keys, key=str.encode)

    async def test_large_chunks_and_many_small_ones_read_back(
        self, location: Location, spec: int
    ) -> None:
        """20 MB in one object, and hundreds of objects in one commit."""
        large = bytes(range(256)) * (20 * 1024 * 1024 // 256)
        async with _created(location, spec, chunks=1) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "large", (len(large),), (len(large),))
            await make_array(session, "small", (600 * 300,), (600,))
            await write(session, "large/c/0", large)
            await bounded_map(
                lambda it: write(session, f"small/c/{it}", b"%05d" % it * 120), range(300), limit=32
            )
            await session.commit("much")
        async with Repository.open(
            location.url, storage_options=dict(location.options)
        ) as repository:
            reader = await repository.readonly_session("main")
            assert await read(reader, "large/c/0") == large
            found = await bounded_map(
                lambda it: read(reader, f"small/c/{it}"), range(300), limit=32
            )
            assert found == [b"%05d" % it * 120 for it in range(300)]

    async def test_discarded_changes_leave_no_trace(self, location: Location, spec: int) -> None:
        """In the session, on the branch, for the next commit."""
        async with _created(location, spec, chunks=2) as repository:
            tip = await repository.lookup_branch("main")
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"unwanted" * 100)
            session.discard_changes()
            assert await read(session, "a/c/0") is None
            assert await repository.lookup_branch("main") == tip
            await write(session, "a/c/1", b"wanted" * 100)
            await session.commit("wanted")
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0") is None
            assert await read(reader, "a/c/1") == b"wanted" * 100

    @pytest.mark.sampled
    @pytest.mark.parametrize("moment", ["chunk", "snapshot", "reference"])
    async def test_a_commit_survives_a_restart_of_the_server(
        self, server: Server, location: Location, spec: int, moment: str
    ) -> None:
        """It lands once or raises; the repository is whole and usable."""
        if self.no_restart is not None:
            pytest.skip(f"the server cannot be restarted: {self.no_restart}")
        async with _created(location, spec, chunks=4) as repository:
            before = await repository.lookup_branch("main")
        async with open_storage(location.url, **location.options) as plain:
            storage = _Restarting(plain, moment, server.restart)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                for chunk in range(3):
                    await write(session, f"a/c/{chunk}", b"through" * 200)
                told = None
                with suppress(OutcomeUnknownError):
                    told = await session.commit("through a restart")
                assert storage.restarts == 1
        async with opened(location) as storage_after, Repository.open(storage_after) as repository:
            infos = [info async for info in repository.ancestry(branch="main")]
            landed = [info.id for info in infos if info.message == "through a restart"]
            assert landed == [told] if told is not None else len(landed) <= 1
            # The history continues where it was: nothing else came in, and nothing twice.
            assert infos[len(landed)].id == before
            session = await repository.writable_session("main")
            await write(session, "a/c/3", b"after" * 200)
            await session.commit("after")
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0") == (b"through" * 200 if landed else None)


@asynccontextmanager
async def _created(location: Location, spec: int, *, chunks: int) -> AsyncIterator[Repository]:
    """Create a repository with an array of chunks of one kilobyte and more.

    The service is not tried beforehand: each place would be, and the suite says more about it.
    """
    async with AsyncExitStack() as stack:
        repository = await stack.enter_async_context(
            Repository.create(
                location.url,
                spec_version=spec,
                storage_options=dict(location.options),
                probe=False,
            )
        )
        session = await repository.writable_session("main")
        await make_array(session, "a", (chunks,), (1,))
        await session.commit("array")
        yield repository


class _Restarting(WrappedStorage):
    """Restarts the server before it is asked to write a certain kind of object, once."""

    def __init__(
        self, storage: Storage, moment: str, restart: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(storage)
        self._prefixes = {
            "chunk": ("chunks/",),
            "snapshot": ("snapshots/",),
            "reference": ("repo", "refs/"),
        }[moment]
        self._restart = restart
        self.restarts = 0

    async def before(self, operation: str, key: str) -> None:
        """Restart, while the other requests of the commit are under way."""
        if operation == "put" and key.startswith(self._prefixes) and not self.restarts:
            self.restarts += 1
            await self._restart()

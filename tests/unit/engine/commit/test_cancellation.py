"""Cancelling every operation at every await: nothing half-done, nothing left running."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.errors import RepositoryNotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async import Session
    from icechunk_async.storage import Storage

CHUNK = b"x" * 600
_TURNS_AFTER = 4


class SlowStorage(WrappedStorage):
    """Takes a turn of the event loop before each request is carried out, and some after.

    Commits differ in a wait or two, by what is in memory; with one turn the last request of none
    might be cancelled.
    """

    async def before(self, operation: str, key: str) -> None:
        """Be on the way there."""
        await asyncio.sleep(0)

    async def after(self, operation: str, key: str) -> None:
        """Be on the way back: what was asked for is done."""
        for _ in range(_TURNS_AFTER):
            await asyncio.sleep(0)


@pytest.fixture
async def slow() -> AsyncIterator[Storage]:
    """Return an empty storage."""
    async with open_storage(memory_url()) as plain:
        yield SlowStorage(plain)


def _nothing_runs() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_commit_landed_or_did_not(spec: int, slow: Storage) -> None:
    """Whenever it is cancelled: the branch is whole, and committing again settles the matter."""
    async with Repository.create(slow, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1000,), (1,))
        await session.commit("array")
        sessions: dict[int, Session] = {}

        async def begin(attempt: int) -> None:
            session = sessions[attempt] = await repository.writable_session("main")
            await write(session, f"a/c/{attempt}", CHUNK)
            await session.commit(f"chunk {attempt}", rebase_with=ConflictDetector())

        landed = 0
        async for _ in at_every_wait(begin):
            assert _nothing_runs()
            messages = [info.message async for info in repository.ancestry(branch="main")]
            assert len(set(messages)) == len(messages)
            if not sessions:
                continue
            attempt, session = max(sessions.items())
            there = f"chunk {attempt}" in messages
            landed += there
            if session.read_only:
                assert there
            elif session.has_uncommitted_changes:
                await session.commit(f"chunk {attempt}", rebase_with=ConflictDetector())
                messages = [info.message async for info in repository.ancestry(branch="main")]
                assert messages.count(f"chunk {attempt}") == 1
                reader = await repository.readonly_session("main")
                assert await read(reader, f"a/c/{attempt}") == CHUNK
        assert landed >= 1  # some were cancelled only after they had landed
        assert len(sessions) > 3
        assert max(sessions.items())[1].read_only  # the last was not cancelled


async def test_a_cancelled_creation_is_complete_or_absent(spec: int) -> None:
    """Afterwards the repository can be opened, or does not exist and can be created."""
    urls = [memory_url()]

    async def begin(attempt: int) -> None:
        del attempt
        urls.append(memory_url())
        async with (
            open_storage(urls[-1]) as plain,
            Repository.create(SlowStorage(plain), spec_version=spec),
        ):
            pass

    async for _ in at_every_wait(begin):
        assert _nothing_runs()
        try:
            async with Repository.open(urls[-1]) as repository:
                assert await repository.list_branches() == {"main"}
        except RepositoryNotFoundError:
            async with Repository.create(
                urls[-1], spec_version=spec, check_clean_root=False
            ) as repository:
                assert await repository.list_branches() == {"main"}


async def test_a_cancelled_write_leaves_the_chunk_as_it_was(spec: int, slow: Storage) -> None:
    """The session holds the old value or the new one, and still works."""
    async with Repository.create(slow, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1,), (1,))
        await write(session, "a/c/0", b"old")
        async for _ in at_every_wait(lambda _: write(session, "a/c/0", CHUNK)):
            assert _nothing_runs()
            assert await read(session, "a/c/0") == b"old"
        assert await read(session, "a/c/0") == CHUNK


async def test_cancelled_reads_have_no_effect(spec: int, slow: Storage) -> None:
    """Another reader of the same manifest is not disturbed, and nothing stays behind."""
    async with Repository.create(slow, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1000,), (1,))
        await write(session, "a/c/1", CHUNK)
        await session.commit("chunk")
        before = await objects(slow)
    url = slow.description.url

    async def begin(attempt: int) -> None:
        del attempt
        async with (
            open_storage(url) as plain,
            Repository.open(SlowStorage(plain)) as repository,
        ):
            reader = await repository.readonly_session("main")
            other = asyncio.ensure_future(read(reader, "a/c/1"))
            try:
                assert await read(reader, "a/c/1") == CHUNK
            finally:
                assert await other == CHUNK

    async for _ in at_every_wait(begin):
        assert _nothing_runs()
    assert await objects(slow) == before


async def test_cancelled_changes_of_refs_happened_or_did_not(spec: int, slow: Storage) -> None:
    """The branch exists or it does not. The repository still works."""
    async with Repository.create(slow, spec_version=spec) as repository:
        tip = await repository.lookup_branch("main")
        tried: list[str] = []

        async def begin(attempt: int) -> None:
            tried.append(f"b{attempt}")
            await repository.create_branch(f"b{attempt}", tip)

        async for _ in at_every_wait(begin):
            assert _nothing_runs()
            branches = await repository.list_branches()
            assert branches <= {"main", *tried}
        assert tried[-1] in await repository.list_branches()

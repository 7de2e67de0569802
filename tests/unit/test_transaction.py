"""Transactions as blocks: all of it, or nothing; and commits that must end in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    NothingToCommitError,
    OutcomeUnknownError,
    ReadOnlyError,
    StorageUnavailableError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from icechunk_async import Session
    from icechunk_async.storage import Data, Expected, Version


async def history(repository: Repository) -> list[str]:
    """Return the messages of the main branch, newest first."""
    return [info.message async for info in repository.ancestry(branch="main")]


async def test_transaction_block_is_one_commit(filled: Repository) -> None:
    """The changes are committed at the end, with message and metadata."""
    async with filled.transaction("main", message="both", metadata={"by": "me"}) as store:
        for chunk in (2, 3):
            await write(store.session, f"a/c/{chunk}", b"%d" % chunk)
        assert await history(filled) == ["filled", "Repository initialized"]
    newest = await anext(aiter(filled.ancestry(branch="main")))
    assert (newest.message, newest.metadata) == ("both", {"by": "me"})
    assert store.session.snapshot_id == newest.id
    assert store.read_only
    assert await read(await filled.readonly_session("main"), "a/c/3") == b"3"


async def fail(repository: Repository) -> None:
    """Fail within a transaction."""
    async with repository.transaction("main", message="failed") as store:
        await write(store.session, "a/c/2", b"2")
        raise ZeroDivisionError


async def test_failed_transaction_block_commits_nothing(filled: Repository) -> None:
    """The error leaves the block unchanged. An empty block or a missing branch commits nothing."""
    with pytest.raises(ZeroDivisionError):
        await fail(filled)
    with pytest.raises(NothingToCommitError):
        async with filled.transaction("main", message="empty"):
            pass
    with pytest.raises(BranchNotFoundError):
        async with filled.transaction("none", message="none"):
            pytest.fail("the block was entered")
    assert await history(filled) == ["filled", "Repository initialized"]


async def test_cancelled_transaction_block_commits_all_or_nothing(
    filled: Repository, spec: int
) -> None:
    """After a cancellation at any point the branch has all of it or nothing."""
    waits = 0
    async with Repository.open(LatencyStorage(filled.storage, seconds=0)) as waiting:
        assert waiting.spec_version == spec

        async def start(n: int) -> None:
            async with waiting.transaction("main", message=f"run {n}") as store:
                for chunk in (2, 3):
                    await write(store.session, f"a/c/{chunk}", b"%d" % n * 600)

        async for n in at_every_wait(start):
            waits = n
            reader = await filled.readonly_session("main")
            values = [await read(reader, f"a/c/{chunk}") for chunk in (2, 3)]
            assert values[0] == values[1]
            landed = (await history(filled))[0]
            assert values[0] == (None if landed == "filled" else landed[4:].encode() * 600)
    assert waits > 3  # requests that follow one another


async def test_lost_race_keeps_the_changes(filled: Repository) -> None:
    """Without a solver the commit is refused, and the session has what was written."""
    transaction = filled.transaction("main", message="late")
    store = await transaction.__aenter__()
    await write(store.session, "a/c/2", b"late")
    async with filled.transaction("main", message="first") as other:
        await write(other.session, "a/c/3", b"first")
    with pytest.raises(ConflictError):
        await transaction.__aexit__(None, None, None)
    assert await history(filled) == ["first", "filled", "Repository initialized"]
    await store.session.commit("late", rebase_with=ConflictDetector())
    async with filled.transaction("main", message="x", rebase_with=BasicConflictSolver()) as store:
        await write(store.session, "a/c/2", b"later")
        async with filled.transaction("main", message="between") as other:
            await write(other.session, "a/c/2", b"between")
    assert (await history(filled))[:3] == ["x", "between", "late"]
    newest = await anext(aiter(filled.ancestry(branch="main")))
    assert newest.metadata == {"__icechunk": {"rebase_attempts": 1}}


class Slow(LatencyStorage):
    """Replies at once, until a test makes some requests slow."""

    def slow(self, operation: str, key: str) -> bool:
        """Return whether a request, or the reply to a write, takes an hour."""
        del operation, key
        return False

    async def before(self, operation: str, key: str) -> None:
        """Wait for an hour where it is told to."""
        await super().before(operation, key)
        if self.slow(operation, key):
            await asyncio.sleep(3600)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write, and be slow to say so."""
        version = await super().put(key, data, if_version=if_version)
        if self.slow("answer", key):
            await asyncio.sleep(3600)
        return version


def virtually(scenario: Callable[[Slow, Repository, Session], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a session that wrote to an array, in virtual time."""

    async def run() -> None:
        async with open_storage(memory_url()) as plain:
            slow = Slow(plain, seconds=0)
            async with Repository.create(slow) as repository:
                session = await repository.writable_session("main")
                await make_array(session, "a", (10,), (1,))
                await session.commit("array")
                session = await repository.writable_session("main")
                await write(session, "a/c/0", b"x")
                await scenario(slow, repository, session)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def test_timeout_before_publishing_leaves_no_doubt() -> None:
    """A timeout while files are stored published nothing, and the session can still be used."""

    async def scenario(slow: Slow, repository: Repository, session: Session) -> None:
        began = asyncio.get_running_loop().time()
        slow.slow = lambda operation, key: operation == "put" and key.startswith("manifests/")  # type: ignore[method-assign]
        with pytest.raises(StorageUnavailableError, match=r"within 5 s.*Nothing was published"):
            await session.commit("late", timeout_seconds=5)
        assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.01)
        slow.slow = lambda *_: False  # type: ignore[method-assign]
        await write(session, "a/c/1", b"y")  # nothing is in doubt
        await session.commit("in time", timeout_seconds=5)
        assert await history(repository) == ["in time", "array", "Repository initialized"]

    virtually(scenario)


@pytest.mark.parametrize("landed", [False, True])
def test_timeout_while_publishing_says_that_the_outcome_is_unknown(*, landed: bool) -> None:
    """Whether the last request landed is found out by the next commit, which lands once."""

    async def scenario(slow: Slow, repository: Repository, session: Session) -> None:
        step = "answer" if landed else "put"
        slow.slow = lambda operation, key: operation == step and key == "repo"  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknownError, match="may have landed"):
            await session.commit("slow", timeout_seconds=5)
        slow.slow = lambda *_: False  # type: ignore[method-assign]
        with pytest.raises(ReadOnlyError, match="unknown"):
            await write(session, "a/c/1", b"y")
        await session.commit("again", timeout_seconds=5)
        expected = "slow" if landed else "again"
        assert await history(repository) == [expected, "array", "Repository initialized"]

    virtually(scenario)


def test_timeout_ends_a_commit_that_loses_every_race() -> None:
    """With others first again and again, the time limit ends it as a lost race."""

    async def scenario(slow: Slow, repository: Repository, session: Session) -> None:
        count = 0

        async def rival(operation: str, key: str) -> None:
            nonlocal count
            if operation == "put" and key.startswith("snapshots/") and not busy:
                busy.append(1)
                other = await repository.writable_session("main")
                count += 1
                await write(other, f"r{count}/zarr.json", b'{"zarr_format":3,"node_type":"group"}')
                await other.commit(f"rival {count}")
                busy.clear()
                await asyncio.sleep(1)

        busy: list[int] = []
        slow.after = rival  # type: ignore[method-assign]
        with pytest.raises(ConflictError, match=r"within 5 s: other writers were first \d time"):
            await session.commit("late", rebase_with=ConflictDetector(), timeout_seconds=5)
        slow.after = LatencyStorage.after.__get__(slow)  # type: ignore[method-assign]
        assert count > 2
        assert len(await history(repository)) == count + 2
        await session.commit("late", rebase_with=ConflictDetector(), timeout_seconds=5)

    virtually(scenario)

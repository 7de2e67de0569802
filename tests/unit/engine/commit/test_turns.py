"""Writers of one process commit in turn: none loses a race, and none reads what another wrote."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.commit import turns
from icechunk_async.engine.history.repo_info import file
from icechunk_async.errors import ConflictError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from icechunk_async import Session

CHUNK = b"x" * 600  # more than is stored inline
WRITERS = 12


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop whose clock jumps."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def _prepare(url: str, spec: int) -> None:
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (WRITERS,), (1,))
        await write(session, "a/c/0", CHUNK)
        await session.commit("first")
        for number in range(WRITERS):
            await repository.create_branch(f"b{number}", session.snapshot_id)


async def _changed(repository: Repository, number: int, branch: str = "main") -> Session:
    session = await repository.writable_session(branch)
    await write(session, f"a/c/{number}", CHUNK + b"%d" % number)
    return session


def _never_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers wait for others for ever, also on a machine that takes seconds for a try."""
    monkeypatch.setattr(turns, "_HERE_SECONDS", 3600.0)
    monkeypatch.setattr(turns, "_ELSEWHERE_SECONDS", 3600.0)
    monkeypatch.setattr(file, "_PATIENCE_SECONDS", 3600.0)


async def _committed(session: Session, number: int) -> None:
    await session.commit(str(number), rebase_with=ConflictDetector())


@pytest.mark.parametrize("spec", [1, 2])
def test_sessions_of_a_repository_commit_in_turn_without_losing_a_race(spec: int) -> None:
    """Two requests in a row for each, in the order in which they began, and nothing is read."""

    async def scenario() -> None:
        url = memory_url()
        await _prepare(url, spec)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                sessions = [await _changed(repository, number) for number in range(WRITERS)]
                storage.forget()
                began = asyncio.get_running_loop().time()
                async with asyncio.TaskGroup() as group:
                    for number, session in enumerate(sessions):
                        group.create_task(_committed(session, number))
                seconds = asyncio.get_running_loop().time() - began
                landed = [it.message async for it in repository.ancestry(branch="main")]
        assert landed[:WRITERS] == [str(number) for number in reversed(range(WRITERS))]
        # The first of them needs the old manifest of the array. And there are two pauses of a
        # try, for writers elsewhere that nobody sees, each with a look whether one came.
        assert seconds <= 2 * WRITERS + 1 + 8
        reference = "repo" if spec == 2 else "refs/branch.main/ref.json"
        tries = [key for what, key in storage.log if what == "put" and key == reference]
        assert len(tries) == WRITERS
        read = [key for what, key in storage.log if what.startswith("get")]
        assert len(read) <= 4
        assert not any(key.startswith("transactions/") for key in read)

    run(scenario())


async def test_repositories_opened_at_one_url_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of event loops, and nobody's first try fails."""
    _never_overtake(monkeypatch)
    url = memory_url()
    await _prepare(url, 2)

    async def writer(number: int) -> None:
        async with Repository.open(url) as repository:
            for turn in range(3):
                session = await _changed(repository, (number + turn) % WRITERS)
                for chunk in range(WRITERS):  # each changes the same
                    await write(session, f"a/c/{chunk}", CHUNK + b"%d" % chunk)
                session.discard_changes()
                await write(session, f"a/c/{number}", CHUNK + b"%d %d" % (number, turn))
                await session.commit(f"{number} {turn}", rebase_with=ConflictDetector())

    threads = [threading.Thread(target=asyncio.run, args=(writer(it),)) for it in range(4)]
    for thread in threads:
        thread.start()
    async with asyncio.TaskGroup() as group:
        for number in range(4, 8):
            group.create_task(writer(number))
    for thread in threads:
        await asyncio.to_thread(thread.join)
    async with Repository.open(url) as repository:
        infos = [it async for it in repository.ancestry(branch="main")][: 8 * 3]
    assert len({it.message for it in infos}) == 8 * 3
    notes: list[Any] = [it.metadata["__icechunk"] for it in infos]
    assert max(note["rebase_attempts"] for note in notes) == 1  # they stood on the last one


def test_commits_to_several_branches_do_not_race_for_the_repo_info() -> None:
    """Files are stored at the same time, and the one object is written in turn."""

    async def scenario() -> None:
        url = memory_url()
        await _prepare(url, 2)
        async with open_storage(url) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                sessions = [
                    await _changed(repository, number, f"b{number}") for number in range(WRITERS)
                ]
                storage.forget()
                began = asyncio.get_running_loop().time()
                async with asyncio.TaskGroup() as group:
                    for number, session in enumerate(sessions):
                        group.create_task(_committed(session, number))
                seconds = asyncio.get_running_loop().time() - began
        assert [key for what, key in storage.log if what == "put"].count("repo") == WRITERS
        assert storage.requests["copy"] == WRITERS
        assert storage.requests["get_if_changed"] == 0
        assert seconds <= 2 * WRITERS + 1

    run(scenario())


async def test_of_commits_without_a_solver_one_lands_and_the_others_are_told() -> None:
    """Taking turns changes nothing of that."""
    url = memory_url()
    await _prepare(url, 2)

    async with Repository.open(url) as repository:
        sessions = [await _changed(repository, number) for number in range(WRITERS)]

        async def commit(session: Session) -> str:
            try:
                await session.commit("alone")
            except ConflictError:
                return "told"
            return "landed"

        outcomes = await bounded_map(commit, sessions, limit=WRITERS)
    assert sorted(outcomes) == ["landed", *["told"] * (WRITERS - 1)]


async def test_rebase_tries_of_zero_never_moves_a_session() -> None:
    """Not even to where another session of the process is known to have moved the branch."""
    url = memory_url()
    await _prepare(url, 2)
    async with Repository.open(url) as repository:
        one, other = await _changed(repository, 1), await _changed(repository, 2)
        base = other.snapshot_id

        async def second() -> None:
            with pytest.raises(ConflictError):
                await other.commit("2", rebase_with=ConflictDetector(), rebase_tries=0)

        async with asyncio.TaskGroup() as group:
            group.create_task(_committed(one, 1))
            group.create_task(second())
        assert other.snapshot_id == base
        await _committed(other, 2)


async def test_a_cancelled_commit_lets_the_next_one_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for its turn, and while it publishes."""
    _never_overtake(monkeypatch)
    url = memory_url()
    await _prepare(url, 2)
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0.002)
        async with Repository.open(storage) as repository:
            sessions = [await _changed(repository, number) for number in range(4)]
            tasks = [
                asyncio.create_task(_committed(session, number))
                for number, session in enumerate(sessions)
            ]
            await asyncio.sleep(0.003)
            tasks[0].cancel()
            tasks[2].cancel()
            async with asyncio.timeout(240):
                await asyncio.gather(*tasks, return_exceptions=True)
            landed = {it.message async for it in repository.ancestry(branch="main")}
            for session in sessions:
                session.abandon()
    assert {"1", "3"} <= landed
    assert "2" not in landed


class _Committing(ConflictDetector):
    """A solver that commits with another session, as one that keeps a log may."""

    def __init__(self, other: Session) -> None:
        self._other = other

    async def solve(self, clash: Any) -> Any:
        await self._other.commit("by the solver")
        return await super().solve(clash)


async def test_a_solver_can_commit_to_the_same_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the commit that waits for it."""
    _never_overtake(monkeypatch)
    url = (tmp_path / "repository").as_uri()
    await _prepare(url, 2)
    async with Repository.open(url) as repository:
        mine = await _changed(repository, 1)
        await (await _changed(repository, 1)).commit("theirs")
        other = await _changed(repository, 2)
        async with asyncio.timeout(60):
            with pytest.raises(ConflictError):
                await mine.commit("mine", rebase_with=_Committing(other))
        mine.discard_changes()
        messages = [it.message async for it in repository.ancestry(branch="main")]
    assert messages[0] == "by the solver"

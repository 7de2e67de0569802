"""Many writers of one branch: how long it takes until all have landed, how fairly, at what cost."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async._runtime.backoff import Courtesy
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import RebaseFailedError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

CHUNK = b"x" * 600  # more than is stored inline
REPEATED_THOROUGHLY = [(1, 8, 6), (2, 3, 12), (1, 32, 4), (2, 32, 4)]


class SeededClock(clock.SystemClock):
    """The same pauses each time."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def random_bytes(self, size_bytes: int) -> bytes:
        """Return bytes that follow from the seed."""
        return self._random.randbytes(size_bytes)


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop whose clock jumps."""
    with (
        clock.use_clock(SeededClock()),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        return runner.run(work)


async def _prepared(url: str, spec: int, chunks: int) -> None:
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (chunks,), (1,))
        await write(session, "a/c/0", CHUNK)
        await session.commit("first")


async def _contend(writers: int, spec: int) -> tuple[float, list[int]]:
    """Let writers 50 to 300 ms away change a chunk each; answer the seconds, and tries of each."""
    url = memory_url()
    await _prepared(url, spec, writers)
    loop = asyncio.get_running_loop()
    async with open_storage(url) as plain:

        async def writer(number: int) -> None:
            away = LatencyStorage(plain, seconds=0.05, jitter_seconds=0.25, seed=number)
            async with Repository.open(away) as repository:
                session = await repository.writable_session("main")
                await write(session, f"a/c/{number}", CHUNK)
                await start.wait()
                await session.commit(str(number), rebase_with=ConflictDetector())

        async with asyncio.TaskGroup() as group:
            start = asyncio.Barrier(writers)
            for number in range(writers):
                group.create_task(writer(number))
        seconds = loop.time()
        async with Repository.open(plain) as repository:
            landed = [info async for info in repository.ancestry(branch="main")][:writers]
    assert {info.message for info in landed} == {str(number) for number in range(writers)}
    return seconds, [_tries(info.metadata) for info in landed]


def _tries(metadata: Any) -> int:
    return int(metadata["__icechunk"]["rebase_attempts"]) + 1


@pytest.mark.parametrize(("spec", "seconds_each"), [(1, 1.4), (2, 1.15)])
@pytest.mark.parametrize("writers", [24, pytest.param(32, marks=pytest.mark.thorough)])
def test_time_grows_no_faster_than_writers(writers: int, spec: int, seconds_each: float) -> None:
    """A try is five requests in a row of 175 ms, and about one lands in that time."""
    few, _ = run(_contend(writers // 4, spec))
    many, tries = run(_contend(writers, spec))
    assert many / writers < seconds_each
    assert many / writers < few / (writers // 4) * 1.1
    # Each commit that lands makes all tries fail that are under way; few of them are spared. How
    # many are is a matter of luck: for twelve seeds the mean was 11.9 to 12.3 tries of 12.5.
    assert sum(tries) / writers < (writers + 1) / 2


async def _commit_again_and_again(writers: int, commits: int, spec: int) -> tuple[list[int], float]:
    """Let writers in a hurry commit a request of a second apart.

    Returns: by how many others each commit was overtaken; the requests for each.
    """
    url = memory_url()
    await _prepared(url, spec, writers)
    async with open_storage(url) as plain:
        requests = 0

        async def writer(number: int) -> None:
            nonlocal requests
            away = LatencyStorage(plain, seconds=0.85, jitter_seconds=0.3, seed=number)
            async with Repository.open(away) as repository:
                for turn in range(commits):
                    session = await repository.writable_session("main")
                    await write(session, f"a/c/{number}", CHUNK + b"%d" % turn)
                    await session.commit(f"{number} {turn}", rebase_with=ConflictDetector())
            requests += sum(away.requests.values())

        async with asyncio.TaskGroup() as group:
            for number in range(writers):
                group.create_task(writer(number))
        async with Repository.open(plain) as repository:
            infos = [info async for info in repository.ancestry(branch="main")]
    notes: list[Any] = [info.metadata["__icechunk"] for info in infos[: writers * commits]]
    overtaken = [note.get("overtaken_by", note["rebase_attempts"]) for note in notes]
    return overtaken, requests / len(overtaken)


@pytest.mark.parametrize(
    ("spec", "writers", "commits"),
    [
        (1, 3, 12),
        (2, 8, 6),
        *(pytest.param(*it, marks=pytest.mark.thorough) for it in REPEATED_THOROUGHLY),
    ],
)
def test_nobody_is_overtaken_for_long(writers: int, commits: int, spec: int) -> None:
    """A writer that just committed lets the others go first."""
    overtaken, requests = run(_commit_again_and_again(writers, commits, spec))
    assert len(overtaken) == writers * commits
    assert max(overtaken) <= 2 * writers + 8
    assert requests < 6 * writers + 10


def test_a_writer_alone_makes_no_pause_for_nobody() -> None:
    """But a few, that those have a chance whom nobody sees."""
    overtaken, requests = run(_commit_again_and_again(1, 40, 2))
    assert overtaken == [0] * 40
    assert requests < 7.5


async def _letting_others_go_first(spec: int) -> tuple[list[tuple[str, str]], Any]:
    """Commit after three pauses in which others land; return the requests, and the note."""
    url = memory_url()
    await _prepared(url, spec, 4)
    async with open_storage(url) as plain, Repository.open(plain) as others:
        away = LatencyStorage(plain, seconds=1)
        async with Repository.open(away) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", CHUNK)
            away.forget()
            async with asyncio.TaskGroup() as group:
                commit = session.commit("late", rebase_with=ConflictDetector())
                landing = group.create_task(commit)
                for number in range(1, 4):
                    await asyncio.sleep(20)
                    other = await others.writable_session("main")
                    await write(other, f"a/c/{number}", CHUNK)
                    await other.commit(str(number))
                    await asyncio.sleep(20)
            info = await repository.lookup_snapshot(landing.result())
            return list(away.log), info.metadata["__icechunk"]


@pytest.mark.parametrize(("spec", "snapshots"), [(1, 3), (2, 1)])
def test_a_writer_that_lets_others_go_first_rebases_once(
    monkeypatch: pytest.MonkeyPatch, spec: int, snapshots: int
) -> None:
    """Commits that land during its pauses are counted; with format 1 the snapshots tell of it."""
    pauses = iter([40.0, 40.0, 40.0])
    monkeypatch.setattr(Courtesy, "pause", lambda *_, **__: next(pauses, 0.0))
    requests, note = run(_letting_others_go_first(spec))
    read = [key for operation, key in requests if operation == "get"]
    assert len([key for key in read if key.startswith("snapshots/")]) == snapshots
    assert len([key for key in read if key.startswith("transactions/")]) == 3
    assert len([key for key in read if key.startswith("manifests/")]) == 1
    assert note == {"rebase_attempts": 1, "overtaken_by": 3}


async def _behind(commits: int, spec: int, *, creating: bool) -> tuple[float, list[str]]:
    """Rebase onto some commits over requests of a second; answer the seconds, and what was read."""
    url = memory_url()
    await _prepared(url, spec, commits + 1)
    async with open_storage(url) as plain, Repository.open(plain) as others:
        away = LatencyStorage(plain, seconds=1)
        async with Repository.open(away) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", CHUNK)
            if creating:
                await make_array(session, "b", (1,), (1,))
            for number in range(commits):
                other = await others.writable_session("main")
                await write(other, f"a/c/{number + 1}", CHUNK)
                await other.commit(str(number))
            away.forget()
            began = asyncio.get_running_loop().time()
            await session.rebase(ConflictDetector())
            return asyncio.get_running_loop().time() - began, [key for _, key in away.log]


@pytest.mark.parametrize("commits", [1, 20])
def test_rebase_is_two_requests_in_a_row_however_far_behind(commits: int) -> None:
    """The tip; then all logs, and the last snapshot alone, since the logs say all."""
    seconds, keys = run(_behind(commits, 2, creating=False))
    assert seconds == 2
    assert len([key for key in keys if key.startswith("transactions/")]) == commits
    assert len([key for key in keys if key.startswith("snapshots/")]) == 1


def test_rebase_of_created_nodes_reads_every_snapshot() -> None:
    """A log does not say at which path something was created."""
    seconds, keys = run(_behind(12, 2, creating=True))
    assert seconds == 3
    assert len([key for key in keys if key.startswith("snapshots/")]) == 12


async def _clashing_late(plain_url: str) -> tuple[str, str, str]:
    """Clash with the third of four commits; answer where the session stands, and what it should."""
    await _prepared(plain_url, 2, 9)
    async with Repository.open(plain_url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/5", CHUNK)
        ids: list[str] = []
        for chunk in (1, 2, 5, 3):
            other = await repository.writable_session("main")
            await write(other, f"a/c/{chunk}", CHUNK)
            ids.append(str(await other.commit(str(chunk))))
        with pytest.raises(RebaseFailedError) as caught:
            await session.rebase(ConflictDetector())
        return str(session.snapshot_id), ids[1], str(caught.value.context["snapshot_id"])


def test_a_rebase_that_fails_stands_on_the_last_commit_without_a_clash() -> None:
    """This holds even if no snapshot before the clash had to be read."""
    stands, last_good, clashed = run(_clashing_late(memory_url()))
    assert stands == last_good
    assert clashed != last_good

"""Real processes that work on one session by its forks, together or until they are killed."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import pytest

from icechunk_async import Repository
from icechunk_async.errors import SessionStateError
from tests.helpers import make_array, read
from tests.killing import FAST, run_killer
from tests.unit.engine.leases.kill_driver import content

REPOSITORY = Path(__file__).parents[4]
DRIVER = "tests.unit.engine.leases.publish_driver"
WORKERS, ROUNDS = 3, 3


async def test_processes_see_what_others_published_before_the_one_commit(tmp_path: Path) -> None:
    """Each continues only when it reads what all others wrote; the session refreshes meanwhile."""
    root = tmp_path / "repository"
    async with Repository.create(root, storage_options=FAST) as repository:
        session = await repository.writable_session("main", lease=True)
        await make_array(session, "a", (100,), (1,))
        forks = [await session.fork() for _ in range(WORKERS)]
        (tmp_path / "forks").write_bytes(pickle.dumps([fork.to_bytes() for fork in forks]))
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", DRIVER, "work"),
                *(str(root), str(number), str(WORKERS), str(ROUNDS)),
                cwd=REPOSITORY,
                stderr=asyncio.subprocess.PIPE,
            )
            for number in range(WORKERS)
        ]
        ending = [asyncio.create_task(process.communicate()) for process in processes]
        while not all(task.done() for task in ending):
            await session.refresh()
            await asyncio.wait(ending, timeout=0.05)
        for task, process in zip(ending, processes, strict=True):
            assert process.returncode == 0, (await task)[1]
        await session.commit("by three processes")
        assert len([1 async for _ in repository.ancestry(branch="main")]) == 2
        reader = await repository.readonly_session("main")
        for chunk in (10 * it + turn for it in range(WORKERS) for turn in range(ROUNDS)):
            assert await read(reader, f"a/c/{chunk}") == content(chunk)
        with pytest.raises(SessionStateError):
            await forks[0].publish()  # another copy did


@pytest.mark.parametrize(
    ("spec", "first", "step"),
    [
        (2, 5, 29),
        *(
            pytest.param(spec, first, 4, marks=pytest.mark.thorough)
            for spec in (1, 2)
            for first in range(4)
        ),
    ],
)
def test_a_publisher_or_committer_killed_at_any_request_loses_nothing_that_was_published(
    tmp_path: Path, spec: int, first: int, step: int
) -> None:
    """Before and after each request; what it was told is there, and each publication in whole."""
    assert int(run_killer(DRIVER, "kill", tmp_path, spec, first, step)) >= 3

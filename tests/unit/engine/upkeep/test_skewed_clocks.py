"""Collection on local disks beside processes whose clocks are wrong by hours."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from icechunk_async import Repository
from tests.helpers import read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, now

SOURCES = Path(__file__).parents[4]


def start(role: str, hours: float, place: Path) -> subprocess.Popen[str]:
    """Start a process whose clock is wrong by some hours."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.engine.upkeep.skewed_process", role, str(hours), place],
        cwd=SOURCES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


async def test_a_writer_two_hours_behind_loses_nothing(tmp_path: Path) -> None:
    """Its open session wrote just now by the disk's clock, whatever its own clock says."""
    async with Repository.create(tmp_path) as repository:
        await commit(repository, 0, "before")
        with start("write", -2, tmp_path) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "written\n"
            report = await repository.garbage_collect(now() - timedelta(hours=1))
            assert report.chunks_deleted == 0
            told, _ = writer.communicate("\n")
        session = await repository.readonly_session(snapshot_id=told.strip())
        assert await read(session, "a/c/1") == CHUNK


@pytest.mark.parametrize(
    ("hours", "answer"),
    [
        (2, "refused: "),
        pytest.param(1, "refused: ", marks=pytest.mark.thorough),
        pytest.param(0, "deleted ", marks=pytest.mark.thorough),
    ],
)
async def test_a_collector_ahead_deletes_nothing_of_an_open_session(
    tmp_path: Path, hours: int, answer: str
) -> None:
    """It asks for what is older than an hour, by its own clock."""
    async with Repository.create(tmp_path) as repository:
        await commit(repository, 0, "before")
        session = await repository.writable_session("main")
        await write(session, "a/c/1", CHUNK)
        with start("collect", hours, tmp_path) as collector:
            told, _ = collector.communicate()
        assert told.startswith(answer), told
        await session.commit("late")
        assert await read(await repository.readonly_session("main"), "a/c/1") == CHUNK

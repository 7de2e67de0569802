"""Repositories of many snapshots on the local disk.

Each snapshot has two properties, and the log of operations names the newest thousand. See
`one_chunk` for what is the same for both engines, and what is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.contest import FLOOR
from benchmarks.long_history import KEY, make_history
from benchmarks.one_chunk import ENGINES, cold_reads, commits
from benchmarks.peers import open_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.contest import Contest

SIZES = pytest.mark.parametrize("count", [10, 1_000, 5_000, 50_000])


def _made(contest: Contest, folder: Path, count: int) -> int:
    """Make a history, and a copy for each contender; return the number of its snapshots."""
    return make_history(folder, contest.pick(min(count, 200), count))


@SIZES
def test_commit(contest: Contest, tmp_path: Path, count: int) -> None:
    """Change one chunk in a session of a repository that is open."""
    number = _made(contest, tmp_path, count)
    contest.race(
        f"change a chunk and commit, {number:,} snapshots",
        commits(tmp_path, KEY, 10),
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
    )


@SIZES
def test_open_cold(contest: Contest, tmp_path: Path, count: int) -> None:
    """Open the repository and read one chunk."""
    number = _made(contest, tmp_path, count)
    directory = tmp_path / "made"
    contest.race(
        f"open cold and read a chunk, {number:,} snapshots",
        {**cold_reads(directory, KEY), FLOOR: (directory / "repo").read_bytes},
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
        floor="read the file of the repository's state",
    )


@SIZES
@pytest.mark.parametrize("what", ["walk", "messages", "all fields"])
def test_ancestry(contest: Contest, tmp_path: Path, count: int, what: str) -> None:
    """Walk from the tip to the root in a repository that is open, and look at fields."""
    number = _made(contest, tmp_path, count)

    def engine(name: str) -> Callable[[], None]:
        repository = open_repository(name, str(tmp_path / "made"))

        def walk() -> None:
            line = repository.ancestry(branch="main")
            match what:
                case "walk":
                    found = sum(1 for _ in line)
                case "messages":
                    found = len([it.message for it in line])
                case _:
                    seen = [(i.id, i.parent_id, i.message, i.written_at, i.metadata) for i in line]
                    found = len(seen)
            assert found == number

        return walk

    contest.race(
        f"ancestry of {number:,} snapshots, {what}",
        {name: engine(name) for name in ENGINES},
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
    )

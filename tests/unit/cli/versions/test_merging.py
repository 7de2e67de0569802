"""`undo`, `revert`, `restore`, `merge` and their like on the command line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from tests.unit.cli.conftest import run
from tests.unit.engine.versions.stories import contents_at
from tests.unit.engine.versions.test_merge_matrix import CHANGES, begin, changing

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """Make a repository with a branch ``side``: one commit there, and two on ``main``."""

    async def make() -> None:
        async with Repository.create(tmp_path / "repo") as repository:
            await begin(repository)
            await CHANGES["write chunk 3"](repository, "side")
            await changing(("g/a/c/0", b"one"))(repository, "main")
            await changing(("g/a/c/1", b"two"))(repository, "main")

    asyncio.run(make())
    return tmp_path / "repo"


def chunks(path: Path, branch: str = "main") -> dict[str, bytes]:
    """Return the chunks of the array of a branch, by number."""

    async def look() -> dict[str, bytes]:
        async with Repository.open(path) as repository:
            found = await contents_at(repository, branch=branch)
        return {key[-1]: data for key, data in found.items() if "/c/" in key}

    return asyncio.run(look())


def test_undo_says_where_the_branch_was(branched: Path) -> None:
    """So that it can be brought back."""
    before = run("show", branched, "main", "--json").json["snapshot"]["id"]
    done = run("undo", branched, "--json")
    assert (done.exit_code, done.json["previous_id"]) == (0, before)
    assert chunks(branched)["1"] == bytes([1] * 3)
    assert before in run("fast-forward", branched, "main", "--to", before).stdout
    assert chunks(branched)["1"] == b"two"
    assert run("undo", branched, "nobody").exit_code == 1


def test_revert_and_restore_show_first_and_then_commit(branched: Path) -> None:
    """A dry run changes nothing."""
    planned = run("revert", branched, "main~1", "--dry-run")
    assert "chunks of array  /g/a  1: 0" in planned.stdout
    assert "dry run" in planned.stdout
    assert chunks(branched)["0"] == b"one"
    done = run("revert", branched, "main~1", "-m", "back", "--json")
    assert done.json["touched"]["updated_chunks"][0]["coords"] == [[0]]
    assert chunks(branched)["0"] == bytes(3)
    assert run("log", branched, "--json").json["snapshots"][0]["message"] == "back"
    assert "has these changes already" in run("revert", branched, "main~2").stdout
    run("restore", branched, "main~1", "--path", "g/a")
    assert chunks(branched)["0"] == b"one"
    assert run("restore", branched, "main~1", "--path", "nowhere").exit_code == 1


def test_merge_reports_clashes_and_fails(branched: Path) -> None:
    """Exit code 1 and a list; after the clash is gone it succeeds."""

    async def clash() -> None:
        async with Repository.open(branched) as repository:
            await changing(("g/a/c/0", b"sss"))(repository, "side")

    asyncio.run(clash())
    failed = run("merge", branched, "side")
    assert failed.exit_code == 1
    assert "conflict chunk double update at /g/a, 1 chunk(s): 0" in failed.stdout
    assert "Nothing was committed." in failed.stdout
    (found,) = run("merge", branched, "side", "--dry-run", "--json").json["conflicts"]
    assert (found["path"], found["chunks"], len(found["branch_commits"])) == ("/g/a", 1, 1)
    run("undo", branched, "side")
    assert run("merge", branched, "side", "-m", "joined").exit_code == 0
    assert chunks(branched)["3"] == b"yyy"


def test_commits_are_picked_and_squashed(branched: Path) -> None:
    """By id, by its first letters, and by steps back."""
    picked = run("show", branched, "main~1", "--json").json["snapshot"]["id"]
    assert run("cherry-pick", branched, picked[:6].lower(), "--onto", "side").exit_code == 0
    assert chunks(branched, "side")["0"] == b"one"
    done = run("squash", branched, "main", "--since", "main~2", "--json")
    assert done.exit_code == 0
    assert len(run("log", branched, "--json").json["snapshots"]) == 3
    assert (chunks(branched)["0"], chunks(branched)["1"]) == (b"one", b"two")

"""`propose`, `review`, `accept`, `reject`, `protect` and `unprotect` on the command line."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from tests.unit.cli.conftest import run
from tests.unit.engine.proposals.places import begin, commit, contents

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def sided(tmp_path: Path) -> Path:
    """Make a repository with a branch ``side`` that is ahead of ``main``."""

    async def make() -> None:
        async with Repository.create(tmp_path / "repo") as repository:
            await begin(repository, "side")
            await commit(repository, "side", c1=1)

    asyncio.run(make())
    return tmp_path / "repo"


def chunks(path: Path) -> dict[int, int]:
    """Return the chunks of ``main``."""

    async def look() -> dict[int, int]:
        async with Repository.open(path) as repository:
            return await contents(await repository.readonly_session("main"))

    return asyncio.run(look())


def write(path: Path, branch: str, **values: int) -> None:
    """Commit chunks."""

    async def work() -> None:
        async with Repository.open(path) as repository:
            await commit(repository, branch, **values)

    asyncio.run(work())


def test_write_audit_publish(sided: Path, tmp_path: Path) -> None:
    """From a protected branch to a page and a merge."""
    assert (
        "main changes only by proposals with the checks audit"
        in run("protect", sided, "--check", "audit").stdout
    )
    refused = run("merge", sided, "side")
    assert refused.exit_code == 1
    assert "branch-protected" in refused.stderr
    made = run("propose", sided, "side", "--check", "audit=sh -c 'echo fine'", "--title", "one")
    assert made.exit_code == 0
    assert "It can be accepted. Nothing is published yet." in made.stdout
    assert "check audit passed" in made.stdout
    assert chunks(sided) == {}
    (line,) = run("review", sided, "--json").json["proposals"]
    assert (line["title"], line["state"], line["passed"]) == ("one", "open", True)
    assert line["id"] in run("review", sided).stdout
    page = tmp_path / "page.html"
    shown = run("review", sided, line["id"], "--html", page)
    assert "chunks +1 ~0 -0" in shown.stdout
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert run("review", sided, "side", "--json").json["id"] == line["id"]
    accepted = run("accept", sided, line["id"], "--json")
    assert (accepted.exit_code, accepted.json["state"]) == (0, "accepted")
    assert chunks(sided) == {1: 1}
    again = run("accept", sided, line["id"])
    assert again.exit_code == 1
    assert "was accepted already" in again.stderr
    assert "There are no open proposals." in run("review", sided).stdout
    assert line["id"] in run("review", sided, "--all").stdout
    assert "No branch is protected." in run("unprotect", sided).stdout


def test_a_check_that_fails_is_exit_code_1(sided: Path) -> None:
    """The proposal is there, and nothing is published."""
    made = run("propose", sided, "side", "--check", "audit=sh -c 'echo too cold; exit 1'")
    assert made.exit_code == 1
    assert "check audit failed" in made.stdout
    (line,) = run("review", sided, "--json").json["proposals"]
    refused = run("accept", sided, line["id"])
    assert refused.exit_code == 1
    assert "checks-failed" in refused.stderr
    assert "too cold" in refused.stderr
    write(sided, "main", c2=2)
    moved = run("accept", sided, line["id"], "--refuse-moved")
    assert "accept it without --refuse-moved" in moved.stderr
    assert "give --check NAME=COMMAND" in run("accept", sided, line["id"]).stderr
    assert chunks(sided) == {2: 2}
    closed = run("reject", sided, line["id"], "--reason", "no")
    assert "Closed. no" in closed.stdout
    assert run("accept", sided, line["id"], "--check", "audit=true").exit_code == 1


def test_a_branch_that_moved_is_checked_anew(sided: Path) -> None:
    """By the commands that are passed."""
    made = run("propose", sided, "side", "--check", "audit=true", "--json")
    write(sided, "main", c2=2)
    done = run("accept", sided, made.json["id"], "--check", "audit=true", "--json")
    assert (done.exit_code, done.json["state"]) == (0, "accepted")
    assert done.json["candidate_id"] != made.json["candidate_id"]
    assert chunks(sided) == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("propose", "side", "--check", "audit"), 2, "NAME=COMMAND"),
        (("propose", "side", "--check", "audit='"), 2, "is no command"),
        (("propose", "sidee"), 1, "Is the branch 'side' meant?"),
        (("propose", "main"), 1, "cannot be proposed to itself"),
        (("review", "nothing"), 1, "neither the id of a proposal nor"),
        (("review", "00000000000000000000"), 1, "no proposal"),
        (("review", "--html", "x.html"), 2, "needs the id"),
        (("protect", "nowhere"), 1, "no branch 'nowhere'"),
    ],
)
def test_misspelled_arguments_are_refused_and_nothing_is_proposed(
    sided: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """One sentence, and nothing is there."""
    command, *rest = arguments
    outcome = run(command, sided, *rest)
    assert outcome.exit_code == code
    assert said in " ".join((outcome.stdout + outcome.stderr).replace("│", " ").split())
    assert run("review", sided, "--json").json["proposals"] == []

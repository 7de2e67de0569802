"""Completion by Tab, asked as shells ask: by environment variables."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from tests.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample

SCRIPT = """
import sys
from icechunk_async.cli import main
sys.argv = ["icechunk-async"]
main()
"""


def completed(shell: str, *words: object) -> str:
    """Return the lines that a shell gets for the last of some words."""
    line = " ".join(["icechunk-async", *map(str, words)])
    done = run_program(
        SCRIPT,
        environment={
            **os.environ,
            "_ICECHUNK_ASYNC_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": line,
        },
    )
    assert done.stderr == ""
    return done.stdout


def complete(*words: object) -> list[str]:
    """Return the words that the shell would offer for the last of some words."""
    return completed("bash", *words).split()


def test_refs_complete(sample: Sample) -> None:
    """Branches and tags; ids once there is a letter of one."""
    assert complete("log", sample.path, '""') == ["dev", "main", "v1"]
    assert complete("log", sample.path, "m") == ["main"]
    assert complete("show", sample.path, sample.tip[:4]) == [sample.tip]
    assert complete("diff", sample.path, "v1", "d") == ["dev"]
    assert complete("show", sample.path, "none") == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("branch", "delete", "{}", '""'), ["dev", "main"]),
        (("tag", "delete", "{}", '""'), ["v1"]),
        (("branch", "reset", "{}", "main", "v"), ["v1"]),
        (("merge", "{}", "dev", "--into", "m"), ["main"]),
        (("copy", "{}", "elsewhere", "--ref", "v"), ["v1"]),
        (("tag", "create", "{}", '""'), []),
    ],
)
def test_what_fits_completes(sample: Sample, command: tuple[str, ...], found: list[str]) -> None:
    """Branches where a branch is asked for, tags where a tag is."""
    assert complete(*(it.format(sample.path) for it in command)) == found


def test_options_of_the_storage_are_used(sample: Sample) -> None:
    """Those that are on the line already."""
    assert complete("log", sample.path, "-o", "durability=none", "m") == ["main"]
    assert complete("log", sample.path, "-o", "colour=red", "m") == []


@pytest.mark.parametrize("url", ["{}/none", "gopher://x", "s3://"])
def test_nothing_completes_where_nothing_opens(tmp_path: Path, url: str) -> None:
    """Without a word of an error into the line that is typed."""
    assert complete("log", url.format(tmp_path), "m") == []


def test_nothing_is_offered_that_a_shell_would_run(tmp_path: Path) -> None:
    """Others name branches and write messages. Shells insert words, and zsh evaluates both."""
    bad = ["main$(id)", "main`id`", "main;id", "main id", "main\\`id\\`", "main'\"", "main\nid"]

    async def fill() -> str:
        async with Repository.create(tmp_path / "hostile") as repository:
            root = await repository.lookup_branch("main")
            for name in (*bad, "main-2", "main/2.0", "-main", "~main"):
                await repository.create_branch(name, root)
            session = await repository.writable_session("main")
            message = " \\`id\\` $(id)\x1b[31m'\";: (a fix)\nmore"
            return str(await session.commit(message, allow_empty=True))

    tip = asyncio.run(fill())
    path = tmp_path / "hostile"
    assert complete("log", path, "main") == ["main", "main-2", "main/2.0"]
    assert complete("log", path, "~") == []
    shown = completed("zsh", "show", path, tip[:6])
    assert f'"{tip}":"id id 31m a fix more"' in shown

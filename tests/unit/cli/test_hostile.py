"""Names and texts in a repository are neither commands to a terminal nor separate lines."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from icechunk_async import Repository
from icechunk_async.cli.app import app
from icechunk_async.engine.commit.once import Transaction
from tests.helpers import group_document, make_array, write
from tests.unit.cli.conftest import run

BAD = "x\x1b[31m\x07\x9b2J\r\u202ey"
"""Colours, a bell, a cleared screen, a return of the cursor, and text from right to left."""
OWN = {("init",), ("probe",), ("demo",)}
"""Commands that show nothing of a repository that others wrote."""


@dataclass(frozen=True)
class Hostile:
    """A repository whose every name and text is ``BAD``."""

    path: Path
    first: str
    tip: str
    session: str


async def _fill(path: Path) -> Hostile:
    async with Repository.create(path) as repository:
        root = await repository.lookup_branch("main")
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document(**{BAD: BAD}))
        await make_array(session, BAD, (4,), (1,))
        await write(session, f"{BAD}/c/0", b"a" * 600)
        first = await session.commit(BAD, {BAD: BAD})
        await repository.create_branch(BAD, root)
        await repository.create_tag(f"tag {BAD}", first)
        await repository.update_metadata({BAD: BAD})
        session = await repository.writable_session("main")
        await write(session, f"{BAD}/c/1", b"b" * 600)
        tip = await session.commit(f"{BAD} again", once=Transaction(BAD, 1))
        other = await repository.writable_session(BAD)
        await make_array(other, BAD, (4,), (1,))  # clashes with that of main
        await other.commit(BAD, once=Transaction(BAD, 1))
        leased = await repository.writable_session("main", lease=True, owner=BAD)
        await write(leased, f"{BAD}/c/2", b"c" * 600)
        await leased.spill()
        leased.discard_changes()
        return Hostile(path, str(first), str(tip), str(leased.session_id))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    """Make the repository; tests only read it."""
    return asyncio.run(_fill(tmp_path_factory.mktemp("hostile") / BAD))


COMMANDS: dict[tuple[str, ...], list[str]] = {
    ("log",): [],
    ("show",): ["{tip}"],
    ("diff",): ["{first}", "{tip}"],
    ("tree",): [],
    ("ls",): ["/"],
    ("cat",): [f"{BAD}/zarr.json"],
    ("du",): [],
    ("stats",): [],
    ("undo",): [BAD],
    ("revert",): ["{tip}"],
    ("restore",): ["{first}"],
    ("merge",): [BAD],
    ("cherry-pick",): ["{tip}", "--onto", BAD],
    ("fast-forward",): [BAD, "--to", "{tip}"],
    ("squash",): ["main", "--since", "main~2"],
    ("changes",): ["{first}", "{tip}"],
    ("watch",): ["--since", "main~2", "--count", "2"],
    ("blame",): [BAD],
    ("sessions",): [],
    ("end-session",): ["{session}"],
    ("status",): [],
    ("config",): [],
    ("ops",): [],
    ("expire",): ["--older-than", "0d"],
    ("gc",): ["--older-than", "0d"],
    ("compact",): [],
    ("rewrite-manifests",): [],
    ("check",): [],
    ("migrate",): [],
    ("copy",): ["{path}-copy"],
    ("publish-static",): ["{path}-published"],
    ("serve",): ["--grants", f"no {BAD}"],
    ("sync",): ["{path}-sync"],
    ("ingest",): ["{path}", "--path", BAD],
    ("repair",): [],
    ("verify",): [],
    ("sums",): [],
    ("analyze",): [],
    ("aggregate",): [BAD, "max"],
    ("transactions",): [],
    ("forget-transactions",): [BAD],
    ("branch", "list"): [],
    ("branch", "create"): [f"new {BAD}"],
    ("branch", "reset"): [BAD, "{tip}"],
    ("branch", "delete"): [BAD],
    ("tag", "list"): [],
    ("tag", "create"): [f"new {BAD}"],
    ("tag", "delete"): [f"tag {BAD}"],
}


def _names(command: Any, before: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    commands: dict[str, Any] | None = getattr(command, "commands", None)
    if commands is None:
        return {before}
    return {it for name, below in commands.items() for it in _names(below, (*before, name))}


@pytest.mark.parametrize("command", sorted(_names(typer.main.get_command(app)) - OWN), ids=" ".join)
def test_no_name_or_text_of_a_repository_steers_the_terminal(
    hostile: Hostile, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Whether the command does what was asked, or refuses; one that is not listed is tried, too."""
    path = Path(shutil.copytree(hostile.path, tmp_path / BAD))
    known = {"path": path, "first": hostile.first, "tip": hostile.tip, "session": hostile.session}
    outcome = run(*command, path, *(it.format(**known) for it in COMMANDS.get(command, [BAD])))
    assert outcome.exit_code in ((0, 1) if command in COMMANDS else (0, 1, 2)), outcome.stderr
    text = outcome.stdout + outcome.stderr
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


@pytest.mark.parametrize(
    "command",
    [
        ("cat", "zarr.json"),
        ("log", "--json"),
        ("show", "--json"),
        ("tree", "--json"),
        ("watch", "--since", "main~2", "--count", "2", "--json"),
    ],
    ids=" ".join,
)
def test_json_is_shown_literally_and_means_the_same(
    hostile: Hostile, command: tuple[str, ...]
) -> None:
    """JSON allows control characters beyond ASCII, and marks of direction."""
    name, *arguments = command
    outcome = run(name, hostile.path, *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    assert all(line.isprintable() for line in outcome.stdout.split("\n")), ascii(outcome.stdout)
    documents = [outcome.stdout] if name != "watch" else outcome.stdout.splitlines()
    assert any(BAD in str(_texts(json.loads(it))) for it in documents)


def _texts(value: Any) -> str:
    """Return every text in a document, one after the other."""
    if isinstance(value, dict):
        return "\n".join(f"{name}\n{_texts(it)}" for name, it in value.items())
    return "\n".join(map(_texts, value)) if isinstance(value, list) else str(value)


def test_columns_of_a_query_are_shown_literally(tmp_path: Path) -> None:
    """They are named by dimensions, which others named."""
    pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")

    async def fill() -> None:
        async with Repository.create(tmp_path / "named") as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            await make_array(session, "data", (2,), (2,), dimension_names=[BAD])
            await session.commit("fill")

    asyncio.run(fill())
    outcome = run("sql", tmp_path / "named", "select * from data")
    assert outcome.exit_code == 0, outcome.stderr
    assert "x\\x1b[31m" in outcome.stdout
    assert all(line.isprintable() for line in outcome.stdout.split("\n")), ascii(outcome.stdout)

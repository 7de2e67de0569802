"""``probe``, and the same where ``init`` creates."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from icechunk_async.storage import registry
from tests.conformance.flawed import opened
from tests.unit.cli.conftest import run
from tests.unit.storage.test_probe import DeletesNothingOfItsOwn, IgnoresConditions, IsUnverified

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import Storage


@asynccontextmanager
async def open_careless(url: str) -> AsyncIterator[Storage]:
    """Open a storage that ignores conditions."""
    async with opened(IgnoresConditions, f"memory://{url.partition('://')[2]}") as storage:
        yield IsUnverified(storage)


@asynccontextmanager
async def open_sticky(url: str) -> AsyncIterator[Storage]:
    """Open a storage that deletes nothing."""
    async with opened(DeletesNothingOfItsOwn, f"memory://{url.partition('://')[2]}") as storage:
        yield storage


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a storage that ignores conditions."""
    monkeypatch.setitem(registry._loaded, "careless", open_careless)  # type: ignore[arg-type]
    return f"careless://{uuid4()}"


def test_probe_of_a_safe_storage_succeeds(tmp_path: Path) -> None:
    """A line a promise, a sentence, exit code 0."""
    outcome = run("probe", tmp_path / "new")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    first, *lines, last = outcome.stdout.splitlines()
    assert first.split() == ["PROMISE", "NEEDED", "VERDICT"]
    assert len(lines) == 8
    assert lines[0].startswith("conditional create  yes     kept     of 2 creators at once one")
    assert last == f"{(tmp_path / 'new').as_uri()} is safe for commits."


def test_json_has_every_finding(tmp_path: Path) -> None:
    """One document."""
    document = run("probe", tmp_path, "--json", "-o", "durability=none").json
    assert set(document) == {
        "url", "is_safe", "is_safe_numbered", "seconds", "promises", "left_behind"
    }  # fmt: skip
    assert document["is_safe"] is document["is_safe_numbered"] is True
    assert {it["verdict"] for it in document["promises"]} == {"kept"}


def test_an_unsafe_storage_is_exit_code_1(careless: str) -> None:
    """The table is there all the same, and the document."""
    outcome = run("probe", careless)
    assert outcome.exit_code == 1
    assert "the condition is ignored" in outcome.stdout
    assert outcome.stdout.endswith(" is not safe: commits could be lost.\n")
    outcome = run("probe", careless, "--json")
    assert outcome.exit_code == 1
    assert outcome.json["is_safe"] is False


def test_probe_names_objects_that_it_could_not_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a key."""
    monkeypatch.setitem(registry._loaded, "sticky", open_sticky)  # type: ignore[arg-type]
    outcome = run("probe", f"sticky://{uuid4()}")
    assert outcome.exit_code == 0, "deleting is not what commits need"
    assert "Could not be removed: .icechunk-probe-" in outcome.stdout


def test_an_error_is_one_sentence(tmp_path: Path) -> None:
    """As of every command."""
    outcome = run("probe", "nowhere://x")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("Error (unknown-scheme): ")


def test_init_refuses_an_unsafe_storage(careless: str) -> None:
    """Unless the risk is accepted."""
    outcome = run("init", careless)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("Error (unsafe-storage): Commits could be lost on ")
    assert run("log", careless).exit_code == 1
    assert run("init", careless, "--no-probe").exit_code == 0

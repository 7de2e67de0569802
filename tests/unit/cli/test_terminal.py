"""The command at a real terminal: questions, pages and ages; and none of that in pipes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async.cli.console import age, age_of
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def at_terminal(*arguments: object, types: bytes = b"", **environment: str) -> tuple[int, str]:
    """Run the command at a terminal of 24 lines, and return its exit code and what is shown."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "icechunk_async.cli", *map(str, arguments)],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24", **environment},
    )
    os.close(its)
    os.write(ours, types)  # it is read when the command asks
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    code = process.wait(timeout=240)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return code, text.replace("\r\n", "\n")


def test_a_refused_question_changes_nothing(sample: Sample, repository: Path) -> None:
    """The question of tag delete says what cannot be taken back; --yes does not ask."""
    code, shown = at_terminal("tag", "delete", repository, "v1", types=b"\n")
    assert code == 1
    assert "Delete the tag v1? No tag can ever have this name again. [y/N]" in shown
    assert "Nothing was changed." in shown
    assert [it["name"] for it in run("tag", "list", repository, "--json").json["refs"]] == ["v1"]
    code, shown = at_terminal("tag", "delete", repository, "v1", "--yes")
    assert (code, "?" in shown) == (0, False)
    assert run("tag", "list", repository, "--json").json["refs"] == []
    again = run("tag", "create", repository, "v1", sample.tip)
    assert "(tag-deleted)" in again.stderr


def test_an_accepted_question_goes_on(repository: Path) -> None:
    """With the age in words, and without a question for a dry run."""
    asked = ("expire", repository, "--older-than", "2 weeks")
    code, shown = at_terminal(*asked, types=b"y\n")
    assert code == 0
    assert "(14 days ago) from history, but for those of branches and tags?" in shown
    assert "0 snapshot(s) from before" in shown
    code, shown = at_terminal(*asked, "--dry-run")
    assert (code, "[y/N]" in shown) == (0, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("branch", "delete", "{}", "dev"),
        ("branch", "reset", "{}", "dev", "main"),
        ("undo", "{}"),
        ("squash", "{}", "main", "--since", "main~2"),
        ("gc", "{}", "--older-than", "90d"),
        ("migrate", "{}"),
        ("repair", "{}", "--apply"),
        ("end-session", "{}", "none"),
        ("forget-transactions", "{}", "none"),
        ("sync", "{}", "{}-copy", "--discard-changes"),
    ],
)
def test_what_cannot_be_undone_is_asked_about(
    repository: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """A no ends the command before the repository is opened."""
    asked: list[str] = []

    def no(question: str, **_options: object) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("icechunk_async.cli.declaring.is_answered", lambda: True)
    monkeypatch.setattr("typer.confirm", no)
    before = run("ops", repository, "--json").json
    outcome = run(*(it.format(repository) for it in arguments))
    assert (outcome.exit_code, outcome.stderr) == (1, "Nothing was changed.\n")
    assert len(asked) == 1
    assert run("ops", repository, "--json").json == before


def test_scripts_are_not_asked(repository: Path) -> None:
    """Nobody would answer, and what a script says it means."""
    assert run("branch", "delete", repository, "dev").exit_code == 0


@pytest.mark.parametrize("command", ["gc", "expire"])
def test_ages_below_an_hour_are_warned_of(repository: Path, command: str) -> None:
    """On standard error, so that what reads the document is not disturbed."""
    young = run(command, repository, "--older-than", "59 minutes", "--dry-run", "--json")
    assert (young.exit_code, young.json["dry_run"]) == (0, True)
    assert young.stderr.startswith("Warning: 59 minutes ago is less than an hour. ")
    assert "essions" in young.stderr
    assert run(command, repository, "--older-than", "61m", "--dry-run").stderr == ""


def test_log_is_paged_at_a_terminal_only(repository: Path) -> None:
    """If it does not fit; a script gets every line."""
    for number in range(30):
        run("branch", "create", repository, f"b{number}")
    pager = "sh -c 'echo paged; cat'"
    code, shown = at_terminal("log", repository, PAGER=pager)
    assert (code, "paged" in shown) == (0, False)  # three snapshots
    code, shown = at_terminal("ops", repository, PAGER=pager)
    assert (code, shown.splitlines()[0]) == (0, "paged")
    assert "branch created" in shown
    code, shown = at_terminal("ops", repository, "--limit", "3", PAGER=pager)
    assert "paged" not in shown
    code, shown = at_terminal("ops", repository, PAGER="/no/such/pager")
    assert (code, shown.count("branch created")) == (0, 31)
    for environment in ({}, {"FORCE_COLOR": "1"}):
        piped = subprocess.run(
            [sys.executable, "-m", "icechunk_async.cli", "ops", str(repository)],
            capture_output=True,
            encoding="utf-8",
            check=True,
            env={**os.environ, "PAGER": pager, **environment},
        )
        assert "paged" not in piped.stdout
        assert piped.stdout.count("branch created") == 31


def test_leaving_the_pager_is_no_error(repository: Path) -> None:
    """As with git."""
    code, shown = at_terminal("log", repository, PAGER="true", LINES="3")
    assert (code, "Traceback" in shown) == (0, False)
    assert "SNAPSHOT" not in shown


def test_ages_are_words_at_a_terminal(sample: Sample) -> None:
    """Elsewhere they are times: the same text tomorrow."""
    _, shown = at_terminal("log", sample.path)
    head, newest, *_ = shown.splitlines()
    assert head.split() == ["SNAPSHOT", "WRITTEN", "REFS", "MESSAGE"]
    assert re.search(r"second|minute|hour", newest)
    head, newest, *_ = run("log", sample.path).stdout.splitlines()
    assert "WRITTEN (UTC)" in head
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", newest)
    assert "ago" not in newest


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (timedelta(microseconds=1), "less than a second"),
        (timedelta(seconds=1), "1 second"),
        (timedelta(seconds=119), "119 seconds"),
        (timedelta(minutes=90), "90 minutes"),
        (timedelta(hours=47), "47 hours"),
        (timedelta(days=2), "2 days"),
        (timedelta(weeks=2), "14 days"),
        (timedelta(days=729), "729 days"),
        (timedelta(days=365 * 1234), "1,234 years"),
    ],
)
def test_ages_are_told_in_the_largest_unit_of_which_there_are_two(
    span: timedelta, words: str
) -> None:
    """In the largest unit of which there are two."""
    assert age(span) == words


def test_times_to_come_are_from_now() -> None:
    """Leases end then."""
    assert age_of(datetime.now(UTC) + timedelta(hours=5, minutes=1)) == "5 hours from now"

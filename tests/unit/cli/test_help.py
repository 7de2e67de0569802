"""Help texts, and what they promise about JSON."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample

COMMANDS = {
    ("init",): "{new}",
    ("log",): "{sample}",
    ("show",): "{sample} v1",
    ("diff",): "{sample} v1 main",
    ("tree",): "{sample}",
    ("ls",): "{sample}",
    ("cat",): "{sample} zarr.json",
    ("probe",): "{new}",
    ("review",): "{copy}",
    ("protect",): "{copy}",
    ("unprotect",): "{copy}",
    ("du",): "{sample}",
    ("stats",): "{sample}",
    ("status",): "{sample}",
    ("config",): "{sample}",
    ("ops",): "{sample}",
    ("expire",): "{copy} --older-than 90d",
    ("gc",): "{copy} --older-than 90d",
    ("compact",): "{copy}",
    ("rewrite-manifests",): "{copy}",
    ("check",): "{sample}",
    ("verify",): "{sample}",
    ("sums",): "{copy}",
    ("analyze",): "{copy}",
    ("aggregate",): "{sample} small count",
    ("repair",): "{sample}",
    ("copy",): "{sample} {new}",
    ("sync",): "{sample} {new}",
    ("publish-static",): "{sample} {new} --authorize {container}",
    ("migrate",): "{copy}",
    ("branch", "list"): "{sample}",
    ("branch", "create"): "{copy} b",
    ("branch", "reset"): "{copy} main main",
    ("branch", "delete"): "{copy} dev",
    ("tag", "list"): "{sample}",
    ("tag", "create"): "{copy} t",
    ("tag", "delete"): "{copy} v1",
}
# Documented with the command that a help text refers to by its name.
ELSEWHERE: dict[tuple[str, ...], list[tuple[str, ...]]] = {
    ("show",): [("log",)],
    ("diff",): [("show",)],
}
# Names that a repository's own data bring along.
FOREIGN = {"metadata", "document", "config", "detail", "feature_flags"}


def help_of(command: tuple[str, ...]) -> str:
    """Return a help text, without frames and line breaks."""
    outcome = run(*command, "--help")
    assert outcome.exit_code == 0
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", outcome.stdout).split())


@pytest.mark.parametrize("command", [(), ("branch",), ("tag",), ("demo",), ("serve",), *COMMANDS])
def test_help_renders(command: tuple[str, ...]) -> None:
    """The help of every command lists its options."""
    text = help_of(command)
    assert "Usage:" in text
    assert "--help" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_of_json_are_documented(
    command: tuple[str, ...], sample: Sample, repository: Path, tmp_path: Path
) -> None:
    """--json prints one document, and its help names every key in it."""
    places = {
        "new": tmp_path / "new",
        "sample": sample.path,
        "copy": repository,
        "container": sample.container,
    }
    arguments = COMMANDS[command].format(**places).split()
    outcome = run(*command, *arguments, "--json")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    texts = [help_of(it) for it in (command, *ELSEWHERE.get(command, []))]
    assert all("JSON keys:" in text for text in texts)
    words = set(re.findall(r"\w+", " ".join(texts)))
    assert not keys_of(outcome.json) - words


def keys_of(value: Any) -> set[str]:
    """Return all keys of a document at any depth, but for those of foreign data."""
    match value:
        case dict():
            below = [keys_of(item) for key, item in value.items() if key not in FOREIGN]
            return set(value).union(*below)
        case list():
            return set[str]().union(*map(keys_of, value))
        case _:
            return set()


def test_version_is_that_of_the_installed_distribution() -> None:
    """It is the version of the installed distribution."""
    outcome = run("--version")
    assert (outcome.exit_code, outcome.stdout) == (
        0,
        f"icechunk-async {version('icechunk-async')}\n",
    )

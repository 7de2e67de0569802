"""Names of the library and its commands, which pages give in backticks, exist."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import typer

import icechunk_async
from icechunk_async.cli.app import app
from tests.docs.run_page import REPOSITORY
from tests.docs.test_api import SHOWN
from tests.docs.test_pages import without_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_DOTTED = re.compile(r"icechunk_async(?:\.\w+)+|[A-Z]\w*[a-z]\w*(?:\.\w+)+")
_CLASS = re.compile(r"[A-Z]\w*[a-z][A-Z]\w*")
_OF_OTHERS = ("SparkSession.",)
# Decisions also name classes of the inside; the official package's names are tested for the facade.
_LEFT_OUT = {"decisions", "official-names.md"}
PAGES = sorted(
    page
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    if not _LEFT_OUT & set(page.parts)
)
CHANGELOG = REPOSITORY / "CHANGELOG.md"
# Pages show these name by name, not as modules.
_MODULES = ("icechunk_async.errors", "icechunk_async.storage")


@cache
def public() -> dict[str, list[Any]]:
    """Return the objects of the reference by their last names, of which the facade shares some."""
    found: dict[str, list[Any]] = {}
    for path in (*_MODULES, *SHOWN, *(f"icechunk_async.{it}" for it in icechunk_async.__all__)):
        shown = resolved(path)
        found.setdefault(path.rpartition(".")[2], []).append(shown)
        if isinstance(shown, ModuleType):
            for name in getattr(shown, "__all__", dir(shown)):
                found.setdefault(name, []).append(getattr(shown, name))
    return found


def resolved(path: str, found: Any = None) -> Any:
    """Return the object of a dotted name, which begins with a package or is a member of `found`."""
    names = path.split(".")
    if found is None:
        found = import_module(names.pop(0))
    for name in names:
        fields = getattr(found, "__dataclass_fields__", getattr(found, "__annotations__", {}))
        if hasattr(found, name):
            found = getattr(found, name)
        elif isinstance(found, ModuleType):
            found = import_module(f"{found.__name__}.{name}")
        elif name in fields:
            found = name  # its value is that of an instance
        else:
            raise AttributeError(name)
    return found


def _candidates(path: str) -> Iterator[Any]:
    first, _, rest = path.partition(".")
    owners = [None] if first == "icechunk_async" else public().get(first, [])
    for owner in owners:
        with suppress(AttributeError, ImportError):
            yield resolved(path if owner is None else rest, owner)


def _arguments(text: str) -> set[str]:
    """Return the keyword arguments of a call."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return set()
    return {it.arg for it in call.keywords if it.arg} if isinstance(call, ast.Call) else set()


def _exists(text: str) -> bool:
    """Return whether a dotted name of the library exists, and takes the arguments after it."""
    match = _DOTTED.match(text)
    if match is None or match[0].startswith(_OF_OTHERS):
        return True
    arguments = _arguments(text)
    return any(
        not arguments or arguments <= set(inspect.signature(it).parameters)
        for it in _candidates(match[0])
    )


def _options(command: Any) -> set[str]:
    """Return the options of a command; those of a group are those of its commands, too."""
    known = {it for option in command.params for it in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--install-completion"}
    return known.union(*map(_options, getattr(command, "commands", {}).values()))


def _without_such_a_command(text: str) -> Iterator[str]:
    """Give a command that does not exist, or the options that it does not have."""
    command: Any = typer.main.get_command(app)
    words = text.split()[1:]
    while words and hasattr(command, "commands") and re.match(r"[a-z]", words[0]):
        name = words.pop(0)
        if name not in command.commands:
            yield text
            return
        command = command.commands[name]
    known = _options(command)
    yield from (f"{text}: {it}" for it in words if re.match(r"--?[a-z]", it) and it not in known)


def _codes(page: Path) -> list[str]:
    return [" ".join(it.split()) for it in _CODE.findall(without_blocks(page))]


def _of(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda it: str(it.relative_to(REPOSITORY)))


@_of(PAGES)
def test_names_of_the_library_on_a_page_exist(page: Path) -> None:
    """Such as `Repository.open(cache=...)` and `icechunk_async.spark.verify`."""
    assert [it for it in _codes(page) if not _exists(it)] == []


@_of(PAGES)
def test_commands_on_a_page_exist_with_their_options(page: Path) -> None:
    """Such as `icechunk-async copy --as-zarr`."""
    commands = [it for it in _codes(page) if it.startswith("icechunk-async ")]
    assert [it for text in commands for it in _without_such_a_command(text)] == []


def test_classes_that_the_changelog_names_are_public() -> None:
    """It names no class of others."""
    named = {it for it in _codes(CHANGELOG) if _CLASS.fullmatch(it)}
    assert named
    assert sorted(named - public().keys()) == []


def test_the_page_about_the_command_lists_every_command_with_its_options() -> None:
    """A row for each."""
    page = REPOSITORY / "docs" / "reference" / "command.md"
    rows = dict(re.findall(r"^\| `([a-z-]+) (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    command: Any = typer.main.get_command(app)
    commands = command.commands
    assert sorted(rows) == sorted(commands)
    for name, row in rows.items():
        assert set(re.findall(r"`(--[a-z-]+)", row)) <= _options(commands[name]), name

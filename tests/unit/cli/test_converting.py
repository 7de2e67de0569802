"""Values of the command line are those of Typer, also where it does not convert them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.main import get_group

from icechunk_async.cli.app import LISTED
from icechunk_async.cli.converting import convert_only_what_differs

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ("2026-01-31", "main", "7", "a=b")
"""A time, text, a number and a pair: each is wrong somewhere."""


def group_of(module: str) -> Any:
    """Return the commands of a module as Typer makes them."""
    part = typer.Typer()
    import_module(f"icechunk_async.cli.{module}").register(part)
    return get_group(part)


def leaves(command: Any) -> Iterator[Any]:
    """Yield what is run: commands, and those of groups."""
    below = getattr(command, "commands", None)
    if below is None:
        yield command
    for it in (below or {}).values():
        yield from leaves(it)


def lines(command: Any) -> Iterator[list[str]]:
    """Yield command lines: nothing, the arguments alone, and with each option."""
    arguments = [it for it in command.params if it.param_type_name == "argument"]
    yield []
    for word in WORDS:
        yield [word] * sum(it.required for it in arguments)
        yield [word] * len(arguments)
        for option in command.params:
            if option.param_type_name == "option":
                value = [] if option.is_flag else [word]
                required = ["main"] * sum(it.required for it in arguments)
                yield [*required, option.opts[0], *value]


def meaning(command: Any, line: list[str]) -> object:
    """Return the values that a command would get, or the message that refuses the line."""
    try:
        return command.make_context("command", list(line)).params
    except Exception as error:  # noqa: BLE001 -- Click is a part of some versions of Typer
        return type(error).__name__, getattr(error, "format_message", error.__str__)()


@pytest.mark.parametrize("module", sorted(set(LISTED.values())))
def test_a_line_means_the_same_as_to_typer(module: str) -> None:
    """In every command: defaults, text, numbers, times, lists, what is wrong, what is missing."""
    group = group_of(module)
    convert_only_what_differs(group)
    for command, reference in zip(leaves(group), leaves(group_of(module)), strict=True):
        for line in lines(reference):
            assert meaning(command, line) == meaning(reference, line), (command.name, line)


def test_a_value_of_another_type_is_converted() -> None:
    """Numbers become numbers, and other words are refused with Typer's message."""
    group = group_of("commands.versions.log")
    convert_only_what_differs(group)
    log = group.commands["log"]
    assert log.make_context("log", ["url", "--limit", "3"]).params["number"] == 3
    refused = meaning(log, ["url", "--limit", "three"])
    assert isinstance(refused, tuple)
    assert refused[0] == "BadParameter"

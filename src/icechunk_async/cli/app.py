"""The command with its subcommands, and which module has which: one command imports no others."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, override

import typer
from typer.core import TyperGroup
from typer.main import get_command_name, get_group

from icechunk_async._version import __version__
from icechunk_async.cli.converting import convert_only_what_differs, shortened

if TYPE_CHECKING:
    from typer.models import CommandInfo

__all__ = ["LISTED", "app"]


# In the order in which help lists commands, which is why some modules are named twice.
_MODULES: Final = (
    ("commands.versions.history", ("init",)),
    ("commands.versions.log", ("log",)),
    ("commands.versions.history", ("show", "diff")),
    ("commands.data.contents", ("tree", "ls", "cat", "du", "stats")),
    ("commands.versions.refs", ("branch", "tag")),
    (
        "commands.versions.merging",
        ("undo", "revert", "restore", "merge", "cherry-pick", "fast-forward", "squash"),
    ),
    (
        "commands.versions.proposals",
        ("propose", "review", "accept", "reject", "protect", "unprotect"),
    ),
    ("commands.versions.changes", ("changes",)),
    ("commands.versions.watch", ("watch",)),
    ("commands.versions.changes", ("blame", "diff-values")),
    ("commands.data.serve", ("serve", "publish-static")),
    (
        "commands.versions.writers",
        ("sessions", "end-session", "transactions", "forget-transactions"),
    ),
    ("commands.operate.administration", ("status", "config", "ops", "probe")),
    (
        "commands.operate.upkeep",
        ("expire", "gc", "compact", "rewrite-manifests", "check", "migrate"),
    ),
    ("commands.operate.copies", ("copy", "sync")),
    ("commands.data.ingest", ("ingest",)),
    ("commands.operate.integrity", ("repair", "verify", "sums")),
    ("commands.data.queries", ("analyze", "aggregate", "sql")),
    ("demo.command", ("demo",)),
)


LISTED: Final = {name: module for module, names in _MODULES for name in names}
"""Modules below `icechunk_async.cli` by command, in the order of the help. Each `register` adds its
own, and a test compares."""


_EPILOG = (
    "URL is a path or a URL such as memory://name or file:///data/repository; it may name a ref "
    "and a path as well, as 's3://bucket/repo/|icechunk:@tag.v1/group' does. REF is a branch, a "
    "tag or a snapshot id, looked for in this order; four letters or more of an id name it, and "
    "main~2 is two snapshots before the tip of main. Every command takes --json (one document on "
    "standard output and nothing else; its keys are in the command's help) and --debug. Exit "
    "codes: 0 fine, 1 it cannot be done, 2 wrong usage, 130 interrupted; those of verify are in "
    "its help."
)


def _name_of(command: CommandInfo) -> str:
    return command.name or get_command_name(command.callback.__name__ if command.callback else "")


# Click and Typer read `commands` of a group as a dictionary, in help, in completion and in a call.
class _Commands(MutableMapping[str, Any]):
    """The commands by name; a command's module is imported when the command is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    @override
    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module = import_module(f"icechunk_async.cli.{LISTED[name]}")
            part = typer.Typer(rich_markup_mode="markdown", add_completion=False)
            # Into a separate group, which is dropped: only Typer makes commands of functions.
            module.register(part)
            # To make a command takes milliseconds, and only this one was asked for.
            part.registered_commands = [
                it for it in part.registered_commands if _name_of(it) == name
            ]
            made = get_group(part)
            convert_only_what_differs(made)
            self._made.update(made.commands)
        return self._made[name]

    @override
    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    @override
    def __delitem__(self, name: str) -> None:
        del self._made[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    @override
    def __len__(self) -> int:
        return len(LISTED)

    @override
    def __contains__(self, name: object) -> bool:
        return name in LISTED


class _Group(TyperGroup):
    """The command, whose subcommands come late."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.commands: Any = _Commands()

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before the name of a command."""
        return shortened(self, super().get_params(ctx))

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order in which help lists them."""
        # Not sorted: the order of help is from what is used daily to what is rare.
        return list(LISTED)


app = typer.Typer(
    cls=_Group,
    name="icechunk-async",
    help="Look at Icechunk repositories, change their branches and tags, and keep them healthy.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:  # noqa: FBT001  # Typer's signature
    if asked:
        typer.echo(f"icechunk-async {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass

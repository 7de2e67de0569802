"""The command with its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from icechunk_async.cli.commands.data import contents, ingest, queries, serve, sql
from icechunk_async.cli.commands.operate import administration, copies, integrity, upkeep
from icechunk_async.cli.commands.versions import (
    history,
    merging,
    proposals,
    refs,
    sessions,
    transactions,
    watch,
)
from icechunk_async.cli.demo import command as demo

__all__ = ["app"]

_EPILOG = (
    "URL is a path or a URL such as memory://name or file:///data/repository; it may name a ref "
    "and a path as well, as 's3://bucket/repo/|icechunk:@tag.v1/group' does. REF is a branch, a "
    "tag or a snapshot id, looked for in this order; four letters or more of an id name it, and "
    "main~2 is two snapshots before the tip of main. Every command takes --json (one document on "
    "standard output and nothing else; its keys are in the command's help) and --debug. Exit "
    "codes: 0 fine, 1 it cannot be done, 2 wrong usage, 130 interrupted; those of verify are in "
    "its help."
)

app = typer.Typer(
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
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"icechunk-async {version('icechunk-async')}")
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


history.register(app)
contents.register(app)
refs.register(app)
merging.register(app)
proposals.register(app)
watch.register(app)
serve.register(app)
sessions.register(app)
transactions.register(app)
administration.register(app)
upkeep.register(app)
copies.register(app)
ingest.register(app)
integrity.register(app)
queries.register(app)
sql.register(app)
demo.register(app)

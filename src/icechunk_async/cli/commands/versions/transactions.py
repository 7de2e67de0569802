"""`transactions` and `forget-transactions`: the commits that a branch takes once."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

import typer

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import (
    assembled,
    make_table,
    plain,
    time_head,
    time_of,
)
from icechunk_async.cli.declaring import repository_command

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]

_Branch = Annotated[str, typer.Option("--branch", help="The branch.")]
_Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of applications.")]


@dataclass(frozen=True, slots=True)
class TransactionLine:
    """The newest transaction of an application."""

    app_id: str
    version: int
    committed_at: datetime | None
    """None if an old version of this library wrote it."""


@dataclass(frozen=True, slots=True)
class TransactionList:
    """The document of `transactions`, the newest first."""

    branch: str
    transactions: list[TransactionLine] = field(default_factory=list[TransactionLine])


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The document of `forget-transactions`."""

    branch: str
    app_ids: list[str]
    snapshot_id: str


async def transactions(repository: Repository, *, branch: _Branch = "main") -> TransactionList:
    """List the newest transaction of each application that a branch is known to hold.

    A commit that names one of them, or an older one, is not made again. Of an application that
    committed nothing for 30 days, or a hundred others since, none is known.

    JSON keys: branch, transactions (each: app_id, version, committed_at).
    """
    found = await repository.recorded_transactions(branch)
    lines = [TransactionLine(it, one.version, one.committed_at) for it, one in found.items()]
    newest = sorted(lines, key=lambda it: (-_seconds(it.committed_at), it.app_id))
    return TransactionList(branch, newest)


def _seconds(moment: datetime | None) -> float:
    return 0 if moment is None else moment.timestamp()


async def forget_transactions(
    repository: Repository, names: _Names, *, branch: _Branch = "main"
) -> Forgotten:
    """Make a commit that no longer records the transactions of applications.

    The next commit under such a name is new, whatever its version is.

    JSON keys: branch, app_ids, snapshot_id.
    """
    snapshot_id = await repository.forget_transactions(names, branch)
    return Forgotten(branch, sorted(set(names)), str(snapshot_id))


def _show_transactions(document: TransactionList, console: Console) -> None:
    if not document.transactions:
        console.print(assembled("No transaction of ", document.branch, " is known."))
        return
    table = make_table("APPLICATION", "VERSION", time_head("COMMITTED", console))
    for it in document.transactions:
        when = plain("") if it.committed_at is None else time_of(it.committed_at, console)
        table.add_row(plain(it.app_id), plain(str(it.version)), when)
    console.print(table)


def _show_forgotten(document: Forgotten, console: Console) -> None:
    names = ", ".join(document.app_ids)
    console.print(assembled("Forgot the transactions of ", plain(names), "."))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(repository_command(transactions, _show_transactions))
    app.command("forget-transactions")(
        repository_command(
            forget_transactions,
            _show_forgotten,
            asks=lambda _: (
                "Forget which transactions were taken? An application that repeats one of them "
                "would commit it twice."
            ),
        )
    )

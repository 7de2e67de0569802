"""Writers: `sessions` with leases and `end-session`, `transactions` and `forget-transactions`.

A session with a lease is open somewhere, and can be ended here. A transaction is a commit that a
branch takes once, however often it is tried.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

import typer

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import (
    BRANCH,
    SNAPSHOT,
    assembled,
    make_table,
    plain,
    styled,
    time_head,
    time_of,
)
from icechunk_async.cli.declaring import repository_command

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]


_SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="The id of the session.")]


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session with a lease. Times are the storage's."""

    session_id: str
    state: str
    """``live``, ``expired``, ``committed`` or ``ended``."""
    branch: str
    base_snapshot_id: str
    began_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    age_seconds: float
    owner: str
    snapshot_id: str | None
    """The commit of a session that was committed."""
    segments: int


@dataclass(frozen=True, slots=True)
class SessionList:
    """The document of `sessions`, oldest first."""

    sessions: list[SessionLine] = field(default_factory=list[SessionLine])


@dataclass(frozen=True, slots=True)
class EndedSession:
    """The document of `end-session`."""

    session_id: str


async def sessions(repository: Repository) -> SessionList:
    """List the sessions with leases: those that live, and those that expired or ended lately.

    JSON keys: sessions (each: session_id, state, branch, base_snapshot_id, began_at,
    heartbeat_at, expires_at, age_seconds, owner, snapshot_id, segments).
    """
    found = await repository.sessions()
    return SessionList(
        [
            SessionLine(
                str(it.session_id),
                it.state.value,
                it.branch,
                str(it.base_id),
                it.began_at,
                it.heartbeat_at,
                it.expires_at,
                it.age.total_seconds(),
                it.owner,
                None if it.snapshot_id is None else str(it.snapshot_id),
                it.segments,
            )
            for it in found
        ]
    )


async def end_session(repository: Repository, session: _SessionId) -> EndedSession:
    """Take the lease from SESSION. It can no longer write or commit, wherever it runs.

    JSON keys: session_id.
    """
    await repository.end_session(session)
    return EndedSession(session)


def _show_sessions(document: SessionList, console: Console) -> None:
    if not document.sessions:
        console.print(styled("No session has a lease."))
        return
    table = make_table(
        "SESSION",
        "STATE",
        "BRANCH",
        "BASE",
        time_head("HEARTBEAT", console),
        time_head("EXPIRES", console),
        "AGE",
        "OWNER",
    )
    for it in document.sessions:
        table.add_row(
            plain(it.session_id),
            plain(it.state),
            plain(it.branch, BRANCH),
            plain(it.base_snapshot_id, SNAPSHOT),
            time_of(it.heartbeat_at, console),
            time_of(it.expires_at, console),
            plain(_age(it.age_seconds)),
            plain(it.owner),
        )
    console.print(table)


def _age(seconds: float) -> str:
    """Return a duration in the largest unit that it has two of."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _show_ended(document: EndedSession, console: Console) -> None:
    console.print(assembled("Ended session ", document.session_id, "."))


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
    # Those without a time come last.
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
    app.command()(repository_command(sessions, _show_sessions))
    app.command("end-session")(
        repository_command(
            end_session,
            _show_ended,
            asks=lambda it: (
                f"End the session {it['session']}? What it has not committed can be collected."
            ),
        )
    )
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

"""`sessions` and `end-session`: look at sessions with leases, and end one by hand."""

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

"""`log`: list the history of a repository."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import (
    BRANCH,
    SNAPSHOT,
    TAG,
    Listing,
    cell,
    joined,
    time_cell,
    time_head,
)
from icechunk_async.cli.declaring import AsOf, Ref, repository_command
from icechunk_async.cli.pager import paged
from icechunk_async.cli.targets import find_target, ref_targets

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository, SnapshotId
    from icechunk_async.cli.console import Cell
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo

__all__ = [
    "Log",
    "SnapshotLine",
    "line_of",
    "log",
    "names_of_snapshots",
    "refs_of",
    "register",
    "show_log",
]

_Number = Annotated[
    int | None,
    typer.Option("--limit", "--number", "-n", min=1, help="List at most this many snapshots."),
]


@dataclass(frozen=True, slots=True)
class SnapshotLine:
    """A snapshot in history."""

    id: str
    parent_id: str | None
    written_at: datetime
    message: str
    metadata: dict[str, JSON]
    branches: list[str]
    """Those whose tip it is."""
    tags: list[str]


@dataclass(frozen=True, slots=True)
class Log:
    """The document of `log`, newest first."""

    ref: str
    snapshot_id: str
    snapshots: list[SnapshotLine]


async def log(
    repository: Repository, ref: Ref = "main", *, number: _Number = None, as_of: AsOf = None
) -> Log:
    """List snapshots from a REF back to the first; a long list is paged on a terminal.

    JSON keys: ref, snapshot_id, snapshots (each: id, parent_id, written_at, message, metadata,
    branches, tags).
    """
    target = await find_target(repository, ref, as_of)
    # All names at once, before the walk: asked for line by line they would be requests for each.
    names = await names_of_snapshots(repository)
    lines: list[SnapshotLine] = []
    async for info in repository.ancestry(snapshot_id=target.snapshot_id):
        lines.append(line_of(info, names))
        if len(lines) == number:
            break
    return Log(target.ref, str(target.snapshot_id), lines)


async def names_of_snapshots(repository: Repository) -> dict[str, dict[SnapshotId, list[str]]]:
    """Return the branches and tags of each snapshot, by kind."""
    names: dict[str, dict[SnapshotId, list[str]]] = {}
    for kind in ("branch", "tag"):
        names[kind] = defaultdict(list)
        for name, snapshot_id in await ref_targets(repository, kind):
            names[kind][snapshot_id].append(name)
    return names


def line_of(info: SnapshotInfo, names: dict[str, dict[SnapshotId, list[str]]]) -> SnapshotLine:
    """Return the line of a snapshot."""
    return SnapshotLine(
        str(info.id),
        None if info.parent_id is None else str(info.parent_id),
        info.written_at,
        info.message,
        info.metadata,
        names["branch"].get(info.id, []),
        names["tag"].get(info.id, []),
    )


def show_log(document: Log, console: Console) -> None:
    """Print one line for each snapshot, in a pager if there are many."""
    table = Listing("SNAPSHOT", time_head("WRITTEN", console), "REFS", "MESSAGE")
    for line in document.snapshots:
        table.add_row(
            cell(line.id, SNAPSHOT),
            time_cell(line.written_at, console),
            refs_of(line),
            cell(line.message),
        )
    with paged(console):
        console.print(table)


def refs_of(line: SnapshotLine) -> Cell:
    """Return the names of a snapshot, as a cell."""
    return joined(
        ", ", [*(cell(it, BRANCH) for it in line.branches), *(cell(it, TAG) for it in line.tags)]
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(repository_command(log, show_log))

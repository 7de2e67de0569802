"""`watch`, `blame` and `diff-values`: commits as they come, and what is behind chunks and cells."""

from __future__ import annotations

from collections.abc import AsyncIterator  # noqa: TC003 -- Typer evaluates annotations
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import anyio.to_thread
import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_branch, complete_ref
from icechunk_async.cli.console import SNAPSHOT, make_table, plain, time_head, time_of
from icechunk_async.cli.declaring import Paths, Ref, repository_command, streaming_command
from icechunk_async.cli.webhook import Webhook
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.format.json.metadata import JSON

__all__ = ["register"]

_Branch = Annotated[
    str,
    typer.Argument(metavar="BRANCH", autocompletion=complete_branch, help="The branch to follow."),
]
_Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="REF",
        autocompletion=complete_ref,
        help="The last commit that is known. By default the tip.",
    ),
]
_Post = Annotated[
    str | None,
    typer.Option(
        "--post",
        metavar="URL",
        help="Send each commit there as a CloudEvent, again until it is taken. Needs the extra "
        "http.",
    ),
]
_Poll = Annotated[
    float, typer.Option("--poll", metavar="SECONDS", min=0.01, help="Time between two looks.")
]
_Count = Annotated[
    int | None, typer.Option("--count", min=1, help="End after this number of commits.")
]
_From = Annotated[
    str, typer.Argument(metavar="FROM", autocompletion=complete_ref, help="The first REF.")
]
_To = Annotated[
    str, typer.Argument(metavar="TO", autocompletion=complete_ref, help="The second REF.")
]
_Png = Annotated[
    Path | None,
    typer.Option(
        "--png",
        metavar="FILE",
        help="Also draw a picture, into this file. Needs the extra demo.",
        dir_okay=False,
        writable=True,
    ),
]
_Dark = Annotated[bool, typer.Option("--dark", help="Draw the picture light on dark.")]
_Path = Annotated[str, typer.Argument(metavar="PATH", help="The path of the array.")]


@dataclass(frozen=True, slots=True)
class CommitLine:
    """The document of `watch`: one commit."""

    branch: str
    snapshot_id: str
    parent_id: str | None
    written_at: datetime
    message: str
    metadata: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class BlamedCommit:
    """A commit that wrote chunks."""

    snapshot_id: str | None
    """None for chunks whose commit expired."""
    written_at: datetime | None
    message: str
    chunks: int
    coords: list[list[int]]
    """The first of the chunks."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """The document of `blame`."""

    ref: str
    path: str
    commits: list[BlamedCommit]
    """Newest first."""


@dataclass(frozen=True, slots=True)
class ChangedCell:
    """A cell whose value changed."""

    index: list[int]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangedArray:
    """The values of an array in two snapshots."""

    path: str
    cells: int
    changed: int
    share: float
    chunks: int
    min_change: float | None
    max_change: float | None
    mean_change: float | None
    first: list[ChangedCell]
    """The first of the changed cells."""


@dataclass(frozen=True, slots=True)
class ChangedValues:
    """The document of `diff-values`."""

    from_ref: str
    to_ref: str
    arrays: list[ChangedArray]


async def watch(
    repository: Repository,
    branch: _Branch = "main",
    *,
    since: _Since = None,
    post: _Post = None,
    poll: _Poll = 1.0,
    count: _Count = None,
) -> AsyncIterator[CommitLine]:
    """Print the commits of a branch as they come, until interrupted; oldest first.

    To continue after a restart, pass the id of the last commit as --since. With --post each commit
    is sent at least once, in order; the event's id is that of the snapshot, so that receivers
    can tell repetitions.

    JSON keys, one document a line: branch, snapshot_id, parent_id, written_at, message, metadata.
    """
    url = repository.storage.description.url
    webhook = None if post is None else Webhook(post, source=url)
    left = count
    async for info in repository.watch(
        branch, since=since, poll_seconds=poll, max_poll_seconds=max(poll, 30.0)
    ):
        parent = None if info.parent_id is None else str(info.parent_id)
        line = CommitLine(
            branch, str(info.id), parent, info.written_at, info.message, info.metadata
        )
        if webhook is not None:
            data = {**asdict(line), "written_at": line.written_at.isoformat()}
            await webhook.send(line.snapshot_id, line.written_at, branch, data)
        yield line
        if left is not None and (left := left - 1) == 0:
            return


async def blame(
    repository: Repository,
    path: _Path,
    ref: Ref = "main",
    *,
    png: _Png = None,
    dark: _Dark = False,
) -> Blamed:
    """Show which commit wrote each chunk of an array last, with --png also as a picture.

    JSON keys: ref, path, commits (each: snapshot_id, written_at, message, chunks, coords).
    """
    found = await repository.blame(path, ref=ref)
    if png is not None:
        await _draw(png, lambda: found.picture(dark=dark))
    commits: list[BlamedCommit] = []
    for number in (*range(len(found.commits)), -1):
        coords = found.coords[found.written_by == number]
        first: list[list[int]] = coords[:5].tolist()
        if number >= 0:
            info = found.commits[number]
            commits.append(
                BlamedCommit(str(info.id), info.written_at, info.message, len(coords), first)
            )
        elif len(coords):
            commits.append(BlamedCommit(None, None, "", len(coords), first))
    return Blamed(ref, found.path, commits)


async def diff_values(
    repository: Repository,
    start: _From,
    end: _To = "main",
    *,
    path: Paths = None,
    png: _Png = None,
    dark: _Dark = False,
) -> ChangedValues:
    """Show how many cells of each array changed between two snapshots, and by how much.

    Reads both versions of each chunk that changed. Arrays that only one side has are left out. The
    picture of --png shows where the values of the six arrays changed that changed most.

    JSON keys: from_ref, to_ref, arrays (each: path, cells, changed, share, chunks, min_change,
    max_change, mean_change, first (each: index, before, after)).
    """
    found = await repository.diff_values(start, end, paths=path)
    if png is not None:
        most = sorted(found, key=lambda it: -it.share)
        maps = [(it.title, it.map) for it in most if it.changed and it.map is not None]
        from icechunk_async.engine.versions.pictures import draw_changes  # noqa: PLC0415 -- slow

        await _draw(png, lambda: draw_changes(maps, dark=dark))
    arrays = [
        ChangedArray(
            it.path,
            it.cells,
            it.changed,
            it.share,
            it.chunks,
            it.min_change,
            it.max_change,
            it.mean_change,
            [
                ChangedCell(index, str(before), str(after))
                for index, before, after in zip(
                    it.first.indices.tolist(), it.first.before, it.first.after, strict=True
                )
            ],
        )
        for it in found
    ]
    return ChangedValues(start, end, arrays)


async def _draw(file: Path, draw: Callable[[], bytes]) -> None:
    """Draw a picture into a file; nothing is written if it cannot be drawn."""
    data = await anyio.to_thread.run_sync(draw)
    try:
        await anyio.Path(file).write_bytes(data)
    except OSError as error:
        raise InvalidInputError(f"--png {str(file)!r} cannot be written: {error}.") from error


def _show_commit(document: CommitLine, console: Console) -> None:
    console.print(
        Text.assemble(
            (document.snapshot_id, SNAPSHOT),
            "  ",
            # Not the age: the line stays on the screen.
            f"{document.written_at:%Y-%m-%d %H:%M:%S}",
            "  ",
            plain(document.message.split("\n", 1)[0]),
        ),
        soft_wrap=True,
    )


def _show_blamed(document: Blamed, console: Console) -> None:
    table = make_table("SNAPSHOT", time_head("WRITTEN", console), "CHUNKS", "MESSAGE")
    for commit in document.commits:
        shown = ", ".join("/".join(map(str, at)) for at in commit.coords)
        more = ", ..." if commit.chunks > len(commit.coords) else ""
        when = Text("expired") if commit.written_at is None else time_of(commit.written_at, console)
        name = Text(commit.snapshot_id or "unknown", SNAPSHOT)
        table.add_row(name, when, Text(f"{commit.chunks}: {shown}{more}"), plain(commit.message))
    console.print(table)


def _show_values(document: ChangedValues, console: Console) -> None:
    if not document.arrays:
        console.print("No values changed.")
        return
    table = make_table("ARRAY", "CHANGED", "OF", "SHARE", "MIN", "MEAN", "MAX", "FIRST")
    for it in document.arrays:
        sizes = (it.min_change, it.mean_change, it.max_change)
        shown = [Text("" if size is None else f"{size:+.6g}") for size in sizes]
        first = Text()
        if it.first:
            cell = it.first[0]
            where = ", ".join(map(str, cell.index))
            first = plain(f"[{where}] {cell.before} -> {cell.after}")
        table.add_row(
            plain(it.path),
            Text(f"{it.changed:,}"),
            Text(f"{it.cells:,}"),
            Text(f"{it.share:.3%}"),
            *shown,
            first,
        )
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(streaming_command(watch, _show_commit))
    app.command()(repository_command(blame, _show_blamed))
    app.command()(repository_command(diff_values, _show_values))

"""Changes and their authors: `changes` line by line, `diff-values` in numbers, and `blame`."""

from __future__ import annotations

from collections.abc import AsyncIterator  # noqa: TC003 -- Typer evaluates annotations
from contextlib import aclosing
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import anyio.to_thread
import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import (
    ADDED,
    CHANGED,
    REMOVED,
    SNAPSHOT,
    make_table,
    one_line,
    plain,
    time_head,
    time_of,
)
from icechunk_async.cli.declaring import Paths, Ref, repository_command, streaming_command
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.engine.versions.feed import Change
    from icechunk_async.zarr.values import CellChanges

    type Value = bool | int | float | str

__all__ = ["register"]


class Level(StrEnum):
    """How close the contents of arrays are looked at."""

    chunk = "chunk"
    cell = "cell"


_From = Annotated[
    str, typer.Argument(metavar="FROM", autocompletion=complete_ref, help="The first REF.")
]
_To = Annotated[
    str, typer.Argument(metavar="TO", autocompletion=complete_ref, help="The second REF.")
]
_Level = Annotated[Level, typer.Option("--level", help="List chunks, or cells with their values.")]
_EachCommit = Annotated[
    bool, typer.Option("--each-commit", help="What each commit changed, instead of the net change.")
]
_Limit = Annotated[int | None, typer.Option("--limit", min=1, help="End after this many lines.")]


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
class Line:
    """One change."""

    snapshot_id: str
    """The snapshot that has it."""
    what: str
    """``group``, ``array``, ``chunk`` or ``cell``."""
    change: str
    """``created``, ``deleted``, ``moved`` or ``updated``; of chunks ``added``, ``changed`` or
    ``removed``; of cells ``changed``."""
    path: str
    previous_path: str | None = None
    """Of what was moved."""
    index: list[int] | None = None
    """Of a chunk in the grid, or of a cell in the array."""
    before: Value | None = None
    """The value of a cell."""
    after: Value | None = None


async def changes(
    repository: Repository,
    start: _From,
    end: _To = "main",
    *,
    level: _Level = Level.chunk,
    each_commit: _EachCommit = False,
    limit: _Limit = None,
) -> AsyncIterator[Line]:
    """List what changed between two snapshots: groups, arrays, and each chunk or cell.

    Cells are those whose values differ; of a new array those that are not the fill value. Both
    versions of their chunks are read. For the paths alone diff is quicker, and for numbers
    diff-values.

    JSON keys, one document a line: snapshot_id, what (group, array, chunk or cell), change
    (created, deleted, moved, updated; of chunks added, changed or removed; of cells changed), path,
    previous_path (of what was moved), index (of a chunk or a cell), before, after (values of a
    cell; text if JSON has no such number).
    """
    count = 0
    found = repository.changes(start, end, net=not each_commit, level=level.value)
    # --limit may end it early, and its requests with it, not when garbage is collected.
    async with aclosing(found):  # type: ignore[type-var] # it is a generator
        async for change in found:
            for line in _lines(change):
                yield line
                count += 1
                if count == limit:
                    return


def _lines(change: Change | CellChanges) -> Iterator[Line]:
    from icechunk_async.versions import ChunkChange, ChunkChanges, NodeChange  # noqa: PLC0415 -- slow

    snapshot_id = str(change.snapshot_id)
    if isinstance(change, NodeChange):
        what = "array" if change.is_array else "group"
        yield Line(snapshot_id, what, change.kind, change.path, change.previous_path)
    elif isinstance(change, ChunkChanges):
        for coords, kind in zip(change.coords.tolist(), change.kinds.tolist(), strict=True):
            yield Line(
                snapshot_id, "chunk", ChunkChange(kind).name.lower(), change.path, index=coords
            )
    else:
        cells = zip(
            change.indices.tolist(), change.before.tolist(), change.after.tolist(), strict=True
        )
        for index, before, after in cells:
            yield Line(
                *(snapshot_id, "cell", "changed", change.path),
                index=index,
                before=_value(before),
                after=_value(after),
            )


def _value(found: object) -> Value:
    if isinstance(found, bool | int | str) or (isinstance(found, float) and isfinite(found)):
        return found
    return str(found)


_STYLES = {"created": ADDED, "added": ADDED, "deleted": REMOVED, "removed": REMOVED}


def _show(line: Line, console: Console) -> None:
    text = Text.assemble(
        (line.change, _STYLES.get(line.change, CHANGED)),
        f" {line.what} ",
        plain(one_line(line.path)),
    )
    if line.previous_path is not None:
        text.append(", which was ").append(plain(one_line(line.previous_path)))
    if line.index is not None:
        text.append(f" [{', '.join(map(str, line.index))}]")
    if line.what == "cell":
        text.append(": ").append(plain(one_line(str(line.before))))
        text.append(" -> ").append(plain(one_line(str(line.after))))
    console.print(text, soft_wrap=True)


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
    # -1 marks chunks whose commit expired; they come last, below the oldest that is known.
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


def _show_blamed(document: Blamed, console: Console) -> None:
    table = make_table("SNAPSHOT", time_head("WRITTEN", console), "CHUNKS", "MESSAGE")
    for commit in document.commits:
        shown = ", ".join("/".join(map(str, at)) for at in commit.coords)
        more = ", ..." if commit.chunks > len(commit.coords) else ""
        when = Text("expired") if commit.written_at is None else time_of(commit.written_at, console)
        name = Text(commit.snapshot_id or "unknown", SNAPSHOT)
        table.add_row(name, when, Text(f"{commit.chunks}: {shown}{more}"), plain(commit.message))
    console.print(table)


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


async def _draw(file: Path, draw: Callable[[], bytes]) -> None:
    """Draw a picture into a file; nothing is written if it cannot be drawn."""
    # Matplotlib takes seconds. The file is opened after it, so that a failure leaves no empty one.
    data = await anyio.to_thread.run_sync(draw)
    try:
        await anyio.Path(file).write_bytes(data)
    except OSError as error:
        raise InvalidInputError(f"--png {str(file)!r} cannot be written: {error}.") from error


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(streaming_command(changes, _show))
    app.command()(repository_command(blame, _show_blamed))
    app.command()(repository_command(diff_values, _show_values))

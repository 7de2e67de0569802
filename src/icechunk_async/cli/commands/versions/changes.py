"""`changes`: everything that turns one snapshot into another, line by line."""

from __future__ import annotations

from collections.abc import AsyncIterator  # noqa: TC003 -- Typer evaluates annotations
from contextlib import aclosing
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import ADDED, CHANGED, REMOVED, one_line, plain
from icechunk_async.cli.declaring import streaming_command

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(streaming_command(changes, _show))

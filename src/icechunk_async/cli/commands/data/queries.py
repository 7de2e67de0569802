"""Queries by value: `analyze` and `aggregate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.filesize import decimal
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import REMOVED, make_table, plain, showing_progress
from icechunk_async.cli.declaring import Paths, RefOption, repository_command
from icechunk_async.cli.targets import find_target

if TYPE_CHECKING:
    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]

_Array = Annotated[str, typer.Argument(metavar="ARRAY", help="The path of an array.")]
_Function = Annotated[
    Literal["count", "min", "max", "sum", "mean", "var", "std"],
    typer.Argument(metavar="FUNCTION", help="count, min, max, sum, mean, var or std."),
]
_Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITIONS",
        help='Only cells that fulfil these, such as "t2m > 320 and lat between 40 and 60".',
    ),
]


@dataclass(frozen=True, slots=True)
class Analyzed:
    """The document of `analyze`."""

    snapshot_id: str
    arrays: int
    chunks: int
    known: int
    bytes_read: int
    left_out: list[str]
    unreadable: list[str]


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The document of `aggregate`."""

    snapshot_id: str
    value: Any
    count: int
    chunks: int
    chunks_read: int
    bytes_read: int
    bytes_skipped: int


async def analyze(
    repository: Repository, *, ref: RefOption = "main", path: Paths = None
) -> Analyzed:
    """Give statistics to each chunk of a snapshot that has none, for queries by value.

    Chunks without them are read once. Later runs read the chunks that are new.

    Exit code 1 if chunks could not be read.

    JSON keys: snapshot_id, arrays, chunks (that got statistics), known (chunks that had them),
    bytes_read, left_out (messages about arrays whose values have no order), unreadable (messages).
    """
    target = (await find_target(repository, ref)).snapshot_id
    with showing_progress() as progress:
        done = await repository.analyze(snapshot_id=target, paths=path, progress=progress)
    return Analyzed(
        str(done.snapshot_id),
        done.arrays,
        done.chunks,
        done.known,
        done.bytes_read,
        list(done.left_out),
        list(done.unreadable),
    )


def _show_analyzed(document: Analyzed, console: Console) -> None:
    for it in document.left_out:
        console.print(plain(it), soft_wrap=True)
    for it in document.unreadable:
        console.print(Text.assemble(("Could not be read: ", REMOVED), plain(it)), soft_wrap=True)
    console.print(
        f"{document.chunks:,} chunk(s), {decimal(document.bytes_read)}, of {document.arrays:,} "
        f"array(s) got statistics; {document.known:,} had them.",
        soft_wrap=True,
    )


async def aggregate(
    repository: Repository,
    array: _Array,
    function: _Function,
    *,
    ref: RefOption = "main",
    where: _Where = None,
) -> Aggregated:
    """Show an aggregate of an array's values, reading as few chunks as possible.

    Chunks that have statistics (see analyze) are not read if all or none of their cells count.

    JSON keys: snapshot_id, value (text for times, infinities and NaN, null if there are no
    values), count, chunks, chunks_read, bytes_read, bytes_skipped.
    """
    target = (await find_target(repository, ref)).snapshot_id
    session = await repository.readonly_session(snapshot_id=target)
    found = await session.aggregate(array, function, where=where)
    return Aggregated(
        str(target),
        _json_value(found.value),
        found.count,
        found.chunks,
        found.chunks_read,
        found.bytes_read,
        found.bytes_skipped,
    )


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it: times, infinities and NaN as text."""
    known = value is None or isinstance(value, bool | int)
    known = known or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def _show_aggregated(document: Aggregated, console: Console) -> None:
    table = make_table("", "", header=False)
    table.add_row("value", plain(str(document.value)))
    table.add_row("values", f"{document.count:,}")
    table.add_row("chunks read", f"{document.chunks_read:,} of {document.chunks:,}")
    table.add_row("bytes read", decimal(document.bytes_read))
    table.add_row("bytes skipped", decimal(document.bytes_skipped))
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(
        repository_command(analyze, _show_analyzed, has_failed=lambda it: bool(it.unreadable))
    )
    app.command()(repository_command(aggregate, _show_aggregated))

"""Questions to values: `analyze` and `aggregate`, and `sql` with arrays as tables of DuckDB."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio.to_thread
import typer
from rich.filesize import decimal
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import REMOVED, make_table, plain, showing_progress
from icechunk_async.cli.declaring import Paths, RefOption, repository_command, url_command
from icechunk_async.cli.targets import find_target
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import duckdb
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


_Statement = Annotated[str, typer.Argument(metavar="STATEMENT", help="A statement of SQL.")]


_At = Annotated[
    list[str] | None,
    typer.Option(
        "--at",
        metavar="NAME=REF",
        help="Also the tables of another ref, as NAME_data and so on. May be repeated.",
    ),
]


_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE", help="Write all rows to a new file: .parquet or .csv."
    ),
]


_Limit = Annotated[
    int, typer.Option("--limit", metavar="ROWS", min=0, help="The most rows that are printed.")
]


_WRITERS = {".parquet": "write_parquet", ".csv": "write_csv"}


@dataclass(frozen=True, slots=True)
class Rows:
    """The document of `sql`."""

    columns: list[str]
    rows: list[list[Any]]
    more: bool
    output: str | None


async def sql(
    url: str,
    options: dict[str, Any],
    statement: _Statement,
    *,
    ref: RefOption = "main",
    at: _At = None,
    output: _Output = None,
    limit: _Limit = 100,
) -> Rows:
    """Query arrays with SQL: DuckDB reads the cells that the statement needs.

    The arrays of the root group are the table `data`, those of the group a/b are `a_b`; arrays of
    fewer dimensions are `data_by_time` and so on. Tables about the repository are
    `icechunk_snapshots`, `icechunk_refs`, `icechunk_ops`, `icechunk_nodes`, `icechunk_manifests`,
    `icechunk_chunks` and `icechunk_changes`.

    JSON keys: columns, rows, more (whether there are rows that are not shown), output (the file).
    """
    others = dict(map(_pair, at or ()))

    def work() -> Rows:
        from icechunk_async.arrow import connect  # noqa: PLC0415 -- slow to import
        from icechunk_async.tables import TABLES  # noqa: PLC0415 -- as above

        if output is not None:
            # Before any chunk is read: a wrong name must not cost an hour of reading first.
            _check(output)
        connection = connect(
            url,
            ref=ref,
            at=others,
            # Only tables that the statement may mean are made: each costs a look at its arrays'
            # documents.
            named_in=statement,
            tables=TABLES,
            storage_options=options or None,
        )

        # Only for an error: it opens every table, and not those alone that the statement names.
        def others_here() -> str:
            every = connect(url, ref=ref, at=others, tables=(), storage_options=options or None)
            return ", ".join(str(it) for (it,) in every.execute("show tables").fetchall())

        return _result(connection, statement, output, limit, others_here)

    # DuckDB blocks, and the arrays that it asks are read on the loop of code that blocks.
    return await anyio.to_thread.run_sync(work)


def _check(output: Path) -> None:
    if output.suffix not in _WRITERS:
        raise InvalidInputError(
            f"--output {str(output)!r} does not end with {' or '.join(_WRITERS)}, which says what "
            "to write."
        )
    if output.exists():
        raise InvalidInputError(f"There is a file {str(output)!r} already. Name a new one.")


def _pair(text: str) -> tuple[str, str]:
    name, separator, ref = text.partition("=")
    if not separator or not name or not ref:
        raise InvalidInputError(f"--at {text!r} is not of the form NAME=REF, such as old=main~1.")
    return name, ref


def _result(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    output: Path | None,
    limit: int,
    tables_here: Callable[[], str],
) -> Rows:
    import duckdb  # noqa: PLC0415 -- an extra

    try:
        if output is not None:
            found: Any = connection.sql(statement)
            if found is None:
                raise _no_rows(statement)
            getattr(found, _WRITERS[output.suffix])(str(output))
            return Rows(found.columns, [], more=False, output=str(output))
        done: Any = connection.execute(statement)
        if done is None:
            raise _no_rows(statement)
        columns = [str(it[0]) for it in done.description or ()]
        # One more than is shown tells that there are more, without reading all.
        rows: list[tuple[Any, ...]] = done.fetchmany(limit + 1)
    except duckdb.Error as error:
        reason = str(error)
        # DuckDB suggests of the tables that were made, and those are what the statement named.
        if isinstance(error, duckdb.CatalogException) and "Table with name" in reason:
            reason = f"{reason}\nTables of arrays here: {tables_here()}."
        raise InvalidInputError(f"DuckDB cannot run the statement: {reason}") from error
    shown = [list(map(_plain, row)) for row in rows[:limit]]
    return Rows(columns, shown, more=len(rows) > limit, output=None)


def _no_rows(statement: str) -> InvalidInputError:
    return InvalidInputError(
        f"There are no rows to show or to write: {statement!r} asks for none. Give a statement, "
        "such as 'from data limit 5'."
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what JSON does not have as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # Not for NaN and infinities, which JSON does not have: both differences are NaN.
        return value if value - value == 0 else str(value)
    if isinstance(value, list):
        return [_plain(it) for it in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value)


def _show_rows(document: Rows, console: Console) -> None:
    if document.output is not None:
        console.print(f"Wrote {document.output}.")
        return
    table = make_table(*document.columns)
    for row in document.rows:
        table.add_row(*("" if it is None else plain(str(it)) for it in row))
    console.print(table)
    if document.more:
        console.print("There are more rows: see --limit, or write all of them with --output.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(
        repository_command(analyze, _show_analyzed, has_failed=lambda it: bool(it.unreadable))
    )
    app.command()(repository_command(aggregate, _show_aggregated))
    app.command()(url_command(sql, _show_rows))

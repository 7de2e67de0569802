"""`serve` and `publish-static`: plain Zarr over HTTP, or as files."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator  # noqa: TC003 -- Typer evaluates annotations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import SNAPSHOT, make_table, plain, showing_progress
from icechunk_async.cli.declaring import (
    DestinationOptions,
    repository_command,
    streaming_command,
)
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]

_Host = Annotated[str, typer.Option("--host", help="Listen at this address; 0.0.0.0 is all.")]
_Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Listen at this port; 0 is any free one.")
]
_Grants = Annotated[
    Path | None,
    typer.Option(
        "--grants",
        metavar="FILE",
        help="Who may read what: a TOML file of tables [[grant]] with principal, token, paths and "
        "refs. By default everybody may read everything.",
        dir_okay=False,
    ),
]
_Cors = Annotated[
    list[str] | None,
    typer.Option(
        "--cors", metavar="ORIGIN", help="Only pages of this origin may read. May be repeated."
    ),
]
_Stored = Annotated[
    bool,
    typer.Option("--stored-documents", help="Serve documents of groups without consolidation."),
]
_Refresh = Annotated[
    float,
    typer.Option("--refresh", metavar="SECONDS", min=0, help="Time between looks at a branch."),
]
_Concurrent = Annotated[
    int, typer.Option("--max-concurrent", min=1, help="Requests served at the same time.")
]
_Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", min=0.1, help="Time for a request.")
]
_Destination = Annotated[
    str, typer.Argument(metavar="DESTINATION", help="Path or URL of the files.")
]
_Refs = Annotated[
    list[str] | None,
    typer.Option(
        "--ref",
        metavar="REF",
        autocompletion=complete_ref,
        help="A branch, a tag or a snapshot id; main by default. May be repeated.",
    ),
]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Write no access log on standard error.")]


@dataclass(frozen=True, slots=True)
class Serving:
    """The document of `serve`."""

    url: str
    """Of the server."""
    repository: str


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """A branch, a tag or a snapshot as files."""

    ref: str
    snapshot_id: str
    written: int
    kept: int
    deleted: int


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """The document of `publish-static`."""

    destination: str
    bytes_written: int
    refs: list[PublishedFolder]


async def serve(
    repository: Repository,
    *,
    # This machine alone, unless asked: by default everybody who reaches it may read everything.
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    grants: _Grants = None,
    cors: _Cors = None,
    stored_documents: _Stored = False,
    refresh: _Refresh = 1.0,
    max_concurrent: _Concurrent = 128,
    deadline: _Deadline = 30.0,
    quiet: _Quiet = False,
) -> AsyncIterator[Serving]:
    """Serve a repository as plain Zarr over HTTP, read-only, until interrupted.

    Arrays are below /@branch.main/, /@tag.v1/ and /@SNAPSHOT_ID/, for any reader of Zarr format 3.
    Each line of the access log on standard error tells who read what. Needs the extra serve.

    JSON keys, one document: url, repository.
    """
    from icechunk_async.gateway import app, read_grants  # noqa: PLC0415 -- slow to import
    from icechunk_async.gateway.server import listening, run, url_of  # noqa: PLC0415 -- slow to import

    # Read first: a server that starts without the grants it was given would let everybody in.
    given = () if grants is None else read_grants(await _text_of(grants), str(grants))
    gateway = app(
        repository,
        grants=given,
        consolidated=not stored_documents,
        refresh_seconds=refresh,
        max_concurrent_requests=max_concurrent,
        deadline_seconds=deadline,
        cors=cors or ("*",),
    )
    if not quiet:
        _log_to_stderr()
    with listening(host, port) as listener:
        # Once it listens: with --port 0 only the listener knows the port, and who reads the line
        # may connect.
        yield Serving(url_of(listener), repository.storage.description.url)
        async with gateway:
            await run(gateway, listener, deadline_seconds=deadline)


async def _text_of(file: Path) -> str:
    try:
        return await anyio.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--grants {str(file)!r} cannot be read: {error}.") from error


def _log_to_stderr() -> None:
    """Write the lines of the access log; other messages of the gateway go there as they come."""
    log = logging.getLogger("icechunk_async.gateway")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Else each line would come twice where the root logger prints as well.
    log.propagate = False


def _show(document: Serving, console: Console) -> None:
    console.print(
        Text.assemble("Serving ", document.repository, " at ", (document.url, "bold")),
        soft_wrap=True,
    )
    console.print(Text(f"Arrays of main: {document.url}/@branch.main/"), soft_wrap=True)


async def publish_static(
    repository: Repository,
    destination: _Destination,
    *,
    destination_option: DestinationOptions = None,
    ref: _Refs = None,
    stored_documents: _Stored = False,
) -> PublishedFiles:
    """Write what serve serves as files, for a file server without a process.

    Each branch, tag or snapshot becomes a folder such as @branch.main, of plain Zarr and a page.
    Run it again to bring a branch up to date, or to mend what was interrupted: it writes the
    chunks that changed and deletes those that are gone. A destination with other files is refused.

    JSON keys: destination, bytes_written, refs (each: ref, snapshot_id, written, kept, deleted).
    """
    from icechunk_async.gateway import publish_static as publish  # noqa: PLC0415 -- slow to import

    with showing_progress() as progress:
        done = await publish(
            repository,
            destination,
            refs=ref or ("main",),
            storage_options=dict(destination_option or ()),
            consolidated=not stored_documents,
            progress=progress,
        )
    refs = [
        PublishedFolder(it.ref, str(it.snapshot_id), it.written, it.kept, it.deleted)
        for it in done.refs
    ]
    return PublishedFiles(destination, done.bytes_written, refs)


def _show_published(document: PublishedFiles, console: Console) -> None:
    table = make_table("FOLDER", "SNAPSHOT", "WRITTEN", "KEPT", "DELETED")
    for it in document.refs:
        counts = (Text(f"{count:,}") for count in (it.written, it.kept, it.deleted))
        table.add_row(plain(f"@{it.ref}"), Text(it.snapshot_id, SNAPSHOT), *counts)
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(streaming_command(serve, _show, authorizes=True))
    app.command()(repository_command(publish_static, _show_published, authorizes=True))

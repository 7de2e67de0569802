"""`ingest`: bring an array of TileDB into a repository."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import SNAPSHOT, plain
from icechunk_async.cli.declaring import OptionPair, parse_pair, repository_command

if TYPE_CHECKING:
    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]

_Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="URL or path of a dense TileDB array: tiledb+s3://bucket/array, tiledb:///array.",
        show_default=False,
    ),
]
_Path = Annotated[str, typer.Option("--path", metavar="PATH", help="The group that it becomes.")]
_Branch = Annotated[str, typer.Option("--branch", help="The branch to commit to.")]
_History = Annotated[
    bool,
    typer.Option("--history", help="Commit a snapshot for each moment at which it was written."),
]
_Copy = Annotated[
    bool,
    typer.Option(
        "--copy", help="Copy what chunks cannot refer to: tiles in parts, and cells of any length."
    ),
]
_Validity = Annotated[
    bool,
    typer.Option(
        "--validity",
        help="Write attributes that may be null, each with an array of 0 for null and 1.",
    ),
]
_Attributes = Annotated[
    list[str] | None,
    typer.Option("--attribute", metavar="NAME", help="Only this attribute. May be repeated."),
]
_SourceOptions = Annotated[
    list[OptionPair] | None,
    typer.Option(
        "--source-option",
        metavar="KEY=VALUE",
        parser=parse_pair,
        help="An option of the storage backend of the source. May be repeated.",
    ),
]


@dataclass(frozen=True, slots=True)
class IngestedSnapshot:
    """A snapshot that was committed."""

    snapshot_id: str
    end: int
    referenced: int
    copied: int


@dataclass(frozen=True, slots=True)
class IngestList:
    """The document of `ingest`, the oldest first."""

    source: str
    branch: str
    path: str
    snapshots: list[IngestedSnapshot] = field(default_factory=list[IngestedSnapshot])


async def ingest(
    repository: Repository,
    *,
    source: _Source,
    path: _Path,
    branch: _Branch = "main",
    history: _History = False,
    copy: _Copy = False,
    validity: _Validity = False,
    attribute: _Attributes = None,
    source_option: _SourceOptions = None,
) -> IngestList:
    """Make a dense TileDB array a group of Zarr arrays, whose chunks refer to its tiles.

    A container of the repository's configuration must cover the source. Run it again to bring
    what is new; with --history each moment of TileDB becomes a snapshot.

    JSON keys: source, branch, path, snapshots (each: snapshot_id, end in milliseconds since 1970,
    referenced and copied, numbers of chunks).
    """
    from icechunk_async.tiledb import ingest_array  # noqa: PLC0415  # imports Zarr

    found = await ingest_array(
        repository,
        source,
        path,
        branch=branch,
        history=history,
        attributes=attribute or None,
        copy=copy,
        validity=validity,
        storage_options=dict(source_option or ()),
    )
    snapshots = [
        IngestedSnapshot(str(it.snapshot_id), it.end, it.referenced, it.copied) for it in found
    ]
    return IngestList(source, branch, path, snapshots)


def _show(document: IngestList, console: Console) -> None:
    for it in document.snapshots:
        text = Text.assemble(
            (it.snapshot_id, SNAPSHOT),
            f": {it.referenced:,} chunk(s) refer to tiles, {it.copied:,} were copied.",
        )
        console.print(text, soft_wrap=True)
    if not document.snapshots:
        console.print(
            Text.assemble(plain(document.path, "bold"), " was up to date."), soft_wrap=True
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(repository_command(ingest, _show))

"""Copies: `copy` and `sync`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import BRANCH, REMOVED, SNAPSHOT, plain, showing_progress
from icechunk_async.cli.declaring import (
    DestinationOptions,
    OptionPair,
    parse_time_or_age,
    repository_command,
)
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]


def _parse_since(text: str) -> object:
    """Read a snapshot id, a time or an age.

    Raises:
        typer.BadParameter: the text is of another form.
    """
    try:
        # First: no time and no age looks like an id of twenty letters.
        return SnapshotId.parse(text)
    except InvalidInputError:
        return parse_time_or_age(text, "a snapshot id")


_Destination = Annotated[
    str, typer.Argument(metavar="DESTINATION", help="URL or path of the copy.", show_default=False)
]
_Refs = Annotated[
    list[str] | None,
    typer.Option(
        "--ref",
        metavar="NAME",
        autocompletion=complete_ref,
        help="Only this branch or tag, with its history. May be repeated.",
    ),
]
_Since = Annotated[
    Any,
    typer.Option(
        "--since",
        metavar="TIME",
        parser=_parse_since,
        help="Leave out older history: an ISO 8601 time, an age such as 90d, or a snapshot id.",
    ),
]
_Paths = Annotated[
    list[str] | None,
    typer.Option(
        "--path",
        metavar="PATH",
        help="Only this array or group, with the groups above it. May be repeated.",
    ),
]
_Shallow = Annotated[
    bool,
    typer.Option(
        "--shallow",
        help="Leave chunks where they are: the copy refers to those of the original.",
    ),
]
_AsZarr = Annotated[
    bool,
    typer.Option(
        "--as-zarr",
        help="Write one branch or tag as a plain Zarr hierarchy, which needs no Icechunk to read.",
    ),
]
_DiscardChanges = Annotated[
    bool,
    typer.Option(
        "--discard-changes",
        help="Undo what was committed or changed at the destination. It is lost.",
    ),
]


@dataclass(frozen=True, slots=True)
class ChangedRef:
    """A branch or tag that changed at the destination."""

    kind: str
    name: str
    change: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Copied:
    """The document of `copy` and `sync`."""

    destination: str
    objects_copied: int
    bytes_copied: int
    objects_skipped: int
    """Those that an earlier copy had brought, as far as the copy looked at them."""
    objects_by_service: int
    """Those that the storage service copied itself; bytes_copied does not count them."""
    refs: list[ChangedRef]
    discarded: list[str]
    """Changes at the destination that were undone, in words."""
    origin_prefix: str | None
    """The URL prefix that readers of a shallow copy authorize."""


async def copy(
    repository: Repository,
    *,
    destination: _Destination,
    destination_option: DestinationOptions = None,
    ref: _Refs = None,
    since: _Since = None,
    path: _Paths = None,
    shallow: _Shallow = False,
    as_zarr: _AsZarr = False,
) -> Copied:
    """Copy a repository to another storage, or bring an earlier copy up to date.

    Run it again to continue a copy that was interrupted, or to bring what is new. The copy is
    whole at every moment. A destination that holds anything else, or that somebody committed to,
    is refused. Writers need not stop. With --path snapshots get other ids; with --shallow
    what is collected in the original is lost in the copy.

    JSON keys: destination, objects_copied, bytes_copied, objects_skipped (there already),
    objects_by_service (copied without their bytes passing through here), refs (each: kind, name,
    change, before, after), discarded, origin_prefix (of a shallow copy: what readers --authorize).
    """
    return await _copy(
        repository,
        destination,
        destination_option,
        refs=ref,
        since=since,
        paths=path,
        shallow=shallow,
        as_zarr=as_zarr,
    )


async def sync(
    repository: Repository,
    *,
    destination: _Destination,
    destination_option: DestinationOptions = None,
    ref: _Refs = None,
    since: _Since = None,
    path: _Paths = None,
    shallow: _Shallow = False,
    discard_changes: _DiscardChanges = False,
) -> Copied:
    """Make a copy show what the repository shows, again and again.

    As copy, and branches that were reset or deleted in the repository are named. If somebody
    committed to the copy, the command says what, and stops; with --discard-changes it undoes
    that. An unchanged repository costs a few requests, and new commits cost what they added.

    JSON keys: destination, objects_copied, bytes_copied, objects_skipped (there already),
    objects_by_service (copied without their bytes passing through here), refs (each: kind, name,
    change, before, after), discarded (in words), origin_prefix (of a shallow copy: what readers
    --authorize).
    """
    return await _copy(
        repository,
        destination,
        destination_option,
        refs=ref,
        since=since,
        paths=path,
        shallow=shallow,
        discard_changes=discard_changes,
    )


async def _copy(
    repository: Repository,
    destination: str,
    options: list[OptionPair] | None,
    *,
    refs: list[str] | None,
    since: Any,
    paths: list[str] | None,
    shallow: bool,
    discard_changes: bool = False,
    as_zarr: bool = False,
) -> Copied:
    with showing_progress() as progress:
        done = await repository.copy_to(
            destination,
            storage_options=dict(options or ()),
            refs=refs or None,
            since=since,
            paths=paths or None,
            shallow=shallow,
            discard_changes=discard_changes,
            as_zarr=as_zarr,
            progress=progress,
        )
    changed = [
        ChangedRef(it.kind, it.name, it.change, _text(it.before), _text(it.after))
        for it in done.refs
    ]
    return Copied(
        destination,
        done.objects_copied,
        done.bytes_copied,
        done.objects_skipped,
        done.objects_by_service,
        changed,
        list(done.discarded),
        done.origin_prefix,
    )


def _text(snapshot_id: SnapshotId | None) -> str | None:
    return None if snapshot_id is None else str(snapshot_id)


_STYLES: Mapping[str, str] = {"deleted": REMOVED}


def _show_copied(document: Copied, console: Console) -> None:
    for it in document.discarded:
        text = Text.assemble(("Undone ", REMOVED), "at the destination: ", plain(it))
        console.print(text, soft_wrap=True)
    if not document.objects_copied:
        words = " was up to date."
    else:
        through = f"{decimal(document.bytes_copied)} through this process"
        words = (
            f": {document.objects_copied:,} object(s) copied, {through}; "
            f"{document.objects_skipped:,} were there already."
        )
    console.print(Text.assemble(plain(document.destination, "bold"), words), soft_wrap=True)
    if document.origin_prefix is not None:
        text = Text.assemble("Its readers need --authorize ", plain(document.origin_prefix), ".")
        console.print(text, soft_wrap=True)


def _show_synced(document: Copied, console: Console) -> None:
    for it in document.refs:
        where = f" from {it.before}" if it.change == "moved" else ""
        at = it.after or it.before or ""
        text = Text.assemble(
            f"{it.kind} ",
            plain(it.name, BRANCH),
            (f" {it.change}", _STYLES.get(it.change, "")),
            f"{where}{' to' if where else ' at'} ",
            (at, SNAPSHOT),
        )
        console.print(text, soft_wrap=True)
    _show_copied(document, console)


def _before_discarding(arguments: Mapping[str, Any]) -> str | None:
    if not arguments["discard_changes"]:
        return None
    return f"Undo what others changed at {arguments['destination']}?"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(repository_command(copy, _show_copied, authorizes=True))
    app.command()(repository_command(sync, _show_synced, asks=_before_discarding))

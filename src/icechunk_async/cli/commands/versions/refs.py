"""`branch` and `tag`: list, create, reset and delete references."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_branch, complete_ref, complete_tag
from icechunk_async.cli.console import (
    BRANCH,
    SNAPSHOT,
    TAG,
    Listing,
    assembled,
    cell,
    plain,
    time_cell,
    time_head,
)
from icechunk_async.cli.declaring import AsOf, Ref, repository_command
from icechunk_async.cli.targets import CONCURRENT_LOOKUPS, find_target, ref_targets

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["RefList", "register"]

_ONLY_ITS: Final = "What only it holds can be read by id until garbage is collected."
_Name = Annotated[str, typer.Argument(metavar="NAME", help="The name.")]
_Branch = Annotated[
    str, typer.Argument(metavar="NAME", help="The name.", autocompletion=complete_branch)
]
_Tag = Annotated[str, typer.Argument(metavar="NAME", help="The name.", autocompletion=complete_tag)]
_NewTip = Annotated[
    str, typer.Argument(metavar="REF", autocompletion=complete_ref, help="The new tip.")
]


@dataclass(frozen=True, slots=True)
class RefLine:
    """A branch or a tag."""

    name: str
    snapshot_id: str
    written_at: datetime
    message: str


@dataclass(frozen=True, slots=True)
class RefList:
    """The document of `branch list` and `tag list`, ascending by name."""

    kind: str
    """``branch`` or ``tag``."""
    refs: list[RefLine] = field(default_factory=list[RefLine])


@dataclass(frozen=True, slots=True)
class RefChange:
    """The document of the commands that change a branch or a tag."""

    action: str
    """``created``, ``reset`` or ``deleted``."""
    kind: str
    """``branch`` or ``tag``."""
    name: str
    snapshot_id: str | None
    """The snapshot that it names now; None if it was deleted."""
    previous_snapshot_id: str | None
    """The snapshot that it named before; None if it is new."""


async def list_branches(repository: Repository) -> RefList:
    """List the branches.

    JSON keys: kind, refs (each: name, snapshot_id, written_at, message).
    """
    return await _list(repository, "branch")


async def list_tags(repository: Repository) -> RefList:
    """List the tags.

    JSON keys: kind, refs (each: name, snapshot_id, written_at, message).
    """
    return await _list(repository, "tag")


async def _list(repository: Repository, kind: str) -> RefList:
    targets = await ref_targets(repository, kind)
    # Where one file holds all snapshots no lookup waits, and tasks would only import what starts
    # them.
    limit = CONCURRENT_LOOKUPS if repository.engine.history.state is None else 1
    infos = await bounded_map(
        lambda target: repository.lookup_snapshot(target[1]), targets, limit=limit
    )
    lines = [
        RefLine(name, str(info.id), info.written_at, info.message)
        for (name, _), info in zip(targets, infos, strict=True)
    ]
    return RefList(kind, lines)


async def create_branch(
    repository: Repository, name: _Name, ref: Ref = "main", *, as_of: AsOf = None
) -> RefChange:
    """Create a branch whose tip is REF.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """
    target = await find_target(repository, ref, as_of)
    await repository.create_branch(name, target.snapshot_id)
    return RefChange("created", "branch", name, str(target.snapshot_id), None)


async def reset_branch(
    repository: Repository, name: _Branch, ref: _NewTip, *, as_of: AsOf = None
) -> RefChange:
    """Move a branch to REF. What only it held can be read by id until garbage is collected.

    The branch is moved only if nobody else moved it meanwhile.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """
    # Looked up before the target, so that a move by others in between is noticed.
    before = await repository.lookup_branch(name)
    target = await find_target(repository, ref, as_of)
    await repository.reset_branch(name, target.snapshot_id, from_snapshot_id=before)
    return RefChange("reset", "branch", name, str(target.snapshot_id), str(before))


async def delete_branch(repository: Repository, name: _Branch) -> RefChange:
    """Delete a branch. What only it held can be read by id until garbage is collected.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """
    before = await repository.lookup_branch(name)
    await repository.delete_branch(name)
    return RefChange("deleted", "branch", name, None, str(before))


async def create_tag(
    repository: Repository, name: _Name, ref: Ref = "main", *, as_of: AsOf = None
) -> RefChange:
    """Give the snapshot of REF a permanent name.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """
    target = await find_target(repository, ref, as_of)
    await repository.create_tag(name, target.snapshot_id)
    return RefChange("created", "tag", name, str(target.snapshot_id), None)


async def delete_tag(repository: Repository, name: _Tag) -> RefChange:
    """Delete a tag. Its name can never be used again.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """
    before = await repository.lookup_tag(name)
    await repository.delete_tag(name)
    return RefChange("deleted", "tag", name, None, str(before))


def _show_list(document: RefList, console: Console) -> None:
    if not document.refs:
        console.print(
            "There are no branches." if document.kind == "branch" else "There are no tags."
        )
        return
    table = Listing(document.kind.upper(), "SNAPSHOT", time_head("WRITTEN", console), "MESSAGE")
    style = BRANCH if document.kind == "branch" else TAG
    for ref in document.refs:
        name, snapshot_id = cell(ref.name, style), cell(ref.snapshot_id, SNAPSHOT)
        table.add_row(name, snapshot_id, time_cell(ref.written_at, console), cell(ref.message))
    console.print(table)


def _show_change(document: RefChange, console: Console) -> None:
    style = BRANCH if document.kind == "branch" else TAG
    text = assembled(
        f"{document.action.capitalize()} {document.kind} ", plain(document.name, style)
    )
    if document.snapshot_id is not None:
        text.append(" at ").append(document.snapshot_id, SNAPSHOT)
    if document.previous_snapshot_id is not None:
        text.append("; it was at ").append(document.previous_snapshot_id, SNAPSHOT)
    console.print(text.append("."), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    branch = typer.Typer(help="List and change branches.", no_args_is_help=True)
    branch.command("list")(repository_command(list_branches, _show_list))
    branch.command("create")(repository_command(create_branch, _show_change))
    branch.command("reset")(
        repository_command(
            reset_branch,
            _show_change,
            asks=lambda it: f"Move the branch {it['name']} to {it['ref']}? {_ONLY_ITS}",
        )
    )
    branch.command("delete")(
        repository_command(
            delete_branch,
            _show_change,
            asks=lambda it: f"Delete the branch {it['name']}? {_ONLY_ITS}",
        )
    )
    app.add_typer(branch, name="branch")
    tag = typer.Typer(help="List, create and delete tags.", no_args_is_help=True)
    tag.command("list")(repository_command(list_tags, _show_list))
    tag.command("create")(repository_command(create_tag, _show_change))
    tag.command("delete")(
        repository_command(
            delete_tag,
            _show_change,
            asks=lambda it: f"Delete the tag {it['name']}? No tag can ever have this name again.",
        )
    )
    app.add_typer(tag, name="tag")

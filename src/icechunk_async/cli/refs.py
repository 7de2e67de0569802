"""Commands about branches and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from icechunk_async._concurrency import bounded_map
from icechunk_async.cli import render
from icechunk_async.cli.documents import RefChange, RefLine, RefList
from icechunk_async.cli.opening import find_target, on_repository
from icechunk_async.cli.options import (  # noqa: TC001  # Typer reads them at run time
    AsJson,
    AsOf,
    Debug,
    Options,
    Ref,
    Url,
)
from icechunk_async.cli.run import answer
from icechunk_async.errors import NotFoundError

if TYPE_CHECKING:
    from icechunk_async import Repository, SnapshotId

__all__ = ["read_refs", "ref_targets", "register"]

_CONCURRENT_LOOKUPS = 16

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The name.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    branch = typer.Typer(help="List and change branches.", no_args_is_help=True)
    branch.command("list")(list_branches)
    branch.command("create")(create_branch)
    branch.command("reset")(reset_branch)
    branch.command("delete")(delete_branch)
    app.add_typer(branch, name="branch")
    tag = typer.Typer(help="List, create and delete tags.", no_args_is_help=True)
    tag.command("list")(list_tags)
    tag.command("create")(create_tag)
    tag.command("delete")(delete_tag)
    app.add_typer(tag, name="tag")


def list_branches(
    url: Url, *, option: Options = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """List the branches.

    JSON keys: kind, refs (each: name, snapshot_id, written_at, message).
    """
    work = on_repository(url, option, lambda it: read_refs(it, "branch"))
    answer(work, render.ref_list, as_json=as_json, debug=debug)


def list_tags(
    url: Url, *, option: Options = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """List the tags.

    JSON keys: kind, refs (each: name, snapshot_id, written_at, message).
    """
    work = on_repository(url, option, lambda it: read_refs(it, "tag"))
    answer(work, render.ref_list, as_json=as_json, debug=debug)


def create_branch(
    url: Url,
    name: _Name,
    ref: Ref = "main",
    *,
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Create a branch whose tip is REF.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """

    async def create(repository: Repository) -> RefChange:
        target = await find_target(repository, ref, as_of)
        await repository.create_branch(name, target.snapshot_id)
        return RefChange("created", "branch", name, str(target.snapshot_id), None)

    work = on_repository(url, option, create)
    answer(work, render.ref_change, as_json=as_json, debug=debug)


def reset_branch(
    url: Url,
    name: _Name,
    ref: Annotated[str, typer.Argument(metavar="REF", help="Its new tip.")],
    *,
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Move a branch to REF; what only it held can be read by id until it is collected.

    It is moved only if nobody else moved it meanwhile.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """

    async def reset(repository: Repository) -> RefChange:
        before = await repository.lookup_branch(name)
        target = await find_target(repository, ref, as_of)
        await repository.reset_branch(name, target.snapshot_id, from_snapshot_id=before)
        return RefChange("reset", "branch", name, str(target.snapshot_id), str(before))

    work = on_repository(url, option, reset)
    answer(work, render.ref_change, as_json=as_json, debug=debug)


def delete_branch(
    url: Url, name: _Name, *, option: Options = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Delete a branch; what only it held can be read by id until it is collected.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """

    async def delete(repository: Repository) -> RefChange:
        before = await repository.lookup_branch(name)
        await repository.delete_branch(name)
        return RefChange("deleted", "branch", name, None, str(before))

    work = on_repository(url, option, delete)
    answer(work, render.ref_change, as_json=as_json, debug=debug)


def create_tag(
    url: Url,
    name: _Name,
    ref: Ref = "main",
    *,
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Give the snapshot of REF a name for good.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """

    async def create(repository: Repository) -> RefChange:
        target = await find_target(repository, ref, as_of)
        await repository.create_tag(name, target.snapshot_id)
        return RefChange("created", "tag", name, str(target.snapshot_id), None)

    work = on_repository(url, option, create)
    answer(work, render.ref_change, as_json=as_json, debug=debug)


def delete_tag(
    url: Url, name: _Name, *, option: Options = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Delete a tag; its name can never be used again.

    JSON keys: action, kind, name, snapshot_id, previous_snapshot_id.
    """

    async def delete(repository: Repository) -> RefChange:
        before = await repository.lookup_tag(name)
        await repository.delete_tag(name)
        return RefChange("deleted", "tag", name, None, str(before))

    work = on_repository(url, option, delete)
    answer(work, render.ref_change, as_json=as_json, debug=debug)


async def read_refs(repository: Repository, kind: str) -> RefList:
    """Answer what ``branch list`` and ``tag list`` show."""
    targets = await ref_targets(repository, kind)
    infos = await bounded_map(
        lambda target: repository.lookup_snapshot(target[1]), targets, limit=_CONCURRENT_LOOKUPS
    )
    lines = [
        RefLine(name, str(info.id), info.written_at, info.message)
        for (name, _), info in zip(targets, infos, strict=True)
    ]
    return RefList(kind, lines)


async def ref_targets(repository: Repository, kind: str) -> list[tuple[str, SnapshotId]]:
    """Answer the branches or tags and what they name, ascending by name."""
    is_branch = kind == "branch"
    names = await (repository.list_branches() if is_branch else repository.list_tags())
    lookup = repository.lookup_branch if is_branch else repository.lookup_tag

    async def find(name: str) -> tuple[str, SnapshotId] | None:
        try:
            return name, await lookup(name)
        except NotFoundError:  # deleted since the names were listed
            return None

    found = await bounded_map(find, sorted(names), limit=_CONCURRENT_LOOKUPS)
    return [target for target in found if target is not None]

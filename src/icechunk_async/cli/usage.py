"""Commands about space: ``du`` and ``stats``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from icechunk_async._concurrency import bounded_map
from icechunk_async.cli import render_operating as render
from icechunk_async.cli.opening import on_repository, open_session
from icechunk_async.cli.operating_documents import ArrayUsage, Usage, Volume
from icechunk_async.cli.options import (  # noqa: TC001  # Typer reads them at run time
    AsJson,
    AsOf,
    Debug,
    Options,
    Ref,
    Url,
)
from icechunk_async.cli.run import answer
from icechunk_async.errors import NodeNotFoundError

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async import Repository, Session, SnapshotId

__all__ = ["register"]

_CONCURRENT_ARRAYS = 16


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (du, stats):
        app.command()(command)


def du(
    url: Url,
    ref: Ref = "main",
    *,
    path: Annotated[
        str, typer.Option("--path", metavar="PATH", help="Only arrays at or below it.")
    ] = "/",
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what the chunks of each array take in one snapshot.

    Bytes that several arrays or snapshots share are counted wherever they are used; stats counts
    them once.

    JSON keys: ref, snapshot_id, arrays (each: path, chunks, native_bytes, virtual_bytes,
    inline_bytes), native_bytes, virtual_bytes, inline_bytes.
    """
    work = on_repository(url, option, lambda it: _read_usage(it, ref, path, as_of))
    answer(work, render.usage, as_json=as_json, debug=debug)


async def _read_usage(repository: Repository, ref: str, path: str, as_of: datetime | None) -> Usage:
    from icechunk_async.repository.paths import check_path  # noqa: PLC0415  # slow to import

    path = check_path(path)
    target, session = await open_session(repository, ref, as_of)
    tree = session.workspace.tree
    if path != "/" and tree.get(path) is None:
        raise NodeNotFoundError(
            f"There is nothing at {path!r} in snapshot {target.snapshot_id}; 'tree' shows what "
            "is there.",
            path=path,
        )
    paths = sorted({path, *tree.paths(path)})
    found = [node.path for node in map(tree.get, paths) if node is not None and node.array]
    arrays = await bounded_map(partial(_array, session), found, limit=_CONCURRENT_ARRAYS)
    return Usage(
        target.ref,
        str(target.snapshot_id),
        arrays,
        sum(it.native_bytes for it in arrays),
        sum(it.virtual_bytes for it in arrays),
        sum(it.inline_bytes for it in arrays),
    )


async def _array(session: Session, path: str) -> ArrayUsage:
    from icechunk_async.format.chunk_refs import Kind  # noqa: PLC0415  # slow to import

    refs = await session.workspace.all_refs(path)
    native, virtual, inline = (
        int(refs.lengths[refs.kinds == kind].sum())
        for kind in (Kind.NATIVE, Kind.VIRTUAL, Kind.INLINE)
    )
    return ArrayUsage(path, len(refs), native, virtual, inline)


def stats(
    url: Url, *, option: Options = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Show what all chunks of all snapshots take that a branch or tag leads to, each counted once.

    JSON keys: url, spec_version, branches, tags, snapshots, native_bytes, virtual_bytes,
    inline_bytes.
    """
    answer(on_repository(url, option, _read_volume), render.volume, as_json=as_json, debug=debug)


async def _read_volume(repository: Repository) -> Volume:
    branches, tags = await repository.branches(), await repository.tags()
    known: set[SnapshotId] = set()
    for tip in (*branches.values(), *tags.values()):
        async for info in repository.ancestry(snapshot_id=tip):
            if info.id in known:
                break
            known.add(info.id)
    found = await repository.chunk_storage_stats()
    return Volume(
        repository.storage.description.url,
        repository.spec_version,
        len(branches),
        len(tags),
        len(known),
        found.native_bytes,
        found.virtual_bytes,
        found.inlined_bytes,
    )

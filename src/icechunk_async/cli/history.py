"""Commands about repositories and their history: ``init``, ``log``, ``show``, ``diff``."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async.cli import render
from icechunk_async.cli.documents import (
    Comparison,
    Created,
    Details,
    Log,
    Move,
    SnapshotLine,
    Touched,
    TouchedChunks,
)
from icechunk_async.cli.opening import find_target, on_repository
from icechunk_async.cli.options import (  # noqa: TC001  # Typer reads them at run time
    AsJson,
    AsOf,
    Debug,
    Options,
    Ref,
    Url,
)
from icechunk_async.cli.refs import ref_targets
from icechunk_async.cli.run import answer

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    import numpy as np
    import numpy.typing as npt

    from icechunk_async import Repository, SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.repository.diff import Diff

__all__ = ["read_comparison", "read_details", "read_log", "register"]

_MaxChunks = Annotated[
    int, typer.Option("--max-chunks", min=0, help="Coordinates to list for each array.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (init, log, show, diff):
        app.command()(command)


def init(
    url: Url,
    *,
    spec_version: Annotated[
        int, typer.Option(min=1, max=2, help="Version of the Icechunk format.")
    ] = 2,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Try the storage's promises first, or accept the risk. Tried unless the backend "
            "has made sure of them itself.",
        ),
    ] = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Create a repository at a location that holds nothing yet.

    JSON keys: url, spec_version, branch, snapshot_id.
    """

    def work() -> Coroutine[Any, Any, Created]:
        from icechunk_async import Repository  # noqa: PLC0415  # slow to import

        options = dict(option or ())
        return _init(
            Repository.create(url, spec_version=spec_version, storage_options=options, probe=probe)
        )

    answer(work, render.created, as_json=as_json, debug=debug)


async def _init(created: AbstractAsyncContextManager[Repository]) -> Created:
    async with created as repository:
        tip = await repository.lookup_branch("main")
        where = repository.storage.description.url
        return Created(where, repository.spec_version, "main", str(tip))


def log(
    url: Url,
    ref: Ref = "main",
    *,
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, help="Snapshots to list at most.")
    ] = None,
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List snapshots from a REF back to the first.

    JSON keys: ref, snapshot_id, snapshots (each: id, parent_id, written_at, message, metadata,
    branches, tags).
    """
    work = on_repository(url, option, lambda it: read_log(it, ref, as_of=as_of, number=number))
    answer(work, render.log, as_json=as_json, debug=debug)


async def read_log(
    repository: Repository,
    ref: str,
    *,
    as_of: datetime | None = None,
    number: int | None = None,
) -> Log:
    """Answer what ``log`` shows."""
    target = await find_target(repository, ref, as_of)
    names = await _names(repository)
    lines: list[SnapshotLine] = []
    async for info in repository.ancestry(snapshot_id=target.snapshot_id):
        lines.append(_line(info, names))
        if len(lines) == number:
            break
    return Log(target.ref, str(target.snapshot_id), lines)


def show(
    url: Url,
    ref: Annotated[
        str, typer.Argument(metavar="SNAPSHOT|REF", help="A snapshot id, a branch or a tag.")
    ] = "main",
    *,
    as_of: AsOf = None,
    max_chunks: _MaxChunks = 5,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show one snapshot: when and why it was made, and what it touched.

    JSON keys: ref, snapshot (as in log), touched (null for the first snapshot, else new_groups,
    new_arrays, deleted_groups, deleted_arrays, updated_groups, updated_arrays, updated_chunks
    (each: path, count, bounds, coords), moved_nodes (each: source, target)).
    """
    work = on_repository(url, option, lambda it: read_details(it, ref, as_of, max_chunks))
    answer(work, render.details, as_json=as_json, debug=debug)


async def read_details(
    repository: Repository, ref: str, as_of: datetime | None, max_chunks: int
) -> Details:
    """Answer what ``show`` shows."""
    target = await find_target(repository, ref, as_of)
    info = await repository.lookup_snapshot(target.snapshot_id)
    touched = None
    if info.parent_id is not None:
        touched = await _touched(repository, info.parent_id, info.id, max_chunks)
    return Details(target.ref, _line(info, await _names(repository)), touched)


def diff(
    url: Url,
    start: Annotated[str, typer.Argument(metavar="FROM", help="The older REF.")],
    end: Annotated[str, typer.Argument(metavar="TO", help="The newer REF.")],
    *,
    max_chunks: _MaxChunks = 5,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what the commits after one REF up to another touched.

    JSON keys: from_ref, from_snapshot_id, to_ref, to_snapshot_id, touched (as in show).
    """
    work = on_repository(url, option, lambda it: read_comparison(it, start, end, max_chunks))
    answer(work, render.comparison, as_json=as_json, debug=debug)


async def read_comparison(
    repository: Repository, start: str, end: str, max_chunks: int
) -> Comparison:
    """Answer what ``diff`` shows."""
    older = await find_target(repository, start)
    newer = await find_target(repository, end)
    touched = await _touched(repository, older.snapshot_id, newer.snapshot_id, max_chunks)
    return Comparison(older.ref, str(older.snapshot_id), newer.ref, str(newer.snapshot_id), touched)


async def _names(repository: Repository) -> dict[str, dict[SnapshotId, list[str]]]:
    """Answer the branches and tags of each snapshot, by kind."""
    names: dict[str, dict[SnapshotId, list[str]]] = {}
    for kind in ("branch", "tag"):
        names[kind] = defaultdict(list)
        for name, snapshot_id in await ref_targets(repository, kind):
            names[kind][snapshot_id].append(name)
    return names


def _line(info: SnapshotInfo, names: dict[str, dict[SnapshotId, list[str]]]) -> SnapshotLine:
    return SnapshotLine(
        str(info.id),
        None if info.parent_id is None else str(info.parent_id),
        info.written_at,
        info.message,
        info.metadata,
        names["branch"].get(info.id, []),
        names["tag"].get(info.id, []),
    )


async def _touched(
    repository: Repository, start: SnapshotId, end: SnapshotId, max_chunks: int
) -> Touched:
    found: Diff = await repository.diff(from_snapshot_id=start, to_snapshot_id=end)
    return Touched(
        sorted(found.new_groups),
        sorted(found.new_arrays),
        sorted(found.deleted_groups),
        sorted(found.deleted_arrays),
        sorted(found.updated_groups),
        sorted(found.updated_arrays),
        [
            _chunks(path, coords, max_chunks)
            for path, coords in sorted(found.updated_chunks.items())
        ],
        [Move(source, target) for source, target in found.moved_nodes],
    )


def _chunks(path: str, coords: npt.NDArray[np.uint32], max_chunks: int) -> TouchedChunks:
    first: list[list[int]] = coords[:max_chunks].tolist()
    bounds: list[tuple[int, int]] = []
    if len(coords):
        lowest, highest = coords.min(axis=0).tolist(), coords.max(axis=0).tolist()
        bounds = [(low, high + 1) for low, high in zip(lowest, highest, strict=True)]
    return TouchedChunks(path, len(coords), bounds, first)

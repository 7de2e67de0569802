"""`init`, `show` and `diff`: create a repository, and what its commits changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.commands.versions.log import (
    SnapshotLine,
    line_of,
    names_of_snapshots,
    refs_of,
)
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import (
    ADDED,
    BRANCH,
    CHANGED,
    QUIET,
    REMOVED,
    SNAPSHOT,
    age_of,
    assembled,
    make_table,
    plain,
    styled,
    text_of,
)
from icechunk_async.cli.declaring import AsOf, repository_command, url_command
from icechunk_async.cli.targets import find_target

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console

    from icechunk_async import Repository, SnapshotId
    from icechunk_async.engine.history.diff import Diff

__all__ = [
    "Comparison",
    "Touched",
    "diff",
    "register",
    "show_comparison",
    "show_touched",
    "touched_of",
]

_SpecVersion = Annotated[int, typer.Option(min=1, max=2, help="Version of the Icechunk format.")]
_Layout = Annotated[
    str | None,
    typer.Option(
        help="A layout other than that of the format version: 'format-2-numbered', 'alpha' or "
        "'first-draft'."
    ),
]
_Probe = Annotated[
    bool | None,
    typer.Option(
        "--probe/--no-probe",
        help="Try the storage's promises first, or accept the risk. By default they are tried "
        "unless the backend has verified them itself.",
    ),
]
_MaxChunks = Annotated[
    int, typer.Option("--max-chunks", min=0, help="Coordinates to list for each array.")
]
_AnyRef = Annotated[
    str,
    typer.Argument(
        metavar="SNAPSHOT|REF",
        autocompletion=complete_ref,
        help="A snapshot id, a branch or a tag.",
    ),
]
_From = Annotated[
    str, typer.Argument(metavar="FROM", autocompletion=complete_ref, help="The older REF.")
]
_To = Annotated[
    str, typer.Argument(metavar="TO", autocompletion=complete_ref, help="The newer REF.")
]


@dataclass(frozen=True, slots=True)
class Created:
    """The document of `init`."""

    url: str
    spec_version: int
    layout: str
    branch: str
    snapshot_id: str


@dataclass(frozen=True, slots=True)
class TouchedChunks:
    """Chunks of one array that were set or deleted."""

    path: str
    count: int
    bounds: list[tuple[int, int]]
    """The box of the chunk grid that they lie in: ``(start, stop)`` along each axis."""
    coords: list[list[int]]
    """The first of them."""


@dataclass(frozen=True, slots=True)
class Move:
    """A node that was moved."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Touched:
    """The changes of commits, by path."""

    new_groups: list[str]
    new_arrays: list[str]
    deleted_groups: list[str]
    deleted_arrays: list[str]
    updated_groups: list[str]
    updated_arrays: list[str]
    updated_chunks: list[TouchedChunks]
    moved_nodes: list[Move]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was touched."""
        return self == Touched([], [], [], [], [], [], [], [])


@dataclass(frozen=True, slots=True)
class Details:
    """The document of `show`."""

    ref: str
    snapshot: SnapshotLine
    touched: Touched | None
    """None for the first snapshot."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The document of `diff`."""

    from_ref: str
    from_snapshot_id: str
    to_ref: str
    to_snapshot_id: str
    touched: Touched


async def init(
    url: str,
    options: dict[str, Any],
    *,
    spec_version: _SpecVersion = 2,
    layout: _Layout = None,
    probe: _Probe = None,
) -> Created:
    """Create a repository at an empty location.

    JSON keys: url, spec_version (0 for layouts before version 1), layout, branch, snapshot_id.
    """
    from icechunk_async import Repository  # noqa: PLC0415  # slow to import

    async with Repository.create(
        url, spec_version=spec_version, layout=layout, storage_options=options, probe=probe
    ) as repository:
        tip = await repository.lookup_branch("main")
        where = repository.storage.description.url
        return Created(where, repository.spec_version, repository.layout, "main", str(tip))


async def show(
    repository: Repository, ref: _AnyRef = "main", *, as_of: AsOf = None, max_chunks: _MaxChunks = 5
) -> Details:
    """Show one snapshot: when and why it was made, and what it changed.

    JSON keys: ref, snapshot (as in log), touched (null for the first snapshot, else new_groups,
    new_arrays, deleted_groups, deleted_arrays, updated_groups, updated_arrays, updated_chunks
    (each: path, count, bounds, coords), moved_nodes (each: source, target)).
    """
    target = await find_target(repository, ref, as_of)
    info = await repository.lookup_snapshot(target.snapshot_id)
    touched = None
    if info.parent_id is not None:
        touched = await _read_touched(repository, info.parent_id, info.id, max_chunks)
    return Details(target.ref, line_of(info, await names_of_snapshots(repository)), touched)


async def diff(
    repository: Repository, start: _From, end: _To, *, max_chunks: _MaxChunks = 5
) -> Comparison:
    """Show what the commits after one REF up to another changed.

    JSON keys: from_ref, from_snapshot_id, to_ref, to_snapshot_id, touched (as in show).
    """
    older = await find_target(repository, start)
    newer = await find_target(repository, end)
    touched = await _read_touched(repository, older.snapshot_id, newer.snapshot_id, max_chunks)
    return Comparison(older.ref, str(older.snapshot_id), newer.ref, str(newer.snapshot_id), touched)


async def _read_touched(
    repository: Repository, start: SnapshotId, end: SnapshotId, max_chunks: int
) -> Touched:
    return touched_of(await repository.diff(from_snapshot_id=start, to_snapshot_id=end), max_chunks)


def touched_of(found: Diff, max_chunks: int) -> Touched:
    """Return the document of what was touched."""
    return Touched(
        sorted(found.new_groups),
        sorted(found.new_arrays),
        sorted(found.deleted_groups),
        sorted(found.deleted_arrays),
        sorted(found.updated_groups),
        sorted(found.updated_arrays),
        [
            _read_chunks(path, coords, max_chunks)
            for path, coords in sorted(found.updated_chunks.items())
        ],
        [Move(source, target) for source, target in found.moved_nodes],
    )


def _read_chunks(path: str, coords: npt.NDArray[np.uint32], max_chunks: int) -> TouchedChunks:
    first: list[list[int]] = coords[:max_chunks].tolist()
    bounds: list[tuple[int, int]] = []
    if len(coords):
        lowest, highest = coords.min(axis=0).tolist(), coords.max(axis=0).tolist()
        # chunks (2, 5) and (4, 5) -> [(2, 5), (5, 6)]
        bounds = [(low, high + 1) for low, high in zip(lowest, highest, strict=True)]
    return TouchedChunks(path, len(coords), bounds, first)


def _format_of(document: Created) -> str:
    named = f"layout {document.layout}"
    # Layouts before version 1 have a name only.
    if document.spec_version == 0:
        return named
    version = f"format version {document.spec_version}"
    plain_layout = document.layout == f"format-{document.spec_version}"
    return version if plain_layout else f"{version}, {named}"


def _show_created(document: Created, console: Console) -> None:
    console.print(
        assembled(
            "Created a repository of ",
            (_format_of(document), "bold"),
            " at ",
            plain(document.url, "bold"),
            ". Its branch ",
            (document.branch, BRANCH),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            ".",
        ),
        soft_wrap=True,
    )


def _show_details(document: Details, console: Console) -> None:
    line = document.snapshot
    table = make_table("", "", header=False)
    table.add_row("snapshot", styled(line.id, SNAPSHOT))
    table.add_row(
        "parent", styled(line.parent_id, SNAPSHOT) if line.parent_id else "none, it is the first"
    )
    table.add_row(
        "written", styled(f"{line.written_at:%Y-%m-%d %H:%M:%S.%f} UTC ({age_of(line.written_at)})")
    )
    table.add_row("message", plain(line.message))
    for name, value in sorted(line.metadata.items()):
        table.add_row(plain(name), plain(json.dumps(value, ensure_ascii=False)))
    if line.branches or line.tags:
        table.add_row("refs", text_of(refs_of(line)))
    console.print(table)
    if document.touched is not None:
        console.print()
        show_touched(document.touched, console)


def show_comparison(document: Comparison, console: Console) -> None:
    """Print what changed between two snapshots."""
    console.print(
        assembled(
            "From ",
            plain(document.from_ref, "bold"),
            f" ({document.from_snapshot_id}) to ",
            plain(document.to_ref, "bold"),
            f" ({document.to_snapshot_id}):",
        ),
        soft_wrap=True,
    )
    show_touched(document.touched, console)


def show_touched(document: Touched, console: Console) -> None:
    """Print what was touched."""
    if document.is_empty:
        console.print("Nothing was touched.")
        return
    table = make_table("", "", "", header=False)
    rows = [
        ("+ new group", ADDED, document.new_groups),
        ("+ new array", ADDED, document.new_arrays),
        ("- deleted group", REMOVED, document.deleted_groups),
        ("- deleted array", REMOVED, document.deleted_arrays),
        ("~ metadata of group", CHANGED, document.updated_groups),
        ("~ metadata of array", CHANGED, document.updated_arrays),
    ]
    for label, style, paths in rows:
        for path in paths:
            table.add_row(styled(label, style), plain(path))
    for chunks in document.updated_chunks:
        table.add_row(
            styled("~ chunks of array", CHANGED), plain(chunks.path), styled(_chunks(chunks), QUIET)
        )
    for move in document.moved_nodes:
        moved = assembled(plain(move.source), " to ", plain(move.target))
        table.add_row(styled("> moved", CHANGED), moved)
    console.print(table)


def _chunks(chunks: TouchedChunks) -> str:
    shown = ", ".join("/".join(map(str, coords)) for coords in chunks.coords)
    if chunks.count <= len(chunks.coords):
        return f"{chunks.count}: {shown or 'the only one'}"
    box = ", ".join(f"{start}:{stop}" for start, stop in chunks.bounds)
    return f"{chunks.count} in [{box}]: {shown}, ..." if shown else f"{chunks.count} in [{box}]"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(url_command(init, _show_created))
    app.command()(repository_command(show, _show_details))
    app.command()(repository_command(diff, show_comparison))

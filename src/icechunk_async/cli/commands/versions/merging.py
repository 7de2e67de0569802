"""`undo`, `revert`, `restore`, `merge`, `cherry-pick`, `fast-forward` and `squash`."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.commands.versions.history import Touched, show_touched, touched_of
from icechunk_async.cli.completing import complete_branch, complete_ref
from icechunk_async.cli.console import BRANCH, REMOVED, SNAPSHOT, plain
from icechunk_async.cli.declaring import DryRun, Paths, repository_command
from icechunk_async.errors import MergeConflictError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.versions import MergeReport

__all__ = ["register"]

_SHOWN_CHUNKS = 5

_Commit = Annotated[
    str,
    typer.Argument(
        metavar="COMMIT",
        autocompletion=complete_ref,
        help="The id of a snapshot, or a ref such as main~2.",
    ),
]
_Source = Annotated[
    str,
    typer.Argument(
        metavar="REF", autocompletion=complete_ref, help="A branch, a tag or a snapshot id."
    ),
]
_Branch = Annotated[
    str, typer.Argument(metavar="BRANCH", autocompletion=complete_branch, help="The branch.")
]
_On = Annotated[
    str,
    typer.Option(
        "--on", metavar="BRANCH", autocompletion=complete_branch, help="The branch to commit to."
    ),
]
_Onto = Annotated[
    str,
    typer.Option(
        "--onto", metavar="BRANCH", autocompletion=complete_branch, help="The branch to commit to."
    ),
]
_Into = Annotated[
    str,
    typer.Option(
        "--into", metavar="BRANCH", autocompletion=complete_branch, help="The branch to commit to."
    ),
]
_To = Annotated[
    str,
    typer.Option(
        "--to", metavar="REF", autocompletion=complete_ref, help="Where the branch is moved to."
    ),
]
_Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="REF",
        autocompletion=complete_ref,
        help="The snapshot that the new commit follows.",
    ),
]
_Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="REF",
        autocompletion=complete_ref,
        help="What both began with. By default the common ancestor.",
    ),
]
_Message = Annotated[str | None, typer.Option("--message", "-m", help="The message of the commit.")]


@dataclass(frozen=True, slots=True)
class Clash:
    """A conflict in a document of `merge` and its like."""

    kind: str
    path: str
    chunks: int
    coords: list[list[int]]
    """The first of the chunks."""
    source_commits: list[str]
    branch_commits: list[str]


_BY_ID: Final = "What it had can be read by id until garbage is collected."


@dataclass(frozen=True, slots=True)
class Combination:
    """The document of `revert`, `restore`, `merge` and `cherry-pick`."""

    action: str
    branch: str
    base_id: str
    source_id: str
    previous_id: str
    snapshot_id: str | None
    """The new commit; None without one."""
    dry_run: bool
    touched: Touched
    conflicts: list[Clash] = field(default_factory=list[Clash])


@dataclass(frozen=True, slots=True)
class Moved:
    """The document of `undo`, `fast-forward` and `squash`."""

    action: str
    branch: str
    snapshot_id: str
    previous_id: str


async def undo(repository: Repository, branch: _Branch = "main") -> Moved:
    """Take back the last commit of a branch, by moving the branch to the snapshot before it.

    The commit can be read by its id until garbage is collected.

    JSON keys: action, branch, snapshot_id, previous_id.
    """
    # Only to be shown. The method looks itself, and moves the branch from what it saw or not at
    # all.
    before = await repository.lookup_branch(branch)
    return Moved("undone", branch, str(await repository.undo(branch)), str(before))


async def revert(
    repository: Repository,
    commit: _Commit,
    *,
    on: _On = "main",
    message: _Message = None,
    dry_run: DryRun = False,
) -> Combination:
    """Take back one commit by a new one; commits after it stay.

    Exit code 1 if later commits changed the same.

    JSON keys: action, branch, base_id, source_id, previous_id, snapshot_id, dry_run, touched (as in
    show), conflicts (each: kind, path, chunks, coords, source_commits, branch_commits).
    """
    return await _report(
        "reverted",
        lambda: repository.revert(commit, on=on, message=message, dry_run=dry_run),
        dry_run=dry_run,
    )


async def restore(
    repository: Repository,
    ref: _Source,
    *,
    path: Paths = None,
    on: _On = "main",
    message: _Message = None,
    dry_run: DryRun = False,
) -> Combination:
    """Bring arrays and groups back to how they were in another snapshot, by a new commit.

    JSON keys: as in revert.
    """
    return await _report(
        "restored",
        lambda: repository.restore(ref, paths=path, on=on, message=message, dry_run=dry_run),
        dry_run=dry_run,
    )


async def merge(
    repository: Repository,
    source: _Source,
    *,
    into: _Into = "main",
    base: _Base = None,
    message: _Message = None,
    dry_run: DryRun = False,
) -> Combination:
    """Merge what a branch changed into another branch, by one commit.

    Exit code 1 if both changed the same; what clashes is listed, and nothing is committed.

    JSON keys: as in revert.
    """
    return await _report(
        "merged",
        lambda: repository.merge(source, into=into, base=base, message=message, dry_run=dry_run),
        dry_run=dry_run,
    )


async def cherry_pick(
    repository: Repository,
    commit: _Commit,
    *,
    onto: _Onto = "main",
    message: _Message = None,
    dry_run: DryRun = False,
) -> Combination:
    """Make the changes of one commit on another branch, by a new commit.

    JSON keys: as in revert.
    """
    return await _report(
        "picked",
        lambda: repository.cherry_pick(commit, onto=onto, message=message, dry_run=dry_run),
        dry_run=dry_run,
    )


async def fast_forward(repository: Repository, branch: _Branch, *, to: _To) -> Moved:
    """Move a branch forward to a snapshot that has the branch's tip before it.

    JSON keys: as in undo.
    """
    before = await repository.lookup_branch(branch)
    return Moved("moved", branch, str(await repository.fast_forward(branch, to=to)), str(before))


async def squash(
    repository: Repository, branch: _Branch, *, since: _Since, message: _Message = None
) -> Moved:
    """Replace the commits of a branch after a snapshot by one that has all their changes.

    JSON keys: as in undo.
    """
    before = await repository.lookup_branch(branch)
    made = await repository.squash(branch, since=since, message=message)
    return Moved("squashed", branch, str(made), str(before))


async def _report(
    action: str, work: Callable[[], Awaitable[MergeReport]], *, dry_run: bool
) -> Combination:
    try:
        found = await work()
    # A conflict is a result here, not an error: it is listed, and the exit code is 1.
    except MergeConflictError as error:
        report: MergeReport = error.context["report"]  # type: ignore[assignment]
        found = report
    clashes = [
        Clash(
            it.kind.name.lower().replace("_", " "),
            it.path,
            len(it.coords),
            [list(at) for at in it.coords[:_SHOWN_CHUNKS]],
            [str(info.id) for info in it.source_commits],
            [str(info.id) for info in it.branch_commits],
        )
        for it in found.conflicts
    ]
    return Combination(
        action,
        found.branch,
        str(found.base_id),
        str(found.source_id),
        str(found.previous_id),
        None if found.snapshot_id is None else str(found.snapshot_id),
        dry_run,
        touched_of(found.changes, _SHOWN_CHUNKS),
        clashes,
    )


def _show(document: Combination, console: Console) -> None:
    for clash in document.conflicts:
        text = Text.assemble(("conflict ", REMOVED), f"{clash.kind} at ", plain(clash.path, "bold"))
        if clash.chunks:
            shown = ", ".join("/".join(map(str, at)) for at in clash.coords)
            more = ", ..." if clash.chunks > len(clash.coords) else ""
            text.append(f", {clash.chunks} chunk(s): {shown}{more}")
        console.print(text, soft_wrap=True)
        for whose, ids in (("source", clash.source_commits), ("branch", clash.branch_commits)):
            if ids:
                console.print(f"    commits of the {whose}: {', '.join(ids)}", soft_wrap=True)
    if document.conflicts:
        console.print("Nothing was committed.")
        return
    show_touched(document.touched, console)
    if document.snapshot_id is not None:
        console.print(
            Text.assemble(
                f"{document.action.capitalize()}. Branch ",
                plain(document.branch, BRANCH),
                " is at ",
                (document.snapshot_id, SNAPSHOT),
                f"; it was at {document.previous_id}.",
            ),
            soft_wrap=True,
        )
    elif document.dry_run:
        console.print("Nothing was committed: this was a dry run.")
    else:
        console.print("Nothing was committed: the branch has these changes already.")


def _show_moved(document: Moved, console: Console) -> None:
    console.print(
        Text.assemble(
            "Branch ",
            plain(document.branch, BRANCH),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            f"; it was at {document.previous_id}, which can be read until garbage is collected.",
        ),
        soft_wrap=True,
    )


def _clashes(document: Combination) -> bool:
    return bool(document.conflicts)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(
        repository_command(
            undo,
            _show_moved,
            asks=lambda it: f"Take the last commit off {it['branch']}? {_BY_ID}",
        )
    )
    app.command()(repository_command(revert, _show, has_failed=_clashes))
    app.command()(repository_command(restore, _show, has_failed=_clashes))
    app.command()(repository_command(merge, _show, has_failed=_clashes))
    app.command("cherry-pick")(repository_command(cherry_pick, _show, has_failed=_clashes))
    app.command("fast-forward")(repository_command(fast_forward, _show_moved))
    app.command()(
        repository_command(
            squash,
            _show_moved,
            asks=lambda it: (
                f"Replace the commits of {it['branch']} after {it['since']} by one? {_BY_ID}"
            ),
        )
    )

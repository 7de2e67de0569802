"""Integrity: `verify`, `sums` and `repair`."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio.to_thread
import typer
from rich.filesize import decimal
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import REMOVED, make_table, plain, showing_progress
from icechunk_async.cli.declaring import Authorize, RefOption, repository_command, url_command
from icechunk_async.cli.targets import find_target
from icechunk_async.errors import FormatError, RepositoryNotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from icechunk_async import Repository
    from icechunk_async.upkeep import VerifyReport

__all__ = ["register"]

_Levels = Literal["structure", "existence", "length", "sums", "decode"]
_Level = Annotated[
    _Levels, typer.Option("--level", help="How closely to look; each includes those before it.")
]
_LevelOfRepair = Annotated[
    _Levels | None,
    typer.Option("--level", help="How closely to verify first. Default: decode."),
]
_Refs = Annotated[
    list[str] | None,
    typer.Option(
        "--ref",
        metavar="REF",
        autocompletion=complete_ref,
        help="A branch, a tag or a snapshot id. May be repeated. Default: all branches and tags.",
    ),
]
_TipsOnly = Annotated[
    bool, typer.Option("--tips-only", help="Leave out the snapshots before those of the refs.")
]
_Sample = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="SHARE|NUMBER",
        help="Look at some chunks only: a share such as 0.05 or 5%, or a number such as 1000.",
    ),
]
_Seed = Annotated[int, typer.Option("--seed", help="Draws another sample.")]
_State = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="FILE",
        help="Keep here how far it is; if the file exists, continue the run that left it.",
    ),
]


@dataclass(frozen=True, slots=True)
class Summed:
    """The document of `sums`."""

    snapshot_id: str
    manifests: int
    manifests_completed: int
    chunks: int
    bytes_read: int
    unreadable: list[str]
    content_root: str | None
    is_complete: bool


def _sample(text: str | None) -> float | None:
    """Read a share or a number of chunks.

    Raises:
        typer.BadParameter: it is neither.
    """
    if text is None:
        return None
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a share such as 0.05 or 5% nor a number of chunks"
        ) from None


_Report = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="What verify --json printed. Default: verify first, at --level.",
    ),
]
_Branches = Annotated[
    list[str] | None,
    typer.Option("--branch", help="A branch that may get a commit. May be repeated. Default: all."),
]
_Moved = Annotated[
    list[str] | None,
    typer.Option(
        "--moved",
        metavar="OLD=NEW",
        help="Virtual sources moved from one URL prefix to another. May be repeated.",
    ),
]
_NO_BACKUP = "No copy of it can be read either. Restore the repository from a backup."
_Apply = Annotated[bool, typer.Option("--apply", help="Carry the plan out. Default: show it.")]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a repair."""

    action: str
    target: str
    detail: str


@dataclass(frozen=True, slots=True)
class Repaired:
    """The document of `repair`."""

    applied: bool
    steps: list[Step]
    unrepairable: list[str]


async def verify(
    url: str,
    options: dict[str, Any],
    *,
    level: _Level = "decode",
    ref: _Refs = None,
    tips_only: _TipsOnly = False,
    sample: _Sample = None,
    seed: _Seed = 0,
    state: _State = None,
    authorize: Authorize = None,
) -> VerifyReport:
    """Look whether a repository is what it should be, down to the contents of chunks.

    Levels: structure (references, snapshots, logs and manifests agree), existence (objects are
    there), length (they are long enough), sums (chunks have their stored checksums), decode (the
    codecs of their arrays accept them). Virtual objects are looked at in the containers that
    --authorize names.

    Exit code 0 if all that was looked at is healthy, 1 if something is damaged, 2 if it was not
    possible to look.

    JSON keys: schema, url, spec_version, level, sample, seed, refs, snapshots, transaction_logs,
    manifests, chunks, chunk_objects, virtual_objects, virtual_not_authorized, chunks_read,
    bytes_read, findings (each: kind, location, problem, level, detail, references,
    offset, length, array, coordinates), not_looked_at (each: what, count).
    """
    from icechunk_async import upkeep  # noqa: PLC0415  # slow to import

    with showing_progress() as progress:
        return await upkeep.verify(
            url,
            level,
            storage_options=options,
            authorize_virtual_chunk_access=dict.fromkeys(authorize or ()),
            refs=ref,
            ancestry=not tips_only,
            sample=_sample(sample),
            seed=seed,
            state=state,
            progress=progress,
        )


async def sums(repository: Repository, *, ref: RefOption = "main") -> Summed:
    """Give a checksum to each chunk of a snapshot that has none.

    Chunks without one are read once; what is there now counts as right. Later commits keep sums if
    the repository was created or opened so. The content root vouches for all manifests and sums.

    Exit code 1 if chunks could not be read.

    JSON keys: snapshot_id, manifests, manifests_completed, chunks, bytes_read, unreadable
    (messages), content_root (null if no list of digests could be made), is_complete.
    """
    target = (await find_target(repository, ref)).snapshot_id
    with showing_progress() as progress:
        done = await repository.add_sums(snapshot_id=target, progress=progress)
    content = await repository.check_content(snapshot_id=target)
    return Summed(
        str(done.snapshot_id),
        done.manifests,
        done.manifests_completed,
        done.chunks,
        done.bytes_read,
        list(done.unreadable),
        content.root,
        content.is_right,
    )


def _show_summed(document: Summed, console: Console) -> None:
    for it in document.unreadable:
        console.print(Text.assemble(("Could not be read: ", REMOVED), plain(it)), soft_wrap=True)
    console.print(
        f"{document.chunks:,} chunk(s), {decimal(document.bytes_read)}, in "
        f"{document.manifests_completed:,} of {document.manifests:,} manifest(s) got a checksum.",
        soft_wrap=True,
    )
    console.print(f"Content root: {document.content_root}", soft_wrap=True)


async def repair(
    url: str,
    options: dict[str, Any],
    *,
    report: _Report = None,
    level: _LevelOfRepair = None,
    branch: _Branches = None,
    moved: _Moved = None,
    apply: _Apply = False,
    authorize: Authorize = None,
) -> Repaired:
    """Show how the damage that verify finds can be repaired, and with --apply repair it.

    Transaction logs are made anew from manifests; references to lost chunks are dropped in a
    commit on each branch, and those to virtual sources that moved are replaced; damaged objects
    are moved to quarantine/. A damaged or missing repo object is replaced by its newest backup;
    run the command again after that. History is left alone: older snapshots and tags still refer
    to what is lost.

    Exit code 1 if some damage cannot be repaired. If it is interrupted, run it again.

    JSON keys: applied, steps (each: action, target, detail), unrepairable (sentences).
    """
    from icechunk_async import Repository, upkeep  # noqa: PLC0415  # slow to import

    if report is not None and level is not None:
        raise typer.BadParameter(
            f"--level {level} has no meaning beside --report {report}: nothing is verified then. "
            "Leave one of them out"
        )
    # Before the repository is opened, which needs this object.
    step = await upkeep.restore_repo_object(url, dry_run=not apply, storage_options=options)
    # Alone: what else is damaged can be looked at only once the repository opens.
    if step is not None:
        return Repaired(apply, [Step(step.action, step.target, step.detail)], [])
    pairs = dict(_moved(it) for it in moved or ())
    access = dict.fromkeys(authorize or ())
    given = None if report is None else await anyio.to_thread.run_sync(_read_report, report)
    opened = Repository.open(url, storage_options=options, authorize_virtual_chunk_access=access)
    async with AsyncExitStack() as stack:
        try:
            repository = await stack.enter_async_context(opened)
        # It opens neither now nor with a backup: say what is damaged, in place of how the opening
        # failed.
        except (RepositoryNotFoundError, FormatError):
            report_of_it = await upkeep.verify(url, "structure", storage_options=options)
            left = [f"{it.detail} {_NO_BACKUP}" for it in report_of_it.findings]
            return Repaired(applied=False, steps=[], unrepairable=left)
        with showing_progress() as progress:
            # At the closest level by default: what was not looked at cannot be repaired.
            found = given or await repository.verify(level or "decode", progress=progress)
            plan = await repository.plan_repair(found, branches=branch, moved=pairs)
            if apply:
                await plan.apply(progress)
    steps = [Step(it.action, it.target, it.detail) for it in plan.steps]
    return Repaired(apply, steps, list(plan.unrepairable))


def _moved(text: str) -> tuple[str, str]:
    """Read two prefixes.

    Raises:
        typer.BadParameter: there is no ``=`` between them.
    """
    old, separator, new = text.partition("=")
    if not separator or not old or not new:
        raise typer.BadParameter(f"{text!r} is not of the form OLD=NEW")
    return old, new


def _read_report(path: str) -> VerifyReport:
    from icechunk_async.upkeep import VerifyReport  # noqa: PLC0415  # slow to import

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        return VerifyReport.from_json(document)
    # A file that is JSON and no report lacks what is read of it, or is a list.
    except (OSError, ValueError, AttributeError) as error:
        raise typer.BadParameter(f"{path!r} cannot be read as a report: {error}") from None


def _show_repaired(document: Repaired, console: Console) -> None:
    for it in document.steps:
        text = Text.assemble((it.action, "bold"), " ", plain(it.target), ": ", plain(it.detail))
        console.print(text, soft_wrap=True)
    for left in document.unrepairable:
        text = Text.assemble(("Not repairable: ", REMOVED), plain(left))
        console.print(text, soft_wrap=True)
    count = len(document.steps)
    restores = any(it.action == "restore repo" for it in document.steps)
    if not count:
        if not document.unrepairable:
            console.print("There is nothing to repair.")
    elif document.applied and restores:
        console.print(f"{count:,} step(s) done. Repair again: the rest can be looked at now.")
    elif document.applied:
        console.print(f"{count:,} step(s) done. Verify the branches now, with --tips-only.")
    else:
        console.print(f"{count:,} step(s) planned. Nothing was changed; add --apply.")


def _show_verified(report: VerifyReport, console: Console) -> None:
    table = make_table("", "", header=False)
    table.columns[1].justify = "right"
    table.add_row("snapshots", f"{report.snapshots:,}")
    table.add_row("transaction logs", f"{report.transaction_logs:,}")
    table.add_row("manifests", f"{report.manifests:,}")
    table.add_row("chunk objects", f"{report.chunk_objects:,}")
    table.add_row("virtual objects", f"{report.virtual_objects:,}")
    table.add_row("chunks read", f"{report.chunks_read:,}, {decimal(report.bytes_read)}")
    console.print(table)
    for it in report.findings:
        where = f" ({it.array} {it.coordinates})" if it.array is not None else ""
        parts = (
            (f"{it.problem} ", REMOVED),
            plain(it.kind),
            ": ",
            plain(it.location),
            plain(where),
        )
        console.print(Text.assemble(*parts, ": ", plain(it.detail)), soft_wrap=True)
    for left in report.not_looked_at:
        count = "" if left.count is None else f"{left.count:,} "
        console.print(Text.assemble("Not looked at: ", count, plain(left.what)), soft_wrap=True)
    found = len(report.findings)
    verdict = f"{found:,} damaged." if found else "Nothing that was looked at is damaged."
    console.print(f"Level {report.level}: {verdict}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(
        url_command(
            repair,
            _show_repaired,
            has_failed=lambda it: bool(it.unrepairable),
            asks=lambda it: (
                "Repair it? References to what is lost are dropped; the plan without --apply says "
                "which."
                if it["apply"]
                else None
            ),
        )
    )
    app.command()(
        # By URL: verify looks also at what is too damaged to be opened.
        url_command(verify, _show_verified, has_failed=lambda it: not it.is_healthy, error_code=2)
    )
    app.command()(repository_command(sums, _show_summed, has_failed=lambda it: bool(it.unreadable)))

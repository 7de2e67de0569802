"""Upkeep: `expire`, `gc`, `compact`, `check`, `rewrite-manifests` and `migrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import (
    BRANCH,
    REMOVED,
    SNAPSHOT,
    age_of,
    is_to_come,
    is_young,
    make_table,
    moment,
    plain,
    showing_progress,
)
from icechunk_async.cli.declaring import (
    DryRun,
    OlderThan,
    repository_command,
    url_command,
)
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository

__all__ = ["register"]

_DeleteBranches = Annotated[
    bool, typer.Option("--delete-expired-branches", help="Also branches with an old tip.")
]
_DeleteTags = Annotated[
    bool, typer.Option("--delete-expired-tags", help="Also tags of old snapshots.")
]
_Branch = Annotated[str, typer.Option("--branch", help="The branch to work on.")]
_Message = Annotated[str, typer.Option("--message", "-m", help="Message of the commit.")]
_MinLiveShare = Annotated[
    float,
    typer.Option(
        "--min-live-share",
        help="Empty objects of which a smaller share is used; above 0, up to 1.",
    ),
]
_Amend = Annotated[
    bool, typer.Option("--amend", help="Replace the tip instead of adding a commit.")
]
_Always = Annotated[
    bool,
    typer.Option(
        "--always",
        help="Also if nothing would be split otherwise, to use other new settings.",
    ),
]
_KeepOldFiles = Annotated[
    bool, typer.Option("--keep-old-files", help="Leave the reference files of version 1.")
]


@dataclass(frozen=True, slots=True)
class Expired:
    """The document of `expire`."""

    dry_run: bool
    older_than: datetime
    snapshots: list[str]


@dataclass(frozen=True, slots=True)
class FailedDeletion:
    """An object that could not be deleted."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The document of `gc`."""

    dry_run: bool
    older_than: datetime
    bytes_deleted: int
    chunks_deleted: int
    manifests_deleted: int
    snapshots_deleted: int
    transaction_logs_deleted: int
    sums_deleted: int
    """Checksums of manifests, and lists of digests of snapshots."""
    statistics_deleted: int
    """Objects with statistics of chunks."""
    proposal_files_deleted: int
    """Records and pages of proposals that ended."""
    unfinished_deleted: int
    """Files of killed writers, and objects of trials of the storage."""
    failures: list[FailedDeletion]


@dataclass(frozen=True, slots=True)
class Compacted:
    """The document of `compact`."""

    dry_run: bool
    branch: str
    objects: int
    chunks: int
    bytes_written: int
    bytes_released: int
    """Of objects that the branch's tip does not use any more."""
    snapshot_id: str | None
    """None if no commit was made."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The document of `rewrite-manifests`."""

    dry_run: bool
    branch: str
    snapshot_id: str | None
    """None if no commit was made."""
    previous_snapshot_id: str
    previous_manifests: int
    manifests: int
    """Files that the new snapshot uses; before it is made, at most."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An object that is not as it must be."""

    kind: str
    location: str
    problem: str
    detail: str
    references: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The document of `check`."""

    snapshots: int
    transaction_logs: int
    manifests: int
    chunk_objects: int
    virtual_objects: int
    virtual_not_authorized: int
    broken: list[Broken]
    not_looked_at: list[str]
    left_over: list[str]
    """Sentences about what killed processes left, and how it goes."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The document of `migrate`."""

    dry_run: bool
    url: str
    already_migrated: bool
    """It was of version 2 before; at most old files were left to delete."""
    branches: int
    tags: int
    snapshots: int
    unused_files: list[str]
    """Keys of version 1 that version 2 does not need."""


async def expire(
    repository: Repository,
    *,
    older_than: OlderThan,
    delete_expired_branches: _DeleteBranches = False,
    delete_expired_tags: _DeleteTags = False,
    dry_run: DryRun = False,
) -> Expired:
    """Drop old snapshots from history; gc later removes what only they used.

    The first snapshot and those that a branch or tag names stay, unless such branches and tags
    are to be deleted. main is never deleted.

    JSON keys: dry_run, older_than, snapshots (ids that were dropped).
    """
    # The library refuses it, too, in words for callers; here the option is named.
    if is_to_come(older_than):
        raise InvalidInputError(
            f"--older-than {older_than.isoformat()} is in the future: all history but the "
            "tips of branches and tags would be dropped. Give an age such as 90d, or a time in the "
            "past."
        )
    released = await repository.expire_snapshots(
        older_than,
        delete_expired_branches=delete_expired_branches,
        delete_expired_tags=delete_expired_tags,
        dry_run=dry_run,
    )
    return Expired(dry_run, older_than, sorted(map(str, released)))


async def gc(
    repository: Repository, *, older_than: OlderThan, dry_run: DryRun = False
) -> Collected:
    """Delete objects that no branch or tag leads to and that are older than a time.

    Choose a time before the oldest session that is still open: what a session has stored and not
    yet committed looks like garbage.

    Exit code 1 if some objects could not be deleted.

    JSON keys: dry_run, older_than, bytes_deleted, chunks_deleted, manifests_deleted,
    snapshots_deleted, transaction_logs_deleted, sums_deleted (checksums), statistics_deleted,
    proposal_files_deleted, unfinished_deleted (what killed writers left), failures (each: key,
    reason).
    """
    with showing_progress() as progress:
        found = await repository.garbage_collect(older_than, dry_run=dry_run, progress=progress)
    return Collected(
        dry_run,
        older_than,
        found.bytes_deleted,
        found.chunks_deleted,
        found.manifests_deleted,
        found.snapshots_deleted,
        found.transaction_logs_deleted,
        found.sums_deleted,
        found.statistics_deleted,
        found.proposal_files_deleted,
        found.unfinished_deleted,
        [FailedDeletion(it.key, str(it.error)) for it in found.failures],
    )


async def compact(
    repository: Repository,
    *,
    branch: _Branch = "main",
    min_live_share: _MinLiveShare = 0.5,
    message: _Message = "Compact chunk objects",
    dry_run: DryRun = False,
) -> Compacted:
    """Rewrite chunks that lie in objects of which a branch uses little.

    For repositories whose small chunks share objects. Run expire and gc afterwards: they free the
    old objects once no branch, tag or snapshot needs them.

    JSON keys: dry_run, branch, objects, chunks, bytes_written, bytes_released, snapshot_id (null
    if no chunk had to be rewritten).
    """
    with showing_progress() as progress:
        done = await repository.compact(
            branch,
            min_live_share=min_live_share,
            message=message,
            dry_run=dry_run,
            progress=progress,
        )
    return Compacted(
        dry_run,
        branch,
        done.objects,
        done.chunks,
        done.bytes_written,
        done.bytes_released,
        None if done.snapshot_id is None else str(done.snapshot_id),
    )


async def rewrite_manifests(
    repository: Repository,
    *,
    branch: _Branch = "main",
    message: _Message = "Rewrite manifests",
    amend: _Amend = False,
    always: _Always = False,
    dry_run: DryRun = False,
) -> Rewritten:
    """Rewrite the manifests of a branch, split as the configuration says now.

    If they are split so already, no commit is made.

    JSON keys: dry_run, branch, snapshot_id (null if no commit was made), previous_snapshot_id,
    previous_manifests, manifests (of a dry run: at most).
    """
    from icechunk_async.engine.upkeep.rewrite import plan_rewriting  # noqa: PLC0415 -- slow

    # A rewrite that changes no split would add a commit for nothing.
    plan = await plan_rewriting(repository.engine, branch)
    before = plan.snapshot_id
    if dry_run or not (plan.arrays or always):
        return Rewritten(dry_run, branch, None, str(before), plan.manifests, plan.manifests_after)
    with showing_progress() as progress:
        made = await repository.rewrite_manifests(
            message,
            branch=branch,
            commit_method="amend" if amend else "new_commit",
            progress=progress,
        )
    files = await repository.list_manifest_files(made)
    return Rewritten(dry_run, branch, str(made), str(before), plan.manifests, len(files))


async def check(repository: Repository) -> Checked:
    """Check that every object is there that branches and tags lead to.

    Virtual objects are looked at in the containers that --authorize names. Exit code 1 if
    something is missing, damaged, too short or changed. It is verify at the level length: the
    contents of chunks are not read. What killed processes left is counted; it is no damage.

    JSON keys: snapshots, transaction_logs, manifests, chunk_objects, virtual_objects,
    virtual_not_authorized (counts), broken (each: kind, location, problem, detail, references),
    not_looked_at (sentences), left_over (sentences: what killed processes left, and how it goes).
    """
    with showing_progress() as progress:
        found = await repository.check_references(progress=progress)
    return Checked(
        found.snapshots,
        found.transaction_logs,
        found.manifests,
        found.chunk_objects,
        found.virtual_objects,
        found.virtual_not_authorized,
        [Broken(it.kind, it.location, it.problem, it.detail, it.references) for it in found.broken],
        list(found.not_looked_at),
        list(found.leftovers.advice),
    )


async def migrate(
    url: str,
    options: dict[str, Any],
    *,
    keep_old_files: _KeepOldFiles = False,
    dry_run: DryRun = False,
) -> Migrated:
    """Bring a repository of format version 1 to version 2, in place.

    Only references and configuration are rewritten. Nobody may write meanwhile; if somebody does,
    nothing is changed. If it is interrupted, run it again.

    JSON keys: dry_run, url, already_migrated, branches, tags, snapshots, unused_files (of version
    1: deleted, or kept if that was asked for).
    """
    from icechunk_async.upkeep import upgrade  # noqa: PLC0415  # slow to import

    with showing_progress() as progress:
        report = await upgrade(
            url,
            dry_run=dry_run,
            delete_unused_v1_files=not keep_old_files,
            storage_options=options,
            progress=progress,
        )
    return Migrated(
        dry_run,
        url,
        report.already_migrated,
        report.branches,
        report.tags,
        report.snapshots,
        list(report.unused_files),
    )


def _before_expiring(arguments: Mapping[str, Any]) -> str | None:
    if arguments["dry_run"]:
        return None
    # `main` is never deleted, so that its tip stays in any case.
    kept = ["main"] if arguments["delete_expired_branches"] else ["branches"]
    kept += [] if arguments["delete_expired_tags"] else ["tags"]
    return (
        f"Drop snapshots from before {moment(arguments['older_than'])} from history, but for those "
        f"of {' and '.join(kept)}? It cannot be undone; --dry-run shows which."
    )


def _before_collecting(arguments: Mapping[str, Any]) -> str | None:
    if arguments["dry_run"]:
        return None
    return (
        f"Delete what nothing leads to and is from before {moment(arguments['older_than'])}? It "
        "cannot be undone; --dry-run shows how much it is."
    )


def _before_migrating(arguments: Mapping[str, Any]) -> str | None:
    if arguments["dry_run"]:
        return None
    return (
        "Bring the repository to format version 2? There is no way back, and nobody may write "
        "meanwhile."
    )


def _young_to_expire(arguments: Mapping[str, Any]) -> str | None:
    # A time to come is refused, which needs no warning before.
    if not is_young(arguments["older_than"]) or is_to_come(arguments["older_than"]):
        return None
    return (
        f"{age_of(arguments['older_than'])} is less than an hour. Sessions that began before a "
        "snapshot was dropped may fail to commit, and undo has less to go back to."
    )


def _young_to_collect(arguments: Mapping[str, Any]) -> str | None:
    if not is_young(arguments["older_than"]) or is_to_come(arguments["older_than"]):
        return None
    return (
        f"{age_of(arguments['older_than'])} is less than an hour. What sessions that are open "
        "have written and not committed looks like garbage, and clocks may differ."
    )


def _show_expired(document: Expired, console: Console) -> None:
    for it in document.snapshots:
        console.print(Text(it, SNAPSHOT))
    verb = "would be dropped" if document.dry_run else "dropped"
    when = moment(document.older_than)
    count = len(document.snapshots)
    console.print(f"{count:,} snapshot(s) from before {when} {verb}.", soft_wrap=True)


def _show_collected(document: Collected, console: Console) -> None:
    table = make_table("", "", header=False)
    table.columns[1].justify = "right"
    table.add_row("chunks", f"{document.chunks_deleted:,}")
    table.add_row("manifests", f"{document.manifests_deleted:,}")
    table.add_row("snapshots", f"{document.snapshots_deleted:,}")
    table.add_row("transaction logs", f"{document.transaction_logs_deleted:,}")
    if document.sums_deleted:
        table.add_row("checksums", f"{document.sums_deleted:,}")
    if document.statistics_deleted:
        table.add_row("statistics of chunks", f"{document.statistics_deleted:,}")
    if document.proposal_files_deleted:
        table.add_row("files of proposals that ended", f"{document.proposal_files_deleted:,}")
    if document.unfinished_deleted:
        table.add_row("files of killed writers", f"{document.unfinished_deleted:,}")
    console.print(table)
    for it in document.failures:
        text = Text.assemble(("Could not delete ", REMOVED), plain(it.key), ": ", plain(it.reason))
        console.print(text, soft_wrap=True)
    verb = "would be freed" if document.dry_run else "freed"
    console.print(f"{decimal(document.bytes_deleted)} {verb}.")


def _show_compacted(document: Compacted, console: Console) -> None:
    if not document.chunks:
        console.print("No object is used too little. No commit was made.", soft_wrap=True)
        return
    verb = "would be" if document.dry_run else "were"
    console.print(
        f"{document.chunks:,} chunk(s), {decimal(document.bytes_written)}, of "
        f"{document.objects:,} object(s) {verb} written anew; the objects take "
        f"{decimal(document.bytes_released)}.",
        soft_wrap=True,
    )
    if document.snapshot_id is not None:
        text = Text.assemble(
            plain(document.branch, BRANCH),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            " now. Space is freed by expire and gc.",
        )
        console.print(text, soft_wrap=True)


def _show_rewritten(document: Rewritten, console: Console) -> None:
    if document.snapshot_id is None:
        count = f"{document.previous_manifests:,} manifest(s)"
        text = f"The {count} would become at most {document.manifests:,}"
        if document.previous_manifests == document.manifests:
            text = f"The {count} are split as the configuration says already"
        console.print(f"{text}. No commit was made.", soft_wrap=True)
        return
    console.print(
        Text.assemble(
            plain(document.branch, BRANCH),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            f" now, with {document.manifests:,} manifest(s); it was at ",
            (document.previous_snapshot_id, SNAPSHOT),
            ".",
        ),
        soft_wrap=True,
    )


def _show_checked(document: Checked, console: Console) -> None:
    table = make_table("", "", header=False)
    table.columns[1].justify = "right"
    table.add_row("snapshots", f"{document.snapshots:,}")
    table.add_row("transaction logs", f"{document.transaction_logs:,}")
    table.add_row("manifests", f"{document.manifests:,}")
    table.add_row("chunk objects", f"{document.chunk_objects:,}")
    table.add_row("virtual objects", f"{document.virtual_objects:,}")
    console.print(table)
    for it in document.broken:
        text = Text.assemble((f"{it.problem} ", REMOVED), plain(it.kind), ": ", plain(it.detail))
        console.print(text, soft_wrap=True)
    if document.virtual_not_authorized:
        console.print(
            f"{document.virtual_not_authorized:,} virtual object(s) were not looked at. If you "
            "trust their containers, add --authorize with their URL prefixes."
        )
    for sentence in document.left_over:
        console.print(Text.assemble("Left over: ", plain(sentence), "."), soft_wrap=True)
    verdict = "Something is broken." if document.broken else "Nothing is missing."
    left = "; ".join(document.not_looked_at)
    console.print(Text.assemble(verdict, " Not looked at: ", plain(left), "."), soft_wrap=True)


def _show_migrated(document: Migrated, console: Console) -> None:
    verb = "can be migrated" if document.dry_run else "is of format version 2 now"
    if document.already_migrated:
        verb = "was of format version 2 already"
    text = (
        f" {verb}: {document.branches:,} branch(es), {document.tags:,} tag(s) and "
        f"{document.snapshots:,} snapshot(s)."
    )
    console.print(Text.assemble(plain(document.url, "bold"), text), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(
        repository_command(expire, _show_expired, asks=_before_expiring, warns=_young_to_expire)
    )
    app.command()(
        repository_command(
            gc,
            _show_collected,
            has_failed=lambda it: bool(it.failures),
            asks=_before_collecting,
            warns=_young_to_collect,
        )
    )
    app.command()(repository_command(compact, _show_compacted))
    app.command("rewrite-manifests")(repository_command(rewrite_manifests, _show_rewritten))
    app.command()(
        repository_command(
            check, _show_checked, authorizes=True, has_failed=lambda it: bool(it.broken)
        )
    )
    app.command()(url_command(migrate, _show_migrated, asks=_before_migrating))

"""Upkeep: ``expire``, ``gc``, ``compact``, ``check``, ``rewrite-manifests`` and ``migrate``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async import _clock
from icechunk_async.cli import render_operating as render
from icechunk_async.cli.opening import on_repository
from icechunk_async.cli.operating_documents import (
    Broken,
    Checked,
    Collected,
    Compacted,
    Expired,
    FailedDeletion,
    Migrated,
    Rewritten,
)
from icechunk_async.cli.options import (  # Typer reads them at run time
    AsJson,
    Debug,
    Options,
    Url,
    parse_time,
)
from icechunk_async.cli.progress import showing_progress
from icechunk_async.cli.run import answer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from icechunk_async import Repository

__all__ = ["parse_moment", "register"]

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_moment(text: str) -> datetime:
    """Read an ISO 8601 time, or an age such as ``90d``, ``12h``, ``30m`` or ``2w``.

    Raises:
        typer.BadParameter: it is neither.
    """
    age = fullmatch(r"(\d{1,9})([mhdw])", text)
    if age is None:
        return parse_time(text)
    now = datetime.fromtimestamp(_clock.now_us() / 1e6, UTC)
    try:
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is longer ago than a calendar reaches") from None


_OlderThan = Annotated[
    datetime,
    typer.Option(
        "--older-than",
        metavar="TIME",
        parser=parse_moment,
        help="An ISO 8601 time (UTC unless it says so), or an age such as 90d, 12h or 30m.",
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; tell what would be.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(expire)
    app.command()(gc)
    app.command()(compact)
    app.command("rewrite-manifests")(rewrite_manifests)
    app.command()(check)
    app.command()(migrate)


def expire(
    url: Url,
    *,
    older_than: _OlderThan,
    delete_expired_branches: Annotated[
        bool, typer.Option("--delete-expired-branches", help="Also branches with an old tip.")
    ] = False,
    delete_expired_tags: Annotated[
        bool, typer.Option("--delete-expired-tags", help="Also tags of old snapshots.")
    ] = False,
    dry_run: _DryRun = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Drop old snapshots from history; gc later removes what only they used.

    The first snapshot and those that a branch or tag names stay, unless such branches and tags
    are to be deleted. main is never deleted.

    JSON keys: dry_run, older_than, snapshots (ids that were dropped).
    """

    async def work(repository: Repository) -> Expired:
        released = await repository.expire_snapshots(
            older_than,
            delete_expired_branches=delete_expired_branches,
            delete_expired_tags=delete_expired_tags,
            dry_run=dry_run,
        )
        return Expired(dry_run, older_than, sorted(map(str, released)))

    answer(on_repository(url, option, work), render.expired, as_json=as_json, debug=debug)


def gc(
    url: Url,
    *,
    older_than: _OlderThan,
    dry_run: _DryRun = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete objects that no branch or tag leads to and that are older than a time.

    Choose a time before the oldest session that is still open: what a session has stored and not
    yet committed looks like garbage.

    Exit code 1 if some objects could not be deleted.

    JSON keys: dry_run, older_than, bytes_deleted, chunks_deleted, manifests_deleted,
    snapshots_deleted, transaction_logs_deleted, failures (each: key, reason).
    """

    async def work(repository: Repository) -> Collected:
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
            [FailedDeletion(it.key, str(it.error)) for it in found.failures],
        )

    done = answer(on_repository(url, option, work), render.collected, as_json=as_json, debug=debug)
    if done.failures:
        raise typer.Exit(1)


def compact(
    url: Url,
    *,
    branch: Annotated[str, typer.Option("--branch", help="The branch to compact.")] = "main",
    min_live_share: Annotated[
        float,
        typer.Option(
            "--min-live-share", help="Leave objects empty of which less is used; above 0, up to 1."
        ),
    ] = 0.5,
    message: Annotated[
        str, typer.Option("--message", "-m", help="Message of the commit.")
    ] = "Compact chunk objects",
    dry_run: _DryRun = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write chunks anew that lie in objects of which a branch uses little.

    For repositories whose small chunks share objects. Run expire and gc afterwards: they free the
    old objects once no branch, tag or snapshot needs them.

    JSON keys: dry_run, branch, objects, chunks, bytes_written, bytes_released, snapshot_id (null
    if nothing was to be done).
    """

    async def work(repository: Repository) -> Compacted:
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

    answer(on_repository(url, option, work), render.compacted, as_json=as_json, debug=debug)


def rewrite_manifests(
    url: Url,
    *,
    branch: Annotated[str, typer.Option("--branch", help="The branch to rewrite.")] = "main",
    message: Annotated[
        str, typer.Option("--message", "-m", help="Message of the commit.")
    ] = "Rewrite manifests",
    amend: Annotated[
        bool, typer.Option("--amend", help="Replace the tip instead of adding a commit.")
    ] = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the manifests of a branch anew, split as the configuration says now.

    JSON keys: branch, snapshot_id, previous_snapshot_id, manifests.
    """

    async def work(repository: Repository) -> Rewritten:
        before = await repository.lookup_branch(branch)
        with showing_progress() as progress:
            made = await repository.rewrite_manifests(
                message,
                branch=branch,
                commit_method="amend" if amend else "new_commit",
                progress=progress,
            )
        files = await repository.list_manifest_files(made)
        return Rewritten(branch, str(made), str(before), len(files))

    answer(on_repository(url, option, work), render.rewritten, as_json=as_json, debug=debug)


def check(
    url: Url,
    *,
    authorize: Annotated[
        list[str] | None,
        typer.Option(
            "--authorize",
            metavar="PREFIX",
            help="URL prefix of a container whose virtual objects are looked at. May be repeated.",
        ),
    ] = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look whether every object is there that branches and tags lead to.

    Exit code 1 if something is missing, too short or changed. What chunks hold is not read.

    JSON keys: snapshots, transaction_logs, manifests, chunk_objects, virtual_objects,
    virtual_not_authorized (counts), broken (each: kind, location, problem, detail, references).
    """

    async def work(repository: Repository) -> Checked:
        with showing_progress() as progress:
            found = await repository.check_references(progress=progress)
        return Checked(
            found.snapshots,
            found.transaction_logs,
            found.manifests,
            found.chunk_objects,
            found.virtual_objects,
            found.virtual_not_authorized,
            [
                Broken(it.kind, it.location, it.problem, it.detail, it.references)
                for it in found.broken
            ],
        )

    access = dict.fromkeys(authorize or ())
    ask = on_repository(url, option, work, authorize=access)
    done = answer(ask, render.checked, as_json=as_json, debug=debug)
    if done.broken:
        raise typer.Exit(1)


def migrate(
    url: Url,
    *,
    keep_old_files: Annotated[
        bool, typer.Option("--keep-old-files", help="Leave the reference files of version 1.")
    ] = False,
    dry_run: _DryRun = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Bring a repository of format version 1 to version 2, in place.

    Only references and configuration are rewritten. Nobody may write meanwhile; if somebody does,
    nothing is changed. Interrupted, it can be run again.

    JSON keys: dry_run, url, already_migrated, branches, tags, snapshots, unused_files (of version
    1: deleted, or left where that was asked).
    """

    def work() -> Coroutine[Any, Any, Migrated]:
        return _migrate(url, dict(option or ()), dry_run=dry_run, keep_old_files=keep_old_files)

    answer(work, render.migrated, as_json=as_json, debug=debug)


async def _migrate(
    url: str, options: dict[str, object], *, dry_run: bool, keep_old_files: bool
) -> Migrated:
    from icechunk_async.repository.migrate import upgrade  # noqa: PLC0415  # slow to import

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

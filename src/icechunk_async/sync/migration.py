"""Migration to the newer format version, with the official engine's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import SessionStateError
from icechunk_async.sync.errors import ErrorKind, translated
from icechunk_async.sync.portal import run
from icechunk_async.sync.refusals import refusal
from icechunk_async.sync.repository import Repository
from icechunk_async.upkeep import upgrade

if TYPE_CHECKING:
    from icechunk_async.sync.handles import RepositoryHandle

__all__ = ["upgrade_icechunk_repository"]


def upgrade_icechunk_repository(
    repo: Repository,
    *,
    dry_run: bool,
    delete_unused_v1_files: bool = True,
    prefetch_concurrency: int | None = None,
) -> Repository:
    """Bring a repository of format version 1 to version 2, in place.

    Nobody should write to it meanwhile: who does is noticed, and the migration is undone. One that
    was interrupted is finished, or undone, by calling this again.

    Args:
        repo: the repository. Unless ``dry_run`` it cannot be used afterwards.
        dry_run: change nothing, after reading all that the migration needs.
        delete_unused_v1_files: delete what only version 1 reads.
        prefetch_concurrency: accepted; this library bounds its requests by itself.

    Returns: the repository, opened again.

    Raises:
        SessionStateError: it is of version 2 already.
        ConflictError: somebody wrote meanwhile; the migration was undone.
    """
    handle = repo._repository  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    run(_upgrade(handle, dry_run=dry_run, delete_unused=delete_unused_v1_files))
    if not dry_run:
        handle.close(
            "This repository has been invalidated by upgrade_icechunk_repository(). "
            "Use the new Repository object returned by that function instead."
        )
    return Repository.open(
        handle.source.storage,
        handle.source.config,
        dict(handle.source.authorized or {}),
        handle.source.attribution,
    )


async def _upgrade(handle: RepositoryHandle, *, dry_run: bool, delete_unused: bool) -> None:
    with translated():
        location, options = await handle.source.storage.place()
        report = await upgrade(location, dry_run=True, storage_options=options)
        if report.already_migrated:
            raise refusal(
                SessionStateError(
                    "The repository is of format version 2 already: there is nothing to migrate."
                ),
                ErrorKind.INVALID_REPOSITORY_MIGRATION,
            )
        if not dry_run:
            await upgrade(location, delete_unused_v1_files=delete_unused, storage_options=options)

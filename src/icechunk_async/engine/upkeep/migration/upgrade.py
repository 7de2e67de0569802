"""Migration from format version 1 to 2, in place, without rewriting snapshots, manifests or chunks.

The order: write a repo info that allows no changes; close the branches of version 1 where they were
read; check that nothing changed since; allow changes of the repo info; delete the ref files. A
commit with version 1 is noticed as long as everything can be undone, and refused later. A second
call finishes or undoes what an interrupted one left.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import no_progress
from icechunk_async.engine.history import opening
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.engine.history.ref_files import migration
from icechunk_async.engine.history.ref_files.migration import (
    RefFiles,
    close_branches,
    load_infos,
    open_branches,
    read_refs,
    swap,
)
from icechunk_async.engine.history.repo_info.file import Seen, read_info
from icechunk_async.engine.open import Request, check_safe, open_location
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.upkeep.migration.older import (
    OlderMigration,
    find_older,
    leftovers,
    remove,
)
from icechunk_async.errors import ConflictError
from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.config.codec import decode_config, encode_config
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.layout import (
    CONFIG,
    REPO_INFO,
    branch_key,
    is_written_once,
    snapshot_key,
)
from icechunk_async.format.repo_info import encode_repo_info
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.history.way import Found
    from icechunk_async.engine.open import Location
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["MigrationReport", "upgrade"]


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The outcome of a migration, or of a dry run."""

    dry_run: bool
    already_migrated: bool
    """The repository was of format version 2 already; at most old files were deleted."""
    resumed: bool
    """An earlier migration had been interrupted."""
    branches: int
    tags: int
    deleted_tags: int
    snapshots: int
    unused_files: tuple[str, ...]
    """Keys that version 2 does not need; of layouts before version 1 the folders, each with a slash
    at its end. They are deleted unless they were kept."""


@dataclass(frozen=True, slots=True)
class _Job:
    storage: Storage
    delete_unused: bool
    progress: ProgressCallback
    resumed: bool = False

    def report(self, info: RepoInfo, unused: tuple[str, ...]) -> MigrationReport:
        """Return the outcome for a repository that is now described by ``info``."""
        return MigrationReport(
            dry_run=False,
            already_migrated=False,
            resumed=self.resumed,
            branches=len(info.branches),
            tags=len(info.tags),
            deleted_tags=len(info.deleted_tags),
            snapshots=len(info.snapshots),
            unused_files=unused,
        )


async def upgrade(
    location: Location,
    *,
    dry_run: bool = False,
    delete_unused_v1_files: bool = True,
    storage_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> MigrationReport:
    """Bring a repository of format version 1, or of a layout before it, to version 2.

    Stop writers first: a write is noticed, and the migration is undone. Readers need not stop.
    Handles and sessions of version 1 that are open cannot commit afterwards; libraries that know
    only version 1 can no longer open the repository.

    A layout before version 1, such as the alpha, names and encodes every file differently. So each
    is written anew, and each chunk object is copied, within the storage where it can. Snapshots,
    manifests and chunk objects keep the first 12 bytes of their ids. Readers of the old layout
    must stop before its files are deleted.

    Args:
        location: a path, a URL, or an open storage.
        dry_run: change nothing, and report what would be done after reading all that is needed.
        delete_unused_v1_files: delete the files of branches and tags, and ``config.yaml``; of a
            layout before version 1 all files. If those of version 1 are kept, libraries that know
            only version 1 still use them: their commits are not part of the migrated repository,
            and their garbage collection deletes objects that only the migrated repository needs.
        storage_options: the backend's options, where ``location`` is a path or URL.
        progress: called with the number of snapshots read.

    Raises:
        RepositoryNotFoundError: there is no repository.
        ConflictError: a writer was active; the migration was undone. Or a writer still uses the
            files of version 1 that an earlier migration kept; nothing was deleted.
        SnapshotNotFoundError, FormatError: a branch or tag needs a snapshot that is missing or
            damaged; nothing changed.
        UnsafeStorageError: the storage lacks a promise that this needs; nothing changed.
        UnsupportedBySpecError: the states of the repository are numbered, or its files are in
            another place; nothing changed.
        StorageError, OutcomeUnknownError: the storage failed. The migration may be half done: the
            repository can be read, not written to; call this again to finish it or undo it.

    Cancellation: as for ``StorageError``.

    Cost: reads each snapshot once, 64 at a time; memory for each snapshot's message and
    properties. Writes one object, and two small ones a branch.
    """
    async with _open(location, storage_options) as storage:
        if not dry_run:
            check_safe(storage)
        job = _Job(storage, delete_unused_v1_files, progress or no_progress)
        # The repo info tells how far an earlier call came: none, so nothing is in force; one that
        # allows no changes, so it is finished or undone; any other, so only old files are left.
        found = await read_if_there(storage, REPO_INFO)
        state = None if found is None else read_info(found)
        if dry_run:
            older = await find_older(storage) if state is None else None
            if older is not None:
                return await _plan_older(job, older)
            return await _report_only(job, state)
        if state is None:
            older = await find_older(storage)
            if older is not None:
                return await _migrate_older(job, older)
            return await _begin(job)
        if not migration.is_under_way(state.info):
            return await _clean_up(job, state.info)
        files = await read_refs(storage)
        job = replace(job, resumed=True)
        # Nothing was written since the interrupted call, so what it planned still holds.
        if migration.same_refs(state.info, files.refs) and await _same_config(storage, state.info):
            return await _finish(job, state, files)
        await _undo(storage, state)
        return await _begin(job)


@asynccontextmanager
async def _open(
    location: Location, storage_options: Mapping[str, object] | None
) -> AsyncGenerator[Storage]:
    request = Request(location, dict(storage_options or {}), None, {})
    config = RepositoryConfig()
    with telemetry.span("migrate"):
        async with open_location(request) as storage:
            budget = Budget(config.effective_max_concurrent_requests)
            policies = policies_of(config.effective_storage)
            yield with_policies(storage, budget, policies, immutable=is_written_once)


async def _plan_older(job: _Job, older: Found) -> MigrationReport:
    """Return the outcome that the migration of an older layout would have."""
    migration = OlderMigration(job.storage, older, job.progress)
    job = replace(job, resumed=await migration.is_resumed())
    report = job.report(await migration.plan(), migration.folders)
    return replace(report, dry_run=True)


async def _migrate_older(job: _Job, older: Found) -> MigrationReport:
    """Migrate a repository of a layout before version 1."""
    migration = OlderMigration(job.storage, older, job.progress)
    job = replace(job, resumed=await migration.is_resumed())
    info = await migration.run()
    if job.delete_unused:
        await remove(job.storage, migration.folders)
    return job.report(info, migration.folders)


async def _report_only(job: _Job, state: Seen | None) -> MigrationReport:
    """Return the outcome that a migration would have."""
    storage = job.storage
    files = await read_refs(storage)
    unused = await _unused(storage, files)
    if state is not None and not migration.is_under_way(state.info):
        await _check_unused(storage, state.info, files)
        report = job.report(state.info, unused)
        return replace(report, dry_run=True, already_migrated=True)
    report = job.report(await _plan(job, files), unused)
    return replace(report, dry_run=True, resumed=state is not None or files.any_closed)


async def _begin(job: _Job) -> MigrationReport:
    """Migrate a repository that has no repo info yet."""
    storage = job.storage
    files = await read_refs(storage)
    if files.any_closed:  # an earlier migration was interrupted before or after its repo info
        job = replace(job, resumed=True)
    info = await _plan(job, files)
    # Read again: planning took long, and branches are closed at the versions that are read now.
    files = await read_refs(storage)
    try:
        await _check_unchanged(storage, info, files)
    except ConflictError as error:
        raise ConflictError(
            f"Somebody wrote to the repository while its migration was prepared; nothing was "
            f"changed. {error.message} Stop all writers and call upgrade again."
        ) from error
    return await _finish(job, Seen(info, await _create(storage, _encode(info))), files)


async def _plan(job: _Job, files: RefFiles) -> RepoInfo:
    """Return the repo info of a repository of version 1."""
    if MAIN not in files.branches:
        raise await opening.missing(job.storage)
    config = _new_config(await read_if_there(job.storage, CONFIG))
    refs = files.refs
    tips = {*refs.branches.values(), *refs.tags.values()}
    infos = await load_infos(job.storage, tips, job.progress)
    return migration.migrated(refs, infos, config, clock.now_us())


def _new_config(stored: Retrieved | None) -> bytes | None:
    return None if stored is None else encode_config(decode_config(stored.data, 1), 2)


async def _check_unchanged(storage: Storage, info: RepoInfo, files: RefFiles) -> None:
    """Refuse if refs or configuration of version 1 changed since they were read."""
    if not migration.same_refs(info, files.refs):
        raise ConflictError("A branch or tag was changed.")
    if not await _same_config(storage, info):
        raise ConflictError("The configuration was changed.")


async def _same_config(storage: Storage, info: RepoInfo) -> bool:
    return _new_config(await read_if_there(storage, CONFIG)) == info.raw_config


async def _finish(job: _Job, state: Seen, files: RefFiles) -> MigrationReport:
    """Check that no one wrote, allow changes of the repo info, and delete old files."""
    storage = job.storage
    try:
        if job.delete_unused:
            await close_branches(storage, files)
        else:
            # An earlier call, which was to delete them, may have closed some.
            await open_branches(storage, files)
        files = await read_refs(storage)
        await _check_unchanged(storage, state.info, files)
    except ConflictError as error:
        await _undo(storage, state)
        raise ConflictError(
            f"Somebody wrote to the repository while it was migrated; the migration was undone. "
            f"{error.message} Stop all writers and call upgrade again."
        ) from error
    info = migration.finished(state.info)
    # From here on version 2 is in force, and nothing is undone any more.
    await swap(storage, REPO_INFO, _encode(info), state.version)
    unused = await _unused(storage, files)
    if job.delete_unused:
        _check_none_late(files, await read_refs(storage))
        await _delete(storage, unused)
        # A writer that had read a branch before may create its file again.
        _check_none_late(RefFiles(), await read_refs(storage))
    return job.report(info, unused)


async def _clean_up(job: _Job, info: RepoInfo) -> MigrationReport:
    """Delete files that an earlier migration left or kept, if asked to."""
    files = await read_refs(job.storage)
    unused = await _unused(job.storage, files)
    folders = await leftovers(job.storage)
    if job.delete_unused:
        await _check_unused(job.storage, info, files)
        await _delete(job.storage, unused)
        await remove(job.storage, folders)
    unused = (*unused, *folders)
    return replace(job.report(info, unused), already_migrated=True)


def _check_none_late(expected: RefFiles, found: RefFiles) -> None:
    """Raise `ConflictError` if version 1 was written to too late to be migrated."""
    if found != expected:
        late = set(found.keys) ^ set(expected.keys)
        late |= {branch_key(name) for name, it in found.branches.items() if not it.closed}
        raise ConflictError(
            "The repository was migrated. Meanwhile a writer changed branches or tags with format "
            f"version 1, and that is not part of it: {', '.join(sorted(late)[:10])}. Repeat the "
            "change, then call upgrade again to delete what is left of version 1.",
            keys=tuple(sorted(late)),
        )


async def _undo(storage: Storage, state: Seen) -> None:
    """Open the branches again and remove the repo info, which allowed no changes.

    Raises:
        ConflictError: another process finished or undid the migration meanwhile.
    """
    # In this order: an end between the two steps leaves a repository that can be read by both
    # versions, and that the next call finishes or undoes.
    await open_branches(storage, await read_refs(storage))
    now = await read_if_there(storage, REPO_INFO)
    if now is None:
        return
    if now.version != state.version:
        raise ConflictError(
            "Another process continued this migration meanwhile. Run only one migration at a time, "
            "and call upgrade again."
        )
    # The branches must be durable before the other way into the repository goes.
    await storage.sync()
    for failure in await storage.delete([REPO_INFO]):
        raise failure.error


async def _check_unused(storage: Storage, info: RepoInfo, files: RefFiles) -> None:
    """Refuse to delete refs that were written to after the migration."""
    old = files.refs
    unknown = {
        target: name
        for name, target in {**old.branches, **old.tags}.items()
        if target not in info.snapshots
    }
    # Some may have expired since; the log still says that they were migrated.
    for snapshot_id in migration.known_snapshots(list(info.updates), info):
        unknown.pop(snapshot_id, None)
    for snapshot_id, name in unknown.items():
        # A ref to a snapshot that is gone protects nothing.
        if await read_if_there(storage, snapshot_key(snapshot_id)) is not None:
            raise ConflictError(
                f"The old ref {name!r} is at snapshot {snapshot_id}, which the migrated "
                "repository does not know: a writer still used format version 1. Nothing was "
                "deleted. Write what that commit holds anew, then delete the ref's file.",
                ref=name,
                snapshot_id=str(snapshot_id),
            )


async def _unused(storage: Storage, files: RefFiles) -> tuple[str, ...]:
    """Return the keys that version 2 does not need; that of ``main`` first."""
    main = branch_key(MAIN)
    keys = sorted(files.keys, key=lambda key: (key != main, key))
    config = () if await read_if_there(storage, CONFIG) is None else (CONFIG,)
    return (*keys, *config)


async def _delete(storage: Storage, keys: tuple[str, ...]) -> None:
    """Delete ``main`` before all others, so that the rest is not taken for a repository."""
    # Old libraries find a repository by this one file: without it they stop at once.
    for part in (keys[:1], keys[1:]):
        if part:
            for failure in await storage.delete(part):
                raise failure.error


def _encode(info: RepoInfo) -> bytes:
    return pack(encode_repo_info(info), FileType.REPO_INFO, 2)


async def _create(storage: Storage, data: bytes) -> Version:
    """Create the repo info."""
    version = await create_object(storage, REPO_INFO, data)
    if version is None:
        raise ConflictError(
            "Somebody else is migrating the repository, or has just done it; nothing was changed. "
            "Call upgrade again to see, but not while they are at work."
        )
    return version

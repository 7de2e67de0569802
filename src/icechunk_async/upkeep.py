"""The reports of upkeep, and what is done to repositories that are not open.

Most operations are methods of `Repository`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from icechunk_async.engine.upkeep.check import BrokenReference, Leftovers, ReferenceReport
from icechunk_async.engine.upkeep.collect import GarbageReport
from icechunk_async.engine.upkeep.compact import CompactReport
from icechunk_async.engine.upkeep.copying.copy import CopyReport, RefChange
from icechunk_async.engine.upkeep.integrity.repair import RepairPlan, RepairStep
from icechunk_async.engine.upkeep.integrity.report import Finding, NotLookedAt, VerifyReport
from icechunk_async.engine.upkeep.migration.upgrade import MigrationReport, upgrade
from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
from icechunk_async.engine.upkeep.sums import AddedSums, ContentReport

__all__ = [
    "AddedSums",
    "BrokenReference",
    "ChunkStorageStats",
    "CompactReport",
    "ContentReport",
    "CopyReport",
    "Finding",
    "GarbageReport",
    "Leftovers",
    "MigrationReport",
    "NotLookedAt",
    "RefChange",
    "ReferenceReport",
    "RepairPlan",
    "RepairStep",
    "VerifyReport",
    "restore_repo_object",
    "upgrade",
    "verify",
]

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Location
    from icechunk_async.engine.virtual.chunks import VirtualAccess


async def verify(
    location: Location,
    level: Literal["structure", "existence", "length", "sums", "decode"] = "decode",
    *,
    storage_options: Mapping[str, object] | None = None,
    authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    refs: Sequence[str] | None = None,
    ancestry: bool = True,
    sample: float | None = None,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Verify a repository as `Repository.verify` does, also one that cannot be opened.

    If the object that makes it a repository is missing or damaged, the report says so and that
    nothing else was looked at.

    Args:
        location: a path, a URL, or an open storage, which is left open.
        level: see `Repository.verify`, and so for the arguments that are not explained here.
        storage_options: the backend's options, if ``location`` is a path or URL.
        authorize_virtual_chunk_access: see `Repository.open`.
        refs: names of branches and tags, or ids of snapshots.
        ancestry: also look at the snapshots before those.
        sample: a share or a number of chunks.
        seed: draws another sample.
        state: the file of an interrupted run.
        progress: called with each step.

    Raises:
        RepositoryNotFoundError: there is nothing like a repository.
    """
    from icechunk_async.engine.open import Request  # noqa: PLC0415 -- slow to import
    from icechunk_async.engine.upkeep.integrity.closed import verify_location  # noqa: PLC0415
    from icechunk_async.engine.upkeep.integrity.report import (  # noqa: PLC0415
        StateFile,
        as_level,
    )
    from icechunk_async.engine.upkeep.integrity.verify import VerifyOptions  # noqa: PLC0415
    from icechunk_async.zarr.decoding import ZarrDecoder  # noqa: PLC0415

    access = dict(authorize_virtual_chunk_access or {})
    request = Request(location, dict(storage_options or {}), None, access)
    named = None if refs is None else tuple(refs)
    options = VerifyOptions(as_level(level), named, ancestry, sample, seed)
    file = None if state is None else StateFile(state)
    return await verify_location(request, options, ZarrDecoder(), file=file, progress=progress)


async def restore_repo_object(
    location: Location,
    *,
    dry_run: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> RepairStep | None:
    """Replace a missing or damaged ``repo`` object by its newest backup that can be read.

    Every change of a repository of format version 2 keeps a copy of the object that it replaces.
    The newest is the state before the last change: a commit that was made by it is in no branch
    afterwards. A damaged object is copied to ``quarantine/`` first. Of numbered states the backup
    becomes the newest. Verify the repository next.

    Args:
        location: a path, a URL, or an open storage, which is left open.
        dry_run: change nothing, and return the step.
        storage_options: the backend's options, if ``location`` is a path or URL.

    Returns:
        The step; None if the object can be read, or there is no backup.

    Raises:
        ConflictError: another writer was first; nothing was changed.
        FormatError: a numbered state below the newest is missing; nothing was changed.
        UnsafeStorageError: the storage cannot be written to safely.

    Cancellation: it may be restored. Calling again is safe.
    """
    from icechunk_async.engine.history.opening import damaged_way  # noqa: PLC0415 -- slow to import
    from icechunk_async.engine.open import (  # noqa: PLC0415
        Request,
        check_safe,
        early,
        open_location,
    )
    from icechunk_async.engine.upkeep.integrity import repair  # noqa: PLC0415

    request = Request(location, dict(storage_options or {}), None, {})
    async with open_location(request) as opened:
        # With retries alone: the settings for more are in the object that is damaged.
        storage = early(request, opened)
        way = await damaged_way(storage)
        # Looking must work on storage that nobody should write to, for instance a copy that only
        # reads.
        if not dry_run:
            check_safe(storage, way.storage_needs)
        return await repair.restore_repo_object(way.view(storage), dry_run=dry_run)

"""Verify a repository at a location, also one that is too damaged to be opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.concurrency import closing
from icechunk_async.engine.history.opening import damaged_way
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.ref_files.upkeep import audit as audit_refs
from icechunk_async.engine.history.repo_info.audit import audit as audit_info
from icechunk_async.engine.open import early, open_engine, open_location
from icechunk_async.engine.upkeep.integrity.report import (
    Finding,
    Level,
    NotLookedAt,
    VerifyReport,
)
from icechunk_async.engine.upkeep.integrity.verify import verify
from icechunk_async.errors import FormatError, RepositoryNotFoundError
from icechunk_async.format.layout import REFS, REPO_INFO

if TYPE_CHECKING:
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.history import Audit
    from icechunk_async.engine.open import Request
    from icechunk_async.engine.upkeep.integrity.objects import ChunkDecoder
    from icechunk_async.engine.upkeep.integrity.report import StateFile
    from icechunk_async.engine.upkeep.integrity.verify import VerifyOptions
    from icechunk_async.storage import Storage

__all__ = ["audit_closed", "verify_location"]


async def verify_location(
    request: Request,
    options: VerifyOptions,
    decoder: ChunkDecoder,
    *,
    file: StateFile | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Open a repository and verify it; if it cannot be opened, say what is damaged.

    Raises:
        RepositoryNotFoundError: there is nothing like a repository.
        FormatError: it cannot be opened for another reason than damaged references.
    """
    try:
        # First as anybody opens it, because an opened repository can be looked at whole.
        async with open_engine(request) as engine:
            return await verify(engine, options, decoder, file=file, progress=progress)
    except (FormatError, RepositoryNotFoundError):
        async with open_location(request) as opened:
            storage = early(request, opened)
            found = await audit_closed(storage)
            if found is None:
                raise
            spec_version, audit = found
            # The references are sound, so the error is about something else, such as the
            # configuration.
            if not audit.faults:
                raise
            return _report(storage, spec_version, options, audit)


async def audit_closed(storage: Storage) -> tuple[int, Audit] | None:
    """Return the format version of what may have been a repository, and what its refs say.

    None if there is nothing like a repository.

    Raises:
        FormatError: a numbered state is missing.
    """
    storage = (await damaged_way(storage)).view(storage)
    # A name that is known needs no listing, which some storages refuse.
    if await read_if_there(storage, REPO_INFO) is not None:
        return 2, await audit_info(storage)
    if not storage.capabilities.listing:
        return None
    for prefix, spec_version in (
        # Backups are the surest sign: every change of a repo info leaves one, and only format 2 has
        # them.
        (f"overwritten/{REPO_INFO}.", 2),
        (REFS, 1),
        ("snapshots/", 2),
    ):
        if await _has_any(storage, prefix):
            audit = audit_info if spec_version == 2 else audit_refs
            return spec_version, await audit(storage)
    return None


async def _has_any(storage: Storage, prefix: str) -> bool:
    entries = storage.list_prefix(prefix)
    async with closing(entries):
        async for _ in entries:
            return True
    return False


def _report(
    storage: Storage, spec_version: int, options: VerifyOptions, audit: Audit
) -> VerifyReport:
    level = Level.STRUCTURE.name.lower()
    return VerifyReport(
        storage.description.url,
        spec_version,
        options.level.name.lower(),
        options.sample,
        options.seed,
        (),
        findings=tuple(
            Finding(it.kind, it.key, it.problem, level, it.detail) for it in audit.faults
        ),
        not_looked_at=(NotLookedAt("everything but references: the repository cannot be opened"),),
    )

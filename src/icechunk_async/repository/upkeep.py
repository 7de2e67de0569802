"""Expiration, garbage collection and statistics of an open repository."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from icechunk_async import _clock, _telemetry
from icechunk_async.errors import InvalidInputError
from icechunk_async.repository.history.protocol import Expiration
from icechunk_async.repository.opened import check_safe
from icechunk_async.repository.progress import no_progress
from icechunk_async.repository.survey import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.metadata import JSON
    from icechunk_async.repository.check import ReferenceReport
    from icechunk_async.repository.collect import GarbageReport
    from icechunk_async.repository.compact import CompactReport
    from icechunk_async.repository.opened import Opened
    from icechunk_async.repository.progress import ProgressCallback
    from icechunk_async.repository.statistics import ChunkStorageStats

__all__ = ["UpkeepOperations", "checked_cutoff"]

_log = logging.getLogger(__name__)

_DEFAULT = Limits()


class UpkeepOperations:
    """What keeps a repository small; a base of the repository."""

    _opened: Opened
    default_commit_metadata: dict[str, JSON]

    async def expire_snapshots(
        self,
        older_than: datetime,
        *,
        delete_expired_branches: bool = False,
        delete_expired_tags: bool = False,
        dry_run: bool = False,
    ) -> set[SnapshotId]:
        """Drop old snapshots from the history. Their files stay until garbage collection.

        The first snapshot stays, and so do the tips of branches and tags, unless those are to be
        deleted, too; ``main`` always stays. What is kept and stood on a dropped snapshot becomes
        a child of the first one. With format 2 it remembers what the dropped commits touched, so
        that diffs and rebases over the gap stay right; with format 1 that is lost.

        Args:
            older_than: drop snapshots made before this time, by their writers' clocks; a time
                without a zone is UTC.
            delete_expired_branches: delete branches whose tip is dropped. With format 1 a commit
                made to such a branch at the very moment can be lost with it.
            delete_expired_tags: delete tags whose snapshot is dropped; their names are never
                used again.
            dry_run: change nothing, and answer what would be dropped.

        Returns:
            The snapshots that were dropped. With format 1 old tips that stay are among them.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes; nothing changed.
            OutcomeUnknownError: the storage never answered. Calling again is safe.
            FeatureDisabledError: tags would be deleted, and the repository forbids that.

        Cost: with format 2 one change of the repository, as for creating a branch. With format 1
        every snapshot is read, one after the other in each branch, and one in each written.

        Cancellation: it may have happened, with format 1 also in part; the history is whole in
        any case, and calling again finishes the work.
        """
        rule = Expiration(_clock.to_us(older_than), delete_expired_branches, delete_expired_tags)
        if not dry_run:
            check_safe(self._opened.storage)
        with _telemetry.span("expire", dry_run=dry_run):
            released = set(await self._opened.history.expire(rule, dry_run=dry_run))
        _log.info("%d snapshot(s) expired%s", len(released), " (dry run)" * dry_run)
        return released

    async def garbage_collect(
        self,
        delete_object_older_than: datetime,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = _DEFAULT.snapshots,
        max_compressed_manifest_mem_bytes: int = _DEFAULT.manifest_bytes,
        max_concurrent_manifest_fetches: int = _DEFAULT.manifests,
        progress: ProgressCallback | None = None,
    ) -> GarbageReport:
        """Delete the objects that no branch and no tag leads to.

        Choose a time before the beginning of every session that is still open anywhere: what an
        open session wrote belongs to no branch yet, and only its age protects it. With format 1
        nobody must create or reset branches and tags meanwhile; with format 2 they may.

        Args:
            delete_object_older_than: spare what was written at this time or later, by the
                storage's clock; not in the future, by this machine's clock and by that one. A
                time without a zone is UTC.
            dry_run: change nothing, and answer what would be deleted.
            max_snapshots_in_memory: read as many snapshots at a time.
            max_compressed_manifest_mem_bytes: read manifests of as many bytes at a time.
            max_concurrent_manifest_fetches: read as many manifests at a time.
            progress: told how far it is, see
                :class:`~icechunk_async.repository.progress.Progress`.

        Returns:
            What was deleted, and what could not be: after a failure the folders that come later
            are left alone, since what remained may refer to what is in them.

        Raises:
            InvalidInputError: the time is in the future, by either clock; nothing was deleted.
            RepositoryReadOnlyError: the repository's status forbids changes.
            FormatError, SnapshotNotFoundError: a file is damaged or missing that the repository
                needs; nothing was deleted.
            ConflictError: the repository changed each time that its history was to be written;
                nothing was deleted.
            StorageError: listing failed; what was deleted until then was garbage.

        Cost: every snapshot and manifest in use is read; every object is listed, and garbage
        deleted, 1000 with each request where the storage can. Memory: 12 bytes for each chunk in
        use, and what is read at a time.

        Cancellation: part of the garbage may be deleted, and nothing else is. With format 2
        snapshots that nothing led to may be unknown already. Calling again finishes the work.
        """
        limits = _limits(
            max_snapshots_in_memory,
            max_concurrent_manifest_fetches,
            max_compressed_manifest_mem_bytes,
        )
        cutoff = checked_cutoff(delete_object_older_than)
        if not dry_run:
            check_safe(self._opened.storage)
        from icechunk_async.repository.collect import collect_garbage  # noqa: PLC0415 -- not without need

        with _telemetry.span("garbage_collect", dry_run=dry_run):
            report = await collect_garbage(
                self._opened,
                cutoff,
                dry_run=dry_run,
                limits=limits,
                progress=progress,
            )
        _log.info("garbage collected%s: %s", " (dry run)" * dry_run, report)
        for failure in report.failures:
            _log.warning("%r could not be deleted: %s", failure.key, failure.error)
        return report

    async def compact(
        self,
        branch: str,
        *,
        min_live_share: float = 0.5,
        message: str = "Compact chunk objects",
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CompactReport:
        """Write chunks anew that lie in objects of which a branch's tip uses little, and commit.

        For objects that several chunks share, see :class:`~icechunk_async.Packing`: they are
        garbage only as a whole. Arrays and chunks stay as they are, so the commit is no conflict
        for other writers; what those change meanwhile is left to them.

        Other branches, tags and older snapshots go on using the old objects. So expire snapshots
        afterwards, and collect garbage: the space is free once nothing leads to the old objects.

        Args:
            branch: whose tip is looked at.
            min_live_share: of an object's bytes; those that are used less are left empty. Above 0
                and at most 1.
            message: the commit's message.
            metadata: properties of the commit.
            dry_run: write nothing, and answer what would be done.
            progress: told how many bytes are done.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidInputError: the share is none.
            RepositoryReadOnlyError: the repository's status forbids changes.
            ConflictError: the branch was reset meanwhile; nothing was published.
            RebaseFailedError: somebody moved nodes meanwhile; likewise. Call again.
            OutcomeUnknownError: the storage never answered; calling again is safe.

        Cancellation: the commit may have been published; else there is more garbage.

        Cost: lists all chunk objects and reads all manifests of the tip; reads and writes the
        chunks that move, neighbours together. Memory: 28 bytes for each chunk object, the
        references of one array, and what is read at a time.
        """
        from icechunk_async.repository.compact import compact  # noqa: PLC0415 -- not without need

        with _telemetry.span("compact", branch=branch, dry_run=dry_run):
            report = await compact(
                self._opened,
                branch,
                min_live_share=min_live_share,
                message=message,
                metadata={**self.default_commit_metadata, **(metadata or {})},
                dry_run=dry_run,
                progress=progress or no_progress,
            )
        _log.info("branch %r compacted%s: %s", branch, " (dry run)" * dry_run, report)
        return report

    async def chunk_storage_stats(
        self,
        *,
        max_snapshots_in_memory: int = _DEFAULT.snapshots,
        max_compressed_manifest_mem_bytes: int = _DEFAULT.manifest_bytes,
        max_concurrent_manifest_fetches: int = _DEFAULT.manifests,
        progress: ProgressCallback | None = None,
    ) -> ChunkStorageStats:
        """Count the bytes of all chunks that branches and tags lead to, in every snapshot.

        A byte of a chunk object or of another's object counts once, however many chunks share
        it, so that objects which hold several chunks are counted as what they are.

        Args as :meth:`garbage_collect`.

        Raises:
            FormatError, SnapshotNotFoundError: a file is damaged or missing.

        Cost: every snapshot and manifest in use is read; 32 bytes of memory for each range.

        Cancellation: no effect.
        """
        limits = _limits(
            max_snapshots_in_memory,
            max_concurrent_manifest_fetches,
            max_compressed_manifest_mem_bytes,
        )
        from icechunk_async.repository.statistics import measure_chunks  # noqa: PLC0415 -- not without need

        return await measure_chunks(self._opened, limits, progress)

    async def check_references(
        self, *, progress: ProgressCallback | None = None
    ) -> ReferenceReport:
        """Look whether every object is there that branches and tags lead to, and long enough.

        Snapshots and manifests are read; transaction logs and chunks are looked for; objects that
        virtual chunks are in are asked for their state, which is compared with what references
        are guarded with. Chunks are not read: what they hold is not checked.

        Args:
            progress: told how far it is.

        Returns:
            What was looked for, and each object that is missing, too short, changed, damaged or
            not to be had. Virtual objects of containers that were not authorised are counted.

        Raises:
            StorageError: a listing failed.

        Cost: every snapshot and manifest in use is read, and all objects are listed; a request
        for each virtual object. Memory: some 40 bytes for each chunk object in use.

        Cancellation: no effect.
        """
        from icechunk_async.repository.check import check_references  # noqa: PLC0415 -- not without need

        with _telemetry.span("check_references"):
            return await check_references(self._opened, progress or no_progress)


def _limits(snapshots: int, manifests: int, manifest_bytes: int) -> Limits:
    if min(snapshots, manifests, manifest_bytes) < 1:
        raise InvalidInputError(
            "The limits on what is held in memory must be at least 1; "
            f"{min(snapshots, manifests, manifest_bytes)} was given."
        )
    return Limits(snapshots, manifests, manifest_bytes)


def checked_cutoff(moment: datetime) -> datetime:
    """Answer a time before which garbage may be deleted, with its zone.

    Raises:
        InvalidInputError: it is in the future.
    """
    if _clock.to_us(moment) > _clock.now_us():
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {moment.isoformat()}, "
            "which is in the future: it would delete what sessions write at this moment. Name a "
            "time before the beginning of the oldest session that is still open."
        )
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment

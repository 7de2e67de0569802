"""Keeping a repository healthy: expiry, garbage collection, statistics, manifests."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from icechunk_async.sync._states import ChunkStorageStats
from icechunk_async.sync.asking import Asking
from icechunk_async.sync.conversion import check_aware

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from icechunk_async.engine.upkeep.collect import GarbageReport
    from icechunk_async.engine.upkeep.compact import CompactReport
    from icechunk_async.sync.ops import GCSummary
    from icechunk_async.sync.types import CommitMethod

__all__ = ["UpkeepOperations"]


class UpkeepOperations(Asking):
    """A base of the repository.

    Arguments of the official engine that say "accepted" bound something that this library bounds
    by itself.
    """

    def expire_snapshots(
        self,
        older_than: datetime,
        *,
        delete_expired_branches: bool = False,
        delete_expired_tags: bool = False,
    ) -> set[str]:
        """Take snapshots that are older out of the history of every branch and tag.

        The first snapshot and those that a branch or tag points to stay. Files are deleted by
        :meth:`garbage_collect`.

        Args:
            older_than: snapshots written before this go; aware.
            delete_expired_branches: delete branches whose tip is older, but for ``main``.
            delete_expired_tags: delete tags whose snapshot is older.

        Returns: the ids of what went.
        """
        check_aware(older_than, "older_than")
        return _ids(
            self._ask(
                lambda it: it.expire_snapshots(
                    older_than,
                    delete_expired_branches=delete_expired_branches,
                    delete_expired_tags=delete_expired_tags,
                )
            )
        )

    async def expire_snapshots_async(
        self,
        older_than: datetime,
        *,
        delete_expired_branches: bool = False,
        delete_expired_tags: bool = False,
    ) -> set[str]:
        """Await what :meth:`expire_snapshots` does."""
        check_aware(older_than, "older_than")
        return _ids(
            await self._ask_async(
                lambda it: it.expire_snapshots(
                    older_than,
                    delete_expired_branches=delete_expired_branches,
                    delete_expired_tags=delete_expired_tags,
                )
            )
        )

    def rewrite_manifests(
        self,
        message: str,
        *,
        branch: str,
        metadata: dict[str, Any] | None = None,
        commit_method: CommitMethod = "new_commit",
    ) -> str:
        """Write the manifests of a branch's tip again, as the configuration now splits them.

        Returns: the id of the new snapshot, which replaces the tip if ``commit_method`` is
            ``"amend"``.
        """
        return str(
            self._ask(
                lambda it: it.rewrite_manifests(
                    message, branch=branch, metadata=metadata, commit_method=commit_method
                )
            )
        )

    async def rewrite_manifests_async(
        self,
        message: str,
        *,
        branch: str,
        metadata: dict[str, Any] | None = None,
        commit_method: CommitMethod = "new_commit",
    ) -> str:
        """Await what :meth:`rewrite_manifests` does."""
        return str(
            await self._ask_async(
                lambda it: it.rewrite_manifests(
                    message, branch=branch, metadata=metadata, commit_method=commit_method
                )
            )
        )

    def compact(
        self,
        branch: str,
        *,
        min_live_share: float = 0.5,
        message: str = "Compact chunk objects",
        metadata: dict[str, Any] | None = None,
        dry_run: bool = False,
    ) -> CompactReport:
        """Write chunks anew that lie in objects of which a branch's tip uses little, and commit.

        Not in the official engine. For repositories whose small chunks share objects; see the
        method of this name of ``icechunk_async.Repository``.

        Args:
            branch: whose tip is looked at.
            min_live_share: of an object's bytes; those that are used less are left empty.
            message: the commit's message.
            metadata: properties of the commit.
            dry_run: write nothing, and answer what would be done.
        """
        return self._ask(
            lambda it: it.compact(
                branch,
                min_live_share=min_live_share,
                message=message,
                metadata=metadata,
                dry_run=dry_run,
            )
        )

    async def compact_async(
        self,
        branch: str,
        *,
        min_live_share: float = 0.5,
        message: str = "Compact chunk objects",
        metadata: dict[str, Any] | None = None,
        dry_run: bool = False,
    ) -> CompactReport:
        """Await what :meth:`compact` does."""
        return await self._ask_async(
            lambda it: it.compact(
                branch,
                min_live_share=min_live_share,
                message=message,
                metadata=metadata,
                dry_run=dry_run,
            )
        )

    def garbage_collect(
        self,
        delete_object_older_than: datetime,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
        max_concurrent_deletes: int = 10,
        max_consecutive_delete_failures: int = 50,
        max_concurrent_listings: int | None = None,
    ) -> GCSummary:
        """Delete files that no branch and no tag needs.

        Args:
            delete_object_older_than: spare files that are newer; must lie before the beginning of
                every session that has not been committed yet. Aware.
            dry_run: only count.
            max_snapshots_in_memory: read as many snapshots at a time.
            max_compressed_manifest_mem_bytes: read manifests of as many bytes at a time.
            max_decoded_manifest_mem_bytes: accepted.
            max_concurrent_manifest_fetches: read as many manifests at a time.
            max_concurrent_deletes: accepted.
            max_consecutive_delete_failures: accepted.
            max_concurrent_listings: accepted.
        """
        check_aware(delete_object_older_than, "delete_object_older_than")
        return _summary(
            self._ask(
                lambda it: it.garbage_collect(
                    delete_object_older_than,
                    dry_run=dry_run,
                    max_snapshots_in_memory=max_snapshots_in_memory,
                    max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                    max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                )
            )
        )

    async def garbage_collect_async(
        self,
        delete_object_older_than: datetime,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
        max_concurrent_deletes: int = 10,
        max_consecutive_delete_failures: int = 50,
        max_concurrent_listings: int | None = None,
    ) -> GCSummary:
        """Await what :meth:`garbage_collect` does."""
        check_aware(delete_object_older_than, "delete_object_older_than")
        return _summary(
            await self._ask_async(
                lambda it: it.garbage_collect(
                    delete_object_older_than,
                    dry_run=dry_run,
                    max_snapshots_in_memory=max_snapshots_in_memory,
                    max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                    max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                )
            )
        )

    def chunk_storage_stats(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
    ) -> ChunkStorageStats:
        """Return the bytes of all chunks of all snapshots, each chunk once.

        Args:
            max_snapshots_in_memory: read as many snapshots at a time.
            max_compressed_manifest_mem_bytes: read manifests of as many bytes at a time.
            max_decoded_manifest_mem_bytes: accepted.
            max_concurrent_manifest_fetches: read as many manifests at a time.
        """
        return ChunkStorageStats.from_native(
            self._ask(
                lambda it: it.chunk_storage_stats(
                    max_snapshots_in_memory=max_snapshots_in_memory,
                    max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                    max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                )
            )
        )

    async def chunk_storage_stats_async(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
    ) -> ChunkStorageStats:
        """Await what :meth:`chunk_storage_stats` answers."""
        return ChunkStorageStats.from_native(
            await self._ask_async(
                lambda it: it.chunk_storage_stats(
                    max_snapshots_in_memory=max_snapshots_in_memory,
                    max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                    max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                )
            )
        )

    def total_chunks_storage(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
    ) -> int:
        """Return the bytes of native chunks. Deprecated: see :meth:`chunk_storage_stats`."""
        _deprecated("total_chunks_storage", "chunk_storage_stats")
        return self.chunk_storage_stats(
            max_snapshots_in_memory=max_snapshots_in_memory,
            max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
            max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
        ).native_bytes

    async def total_chunks_storage_async(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * 1024 * 1024,
        max_decoded_manifest_mem_bytes: int = 4 * 1024 * 1024 * 1024,
        max_concurrent_manifest_fetches: int = 500,
    ) -> int:
        """Await what :meth:`total_chunks_storage` answers."""
        _deprecated("total_chunks_storage_async", "chunk_storage_stats_async")
        stats = await self.chunk_storage_stats_async(
            max_snapshots_in_memory=max_snapshots_in_memory,
            max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
            max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
        )
        return stats.native_bytes


def _ids(snapshots: Iterable[object]) -> set[str]:
    return {str(snapshot_id) for snapshot_id in snapshots}


def _deprecated(old: str, new: str) -> None:
    warnings.warn(
        f"{old} counts native chunks only and will go. Use {new}(...).native_bytes, which also "
        "tells the bytes of inline and virtual chunks.",
        DeprecationWarning,
        stacklevel=3,
    )


def _summary(report: GarbageReport) -> GCSummary:
    from icechunk_async.sync.ops import GCSummary  # noqa: PLC0415 -- not without need

    return GCSummary.from_native(report)

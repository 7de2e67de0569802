"""Where the facade differs from the official package on purpose, and why."""

from __future__ import annotations

from typing import Final

__all__ = ["DIFFERENT"]

_ENUM: Final = "is a Python enum: called with a value, iterable, hashable, picklable"
_PLAIN: Final = "is a plain value that can be made, for tests and for other programs"
_DEFAULTS: Final = "has the defaults that the official type stubs promise"
_MORE: Final = (
    "takes `once`, `unchanged`, `timeout_seconds` and `allow_missing_forks` as well, see "
    "`Session.commit`"
)
_LEASE: Final = "takes `lease` and `owner` as well, for sessions that garbage collection spares"
_ABSTRACT: Final = "cannot be made either; its subclasses take arguments"

_REF: Final = "takes `ref` (`from_ref`, `to_ref`) as well, by keyword only: a ref of any kind"
_GRAPH: Final = (
    "takes `ref` and `limit` as well, by keyword only: draws the newest 50 unless told otherwise, "
    "and in colour only on a terminal"
)
_OPENING: Final = (
    "takes what `icechunk_async.Repository` takes as well, by keyword only: `storage_options`, "
    "`cache`, `hedge`, `packing`, `sums`, `verify_reads`, `after_commit`"
)
_CREATING: Final = f"{_OPENING}, `layout` and `probe`"
_URL: Final = "takes `storage_options` as well, by keyword only: options of the backend of a URL"
_PROGRESS: Final = "takes `progress` as well, by keyword only: a function that is told each step"
_DRY: Final = "takes `dry_run` as well, by keyword only; a time in the future is refused"
_MISSING: Final = "takes `allow_missing_forks` as well, by keyword only"
_OVERLAPS: Final = "takes `allow_overlaps` as well, by keyword only"
_ROWS: Final = "takes `vectorized` as well, by keyword only: functions that get all chunks at once"
DIFFERENT: Final = {
    "AncestryGraph": _PLAIN,
    "AzureCredentials.Refreshable": _DEFAULTS,
    "AzureRefreshableCredential.AccessKey": _DEFAULTS,
    "AzureRefreshableCredential.BearerToken": _DEFAULTS,
    "AzureRefreshableCredential.SasToken": _DEFAULTS,
    "BasicConflictSolver": "shows the default that the official signature hides behind an ellipsis",
    "ChecksumAlgorithm": _ENUM,
    "ChunkType": _ENUM,
    "CompressionAlgorithm": _ENUM,
    "ConflictSolver": _ABSTRACT,
    "ConflictType": _ENUM,
    "Diff": _PLAIN,
    "FeatureFlag": _PLAIN,
    "ForkSession.amend": _MISSING,
    "ForkSession.amend_async": _MISSING,
    "ForkSession.commit": _MORE,
    "ForkSession.commit_async": _MORE,
    "ForkSession.flush": _MISSING,
    "ForkSession.flush_async": _MISSING,
    "ForkSession.merge": _OVERLAPS,
    "ForkSession.merge_async": _OVERLAPS,
    "ForkSession.reindex_array": _ROWS,
    "GCSummary": _PLAIN,
    "GcsCredentials.Refreshable": _DEFAULTS,
    "ManifestFileInfo": _PLAIN,
    "ObjectStoreConfig.Azure": _DEFAULTS,
    "ObjectStoreConfig.Gcs": _DEFAULTS,
    "ObjectStoreConfig.Http": _DEFAULTS,
    "RepoAvailability": _ENUM,
    "Repository.ancestry": _REF,
    "Repository.ancestry_graph": _GRAPH,
    "Repository.ancestry_graph_async": _GRAPH,
    "Repository.async_ancestry": _REF,
    "Repository.chunk_storage_stats": _PROGRESS,
    "Repository.chunk_storage_stats_async": _PROGRESS,
    "Repository.create": _CREATING,
    "Repository.create_async": _CREATING,
    "Repository.diff": _REF,
    "Repository.diff_async": _REF,
    "Repository.exists": _URL,
    "Repository.exists_async": _URL,
    "Repository.expire_snapshots": _DRY,
    "Repository.expire_snapshots_async": _DRY,
    "Repository.fetch_config": _URL,
    "Repository.fetch_config_async": _URL,
    "Repository.fetch_spec_version": _URL,
    "Repository.fetch_spec_version_async": _URL,
    "Repository.garbage_collect": _PROGRESS,
    "Repository.garbage_collect_async": _PROGRESS,
    "Repository.open": _OPENING,
    "Repository.open_async": _OPENING,
    "Repository.open_or_create": _CREATING,
    "Repository.open_or_create_async": _CREATING,
    "Repository.readonly_session": _REF,
    "Repository.readonly_session_async": _REF,
    "Repository.rewrite_manifests": _PROGRESS,
    "Repository.rewrite_manifests_async": _PROGRESS,
    "Repository.transaction": _MORE,
    "Repository.writable_session": _LEASE,
    "Repository.writable_session_async": _LEASE,
    "S3Credentials.Refreshable": _DEFAULTS,
    "Session.amend": _MISSING,
    "Session.amend_async": _MISSING,
    "Session.commit": _MORE,
    "Session.commit_async": _MORE,
    "Session.flush": _MISSING,
    "Session.flush_async": _MISSING,
    "Session.merge": _OVERLAPS,
    "Session.merge_async": _OVERLAPS,
    "Session.reindex_array": _ROWS,
    "SessionMode": _ENUM,
    "SnapshotInfo": _PLAIN,
    "SpecVersion": _ENUM,
    "Storage": "is made by functions and class methods there and here; the arguments are internal",
    "Update": _PLAIN,
    "VersionSelection": _ENUM,
}
"""By name: what is different, and why that is better."""

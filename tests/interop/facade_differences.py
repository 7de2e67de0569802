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
_SUMS: Final = "takes sums and verify_reads as well, by keyword only"
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
    "ForkSession.commit": _MORE,
    "ForkSession.commit_async": _MORE,
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
    "Repository.create": _SUMS,
    "Repository.create_async": _SUMS,
    "Repository.diff": _REF,
    "Repository.diff_async": _REF,
    "Repository.open": _SUMS,
    "Repository.open_async": _SUMS,
    "Repository.open_or_create": _SUMS,
    "Repository.open_or_create_async": _SUMS,
    "Repository.readonly_session": _REF,
    "Repository.readonly_session_async": _REF,
    "Repository.transaction": _MORE,
    "Repository.writable_session": _LEASE,
    "Repository.writable_session_async": _LEASE,
    "S3Credentials.Refreshable": _DEFAULTS,
    "Session.commit": _MORE,
    "Session.commit_async": _MORE,
    "SessionMode": _ENUM,
    "SnapshotInfo": _PLAIN,
    "SpecVersion": _ENUM,
    "Storage": "is made by functions and class methods there and here; the arguments are internal",
    "Update": _PLAIN,
    "VersionSelection": _ENUM,
}
"""By name: what is different, and why that is better."""

"""Types of the values that methods of `Repository` and `Session` return.

The reports of upkeep are in `icechunk_async.upkeep`.
"""

from icechunk_async._runtime.progress import Progress, ProgressCallback
from icechunk_async.engine.commit.hooks import CommitEvent, HookFailure
from icechunk_async.engine.commit.once import RecordedTransaction
from icechunk_async.engine.history.diff import Diff
from icechunk_async.engine.history.graph import AncestryGraph
from icechunk_async.engine.history.summary import ArraySummary, OperationsLog, RepositorySummary
from icechunk_async.engine.leases.register import LeasedSession, SessionState
from icechunk_async.engine.tree.listing import ChunkBatch, ChunkType
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.format.ids import ManifestId, NodeId, SessionId
from icechunk_async.format.operations_log import (
    BranchCreated,
    BranchDeleted,
    BranchReset,
    CommitAmended,
    ConfigChanged,
    DetachedSnapshotCreated,
    ExpirationRan,
    FeatureFlagChanged,
    GarbageCollectionRan,
    MetadataChanged,
    NewCommit,
    RepoInitialized,
    RepoMigrated,
    RepoStatusChanged,
    TagCreated,
    TagDeleted,
    Update,
    UpdateDetail,
)
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.format.snapshot import ManifestFileInfo
from icechunk_async.repository import FeatureFlag, Opening, RepoAvailability, RepoStatus
from icechunk_async.zarr.queries.aggregate import Aggregate
from icechunk_async.zarr.queries.analyze import Analysis
from icechunk_async.zarr.queries.selection import SelectedCells, Selection

__all__ = [
    "Aggregate",
    "Analysis",
    "AncestryGraph",
    "ArraySummary",
    "BranchCreated",
    "BranchDeleted",
    "BranchReset",
    "ChunkBatch",
    "ChunkType",
    "CommitAmended",
    "CommitEvent",
    "ConfigChanged",
    "DetachedSnapshotCreated",
    "Diff",
    "ExpirationRan",
    "FeatureFlag",
    "FeatureFlagChanged",
    "GarbageCollectionRan",
    "HookFailure",
    "LeasedSession",
    "ManifestFileInfo",
    "ManifestId",
    "MetadataChanged",
    "NewCommit",
    "NodeId",
    "Opening",
    "OperationsLog",
    "Progress",
    "ProgressCallback",
    "RecordedTransaction",
    "RepoAvailability",
    "RepoInitialized",
    "RepoMigrated",
    "RepoStatus",
    "RepoStatusChanged",
    "RepositorySummary",
    "SelectedCells",
    "Selection",
    "SessionId",
    "SessionMode",
    "SessionState",
    "SnapshotInfo",
    "TagCreated",
    "TagDeleted",
    "Update",
    "UpdateDetail",
]

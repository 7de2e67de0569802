"""The log of operations and reports of upkeep, in the classes of the official package."""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Self, override

from icechunk_async._runtime.clock import from_us
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format import operations_log as native
from icechunk_async.format.ids import SnapshotId
from icechunk_async.sync.official.display import Record, public
from icechunk_async.sync.official.mirrors import from_native, mirrors
from icechunk_async.sync.official.states import RepoStatus
from icechunk_async.sync.official.variants import Kinds, Variant, kinds

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["GCSummary", "Update", "UpdateType"]


class _Kind(Variant):
    """A kind of operation; ids of the engine become strings."""

    @classmethod
    @override
    def from_native(cls, value: Any) -> Self:
        found = (getattr(value, spec.name) for spec in fields(value))
        return cls(*(str(it) if isinstance(it, SnapshotId) else from_native(it) for it in found))


mirrors(native.RepoStatus)(RepoStatus)


@kinds("ops")
class UpdateType(Kinds):
    """The kind of an operation, with its details."""

    class RepoInitialized(_Kind, of=native.RepoInitialized):
        pass

    class RepoMigrated(_Kind, of=native.RepoMigrated):
        from_version: int
        to_version: int

    class RepoStatusChanged(_Kind, of=native.RepoStatusChanged):
        status: RepoStatus

    class ConfigChanged(_Kind, of=native.ConfigChanged):
        pass

    class MetadataChanged(_Kind, of=native.MetadataChanged):
        pass

    class TagCreated(_Kind, of=native.TagCreated):
        name: str

    class TagDeleted(_Kind, of=native.TagDeleted):
        name: str
        previous_snap_id: str

    class BranchCreated(_Kind, of=native.BranchCreated):
        name: str

    class BranchDeleted(_Kind, of=native.BranchDeleted):
        name: str
        previous_snap_id: str

    class BranchReset(_Kind, of=native.BranchReset):
        name: str
        previous_snap_id: str

    class NewCommit(_Kind, of=native.NewCommit):
        branch: str
        new_snap_id: str

    class CommitAmended(_Kind, of=native.CommitAmended):
        branch: str
        previous_snap_id: str
        new_snap_id: str

    class NewDetachedSnapshot(_Kind, of=native.DetachedSnapshotCreated):
        new_snap_id: str

    class GCRan(_Kind, of=native.GarbageCollectionRan):
        pass

    class ExpirationRan(_Kind, of=native.ExpirationRan):
        pass

    class FeatureFlagChanged(_Kind, of=native.FeatureFlagChanged):
        id: int
        new_value: bool | None

        @classmethod
        @override
        def from_native(cls, value: Any) -> Self:
            # None is officially the way back to the default.
            return cls(value.flag, value.new_value if value.is_set else None)


type AnyUpdate = (
    UpdateType.RepoInitialized
    | UpdateType.RepoMigrated
    | UpdateType.RepoStatusChanged
    | UpdateType.ConfigChanged
    | UpdateType.MetadataChanged
    | UpdateType.TagCreated
    | UpdateType.TagDeleted
    | UpdateType.BranchCreated
    | UpdateType.BranchDeleted
    | UpdateType.BranchReset
    | UpdateType.NewCommit
    | UpdateType.CommitAmended
    | UpdateType.NewDetachedSnapshot
    | UpdateType.GCRan
    | UpdateType.ExpirationRan
    | UpdateType.FeatureFlagChanged
)


@mirrors(native.Update)
@public("ops")
@dataclass(frozen=True, repr=False)
class Update(Record):
    """One entry of the log of operations.

    Attributes:
        kind: the operation.
        updated_at: the time of the operation; aware, UTC.
        backup_path: the copy of the repository's state before it.
    """

    kind: AnyUpdate
    updated_at: datetime
    backup_path: str | None = None

    @classmethod
    @override
    def from_native(cls, value: native.Update) -> Self:
        """Return the counterpart of the engine's."""
        return cls(from_native(value.detail), from_us(value.updated_at), value.backup_path)


@public("ops")
@dataclass(frozen=True, repr=False)
class GCSummary(Record):
    """The objects that garbage collection deleted, or in a dry run would have deleted.

    Attributes:
        bytes_deleted: their total size.
        chunks_deleted: chunk objects.
        manifests_deleted: manifests.
        snapshots_deleted: snapshots.
        attributes_deleted: files of attributes, which no engine writes.
        transaction_logs_deleted: transaction logs.
        objects_failed_to_delete: objects that could not be deleted, to be tried the next time.
        throttled_batches: 0; throttled requests are repeated until they are done or fail.
        delete_errors: why objects could not be deleted.
        skipped_phases: folders that were left alone because of such errors.
    """

    bytes_deleted: int = 0
    chunks_deleted: int = 0
    manifests_deleted: int = 0
    snapshots_deleted: int = 0
    attributes_deleted: int = 0
    transaction_logs_deleted: int = 0
    objects_failed_to_delete: int = 0
    throttled_batches: int = 0
    delete_errors: list[str] = field(default_factory=list[str])
    skipped_phases: list[str] = field(default_factory=list[str])

    @classmethod
    @override
    def from_native(cls, value: Any) -> Self:
        """Return the counterpart of the engine's report."""
        same = ("bytes", "chunks", "manifests", "snapshots", "attributes", "transaction_logs")
        counts = {f"{name}_deleted": getattr(value, f"{name}_deleted") for name in same}
        errors = [f"{failure.key}: {failure.error}" for failure in value.failures]
        return cls(
            **counts,
            objects_failed_to_delete=len(errors),
            delete_errors=errors,
            skipped_phases=list(value.skipped_phases),
        )

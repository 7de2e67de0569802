"""What was done to a repository, in the classes of the official package."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, override

from icechunk_async._runtime.clock import from_us
from icechunk_async.format import operations_log as native
from icechunk_async.format.ids import SnapshotId
from icechunk_async.sync._display import Displayed, public
from icechunk_async.sync._mirrors import from_native, mirrors
from icechunk_async.sync._states import RepoStatus
from icechunk_async.sync._variants import Kinds, Variant, kinds

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["GCSummary", "Update", "UpdateType"]


class _Kind(Variant):
    """A kind of operation; ids of the engine become texts."""

    @classmethod
    @override
    def from_native(cls, value: Any) -> Self:
        found = (getattr(value, spec.name) for spec in fields(value))
        return cls(*(str(it) if isinstance(it, SnapshotId) else from_native(it) for it in found))


mirrors(native.RepoStatus)(RepoStatus)


@kinds("ops")
class UpdateType(Kinds):
    """What kind of operation it was, and its particulars."""

    @dataclass(frozen=True, repr=False)
    class RepoInitialized(_Kind):
        """The repository was created."""

        native_class: ClassVar = native.RepoInitialized

    @dataclass(frozen=True, repr=False)
    class RepoMigrated(_Kind):
        """The repository was brought to another format version."""

        native_class: ClassVar = native.RepoMigrated

        from_version: int
        to_version: int

    @dataclass(frozen=True, repr=False)
    class RepoStatusChanged(_Kind):
        """The repository was opened for changes, or closed to them."""

        native_class: ClassVar = native.RepoStatusChanged

        status: RepoStatus

    @dataclass(frozen=True, repr=False)
    class ConfigChanged(_Kind):
        """The stored configuration was replaced."""

        native_class: ClassVar = native.ConfigChanged

    @dataclass(frozen=True, repr=False)
    class MetadataChanged(_Kind):
        """The repository's own metadata was changed."""

        native_class: ClassVar = native.MetadataChanged

    @dataclass(frozen=True, repr=False)
    class TagCreated(_Kind):
        """A tag was created."""

        native_class: ClassVar = native.TagCreated

        name: str

    @dataclass(frozen=True, repr=False)
    class TagDeleted(_Kind):
        """A tag was deleted."""

        native_class: ClassVar = native.TagDeleted

        name: str
        previous_snap_id: str

    @dataclass(frozen=True, repr=False)
    class BranchCreated(_Kind):
        """A branch was created."""

        native_class: ClassVar = native.BranchCreated

        name: str

    @dataclass(frozen=True, repr=False)
    class BranchDeleted(_Kind):
        """A branch was deleted."""

        native_class: ClassVar = native.BranchDeleted

        name: str
        previous_snap_id: str

    @dataclass(frozen=True, repr=False)
    class BranchReset(_Kind):
        """A branch was moved to another snapshot."""

        native_class: ClassVar = native.BranchReset

        name: str
        previous_snap_id: str

    @dataclass(frozen=True, repr=False)
    class NewCommit(_Kind):
        """A snapshot was added to a branch."""

        native_class: ClassVar = native.NewCommit

        branch: str
        new_snap_id: str

    @dataclass(frozen=True, repr=False)
    class CommitAmended(_Kind):
        """The newest snapshot of a branch was replaced."""

        native_class: ClassVar = native.CommitAmended

        branch: str
        previous_snap_id: str
        new_snap_id: str

    @dataclass(frozen=True, repr=False)
    class NewDetachedSnapshot(_Kind):
        """A snapshot was added that no branch holds."""

        native_class: ClassVar = native.DetachedSnapshotCreated

        new_snap_id: str

    @dataclass(frozen=True, repr=False)
    class GCRan(_Kind):
        """What nothing refers to was deleted."""

        native_class: ClassVar = native.GarbageCollectionRan

    @dataclass(frozen=True, repr=False)
    class ExpirationRan(_Kind):
        """Old snapshots were dropped from history."""

        native_class: ClassVar = native.ExpirationRan

    @dataclass(frozen=True, repr=False)
    class FeatureFlagChanged(_Kind):
        """A feature was switched on or off, or left to its default."""

        native_class: ClassVar = native.FeatureFlagChanged

        id: int
        new_value: bool | None

        @classmethod
        @override
        def from_native(cls, value: Any) -> Self:
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
class Update(Displayed):
    """One entry of the log of operations.

    Attributes:
        kind: what was done.
        updated_at: when; aware, UTC.
        backup_path: where the repository's state before it was kept.
    """

    kind: AnyUpdate
    updated_at: datetime
    backup_path: str | None = None

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("kind", repr(self.kind)),
            ("updated_at", self.updated_at.isoformat()),
            ("backup_path", self.backup_path),
        ]

    @classmethod
    def from_native(cls, value: native.Update) -> Self:
        """Return the counterpart of the engine's."""
        return cls(from_native(value.detail), from_us(value.updated_at), value.backup_path)


@public("ops")
@dataclass(frozen=True, repr=False)
class GCSummary(Displayed):
    """What garbage collection deleted; after a dry run, what it would have deleted.

    Attributes:
        bytes_deleted: size of all that was deleted.
        chunks_deleted: chunk objects.
        manifests_deleted: manifests.
        snapshots_deleted: snapshots.
        attributes_deleted: files of attributes, which nobody writes.
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

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(spec.name, getattr(self, spec.name)) for spec in fields(self)]

    @classmethod
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

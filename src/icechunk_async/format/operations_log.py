"""The operations log: what was done to a repository, newest first (spec 2, "Repo info file")."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import REF, Shape, string, table
from icechunk_async.format.ids import SnapshotId

if TYPE_CHECKING:
    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.flatbuffers.single import Row

__all__ = [
    "BOOL",
    "BYTE",
    "MEMBERS",
    "SHORT",
    "SNAPSHOT",
    "STATUS",
    "TEXT",
    "Availability",
    "BranchCreated",
    "BranchDeleted",
    "BranchReset",
    "CommitAmended",
    "ConfigChanged",
    "DetachedSnapshotCreated",
    "ExpirationRan",
    "FeatureFlagChanged",
    "GarbageCollectionRan",
    "MetadataChanged",
    "NewCommit",
    "RepoInitialized",
    "RepoMigrated",
    "RepoStatus",
    "RepoStatusChanged",
    "TagCreated",
    "TagDeleted",
    "Update",
    "UpdateDetail",
    "decode_status",
    "decode_update",
    "encode_status",
    "status_from",
    "unknown_kind",
]


# The official engine takes OFFLINE for ONLINE. Here it forbids changes, for which it was set.
class Availability(IntEnum):
    """Whether a repository may be changed at present; honoured by writers, not enforced."""

    ONLINE = 0
    READ_ONLY = 1
    OFFLINE = 2


@dataclass(frozen=True, slots=True, repr=False)
class RepoStatus:
    """A repository's availability, since when, and why."""

    availability: Availability
    set_at: int
    """Microseconds since the epoch."""
    reason: str | None = None

    def __repr__(self) -> str:
        """Show the fields, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        name, when = self.availability.name, date(self.set_at)
        return f"RepoStatus(availability={name}, set_at={when!r}, reason={self.reason!r})"


@dataclass(frozen=True, slots=True)
class RepoInitialized:
    """The repository was created."""


@dataclass(frozen=True, slots=True)
class RepoMigrated:
    """The repository was brought to another format version."""

    from_version: int
    to_version: int


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The stored configuration was replaced."""


@dataclass(frozen=True, slots=True)
class MetadataChanged:
    """The repository's own metadata was changed."""


@dataclass(frozen=True, slots=True)
class TagCreated:
    """A tag was created."""

    name: str


@dataclass(frozen=True, slots=True)
class TagDeleted:
    """A tag was deleted; its name is never used again."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class BranchCreated:
    """A branch was created."""

    name: str


@dataclass(frozen=True, slots=True)
class BranchDeleted:
    """A branch was deleted."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class BranchReset:
    """A branch was moved to another snapshot."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class NewCommit:
    """A snapshot was added to a branch."""

    branch: str
    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class CommitAmended:
    """The newest snapshot of a branch was replaced."""

    branch: str
    previous_snapshot_id: SnapshotId
    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class DetachedSnapshotCreated:
    """A snapshot was added that no branch holds."""

    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class GarbageCollectionRan:
    """Unreferenced objects were deleted."""


@dataclass(frozen=True, slots=True)
class ExpirationRan:
    """Old snapshots were dropped from the history."""


@dataclass(frozen=True, slots=True)
class FeatureFlagChanged:
    """A feature was switched on, off, or back to its default."""

    flag: int
    new_value: bool
    is_set: bool
    """False where the flag went back to its default."""


@dataclass(frozen=True, slots=True)
class RepoStatusChanged:
    """The repository's availability was changed."""

    status: RepoStatus


type UpdateDetail = (
    RepoInitialized
    | RepoMigrated
    | ConfigChanged
    | MetadataChanged
    | TagCreated
    | TagDeleted
    | BranchCreated
    | BranchDeleted
    | BranchReset
    | NewCommit
    | CommitAmended
    | DetachedSnapshotCreated
    | GarbageCollectionRan
    | ExpirationRan
    | FeatureFlagChanged
    | RepoStatusChanged
)

TEXT, SNAPSHOT, BYTE, SHORT, BOOL, STATUS = range(6)
# Union member number -> class and the types of its slots, in the order of the class's fields.
MEMBERS: Final[dict[int, tuple[type[Any], tuple[int, ...]]]] = {
    1: (RepoInitialized, ()),
    2: (RepoMigrated, (BYTE, BYTE)),
    3: (ConfigChanged, ()),
    4: (MetadataChanged, ()),
    5: (TagCreated, (TEXT,)),
    6: (TagDeleted, (TEXT, SNAPSHOT)),
    7: (BranchCreated, (TEXT,)),
    8: (BranchDeleted, (TEXT, SNAPSHOT)),
    9: (BranchReset, (TEXT, SNAPSHOT)),
    10: (NewCommit, (TEXT, SNAPSHOT)),
    11: (CommitAmended, (TEXT, SNAPSHOT, SNAPSHOT)),
    12: (DetachedSnapshotCreated, (SNAPSHOT,)),
    13: (GarbageCollectionRan, ()),
    14: (ExpirationRan, ()),
    15: (FeatureFlagChanged, (SHORT, BOOL, BOOL)),
    16: (RepoStatusChanged, (STATUS,)),
}
_STATUS_SHAPE: Final = Shape("B", "Q", REF)


@dataclass(frozen=True, slots=True, repr=False)
class Update:
    """One entry of the operations log."""

    detail: UpdateDetail
    updated_at: int
    """Microseconds since the epoch; strictly descending along the log."""
    backup_path: str | None = None
    """Name of the backup in which this entry is the newest; None for the newest of all."""

    def __repr__(self) -> str:
        """Show what was done, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        return f"Update({self.detail!r}, updated_at={date(self.updated_at)!r})"

    def _repr_html_(self) -> str:
        """Show the entry in a notebook."""
        from icechunk_async._display.versions import operation_card  # noqa: PLC0415 -- rarely needed

        return operation_card(self).html()


def decode_update(row: Row) -> Update:
    """Read one Update table; raise `FormatError` if it is damaged."""
    kind = row.number(0, 1)
    # An operation that this version does not know may be one that its caller must not pass over.
    if kind not in MEMBERS:
        raise unknown_kind(kind)
    cls, forms = MEMBERS[kind]
    table = row.table(1, required="update_type")
    detail = cls(*(_read_slot(table, slot, form) for slot, form in enumerate(forms)))
    backup = row.text(3) if row.has(3) else None
    return Update(detail, row.number(2, 8), backup)


def _read_slot(row: Row, slot: int, form: int) -> Any:
    match form:
        case _ if form == TEXT:
            return row.text(slot, required="name")
        case _ if form == SNAPSHOT:
            return SnapshotId(row.struct(slot, SnapshotId.size_bytes, field="snapshot id"))
        case _ if form == STATUS:
            return decode_status(row.table(slot, required="status"))
        case _ if form == BOOL:
            return row.number(slot, 1) != 0
        case _:
            return row.number(slot, 1 if form == BYTE else 2)


def unknown_kind(kind: int) -> FormatError:
    """Return the error for an entry of a kind that this library does not know."""
    return FormatError(f"The operations log has an entry of unknown type {kind}.")


def decode_status(row: Row) -> RepoStatus:
    """Read one RepoStatus table."""
    reason = row.text(2) if row.has(2) else None
    return status_from(row.number(0, 1), row.number(1, 8), reason)


def status_from(availability: int, set_at: int, reason: str | None) -> RepoStatus:
    """Return a status; raise `FormatError` if there is no such availability."""
    # Not taken for writable: an availability that this version does not know may forbid that.
    if availability not in set(Availability):
        raise FormatError(f"The repository has an unknown availability, {availability}.")
    return RepoStatus(Availability(availability), set_at, reason)


def encode_status(status: RepoStatus) -> Block:
    """Build a RepoStatus table."""
    reason = None if status.reason is None else string(status.reason)
    return table(_STATUS_SHAPE, int(status.availability), status.set_at, reason)

"""What the commands for operators answer; as in :mod:`icechunk_async.cli.documents`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.format.metadata import JSON

__all__ = [
    "ArrayUsage",
    "Broken",
    "Checked",
    "Collected",
    "Compacted",
    "Configuration",
    "Expired",
    "FailedDeletion",
    "Migrated",
    "Operation",
    "Operations",
    "Rewritten",
    "State",
    "Usage",
    "Volume",
]


@dataclass(frozen=True, slots=True)
class ArrayUsage:
    """What the chunks of one array take."""

    path: str
    chunks: int
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Answer of ``du``."""

    ref: str
    snapshot_id: str
    arrays: list[ArrayUsage]
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int


@dataclass(frozen=True, slots=True)
class Volume:
    """Answer of ``stats``."""

    url: str
    spec_version: int
    branches: int
    tags: int
    snapshots: int
    """Those that a branch or tag leads to."""
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """A line of the operations log."""

    kind: str
    updated_at: datetime
    detail: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Operations:
    """Answer of ``ops``: newest first."""

    operations: list[Operation]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Answer of ``config``."""

    changed: bool
    """Whether it was stored anew."""
    config: JSON


@dataclass(frozen=True, slots=True)
class State:
    """Answer of ``status``."""

    url: str
    spec_version: int
    availability: str
    """``online``, ``read_only`` or ``offline``."""
    reason: str | None
    set_at: datetime | None
    """None with format version 1, which has no status."""
    branches: int
    tags: int
    feature_flags: dict[str, bool]
    metadata: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class FailedDeletion:
    """An object that could not be deleted."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Answer of ``gc``."""

    dry_run: bool
    older_than: datetime
    bytes_deleted: int
    chunks_deleted: int
    manifests_deleted: int
    snapshots_deleted: int
    transaction_logs_deleted: int
    failures: list[FailedDeletion]


@dataclass(frozen=True, slots=True)
class Broken:
    """An object that is not as it must be."""

    kind: str
    location: str
    problem: str
    detail: str
    references: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Answer of ``check``."""

    snapshots: int
    transaction_logs: int
    manifests: int
    chunk_objects: int
    virtual_objects: int
    virtual_not_authorized: int
    broken: list[Broken]


@dataclass(frozen=True, slots=True)
class Expired:
    """Answer of ``expire``."""

    dry_run: bool
    older_than: datetime
    snapshots: list[str]


@dataclass(frozen=True, slots=True)
class Compacted:
    """Answer of ``compact``."""

    dry_run: bool
    branch: str
    objects: int
    chunks: int
    bytes_written: int
    bytes_released: int
    """Of objects that the branch's tip does not use any more."""
    snapshot_id: str | None
    """None if nothing was to be done, or was done."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Answer of ``rewrite-manifests``."""

    branch: str
    snapshot_id: str
    previous_snapshot_id: str
    manifests: int
    """Files that the new snapshot uses."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """Answer of ``migrate``."""

    dry_run: bool
    url: str
    already_migrated: bool
    """It was of version 2 before; at most old files were left to delete."""
    branches: int
    tags: int
    snapshots: int
    unused_files: list[str]
    """Keys of version 1 that version 2 does not need."""

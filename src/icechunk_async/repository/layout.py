"""Where a repository keeps its objects (spec, "File layout")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async import _clock
from icechunk_async.format.ids import BackupId

if TYPE_CHECKING:
    from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId

__all__ = [
    "BRANCH_PREFIX",
    "CONFIG",
    "REFS",
    "REPO_INFO",
    "TAG_PREFIX",
    "backup_key",
    "branch_key",
    "chunk_key",
    "manifest_key",
    "new_backup_name",
    "snapshot_key",
    "tag_key",
    "tombstone_key",
    "transaction_key",
]

REPO_INFO: Final = "repo"
CONFIG: Final = "config.yaml"
REFS: Final = "refs/"
BRANCH_PREFIX: Final = "branch."
TAG_PREFIX: Final = "tag."

_YEAR_3000_MS: Final = 32_503_680_000_000


def snapshot_key(snapshot_id: SnapshotId) -> str:
    """Answer the key of a snapshot."""
    return f"snapshots/{snapshot_id}"


def transaction_key(snapshot_id: SnapshotId) -> str:
    """Answer the key of the transaction log of a snapshot."""
    return f"transactions/{snapshot_id}"


def manifest_key(manifest_id: ManifestId) -> str:
    """Answer the key of a manifest."""
    return f"manifests/{manifest_id}"


def chunk_key(chunk_id: ChunkId) -> str:
    """Answer the key of a chunk object."""
    return f"chunks/{chunk_id}"


def branch_key(name: str) -> str:
    """Answer the key of a branch file (spec 1)."""
    return f"{REFS}{BRANCH_PREFIX}{name}/ref.json"


def tag_key(name: str) -> str:
    """Answer the key of a tag file (spec 1)."""
    return f"{REFS}{TAG_PREFIX}{name}/ref.json"


def tombstone_key(name: str) -> str:
    """Answer the key of the object that marks a tag as deleted (spec 1)."""
    return f"{tag_key(name)}.deleted"


def new_backup_name(base: str) -> str:
    """Answer a fresh name for a backup of ``base``; newer ones sort first."""
    remaining_ms = _YEAR_3000_MS - _clock.now_us() // 1000
    return f"{base}.{remaining_ms:014d}.{BackupId.random()}"


def backup_key(name: str) -> str:
    """Answer the key of a backup."""
    return f"overwritten/{name}"

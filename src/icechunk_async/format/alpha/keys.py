"""Keys of the alpha: numbered branch files, tags, and immutable files by their ids.

Sequence n of a branch is the file named after n as in `icechunk_async.format.numbers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId

__all__ = [
    "ATTRIBUTES",
    "CHUNKS",
    "CONFIGS",
    "MANIFESTS",
    "REFS",
    "SNAPSHOTS",
    "SUFFIX",
    "branch_prefix",
    "chunk_key",
    "manifest_key",
    "snapshot_key",
    "tag_key",
]

REFS: Final = "r/"
SNAPSHOTS: Final = "s/"
MANIFESTS: Final = "m/"
ATTRIBUTES: Final = "a/"
CHUNKS: Final = "c"
CONFIGS: Final = "config/"
"""Numbered objects of this library: the configuration, which the alpha has no place for."""
SUFFIX: Final = ".json"


def branch_prefix(name: str) -> str:
    """Return the beginning of the keys of a branch's files."""
    return f"{REFS}{name}/"


def tag_key(name: str) -> str:
    """Return the key of a tag."""
    return f"{REFS}{name}{SUFFIX}"


def snapshot_key(snapshot_id: SnapshotId) -> str:
    """Return the key of a snapshot."""
    return f"{SNAPSHOTS}{snapshot_id}"


def manifest_key(manifest_id: ManifestId) -> str:
    """Return the key of a manifest."""
    return f"{MANIFESTS}{manifest_id}"


def chunk_key(chunk_id: ChunkId) -> str:
    """Return the key of a chunk object."""
    return f"{CHUNKS}/{chunk_id}"

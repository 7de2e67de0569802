"""Names of files of the alpha, and its reference files (schema ``RefData``): branches and tags.

Each commit to a branch creates another file, named after its number; a tag is one file.

What this library has to say besides is in ``properties``, which the schema leaves open: that a
branch was deleted with this entry, or closed by a migration.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.alpha.parts import read_id, read_time, write_time
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.json.values import is_object

if TYPE_CHECKING:
    from icechunk_async.format.ids import ChunkId, ManifestId

__all__ = [
    "ATTRIBUTES",
    "CHUNKS",
    "CONFIGS",
    "MANIFESTS",
    "REFS",
    "SNAPSHOTS",
    "SUFFIX",
    "BranchState",
    "RefData",
    "branch_prefix",
    "chunk_key",
    "decode_ref",
    "encode_ref",
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
_OURS: Final = "icechunk-async"
_STATE: Final = "branch"


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


class BranchState(StrEnum):
    """The state of a branch from an entry of its sequence on."""

    OPEN = "open"
    DELETED = "deleted"
    """There is no such branch, until a later entry creates it again."""
    MIGRATED = "migrated"
    """Nothing can be committed: the repository is being migrated, or was."""


@dataclass(frozen=True, slots=True)
class RefData:
    """The contents of a reference file."""

    snapshot_id: SnapshotId
    timestamp_us: int
    """When the file was made, in microseconds since the epoch."""
    state: BranchState = BranchState.OPEN


def encode_ref(ref: RefData) -> bytes:
    """Return a reference file."""
    properties = {} if ref.state is BranchState.OPEN else {_OURS: {_STATE: str(ref.state)}}
    document = {
        "properties": properties,
        "snapshot": list(ref.snapshot_id),
        "timestamp": write_time(ref.timestamp_us),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_ref(data: bytes | memoryview) -> RefData:
    """Read a reference file.

    Raises:
        FormatError: it is damaged.
    """
    document = parse_json(data, "reference file")
    ours = document.part("properties").members.get(_OURS)
    state = BranchState.OPEN
    # Unknown states are refused: one that a later version adds may forbid what an open branch
    # allows.
    if is_object(ours) and ours.get(_STATE) is not None:
        try:
            state = BranchState(ours[_STATE])
        except (ValueError, TypeError):
            raise document.fault(f"has the unknown state {ours[_STATE]!r:.60}") from None
    return RefData(
        SnapshotId(read_id(document, "snapshot")), read_time(document, "timestamp"), state
    )

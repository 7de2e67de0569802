"""Keys of the objects of a repository (spec, "File layout"), and of what only this library keeps.

The official engine lists neither ``leases/`` nor anything else that it did not write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, BackupId

if TYPE_CHECKING:
    from icechunk_async.format.ids import (
        ChunkId,
        ManifestId,
        NodeId,
        ProposalId,
        SessionId,
        SnapshotId,
        StatisticsId,
    )

__all__ = [
    "BRANCH_PREFIX",
    "CHUNKS",
    "COLLECTIONS",
    "CONFIG",
    "LEASED_SESSIONS",
    "LEASES",
    "PROPOSALS",
    "REFS",
    "REPO_INFO",
    "SPILLS",
    "STATES",
    "STATISTICS",
    "SUMS",
    "TAG_PREFIX",
    "backup_key",
    "branch_key",
    "chunk_key",
    "digests_key",
    "is_immutable",
    "lease_key",
    "manifest_key",
    "new_backup_name",
    "proposal_prefix",
    "snapshot_key",
    "spill_prefix",
    "statistics_key",
    "statistics_prefix",
    "sums_key",
    "tag_key",
    "tombstone_key",
    "transaction_key",
]

REPO_INFO: Final = "repo"
STATES: Final = "states/"
"""Numbered states of the repo info where it cannot be replaced. No other engine reads them."""
CONFIG: Final = "config.yaml"
REFS: Final = "refs/"
BRANCH_PREFIX: Final = "branch."
TAG_PREFIX: Final = "tag."
CHUNKS: Final = "chunks"
COLLECTIONS: Final = "collections/"
"""Notes that this library leaves about garbage collections. No other engine reads or lists them."""
LEASES: Final = "leases/"
LEASED_SESSIONS: Final = f"{LEASES}sessions/"
SPILLS: Final = f"{LEASES}spills/"

SUMS: Final = "sums/"
"""Objects that only this library writes: a sidecar with checksums for each manifest, and a list of
digests for each snapshot. The official engine neither reads nor lists nor deletes them. To lose
them loses no data."""

STATISTICS: Final = "statistics/"
"""Objects that only this library writes: statistics of chunks, some for each array. As `SUMS`."""

PROPOSALS: Final = "proposals/"
"""Proposals of this library: a folder for each, with its records and a page for browsers. The
official engine neither reads nor lists nor deletes them."""

_WRITTEN_ONCE: Final = ("chunks/", "manifests/", "snapshots/", "transactions/", SUMS, STATISTICS)
_YEAR_3000_MS: Final = 32_503_680_000_000


def is_written_once(key: str) -> bool:
    """Return whether a key has a random name, so that its writer may safely write it again.

    Expiration under spec 1 writes snapshots again, with other parents; both versions may be read.
    Sums that were unknown may be added to a sidecar; both versions are right.
    """
    return key.startswith(_WRITTEN_ONCE)


def is_immutable(key: str, *, spec_version: int) -> bool:
    """Return whether the object of a key holds the same bytes for its whole life.

    Ids are random and never reused, except that of the first snapshot, which is the same in all
    repositories: in one that was removed and created again it has another time. Expiration under
    spec 1 writes snapshots again, with other parents.
    """
    prefix, _, name = key.partition("/")
    match prefix:
        case "chunks" | "manifests":
            return bool(name)
        case "snapshots" if spec_version == 1:
            return False
        case "snapshots" | "transactions":
            # A cache that outlives a repository would show the first snapshot of the one before it.
            return name not in ("", str(INITIAL_SNAPSHOT_ID))
        case _:
            return False


def snapshot_key(snapshot_id: SnapshotId) -> str:
    """Return the key of a snapshot."""
    return f"snapshots/{snapshot_id}"


def transaction_key(snapshot_id: SnapshotId) -> str:
    """Return the key of the transaction log of a snapshot."""
    return f"transactions/{snapshot_id}"


def manifest_key(manifest_id: ManifestId) -> str:
    """Return the key of a manifest."""
    return f"manifests/{manifest_id}"


def sums_key(manifest_id: ManifestId) -> str:
    """Return the key of the checksums of a manifest's chunks."""
    return f"{SUMS}{manifest_id}"


def digests_key(snapshot_id: SnapshotId) -> str:
    """Return the key of the digests of what a snapshot needs."""
    return f"{SUMS}{snapshot_id}"


def statistics_key(statistics_id: StatisticsId) -> str:
    """Return the key of statistics of some chunks of an array."""
    return f"{STATISTICS}{statistics_id}"


def statistics_prefix(node_id: NodeId) -> str:
    """Return the beginning of the keys of an array's statistics; few others begin so, too.

    Twelve letters of the text form say sixty bits of the node id, which has 64.
    """
    return f"{STATISTICS}{str(node_id)[:12]}"


def chunk_key(chunk_id: ChunkId) -> str:
    """Return the key of a chunk object."""
    return f"{CHUNKS}/{chunk_id}"


def branch_key(name: str) -> str:
    """Return the key of a branch file (spec 1)."""
    return f"{REFS}{BRANCH_PREFIX}{name}/ref.json"


def tag_key(name: str) -> str:
    """Return the key of a tag file (spec 1)."""
    return f"{REFS}{TAG_PREFIX}{name}/ref.json"


def tombstone_key(name: str) -> str:
    """Return the key of the object that marks a tag as deleted (spec 1)."""
    # The file of the tag stays beside it. That is what keeps the name from being used again.
    return f"{tag_key(name)}.deleted"


def lease_key(session_id: SessionId) -> str:
    """Return the key of the lease of a session."""
    return f"{LEASED_SESSIONS}{session_id}"


def spill_prefix(session_id: SessionId) -> str:
    """Return the beginning of the keys of what a leased session spilled."""
    return f"{SPILLS}{session_id}/"


def proposal_prefix(proposal_id: ProposalId) -> str:
    """Return the beginning of the keys of a proposal."""
    return f"{PROPOSALS}{proposal_id}/"


def new_backup_name(base: str) -> str:
    """Return a fresh name for a backup of ``base``; newer ones sort first."""
    # The official engine names them so. Nothing depends on the order.
    remaining_ms = _YEAR_3000_MS - clock.now_us() // 1000
    return f"{base}.{remaining_ms:014d}.{BackupId.random()}"


def backup_key(name: str) -> str:
    """Return the key of a backup."""
    return f"overwritten/{name}"

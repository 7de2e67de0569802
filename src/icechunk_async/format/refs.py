"""Branch and tag files of format 1: a JSON document that names a snapshot."""

from __future__ import annotations

import json
from typing import Final

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.ids import SnapshotId

__all__ = [
    "CLOSED",
    "decode_closed_ref",
    "decode_ref",
    "encode_closed_ref",
    "encode_ref",
    "encode_renewed_ref",
]

# Far above 35 bytes, room for the white space of renewed ones, and nothing that JSON takes long
# for.
_MAX_REF_BYTES: Final = 4096
_NO_SNAPSHOT: Final = SnapshotId(bytes(SnapshotId.size_bytes))
_CLOSED: Final = "closed_by_migration_at"
CLOSED: Final = "closed-by-migration"
"""The code of the error about a branch that a migration closed."""


def encode_ref(snapshot_id: SnapshotId) -> bytes:
    """Return the contents of a ref file: compact JSON without a newline."""
    return json.dumps({"snapshot": str(snapshot_id)}, separators=(",", ":")).encode()


def encode_renewed_ref(snapshot_id: SnapshotId, nonce: bytes) -> bytes:
    """Return other contents of a ref file that say the same.

    Many stores derive the version of an object from its bytes. The nonce becomes white space after
    the document, which every JSON parser ignores.
    """
    bits = "".join(f"{byte:08b}" for byte in nonce)
    return encode_ref(snapshot_id) + bits.replace("0", " ").replace("1", "\t").encode()


def decode_ref(data: bytes | memoryview) -> SnapshotId:
    """Read a ref file.

    Raises:
        FormatError: it does not name a snapshot.
    """
    if len(data) > _MAX_REF_BYTES:
        raise FormatError(f"A ref file has {len(data)} bytes; genuine ones have 35.")
    # It names a snapshot, so that readers of format 1 can parse it, and there is no such snapshot.
    if decode_closed_ref(data) is not None:
        raise FormatError(
            "A ref was closed by the migration of its repository to format version 2. Open the "
            "repository again; if that fails as well the migration was interrupted, and "
            "icechunk_async.upkeep.upgrade puts the repository in order.",
            code=CLOSED,
        )
    try:
        document = json.loads(bytes(data))
        return SnapshotId.parse(document["snapshot"])
    except (ValueError, KeyError, TypeError, RecursionError, InvalidInputError) as error:
        raise FormatError(f"A ref file does not name a snapshot: {bytes(data[:64])!r}.") from error


def encode_closed_ref(snapshot_id: SnapshotId) -> bytes:
    """Return the contents of a branch file that a migration closes.

    It names a snapshot that no repository has, so that a writer who would move the branch stops,
    and records where the branch was. It can still be parsed by readers of format 1.
    """
    document = {"snapshot": str(_NO_SNAPSHOT), _CLOSED: str(snapshot_id)}
    return json.dumps(document, separators=(",", ":")).encode()


def decode_closed_ref(data: bytes | memoryview) -> SnapshotId | None:
    """Return the tip of a closed branch; None if the branch is not closed."""
    # Cheap for every ref that is read: only those with the key are parsed twice.
    raw = bytes(data[:_MAX_REF_BYTES])
    if _CLOSED.encode() not in raw:
        return None
    try:
        return SnapshotId.parse(json.loads(raw)[_CLOSED])
    except (ValueError, KeyError, TypeError, RecursionError, InvalidInputError):
        return None

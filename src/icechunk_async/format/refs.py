"""Branch and tag files of spec 1: a JSON document that names a snapshot."""

from __future__ import annotations

import json
from typing import Final

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.ids import SnapshotId

__all__ = ["decode_ref", "encode_ref"]

_MAX_REF_BYTES: Final = 4096


def encode_ref(snapshot_id: SnapshotId) -> bytes:
    """Answer the contents of a ref file: compact JSON without a newline."""
    return json.dumps({"snapshot": str(snapshot_id)}, separators=(",", ":")).encode()


def decode_ref(data: bytes | memoryview) -> SnapshotId:
    """Read a ref file.

    Raises:
        FormatError: it does not name a snapshot.
    """
    if len(data) > _MAX_REF_BYTES:
        raise FormatError(f"A ref file has {len(data)} bytes; genuine ones have 35.")
    try:
        document = json.loads(bytes(data))
        return SnapshotId.parse(document["snapshot"])
    except (ValueError, KeyError, TypeError, RecursionError, InvalidInputError) as error:
        raise FormatError(f"A ref file does not name a snapshot: {bytes(data[:64])!r}.") from error

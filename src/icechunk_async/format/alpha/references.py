"""Reference files of the alpha (schema ``RefData``): an entry of a branch, or a tag.

What this library has to say besides is in ``properties``, which the schema leaves open: that a
branch was deleted with this entry, or closed by a migration.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.alpha.parts import read_id, read_time, write_time
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.json.values import is_object

__all__ = ["BranchState", "RefData", "decode_ref", "encode_ref"]

_OURS: Final = "icechunk-async"
_STATE: Final = "branch"


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
    if is_object(ours) and ours.get(_STATE) is not None:
        try:
            state = BranchState(ours[_STATE])
        except (ValueError, TypeError):
            raise document.fault(f"has the unknown state {ours[_STATE]!r:.60}") from None
    return RefData(
        SnapshotId(read_id(document, "snapshot")), read_time(document, "timestamp"), state
    )

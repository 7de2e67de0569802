"""The other parents of a snapshot: what was merged into it, as its properties say.

Icechunk stores one parent for each snapshot. A merge by this library names the snapshots whose
changes it took in, too; other engines keep that property and do not read it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import InvalidInputError, SnapshotNotFoundError
from icechunk_async.format.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.engine.history.protocol import History
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo

__all__ = ["PROPERTY", "lineage", "merged_into"]

PROPERTY: Final = "icechunk-async"
"""The property of a snapshot that says where its changes came from."""


def merged_into(properties: Mapping[str, JSON]) -> list[SnapshotId]:
    """Return the snapshots whose changes were merged into one with these properties."""
    own = properties.get(PROPERTY)
    found = own.get("merged") if isinstance(own, dict) else None
    texts = [it for it in found if isinstance(it, str)] if isinstance(found, list) else []
    ids: list[SnapshotId] = []
    for text in texts:
        with suppress(InvalidInputError):  # anybody can write properties
            ids.append(SnapshotId.parse(text))
    return ids


async def lineage(history: History, start: SnapshotId) -> dict[SnapshotId, SnapshotInfo]:
    """Return a snapshot and all before it, merged ones included, each before its parents."""
    found: dict[SnapshotId, SnapshotInfo] = {}
    pending = [start]
    while pending:
        first = pending.pop()
        try:
            async for info in history.ancestry(first):
                if info.id in found:
                    break
                found[info.id] = info
                pending += merged_into(info.metadata)
        except SnapshotNotFoundError:
            if first == start:
                raise
            continue  # what was merged has expired
    return found

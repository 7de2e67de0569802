"""What the snapshot files of spec 1 say about history, all read at once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import IcechunkError, ObjectNotFoundError, SnapshotNotFoundError
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.repository.layout import snapshot_key
from icechunk_async.repository.progress import Progress, no_progress
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.repository.progress import ProgressCallback
    from icechunk_async.storage import Storage

__all__ = ["load_infos"]

_CONCURRENT_SNAPSHOTS: Final = 64
_SNAPSHOTS: Final = "snapshots/"


async def load_infos(
    storage: Storage, tips: Iterable[SnapshotId], progress: ProgressCallback = no_progress
) -> dict[SnapshotId, SnapshotInfo]:
    """Answer every snapshot that can be read, among them all that ``tips`` reach.

    Raises:
        SnapshotNotFoundError: one that they reach is missing.
        FormatError: one that they reach is damaged.

    Cost: a request a snapshot, many at a time; following parents would send one after the other.
    """
    entries = storage.list_prefix(_SNAPSHOTS)
    found = [_id_of(entry.key) async for entry in entries if isinstance(entry, ObjectInfo)]
    ids = [snapshot_id for snapshot_id in found if snapshot_id is not None]
    infos: dict[SnapshotId, SnapshotInfo] = {}
    done = 0

    async def load(snapshot_id: SnapshotId) -> None:
        nonlocal done
        with suppress(IcechunkError):  # nobody may need it; who does gets the error below
            infos[snapshot_id] = await _load(storage, snapshot_id)
        done += 1
        progress(Progress("reading snapshots", done, len(ids)))

    await bounded_map(load, ids, limit=_CONCURRENT_SNAPSHOTS)
    walked: set[SnapshotId] = set()
    for tip in tips:
        current: SnapshotId | None = tip
        while current is not None and current not in walked:
            walked.add(current)
            if current not in infos:
                infos[current] = await _load(storage, current)
            current = infos[current].parent_id
    return infos


def _id_of(key: str) -> SnapshotId | None:
    try:
        return SnapshotId.parse(key.removeprefix(_SNAPSHOTS))
    except IcechunkError:
        return None


async def _load(storage: Storage, snapshot_id: SnapshotId) -> SnapshotInfo:
    try:
        retrieved = await storage.get(snapshot_key(snapshot_id))
    except ObjectNotFoundError as error:
        raise SnapshotNotFoundError(
            f"A branch or tag needs snapshot {snapshot_id}, which is missing, so the repository "
            "cannot be migrated. Delete the branch or tag, or restore the snapshot.",
            snapshot_id=str(snapshot_id),
        ) from error
    it = decode_snapshot(unpack(retrieved.data, FileType.SNAPSHOT))
    return SnapshotInfo.of(it.id, it.parent_id, it.flushed_at, it.message, it.metadata)

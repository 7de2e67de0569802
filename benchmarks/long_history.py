"""Repositories of many snapshots, written at once instead of by as many commits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from zarr.core.sync import sync

from benchmarks.one_chunk import PROTOTYPE, copy_for_each
from benchmarks.peers import create
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import NewCommit, Update
from icechunk_async.format.repo_info import SnapshotInfo, decode_repo_info, encode_repo_info

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.json.metadata import JSON

__all__ = ["KEY", "make_history"]

LOGGED: Final = 1_000
KEY: Final = "a/c/0"
DOCUMENT: Final = json.dumps(
    {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [100],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes"}],
        "fill_value": 0,
    }
).encode()


def make_history(folder: Path, count: int) -> int:
    """Make a history with two properties for each snapshot, and a copy for each contender.

    Returns: the number of its snapshots.
    """
    made = folder / "made"
    session = create("ours", str(made)).writable_session("main")
    sync(session.store.set("a/zarr.json", PROTOTYPE.buffer.from_bytes(DOCUMENT)))
    sync(session.store.set(KEY, PROTOTYPE.buffer.from_bytes(bytes(10))))
    session.commit("made")
    path = made / "repo"
    info = decode_repo_info(unpack(path.read_bytes(), FileType.REPO_INFO))
    tip = info.snapshots[info.branches["main"]]
    infos = {it.id: it for it in info.snapshots.values()}
    began = min(it.flushed_at for it in infos.values())
    parent, logged = tip.parent_id, list[Update]()
    for number in range(1, count - 1):
        each, at = SnapshotId.random(), began + number
        properties: dict[str, JSON] = {"author": "somebody", "run": number}
        infos[each] = SnapshotInfo.of(each, parent, at, f"Commit number {number}", properties)
        logged.append(
            Update(NewCommit("main", each), at, f"repo.{number:014}.0123456789ABCDEFGHJK")
        )
        parent = each
    infos[tip.id] = replace(tip, parent_id=parent)
    updates = (info.updates[0], *logged[: -LOGGED - 1 : -1])
    history = replace(info, snapshots=infos, updates=updates)
    path.write_bytes(pack(encode_repo_info(history), FileType.REPO_INFO, 2))
    copy_for_each(made)
    return len(infos)

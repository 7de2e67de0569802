"""Repositories of many snapshots on the local disk.

Each snapshot has two properties, and the log of operations names the newest thousand. See
`one_chunk` for what is the same for both engines, and what is not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from zarr.core.sync import sync

from benchmarks.contest import FLOOR
from benchmarks.one_chunk import ENGINES, PROTOTYPE, cold_reads, commits, copy_for_each
from benchmarks.peers import create, open_repository
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import NewCommit, Update
from icechunk_async.format.repo_info import SnapshotInfo, decode_repo_info, encode_repo_info

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.contest import Contest
    from icechunk_async.format.json.metadata import JSON

SIZES = pytest.mark.parametrize("count", [10, 1_000, 5_000, 50_000])
LOGGED = 1_000
KEY = "a/c/0"
DOCUMENT = json.dumps(
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


def _made(contest: Contest, folder: Path, count: int) -> int:
    """Make a history, and a copy for each contender; return the number of its snapshots."""
    count = contest.pick(min(count, 200), count)
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


@SIZES
def test_commit(contest: Contest, tmp_path: Path, count: int) -> None:
    """Change one chunk in a session of a repository that is open."""
    number = _made(contest, tmp_path, count)
    contest.race(
        f"change a chunk and commit, {number:,} snapshots",
        commits(tmp_path, KEY, 10),
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
    )


@SIZES
def test_open_cold(contest: Contest, tmp_path: Path, count: int) -> None:
    """Open the repository and read one chunk."""
    number = _made(contest, tmp_path, count)
    directory = tmp_path / "made"
    contest.race(
        f"open cold and read a chunk, {number:,} snapshots",
        {**cold_reads(directory, KEY), FLOOR: (directory / "repo").read_bytes},
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
        floor="read the file of the repository's state",
    )


@SIZES
@pytest.mark.parametrize("what", ["walk", "messages", "all fields"])
def test_ancestry(contest: Contest, tmp_path: Path, count: int, what: str) -> None:
    """Walk from the tip to the root in a repository that is open, and look at fields."""
    number = _made(contest, tmp_path, count)

    def engine(name: str) -> Callable[[], None]:
        repository = open_repository(name, str(tmp_path / "made"))

        def walk() -> None:
            line = repository.ancestry(branch="main")
            match what:
                case "walk":
                    found = sum(1 for _ in line)
                case "messages":
                    found = len([it.message for it in line])
                case _:
                    seen = [(i.id, i.parent_id, i.message, i.written_at, i.metadata) for i in line]
                    found = len(seen)
            assert found == number

        return walk

    contest.race(
        f"ancestry of {number:,} snapshots, {what}",
        {name: engine(name) for name in ENGINES},
        rounds=9,
        targets={"official": 1} if count >= 5_000 else {},
    )

"""Large hierarchies on the local disk.

Groups of 99 arrays, one in a hundred of which has a chunk: every document is a typical one of a
kilobyte. See `one_chunk` for what is the same for both engines, and what is not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from zarr.core.sync import sync

from benchmarks.contest import FLOOR
from benchmarks.one_chunk import ENGINES, PROTOTYPE, cold_reads, commits, copy_for_each
from benchmarks.peers import create, tip_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

SIZES = pytest.mark.parametrize("count", [10, 1_000, 10_000, 100_000])
GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
KEY = "g00000/a01/c/0/0"


def _document(number: int) -> bytes:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [100, 100],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 100]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 0, "checksum": False}},
        ],
        "fill_value": 0.0,
        "attributes": {"units": "K", "long_name": f"variable {number}"},
        "dimension_names": ["time", "x"],
        "storage_transformers": [],
    }
    return json.dumps(document, indent=2).encode()


async def _plant(store: Store, count: int) -> None:
    await store.set("zarr.json", PROTOTYPE.buffer.from_bytes(GROUP))  # the official lists below it
    for number in range(count):
        group, place = divmod(number, 100)
        name = f"g{group:05}/a{place:02}" if place else f"g{group:05}"
        document = _document(number) if place else GROUP
        await store.set(f"{name}/zarr.json", PROTOTYPE.buffer.from_bytes(document))
        if place == 1:
            await store.set(f"{name}/c/0/0", PROTOTYPE.buffer.from_bytes(b"chunk"))


def _made(contest: Contest, folder: Path, count: int) -> int:
    """Make a tree, and a copy for each contender; return the number of its nodes."""
    count = contest.pick(min(count, 200), count)
    made = folder / "made"
    session = create("ours", str(made)).writable_session("main")
    sync(_plant(session.store, count))
    session.commit("planted")
    copy_for_each(made)
    return count


@SIZES
def test_commit(contest: Contest, tmp_path: Path, count: int) -> None:
    """Change one chunk in a session of a repository that is open."""
    number = _made(contest, tmp_path, count)
    contest.race(
        f"change a chunk and commit, {number:,} nodes",
        commits(tmp_path, KEY, 100),
        rounds=9,
        targets={"official": 3} if count >= 10_000 else {},
    )


@SIZES
def test_open_cold(contest: Contest, tmp_path: Path, count: int) -> None:
    """Open the repository and read one chunk."""
    number = _made(contest, tmp_path, count)
    directory = tmp_path / "made"

    def read_files() -> None:
        for kind in ("snapshots", "manifests"):
            for path in (directory / kind).iterdir():
                path.read_bytes()

    contest.race(
        f"open cold and read a chunk, {number:,} nodes",
        {**cold_reads(directory, KEY), FLOOR: read_files},
        rounds=9,
        targets={"official": 3} if count >= 100_000 else {},
        floor="read the files of snapshots and manifests",
    )


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_list(contest: Contest, tmp_path: Path, count: int) -> None:
    """List the members of the root and of one group, in a repository that was just opened."""
    number = _made(contest, tmp_path, count)

    async def listed(store: Store) -> int:
        groups = [name async for name in store.list_dir("")]
        return len(groups) + len([name async for name in store.list_dir(groups[0])])

    def engine(name: str) -> Callable[[], None]:
        def work() -> None:
            assert sync(listed(tip_store(name, str(tmp_path / "made")))) > number // 100

        return work

    contest.race(
        f"open cold and list two groups, {number:,} nodes",
        {name: engine(name) for name in ENGINES},
        rounds=9,
    )

"""Repositories of old layouts, on the local disk.

``ours`` is this library on a repository of an old layout, beside itself on format version 2 and the
official engine on its own repository of that version: no other program opens the old ones.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.floors import sync_a_file
from benchmarks.peers import PREFIX, SOURCE, chunked, create, open_repository, tip_store
from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.contest import Contest

CHUNKS = 10
CHUNK_BYTES = 8000
NEW = "ours, format 2"
NAMES = ("ours", NEW, "official")


async def _create(folder: Path, layout: str) -> None:
    container = VirtualChunkContainer(PREFIX, LocalFileSystemStore(SOURCE))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    async with Repository.create(folder, layout=layout, config=config):
        pass


def _fill(folder: Path, layout: str) -> None:
    """Make one array for each."""
    asyncio.run(_create(folder / "ours", layout))
    for name in NAMES[1:]:
        create(_engine(name), str(folder / name))
    for name in NAMES:
        session = open_repository(_engine(name), str(folder / name)).writable_session("main")
        chunked(session.store, CHUNKS, CHUNK_BYTES)[:] = 1
        session.commit("filled")


def _engine(name: str) -> str:
    return "official" if name == "official" else "ours"


@pytest.mark.parametrize("layout", ["alpha"])
def test_open_older(contest: Contest, tmp_path: Path, layout: str) -> None:
    """Open a repository of an old layout for one chunk."""
    _fill(tmp_path, layout)

    def read(name: str) -> Callable[[], object]:
        directory = str(tmp_path / name)
        return lambda: zarr.open_array(tip_store(_engine(name), directory), path="a", mode="r")[0]

    contest.race(
        f"local: open cold and read a chunk, {layout}",
        {name: read(name) for name in NAMES},
        rounds=15,
    )


@pytest.mark.parametrize("layout", ["alpha"])
def test_commit_older(contest: Contest, tmp_path: Path, layout: str) -> None:
    """Change a chunk in a repository of an old layout."""
    _fill(tmp_path, layout)
    values = count(2)

    def commit(name: str) -> Callable[[], None]:
        repository = open_repository(_engine(name), str(tmp_path / name))

        def work() -> None:
            session = repository.writable_session("main")
            zarr.open_array(session.store, path="a")[:1000] = next(values)
            session.commit("one chunk")

        return work

    contest.race(
        f"local: change a chunk and commit, {layout}",
        {**{name: commit(name) for name in NAMES}, FLOOR: lambda: sync_a_file(tmp_path)},
        rounds=15,
        floor="write a small file and sync it",
    )

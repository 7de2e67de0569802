"""Repositories of other layouts, on the local disk.

``ours`` is this library on a repository of an old layout, or of numbered states, beside itself on
format version 2 and the official engine on its own repository of that version: no other program
opens the others. All chunks of the array are written, 8 KB each. The array has two axes, because
the first draft cannot have an axis longer than 65,535.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.floors import sync_a_file
from benchmarks.one_chunk import PROTOTYPE
from benchmarks.peers import PREFIX, SOURCE, create, open_repository, tip_store
from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.contest import Contest

CHUNKS = 10_000
QUICK_CHUNKS = 10
CHUNK_SHAPE = (10, 100)
MOST_COLUMNS = 100
NEW = "ours, format 2"
NAMES = ("ours", NEW, "official")
NEWEST = "format 2"
READ = "open cold and read a chunk"
COMMIT = "change one chunk and commit"
REQUESTS = {
    ("alpha", READ): 12,
    ("alpha", COMMIT): 7,
    ("first-draft", READ): 10,
    ("first-draft", COMMIT): 7,
    ("format-2-numbered", READ): 11,
    ("format-2-numbered", COMMIT): 10,
}
LAYOUTS = ("alpha", "first-draft", "format-2-numbered")


async def _create(folder: Path, layout: str) -> None:
    container = VirtualChunkContainer(PREFIX, LocalFileSystemStore(SOURCE))
    config = RepositoryConfig(virtual_chunk_containers=(container,))
    async with Repository.create(folder, layout=layout, config=config):
        pass


def _fill(folder: Path, layout: str, chunks: int) -> None:
    """Make one array for each."""
    asyncio.run(_create(folder / "ours", layout))
    # The first was created above, in its layout: neither facade makes the old ones.
    for name in NAMES[1:]:
        create(_engine(name), str(folder / name))
    for name in NAMES:
        session = open_repository(_engine(name), str(folder / name)).writable_session("main")
        columns = min(chunks, MOST_COLUMNS)
        array = zarr.create_array(
            session.store,
            name="a",
            shape=(CHUNK_SHAPE[0] * (chunks // columns), CHUNK_SHAPE[1] * columns),
            chunks=CHUNK_SHAPE,
            dtype="f8",
            compressors=None,
            fill_value=0,
        )
        array[:] = 1
        session.commit("filled")


def _engine(name: str) -> str:
    return "official" if name == "official" else "ours"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_open_older(contest: Contest, tmp_path: Path, layout: str) -> None:
    """Open a repository of another layout for one chunk."""
    chunks = contest.pick(QUICK_CHUNKS, CHUNKS)
    _fill(tmp_path, layout, chunks)

    def read(name: str) -> Callable[[], object]:
        directory = str(tmp_path / name)

        def work() -> object:
            return zarr.open_array(tip_store(_engine(name), directory), path="a", mode="r")[0, 0]

        return work

    contest.race(
        f"local: open cold and read one of {chunks:,} chunks, {layout}",
        {name: read(name) for name in NAMES},
        rounds=15,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_older(contest: Contest, tmp_path: Path, layout: str) -> None:
    """Change a chunk in a repository of another layout."""
    chunks = contest.pick(QUICK_CHUNKS, CHUNKS)
    _fill(tmp_path, layout, chunks)
    values = count(2)

    def commit(name: str) -> Callable[[], None]:
        repository = open_repository(_engine(name), str(tmp_path / name))

        def work() -> None:
            session = repository.writable_session("main")
            zarr.open_array(session.store, path="a")[:10, :100] = next(values)
            session.commit("one chunk")

        return work

    contest.race(
        f"local: change one of {chunks:,} chunks and commit, {layout}",
        {**{name: commit(name) for name in NAMES}, FLOOR: lambda: sync_a_file(tmp_path)},
        rounds=15,
        floor="write a small file and sync it",
    )


@pytest.mark.parametrize(("layout", "operation"), list(REQUESTS))
def test_requests_older(contest: Contest, layout: str, operation: str) -> None:
    """Requests, and those of format version 2 in the same run."""
    found = {name: asyncio.run(_requests(name, operation)) for name in (layout, NEWEST)}
    assert found[layout] == REQUESTS[layout, operation]
    contest.add(
        f"{operation}, {layout}",
        {"ours": [float(found[layout])], NEW: [float(found[NEWEST])]},
        metric="requests",
    )


async def _requests(layout: str, operation: str) -> int:
    """Return how many requests one operation makes on a repository with two chunks."""
    url = f"memory://{uuid4().hex}"
    chosen = None if layout == NEWEST else layout
    async with Repository.create(url, layout=chosen) as repository:
        session = await repository.writable_session("main")
        array = await zarr.api.asynchronous.create_array(
            session.store, name="a", shape=(2000,), chunks=(1000,), dtype="u1", compressors=None
        )
        await array.setitem(slice(None), 1)
        await session.commit("filled")
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            if operation == READ:
                store = (await repository.readonly_session("main")).store
                assert await store.get("a/c/0", PROTOTYPE) is not None
            else:
                storage.forget()
                session = await repository.writable_session("main")
                await session.store.set("a/c/1", PROTOTYPE.buffer.from_bytes(bytes(1000)))
                await session.commit("one chunk")
        return storage.requests.total()

"""The facade packs where a repository says so, and its forks store chunks before they travel."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

import icechunk_async
from icechunk_async import Packing
from icechunk_async.sync import Repository, local_filesystem_storage
from icechunk_async_local import durability

if TYPE_CHECKING:
    from pathlib import Path

ZARR: Any = zarr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return where a repository is that packs, with an array of 20 chunks of 4000 bytes."""

    async def create() -> None:
        async with icechunk_async.Repository.create(tmp_path / "r", packing=Packing()):
            pass

    asyncio.run(create())
    session = Repository.open(local_filesystem_storage(str(tmp_path / "r"))).writable_session(
        "main"
    )
    ZARR.create_array(
        session.store, name="a", shape=(20, 1000), chunks=(1, 1000), dtype="i4", compressors=None
    )[:] = 1
    session.commit("ones")
    return tmp_path / "r"


def number_of_objects(directory: Path) -> int:
    """Count chunk objects."""
    return len(list((directory / "chunks").iterdir()))


def test_it_packs_and_compacts(directory: Path) -> None:
    """As the repository says; nothing has to be passed."""
    assert number_of_objects(directory) == 1
    repository = Repository.open(local_filesystem_storage(str(directory)))
    session = repository.writable_session("main")
    array = ZARR.open_array(session.store, path="a")
    array[:18] = 2
    assert (array[:18] == 2).all()
    session.commit("twos")
    assert repository.compact("main", dry_run=True).chunks == 2
    report = repository.compact("main", min_live_share=0.5)
    assert str(report.snapshot_id) == repository.lookup_branch("main")
    assert number_of_objects(directory) == 3
    found = ZARR.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert found[:].tolist() == np.repeat([[2]] * 18 + [[1]] * 2, 1000, 1).tolist()


def test_forks_travel_with_all_they_wrote(directory: Path) -> None:
    """Pickling stores what waits; so does merging."""
    repository = Repository.open(local_filesystem_storage(str(directory)))
    session = repository.writable_session("main")
    here, away = session.fork(), pickle.loads(pickle.dumps(session.fork()))
    for number, fork in enumerate((here, away)):
        ZARR.open_array(fork.store, path="a")[number] = 7
        assert number_of_objects(directory) == 1
    back = pickle.loads(pickle.dumps(away))
    assert number_of_objects(directory) == 2
    session.merge(here, back)
    assert number_of_objects(directory) == 3
    session.commit("sevens")
    found = ZARR.open_array(repository.readonly_session("main").store, path="a", mode="r")
    assert found[:, 0].tolist() == [7, 7] + [1] * 18


@pytest.mark.parametrize("packing", [Packing(), Packing.off()])
def test_what_leaves_a_process_is_durable(
    tmp_path: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that commits can sync only the files that it wrote itself."""
    synced: set[int] = set()
    flush = durability.flush

    def noticed(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        flush(fd)

    async def create() -> None:
        async with icechunk_async.Repository.create(tmp_path, packing=packing):
            pass

    asyncio.run(create())
    session = Repository.open(local_filesystem_storage(str(tmp_path))).writable_session("main")
    ZARR.create_array(session.store, name="a", shape=(9000,), chunks=(3000,), dtype="i4")
    away = pickle.loads(pickle.dumps(session.fork()))
    ZARR.open_array(away.store, path="a")[:] = np.random.default_rng(1).integers(0, 1 << 30, 9000)
    monkeypatch.setattr(durability, "flush", noticed)
    pickle.dumps(away)
    chunks = {it.stat().st_ino for it in (tmp_path / "chunks").iterdir()}
    assert chunks <= synced
    assert len(chunks) == (1 if packing.is_on else 3)

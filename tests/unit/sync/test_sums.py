"""Checksums of chunks through the blocking facade."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async.errors import ChunkDamagedError
from icechunk_async.sync import IcechunkError, Repository, local_filesystem_storage

if TYPE_CHECKING:
    from pathlib import Path


def test_damaged_chunks_raise_and_sums_are_added(tmp_path: Path) -> None:
    """The setting of verified reads travels with a repository that is pickled."""
    storage = local_filesystem_storage(str(tmp_path / "repo"))
    repository = Repository.create(storage)
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(4000,), chunks=(1000,), dtype="f8")
    array[:] = np.random.default_rng(0).random(4000)
    session.commit("numbers")
    assert repository.add_sums().chunks == 4
    assert repository.check_content().is_right
    for victim in (tmp_path / "repo" / "chunks").iterdir():
        data = bytearray(victim.read_bytes())
        data[500] ^= 1
        victim.write_bytes(data)
    careful = Repository.open(storage, verify_reads=True)
    for it in (careful, pickle.loads(pickle.dumps(careful))):
        reader = zarr.open_array(it.readonly_session("main").store, path="a", mode="r")
        with pytest.raises((IcechunkError, ChunkDamagedError), match="is damaged"):
            reader[:]
    careless = zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")
    careless[:1]


def test_sums_are_kept_if_asked_for(tmp_path: Path) -> None:
    """By the repository, from its creation on."""
    storage = local_filesystem_storage(str(tmp_path / "repo"))
    Repository.create(storage, sums=True)
    session = Repository.open(storage).writable_session("main")
    zarr.create_array(session.store, name="a", data=np.arange(4000.0), chunks=(1000,))
    session.commit("numbers")
    report = Repository.open(storage).check_content()
    assert (report.is_right, report.root) == (True, report.recorded)

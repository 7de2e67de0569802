"""Forks and transactions for code that blocks, in this process and in others."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async.errors import MergeFailedError, SessionStateError
from icechunk_async.sync import ForkSession, Repository

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Create a repository with an array of 8 chunks."""
    repository = Repository.create(tmp_path / "repository")
    with repository.transaction("main", message="array") as store:
        zarr.create_array(store, name="a", shape=(8,), chunks=(1,), dtype="i4", fill_value=0)
    return repository


def work(parcel: bytes, place: int) -> bytes:
    """Write to a fork in a separate process, without any block."""
    fork: ForkSession = pickle.loads(parcel)
    zarr.open_array(fork.store, path="a")[place] = place
    return pickle.dumps(fork)


def test_forks_work_in_other_processes(repository: Repository) -> None:
    """They open their repository when they are used, and bring back what they wrote."""
    session = repository.writable_session("main")
    parcels = [pickle.dumps(session.fork()) for _ in range(4)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        done = list(pool.map(work, parcels, range(1, 5)))
    session.merge(*(pickle.loads(parcel) for parcel in done))
    session.commit("merged")
    reader = repository.readonly_session("main")
    values = np.asarray(zarr.open_array(reader.store, path="a", mode="r")[:])
    assert values.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_forks_are_merged_as_a_tree_and_never_committed(repository: Repository) -> None:
    """As the asynchronous ones, with the same errors; nothing stays open."""
    session = repository.writable_session("main")
    forks: list[ForkSession] = [pickle.loads(pickle.dumps(session.fork())) for _ in range(2)]
    for place, fork in enumerate(forks):
        zarr.open_array(fork.store, path="a")[place] = 7
    with pytest.raises(SessionStateError, match="Merge it"):
        forks[0].commit("no")
    forks[0].merge(forks[1])
    session.merge(forks[0])
    clashing = session.fork()
    zarr.open_group(clashing.store, path="n", mode="w")
    zarr.open_group(session.store, path="n", mode="w")
    with pytest.raises(MergeFailedError, match="/n"):
        session.merge(clashing)
    with pytest.raises(SessionStateError, match="Only forks"):
        session.merge(session)  # type: ignore[arg-type]
    forks.clear()
    gc.collect()
    session.commit("merged")


def test_a_block_that_fails_commits_nothing(repository: Repository) -> None:
    """Only a block that ends without an error commits."""
    before = repository.lookup_branch("main")
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117 - what is tested is the inner one
        with repository.transaction("main", message="failed") as store:
            zarr.open_array(store, path="a")[0] = 1 // 0
    assert repository.lookup_branch("main") == before


def test_a_block_that_lacks_a_fork_does_not_end_quietly(repository: Repository) -> None:
    """Otherwise all that the fork wrote would be lost without a word."""
    before = repository.lookup_branch("main")
    with (
        pytest.raises(SessionStateError, match=r"1 fork\(s\)"),
        repository.transaction("main", message="lost", deduplicate=True) as store,
    ):
        zarr.open_array(store.session.fork().store, path="a")[0] = 1
    assert repository.lookup_branch("main") == before

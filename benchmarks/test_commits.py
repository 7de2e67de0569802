"""Small commits on a local disk."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from benchmarks.peers import create

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def _prepared(engine: str, directory: str) -> Any:
    repository = create(engine, directory)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(1000,), chunks=(100,), dtype="f8")
    session.commit("array")
    return repository


@pytest.mark.benchmark(group="a commit of one small chunk")
def test_tiny_commit(benchmark: BenchmarkFixture, engine: str, directory: str) -> None:
    """Seconds for session, one chunk and commit; ours is synced to the disk, theirs is not."""
    repository = _prepared(engine, directory)
    values = count(1)

    def work() -> None:
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a")[:100] = next(values)
        session.commit("one chunk")

    benchmark.pedantic(work, rounds=20, warmup_rounds=2)


@pytest.mark.benchmark(group="create a repository and commit 10 chunks")
def test_create_and_commit(benchmark: BenchmarkFixture, engine: str, directory: str) -> None:
    """Seconds from nothing to a first commit."""
    numbers = count()
    data = np.random.default_rng(0).random(1000)

    def work() -> None:
        repository = create(engine, f"{directory}{next(numbers)}")
        session = repository.writable_session("main")
        array = zarr.create_array(session.store, name="a", shape=(1000,), chunks=(100,), dtype="f8")
        array[:] = data
        session.commit("ten chunks")

    benchmark.pedantic(work, rounds=10, warmup_rounds=1)

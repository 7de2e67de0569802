"""Virtual references: setting many, committing, and finding one in a cold repository."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from benchmarks.peers import PREFIX, create, open_repository, tip_store

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

COUNT = int(os.environ.get("BENCH_REFERENCES", "100000"))
LOCATIONS = [f"{PREFIX}file{number // 1000}.nc" for number in range(COUNT)]
OFFSETS = np.arange(COUNT, dtype=np.uint64) * 100
LENGTHS = np.full(COUNT, 100, np.uint64)


def _with_array(engine: str, directory: str) -> Any:
    repository = create(engine, directory)
    session = repository.writable_session("main")
    root = zarr.open_group(session.store, mode="w")
    root.create_array("a", shape=(COUNT,), chunks=(1,), dtype="u1")
    return repository, session


def _set(session: Any) -> None:
    session.store.set_virtual_refs_arr("a", (COUNT,), LOCATIONS, OFFSETS, LENGTHS)


@pytest.mark.benchmark(group=f"set {COUNT:,} references from columns and commit")
def test_set_and_commit(benchmark: BenchmarkFixture, engine: str, directory: str) -> None:
    """Seconds from columns in memory to a commit on disk; ours is synced, theirs is not."""
    rounds = iter(range(100))

    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        return (_with_array(engine, f"{directory}{next(rounds)}")[1],), {}

    def work(session: Any) -> None:
        _set(session)
        session.commit("references")

    benchmark.pedantic(work, setup=setup, rounds=3)


@pytest.mark.benchmark(group=f"open cold and look one of {COUNT:,} references up")
def test_cold_lookup(benchmark: BenchmarkFixture, engine: str, directory: str) -> None:
    """Seconds until one reference is known, in a repository that the official engine wrote."""
    _, session = _with_array("official", directory)
    _set(session)
    session.commit("references")

    def work() -> None:
        assert zarr.core.sync.sync(tip_store(engine, directory).getsize(f"a/c/{COUNT // 2}")) == 100

    benchmark.pedantic(work, rounds=5, warmup_rounds=1)


@pytest.mark.benchmark(group=f"change one of {COUNT:,} references and commit")
def test_change_one(benchmark: BenchmarkFixture, engine: str, directory: str) -> None:
    """Seconds to rewrite a manifest for one new reference."""
    _, session = _with_array(engine, directory)
    _set(session)
    session.commit("references")
    repository = open_repository(engine, directory)

    def work() -> None:
        session = repository.writable_session("main")
        session.store.set_virtual_ref("a/c/7", f"{PREFIX}new.nc", offset=1, length=2)
        session.commit("one")

    benchmark.pedantic(work, rounds=3, warmup_rounds=1)

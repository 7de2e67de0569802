"""Seekable manifests: the first chunk of an array of which we wrote a large manifest.

The floor is reading the manifest's file: whoever has no index cannot do less.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from benchmarks.peers import PREFIX, create, open_repository, tip_store

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

COUNT = int(os.environ.get("BENCH_SEEKABLE", "300000"))
"""From about 200,000 references on, manifests are seekable; ten million take a few minutes."""
PER_FILE = 1000


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a repository of one array of virtual chunks in one manifest."""
    directory = str(tmp_path_factory.mktemp("seekable") / "repository")
    session: Any = create("ours", directory).writable_session("main")
    root = zarr.open_group(session.store, mode="w")
    root.create_array("a", shape=(COUNT,), chunks=(1,), dtype="u1")
    locations = [f"{PREFIX}file{number // PER_FILE}.nc" for number in range(COUNT)]
    offsets = np.arange(COUNT, dtype=np.uint64) * 100
    lengths = np.full(COUNT, 100, np.uint64)
    session.store.set_virtual_refs_arr("a", (COUNT,), locations, offsets, lengths)
    session.commit("references")
    return directory


def _floor_seconds(directory: str) -> float:
    began = time.perf_counter()
    for path in (Path(directory) / "manifests").iterdir():
        path.read_bytes()
    return time.perf_counter() - began


@pytest.mark.benchmark(group=f"open cold and look one of {COUNT:,} up, seekable manifest")
def test_cold_lookup(benchmark: BenchmarkFixture, engine: str, repository: str) -> None:
    """Seconds until one reference is known, in a repository that we wrote."""

    def work() -> None:
        store = tip_store(engine, repository)
        assert zarr.core.sync.sync(store.getsize(f"a/c/{COUNT // 2}")) == 100

    benchmark.pedantic(work, rounds=5, warmup_rounds=1)
    benchmark.extra_info["floor_microseconds"] = 1e6 * _floor_seconds(repository)


@pytest.mark.benchmark(group=f"look 64 neighbours of {COUNT:,} up, seekable manifest")
def test_cold_neighbours(benchmark: BenchmarkFixture, engine: str, repository: str) -> None:
    """Seconds until 64 references in a row are known: they share their pieces."""

    def work() -> None:
        store = open_repository(engine, repository).readonly_session("main").store
        for number in range(COUNT // 2, COUNT // 2 + 64):
            assert zarr.core.sync.sync(store.getsize(f"a/c/{number}")) == 100

    benchmark.pedantic(work, rounds=5, warmup_rounds=1)

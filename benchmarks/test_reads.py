"""Reading documents and chunks from a local disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

from benchmarks.peers import create, tip_store

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture
    from zarr.abc.store import Store

CHUNKS = 500
PROTOTYPE = default_buffer_prototype()
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"


@pytest.fixture
def filled(directory: str) -> str:
    """Write 500 chunks of 10 KB with the official engine; both then read the same files."""
    session = create("official", directory).writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(CHUNKS * 1250,),
        chunks=(1250,),
        dtype="f8",
        compressors=None,
    )
    array[:] = np.random.default_rng(0).random(CHUNKS * 1250)
    session.commit("filled")
    return directory


def _get_all(store: Store, keys: list[str], limit: int) -> Any:
    async def work() -> None:
        pending = iter(keys)

        async def worker() -> None:
            for key in pending:
                assert await store.get(key, PROTOTYPE) is not None

        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(worker())

    return work


@pytest.mark.benchmark(group="get 500 chunks of 10 KB, 64 at a time")
def test_get_chunks(benchmark: BenchmarkFixture, engine: str, filled: str) -> None:
    """Seconds through the store, manifest cached."""
    work = _get_all(tip_store(engine, filled), [f"a/c/{i}" for i in range(CHUNKS)], 64)
    with asyncio.Runner() as runner:
        benchmark.pedantic(lambda: runner.run(work()), rounds=10, warmup_rounds=2)


@pytest.mark.benchmark(group="get a document 500 times")
def test_get_documents(benchmark: BenchmarkFixture, engine: str, filled: str) -> None:
    """Seconds through the store, snapshot cached."""
    work = _get_all(tip_store(engine, filled), ["a/zarr.json"] * CHUNKS, 1)
    with asyncio.Runner() as runner:
        benchmark.pedantic(lambda: runner.run(work()), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("pipeline", ["default", "fused"])
def test_read_array(benchmark: BenchmarkFixture, engine: str, filled: str, pipeline: str) -> None:
    """Seconds for ``a[:]`` of 5 MB in 500 chunks."""
    benchmark.group = f"read 500 chunks of 10 KB through zarr, {pipeline} pipeline"
    settings = {"codec_pipeline.path": FUSED} if pipeline == "fused" else {}
    with zarr.config.set(settings):
        array = zarr.open_array(tip_store(engine, filled), path="a", mode="r")
        benchmark.pedantic(lambda: array[:], rounds=8, warmup_rounds=2)

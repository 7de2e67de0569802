"""Read arrays through zarr.

Each contender holds the same numbers, uncompressed, on the local disk and in the cache of the
operating system. Ours is the blocking facade's store, as in code written for the official package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.peers import (
    IdleStore,
    chunked,
    create,
    numbers,
    other_stores,
    pipeline,
    tip_store,
)
from benchmarks.results import ZARR_ALONE
from benchmarks.tensorstores import tensorstore_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.contest import Contest

LARGE = 1_000_000


def _filled(directory: str, count: int, chunk_bytes: int, *, inline: bool) -> dict[str, Any]:
    """Write one array for all contenders; return it by contender, open for reading."""
    data = numbers(count, chunk_bytes)
    session = create("official", directory, inline=512 if inline else 0).writable_session("main")
    chunked(session.store, count, chunk_bytes)[:] = data
    session.commit("filled")
    plain = f"{directory}-plain"
    others = other_stores(plain)
    chunked(others["zarr LocalStore"], count, chunk_bytes)[:] = data
    stores = {
        "ours": tip_store("ours", directory),
        "official": tip_store("official", directory),
        **others,
    }
    arrays: dict[str, Any] = {
        name: zarr.open_array(store, path="a", mode="r") for name, store in stores.items()
    }
    for driver in ("zarr3", "ocdbt"):
        array = tensorstore_array(driver, f"{directory}-{driver}", count, chunk_bytes)
        array.write(data).result()
        arrays[f"tensorstore {driver}"] = tensorstore_array(
            driver, f"{directory}-{driver}", count, chunk_bytes, is_new=False
        )
    return arrays


def _reading(name: str, array: Any) -> Callable[[], Any]:
    if name.startswith("tensorstore"):
        return lambda: array.read().result()
    return lambda: array[:]


def _copying(data: np.ndarray[Any, Any]) -> Callable[[], object]:
    return data.copy


@pytest.mark.parametrize("codecs", ["default", "fused", "icechunk"])
@pytest.mark.parametrize(
    ("count", "chunk_bytes", "targets"),
    [(5000, 10_000, (4, 8)), (256, 2**20, (3, 10)), (20_000, 400, (1.6, 3))],
    ids=["10-kb", "1-mb", "inline"],
)
def test_read(
    contest: Contest,
    directory: str,
    codecs: str,
    count: int,
    chunk_bytes: int,
    targets: tuple[float, float],
) -> None:
    """``a[:]``."""
    chunks = contest.pick(min(count, 20), count)
    inline = chunk_bytes < 512
    with pipeline(codecs):
        arrays = _filled(directory, chunks, chunk_bytes, inline=inline)
        expected = numbers(chunks, chunk_bytes)
        work = {name: _reading(name, array) for name, array in arrays.items()}
        for name, read in work.items():
            assert np.array_equal(read(), expected), name
        idle = chunked(IdleStore(chunk_bytes), chunks, chunk_bytes)
        alone = _reading(ZARR_ALONE, idle)
        size = "400 B, inline" if inline else "10 KB" if chunk_bytes < LARGE else "1 MB"
        fused = codecs != "default"
        wanted = {"official": targets[fused]}
        if fused and not inline:
            wanted["zarr LocalStore"] = 1
        if codecs == "icechunk" and chunk_bytes == 10_000:
            wanted["tensorstore zarr3"] = 0.5
        contest.race(
            f"zarr: read {chunks:,} chunks of {size}, {codecs} pipeline",
            {**work, ZARR_ALONE: alone, FLOOR: _copying(expected)},
            rounds=9 if chunk_bytes > LARGE else 5,  # memory of results is what varies
            finds_memory=1,
            targets=wanted,
            floor="copy the same bytes in memory",
        )


def test_read_in_batches(contest: Contest, directory: str) -> None:
    """``a[:]``, with what the documentation advises for small chunks."""
    chunks = contest.pick(20, 5000)
    with pipeline("default"), zarr.config.set({"codec_pipeline.batch_size": 10}):
        arrays = _filled(directory, chunks, 10_000, inline=False)
        work = {name: _reading(name, array) for name, array in arrays.items()}
        contest.race(
            f"zarr: read {chunks:,} chunks of 10 KB, default pipeline, batch_size 10",
            {**work, FLOOR: _copying(numbers(chunks, 10_000))},
            rounds=5,
            finds_memory=1,
            floor="copy the same bytes in memory",
        )

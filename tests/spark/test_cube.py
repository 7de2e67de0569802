"""History as a dimension in tasks of Spark: a dataset travels to them, and they read its parts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository as NativeRepository

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository

VERSIONS = 8
ROWS = 40
CHUNK = 10


def _commit_versions(repository: Repository) -> npt.NDArray[np.float64]:
    """Commit versions of an array, each with another chunk; return the stack of its checkouts."""
    random = np.random.default_rng(5)
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="t", data=random.random((ROWS, 6)), chunks=(10, 6))
    ids = [session.commit("version 0")]
    for number in range(1, VERSIONS):
        session = repository.writable_session("main")
        start = number % (ROWS // CHUNK) * CHUNK
        array = zarr.open_array(session.store, path="t")
        array[start : start + CHUNK] = random.random((CHUNK, 6))
        ids.append(session.commit(f"version {number}"))
    stores = [repository.readonly_session(snapshot_id=it).store for it in ids]
    return np.stack([np.asarray(zarr.open_array(it, path="t", mode="r")[:]) for it in stores])


def _open(repository: Repository, url: str, how: str) -> xr.Dataset:
    """Return the cube, lazy, of the blocking facade or of a native repository that is closed."""
    if how == "blocking":
        return repository.cube("t")

    async def opened() -> xr.Dataset:
        async with NativeRepository.open(url) as native:
            return await native.cube("t")

    return asyncio.run(opened())


@pytest.mark.parametrize("how", ["blocking", "asyncio"])
def test_tasks_read_blocks_of_a_cube(
    spark: SparkSession, repository: Repository, url: str, how: str
) -> None:
    """Divided along the array, each with all versions: together the stack of the checkouts."""
    expected = _commit_versions(repository)
    cube = _open(repository, url, how)

    def read(start: int) -> tuple[int, Any]:
        return start, cube.t.isel(dim_0=slice(start, start + CHUNK)).values

    parts = spark.sparkContext.parallelize(range(0, ROWS, CHUNK), 4).map(read).collect()
    assert [start for start, _ in parts] == [0, 10, 20, 30]
    np.testing.assert_array_equal(np.concatenate([it for _, it in parts], axis=1), expected)

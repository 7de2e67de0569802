"""Repositories of layouts before version 1 as tables."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr

from icechunk_async import Repository as AsyncRepository
from icechunk_async.sync import Repository
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import to_icechunk

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


async def _create(path: Path, layout: str) -> None:
    async with AsyncRepository.create(path, layout=layout):
        pass


@pytest.mark.parametrize("layout", ["alpha", "first-draft"])
def test_spark_reads_and_writes_older_layouts(
    layout: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Rows of their arrays, and rows that are written to them through the same sessions."""
    path = tmp_path / "older"
    asyncio.run(_create(path, layout))
    repository = Repository.open(local_filesystem_storage(str(path)))
    session = repository.writable_session("main")
    values = np.arange(12.0).reshape(4, 3)
    dataset = xr.Dataset({"t": (("y", "x"), values)}, coords={"y": np.arange(4)})
    to_icechunk(dataset, session, mode="w", encoding={"t": {"chunks": (2, 3)}})
    session.commit("data")
    table = spark.read.format("icechunk").load(path.as_uri())
    assert {(it.y, it.x): it.t for it in table.collect()} == {
        (y, x): values[y, x] for y in range(4) for x in range(3)
    }
    changed = table.where("y = 3").selectExpr("y", "x", "-t AS t")
    changed.write.format("icechunk").mode("overwrite").save(path.as_uri())
    again = spark.read.format("icechunk").load(path.as_uri())
    assert sum(it.t for it in again.collect()) == values.sum() - 2 * values[3].sum()

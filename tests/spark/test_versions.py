"""Commits of Spark to a branch are merged, picked and brought back by the facade in the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.errors import MergeConflictError
from icechunk_async.spark import map_chunks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


def test_results_of_jobs_on_a_branch_are_merged_picked_and_restored(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """By reference, as any commit; Spark reads the result, and its table of changes tells it."""
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store, name="t", shape=(8, 4), chunks=(2, 4), dtype="f4", dimension_names=["y", "x"]
    )
    array[:] = 1
    base = session.commit("made")
    for branch in ("trial", "release"):
        repository.create_branch(branch, base)

    def job(branch: str, factor: int) -> str:
        published = map_chunks(spark, url, lambda block: block * factor, ["t"], "t", branch=branch)
        return published.snapshot_id

    def values(branch: str = "main") -> Any:
        found = zarr.open_array(repository.readonly_session(branch).store, path="t", mode="r")
        return np.asarray(found[:]).tolist()

    doubled = job("trial", 2)
    job("trial", 5)
    report = repository.merge("trial", dry_run=True)
    assert len(report.changes.updated_chunks["/t"]) == 4
    repository.cherry_pick(doubled, onto="release")
    assert values("release") == [[2] * 4] * 8
    repository.merge("trial")
    assert values() == values("trial") == [[10] * 4] * 8
    repository.restore(base, paths=["t"], region=[slice(0, 2), slice(None)])
    assert values() == [[1] * 4] * 2 + [[10] * 4] * 6
    frame = spark.read.format("icechunk").load(url)
    assert frame.agg({"t": "sum"}).first()[0] == 8 + 240  # type: ignore[index]
    table = spark.read.format("icechunk").option("table", "changes").load(url)
    assert [tuple(it) for it in table.select("change", "chunk").collect()] == [
        ("updated_chunk", [0, 0])
    ]
    job("trial", 3)
    job("main", 7)
    with pytest.raises(MergeConflictError, match="Nothing was published"):
        repository.merge("trial")

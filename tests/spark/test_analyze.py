"""Statistics of chunks, made by a Spark job, are those that one process makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

import icechunk_async.zarr.queries.analyze as analyzing
from icechunk_async.spark import analyze
from icechunk_async.spark.jobs.analyze import divided
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.zarr.queries.analyze import Unknown
from tests.spark.here import session_here

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


def fill(repository: Repository) -> None:
    """Commit numbers in ten and five chunks, an array of text, and one of complex numbers."""
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name, size in (("a", 10), ("b", 20)):
        array = group.create_array(name, shape=(100,), chunks=(size,), dtype="f8")
        array[:] = np.arange(100.0)
    group.create_array("words", shape=(2,), chunks=(2,), dtype="str")[:] = ["x", "y" * 40]
    group.create_array("waves", shape=(2,), chunks=(2,), dtype="c16")[:] = [1j, 2j]
    session.commit("numbers")


def known(repository: Repository) -> list[Any]:
    """Return the maximum of both arrays, and how many chunks had to be read for it."""

    async def ask(opened: Any) -> list[Any]:
        session = await opened.readonly_session("main")
        found = [await session.aggregate(f"/{name}", "max") for name in "ab"]
        return [(it.value, it.chunks_read) for it in found]

    return SharedRepository.of(repository).ask(ask)


def test_every_chunk_has_statistics_after_the_job(
    spark: SparkSession, repository: Repository
) -> None:
    """Queries read no chunk then, and the next job has nothing to do."""
    fill(repository)
    assert known(repository) == [(99.0, 10), (99.0, 5)]
    report = analyze(spark, repository, tasks=4)
    result = report.result
    assert (result.arrays, result.chunks, result.known) == (3, 16, 0)
    assert result.bytes_read > 0
    assert len(result.left_out) == 1
    assert "waves" in result.left_out[0]
    rows = report.table.to_pylist()
    assert sum(row["chunks"] for row in rows) == 16
    assert {row["array"] for row in rows} == {"/a", "/b", "/words"}
    assert sum(row["bytes_read"] for row in rows) == result.bytes_read
    assert known(repository) == [(99.0, 0), (99.0, 0)]
    again = analyze(spark, repository)
    assert (again.result.chunks, again.result.known) == (0, 16)
    assert again.table.num_rows == 0


def test_paths_and_refs_select_what_is_analyzed(repository: Repository) -> None:
    """As of the same operation in one process."""
    fill(repository)
    repository.create_tag("v1", repository.lookup_branch("main"))
    assert analyze(session_here(), repository, ref="v1", paths=["/b"]).result.chunks == 5
    assert known(repository) == [(99.0, 10), (99.0, 0)]


def test_chunks_that_are_gone_are_named_and_stop_nothing(
    repository: Repository, tmp_path: Path
) -> None:
    """Their statistics stay unknown."""
    session = repository.writable_session("main")
    large = zarr.create_array(session.store, name="a", shape=(4000,), chunks=(1000,), dtype="f8")
    large[:] = np.arange(4000.0)
    session.commit("large")
    chunks = sorted(tmp_path.rglob("chunks/*"))
    assert len(chunks) == 4
    chunks[0].unlink()
    result = analyze(session_here(), repository, tasks=3).result
    assert result.chunks == 3
    assert len(result.unreadable) == 1
    assert "/a" in result.unreadable[0]


def test_the_objects_of_many_tasks_are_joined(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query reads each object of an array."""
    monkeypatch.setattr(analyzing, "_MOST_OBJECTS", 3)
    fill(repository)
    analyze(session_here(), repository, tasks=16)
    assert len(list(tmp_path.rglob("statistics/*"))) == 3
    assert known(repository) == [(99.0, 0), (99.0, 0)]


@pytest.mark.parametrize("tasks", [1, 3, 7, 100])
def test_each_chunk_is_in_one_part_and_parts_are_of_similar_size(tasks: int) -> None:
    """Small arrays share a task, and large ones are divided."""
    unknown = [
        Unknown(
            path,
            np.arange(count, dtype=np.uint32).reshape(count, 1),
            np.zeros(count, "V16"),
            np.ones(count, np.uint64),
        )
        for path, count in (("/a", 10), ("/b", 1), ("/c", 30))
    ]

    def chunks(some: Sequence[Unknown]) -> list[tuple[str, int]]:
        return [(it.path, int(at)) for it in some for at in it.coords[:, 0]]

    parts = divided(unknown, tasks)
    assert [it for part in parts for it in chunks(part)] == chunks(unknown)
    sizes = [sum(map(len, part)) for part in parts]
    assert len(parts) <= tasks
    assert max(sizes) == -(-41 // tasks)
    assert divided([], tasks) == []

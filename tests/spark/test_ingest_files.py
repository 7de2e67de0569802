"""Files are divided among tasks by what a scan of them takes, as far as a listing tells."""

from __future__ import annotations

import heapq
import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import ingest_virtual, list_sources
from icechunk_async.spark.ingest import ingest as ingest_module
from icechunk_async.spark.ingest.files import Files, divide
from icechunk_async.spark.ingest.tasks import ScanOptions
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import run_job
from tests.spark.sources import open_for, write_netcdf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository

GIB = 1 << 30
costs_of_files = st.lists(st.integers(1, 10**6) | st.integers(10**9, 10**12), max_size=400)


@pytest.fixture
def repo(url: str, tmp_path: Path) -> Repository:
    """A repository that may read a folder."""
    return open_for(url, tmp_path / "sources")


def _finished(costs: Sequence[int], cores: int) -> int:
    """Return when the last task ends, if each begins as soon as a core is free."""
    free = [0] * cores
    for it in costs:
        heapq.heappush(free, heapq.heappop(free) + it)
    return max(free)


@given(costs_of_files, st.integers(1, 8), st.none() | st.integers(1, 60))
def test_every_file_is_in_one_task(
    costs: list[int], cores: int, files_per_task: int | None
) -> None:
    """Beside those that follow it, and the same whenever it is done; at most 50 by default."""
    files = list(range(len(costs)))
    parts = divide(files, costs, cores, files_per_task)
    assert sorted(itertools.chain(*parts)) == files
    assert all(it == tuple(range(it[0], it[-1] + 1)) for it in parts)
    if files_per_task is None:
        assert max(map(len, parts), default=0) <= 50
    else:
        assert len(parts) == -(-len(files) // files_per_task)


@given(costs_of_files, st.integers(1, 8))
def test_tasks_are_balanced_by_cost(costs: list[int], cores: int) -> None:
    """None takes longer than a sixteenth of a core's share, unless it is one file; few are short.

    So all cores end together but for that, or for the longest file.
    """
    parts = divide(range(len(costs)), costs, cores)
    spent = [sum(costs[file] for file in it) for it in parts]
    total = sum(costs)
    assert spent == sorted(spent, reverse=True)
    for part, cost in zip(parts, spent, strict=True):
        assert len(part) == 1 or cost * cores * 16 <= total
    assert len(parts) <= 2 * cores * 16 + len(costs) // 50 + 1
    longest = max([*costs, total / cores / 16]) if costs else 0
    assert _finished(spent, cores) <= total / cores + longest


def test_the_longest_task_comes_first() -> None:
    """Spark starts them in order: if one long file comes last, all cores wait for it."""
    costs = [1] * 1000 + [400]
    parts = divide(range(1001), costs, 4)
    assert parts[0] == (1000,)
    assert _finished([sum(costs[file] for file in it) for it in parts], 4) == 400


@pytest.mark.parametrize(
    ("cores", "files", "each"), [(2, 5, 1), (2, 64, 2), (2, 2000, 50), (1000, 32_000, 2)]
)
def test_files_of_one_cost_are_divided_by_number(cores: int, files: int, each: int) -> None:
    """So that every core has some, and a task is worth its cost."""
    parts = divide(range(files), [7] * files, cores)
    assert {len(it) for it in parts} <= {each, files % each}
    assert parts == sorted(parts)


def test_files_cost_what_their_sizes_say(repo: Repository, tmp_path: Path) -> None:
    """Those of unknown size as much as the average; JSON is read, and costs more than its size."""
    folder = f"{(tmp_path / 'sources').as_uri()}/"
    sizes: dict[str, int | None] = {
        f"{folder}a.nc": GIB,
        f"{folder}b.nc": 3 * GIB,
        f"{folder}c.nc": None,
        f"{folder}d.json": np.int64(10**6),  # type: ignore[dict-item]
        f"{folder}e.nc": 10**6,
    }
    shared = SharedRepository.of(repo)
    files = Files.given(shared, sizes, "auto")
    assert files.locations == list(sizes)
    first = files.costs(files.locations[:3], ScanOptions())
    assert first[1] - first[0] == 2 * GIB
    assert first[2] == (first[0] + first[1]) // 2
    parsed, plain = files.costs(files.locations[3:], ScanOptions())
    assert parsed > 10 * plain
    alike = Files.given(shared, list(sizes), "auto")
    assert len(set(alike.costs(alike.locations, ScanOptions()))) == 1


@pytest.mark.parametrize("size", [-1, 1.5, "1 GB"])
def test_sizes_that_are_none_are_refused(repo: Repository, tmp_path: Path, size: Any) -> None:
    """With the file."""
    with pytest.raises(InvalidInputError, match=r"size of .*a\.nc' is .*not a number of bytes"):
        Files.given(SharedRepository.of(repo), {str(tmp_path / "sources" / "a.nc"): size}, "auto")


def test_a_listed_folder_is_divided_by_size(
    spark: SparkSession, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One huge file is alone in a task, which starts first; small ones share another."""
    sources = tmp_path / "sources"
    for number in range(12):
        write_netcdf(sources / f"f{number:02}.nc", 4 * number)
    os.truncate(sources / "f07.nc", 1 << 40)  # of which a disk stores no more than before
    parts: list[list[str]] = []

    def run(*args: Any, **options: Any) -> Any:
        parts.extend([name[-6:-3] for name, _ in it.files] for it in args[2])
        return run_job(*args, **options)

    monkeypatch.setattr(ingest_module, "run_job", run)
    files = list_sources(repo, f"{sources}/")
    names = [f"f{number:02}" for number in range(12)]
    assert [it[-6:-3] for it in files] == names
    made = ingest_virtual(spark, repo, files)
    assert parts == [["f07"], names[:7], names[8:]]
    assert made.counts == {"ingested": 12}
    assert made.report.column("location").to_pylist() == list(files)

    parts.clear()
    ingest_virtual(spark, repo, list(files), group="by-number")
    assert parts == [[it] for it in names]

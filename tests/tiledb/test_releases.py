"""Random arrays that TileDB writes, read as TileDB reads them.

By default the installed release writes a few. Thorough runs take more, and a release for each
format version, which pip downloads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.tiledb import work
from tests.tiledb.compare import columns_of_file, read_query, sorted_rows
from tests.tiledb.jobs import dense_job, feature_jobs, sparse_job
from tests.tiledb.wheels import RELEASES, NoWheelError, downloaded_library, installed_library

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(1500)]
NEWEST = "0.36.1"
MAKE = {"dense": dense_job, "sparse": sparse_job}


def _library(release: str) -> str:
    if release == NEWEST:
        found = installed_library()
        if found is None:
            pytest.skip("TileDB-Py is not installed: see the dependency group tiledb")
        return found
    try:
        return downloaded_library(release)
    except NoWheelError as error:
        pytest.skip(f"its wheel cannot be downloaded: {error}")


def _run(release: str, reader: str, jobs: list[dict[str, Any]], out: Path) -> dict[str, str]:
    """Let TileDB work on jobs; return the errors that it had."""
    (out / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    libraries = _library(release), _library(reader)
    command = [sys.executable, work.__file__, *libraries, str(out / "jobs.json"), str(out)]
    subprocess.run(command, check=True)
    errors: dict[str, str] = json.loads((out / "errors.json").read_text(encoding="utf-8"))
    return errors


async def _compare(jobs: list[dict[str, Any]], out: Path) -> int:
    """Compare all results of TileDB with ours; return their number."""
    compared = 0
    for number, job in enumerate(jobs):
        for place, query in enumerate(job["queries"]):
            stored = out / f"{number}-{place}.npz"
            if not stored.exists():
                continue
            schema, found = await read_query(str(out / str(number)), query)
            expected = columns_of_file(dict(np.load(stored)), schema)
            if schema.is_sparse:
                assert sorted_rows(found) == sorted_rows(expected), f"job {number}, {query}: {job}"
            else:
                assert found == expected, f"job {number}, query {query} of {job}"
            compared += 1
    return compared


def _reader(release: str, kind: str) -> str:
    """Return the release that reads: the newest, which reads two copies of cells of TileDB 1."""
    is_old = RELEASES[release][1] < (2, 0)
    return release if is_old and kind == "sparse" else NEWEST


@pytest.mark.blocks_the_loop
@pytest.mark.parametrize("kind", ["dense", "sparse", "features"])
async def test_random_arrays_of_the_installed_release_read_as_tiledb_reads_them(
    kind: str, tmp_path: Path
) -> None:
    """Filters, orders, text, nulls, times, deletions, consolidations, evolutions."""
    version = RELEASES[NEWEST][1]
    if kind == "features":
        jobs = feature_jobs(version)
    else:
        jobs = [MAKE[kind](seed, version) for seed in range(10_000, 10_012)]
    errors = _run(NEWEST, NEWEST, jobs, tmp_path)
    assert len(errors) < len(jobs) / 2
    assert await _compare(jobs, tmp_path) > len(jobs) / 2


@pytest.mark.thorough
@pytest.mark.blocks_the_loop
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["dense", "sparse", "features"])
async def test_random_arrays_of_each_release_read_as_tiledb_reads_them(
    kind: str, release: str, tmp_path: Path
) -> None:
    """One for each format version."""
    version = RELEASES[release][1]
    if kind == "features":
        jobs = feature_jobs(version)
    else:
        jobs = [MAKE[kind](seed, version) for seed in range(60)]
    _run(release, _reader(release, kind), jobs, tmp_path)
    assert await _compare(jobs, tmp_path) > len(jobs) / 2

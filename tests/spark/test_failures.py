"""Tasks, workers and drivers that die: nothing is visible but what was committed, and that once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.sync import Repository

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import SparkSession

DRIVER = Path(__file__).parent / "failing_driver.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Answer the URL of a repository with an array of six chunks."""
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(12,), chunks=(2,), dtype="i4")
    array[:] = np.arange(12)
    session.commit("made")
    return url


def drive(what: str, url: str, notes: Path) -> int:
    """Run the driver; answer how it ended."""
    notes.mkdir(exist_ok=True)
    command = [sys.executable, str(DRIVER), what, url, str(notes)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable}
    ended = subprocess.run(
        command, env=environment, timeout=200, capture_output=True, text=True, check=False
    )
    if ended.returncode not in {0, 9}:
        pytest.fail(ended.stderr[-3000:])
    return ended.returncode


def read(url: str) -> npt.NDArray[Any]:
    """Read the array of the tip."""
    store = Repository.open(url).readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:])


def commits(url: str) -> int:
    """Count the commits of the branch."""
    return len(list(Repository.open(url).ancestry(branch="main")))


@pytest.mark.parametrize("what", ["fails once", "worker dies", "reply is lost", "no reuse"])
def test_the_job_ends_well(spark: SparkSession, place: str, tmp_path: Path, what: str) -> None:
    """Every value is doubled once, by one commit, whatever was tried again."""
    assert drive(what, place, tmp_path / "notes") == 0
    np.testing.assert_array_equal(read(place), np.arange(12) * 2)
    assert commits(place) == 3
    assert (tmp_path / "notes" / "failed").exists() == (what != "no reuse")
    workers = len(list((tmp_path / "notes").glob("worker-*")))
    assert workers >= (2 if what in {"worker dies", "no reuse"} else 1)


@pytest.mark.parametrize(("moment", "doubled"), [("before", 1), ("after", 2)])
def test_a_driver_that_died_can_be_run_again(
    spark: SparkSession, place: str, tmp_path: Path, moment: str, doubled: int
) -> None:
    """All or nothing is visible; the second run commits what was not, and only that."""
    what = f"driver dies {moment} the commit"
    assert drive(what, place, tmp_path / "notes") == 9
    np.testing.assert_array_equal(read(place), np.arange(12) * doubled)
    assert drive(what, place, tmp_path / "notes") == 0
    np.testing.assert_array_equal(read(place), np.arange(12) * 2)
    assert commits(place) == 3
    assert (tmp_path / "notes" / "end").read_text().startswith(str(moment == "before"))

"""Tasks, workers, executors and drivers that die, each at a named step.

Nothing is visible but what was committed, and that once; what is left over is garbage. Most of
these tests start Spark anew, or a cluster, and so are run by hand: ``tox run -e spark-failures``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.sync import Repository
from tests.spark.cluster import standalone_cluster
from tests.spark.failing_driver import CELLS, DIED
from tests.spark.failing_source import FailingSource
from tests.spark.java import java_home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from pyspark.sql import SparkSession

    type Drive = Callable[[str, str, str], int]

DRIVER = Path(__file__).parent / "failing_driver.py"
ROOT = Path(__file__).parents[2]
LOCAL = "local[2,3]"
KILLED = -9
PATIENCE_SECONDS = 900
LEFT = {"chunks": 1, "rows": 2}
"""The chunks that a task which dies at its last one has stored for certain: `map_chunks` stores the
first before it computes others, and the rest beside that."""


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Return a JAVA_HOME for processes of Spark, where one is needed."""
    return java_home(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def cluster(java: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a cluster of two workers, for one test after the other."""
    with pytest.MonkeyPatch.context() as patch:
        if java is not None:
            patch.setenv("JAVA_HOME", java)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        with standalone_cluster(tmp_path_factory.mktemp("cluster"), 2) as master:
            yield master


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with an array of six chunks, an object each."""
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(CELLS,),
        chunks=(CELLS // 6,),
        dtype="i4",
        compressors=None,
        dimension_names=["x"],
    )
    array[:] = np.arange(CELLS)
    session.commit("made")
    return url


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Return a directory for notes between processes."""
    directory = tmp_path / "notes"
    directory.mkdir()
    return directory


@pytest.fixture
def drive(java: str | None, place: str, notes: Path) -> Drive:
    """Return a function that runs the driver, and returns its exit code."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYSPARK_PYTHON"] = sys.executable
    if java is not None:
        environment["JAVA_HOME"] = java

    def run(master: str, how: str, what: str) -> int:
        ended = subprocess.run(
            [sys.executable, str(DRIVER), master, how, what, place, str(notes)],
            env=environment,
            timeout=PATIENCE_SECONDS,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        if ended.returncode not in {0, DIED, KILLED}:
            pytest.fail(ended.stderr[-3000:])
        return ended.returncode

    return run


def read(url: str) -> npt.NDArray[Any]:
    """Read the array of the tip."""
    store = Repository.open(url).readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:])


def commits(url: str) -> int:
    """Count the commits of the branch."""
    return len(list(Repository.open(url).ancestry(branch="main")))


def collect(url: str) -> int:
    """Collect all garbage, see that the array needs none of it, and answer how many chunks."""
    before = read(url)
    now = datetime.now(UTC)
    collected = Repository.open(url).garbage_collect(now).chunks_deleted
    np.testing.assert_array_equal(read(url), before)
    assert Repository.open(url).garbage_collect(now, dry_run=True).chunks_deleted == 0
    return collected


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_commit_that_ends_badly_can_be_tried_again(
    spark: SparkSession, place: str, notes: Path, how: str, moment: str
) -> None:
    """Spark reports an error and aborts even where the commit landed; a retry finds out."""
    spark.dataSource.register(FailingSource)
    rows = spark.range(0, CELLS, 1, 2).selectExpr("id as x", "cast(id * 2 as int) as a")
    writer = rows.write.format("icechunk-failing").mode("overwrite")
    writer = writer.option("txnAppId", "double").option("txnVersion", 1)
    writer = writer.option("trouble", f"commit {how} {moment}").option("notes", str(notes))
    with pytest.raises(Exception, match=moment if how == "fails" else "Python"):
        writer.save(place)
    landed = moment == "after"
    assert commits(place) == 2 + landed
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * (1 + landed))
    assert (notes / "aborted").exists()

    writer.save(place)
    assert commits(place) == 3
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert collect(place) == (0 if landed else 6)


@pytest.mark.parametrize("trouble", ["task fails", "worker dies"])
def test_task_that_keeps_failing_leaves_only_garbage(
    spark: SparkSession, place: str, notes: Path, trouble: str
) -> None:
    """Spark, which tries no task again here, aborts; nothing is visible."""
    spark.dataSource.register(FailingSource)
    rows = spark.range(0, CELLS, 1, 2).selectExpr("id as x", "cast(id * 2 as int) as a")
    writer = rows.write.format("icechunk-failing").mode("overwrite")
    words = {"task fails": "whenever it is tried", "worker dies": "crashed"}[trouble]
    with pytest.raises(Exception, match=words):
        writer.option("trouble", trouble).option("notes", str(notes)).save(place)
    assert (notes / "aborted").exists()
    np.testing.assert_array_equal(read(place), np.arange(CELLS))
    assert commits(place) == 2
    assert collect(place) >= 3


@pytest.mark.spark_failures
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
def test_a_worker_dies_and_its_task_is_run_again(drive: Drive, place: str, notes: Path) -> None:
    """Every value is doubled once, by one commit; the chunks of the first try are garbage."""
    assert drive(LOCAL, "chunks", "worker dies") == 0
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert commits(place) == 3
    assert (notes / "failed").exists()
    assert len(list(notes.glob("worker-*"))) >= 2
    assert collect(place) >= LEFT["chunks"]


@pytest.mark.spark_failures
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
@pytest.mark.parametrize("what", ["task fails once", "reply is lost", "no reuse"])
def test_retried_work_is_committed_once(drive: Drive, place: str, notes: Path, what: str) -> None:
    """Every value is doubled once, by one commit, after any retry."""
    assert drive(LOCAL, "chunks", what) == 0
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert commits(place) == 3
    assert (notes / "failed").exists() == (what != "no reuse")
    assert (notes / "end").read_text() == "True"


@pytest.mark.spark_failures
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
@pytest.mark.parametrize(
    ("step", "doubled"),
    [
        ("before the commit", 1),
        ("before the reference", 1),
        ("after the reference", 2),
        ("after the commit", 2),
    ],
)
def test_a_driver_that_died_can_be_run_again(
    drive: Drive, place: str, notes: Path, step: str, doubled: int
) -> None:
    """All or nothing is visible; the second run commits what was not, and only that."""
    what = f"driver dies {step}"
    assert drive(LOCAL, "chunks", what) == DIED
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * doubled)
    assert commits(place) == 1 + doubled
    assert drive(LOCAL, "chunks", what) == 0
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert commits(place) == 3
    assert (notes / "end").read_text() == str(doubled == 1)
    assert collect(place) == (6 if doubled == 1 else 0)


@pytest.mark.spark_failures
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
@pytest.mark.parametrize(
    "case",
    [*product(["worker dies", "executor dies", "task is slow"], ["chunks", "rows"])],
    ids=", ".join,
)
def test_tasks_rerun_by_a_cluster_count_once(
    cluster: str, drive: Drive, case: tuple[str, str], place: str, notes: Path
) -> None:
    """In another executor, or twice at a time where one is slow: one answer of each counts."""
    what, how = case
    assert drive(cluster, how, what) == 0
    assert (notes / "failed").exists()
    assert (notes / "second").exists() == (what == "task is slow")
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert commits(place) == 3
    assert collect(place) >= LEFT[how]


@pytest.mark.spark_failures
@pytest.mark.timeout(2 * PATIENCE_SECONDS)
@pytest.mark.parametrize("how", ["chunks", "rows"])
def test_driver_killed_during_tasks_commits_nothing(
    cluster: str, drive: Drive, place: str, how: str
) -> None:
    """Nothing is visible; the cluster stays up, and the second run commits."""
    what = "driver dies with tasks"
    assert drive(cluster, how, what) == KILLED
    np.testing.assert_array_equal(read(place), np.arange(CELLS))
    assert commits(place) == 2
    assert drive(cluster, how, what) == 0
    np.testing.assert_array_equal(read(place), np.arange(CELLS) * 2)
    assert commits(place) == 3
    assert collect(place) >= LEFT[how]

"""Arrays computed chunk by chunk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.errors import ConflictError, InvalidInputError
from icechunk_async.spark import (
    Answer,
    CooperativeWrite,
    Input,
    NewArray,
    Transaction,
    map_chunks,
    write_region,
)
from icechunk_async.spark.write import compute as chunkwise
from icechunk_async.spark.write.compute import match_axes, place_block
from icechunk_async.sync import Repository
from icechunk_async.sync.conflicts import ConflictDetector
from tests.spark.here import session_here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.sync import ForkSession

DATA = np.arange(24 * 10 * 7, dtype=np.float32).reshape(24, 10, 7)
NAMES = ("time", "lat", "lon")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a repository with one array."""
    url = (tmp_path / "repo").as_uri()
    repo = Repository.create(url)
    session = repo.writable_session("main")
    array = zarr.create_array(
        session.store,
        name="t",
        shape=DATA.shape,
        chunks=(5, 4, 7),
        dtype="f4",
        dimension_names=NAMES,
    )
    array[:] = DATA
    session.commit("made")
    return url


def read(url: str, path: str) -> npt.NDArray[Any]:
    """Read an array from the tip."""
    store = Repository.open(url).readonly_session("main").store
    return np.asarray(zarr.open_array(store, path=path, mode="r")[...])


def commits(url: str) -> int:
    """Count the commits of the branch."""
    return len(list(Repository.open(url).ancestry(branch="main")))


def test_an_array_is_derived_in_one_commit(spark: SparkSession, url: str) -> None:
    """Chunks of two inputs give a chunk of the output; the new array is in the same commit."""
    published = map_chunks(
        spark,
        url,
        lambda a, b: a * 2 + b,
        ["t", "t"],
        NewArray("out", DATA.shape, (6, 10, 3), "f4", NAMES),
        message="derived",
    )
    np.testing.assert_array_equal(read(url, "out"), DATA * 3)
    assert published.committed
    assert commits(url) == 3
    tip = next(iter(Repository.open(url).ancestry(branch="main")))
    assert (tip.id, tip.message) == (published.snapshot_id, "derived")


def test_axes_missing_in_the_output_are_read_whole(spark: SparkSession, url: str) -> None:
    """The mean over time, by the names of dimensions, and anomalies with it by a selection."""
    mean = NewArray("mean", (10, 7), (4, 4), "f4", ("lat", "lon"))
    map_chunks(spark, url, lambda t: t.mean(axis=0), ["t"], mean)
    np.testing.assert_allclose(read(url, "mean"), DATA.mean(axis=0))
    anomaly = NewArray("anomaly", DATA.shape, (8, 5, 7), "f4", NAMES)
    map_chunks(spark, url, lambda t, m: t - m, ["t", Input("mean")], anomaly)
    np.testing.assert_allclose(read(url, "anomaly"), DATA - DATA.mean(axis=0))


def test_selection_chooses_the_part_of_an_input(spark: SparkSession, url: str) -> None:
    """Every second place, from an input of another length; None leaves a chunk alone."""
    halves = Input("t", lambda at: (slice(at[0].start * 2, at[0].stop * 2, 2), 0, 0))

    def fn(block: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        return None if block[0] == 0 else block

    map_chunks(spark, url, fn, [halves], NewArray("half", (12,), (4,), "f4", fill_value=-1))
    expected = DATA[::2, 0, 0].copy()
    expected[:4] = -1
    np.testing.assert_array_equal(read(url, "half"), expected)


def test_wrong_block_fails_the_job_and_nothing_is_visible(spark: SparkSession, url: str) -> None:
    """The message says what was wrong."""
    before = commits(url)
    out = NewArray("out", DATA.shape, (24, 10, 7), "f4", NAMES)
    with pytest.raises(Exception, match="has the shape"):
        map_chunks(spark, url, lambda t: t[1:], ["t"], out)
    assert commits(url) == before
    assert [*zarr.open_group(Repository.open(url).readonly_session("main").store, mode="r")] == [
        "t"
    ]


def test_a_block_that_the_array_cannot_hold_is_refused() -> None:
    """Precision may be lost, the imaginary part not."""
    target = zarr.create_array({}, shape=(4,), chunks=(2,), dtype="f4")
    place_block(target, (slice(0, 2),), np.ones(2, "f8"))
    np.testing.assert_array_equal(np.asarray(target[:]), [1, 1, 0, 0])
    with pytest.raises(InvalidInputError, match="cannot hold"):
        place_block(target, (slice(0, 2),), np.ones(2, "c8"))


@pytest.mark.parametrize(
    ("dtype", "fits", "values"),
    [
        ("i2", np.array([7, -7], "i8"), np.array([7, 70000], "i8")),
        ("i4", np.array([7, 8], "u8"), np.array([7, 2**63], "u8")),
        ("<U2", np.array(["ab", "c"], "U5"), np.array(["ab", "cde"])),
        ("f4", np.array([0.5, np.inf]), np.array([1, 1e300])),
        ("f2", np.array([7, 8], "i8"), np.array([7, 70000], "i8")),
        ("c8", np.array([0.5j, np.nan]), np.array([1, 1e300j])),
        (
            "M8[ns]",
            np.array(["2020-01-01", "NaT"], "M8[D]"),
            np.array(["2020-01-01", "9999-01-01"], "M8[D]"),
        ),
        ("m8[ns]", np.array([1, 2], "m8[D]"), np.array([1, 200_000], "m8[D]")),
    ],
)
def test_values_that_would_wrap_or_be_cut_are_refused(
    dtype: str, fits: npt.NDArray[Any], values: npt.NDArray[Any]
) -> None:
    """Numbers and times do not overflow, and texts are not cut; nothing of the block is stored."""
    target = zarr.create_array({}, shape=(2,), chunks=(2,), dtype=dtype)
    place_block(target, (slice(0, 2),), fits)
    wanted = rf"block for \[0:2\] of .* has {re.escape(str(values[1]))}.*cannot hold"
    with pytest.raises(InvalidInputError, match=wanted):
        place_block(target, (slice(0, 2),), values)
    np.testing.assert_array_equal(np.asarray(target[:]), fits)


def test_the_same_transaction_runs_once(spark: SparkSession, url: str) -> None:
    """The second call, which is the same, finds it on the branch, and runs no job."""
    once = Transaction("derive", 3)
    out = NewArray("out", DATA.shape, (24, 10, 7), "f4", NAMES)
    first = map_chunks(spark, url, lambda t: t, ["t"], out, transaction=once)
    again = map_chunks(spark, url, lambda t: t, ["t"], out, transaction=once)
    assert (first.committed, again.committed) == (True, False)
    assert again.snapshot_id == first.snapshot_id
    later = map_chunks(spark, url, lambda t: t, ["t"], "out", transaction=Transaction("derive", 4))
    assert later.committed


def test_regions_are_written_in_one_commit(spark: SparkSession, url: str) -> None:
    """One task each; of whole chunks, the last of them cut off by the end of the array."""
    places = [slice(0, 10), slice(10, 20), slice(20, 24)]
    parts = [((it, slice(None), slice(None)), it.start) for it in places]
    write_region(
        spark,
        url,
        lambda start: DATA[start : start + 10] + 1,
        parts,
        NewArray("placed", DATA.shape, (5, 10, 7), "f4", NAMES),
    )
    np.testing.assert_array_equal(read(url, "placed"), DATA + 1)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([slice(0, 10), slice(5, 15)], "in common"),
        ([slice(0, 7)], "inside of a chunk"),
        ([slice(20, 25)], "not within"),
        ([slice(0, 10, 2)], "step other than 1"),
    ],
)
def test_regions_that_cut_or_share_chunks_are_refused(
    spark: SparkSession, url: str, places: list[slice], words: str
) -> None:
    """Before any task runs."""
    parts = [((it, slice(None), slice(None)), 0) for it in places]
    with pytest.raises(InvalidInputError, match=words):
        write_region(spark, url, lambda _: DATA, parts, "t")


def test_axes_that_cannot_be_matched_are_refused() -> None:
    """Without names and of another rank, or of another length."""
    assert match_axes(["b", "a"], (2, 1), ["a", "c", "b"], (1, 5, 2), "x") == (2, 0)
    assert match_axes([None], (3,), [None], (3,), "x") == (0,)
    with pytest.raises(InvalidInputError, match="cannot be matched"):
        match_axes([None], (3,), ["a", "b"], (3, 3), "x")
    with pytest.raises(InvalidInputError, match="has 4 places"):
        match_axes(["a"], (4,), ["a"], (3,), "x")


def here(
    _: SparkSession, write: CooperativeWrite, tasks: int, work: Callable[[ForkSession, int], None]
) -> list[Answer]:
    """Run tasks one after the other, without Spark."""
    answers: list[Answer] = []
    for task in range(tasks):
        fork = write.fork()
        work(fork, task)
        answers.append(Answer(task, write.changes(fork)))
    return answers


def _run_tasks(monkeypatch: pytest.MonkeyPatch, run: Callable[..., list[Answer]]) -> None:
    """Let a function run the tasks, without Spark."""
    monkeypatch.setattr(chunkwise, "run_tasks", run)


@pytest.mark.parametrize("tasks", [1, 3])
def test_output_that_is_an_input_is_read_before_it_changes(
    url: str, monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    """Each chunk takes the place before it, which the same task has written just now."""
    _run_tasks(monkeypatch, here)
    session = Repository.open(url).writable_session("main")
    array = zarr.create_array(session.store, name="s", shape=(8,), chunks=(2,), dtype="i4")
    array[:] = np.arange(8)
    session.commit("made")
    before = Input("s", lambda at: (slice(max(0, at[0].start - 1), at[0].stop),))
    map_chunks(session_here(), url, lambda it: np.full(2, it[0], "i4"), [before], "s", tasks=tasks)
    np.testing.assert_array_equal(read(url, "s"), [0, 0, 1, 1, 3, 3, 5, 5])


def test_input_changed_by_another_commit_is_a_conflict(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No solver can accept it; a commit that touched other arrays is accepted."""
    repository = Repository.open(url)

    def racing(*given: Any) -> list[Answer]:
        answers = here(*given)
        session = repository.writable_session("main")
        root = zarr.open_group(session.store, mode="a")
        root.create_group("other", overwrite=True)
        if changes:
            array: Any = root["t"]
            array[0] = 50
        session.commit("by others")
        return answers

    _run_tasks(monkeypatch, racing)
    out = NewArray("out", DATA.shape, DATA.shape, "f4", NAMES)
    solver = ConflictDetector()
    changes = True
    with pytest.raises(ConflictError, match="changed '/t'"):
        map_chunks(session_here(), url, lambda it: it, ["t"], out, tasks=1, rebase_with=solver)
    assert "out" not in zarr.open_group(repository.readonly_session("main").store, mode="r")
    changes = False
    map_chunks(session_here(), url, lambda it: it, ["t"], out, tasks=1, rebase_with=solver)
    np.testing.assert_array_equal(read(url, "out"), read(url, "t"))

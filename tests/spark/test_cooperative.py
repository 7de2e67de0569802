"""Many tasks write, one commit: who answered what, and what others did meanwhile."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import zarr

from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    IncompleteWriteError,
    InvalidInputError,
    MergeFailedError,
    RebaseFailedError,
)
from icechunk_async.spark import (
    Answer,
    CooperativeWrite,
    Published,
    Transaction,
    publish,
    run_tasks,
)
from icechunk_async.spark.write.cooperative import check_answers
from icechunk_async.sync import Repository
from icechunk_async.sync.conflicts import ConflictDetector

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.sync import ForkSession
    from icechunk_async.sync.store import IcechunkStore


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with an array of six chunks."""
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(12,), chunks=(2,), dtype="i4")
    array[:] = np.arange(12)
    session.commit("made")
    return url


def double(fork: ForkSession, task: int) -> None:
    """Double three of the six chunks."""
    array = zarr.open_array(fork.store, path="a", mode="r+")
    for start in range(task * 6, task * 6 + 6, 2):
        array[start : start + 2] = np.asarray(array[start : start + 2]) * 2


def answer(write: CooperativeWrite, task: int) -> Answer:
    """Do one task here."""
    fork = write.fork()
    double(fork, task)
    return Answer(task, write.changes(fork))


def read(url: str) -> npt.NDArray[Any]:
    """Read the array of the tip."""
    store = Repository.open(url).readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="a", mode="r")[:])


def set_chunk(url: str, start: int, value: int) -> str:
    """Commit one chunk, as somebody else."""
    session = Repository.open(url).writable_session("main")
    zarr.open_array(session.store, path="a", mode="r+")[start : start + 2] = value
    return session.commit("somebody else")


def commits(url: str) -> int:
    """Count the commits of the branch."""
    return len(list(Repository.open(url).ancestry(branch="main")))


def test_tasks_of_a_job_write_one_commit(spark: SparkSession, place: str) -> None:
    """Each returns its changes; nothing is visible before the commit."""
    write = CooperativeWrite.begin(place)
    answers = run_tasks(spark, write, 2, double)
    assert sorted(it.task for it in answers) == [0, 1]
    np.testing.assert_array_equal(read(place), np.arange(12))
    published = write.commit(answers, 2, "doubled", metadata={"why": "test"})
    np.testing.assert_array_equal(read(place), np.arange(12) * 2)
    tip = next(iter(Repository.open(place).ancestry(branch="main")))
    assert (tip.id, tip.message, tip.metadata) == (
        published.snapshot_id,
        "doubled",
        {"why": "test"},
    )
    with pytest.raises(InvalidInputError, match="at least one task"):
        run_tasks(spark, write, 0, double)


def test_another_process_can_commit(place: str) -> None:
    """With what pickles: the description of the write, and the answers."""
    write = CooperativeWrite.begin(place)
    travelled = pickle.dumps((write, [answer(pickle.loads(pickle.dumps(write)), 0)]))
    del write
    there, answers = cast("tuple[CooperativeWrite, list[Answer]]", pickle.loads(travelled))
    there.commit([*answers, answer(there, 1)], 2, "doubled")
    np.testing.assert_array_equal(read(place), np.arange(12) * 2)


@pytest.mark.parametrize(
    ("tasks", "missing", "repeated"),
    [([0], [1], []), ([0, 1, 1], [], [1]), ([0, 1, 2], [], [2]), ([], [0, 1], [])],
)
def test_every_task_answers_exactly_once(
    place: str, tasks: list[int], missing: list[int], repeated: list[int]
) -> None:
    """Else nothing is published, and the error names them."""
    write = CooperativeWrite.begin(place)
    answers = [Answer(task, answer(write, task % 2).changes) for task in tasks]
    with pytest.raises(IncompleteWriteError) as caught:
        write.commit(answers, 2, "doubled")
    assert caught.value.context == {"missing": missing, "repeated": repeated}
    assert commits(place) == 2
    check_answers([Answer(1, b""), Answer(0, b"")], 2)


def test_no_two_tasks_write_one_chunk(place: str) -> None:
    """Not even parts of it, or equal values: the last one would win."""
    write = CooperativeWrite.begin(place)

    def half(task: int) -> Answer:
        fork = write.fork()
        zarr.open_array(fork.store, path="a", mode="r+")[task] = 7
        return Answer(task, write.changes(fork))

    with pytest.raises(MergeFailedError, match="written by both"):
        write.commit([half(0), half(1)], 2, "halves")
    np.testing.assert_array_equal(read(place), np.arange(12))
    assert commits(place) == 2


def test_preparation_and_finish_are_in_the_same_commit(place: str) -> None:
    """A new array, which tasks find; and attributes, last."""

    def prepare(store: IcechunkStore) -> None:
        zarr.create_array(store, name="b", shape=(4,), chunks=(2,), dtype="i4")

    def finish(store: IcechunkStore) -> None:
        zarr.open_array(store, path="b", mode="r+").attrs["done"] = True

    write = CooperativeWrite.begin(place, prepare=prepare)
    answers = []
    for task in range(2):
        fork = write.fork()
        zarr.open_array(fork.store, path="b", mode="r+")[task * 2 : task * 2 + 2] = task + 1
        answers.append(Answer(task, write.changes(fork)))
    tip = Repository.open(place).readonly_session("main").store
    assert "b" not in zarr.open_group(tip, mode="r")
    write.commit(answers, 2, "new", finish=finish)
    array = zarr.open_array(
        Repository.open(place).readonly_session("main").store, path="b", mode="r"
    )
    assert np.asarray(array[:]).tolist() == [1, 1, 2, 2]
    assert dict(array.attrs) == {"done": True}
    assert commits(place) == 3


def test_prepared_tasks_leave_no_files_behind(place: str) -> None:
    """One snapshot, log and manifest for each commit, and only chunks that it refers to."""

    def prepare(store: IcechunkStore) -> None:
        array = zarr.create_array(store, name="b", shape=(4,), chunks=(2,), dtype="i4")
        array[:2] = 9

    write = CooperativeWrite.begin(place, prepare=prepare)
    answers = []
    for task in range(2):
        fork = write.fork()
        array: Any = zarr.open_array(fork.store, path="b", mode="r+")
        assert array[:2].tolist() == [9, 9]
        if task:
            array[2:] = 7
        answers.append(Answer(task, write.changes(fork)))
    write.commit(answers, 2, "new")
    root = Path(place.removeprefix("file://"))
    assert {it: len(list((root / it).iterdir())) for it in ("snapshots", "manifests")} == {
        "snapshots": 3,
        "manifests": 2,
    }
    store = Repository.open(place).readonly_session("main").store
    b: Any = zarr.open_array(store, path="b", mode="r")
    assert b[:].tolist() == [9, 9, 7, 7]


def test_solver_decides_conflicts_with_other_commits(place: str) -> None:
    """Refused without a solver; other chunks go together; the same chunk does not."""
    write = CooperativeWrite.begin(place)
    answers = [answer(write, 0)]
    set_chunk(place, 6, 50)
    with pytest.raises(ConflictError):
        write.commit(answers, 1, "doubled")
    write.commit(answers, 1, "doubled", rebase_with=ConflictDetector())
    assert read(place).tolist() == [0, 2, 4, 6, 8, 10, 50, 50, 8, 9, 10, 11]

    again = CooperativeWrite.begin(place)
    answers = [answer(again, 0)]
    set_chunk(place, 0, 60)
    with pytest.raises(RebaseFailedError):
        again.commit(answers, 1, "doubled", rebase_with=ConflictDetector())
    assert read(place).tolist()[:2] == [60, 60]


def test_a_transaction_is_recognised_under_commits_of_others(place: str) -> None:
    """Other applications and people committed since; any process may try it again."""
    once = Transaction("one", 1)
    write = CooperativeWrite.begin(place)
    answers = [answer(write, 0)]
    assert write.commit(answers, 1, "doubled", transaction=once).committed
    other = CooperativeWrite.begin(place)
    theirs = Answer(0, answer(other, 1).changes)
    other.commit([theirs], 1, "doubled", transaction=Transaction("two", 9))
    set_chunk(place, 10, 0)
    before = read(place)

    assert write.is_done(once)
    assert not write.commit(answers, 1, "doubled", transaction=once).committed
    fresh = CooperativeWrite.begin(place)
    assert not fresh.commit([answer(fresh, 0)], 1, "again", transaction=once).committed
    np.testing.assert_array_equal(read(place), before)
    assert fresh.is_done(Transaction("one", 0))
    assert not fresh.is_done(Transaction("one", 2))
    assert not fresh.is_done(None)
    with pytest.raises(InvalidInputError):
        Transaction("", 1)


@pytest.mark.parametrize("solver", [None, ConflictDetector()])
@pytest.mark.parametrize("unchanged", [(), ("a",)])
def test_transaction_committed_by_a_twin_is_no_error(
    place: str, solver: ConflictDetector | None, unchanged: tuple[str, ...]
) -> None:
    """Both sessions began before either committed, and write the same chunk of an input."""
    once = Transaction("app", 1)
    repository = Repository.open(place)
    sessions = [repository.writable_session("main") for _ in range(2)]
    for session in sessions:
        zarr.open_array(session.store, path="a", mode="r+")[:2] = 7
    ended = [
        publish(repository, it, "twin", transaction=once, rebase_with=solver, unchanged=unchanged)
        for it in sessions
    ]
    tip = repository.lookup_branch("main")
    assert ended == [Published(tip, committed=True), Published(tip, committed=False)]
    assert commits(place) == 3


def test_a_branch_must_be_there(place: str) -> None:
    """Before any task runs."""
    with pytest.raises(BranchNotFoundError):
        CooperativeWrite.begin(place, "elsewhere")


def test_a_task_uses_its_share_of_the_budget(place: str) -> None:
    """As many tasks as an executor has cores share what the repository allows at a time."""
    whole, half = (CooperativeWrite.begin(place, cores=it).fork() for it in (1, 2))

    def budget(fork: ForkSession) -> int:
        most: int = fork.handle.repository.now().config.effective_max_concurrent_requests
        return most

    assert budget(half) * 2 == budget(whole)

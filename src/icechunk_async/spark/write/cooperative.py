"""One commit of many tasks: each task writes whole chunks in a fork, and returns its changes.

The description of the write and the changes are plain data. Any process that holds both can
commit, so the process that began need not survive. Nothing is visible before the commit, which
lands once if a transaction names it, and only on unchanged inputs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.errors import IncompleteWriteError, InvalidInputError, NothingToCommitError
from icechunk_async.spark.shared import (
    SharedRepository,
    adopt_changes,
    base_of,
    changes_of,
    fork_changes,
    merge_changes,
    new_point,
    root_with,
)
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from icechunk_async.spark.requests import Budget
    from icechunk_async.sync import ForkSession, Session
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "Answer",
    "CooperativeWrite",
    "Published",
    "Transaction",
    "check_answers",
    "is_published",
    "publish",
    "published_version",
    "run_tasks",
]


_ANSWERS: Final = "task long, changes binary"


@dataclass(frozen=True, slots=True)
class Answer:
    """The changes of one task.

    Attributes:
        task: number of the task, from 0.
        changes: references of the chunks that it wrote, 12 to 25 bytes each.
    """

    task: int
    changes: bytes


def check_answers(answers: Sequence[Answer], tasks: int) -> None:
    """Check that every task answered exactly once.

    Raises:
        IncompleteWriteError: a task did not answer, answered twice, or is unknown.
    """
    times = Counter(answer.task for answer in answers)
    missing = [task for task in range(tasks) if task not in times]
    repeated = sorted(task for task, count in times.items() if count > 1 or task >= tasks)
    # A task that is missing would leave a hole that reads as the fill value, and two answers of one
    # task name different objects for one chunk.
    if missing or repeated:
        raise IncompleteWriteError(
            f"Of {tasks} tasks {len(missing)} did not answer (the first: {missing[:5]}) and "
            f"{len(repeated)} answered too often or are unknown ({repeated[:5]}). Nothing was "
            "published; run the job again.",
            missing=missing,
            repeated=repeated,
        )


class CooperativeWrite:
    """One transaction in which tasks of any process take part. Pickles, credentials included."""

    def __init__(
        self, repository: Repository, branch: str, root: bytes, point: bytes, budget: Budget
    ) -> None:
        """Keep plain data; use `begin`."""
        self.repository = repository
        self.branch = branch
        self._root = root
        self._point = point
        self.budget = budget

    @classmethod
    def begin(
        cls,
        repository: Repository | str,
        branch: str = "main",
        *,
        prepare: Callable[[IcechunkStore], object] | None = None,
        cores: int = 0,
        max_requests: int = 0,
    ) -> CooperativeWrite:
        """Begin at the tip of a branch.

        Args:
            repository: an open repository, or its URL.
            branch: the branch to commit to.
            prepare: runs once, before any task, for changes that tasks cannot each make, such as
                creating or resizing arrays.
            cores: tasks of one executor that share the repository's budget of requests; 0 if
                each task has to ask Spark.
            max_requests: requests at a time of all tasks together; 0 for the session's
                `spark.icechunk.maxRequests`, or 4096.

        Raises:
            BranchNotFoundError: there is no such branch.

        Cost: stores nothing but chunks that `prepare` writes. What it changes travels to every
        task.
        """
        repo = Repository.open(repository) if isinstance(repository, str) else repository
        # A fork of a session that changed nothing, so that no snapshot has to be stored for tasks
        # to start from.
        root = repo.writable_session(branch).fork()
        if prepare is not None:
            prepare(root.store)
        # Every task works in a copy of the prepared root, and answers what it changed there.
        # Nodes created by each task would conflict when their changes are merged.
        budget = SharedRepository.of(repo).budget(cores, max_requests)
        return cls(repo, branch, fork_changes(root), new_point(), budget)

    def for_job(self, spark: SparkSession, tasks: int) -> CooperativeWrite:
        """Return the same write for a job of `tasks` tasks, which share requests.

        Raises:
            InvalidInputError: the session's `spark.icechunk.maxRequests` is no positive number.
        """
        budget = self.budget.in_session(spark, tasks)
        return CooperativeWrite(self.repository, self.branch, self._root, self._point, budget)

    def fork(self) -> ForkSession:
        """Return a fork: in a task to write in, elsewhere to read what tasks will see."""
        return SharedRepository.of(self.repository).in_task(self.budget).fork(self._root)

    def fork_with(self, changes: bytes) -> ForkSession:
        """Return the fork in which a task made its changes, to read what it wrote."""
        fork = root_with(self._root, changes)
        return SharedRepository.of(self.repository).in_task(self.budget).fork(fork)

    def changes(self, fork: ForkSession) -> bytes:
        """Return the changes of a task, once its chunks are durable; no location and no secret.

        Args:
            fork: a fork of this write.
        """
        return changes_of(fork, self._root, self._point)

    @property
    def base_id(self) -> str:
        """The snapshot at which the write began."""
        return base_of(self._root)

    def adopt(self, changes: bytes) -> bytes:
        """Return changes of another write as if they belonged to this one.

        Both must start at the same snapshot, with the same preparation.
        """
        return adopt_changes(changes, self._root, self._point)

    def is_done(self, transaction: Transaction | None) -> bool:
        """Return whether the branch already holds a transaction."""
        return is_published(self.repository, self.branch, transaction)

    def commit(
        self,
        answers: Sequence[Answer],
        tasks: int,
        message: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        transaction: Transaction | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        finish: Callable[[IcechunkStore], None] | None = None,
        unchanged: Collection[str] = (),
    ) -> Published:
        """Publish the changes of all tasks at once.

        Args:
            answers: one for each task.
            tasks: how many tasks there were.
            message: message of the commit.
            metadata: properties of the snapshot.
            transaction: names the write, so that the branch takes it once; see
                `icechunk_async.spark.Transaction`.
            rebase_with: decides conflicts with commits made since `begin`; without it any such
                commit is a conflict.
            rebase_tries: how often to rebase at most.
            finish: makes changes that are only known now, in the same commit.
            unchanged: paths of arrays that the changes were computed from: a commit that touched
                one of them since `begin` is a conflict that no solver decides.

        Raises:
            IncompleteWriteError: not every task answered exactly once.
            SessionStateError: two tasks wrote one chunk.
            ConflictError: another writer was first.

        After an error nothing is visible, unless the reply of the last request was lost: with a
        transaction, commit again to find out.
        """
        check_answers(answers, tasks)
        # It takes the place of the session of the root, and stands where that stood: the commit
        # finds out what others did since.
        session = self.repository.writable_session(self.branch)
        # Spark returns answers in the order in which tasks end. Sorted, two runs make the same
        # snapshot.
        ordered = sorted(answers, key=lambda it: it.task)
        merge_changes(session, self._root, [it.changes for it in ordered])
        if finish is not None:
            finish(session.store)
        return publish(
            self.repository,
            session,
            message,
            metadata=metadata,
            transaction=transaction,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            unchanged=unchanged,
        )


def run_tasks(
    spark: SparkSession,
    write: CooperativeWrite,
    tasks: int,
    work: Callable[[ForkSession, int], None],
) -> list[Answer]:
    """Run the tasks of a write as a Spark job, and return their changes.

    Args:
        spark: a session, also one of Spark Connect.
        write: the write in which they take part.
        tasks: how many; each is one partition.
        work: called with a fork and the number of the task. Spark may run a task several times,
            after failures or because it is slow: one answer counts, and chunks of the others are
            garbage.
    """
    if tasks < 1:
        raise InvalidInputError(f"A job needs at least one task, not {tasks}.")
    write = write.for_job(spark, tasks)

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                fork = write.fork()
                work(fork, task)
                answer = {"task": [task], "changes": [write.changes(fork)]}
                yield pa.RecordBatch.from_pydict(answer)

    # A data frame, not an RDD: Spark Connect has no RDDs.
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(each, _ANSWERS).collect()
    return [Answer(int(row["task"]), bytes(row["changes"])) for row in rows]


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a write.

    Attributes:
        snapshot_id: a snapshot of the branch that holds the write.
        committed: whether this call is known to have made that snapshot.
    """

    snapshot_id: str
    committed: bool


def published_version(repository: Repository, branch: str, app_id: str) -> int | None:
    """Return the newest version that an application wrote to a branch; None if it records none.

    Cost: one request with format version 2; one for each commit back to the nearest one of this
    library with version 1.
    """
    found = repository.recorded_transactions(branch).get(app_id)
    return None if found is None else found.version


def is_published(repository: Repository, branch: str, transaction: Transaction | None) -> bool:
    """Return whether a branch holds a transaction, or a later one of its application."""
    if transaction is None:
        return False
    newest = published_version(repository, branch, transaction.app_id)
    # Versions count up: an application that is at 7 has written 5 before, or does not want it any
    # more.
    return newest is not None and newest >= transaction.version


def publish(
    repository: Repository,
    session: Session,
    message: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    transaction: Transaction | None = None,
    rebase_with: ConflictSolver | None = None,
    rebase_tries: int = 1000,
    unchanged: Collection[str] = (),
) -> Published:
    """Commit a session.

    Args:
        repository: the repository of the session.
        session: a writable session.
        message: message of the commit.
        metadata: properties of the snapshot.
        transaction: names the write. If the branch holds it, or a later one of its application,
            nothing is committed.
        rebase_with: after a lost race, replay the changes on top of the winner's commit, and let
            this solver decide conflicts. Without it a lost race is an error.
        rebase_tries: how often to rebase at most.
        unchanged: paths of arrays that the changes were computed from: a commit that touched one
            of them since the session began is a conflict that no solver decides.

    Raises:
        ConflictError: another writer was first. Nothing was published.
        RebaseFailedError: the solver did not settle a conflict. Nothing was published.

    An interrupt may come after the commit was published: with a transaction, call again to find
    out.
    """
    branch = session.branch
    assert branch is not None  # it is writable
    try:
        snapshot_id = session.commit(
            message,
            dict(metadata or {}),
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            once=transaction,
            unchanged=unchanged,
        )
    # No task changed anything, so the tip holds what was asked for.
    except NothingToCommitError:
        return Published(repository.lookup_branch(branch), committed=False)
    return Published(snapshot_id, committed=not session.already_committed)

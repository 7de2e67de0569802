"""One commit of many tasks: each writes whole chunks in a fork, and answers what it wrote.

What travels is plain data. Whichever process has the description and the answers can commit, so
the one that began need not live on; nothing is visible before.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async.engine.changes.wire import ForkState, decode_fork, encode_fork
from icechunk_async.errors import IncompleteWriteError, InvalidInputError
from icechunk_async.session import ForkSession as AsyncForkSession
from icechunk_async.spark.budget import Budget, shared_handle
from icechunk_async.spark.write.transactions import Published, is_published, publish
from icechunk_async.sync import ForkSession, Repository
from icechunk_async.sync.portal import run
from icechunk_async.sync.session_handles import SessionHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from icechunk_async.spark.write.transactions import Transaction
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.store import IcechunkStore

__all__ = [
    "Answer",
    "CooperativeWrite",
    "check_answers",
    "run_tasks",
    "total_cores",
]

_ANSWERS: Final = "task long, changes binary"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one task wrote.

    Attributes:
        task: its number, from 0.
        changes: references of the chunks that it wrote, 12 to 25 bytes each.
    """

    task: int
    changes: bytes


def check_answers(answers: Sequence[Answer], tasks: int) -> None:
    """Make sure that every task answered exactly once.

    Raises:
        IncompleteWriteError: some did not, did twice, or are unknown.
    """
    times = Counter(answer.task for answer in answers)
    missing = [task for task in range(tasks) if task not in times]
    repeated = sorted(task for task, count in times.items() if count > 1 or task >= tasks)
    if missing or repeated:
        raise IncompleteWriteError(
            f"Of {tasks} tasks {len(missing)} did not answer (the first: {missing[:5]}) and "
            f"{len(repeated)} answered too often or are unknown ({repeated[:5]}). Nothing was "
            "published; run the job again.",
            missing=missing,
            repeated=repeated,
        )


class CooperativeWrite:
    """One transaction that tasks anywhere take part in. Pickles, credentials included."""

    def __init__(
        self, repository: Repository, branch: str, root: bytes, fork: bytes, budget: Budget
    ) -> None:
        """Use :meth:`begin`."""
        self.repository = repository
        self.branch = branch
        self._root = root
        self._fork = fork
        self._budget = budget

    @classmethod
    def begin(
        cls,
        repository: Repository | str,
        branch: str = "main",
        *,
        prepare: Callable[[IcechunkStore], object] | None = None,
        cores: int = 0,
    ) -> CooperativeWrite:
        """Begin at the tip of a branch.

        Args:
            repository: an open one, or its URL.
            branch: is committed to.
            prepare: does first, and once, what tasks could not do each: makes or resizes arrays.
            cores: tasks that run at a time in one executor; they share the repository's budget
                of requests. With 0 each task asks Spark for it.

        Raises:
            BranchNotFoundError: there is no such branch.

        Cost: nothing is stored unless ``prepare`` changes something, and then one unpublished
        snapshot, which is garbage afterwards.
        """
        repo = Repository.open(repository) if isinstance(repository, str) else repository
        root = repo.writable_session(branch).fork()
        if prepare is not None:
            prepare(root.store)
        fork = root.fork() if root.has_uncommitted_changes else root
        requests = _handle(fork).repository.now().config.effective_max_concurrent_requests
        budget = Budget(requests, cores)
        return cls(repo, branch, _native(root).to_bytes(), pickle.dumps(fork), budget)

    def fork(self) -> ForkSession:
        """Return a fork to write in; in a task, or to read what tasks will see."""
        fork: ForkSession = pickle.loads(self._fork)  # noqa: S301 -- made by ourselves
        handle = _handle(fork)
        source = handle.repository.source.changed(self._budget.of_task(), None)
        return ForkSession(SessionHandle(shared_handle(source), handle.fork))

    @staticmethod
    def changes(fork: ForkSession) -> bytes:
        """Return what was written in a fork, without where the repository is and any secret."""
        return fork._session.fork_bytes()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    @property
    def base_id(self) -> str:
        """The snapshot that the write began at."""
        return str(AsyncForkSession.from_bytes(self._root).snapshot_id)

    def adopt(self, changes: bytes) -> bytes:
        """Return what was written in a fork of another write, as if it were one of this.

        Both must have begun at one snapshot, and have prepared the same.
        """
        mine, theirs = _native(self.fork()), decode_fork(changes)
        return encode_fork(ForkState(mine.session_id, mine.snapshot_id, theirs.changes))

    def is_done(self, transaction: Transaction | None) -> bool:
        """Return whether the branch holds a transaction already."""
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
        """Publish what all tasks wrote, at once.

        Args:
            answers: one for each task.
            tasks: how many there were.
            message: says what was done, for people.
            metadata: properties of the snapshot.
            transaction: names the write; see :class:`~icechunk_async.spark.Transaction`.
            rebase_with: decides conflicts with commits that came since :meth:`begin`; without
                it any such commit is a conflict.
            rebase_tries: how often at most.
            finish: does what can be done only now, in the same commit.
            unchanged: paths of arrays that what was written was computed from: commits that
                touched one of them since :meth:`begin` are a conflict that no solver decides.

        Raises:
            IncompleteWriteError: not every task answered exactly once.
            SessionStateError: two tasks wrote one chunk.
            ConflictError: another writer was first.

        After an error nothing is visible, except where the reply of the last request was lost:
        with a transaction, commit again to find out.
        """
        check_answers(answers, tasks)
        session = self.repository.writable_session(self.branch)
        root = AsyncForkSession.from_bytes(self._root)
        forks = [
            AsyncForkSession.from_bytes(it.changes) for it in sorted(answers, key=lambda a: a.task)
        ]
        run(session._session.ask(lambda it: it.resume(root, *forks)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
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
    """Run tasks as a Spark job, each in a fork, and answer what they wrote.

    Args:
        spark: a session, also one of Spark Connect.
        write: what the tasks take part in.
        tasks: how many; each is a partition.
        work: gets a fork and the number of the task. It may run several times for one task
            (Spark tries again, and may run slow tasks twice); one answer counts, and what the
            others stored is garbage.
    """
    if tasks < 1:
        raise InvalidInputError(f"A job needs at least one task, not {tasks}.")

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                fork = write.fork()
                work(fork, task)
                answer = {"task": [task], "changes": [CooperativeWrite.changes(fork)]}
                yield pa.RecordBatch.from_pydict(answer)

    rows = spark.range(0, tasks, 1, tasks).mapInArrow(each, _ANSWERS).collect()
    return [Answer(int(row["task"]), bytes(row["changes"])) for row in rows]


def total_cores(spark: SparkSession) -> int:
    """Return how many tasks run at a time in all, as far as the session tells."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # noqa: BLE001 -- Spark Connect has none, and says so with errors of its own
        return int(spark.conf.get("spark.default.parallelism", "8") or 8)


def _handle(fork: ForkSession) -> SessionHandle:
    return fork._session  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def _native(fork: ForkSession) -> AsyncForkSession:
    return _handle(fork).fork

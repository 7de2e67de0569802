"""Publish the session of a write: once if a transaction names it, and only on unchanged inputs.

The engine commits a transaction exactly once. What is added here is a check that it does not have:
a rebase looks for conflicts with what a session wrote, not with what that was computed from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.backoff import Backoff
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.errors import ConflictError, NothingToCommitError, RebaseFailedError
from icechunk_async.spark.shared import SharedRepository, commit_once
from icechunk_async.sync.bridge.portal import run

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from icechunk_async.sync import Repository, Session
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = ["Published", "Transaction", "is_published", "publish", "published_version"]

_RACE: Final = Backoff(initial_ms=10, max_ms=2000, immediate=1)


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
    """Return the newest version that an application wrote to a branch, or None.

    Cost: one request with format version 2; one for each commit back to the nearest one of this
    library with version 1.
    """
    return SharedRepository.of(repository).newest_versions(branch).get(app_id)


def is_published(repository: Repository, branch: str, transaction: Transaction | None) -> bool:
    """Return whether a branch holds a transaction, or a later one of its application."""
    if transaction is None:
        return False
    newest = published_version(repository, branch, transaction.app_id)
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
        if rebase_with is None or not unchanged:
            snapshot_id, made = commit_once(
                session,
                message,
                metadata,
                transaction,
                rebase_with=rebase_with,
                rebase_tries=rebase_tries,
            )
            return Published(snapshot_id, committed=made)
        return _publish_on_unchanged(
            repository,
            session,
            (message, metadata, transaction),
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            unchanged=unchanged,
        )
    except NothingToCommitError:
        return Published(repository.lookup_branch(branch), committed=False)


def _publish_on_unchanged(
    repository: Repository,
    session: Session,
    commit: tuple[str, Mapping[str, Any] | None, Transaction | None],
    *,
    rebase_with: ConflictSolver,
    rebase_tries: int,
    unchanged: Collection[str],
) -> Published:
    """Commit a session, looking at the inputs after each rebase.

    A commit without a solver lands only on the session's base, so nothing can come between the
    look and the commit.
    """
    branch, base = str(session.branch), session.snapshot_id
    for attempt in range(rebase_tries + 1):
        try:
            snapshot_id, made = commit_once(session, *commit)
            return Published(snapshot_id, committed=made)
        except ConflictError:
            if attempt == rebase_tries:
                raise
        run(_RACE.wait(attempt + 1))
        try:
            session.rebase(rebase_with)
            _check_unchanged(repository, branch, base, session.snapshot_id, unchanged)
        except (ConflictError, RebaseFailedError):
            # The commit in the way may be another try of the same transaction.
            if is_published(repository, branch, commit[2]):
                return Published(repository.lookup_branch(branch), committed=False)
            raise
    raise AssertionError("the last try returns or raises")


def _check_unchanged(
    repository: Repository, branch: str, base: str, tip: str, paths: Collection[str]
) -> None:
    """Raise ConflictError if a commit after `base` up to `tip` touched one of some arrays."""
    if base == tip:
        return
    diff = repository.diff(from_snapshot_id=base, to_snapshot_id=tip)
    touched = {*diff.new_arrays, *diff.deleted_arrays, *diff.updated_arrays, *diff.updated_chunks}
    for name in paths:
        path = f"/{name.strip('/')}"
        moved = any(
            path == end or path.startswith(f"{end}/") for move in diff.moved_nodes for end in move
        )
        if moved or path in touched:
            raise ConflictError(
                f"Others committed to {branch!r} and changed {path!r}, an input of this write. "
                "Nothing was published; write again.",
                branch=branch,
                expected_parent=base,
                actual_parent=tip,
            )

"""Publish the session of a write: once if a transaction names it, and only on unchanged inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.errors import NothingToCommitError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from icechunk_async.sync import Repository, Session
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = ["Published", "Transaction", "is_published", "publish", "published_version"]


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
    except NothingToCommitError:
        return Published(repository.lookup_branch(branch), committed=False)
    return Published(snapshot_id, committed=not session.already_committed)

"""Writing once: which batches of which application a branch holds already.

Every commit of this library carries the newest version of every application that ever wrote to
its branch with one. So the tip tells, also after history expired; where another library has
committed since, the nearest commit of this one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async._runtime.backoff import Backoff
from icechunk_async.errors import ConflictError, InvalidInputError
from icechunk_async.sync.portal import run

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from icechunk_async.sync import Repository, Session
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.snapshots import SnapshotInfo

__all__ = [
    "Published",
    "Transaction",
    "is_published",
    "newest_versions",
    "publish",
    "published_version",
]

WRITTEN_ONCE: Final = "spark-transactions"
_OWN: Final = "spark-transaction"
_RACE: Final = Backoff(initial_ms=10, max_ms=2000, immediate=1)


@dataclass(frozen=True, slots=True)
class Transaction:
    """Names a write, so that doing it again changes nothing.

    Attributes:
        app_id: who writes; the same whenever the same work is tried again.
        version: counts up from one write of this application to the next.
    """

    app_id: str
    version: int

    def __post_init__(self) -> None:
        """Refuse what names nothing."""
        if not self.app_id or self.version < 0:
            raise InvalidInputError(
                f"A transaction needs the name of an application and a version from 0, not "
                f"{self.app_id!r} and {self.version}."
            )


@dataclass(frozen=True, slots=True)
class Published:
    """How a write ended.

    Attributes:
        snapshot_id: the snapshot that holds it; of a write that was done before, the tip.
        committed: whether this call is known to have made that snapshot.
    """

    snapshot_id: str
    committed: bool


def newest_versions(ancestry: Iterable[SnapshotInfo]) -> dict[str, int]:
    """Return the newest version of every application, given snapshots from the tip back."""
    for info in ancestry:
        found = info.metadata.get(WRITTEN_ONCE)
        if isinstance(found, dict):
            versions = cast("dict[str, int]", found)
            return {app_id: int(version) for app_id, version in versions.items()}
    return {}


def published_version(repository: Repository, branch: str, app_id: str) -> int | None:
    """Return the newest version that an application wrote to a branch; None if it wrote none.

    Cost: with format version 2 one request; with version 1 one for each commit back to the
    newest one of this package.
    """
    return newest_versions(repository.ancestry(branch=branch)).get(app_id)


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
    """Commit a session once.

    Args:
        repository: the one that the session is of.
        session: is writable.
        message: says what was done, for people.
        metadata: properties of the snapshot.
        transaction: names the write; if the branch holds it, or a later one of its application,
            nothing is committed.
        rebase_with: where another writer was first, replay the changes on top and try again,
            letting this solver decide conflicts. Without it such a race is lost.
        rebase_tries: how often at most.
        unchanged: paths of arrays that what is written was computed from: commits that touched
            one of them since the session began are a conflict that no solver decides.

    Raises:
        ConflictError: another writer was first; nothing was published.
        RebaseFailedError: the solver did not settle a conflict; likewise.

    An interrupt may come after the commit was published: with a transaction, call again to find
    out.
    """
    branch, base = session.branch, session.snapshot_id
    assert branch is not None  # it is writable
    for attempt in range(rebase_tries + 1):
        tip = repository.lookup_branch(branch)
        versions = newest_versions(repository.ancestry(snapshot_id=tip))
        if transaction is not None:
            if versions.get(transaction.app_id, -1) >= transaction.version:
                return Published(tip, committed=False)
            versions[transaction.app_id] = transaction.version
        elif not session.has_uncommitted_changes:
            return Published(tip, committed=False)
        try:
            # Without rebasing: it lands only on the tip whose versions it carries on.
            return Published(
                session.commit(
                    message,
                    _properties(metadata, versions, transaction),
                    allow_empty=transaction is not None,
                ),
                committed=True,
            )
        except ConflictError:
            if is_published(repository, branch, transaction):
                # The winner did the same: another try of this one, or this one itself.
                return Published(repository.lookup_branch(branch), committed=False)
            if rebase_with is None or attempt == rebase_tries:
                raise
        run(_RACE.wait(attempt + 1))
        session.rebase(rebase_with)
        # The session's base is the only snapshot that the next try can land on.
        _check_unchanged(repository, branch, base, session.snapshot_id, unchanged)
    raise AssertionError("the last try returns or raises")


def _check_unchanged(
    repository: Repository, branch: str, base: str, tip: str, paths: Collection[str]
) -> None:
    """Raise ConflictError if commits after a snapshot up to another touched one of some arrays."""
    if not paths or base == tip:
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
                f"Others committed to {branch!r} and changed {path!r}, which what is written was "
                "computed from. Nothing was published; write again.",
                branch=branch,
                expected_parent=base,
                actual_parent=tip,
            )


def _properties(
    metadata: Mapping[str, Any] | None, versions: dict[str, int], transaction: Transaction | None
) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if transaction is not None:
        own[_OWN] = {"app-id": transaction.app_id, "version": transaction.version}
    carried: dict[str, Any] = {WRITTEN_ONCE: versions} if versions else {}
    return {**(metadata or {}), **carried, **own}

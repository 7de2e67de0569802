"""What the engine asks of a history: refs, ancestry, and making a snapshot the tip of a branch.

``Repository`` and ``Session`` know histories only through this protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from icechunk_async.errors import UnsupportedBySpecError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async.engine.history.repo_info.edits import Edit
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot

__all__ = [
    "Amend",
    "Commit",
    "Detach",
    "Expiration",
    "History",
    "Kept",
    "ParentOf",
    "Publication",
    "StoredConfig",
    "unsupported_by_spec_1",
]


@dataclass(frozen=True, slots=True)
class Commit:
    """Put a snapshot on top of a branch whose tip is ``parent_id``."""

    branch: str
    parent_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """Other snapshots that must be known still: some of what the new one needs is theirs."""


@dataclass(frozen=True, slots=True)
class Amend:
    """Put a snapshot in the place of the tip of a branch, ``replaced_id``."""

    branch: str
    replaced_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """See ``Commit``."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Make a snapshot known without any branch; its parent is ``parent_id``."""

    parent_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """See ``Commit``."""


type Publication = Commit | Amend | Detach
type ParentOf = Callable[[SnapshotId], Awaitable[SnapshotId | None]]
"""Reads a snapshot's file and answers its parent, for histories that keep parents there."""


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The persisted configuration; what it was read from, so that a change can be noticed."""

    config: RepositoryConfig | None
    state: object = None


@dataclass(frozen=True, slots=True)
class Expiration:
    """Which snapshots leave the history, and whether refs to them go as well."""

    older_than_us: int
    """By the writers' clocks; microseconds since the epoch."""
    delete_branches: bool = False
    delete_tags: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What garbage collection must keep; all else that is old can be deleted."""

    snapshots: frozenset[SnapshotId]
    """These, and whatever they need."""
    logs: frozenset[SnapshotId]
    """The snapshots whose transaction logs are kept."""


class History(Protocol):
    """Refs and ancestry of one repository.

    Methods that change something raise ``OutcomeUnknownError`` where the storage gave no answer
    and reading back did not tell either; otherwise an error means that nothing changed.
    """

    @property
    def spec_version(self) -> int:
        """The version that new files are written to."""
        ...

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Return every branch and its tip, as of now."""
        ...

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Return every tag that was not deleted, as of now."""
        ...

    async def branch_tip(self, name: str) -> SnapshotId:
        """Return the tip of a branch, as of now.

        Raises:
            BranchNotFoundError: there is no such branch.
        """
        ...

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        ...

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch or tag was when it was last read; None if never.

        Worth trying before the answer of :meth:`branch_tip` is there, not instead of it.
        """
        ...

    async def check_writable(self) -> None:
        """Refuse if the repository's status forbids changes, as last seen.

        Raises:
            RepositoryReadOnlyError: it does.
        """
        ...

    async def check_moves_allowed(self) -> None:
        """Refuse if nodes cannot be moved in this repository.

        Raises:
            UnsupportedBySpecError: this format version cannot express it.
            FeatureDisabledError: the feature flag ``move_node`` is off.
        """
        ...

    async def check_feature(self, name: str) -> None:
        """Refuse if a feature flag of the repository forbids an operation, as last seen.

        Raises:
            FeatureDisabledError: it does.
        """
        ...

    async def repo_info(self) -> RepoInfo:
        """Return everything about the repository that can change, as of now.

        Raises:
            UnsupportedBySpecError: this history keeps it in no such form.
        """
        ...

    async def change(self, edit: Edit, *, despite_status: bool = False) -> None:
        """Change the repo info as ``edit`` says, in one atomic step.

        Args:
            edit: takes the newest repo info and answers the next, or refuses; applied again
                where somebody else was first.
            despite_status: change it even while the repository's status forbids changes.

        Raises:
            RepositoryReadOnlyError: the status forbids changes.
            UnsupportedBySpecError: this history has no repo info.
        """
        ...

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch.

        Raises:
            BranchExistsError, SnapshotNotFoundError, InvalidRefNameError: nothing changed.
        """
        ...

    async def reset_branch(
        self, name: str, snapshot_id: SnapshotId, *, expected: SnapshotId | None = None
    ) -> None:
        """Move a branch to another snapshot; only from ``expected`` where that is given.

        Raises:
            BranchNotFoundError, SnapshotNotFoundError, ConflictError: nothing changed.
        """
        ...

    async def delete_branch(self, name: str) -> None:
        """Delete a branch; its snapshots stay until they are collected.

        Raises:
            BranchNotFoundError, InvalidRefNameError: ``main`` cannot be deleted.
        """
        ...

    async def create_tag(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a tag.

        Raises:
            TagExistsError, TagDeletedError, SnapshotNotFoundError, InvalidRefNameError: nothing
                changed.
        """
        ...

    async def delete_tag(self, name: str) -> None:
        """Delete a tag for good: its name cannot be used again.

        Raises:
            TagNotFoundError: there is no such tag.
        """
        ...

    async def snapshot_info(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return a snapshot's place in history.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        ...

    def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        ...

    async def publish(self, publication: Publication, store: Callable[[], Awaitable[None]]) -> None:
        """Store a snapshot's files, then make it known in one atomic step.

        Args:
            publication: what to make known.
            store: stores every file that the snapshot needs; awaited once, together with
                whatever this history can prepare meanwhile.

        Raises:
            ConflictError: the branch is not where the publication expects it.
            BranchNotFoundError: the branch is gone.
            SnapshotNotFoundError: the parent, or another source of what the snapshot needs, has
                expired or been collected.

        Cost: two requests that follow one another, where nobody else writes.

        Cancellation: the snapshot may have been published.
        """
        ...

    def operations(self) -> AsyncIterator[Update]:
        """Iterate over the operations log, newest first.

        Raises:
            UnsupportedBySpecError: this way of publishing keeps none.
        """
        ...

    async def load_config(self) -> StoredConfig:
        """Read the persisted configuration."""
        ...

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Persist a configuration.

        Raises:
            ConflictError: somebody changed it since ``replacing`` was loaded.
        """
        ...

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots from the history; their files stay until they are collected.

        Args:
            rule: which.
            dry_run: only find out.

        Returns:
            The snapshots that are dropped.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes.

        Cancellation: all of it may have happened; under spec 1, part of it.
        """
        ...

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to, as of now."""
        ...

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, dry_run: bool
    ) -> Kept:
        """Make snapshots unknown that are old and that no branch and no tag leads to.

        Under spec 2 nothing can come to refer to them after this. Under spec 1 nothing can
        prevent that; this only answers what refs lead to now.

        Args:
            old: snapshots whose files are old enough to be deleted, listed before this call.
            parent_of: see :data:`ParentOf`.
            dry_run: change nothing, and answer what would be kept.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes.

        Cancellation: it may have happened. What is unknown and still there is garbage.
        """
        ...


def unsupported_by_spec_1(what: str) -> UnsupportedBySpecError:
    """Return the error for what only format version 2 can express."""
    return UnsupportedBySpecError(
        f"A repository of format version 1 has no {what}. Format version 2 has: migrate the "
        "repository with icechunk_async.engine.upkeep.migrate.upgrade.",
        what=what,
    )

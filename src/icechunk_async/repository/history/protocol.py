"""What the engine asks of a history: refs, ancestry, and making a snapshot the tip of a branch.

``Repository`` and ``Session`` know histories only through this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.updates import Update

__all__ = ["Amend", "Commit", "Detach", "History", "Publication", "StoredConfig"]


@dataclass(frozen=True, slots=True)
class Commit:
    """Put a snapshot on top of a branch whose tip is ``parent_id``."""

    branch: str
    parent_id: SnapshotId
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Amend:
    """Put a snapshot in the place of the tip of a branch, ``replaced_id``."""

    branch: str
    replaced_id: SnapshotId
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Detach:
    """Make a snapshot known without any branch; its parent is ``parent_id``."""

    parent_id: SnapshotId
    snapshot: Snapshot


type Publication = Commit | Amend | Detach


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The persisted configuration; what it was read from, so that a change can be noticed."""

    config: RepositoryConfig | None
    state: object = None


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
        """Answer every branch and its tip, as of now."""
        ...

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Answer every tag that was not deleted, as of now."""
        ...

    async def branch_tip(self, name: str) -> SnapshotId:
        """Answer the tip of a branch, as of now.

        Raises:
            BranchNotFoundError: there is no such branch.
        """
        ...

    async def tag_target(self, name: str) -> SnapshotId:
        """Answer the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        ...

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Answer where a branch or tag was when it was last read; None if never.

        Worth trying before the answer of :meth:`branch_tip` is there, not instead of it.
        """
        ...

    async def check_writable(self) -> None:
        """Refuse if the repository's status forbids changes, as last seen.

        Raises:
            RepositoryReadOnlyError: it does.
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
        """Answer a snapshot's place in history.

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

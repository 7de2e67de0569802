"""The protocol of a way of publishing: references, ancestry, and publishing snapshots.

The rest of the library knows the ways only through `History` and `RepositoryState`, so that it
never asks which one it has: what a way lacks is in its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal, Protocol

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import UnsupportedBySpecError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from icechunk_async.engine.history.collections import Guard
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import RepoStatus, Update
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
    from icechunk_async.format.repo_info.snapshot_columns import Page
    from icechunk_async.format.snapshot import Snapshot

__all__ = [
    "MAIN",
    "MOVE_NODE",
    "SAFE_CREATIONS",
    "SAFE_UPDATES",
    "Amend",
    "Audit",
    "Capabilities",
    "Commit",
    "Detach",
    "Expiration",
    "Fault",
    "Feature",
    "FeatureFlag",
    "History",
    "Kept",
    "Migration",
    "ParentOf",
    "Publication",
    "RepositoryState",
    "StoredConfig",
    "check_moves_allowed",
    "check_online",
    "check_unprotected",
    "state_for",
]

MAIN: Final = "main"
"""The branch that every repository has."""
# Names of fields of `Capabilities` of a storage: `check_safe` says which of them is missing.
SAFE_CREATIONS: Final = ("writable", "conditional_create")
"""The promises of a storage that changes need where references are only ever created."""
SAFE_UPDATES: Final = (*SAFE_CREATIONS, "conditional_update")
"""The promises of a storage that changes need where references are replaced."""
MOVE_NODE: Final = "move_node"
"""The feature flag of `Repository.rearrange_session`."""


type Feature = Literal[
    "amend",
    "move_nodes",
    "metadata",
    "status",
    "feature_flags",
    "operations_log",
    "repo_info_file",
    "tag_deletion",
    "expiration",
    "upkeep",
    "sums",
    "leases",
    "proposals",
    "protection",
]

_NOUNS: Final[dict[Feature, str]] = {
    "amend": "amendments of commits",
    "move_nodes": "moves of nodes",
    "metadata": "metadata for the repository itself",
    "status": "repository status",
    "feature_flags": "feature flags",
    "operations_log": "operations log",
    "repo_info_file": "repo info file",
    "tag_deletion": "deletion of tags",
    "expiration": "expiration of snapshots",
    "upkeep": "upkeep of its files (collection, compaction, verification, statistics, copies)",
    "sums": "checksums of chunks",
    "leases": "leases of sessions",
    "proposals": "proposals",
    "protection": "protection of branches",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of repositories that are published in one way.

    Every way has branches, tags, ancestry, a stored configuration and commits; these are extras.
    """

    way: str
    """Names the way in messages, such as ``format version 1``."""
    instead: str = ""
    """A sentence for messages: what to do to get what is missing."""
    amend: bool = False
    """A snapshot can take the place of a branch's tip, see `Session.amend`."""
    move_nodes: bool = False
    """A commit can record that nodes moved, see `Repository.rearrange_session`."""
    metadata: bool = False
    """The repository has properties besides those of its commits."""
    status: bool = False
    """The repository can be closed to changes, for all writers at once."""
    feature_flags: bool = False
    """Single operations can be forbidden to all writers."""
    operations_log: bool = False
    """The repository remembers what was done to it besides commits."""
    repo_info_file: bool = False
    """Refs, ancestry and settings are in one file, see `Repository.inspect_repo_info`."""
    tag_deletion: bool = False
    """Tags can be deleted."""
    expiration: bool = False
    """Old snapshots can be dropped from the history, see `Repository.expire_snapshots`."""
    upkeep: bool = False
    """Files can be collected, compacted, verified, measured and copied."""
    sums: bool = False
    """Checksums of chunks can be kept, see `Repository.save_sums`."""
    leases: bool = False
    """Sessions can have leases, see `Repository.writable_session`."""

    proposals: bool = False
    """Changes can be proposed, checked, and accepted, see `Repository.propose`."""
    protection: bool = False
    """Branches can be closed to all changes but proposals, see `Repository.protect_branch`."""

    def require(self, feature: Feature) -> None:
        """Raise `UnsupportedBySpecError` if this way lacks a feature.

        Raises:
            UnsupportedBySpecError: it says what is missing and what to do instead.
        """
        if not getattr(self, feature):
            what = _NOUNS[feature]
            raise UnsupportedBySpecError(
                f"A repository of {self.way} has no {what}. {self.instead}".rstrip(), what=what
            )


@dataclass(frozen=True, slots=True)
class Commit:
    """Put a snapshot on top of a branch whose tip is ``parent_id``."""

    branch: str
    parent_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """Other snapshots that must still exist, because the new one refers to chunks of theirs."""


@dataclass(frozen=True, slots=True)
class Amend:
    """Replace the tip of a branch, ``replaced_id``, by a snapshot."""

    branch: str
    replaced_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """See ``Commit``."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Publish a snapshot that no branch holds; its parent is ``parent_id``."""

    parent_id: SnapshotId
    snapshot: Snapshot
    sources: frozenset[SnapshotId] = frozenset()
    """See ``Commit``."""


type Publication = Commit | Amend | Detach
type ParentOf = Callable[[SnapshotId], Awaitable[SnapshotId | None]]
"""Reads a snapshot's file and returns its parent, for ways that keep parents there only."""


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The stored configuration, and what it was read from, so that a change can be noticed."""

    config: RepositoryConfig | None
    state: object = None


@dataclass(frozen=True, slots=True)
class Expiration:
    """Which snapshots leave the history, and whether refs to them are deleted."""

    older_than_us: int
    """By the writers' clocks; microseconds since the epoch."""
    delete_branches: bool = False
    delete_tags: bool = False
    keep: frozenset[SnapshotId] = frozenset()
    """Stay whatever their age, and stay in the ancestry of what builds on them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The files that garbage collection must keep; other old files can be deleted."""

    snapshots: frozenset[SnapshotId]
    """These, and all files that they refer to."""
    logs: frozenset[SnapshotId]
    """The snapshots whose transaction logs are kept."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An object of references or repository state that is not as it must be."""

    kind: str
    """``repo``, ``ref``, ``config`` or ``operations log``."""
    key: str
    problem: str
    """``missing``, ``unreadable`` or ``disagrees``."""
    detail: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The contents of all references, read anew, however damaged some of them are."""

    refs: Mapping[str, SnapshotId]
    """By ``branch.`` or ``tag.`` and the name; without those that cannot be read."""
    infos: Mapping[SnapshotId, SnapshotInfo] | None = None
    """The place in history of each snapshot; None if only the snapshots' own files tell."""
    faults: tuple[Fault, ...] = ()
    unread: tuple[str, ...] = ()
    """Sentences about parts that were not looked at."""


@dataclass(frozen=True, slots=True)
class FeatureFlag:
    """Whether a repository allows an operation."""

    id: int
    name: str
    default_enabled: bool
    setting: bool | None
    """None while the flag is not set, so that the default counts."""

    @property
    def enabled(self) -> bool:
        """Whether the operation is allowed."""
        return self.default_enabled if self.setting is None else self.setting


class RepositoryState(Protocol):
    """Knowledge about a repository besides references and ancestry, if its way keeps any.

    Methods that change something do so in one atomic step, and raise as those of `History` do;
    besides, ``RepositoryReadOnlyError`` while the repository's status forbids changes.
    """

    async def info(self) -> RepoInfo:
        """Return the whole state, as of now."""
        ...

    def seen(self) -> RepoInfo:
        """Return the newest state that was read or written; from any thread."""
        ...

    def known_now(self) -> RepoInfo | None:
        """Return the whole state as of now if that needs no waiting; from any thread."""
        ...

    async def replace_metadata(self, metadata: Mapping[str, JSON]) -> None:
        """Replace the repository's metadata.

        Raises:
            InvalidInputError: a value is not JSON; nothing changed.
        """
        ...

    async def merge_metadata(
        self, items_for: Callable[[RepoInfo], Mapping[str, JSON]]
    ) -> dict[str, JSON]:
        """Lay items over the repository's metadata and return all of it.

        Args:
            items_for: returns the items for the newest state; called again after a lost race.
        """
        ...

    async def set_status(self, status: RepoStatus) -> None:
        """Replace the repository's status, even if it forbids changes."""
        ...

    def check_online(self) -> None:
        """Refuse changes while the status, as last seen, forbids them.

        Raises:
            RepositoryReadOnlyError: it does.
        """
        ...

    def check_unprotected(self, branch: str) -> None:
        """Refuse a direct change of a branch that, as last seen, changes only by proposals.

        Raises:
            BranchProtectedError: it does.
        """
        ...

    async def feature_flags(self) -> list[FeatureFlag]:
        """Return every known feature flag, as of now."""
        ...

    async def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on (True), off (False), or back to its default (None).

        Raises:
            InvalidInputError: there is no such flag; nothing changed.
        """
        ...

    async def check_feature(self, name: str) -> None:
        """Refuse an operation whose feature flag is off now.

        Raises:
            FeatureDisabledError: it is.
        """
        ...

    def operations(self) -> AsyncIterator[Update]:
        """Iterate over the operations log, newest first."""
        ...


class Migration(Protocol):
    """The migration of a repository of a layout before version 1."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Beginnings of all keys of the layout."""
        ...

    async def is_frozen(self) -> bool:
        """Return whether `freeze` was called and not undone."""
        ...

    async def freeze(self) -> None:
        """Let no branch move any more; those that do not move already stay.

        A writer that moves a branch at the same time either comes before or is refused.
        """
        ...

    async def thaw(self) -> None:
        """Undo `freeze`."""
        ...


class History(Protocol):
    """References and ancestry of one repository, and publishing.

    Methods that change something raise ``OutcomeUnknownError`` if the storage did not reply and
    reading back did not settle it; any other error means that nothing changed.
    """

    @property
    def layout(self) -> str:
        """The name of the whole layout, such as ``format-2``."""
        ...

    @property
    def spec_version(self) -> int:
        """The version of the format that new files are written in; 0 before version 1."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The features of this way of publishing beyond this protocol."""
        ...

    @property
    def storage_needs(self) -> Sequence[str]:
        """The promises of the storage that changes need; names of its capabilities."""
        ...

    @property
    def state(self) -> RepositoryState | None:
        """The state besides references; None if this way keeps only those. See `state_for`."""
        ...

    @property
    def migration(self) -> Migration | None:
        """How it is migrated, if its layout is older than format version 1."""
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

    async def tip_at(self, name: str, moment_us: int) -> SnapshotId:
        """Return where a branch was at a time, in microseconds since the epoch.

        Format 1 knows only the ancestry that a branch has now. Format 2 has a log, and undoes what
        happened to the branch since. It goes by the times that snapshots have, and for other
        changes by that of the log, all from the clocks of the writers. For a time before a branch
        was created, the history counts of what it was created at.

        Raises:
            BranchNotFoundError: there is no such branch now.
            SnapshotNotFoundError: it had no snapshot yet, or one that was dropped since.

        Cost: in format 2 a conditional request, and one for each
        ``num_updates_per_repo_info_file`` changes of the repository since then.
        """
        ...

    async def tag_target(self, name: str) -> SnapshotId:
        """Return the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        ...

    def last_seen(self, branch: str | None, tag: str | None) -> SnapshotId | None:
        """Return where a branch or tag was when it was last read; None if it never was.

        A guess to work with while `branch_tip` is on its way, not a replacement for it.
        """
        ...

    async def create_branch(self, name: str, snapshot_id: SnapshotId) -> None:
        """Create a branch.

        Raises:
            BranchExistsError, SnapshotNotFoundError, InvalidRefNameError: nothing changed.
        """
        ...

    async def reset_branch(
        self,
        name: str,
        snapshot_id: SnapshotId,
        *,
        expected: SnapshotId | None = None,
        approved: frozenset[str] | None = None,
    ) -> None:
        """Move a branch to another snapshot, only from ``expected`` if that is given.

        ``approved`` are the checks that passed on the snapshot, if it is that of a proposal.

        Raises:
            BranchNotFoundError, SnapshotNotFoundError, ConflictError: nothing changed.
            BranchProtectedError: the branch changes only by proposals, or asks for checks that are
                not among these; nothing changed.
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

    def known_snapshot(self, snapshot_id: SnapshotId) -> SnapshotInfo | None:
        """Return a snapshot's place in history if it is in memory; from any thread."""
        ...

    def ancestry(self, snapshot_id: SnapshotId) -> AsyncIterator[SnapshotInfo]:
        """Iterate from a snapshot to its root.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        ...

    def ancestry_pages(self, snapshot_id: SnapshotId) -> AsyncIterator[Page]:
        """Iterate as `ancestry`, several at a time, where they are at hand."""
        ...

    def log_position(self) -> int:
        """Return the place in the operations log that was seen last; 0 if there is no log."""
        ...

    async def publish(
        self, publication: Publication, store: Callable[[], Awaitable[None]], guard: Guard
    ) -> None:
        """Store a snapshot's files, then make the snapshot known in one atomic step.

        Args:
            publication: what to make known.
            store: stores every file that the snapshot needs. It is awaited once, concurrently
                with what this way can prepare.
            guard: asked about garbage collections that ran since it looked last, before each
                try. In format 2 none can go unnoticed between that and the landing of the try.

        Raises:
            ChunksCollectedError, DraftOutdatedError: as ``Guard.admit``; nothing was published.
            ConflictError: the branch is not where the publication expects it.
            BranchNotFoundError: the branch is gone.
            SnapshotNotFoundError: the parent, or a source of chunks, expired or was collected.

        Cost: two requests one after the other, if no other writer interferes.

        Cancellation: the snapshot may have been published.
        """
        ...

    async def load_config(self) -> StoredConfig:
        """Read the stored configuration."""
        ...

    async def save_config(self, config: RepositoryConfig, replacing: StoredConfig) -> None:
        """Store a configuration.

        Raises:
            ConflictError: the stored one changed since ``replacing`` was loaded.
        """
        ...

    async def expire(self, rule: Expiration, *, dry_run: bool) -> frozenset[SnapshotId]:
        """Drop old snapshots from the history; their files stay until they are collected.

        Args:
            rule: which ones.
            dry_run: change nothing.

        Returns:
            The snapshots that are dropped.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes.

        Cancellation: all of it may have happened; in format 1, part of it.
        """
        ...

    async def audit(self) -> Audit:
        """Read all references and the repository's state anew, and report what is damaged.

        Raises:
            StorageError: the storage did not reply; damage is no error here.
        """
        ...

    async def reachable(self, parent_of: ParentOf) -> frozenset[SnapshotId]:
        """Return every snapshot that a branch or tag leads to, as of now."""
        ...

    async def release(
        self, old: AbstractSet[SnapshotId], parent_of: ParentOf, *, cutoff: datetime | None
    ) -> Kept:
        """Drop snapshots from the history that are old and that no branch and no tag leads to.

        In format 2 nothing can refer to them afterwards. Format 1 has nothing to drop them from
        and cannot prevent new refs to them: there this only finds out what refs lead to now.

        Args:
            old: snapshots whose files are old enough to be deleted, listed before this call.
            parent_of: see `ParentOf`.
            cutoff: files that were written before will be deleted afterwards, which is noted
                for sessions that are open. None: change nothing, and return what would be kept.

        Raises:
            RepositoryReadOnlyError: the repository's status forbids changes.

        Cancellation: it may have happened. A dropped snapshot whose files still exist is garbage.
        """
        ...


def state_for(history: History, feature: Feature) -> RepositoryState:
    """Return the repository's state, for an operation that needs a feature.

    Raises:
        UnsupportedBySpecError: the repository's way of publishing lacks the feature.
    """
    history.capabilities.require(feature)
    assert history.state is not None, f"{history.capabilities.way} promises {feature} without state"
    return history.state


def check_online(history: History) -> None:
    """Refuse changes while the repository's status, as last seen, forbids them.

    Raises:
        RepositoryReadOnlyError: it does.
    """
    if history.state is not None:
        history.state.check_online()


def check_unprotected(history: History, branch: str) -> None:
    """Refuse a direct change of a branch that, as last seen, changes only by proposals.

    Raises:
        BranchProtectedError: it does.
    """
    if history.state is not None:
        history.state.check_unprotected(branch)


async def check_moves_allowed(history: History) -> None:
    """Refuse to move nodes if the repository cannot express it, or forbids it now.

    Raises:
        UnsupportedBySpecError: its way of publishing cannot express moves.
        FeatureDisabledError: the feature flag ``move_node`` is off.
    """
    await state_for(history, "move_nodes").check_feature(MOVE_NODE)

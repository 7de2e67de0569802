"""Changes of a repo info as values: each takes one and returns the next, or refuses (spec 2).

The caller reads the repo info, applies one of these, and writes the result if nobody else wrote
meanwhile; else it reads and applies again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from icechunk_async.engine.history.protocol import Amend, Commit, Detach
from icechunk_async.errors import (
    BranchExistsError,
    BranchNotFoundError,
    ConflictError,
    FeatureDisabledError,
    IcechunkError,
    InvalidInputError,
    InvalidRefNameError,
    NotFoundError,
    RepositoryReadOnlyError,
    SessionStateError,
    SnapshotNotFoundError,
    TagDeletedError,
    TagExistsError,
    TagNotFoundError,
)
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.operations_log import (
    Availability,
    BranchCreated,
    BranchDeleted,
    BranchReset,
    CommitAmended,
    ConfigChanged,
    DetachedSnapshotCreated,
    FeatureFlagChanged,
    MetadataChanged,
    NewCommit,
    RepoStatusChanged,
    TagCreated,
    TagDeleted,
    Update,
    UpdateDetail,
)
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from icechunk_async.engine.history.protocol import Publication
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import RepoStatus
    from icechunk_async.format.snapshot import Snapshot

    type Edit = Callable[[RepoInfo], tuple[RepoInfo, UpdateDetail]]

__all__ = [
    "CREATE_TAG",
    "DELETE_TAG",
    "MAIN",
    "MOVE_NODE",
    "FeatureFlag",
    "change_status",
    "check_feature",
    "check_online",
    "config_edit",
    "create_branch",
    "create_tag",
    "delete_branch",
    "delete_tag",
    "feature_flags",
    "find_branch",
    "find_snapshot",
    "find_tag",
    "merge_metadata",
    "publication_edit",
    "push_update",
    "replace_metadata",
    "reset_branch",
    "set_feature_flag",
    "source_is_gone",
    "unknown_snapshot",
    "with_backup",
]


_SPEC: Final = 2
MOVE_NODE: Final = "move_node"
CREATE_TAG: Final = "create_tag"
DELETE_TAG: Final = "delete_tag"
# Name -> id and default. The official engine reserves the ids 1 and 2.
_FEATURES: Final = {MOVE_NODE: (3, True), CREATE_TAG: (4, True), DELETE_TAG: (5, True)}


@dataclass(frozen=True, slots=True)
class FeatureFlag:
    """Whether a repository allows an operation."""

    id: int
    name: str
    default_enabled: bool
    setting: bool | None
    """None where nobody decided, so that the default counts."""

    @property
    def enabled(self) -> bool:
        """Whether the operation is allowed."""
        return self.default_enabled if self.setting is None else self.setting


def feature_flags(info: RepoInfo) -> list[FeatureFlag]:
    """Return every flag that this library knows; others in the file are carried along."""
    return [_flag(info, name) for name in _FEATURES]


def _flag(info: RepoInfo, name: str) -> FeatureFlag:
    number, default = _FEATURES[name]
    setting = None
    if number in (info.enabled_flags or ()):
        setting = True
    elif number in (info.disabled_flags or ()):
        setting = False
    return FeatureFlag(number, name, default, setting)


def check_feature(info: RepoInfo, name: str) -> None:
    """Refuse an operation whose feature flag is off.

    Raises:
        FeatureDisabledError: it is.
    """
    if not _flag(info, name).enabled:
        raise FeatureDisabledError(
            f"The repository's feature flag {name!r} is off, so this operation is not allowed. "
            f"Whoever runs the repository allows it with set_feature_flag({name!r}, True).",
            feature=name,
            code="feature-flag-disabled",
        )


def set_feature_flag(name: str, setting: bool | None) -> Edit:  # noqa: FBT001
    """Return the edit that switches a feature on (True), off (False), or to its default (None).

    Raises:
        InvalidInputError: there is no such flag.
    """
    if name not in _FEATURES:
        raise InvalidInputError(
            f"There is no feature flag {name!r}. The flags are: {', '.join(_FEATURES)}.",
            code="invalid-feature-flag",
        )
    number, _ = _FEATURES[name]

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        changed = replace(
            info,
            enabled_flags=_listed(info.enabled_flags, number, setting is True),
            disabled_flags=_listed(info.disabled_flags, number, setting is False),
        )
        return changed, FeatureFlagChanged(number, bool(setting), setting is not None)

    return edit


def _listed(flags: tuple[int, ...] | None, number: int, present: bool) -> tuple[int, ...] | None:  # noqa: FBT001
    """Return a list with a flag or without it; one that never held any stays absent."""
    if flags is None and not present:
        return None
    others = {*(flags or ())} - {number}
    return tuple(sorted({*others, number} if present else others))


def replace_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Return the edit that replaces the repository's own metadata."""
    items = tuple(encode_items(metadata, _SPEC))

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        return replace(info, raw_metadata=items), MetadataChanged()

    return edit


def merge_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Return the edit that lays items over the repository's own metadata, name by name."""
    items = encode_items(metadata, _SPEC)

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        merged = {**dict(info.raw_metadata), **dict(items)}
        return replace(info, raw_metadata=tuple(sorted(merged.items()))), MetadataChanged()

    return edit


def change_status(status: RepoStatus) -> Edit:
    """Return the edit that replaces the repository's status."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        return replace(info, status=status), RepoStatusChanged(status)

    return edit


MAIN = "main"


def check_online(info: RepoInfo) -> None:
    """Refuse changes while the repository's status forbids them."""
    if info.status.availability is not Availability.ONLINE:
        why = f": {info.status.reason}" if info.status.reason else ""
        raise RepositoryReadOnlyError(
            f"The repository is {info.status.availability.name.lower()}{why}. Reading works; to "
            "write, wait until its status is set back to online.",
            availability=info.status.availability.name,
        )


def push_update(
    info: RepoInfo, detail: UpdateDetail, now_us: int, backup_name: str, max_updates: int
) -> RepoInfo:
    """Put an entry on top of the operations log.

    The entry that was newest gets the name of the backup in which it still is the newest. When
    the list is full its tail is left to that backup (spec, "Operations log").
    """
    newest, *older = info.updates
    # Clocks of several writers disagree; the log's order does not.
    entry = Update(detail, max(now_us, newest.updated_at + 1))
    updates = [entry, replace(newest, backup_path=backup_name), *older]
    for place in range(max(1, max_updates), len(updates)):
        path = updates[place].backup_path
        if path is not None:
            return replace(info, updates=tuple(updates[:place]), before_updates=path)
    return replace(info, updates=tuple(updates))


def with_backup(update: Update, name: str) -> Update:
    """Return an entry with the name of the backup that it was found in."""
    return replace(update, backup_path=name)


def find_snapshot(info: RepoInfo, snapshot_id: SnapshotId) -> SnapshotInfo:
    """Return a listed snapshot."""
    try:
        return info.snapshots[snapshot_id]
    except KeyError:
        raise unknown_snapshot(snapshot_id) from None


def unknown_snapshot(snapshot_id: SnapshotId) -> SnapshotNotFoundError:
    """Return the error for a snapshot that is not there."""
    return SnapshotNotFoundError(
        f"There is no snapshot {snapshot_id} in this repository. It may have expired; 'ancestry' "
        "lists the snapshots of a branch.",
        snapshot_id=str(snapshot_id),
    )


def find_branch(branches: Mapping[str, SnapshotId], name: str) -> SnapshotId:
    """Return the tip of a branch."""
    try:
        return branches[name]
    except KeyError:
        raise _missing(BranchNotFoundError, "branch", name, branches) from None


def find_tag(tags: Mapping[str, SnapshotId], name: str) -> SnapshotId:
    """Return the snapshot of a tag."""
    try:
        return tags[name]
    except KeyError:
        raise _missing(TagNotFoundError, "tag", name, tags) from None


def _missing(
    cls: type[NotFoundError], what: str, name: str, known: Mapping[str, object]
) -> IcechunkError:
    names = ", ".join(sorted(known)[:20]) or "none"
    return cls(
        f"There is no {what} {name!r}. The repository has: {names}.",
        **{what: name},
    )


def create_branch(name: str, snapshot_id: SnapshotId) -> Edit:
    """Return the edit that adds a branch."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        if name in info.branches:
            raise branch_exists(name)
        find_snapshot(info, snapshot_id)
        return replace(info, branches={**info.branches, name: snapshot_id}), BranchCreated(name)

    return edit


def branch_exists(name: str) -> BranchExistsError:
    """Return the error for a branch's name that is taken."""
    return BranchExistsError(
        f"There is a branch {name!r} already. Choose another name, or reset it.", branch=name
    )


def reset_branch(name: str, snapshot_id: SnapshotId, expected: SnapshotId | None) -> Edit:
    """Return the edit that moves a branch."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        tip = find_branch(info.branches, name)
        if expected is not None and tip != expected:
            raise not_reset(name, expected, tip)
        find_snapshot(info, snapshot_id)
        branches = {**info.branches, name: snapshot_id}
        return replace(info, branches=branches), BranchReset(name, tip)

    return edit


def delete_branch(name: str) -> Edit:
    """Return the edit that removes a branch."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        tip = find_branch(info.branches, name)
        refuse_main(name)
        branches = {branch: it for branch, it in info.branches.items() if branch != name}
        return replace(info, branches=branches), BranchDeleted(name, tip)

    return edit


def refuse_main(name: str) -> None:
    """Refuse to delete the branch that every repository has."""
    if name == MAIN:
        raise InvalidRefNameError(
            f"The branch {MAIN!r} cannot be deleted: every repository has it. You can reset it."
        )


def create_tag(name: str, snapshot_id: SnapshotId) -> Edit:
    """Return the edit that adds a tag."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        check_feature(info, CREATE_TAG)
        if name in info.tags:
            raise tag_exists(name)
        if name in info.deleted_tags:
            raise tag_was_deleted(name)
        find_snapshot(info, snapshot_id)
        return replace(info, tags={**info.tags, name: snapshot_id}), TagCreated(name)

    return edit


def tag_exists(name: str) -> TagExistsError:
    """Return the error for a tag's name that is taken."""
    return TagExistsError(
        f"There is a tag {name!r} already, and tags do not move. Choose another name.", tag=name
    )


def tag_was_deleted(name: str) -> TagDeletedError:
    """Return the error for a name that cannot be used again."""
    return TagDeletedError(
        f"A tag {name!r} was deleted, and its name is never used again, so that nobody takes one "
        "release for another. Choose another name.",
        tag=name,
    )


def delete_tag(name: str) -> Edit:
    """Return the edit that removes a tag for good."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        check_feature(info, DELETE_TAG)
        target = find_tag(info.tags, name)
        tags = {tag: it for tag, it in info.tags.items() if tag != name}
        deleted = info.deleted_tags | {name}
        return replace(info, tags=tags, deleted_tags=deleted), TagDeleted(name, target)

    return edit


def config_edit(raw_config: bytes, expected: bytes | None) -> Edit:
    """Return the edit that replaces the configuration, if it is still the expected one."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        if info.raw_config != expected:
            raise config_changed()
        return replace(info, raw_config=raw_config), ConfigChanged()

    return edit


def config_changed() -> ConflictError:
    """Return the error for a configuration that somebody else replaced."""
    return ConflictError(
        "Somebody changed the repository's configuration since it was read; nothing was saved. "
        "Open the repository again and repeat the change.",
        code="config-updated",
    )


def moved(branch: str, expected: SnapshotId, actual: SnapshotId | None) -> ConflictError:
    """Return the error for a branch that is not where it was expected."""
    found = f"is now at {actual}" if actual is not None else "is gone"
    return ConflictError(
        f"Branch {branch!r} was expected at snapshot {expected} and {found}: another writer was "
        "first; nothing was published. Rebase the session (rebase_with=...), or begin a new one.",
        branch=branch,
        expected_parent=str(expected),
        actual_parent=None if actual is None else str(actual),
    )


def not_reset(branch: str, expected: SnapshotId, actual: SnapshotId | None) -> ConflictError:
    """Return the error for a branch that was to be reset and is not where it was expected."""
    found = f"is now at {actual}" if actual is not None else "is gone"
    return ConflictError(
        f"Branch {branch!r} was expected at snapshot {expected} and {found}: another writer was "
        "first; the branch was not reset. Look at what it holds before you reset it again.",
        branch=branch,
        expected_parent=str(expected),
        actual_parent=None if actual is None else str(actual),
        code="branch-update-conflict",
    )


def publication_edit(publication: Publication) -> Edit:
    """Return the edit that makes a snapshot known."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        if gone := publication.sources - info.snapshots.keys():
            raise source_is_gone(min(gone))
        match publication:
            case Commit(branch, parent_id, snapshot):
                _expect_tip(info, branch, parent_id)
                entry = _entry(snapshot, parent_id)
                return _publish(info, entry, branch), NewCommit(branch, snapshot.id)
            case Amend(branch, replaced_id, snapshot):
                _expect_tip(info, branch, replaced_id)
                replaced = find_snapshot(info, replaced_id)
                if replaced.parent_id is None:
                    raise SessionStateError(
                        f"Snapshot {replaced_id} is the first of its repository and cannot be "
                        "amended. Commit instead.",
                        code="no-amend-for-initial-commit",
                    )
                entry = replace(
                    _entry(snapshot, replaced.parent_id),
                    pruned_ancestor_logs=replaced.pruned_ancestor_logs,
                )
                detail = CommitAmended(branch, replaced_id, snapshot.id)
                return _publish(info, entry, branch), detail
            case Detach(parent_id, snapshot):
                find_snapshot(info, parent_id)
                entry = _entry(snapshot, parent_id)
                return _publish(info, entry, None), DetachedSnapshotCreated(snapshot.id)

    return edit


def source_is_gone(source: SnapshotId) -> SnapshotNotFoundError:
    """Return the error for changes that took over references of a snapshot which is gone."""
    return SnapshotNotFoundError(
        f"The session moved chunks to other places while it stood on snapshot {source}, which has "
        "expired or been collected since, and so may have been the chunks. Nothing was published. "
        "Move them again in a new session, and expire no snapshot that an open session began at.",
        snapshot_id=str(source),
    )


def _expect_tip(info: RepoInfo, branch: str, expected: SnapshotId) -> None:
    tip = find_branch(info.branches, branch)
    if tip != expected:
        raise moved(branch, expected, tip)


def _entry(snapshot: Snapshot, parent_id: SnapshotId) -> SnapshotInfo:
    return SnapshotInfo.of(
        snapshot.id, parent_id, snapshot.flushed_at, snapshot.message, snapshot.metadata
    )


def _publish(info: RepoInfo, entry: SnapshotInfo, branch: str | None) -> RepoInfo:
    snapshots = {**info.snapshots, entry.id: entry}
    branches = info.branches if branch is None else {**info.branches, branch: entry.id}
    return replace(info, snapshots=snapshots, branches=branches)

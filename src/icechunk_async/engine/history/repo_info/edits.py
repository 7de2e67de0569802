"""Changes of a repo info as values: each takes one and returns the next, or refuses (format 2).

The caller reads the repo info, applies one of these, and writes the result if no other writer was
first; otherwise it reads and applies again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.text import printable
from icechunk_async.engine.history.protocol import (
    MAIN,
    MOVE_NODE,
    Amend,
    Commit,
    Detach,
    FeatureFlag,
)
from icechunk_async.engine.history.refusals import (
    branch_exists,
    branch_moved,
    branch_not_reset,
    check_new_name,
    config_changed,
    no_branch,
    no_snapshot,
    no_tag,
    refuse_main,
    source_is_gone,
    tag_exists,
    tag_was_deleted,
)
from icechunk_async.engine.history.settings import (
    check_unprotected,
    keeping_protection,
    protections_in,
)
from icechunk_async.errors import (
    FeatureDisabledError,
    InvalidInputError,
    RepositoryReadOnlyError,
    SessionStateError,
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
from icechunk_async.format.repo_info import OperationsLog, RepoInfo, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async.engine.history.protocol import Expiration, Publication
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import RepoStatus
    from icechunk_async.format.snapshot import Snapshot

    type Edit = Callable[[RepoInfo], tuple[RepoInfo, UpdateDetail]]

__all__ = [
    "change_status",
    "check_feature",
    "check_online",
    "config_edit",
    "create_branch",
    "create_tag",
    "delete_branch",
    "delete_tag",
    "expire",
    "feature_flags",
    "find_branch",
    "find_snapshot",
    "find_tag",
    "merge_metadata",
    "publication_edit",
    "push_update",
    "reachable",
    "release",
    "replace_metadata",
    "reset_branch",
    "set_feature_flag",
    "with_backup",
]

_SPEC: Final = 2
_CREATE_TAG: Final = "create_tag"
_DELETE_TAG: Final = "delete_tag"
# Name -> id and default. The official engine reserves the ids 1 and 2.
_FEATURES: Final = {MOVE_NODE: (3, True), _CREATE_TAG: (4, True), _DELETE_TAG: (5, True)}


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
            f"Allow it with set_feature_flag({name!r}, True).",
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
    # Flags of later versions stay: this library does not know them, and must not switch them.
    others = {*(flags or ())} - {number}
    return tuple(sorted({*others, number} if present else others))


def replace_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Return the edit that replaces the repository's own metadata."""
    encode_items(metadata, _SPEC)  # refuses what is no JSON before anything is asked

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        # Protection of branches is among the metadata, and a user who replaces all of it does not
        # mean that.
        items = tuple(encode_items(keeping_protection(info, metadata), _SPEC))
        return replace(info, raw_metadata=items), MetadataChanged()

    return edit


def merge_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Return the edit that lays items over the repository's own metadata, name by name."""
    items = encode_items(metadata, _SPEC)

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        # On the stored bytes: values of others are carried along as they were written.
        merged = {**dict(info.raw_metadata), **dict(items)}
        return replace(info, raw_metadata=tuple(sorted(merged.items()))), MetadataChanged()

    return edit


def change_status(status: RepoStatus) -> Edit:
    """Return the edit that replaces the repository's status."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        return replace(info, status=status), RepoStatusChanged(status)

    return edit


def check_online(info: RepoInfo) -> None:
    """Refuse changes while the repository's status forbids them."""
    if info.status.availability is not Availability.ONLINE:
        why = f": {printable(info.status.reason)}" if info.status.reason else ""
        raise RepositoryReadOnlyError(
            f"The repository is {info.status.availability.name.lower()}{why}. Reading works; to "
            "write, wait until its status is set back to online.",
            availability=info.status.availability.name,
        )


def push_update(
    info: RepoInfo, detail: UpdateDetail, now_us: int, backup_name: str, max_updates: int
) -> RepoInfo:
    """Put an entry on top of the operations log.

    The entry that was newest so far gets the name of the backup in which it is the newest. When
    the list is full, its tail is left to that backup (spec, "Operations log").
    """
    # Clocks of several writers disagree; the log's order does not.
    entry = Update(detail, max(now_us, info.updated_at + 1))
    log = OperationsLog.of(info.updates)
    if not log:
        # No entry can carry the backup's name. As what continues the log it stays known: by it a
        # writer that got no reply recognizes its own write, and what continued the log so far is
        # named in that backup.
        return replace(info, updates=(entry,), before_updates=backup_name)
    # Spec, "Operations log": the entry that was newest so far gets the name, and the new one has
    # none until it is replaced itself.
    log = log.with_newest(entry, replace(log[0], backup_path=backup_name), instead=1)
    log, continued = log.cut(max(1, max_updates))
    return replace(info, updates=log, before_updates=continued or info.before_updates)


def with_backup(update: Update, name: str) -> Update:
    """Return an entry with the name of the backup that it was found in."""
    return replace(update, backup_path=name)


def find_snapshot(info: RepoInfo, snapshot_id: SnapshotId) -> SnapshotInfo:
    """Return a listed snapshot."""
    try:
        return info.snapshots[snapshot_id]
    except KeyError:
        raise no_snapshot(snapshot_id) from None


def find_branch(branches: Mapping[str, SnapshotId], name: str) -> SnapshotId:
    """Return the tip of a branch."""
    try:
        return branches[name]
    except KeyError:
        raise no_branch(name, branches) from None


def find_tag(tags: Mapping[str, SnapshotId], name: str) -> SnapshotId:
    """Return the snapshot of a tag."""
    try:
        return tags[name]
    except KeyError:
        raise no_tag(name, tags) from None


def create_branch(name: str, snapshot_id: SnapshotId) -> Edit:
    """Return the edit that adds a branch."""
    check_new_name(name)

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        if name in info.branches:
            raise branch_exists(name)
        # Refs are stored as places in the list of snapshots (spec, "Repo info file"), so the target
        # must be listed.
        find_snapshot(info, snapshot_id)
        return replace(info, branches={**info.branches, name: snapshot_id}), BranchCreated(name)

    return edit


def reset_branch(
    name: str,
    snapshot_id: SnapshotId,
    expected: SnapshotId | None,
    approved: frozenset[str] | None = None,
) -> Edit:
    """Return the edit that moves a branch; ``approved`` are the checks of a proposal."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        tip = find_branch(info.branches, name)
        check_unprotected(info, name, approved)
        if expected is not None and tip != expected:
            raise branch_not_reset(name, expected, tip)
        find_snapshot(info, snapshot_id)
        branches = {**info.branches, name: snapshot_id}
        return replace(info, branches=branches), BranchReset(name, tip)

    return edit


def delete_branch(name: str) -> Edit:
    """Return the edit that removes a branch."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        tip = find_branch(info.branches, name)
        refuse_main(name)
        check_unprotected(info, name)
        branches = {branch: it for branch, it in info.branches.items() if branch != name}
        return replace(info, branches=branches), BranchDeleted(name, tip)

    return edit


def create_tag(name: str, snapshot_id: SnapshotId) -> Edit:
    """Return the edit that adds a tag."""
    check_new_name(name)

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        check_feature(info, _CREATE_TAG)
        if name in info.tags:
            raise tag_exists(name)
        # A tag that was deleted must not come back as another snapshot (spec, "Tags").
        if name in info.deleted_tags:
            raise tag_was_deleted(name)
        find_snapshot(info, snapshot_id)
        return replace(info, tags={**info.tags, name: snapshot_id}), TagCreated(name)

    return edit


def delete_tag(name: str) -> Edit:
    """Return the edit that removes a tag for good."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        check_feature(info, _DELETE_TAG)
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


def publication_edit(publication: Publication) -> Edit:
    """Return the edit that makes a snapshot known."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        # Chunks that were taken over belong to these snapshots. Once one is dropped, collection may
        # delete them.
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
                # Also looked at here: what the caller saw may be older than this state.
                if replaced.parent_id is None:
                    raise SessionStateError(
                        f"Snapshot {replaced_id} is the first of its repository and cannot be "
                        "amended. Commit instead.",
                        code="no-amend-for-initial-commit",
                    )
                entry = replace(
                    _entry(snapshot, replaced.parent_id),
                    # The new snapshot takes the place of the old one, also before the logs of
                    # expired snapshots.
                    pruned_ancestor_logs=replaced.pruned_ancestor_logs,
                )
                detail = CommitAmended(branch, replaced_id, snapshot.id)
                return _publish(info, entry, branch), detail
            case Detach(parent_id, snapshot):
                find_snapshot(info, parent_id)
                entry = _entry(snapshot, parent_id)
                return _publish(info, entry, None), DetachedSnapshotCreated(snapshot.id)

    return edit


def _expect_tip(info: RepoInfo, branch: str, expected: SnapshotId) -> None:
    tip = find_branch(info.branches, branch)
    check_unprotected(info, branch)
    if tip != expected:
        raise branch_moved(branch, expected, tip)


def _entry(snapshot: Snapshot, parent_id: SnapshotId) -> SnapshotInfo:
    return SnapshotInfo.of(
        snapshot.id, parent_id, snapshot.flushed_at, snapshot.message, snapshot.metadata
    )


def _publish(info: RepoInfo, entry: SnapshotInfo, branch: str | None) -> RepoInfo:
    snapshots = info.listed.edited([entry])
    branches = info.branches if branch is None else {**info.branches, branch: entry.id}
    return replace(info, snapshots=snapshots, branches=branches)


def expire(info: RepoInfo, rule: Expiration) -> tuple[RepoInfo, frozenset[SnapshotId]]:
    """Drop old snapshots, except roots and the tips of refs that stay.

    Returns:
        The repo info without them, and their ids.

    Raises:
        FeatureDisabledError: tags would go, and the repository forbids to delete tags.
    """
    old = info.listed.older_than(rule.older_than_us) - rule.keep
    tags, branches = info.tags, info.branches
    if rule.delete_tags:
        tags = {name: tip for name, tip in tags.items() if tip not in old}
    if len(tags) < len(info.tags):
        check_feature(info, _DELETE_TAG)
    if rule.delete_branches:
        # ``main`` always exists (spec, "Branches").
        keep = {MAIN, *protections_in(info)}
        branches = {name: tip for name, tip in branches.items() if name in keep or tip not in old}
    # After the refs: a tip whose branch goes may be dropped, too.
    dropped = frozenset(old - {*tags.values(), *branches.values()})
    deleted = info.deleted_tags | (info.tags.keys() - tags.keys())
    kept_refs = replace(info, tags=tags, branches=branches, deleted_tags=deleted)
    return _drop(kept_refs, dropped, to_root=True, anchors=rule.keep), dropped


def _drop(
    info: RepoInfo,
    dropped: Collection[SnapshotId],
    *,
    to_root: bool,
    anchors: frozenset[SnapshotId] = frozenset(),
) -> RepoInfo:
    """Leave snapshots out; those whose parent is among them get another.

    Args:
        info: the history; no ref points at what is dropped.
        dropped: what to leave out.
        to_root: make the root their parent, not the nearest ancestor that is kept.
        anchors: ancestors that are made the parent even so.
    """
    if not dropped:
        return info
    snapshots = info.listed
    adopted = [
        _with_other_parent(info, it, dropped, to_root=to_root, anchors=anchors)
        for it in snapshots.children_of(dropped)
    ]
    return replace(info, snapshots=snapshots.edited(adopted, dropped))


def _with_other_parent(
    info: RepoInfo,
    orphan: SnapshotInfo,
    dropped: Collection[SnapshotId],
    *,
    to_root: bool,
    anchors: frozenset[SnapshotId],
) -> SnapshotInfo:
    """Give a snapshot another parent; it remembers the logs of all between, oldest first."""
    # By the column: an object for each of a long history would take most of an expiration.
    passed: list[SnapshotId] = []
    pruned: list[tuple[SnapshotId, ...]] = []
    for page in info.ancestry_pages(orphan.id, whole=True):
        if isinstance(page, list):
            passed += [it.id for it in page]
            pruned += [it.pruned_ancestor_logs for it in page]
        else:
            passed += page.id
            pruned += page.pruned_ancestor_logs
    del passed[0], pruned[0]  # the orphan
    places = [place for place, it in enumerate(passed) if it not in dropped]
    parent = None
    if places:
        anchored = (place for place in places if passed[place] in anchors)
        place = next(anchored, places[-1]) if to_root else places[0]
        parent, passed, pruned = passed[place], passed[:place], pruned[:place]
    between = zip(reversed(passed), reversed(pruned), strict=True)
    logs = [log for it, older in between for log in (*older, it)]
    # Its own come last: they are of snapshots between it and the parent that it had so far.
    logs += orphan.pruned_ancestor_logs
    return replace(orphan, parent_id=parent, pruned_ancestor_logs=tuple(logs))


def reachable(info: RepoInfo) -> set[SnapshotId]:
    """Return every snapshot that a branch or a tag leads to."""
    found: set[SnapshotId] = set()
    for tip in {*info.tags.values(), *info.branches.values()}:
        for it in info.ancestry(tip):
            if it.id in found:
                break
            found.add(it.id)
    return found


def release(info: RepoInfo, old: AbstractSet[SnapshotId]) -> RepoInfo:
    """Drop old snapshots that no branch and no tag leads to.

    Args:
        info: the history.
        old: what may go. A snapshot that is not among them may be about to get a branch.
    """
    listed = info.listed.among(old)
    return _drop(info, listed - reachable(info), to_root=False)

"""Dropping snapshots from a history as values: by age, or because nothing needs them.

Pure decisions for both format versions (facts: "Expiration", "Garbage collection"). What is kept
gets another parent where its own is dropped; under spec 2 it remembers the logs of those between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from icechunk_async.engine.history.repo_info.edits import DELETE_TAG, MAIN, check_feature
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async.engine.history.protocol import Expiration
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo

__all__ = ["Cut", "cut_history", "expire", "reachable", "release"]


def expire(info: RepoInfo, rule: Expiration) -> tuple[RepoInfo, frozenset[SnapshotId]]:
    """Drop old snapshots, except roots and the tips of refs that stay (spec 2).

    Returns:
        The repo info without them, and their ids.

    Raises:
        FeatureDisabledError: tags would go, and the repository forbids to delete tags.
    """
    old = {
        it.id
        for it in info.snapshots.values()
        if it.parent_id is not None and it.flushed_at < rule.older_than_us
    }
    tags, branches = info.tags, info.branches
    if rule.delete_tags:
        tags = {name: tip for name, tip in tags.items() if tip not in old}
    if len(tags) < len(info.tags):
        check_feature(info, DELETE_TAG)
    if rule.delete_branches:
        branches = {name: tip for name, tip in branches.items() if name == MAIN or tip not in old}
    dropped = frozenset(old - {*tags.values(), *branches.values()})
    deleted = info.deleted_tags | (info.tags.keys() - tags.keys())
    kept_refs = replace(info, tags=tags, branches=branches, deleted_tags=deleted)
    return _drop(kept_refs, dropped, to_root=True), dropped


def _drop(info: RepoInfo, dropped: Collection[SnapshotId], *, to_root: bool) -> RepoInfo:
    """Leave snapshots out; those whose parent is among them get another.

    Args:
        info: the history; no ref points at what is dropped.
        dropped: what to leave out.
        to_root: make the root their parent, not the nearest ancestor that is kept.
    """
    kept: dict[SnapshotId, SnapshotInfo] = {}
    for it in info.snapshots.values():
        if it.id in dropped:
            continue
        adopt = it.parent_id in dropped
        kept[it.id] = _with_other_parent(info, it, dropped, to_root=to_root) if adopt else it
    return replace(info, snapshots=kept)


def _with_other_parent(
    info: RepoInfo, orphan: SnapshotInfo, dropped: Collection[SnapshotId], *, to_root: bool
) -> SnapshotInfo:
    """Give a snapshot another parent; it remembers the logs of all between, oldest first."""
    _, *passed = info.ancestry(orphan.id)
    places = [place for place, it in enumerate(passed) if it.id not in dropped]
    parent = None
    if places:
        place = places[-1 if to_root else 0]
        parent, passed = passed[place].id, passed[:place]
    logs = [log for it in reversed(passed) for log in (*it.pruned_ancestor_logs, it.id)]
    logs += orphan.pruned_ancestor_logs
    return replace(orphan, parent_id=parent, pruned_ancestor_logs=tuple(logs))


def reachable(info: RepoInfo) -> set[SnapshotId]:
    """Return every snapshot that a branch or a tag leads to (spec 2)."""
    found: set[SnapshotId] = set()
    for tip in {*info.tags.values(), *info.branches.values()}:
        for it in info.ancestry(tip):
            if it.id in found:
                break
            found.add(it.id)
    return found


def release(info: RepoInfo, old: AbstractSet[SnapshotId]) -> RepoInfo:
    """Drop old snapshots that no branch and no tag leads to (spec 2).

    Args:
        info: the history.
        old: what may go. A snapshot that is not among them may be about to get a branch.
    """
    return _drop(info, (info.snapshots.keys() & old) - reachable(info), to_root=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """What expiration does to a history of spec 1."""

    parents: Mapping[SnapshotId, SnapshotId]
    """Snapshots that get another parent."""
    released: frozenset[SnapshotId]
    """What is no longer part of some history, and old tips that became children of the root: so
    the official engine has it."""


def cut_history(
    tips: Iterable[SnapshotId], infos: Mapping[SnapshotId, SnapshotInfo], older_than_us: int
) -> Cut:
    """Decide how to shorten the histories of refs (spec 1).

    In each the oldest snapshot that is not old, or the tip where all are, becomes a child of the
    root.

    Args:
        tips: where branches and tags point, in the order in which they are looked at.
        infos: all that the tips lead to.
        older_than_us: what is old.
    """
    parents: dict[SnapshotId, SnapshotId] = {}
    released: set[SnapshotId] = set()
    for tip in tips:
        line = list(_line(tip, infos, parents))
        root = line[-1]
        recent = [it for it in line if infos[it].flushed_at >= older_than_us]
        last = recent[-1] if recent else tip
        between = line[line.index(last) + 1 : -1]
        if between:
            parents[last] = root
            released.update(between if recent else [tip, *between])
    return Cut(parents, frozenset(released))


def _line(
    tip: SnapshotId,
    infos: Mapping[SnapshotId, SnapshotInfo],
    parents: Mapping[SnapshotId, SnapshotId],
) -> Iterable[SnapshotId]:
    current: SnapshotId | None = tip
    for _ in range(len(infos)):
        if current is None:
            return
        yield current
        current = parents.get(current, infos[current].parent_id)
    if current is not None:
        raise FormatError(f"The ancestry of snapshot {tip} forms a circle.")

"""What a repository of spec 1 becomes in spec 2, as values (spec, "Migration")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FormatError
from icechunk_async.format.repo_info import RepoInfo
from icechunk_async.format.updates import (
    Availability,
    BranchCreated,
    NewCommit,
    RepoInitialized,
    RepoMigrated,
    RepoStatus,
    TagCreated,
    TagDeleted,
    Update,
)
from icechunk_async.repository.history.edits import MAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.updates import UpdateDetail

__all__ = ["OldRefs", "finished", "is_under_way", "known_snapshots", "migrated", "same_refs"]

_UNDER_WAY: Final = (
    "The repository is being migrated from format version 1. If nobody does that any more, it was "
    "interrupted: call icechunk_async.repository.migrate.upgrade again."
)
_REF_DELAY_US: Final = 1000
"""How long after its snapshot a ref is taken to be created, and then deleted."""


@dataclass(frozen=True, slots=True)
class OldRefs:
    """The branches and tags of spec 1."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    """Those that were not deleted."""
    deleted_tags: Mapping[str, SnapshotId | None]
    """With the snapshots that they had, as far as known."""


def migrated(
    refs: OldRefs,
    infos: Mapping[SnapshotId, SnapshotInfo],
    raw_config: bytes | None,
    now_us: int,
) -> RepoInfo:
    """Answer the repo info of a repository whose migration is under way: it is read-only.

    Args:
        refs: all refs.
        infos: at least the snapshots that they reach.
        raw_config: the configuration in its new form.
        now_us: microseconds since the epoch.
    """
    tips = {**refs.branches, **refs.tags}.values()
    reached = {info.id: info for tip in tips for info in _ancestry(infos, tip)}
    *_, root = _ancestry(infos, refs.branches[MAIN])
    log = _synthetic_log(refs, infos, reached)
    newest = max(now_us, log[0].updated_at + 1)
    return RepoInfo(
        branches=refs.branches,
        tags=refs.tags,
        deleted_tags=frozenset(refs.deleted_tags),
        snapshots=reached,
        status=RepoStatus(Availability.READ_ONLY, root.flushed_at, _UNDER_WAY),
        updates=(Update(RepoMigrated(1, 2), newest), *log),
        raw_config=raw_config,
    )


def is_under_way(info: RepoInfo) -> bool:
    """Tell whether a migration wrote this and has not finished."""
    read_only = info.status.availability is Availability.READ_ONLY
    return read_only and isinstance(info.updates[0].detail, RepoMigrated)


def finished(info: RepoInfo) -> RepoInfo:
    """Answer the repo info of a migration once it may be written to."""
    return replace(info, status=RepoStatus(Availability.ONLINE, info.status.set_at))


def same_refs(info: RepoInfo, refs: OldRefs) -> bool:
    """Tell whether the old refs still are what was migrated."""
    return (
        info.branches == refs.branches
        and info.tags == refs.tags
        and info.deleted_tags == frozenset(refs.deleted_tags)
    )


def known_snapshots(updates: list[Update], info: RepoInfo) -> set[SnapshotId]:
    """Answer every snapshot that is or was part of a migrated repository."""
    details = [update.detail for update in updates]
    ids = (getattr(detail, "new_snapshot_id", None) for detail in details)
    return {*info.snapshots, *(it for it in ids if it is not None)}


def _ancestry(infos: Mapping[SnapshotId, SnapshotInfo], tip: SnapshotId) -> Iterator[SnapshotInfo]:
    seen: set[SnapshotId] = set()
    current: SnapshotId | None = tip
    while current is not None:
        if current in seen:
            raise FormatError(f"The ancestry of snapshot {tip} forms a circle.")
        seen.add(current)
        info = infos[current]
        yield info
        current = info.parent_id


def _synthetic_log(
    refs: OldRefs,
    infos: Mapping[SnapshotId, SnapshotInfo],
    reached: Mapping[SnapshotId, SnapshotInfo],
) -> list[Update]:
    """Answer an operations log as it may have been, newest first."""
    events: list[tuple[int, UpdateDetail]] = []
    attributed: set[SnapshotId] = set()
    root_us = 0
    for branch in sorted(refs.branches, key=lambda name: (name != MAIN, name)):
        line = list(_ancestry(infos, refs.branches[branch]))
        if branch == MAIN:
            root_us = line[-1].flushed_at
            events.append((root_us, RepoInitialized()))
            attributed.add(line[-1].id)
        else:
            events.append((line[0].flushed_at + _REF_DELAY_US, BranchCreated(branch)))
        for info in reversed(line):
            if info.id not in attributed:
                attributed.add(info.id)
                events.append((info.flushed_at, NewCommit(branch, info.id)))
    for tag, target in sorted(refs.tags.items()):
        events.append((reached[target].flushed_at + _REF_DELAY_US, TagCreated(tag)))
    for tag, gone in sorted(refs.deleted_tags.items(), key=lambda item: item[0]):
        if gone is not None:
            since_us = reached[gone].flushed_at if gone in reached else root_us
            events.append((since_us + _REF_DELAY_US, TagCreated(tag)))
            events.append((since_us + 2 * _REF_DELAY_US, TagDeleted(tag, gone)))
    log: list[Update] = []
    last_us = 0
    for moment_us, detail in sorted(events, key=lambda event: event[0]):
        last_us = max(moment_us, last_us + 1)
        log.append(Update(detail, last_us))
    return log[::-1]

"""The part of a history that a copy holds: chosen branches and tags, and from which time on.

Pure. What is left out is left out as expiration leaves it out, so that a copy of a part is a
repository like one that was expired: ids stay, the first snapshot stays, and the oldest snapshot
that is kept becomes its child.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history import MAIN
from icechunk_async.engine.history.protocol import Expiration
from icechunk_async.engine.history.ref_files.upkeep import cut_history, line_of
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.errors import InvalidInputError, NotFoundError
from icechunk_async.format.operations_log import (
    BranchCreated,
    BranchDeleted,
    BranchReset,
    CommitAmended,
    DetachedSnapshotCreated,
    NewCommit,
    RepoInitialized,
    TagCreated,
    TagDeleted,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo

__all__ = ["WHOLE", "OldHistory", "Selection", "select_history", "select_old_history"]

_NAMES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a repository is copied."""

    refs: frozenset[str] | None = None
    """Names of branches and tags; a name that is both selects both. None: all."""
    since_us: int | None = None
    """Drop older snapshots that no ref points to. Microseconds since the epoch, by the writers'
    clocks. None: keep all."""

    @classmethod
    def of(cls, refs: Iterable[str] | None, since_us: int | None) -> Selection:
        """Return a selection.

        Raises:
            InvalidInputError: no name is given, or one text where several names belong.
        """
        if refs is None:
            return cls(None, since_us)
        if isinstance(refs, str) or not (names := frozenset(refs)):
            raise InvalidInputError(
                f"The branches and tags to copy are a collection of names, not {refs!r}. To copy "
                "all of them, leave the argument out."
            )
        return cls(names, since_us)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self == WHOLE

    def covers(self, other: frozenset[str] | None) -> bool:
        """Return whether the refs of an earlier copy are all selected, None being all."""
        return self.refs is None or (other is not None and other <= self.refs)

    def find(self, branches: Iterable[str], tags: Iterable[str]) -> frozenset[str]:
        """Return the selected names.

        Raises:
            NotFoundError: a name is neither a branch nor a tag; it is in ``context["ref"]``.
        """
        known = {*branches, *tags}
        if self.refs is None:
            return frozenset(known)
        if unknown := sorted(self.refs - known):
            there = ", ".join(sorted(known)[:_NAMES_SHOWN])
            raise NotFoundError(
                f"There is no branch and no tag {unknown[0]!r} to copy. The repository has: "
                f"{there}.",
                ref=unknown[0],
            )
        return self.refs


WHOLE: Final = Selection()


def select_history(info: RepoInfo, selection: Selection) -> RepoInfo:
    """Return the repo info of a copy; format version 2.

    ``main``, which every repository has, points to the first snapshot if it is not selected. The
    operations log is cut to what concerns the selected refs, and has no backups.

    Raises:
        NotFoundError: a selected name is neither a branch nor a tag.
    """
    if selection.is_whole:
        return info
    names = selection.find(info.branches, info.tags)
    if selection.refs is not None:
        branches = {name: tip for name, tip in info.branches.items() if name in names}
        tags = {name: tip for name, tip in info.tags.items() if name in names}
        if MAIN not in branches:
            # Any would do, since a history has one first snapshot; the least, so that each copy
            # takes the same.
            tip = min({*branches.values(), *tags.values()})
            *_, root = info.ancestry(tip)
            branches[MAIN] = root.id
        info = replace(info, branches=branches, tags=tags)
        # Drops what no ref leads to any more, as a collection does.
        info = edits.release(info, info.snapshots.keys())
    if selection.since_us is not None:
        info, _ = edits.expire(info, Expiration(selection.since_us))
    return replace(info, updates=_log_of(info, names), before_updates=None)


def _log_of(info: RepoInfo, names: frozenset[str]) -> tuple[Update, ...]:
    """Return the entries that concern these refs, or no ref; none only of an empty log."""
    kept: list[Update] = []
    for it in info.updates:
        match it.detail:
            case TagCreated(name) | TagDeleted(name) | BranchCreated(name) | BranchReset(name):
                concerns = name in names
            case BranchDeleted(name) | NewCommit(name) | CommitAmended(name):
                concerns = name in names
            case DetachedSnapshotCreated(snapshot_id):
                concerns = snapshot_id in info.snapshots
            case _:
                concerns = True
        if concerns:
            kept.append(replace(it, backup_path=None))
    # A repo info has one entry at least.
    return tuple(kept) or tuple(Update(RepoInitialized(), it.updated_at) for it in info.updates[:1])


@dataclass(frozen=True, slots=True)
class OldHistory:
    """The part of a history of format version 1 that a copy holds."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    snapshots: frozenset[SnapshotId]
    parents: Mapping[SnapshotId, SnapshotId]
    """Snapshots that get another parent than their file says."""


def select_old_history(
    branches: Mapping[str, SnapshotId],
    tags: Mapping[str, SnapshotId],
    infos: Mapping[SnapshotId, SnapshotInfo],
    selection: Selection,
) -> OldHistory:
    """Return the history of a copy of a repository of format version 1; see `select_history`.

    Args:
        branches: all of them, with ``main``.
        tags: those that were not deleted.
        infos: every snapshot that the selected refs lead to.
        selection: what to copy.

    Raises:
        NotFoundError: a selected name is neither a branch nor a tag.
    """
    names = selection.find(branches, tags)
    branches = {name: tip for name, tip in branches.items() if name in names}
    tags = {name: tip for name, tip in tags.items() if name in names}
    tips = [refs[name] for refs in (tags, branches) for name in sorted(refs)]
    if MAIN not in branches:
        *_, root = line_of(min(tips), infos, {})
        branches[MAIN] = root
    parents: Mapping[SnapshotId, SnapshotId] = {}
    if selection.since_us is not None:
        parents = cut_history(tips, infos, selection.since_us).parents
    kept = {it for tip in tips for it in line_of(tip, infos, parents)}
    return OldHistory(branches, tags, frozenset(kept), parents)

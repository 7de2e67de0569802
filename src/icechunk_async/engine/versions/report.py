"""The outcome of a merge: the changes it brings, and each clash with the commits behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.rebase import describe
from icechunk_async.engine.versions.behind import Behind
from icechunk_async.errors import MergeConflictError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.engine.changes.detect import Conflict, ConflictKind
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.versions.combine import Combined
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.manifest.refs import Coordinates
    from icechunk_async.format.repo_info import SnapshotInfo

__all__ = ["MergeConflict", "MergeReport", "conflict_error", "report_of", "reported"]


@dataclass(frozen=True, slots=True)
class MergeConflict:
    """Something that both sides changed, and that no solver settled."""

    kind: ConflictKind
    path: str
    """The node."""
    coords: tuple[Coordinates, ...]
    """The chunks that both changed; empty if it is about the node itself."""
    source_commits: tuple[SnapshotInfo, ...]
    """Commits of the source that touched it, newest first; empty where history does not tell."""
    branch_commits: tuple[SnapshotInfo, ...]
    """Commits of the branch that touched it, newest first; empty where history does not tell."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The outcome of a merge, cherry-pick, revert or restore."""

    branch: str
    base_id: SnapshotId
    """The snapshot that the source was compared with."""
    source_id: SnapshotId
    """The snapshot whose changes were put on the branch."""
    previous_id: SnapshotId
    """The tip of the branch before."""
    snapshot_id: SnapshotId | None
    """The new commit; None after a dry run, or if the branch has these changes already."""
    changes: Diff
    """The changes that the commit makes on the branch."""
    conflicts: tuple[MergeConflict, ...] = ()
    """After a dry run: what would have to be settled first."""


async def report_of(engine: Engine, branch: str, combined: Combined) -> MergeReport:
    """Return the report of changes that were worked out, and not committed yet.

    Cost: none without conflicts; else the logs of the commits on both sides.
    """
    ends = combined.base.id, combined.source.id, combined.target.id
    conflicts = await reported(Behind(engine, *ends), combined.conflicts)
    return MergeReport(branch, *ends, None, combined.diff(), conflicts)


def conflict_error(report: MergeReport, conflicts: Sequence[Conflict]) -> MergeConflictError:
    """Return the error for changes that clash."""
    return MergeConflictError(
        f"Snapshot {report.source_id} does not go together with branch {report.branch!r}: "
        f"{describe(conflicts)}. Nothing was published. Pass a solver that decides these, or "
        "settle them by hand with Repository.begin_merge.",
        report=report,
    )


async def reported(behind: Behind, conflicts: Sequence[Conflict]) -> tuple[MergeConflict, ...]:
    """Return conflicts with the commits behind them."""
    return tuple(
        [MergeConflict(it.kind, it.path, it.coords, *await behind.commits(it)) for it in conflicts]
    )

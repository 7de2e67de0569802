"""The outcome of a merge: the changes it brings, and each clash with the commits behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.rebase import describe
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.history.graph import lineage
from icechunk_async.engine.versions.differences import nodes_of
from icechunk_async.errors import FormatError, MergeConflictError, SnapshotNotFoundError
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.engine.changes.detect import Conflict, ConflictKind
    from icechunk_async.engine.commit.conflicts import TouchedBy
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.transaction_log import TransactionLog

    type _Logs = list[tuple[SnapshotInfo, list[TransactionLog]]]

__all__ = ["Behind", "MergeConflict", "MergeReport", "conflict_error", "reported"]

_CONCURRENT_LOGS = 16


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


class Behind:
    """Finds the commits since a common ancestor that touched what is in conflict."""

    def __init__(
        self, engine: Engine, base: SnapshotId, source: SnapshotId, target: SnapshotId
    ) -> None:
        """Look at the commits of ``source`` and ``target`` that are not before ``base``."""
        self._engine = engine
        self._base, self._tips = base, (source, target)
        self._logs: tuple[_Logs, _Logs] | None = None

    async def commits(self, conflict: Conflict) -> TouchedBy:
        """Return the commits of both sides, newest first; see `Clash.commits`."""
        if self._logs is None:
            source, target = self._tips
            self._logs = await self._load(source), await self._load(target)
        ours, theirs = (_touching(conflict, logs) for logs in self._logs)
        return ours, theirs

    async def _load(self, tip: SnapshotId) -> _Logs:
        """Load the logs of the commits of one side, newest first; none if history does not tell."""
        history = self._engine.history
        try:
            known = await lineage(history, self._base)
            found = [it for it in (await lineage(history, tip)).values() if it.id not in known]
            if not found:  # what is taken back lies before the base
                above = await lineage(history, tip)
                found = [it for it in known.values() if it.id not in above]
        except SnapshotNotFoundError:
            return []

        async def load(info: SnapshotInfo) -> list[TransactionLog]:
            return await load_logs(self._engine.assets, [info])

        try:
            logs = await bounded_map(load, found, limit=_CONCURRENT_LOGS)
        except FormatError:  # a log is missing; the clash itself is known
            return []
        pairs = list(zip(found, logs, strict=True))
        # By time, as commits of several branches may be among them, in no order of ancestry.
        return sorted(pairs, key=lambda it: it[0].flushed_at, reverse=True)


def _touching(conflict: Conflict, logs: _Logs) -> tuple[SnapshotInfo, ...]:
    return tuple(info for info, parts in logs if any(_touches(log, conflict) for log in parts))


def _touches(log: TransactionLog, conflict: Conflict) -> bool:
    node_id = conflict.node_id
    if node_id is None:
        return False
    if conflict.coords:
        clashing = np.array(conflict.coords, np.uint32)
        return bool(rows_in(clashing, log.chunks_of(node_id, clashing.shape[1])).any())
    return node_id in nodes_of(log)

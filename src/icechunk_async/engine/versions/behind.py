"""The commits of two sides that touched something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.history.merged import lineage
from icechunk_async.engine.versions.differences import nodes_of
from icechunk_async.errors import FormatError, SnapshotNotFoundError
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from icechunk_async.engine.changes.detect import Conflict
    from icechunk_async.engine.commit.conflicts import TouchedBy
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.transaction_log import TransactionLog

    type _Logs = list[tuple[SnapshotInfo, list[TransactionLog]]]

__all__ = ["Behind"]

_CONCURRENT_LOGS = 16


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

"""The small files that this process stored last, for its sessions that commit next.

A session that was overtaken needs the transaction logs of the commits before it, and the snapshot
of the last one. Where they come from the same process, reading them would cost a request each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.weighted_cache import WeightedCache

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["RecentFiles"]

_LOGS_BYTES: Final = 4 << 20
_LOG_BYTES: Final = 1 << 18
"""Longer logs are read when they are needed."""
_BYTES_PER_LOG: Final = 2000
_BYTES_PER_NODE: Final = 100
_NODES: Final = 10_000
"""Of all snapshots that are kept; one larger one is kept as well."""


class RecentFiles:
    """Shared by the repositories of a process at one place. Usable from any thread."""

    def __init__(self) -> None:
        """Begin empty."""
        self.logs: WeightedCache[SnapshotId, TransactionLog] = WeightedCache(_LOGS_BYTES)
        self.compared: WeightedCache[SnapshotId, TransactionLog] = WeightedCache(_LOGS_BYTES)
        """Logs that were read for a difference of commits; who rebases reads them anew."""
        self.snapshots: WeightedCache[SnapshotId, Snapshot] = WeightedCache(_NODES)

    def keep_log(self, log: TransactionLog, *, compared: bool = False) -> None:
        """Keep a short transaction log, that was stored or that was read to compare commits."""
        # An estimate of memory, so that a commit that touched a million chunks does not push out
        # the others.
        nodes = sum(
            map(
                len,
                (
                    log.new_groups,
                    log.new_arrays,
                    log.deleted_groups,
                    log.deleted_arrays,
                    log.updated_groups,
                    log.updated_arrays,
                    log.updated_chunks,
                    log.moves,
                ),
            )
        )
        coords = sum(it.nbytes for it in log.updated_chunks.values())
        size_bytes = _BYTES_PER_LOG + _BYTES_PER_NODE * nodes + coords
        if size_bytes <= _LOG_BYTES:
            (self.compared if compared else self.logs).put(log.id, log, size_bytes)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        # A snapshot takes memory for each node, for the document of that above all.
        self.snapshots.put(snapshot.id, snapshot, 1 + len(snapshot.nodes))

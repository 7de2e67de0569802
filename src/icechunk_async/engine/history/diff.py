"""Differences between two snapshots, or of a session, by path."""

from __future__ import annotations

import logging
from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError, ObjectNotFoundError
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.transaction_log import TransactionLog, unique_coordinates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async._display.cards import Card
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history import History
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["Diff", "diff_in_memory", "diff_of_log", "diff_snapshots", "load_logs"]

_log = logging.getLogger(__name__)
_CONCURRENT_LOGS = 16
_MOST_KNOWN = 100
"""Commits whose logs are joined without letting other tasks run."""


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """Paths of nodes that were touched, and the chunks that were.

    Between two snapshots this is the union of what each commit touched, not the net change: a
    chunk that was set and set back is listed.
    """

    new_groups: frozenset[str] = frozenset()
    new_arrays: frozenset[str] = frozenset()
    deleted_groups: frozenset[str] = frozenset()
    deleted_arrays: frozenset[str] = frozenset()
    updated_groups: frozenset[str] = frozenset()
    """Their metadata changed."""
    updated_arrays: frozenset[str] = frozenset()
    """Their metadata changed."""
    updated_chunks: Mapping[str, npt.NDArray[np.uint32]] = field(
        default_factory=dict[str, "npt.NDArray[np.uint32]"]
    )
    """Coordinates of chunks set or deleted, ``(n, rank)``, ascending, by path of the array."""
    moved_nodes: tuple[tuple[str, str], ...] = ()
    """``(from, to)``."""

    def is_empty(self) -> bool:
        """Return whether nothing was touched."""
        return self == Diff()

    def __repr__(self) -> str:
        """Show a line for each array and group, with the number of its chunks."""
        return self._card().text()

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return self._card().html()

    def _card(self) -> Card:
        from icechunk_async._display.versions import diff_card  # noqa: PLC0415 -- rarely needed

        return diff_card(self, "Diff")


def diff_of_log(log: TransactionLog, path_of: Callable[[NodeId], str | None]) -> Diff:
    """Translate ids to paths; ids without a path are dropped."""

    def paths(ids: frozenset[NodeId]) -> frozenset[str]:
        return frozenset(path for path in map(path_of, ids) if path is not None)

    chunks: dict[str, npt.NDArray[np.uint32]] = {}
    for node_id, coords in log.updated_chunks.items():
        path = path_of(node_id)
        if path is None:
            continue
        known = chunks.get(path)  # of a deleted array that had the same path
        # Of two arrays at one path with different ranks only the later one can be shown.
        if known is None or known.shape[1] != coords.shape[1]:
            chunks[path] = coords
        else:
            chunks[path] = unique_coordinates(np.concatenate([known, coords]))
    return Diff(
        paths(log.new_groups),
        paths(log.new_arrays),
        paths(log.deleted_groups),
        paths(log.deleted_arrays),
        paths(log.updated_groups),
        paths(log.updated_arrays),
        dict(sorted(chunks.items())),
        tuple((move.source, move.target) for move in log.moves),
    )


async def diff_snapshots(
    history: History,
    assets: Assets,
    start: SnapshotId,
    end: SnapshotId,
    *,
    need_pruned: bool = False,
) -> Diff:
    """Return the nodes and chunks that the commits after ``start`` up to ``end`` touched.

    ``need_pruned`` is for `load_logs`.

    Raises:
        InvalidInputError: ``start`` is not an ancestor of ``end``.
        SnapshotNotFoundError: one of them does not exist.
        FormatError: a log is missing.

    Cost: the ancestry, both snapshots, and one request for each commit between them; none of what
    is in memory.
    """
    if not need_pruned and (known := diff_in_memory(history, assets, start, end)) is not None:
        return known
    await history.snapshot_info(start)
    path: list[SnapshotInfo] = []
    async for info in history.ancestry(end):
        if info.id == start:
            break
        path.append(info)
    else:
        raise InvalidInputError(
            f"Snapshot {start} is not an ancestor of {end}, so there is no diff between them. "
            "Give an older snapshot of the same branch first.",
            start=str(start),
            end=str(end),
            code="bad-snapshot-chain-for-diff",
        )
    before, after = await bounded_map(assets.snapshot, [start, end], limit=2)
    logs = await load_logs(
        assets, path[::-1], need_pruned=need_pruned, own_from_memory=not need_pruned
    )
    for log in logs:
        assets.recent.keep_log(log, compared=True)  # for the next question about the same commits
    return _joined(logs, before, after)


def diff_in_memory(
    history: History, assets: Assets, start: SnapshotId, end: SnapshotId
) -> Diff | None:
    """Return the same as `diff_snapshots` if everything for it is in memory, else None.

    Usable from any thread.
    """
    logs: list[TransactionLog] = []
    at = end
    while at != start:
        info, log = history.known_snapshot(at), assets.known_log(at)
        # The log of an expired commit may be missing, about which only `load_logs` warns.
        if info is None or info.parent_id is None or info.pruned_ancestor_logs or log is None:
            return None
        if len(logs) == _MOST_KNOWN:
            return None
        logs.append(log)
        at = info.parent_id
    before, after = assets.known_snapshot(start), assets.known_snapshot(end)
    if before is None or after is None or history.known_snapshot(start) is None:
        return None
    return _joined(logs[::-1], before, after)


def _joined(logs: Sequence[TransactionLog], before: Snapshot, after: Snapshot) -> Diff:
    """Return the paths that commits between two snapshots touched; their logs oldest first."""
    log = TransactionLog(after.id)
    moves: list[tuple[str, str]] = []
    for part in logs:
        # One after the other, as the official engine lists them: a node that moved twice is there
        # twice.
        moves += [(move.source, move.target) for move in part.moves]
        log = log.merge(part)

    def path_of(node_id: NodeId) -> str | None:
        # Ids say no paths: a node has the path that it has at the end, or had at the beginning. One
        # that was made and deleted in between has neither, and is left out.
        return after.nodes.path_of(node_id) or before.nodes.path_of(node_id)

    return replace(diff_of_log(log, path_of), moved_nodes=tuple(moves))


async def load_logs(
    assets: Assets,
    commits: Sequence[SnapshotInfo],
    *,
    need_pruned: bool = False,
    own_from_memory: bool = False,
) -> list[TransactionLog]:
    """Return the logs of commits in order, each after those of snapshots that expired below it.

    Args:
        assets: where the logs are.
        commits: oldest first.
        need_pruned: refuse if a log of an expired snapshot is missing; otherwise leave it out.
        own_from_memory: do not read again what this process stored a short time ago.

    Raises:
        FormatError: a log is missing.
    """
    read = assets.log_of_commit if own_from_memory else assets.transaction_log
    wanted = [
        (snapshot_id, snapshot_id != info.id and not need_pruned)
        for info in commits
        for snapshot_id in (*info.pruned_ancestor_logs, info.id)
    ]

    async def load(request: tuple[SnapshotId, bool]) -> TransactionLog | None:
        snapshot_id, optional = request
        try:
            return await read(snapshot_id)
        except ObjectNotFoundError as error:
            if snapshot_id == INITIAL_SNAPSHOT_ID and assets.spec_version == 1:
                return None  # spec 1 writes none for the first snapshot
            if optional:
                _log.warning("the log of the expired snapshot %s is missing", snapshot_id)
                return None
            raise FormatError(
                f"The transaction log of snapshot {snapshot_id} is missing. The repository is "
                "damaged: the changes of that commit are unknown."
            ) from error

    logs = await bounded_map(load, wanted, limit=_CONCURRENT_LOGS)
    return [log for log in logs if log is not None]

"""Make the transaction log of a commit from its snapshot and the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.engine.changes.compare import compare_refs
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.transaction_log import Move, TransactionLog, unique_coordinates

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = ["coordinates_in", "rebuilt_log"]

_MOST_LOGGED: Final = 50_000_000
"""Chunks of lost manifests that a transaction log lists; more than the official engine writes."""


async def rebuilt_log(
    assets: Assets, snapshot_id: SnapshotId, parent_id: SnapshotId | None
) -> TransactionLog:
    """Return the net change of a commit.

    The log that was lost may have listed more: chunks that were set to what they were before. Where
    a manifest is lost as well, all chunks count as changed that it may have held. If
    the snapshot got another parent by expiration, this lists the changes since that parent, and
    rebasing over it sees too many conflicts and never too few.

    Raises:
        SnapshotNotFoundError, FormatError: a snapshot cannot be read.
        InvalidInputError: a lost manifest may have held too many chunks.

    Cost: both snapshots, and the manifests that only one of them uses.
    """
    snapshot = await assets.read_snapshot(snapshot_id)
    parent = None if parent_id is None else await assets.read_snapshot(parent_id)
    new = {node.id: node for node in snapshot.nodes.values()}
    old = {} if parent is None else {node.id: node for node in parent.nodes.values()}
    chunks: dict[NodeId, npt.NDArray[np.uint32]] = {}
    for node_id in new.keys() | old.keys():
        coords = await _touched(assets, old.get(node_id), new.get(node_id), parent, snapshot)
        # Chunks of arrays that are gone are not listed: the deletion of the node says it.
        if coords is not None and len(coords) and node_id in new:
            chunks[node_id] = coords
    kept = new.keys() & old.keys()
    changed = {it for it in kept if new[it].user_data != old[it].user_data}

    def split(ids: set[NodeId], nodes: dict[NodeId, Node]) -> tuple[frozenset[Any], frozenset[Any]]:
        arrays = frozenset(it for it in ids if nodes[it].array is not None)
        return frozenset(ids - arrays), arrays

    new_groups, new_arrays = split(set(new.keys() - old.keys()), new)
    deleted_groups, deleted_arrays = split(set(old.keys() - new.keys()), old)
    updated_groups, updated_arrays = split(changed, new)
    moves = tuple(
        Move(old[it].path, new[it].path, it, new[it].array is not None)
        for it in sorted(kept)
        if old[it].path != new[it].path
    )
    return TransactionLog(
        snapshot_id,
        new_groups=new_groups,
        new_arrays=new_arrays,
        deleted_groups=deleted_groups,
        deleted_arrays=deleted_arrays,
        updated_groups=updated_groups,
        updated_arrays=updated_arrays,
        updated_chunks=chunks,
        moves=moves,
    )


async def _touched(
    assets: Assets,
    old: Node | None,
    new: Node | None,
    before: Snapshot | None,
    after: Snapshot,
) -> npt.NDArray[np.uint32] | None:
    """Return the coordinates of an array's chunks whose references differ."""
    if new is None or new.array is None:
        return None
    rank = len(new.array.dimensions)
    known = {it.manifest_id for it in old.array.manifests} if old and old.array else set[Any]()
    # By id alone, whatever the boxes: a manifest never changes, so what both use is the same in
    # both.
    shared = known & {it.manifest_id for it in new.array.manifests}
    grid = new.array.grid
    there, lost = await _refs(assets, new, after, shared)
    # Any of them may have been set. With too many listed a rebase sees conflicts too often; with
    # too few it would write over another's chunk.
    unknown = [coordinates_in(it, grid, new.path) for it in lost]
    if old is None or old.array is None or before is None:
        return unique_coordinates(np.concatenate([there.coords, *unknown]))
    was, lost = await _refs(assets, old, before, shared)
    if was.rank != rank:
        return unique_coordinates(np.concatenate([there.coords, *unknown]))
    unknown += [coordinates_in(it, grid, new.path) for it in lost]
    differing = compare_refs(was, there).coords
    # Cut off by a smaller shape, which is a change of the document.
    inside = (differing < np.array(grid, np.int64)).all(axis=1)
    return unique_coordinates(np.concatenate([differing[inside], *unknown]))


def coordinates_in(extents: Extents, grid: Sequence[int], path: str) -> npt.NDArray[np.uint32]:
    """Return the coordinates of all chunks that a lost manifest of an array may have held.

    Args:
        extents: the first and the end of its coordinates, by axis.
        grid: the number of chunks of the array, by axis.
        path: of the array, for the message.

    Raises:
        InvalidInputError: there are too many for a transaction log.
    """
    clipped = [(a, min(b, size)) for (a, b), size in zip(extents, grid, strict=True)]
    sizes = [max(b - a, 0) for a, b in clipped]
    # As a float: the product of hostile sizes does not fit an integer. Checked before it takes
    # memory.
    if np.prod(sizes, dtype=float) > _MOST_LOGGED:
        raise InvalidInputError(
            f"A lost manifest of {path!r} covers more than {_MOST_LOGGED} chunks, too many "
            "for one commit. Reset the branch to an earlier snapshot instead.",
            path=path,
        )
    # The box `[2, 4) [5, 7)` gives 2/5, 2/6, 3/5, 3/6.
    rows = np.indices(sizes, np.uint32).reshape(len(sizes), int(np.prod(sizes))).T
    return rows + np.array([a for a, _ in clipped], np.uint32)


async def _refs(
    assets: Assets, node: Node, snapshot: Snapshot, shared: set[Any]
) -> tuple[ChunkRefs, list[Extents]]:
    """Return the references of an array in manifests that are not shared, in their order.

    Manifests that cannot be read are returned as their extents.
    """
    assert node.array is not None
    rank = len(node.array.dimensions)
    parts = [ChunkRefs.empty(rank)]
    lost: list[Extents] = []
    for ref in node.array.manifests:
        if ref.manifest_id not in shared:
            info = snapshot.manifests.get(ref.manifest_id)
            size_bytes = 0 if info is None else info.size_bytes
            try:
                manifest = await assets.manifests.read(ref.manifest_id, size_bytes)
            except FormatError:
                lost.append(ref.extents)
            else:
                parts.append(manifest.refs(node.id, rank))
    return ChunkRefs.concat(parts).sort(), lost

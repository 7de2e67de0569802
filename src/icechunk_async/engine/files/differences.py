"""Compare snapshots to find the nodes and chunks that a commit touched.

For layouts that store no transaction logs. Manifests that both snapshots use are not read. A chunk
that was written again with the same inline bytes, or set back, does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.changes.compare import compare_refs
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.transaction_log import Move, TransactionLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from icechunk_async.engine.files.manifests import ManifestFiles
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = ["difference"]

_CONCURRENT_ARRAYS: Final = 8
_CONCURRENT_MANIFESTS: Final = 8


async def difference(
    before: Snapshot | None, after: Snapshot, manifests: ManifestFiles
) -> TransactionLog:
    """Return the log of a commit from the snapshots before and after it.

    Args:
        before: the parent; None if the commit is the first.
        after: the snapshot of the commit.
        manifests: those of both.

    Raises:
        FormatError: a manifest is missing or damaged.

    Cost: one request for each manifest that only one of the snapshots uses and that is not cached;
    memory in proportion to their references.
    """
    old = {} if before is None else {node.id: node for node in before.nodes.values()}
    new = {node.id: node for node in after.nodes.values()}
    # An id that stands for an array before and for a group after is that of two nodes.
    same = {it for it in old if it in new and _is_array(old[it]) == _is_array(new[it])}
    created = [node for node_id, node in new.items() if node_id not in same]
    deleted = [node for node_id, node in old.items() if node_id not in same]
    kept = [(old[node_id], node) for node_id, node in new.items() if node_id in same]
    updated = [node for was, node in kept if was.user_data != node.user_data]
    arrays: list[tuple[Node | None, Node]] = [(None, node) for node in created]
    arrays += [pair for pair in kept if pair[0].array != pair[1].array]

    async def compare(pair: tuple[Node | None, Node]) -> npt.NDArray[np.uint32] | None:
        was, node = pair
        if node.array is None:
            return None
        return await _compare(was, node, before, after, manifests)

    found = await bounded_map(compare, arrays, limit=_CONCURRENT_ARRAYS)
    return TransactionLog(
        after.id,
        new_groups=_ids(created, arrays=False),
        new_arrays=_ids(created, arrays=True),
        deleted_groups=_ids(deleted, arrays=False),
        deleted_arrays=_ids(deleted, arrays=True),
        updated_groups=_ids(updated, arrays=False),
        updated_arrays=_ids(updated, arrays=True),
        updated_chunks={
            node.id: coords
            for (_, node), coords in zip(arrays, found, strict=True)
            if coords is not None and len(coords)
        },
        moves=tuple(
            Move(was.path, node.path, node.id, _is_array(node))
            for was, node in kept
            if was.path != node.path
        ),
    )


def _is_array(node: Node) -> bool:
    return node.array is not None


def _ids(nodes: Iterable[Node], *, arrays: bool) -> frozenset[NodeId]:
    return frozenset(node.id for node in nodes if _is_array(node) == arrays)


async def _compare(
    was: Node | None,
    node: Node,
    before: Snapshot | None,
    after: Snapshot,
    manifests: ManifestFiles,
) -> npt.NDArray[np.uint32]:
    """Return the coordinates of an array's chunks that were set or deleted."""
    old = _manifests(was)
    new = _manifests(node)
    assert node.array is not None
    rank = len(node.array.dimensions)

    async def load(
        snapshot: Snapshot | None, wanted: Iterable[ManifestId]
    ) -> tuple[ChunkRefs, ...]:
        async def read(manifest_id: ManifestId) -> ChunkRefs:
            # Layouts before version 1 list no sizes; 0 asks for the whole file.
            info = None if snapshot is None else snapshot.manifests.get(manifest_id)
            size_bytes = 0 if info is None else info.size_bytes
            return (await manifests.get(manifest_id, size_bytes)).refs(node.id, rank)

        return tuple(await bounded_map(read, sorted(wanted), limit=_CONCURRENT_MANIFESTS))

    gone = await load(before, old - new)
    come = await load(after, new - old)
    # Gives the rank where no manifest differs, as after a change of the shape alone.
    nothing = ChunkRefs.empty(rank)
    coords = compare_refs(
        ChunkRefs.concat([nothing, *gone]).sort(), ChunkRefs.concat([nothing, *come]).sort()
    ).coords
    # Chunks that a smaller shape cut off are part of the change of the shape, as in logs.
    return coords[(coords < np.array(node.array.grid, np.uint64)).all(axis=1)]


def _manifests(node: Node | None) -> set[ManifestId]:
    array = None if node is None else node.array
    return set() if array is None else {ref.manifest_id for ref in array.manifests}

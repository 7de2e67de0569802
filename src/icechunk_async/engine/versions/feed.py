"""The change feed: everything that turns one snapshot into another, as a stream of columns."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from itertools import batched
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.tree.listing import ChunkBatch
from icechunk_async.engine.versions.differences import (
    CONCURRENT_ARRAYS,
    Comparer,
    commits_between,
    outline,
)
from icechunk_async.engine.versions.transport import follows
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    import numpy.typing as npt

    from icechunk_async.engine.changes.compare import RefChanges
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.versions.differences import Differences
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = [
    "Change",
    "ChunkChange",
    "ChunkChanges",
    "NodeChange",
    "changes_between",
    "changes_in_box",
    "places_of_changes",
    "steps_between",
]

_BATCH: Final = 100_000


class ChunkChange(IntEnum):
    """How a chunk changed."""

    ADDED = 0
    """It did not exist before."""
    CHANGED = 1
    REMOVED = 2
    """It does not exist any more."""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """An array or a group that was created, deleted, moved, or given other metadata.

    What moved only with the group above it is not listed. What was below a deleted group is:
    deleted, or moved.
    """

    snapshot_id: SnapshotId
    """The snapshot that has the change."""
    kind: Literal["created", "deleted", "moved", "updated"]
    path: str
    """After the change; of a deleted node, before."""
    previous_path: str | None
    """Of a moved node: where it was."""
    node_id: NodeId
    is_array: bool
    before: bytes | None
    """The metadata document (``zarr.json``) before; None if the node is new."""
    after: bytes | None
    """The metadata document after; None if the node was deleted."""


@dataclass(frozen=True, slots=True)
class ChunkChanges:
    """Chunks of one array that changed, as columns; row ``i`` of each is about one chunk."""

    snapshot_id: SnapshotId
    """The snapshot that has the change."""
    path: str
    """Of the array, after the change."""
    node_id: NodeId
    coords: npt.NDArray[np.uint32]
    """Where they are in the array's grid, ``(n, rank)``, ascending."""
    kinds: npt.NDArray[np.uint8]
    """The `ChunkChange` of each, ``(n,)``."""
    after: ChunkBatch
    """References of the chunks that exist after the change, in the order of ``coords``."""
    before: ChunkBatch | None
    """References of the chunks that existed before, in the order of ``coords``; None unless they
    were asked for."""

    def __len__(self) -> int:
        """Count the chunks."""
        return len(self.coords)


type Change = NodeChange | ChunkChanges


async def changes_between(
    engine: Engine,
    before: Snapshot,
    after: Snapshot,
    *,
    net: bool = True,
    with_references: bool = False,
    batch_size: int = _BATCH,
) -> AsyncGenerator[Change]:
    """Iterate over the changes between two snapshots; see `Repository.changes`."""
    for older, newer in await steps_between(engine, before, after, net=net):
        found = await outline(engine, older, newer)
        for node_change in _nodes(found.nodes):
            yield node_change
        # Commit by commit, a chunk that was written anew with the same bytes is part of what
        # happened.
        equal_sums = net and engine.assets.keeps_sums
        comparer = Comparer(engine, older, newer, found.log, equal_sums=equal_sums)
        # By a few arrays, so that memory does not grow with their number, and a consumer that stops
        # early has few compared in vain.
        for arrays in batched(found.arrays, CONCURRENT_ARRAYS):
            compared = await bounded_map(comparer.compare, arrays, limit=CONCURRENT_ARRAYS)
            for (_, node), changes in zip(arrays, compared, strict=True):
                for some in _parts(changes, batch_size):
                    yield _chunk_changes(engine, newer, node, some, with_references=with_references)


async def places_of_changes(
    engine: Engine, before: Snapshot, after: Snapshot, *, within: Callable[[str], bool]
) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the chunks that may differ, ``(n, rank)``, of arrays that stayed where they were.

    Args:
        engine: of the repository.
        before: the first snapshot.
        after: the second one.
        within: says by path which arrays to look at.

    Cost: where one snapshot is an ancestor of the other, their logs. Arrays about which these do
    not tell everything, such as those that were resized, are compared as by `changes_between`, one
    after the other.
    """
    found = await outline(engine, before, after, within=within)
    sums = engine.assets.keeps_sums
    comparer = Comparer(engine, before, after, found.log, equal_sums=sums)
    places: dict[str, npt.NDArray[np.uint32]] = {}
    for old, new in found.arrays:
        if old is not None and old.path == new.path:
            coords = await comparer.places((old, new))
            if len(coords):
                places[new.path] = coords
    return places


async def changes_in_box(
    engine: Engine, before: Snapshot | None, after: Snapshot, path: str, box: Extents
) -> ChunkChanges | None:
    """Return how the chunks that arrays at a path have in a box changed; None if they did not.

    For work that is divided by boxes. Without a first snapshot all are new. See
    `Comparer.compare_box`.
    """
    older, anew = before or after, before is None
    comparer = Comparer(engine, older, after, None, equal_sums=engine.assets.keeps_sums)
    changes = await comparer.compare_box(path, box, anew=anew)
    if changes.is_empty():
        return None
    node = after.nodes.get(path) or older.nodes[path]
    return _chunk_changes(engine, after, node, changes, with_references=True)


def _chunk_changes(
    engine: Engine, newer: Snapshot, node: Node, changes: RefChanges, *, with_references: bool
) -> ChunkChanges:
    locations = engine.virtual.locations
    return ChunkChanges(
        newer.id,
        node.path,
        node.id,
        changes.coords,
        _kinds(changes),
        ChunkBatch(changes.after, locations),
        ChunkBatch(changes.before, locations) if with_references else None,
    )


async def steps_between(
    engine: Engine, before: Snapshot, after: Snapshot, *, net: bool
) -> list[tuple[Snapshot, Snapshot]]:
    """Return the pairs of snapshots to compare: the two, or each commit and the one before it.

    Raises:
        InvalidInputError: without ``net``: one snapshot is not an ancestor of the other.
    """
    if net:
        return [(before, after)]
    commits = await commits_between(engine, before.id, after.id)
    if commits is None or (commits and commits[-1].id != after.id):
        raise InvalidInputError(
            f"Snapshot {before.id} is not among those before {after.id}, so there are no commits "
            "between them to be told one by one. Ask for the net changes, net=True."
        )
    steps: list[tuple[Snapshot, Snapshot]] = []
    older = before
    for info in commits:
        newer = await engine.assets.snapshot(info.id)
        steps.append((older, newer))
        older = newer
    return steps


def _nodes(found: Differences) -> Iterator[NodeChange]:
    """Return changes of nodes: each kind by itself, deletions first."""
    target = found.after.id

    def change(
        kind: Literal["created", "deleted", "moved", "updated"],
        old: Node | None,
        new: Node | None,
    ) -> NodeChange:
        node = new or old
        assert node is not None
        moved = old is not None and new is not None and old.path != new.path
        return NodeChange(
            target,
            kind,
            node.path,
            old.path if moved and old is not None else None,
            node.id,
            node.array is not None,
            None if old is None else old.user_data,
            None if new is None else new.user_data,
        )

    for old in reversed(found.deleted):  # those below a group before it
        yield change("deleted", old, None)
    nodes = found.before.nodes, found.after.nodes
    for old, new in found.moved:
        if not follows(old.path, new.path, *nodes):
            yield change("moved", old, new)
    for new in found.created:
        yield change("created", None, new)
    for old, new in found.updated:
        yield change("updated", old, new)


def _parts(changes: RefChanges, size: int) -> Iterator[RefChanges]:
    """Divide changes into batches of places."""
    coords = changes.coords
    if len(coords) <= size:
        if len(coords):
            yield changes
        return
    # Of each batch the rows on both sides, which may be fewer: a chunk that came has none before.
    for start in range(0, len(coords), size):
        places = coords[start : start + size]
        yield replace(
            changes,
            before=changes.before.take(rows_in(changes.before.coords, places)),
            after=changes.after.take(rows_in(changes.after.coords, places)),
        )


def _kinds(changes: RefChanges) -> npt.NDArray[np.uint8]:
    """Return the `ChunkChange` of each place."""
    coords = changes.coords
    kinds = np.full(len(coords), ChunkChange.CHANGED, np.uint8)
    kinds[~rows_in(coords, changes.before.coords)] = ChunkChange.ADDED
    kinds[~rows_in(coords, changes.after.coords)] = ChunkChange.REMOVED
    return kinds

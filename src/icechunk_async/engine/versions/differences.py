"""Net differences of two snapshots: nodes by their ids, chunks by their references.

Any two snapshots of a repository can be compared, also unrelated ones. Where one is an ancestor of
the other, transaction logs say where to look; otherwise manifests that both use are skipped.
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.compare import RefChanges, compare_refs
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import FormatError, SnapshotNotFoundError
from icechunk_async.format.json.values import is_object
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.row_index import rows_in
from icechunk_async.format.transaction_log import TransactionLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.tree.array_state import ArrayState
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates, Extents
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import ManifestRef, Node, Snapshot

    type ArrayPair = tuple[Node | None, Node]
    """An array before, None if it is new, and after."""

__all__ = [
    "CONCURRENT_ARRAYS",
    "ArrayPair",
    "Comparer",
    "Differences",
    "Outline",
    "chunk_grid",
    "commits_between",
    "find_differences",
    "nodes_of",
    "outline",
    "reading",
]

CONCURRENT_ARRAYS: Final = 8
"""The arrays whose references are compared, and in memory, at once."""
_CONCURRENT_CHUNKS: Final = 64
_FEW_CHUNKS: Final = 256
"""The most chunks of an array that are looked up one by one, and not in whole manifests."""
_BYTES_PER_REF: Final = 64


@dataclass(frozen=True, slots=True)
class Differences:
    """Everything that turns one snapshot into another."""

    before: Snapshot
    after: Snapshot
    created: tuple[Node, ...] = ()
    """Nodes that only ``after`` has, by their ids, ascending by path."""
    deleted: tuple[Node, ...] = ()
    """Nodes that only ``before`` has, ascending by path."""
    moved: tuple[tuple[Node, Node], ...] = ()
    """Nodes with another path, before and after."""
    updated: tuple[tuple[Node, Node], ...] = ()
    """Nodes with another metadata document, before and after."""
    chunks: Mapping[NodeId, RefChanges] = field(default_factory=dict["NodeId", RefChanges])
    """Of each array that both have and whose references differ, and of each created array."""

    def is_empty(self) -> bool:
        """Return whether nothing differs."""
        return not (self.created or self.deleted or self.moved or self.updated or self.chunks)

    def log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Return a transaction log that says what differs, net, besides moves."""
        created, deleted, updated = self.created, self.deleted, [it[1] for it in self.updated]
        return TransactionLog(
            snapshot_id,
            new_groups=frozenset(it.id for it in created if it.array is None),
            new_arrays=frozenset(it.id for it in created if it.array is not None),
            deleted_groups=frozenset(it.id for it in deleted if it.array is None),
            deleted_arrays=frozenset(it.id for it in deleted if it.array is not None),
            updated_groups=frozenset(it.id for it in updated if it.array is None),
            updated_arrays=frozenset(it.id for it in updated if it.array is not None),
            updated_chunks={node_id: it.coords for node_id, it in self.chunks.items()},
        )


@dataclass(frozen=True, slots=True)
class Outline:
    """The differences of two snapshots besides chunks, and the arrays whose chunks may differ."""

    nodes: Differences
    """Without chunks."""
    arrays: tuple[ArrayPair, ...]
    log: TransactionLog | None
    """The parts that commits between the snapshots touched; None if that is not known."""


async def outline(
    engine: Engine,
    before: Snapshot,
    after: Snapshot,
    *,
    within: Callable[[str], bool] | None = None,
) -> Outline:
    """Compare two snapshots without their manifests.

    Arguments as `find_differences`.

    Cost: where one is an ancestor of the other, their logs; otherwise a look at each node.
    """
    if before.id == after.id:
        return Outline(Differences(before, after), (), None)
    log = await _touched_between(engine, before.id, after.id)
    pairs = _Pairs(before, after, within, None if log is None else nodes_of(log))
    created = pairs.created()
    nodes = Differences(
        before, after, created, pairs.deleted(), tuple(pairs.moved()), tuple(pairs.updated())
    )
    new: list[ArrayPair] = [(None, node) for node in created if node.array is not None]
    return Outline(nodes, (*pairs.arrays(), *new), log)


async def find_differences(
    engine: Engine,
    before: Snapshot,
    after: Snapshot,
    *,
    within: Callable[[str], bool] | None = None,
    equal_sums: bool = False,
) -> Differences:
    """Compare two snapshots.

    Args:
        engine: of the repository.
        before: the first snapshot.
        after: the second one.
        within: says by path which nodes to compare, before or after; None: all.
        equal_sums: see `compare_refs`.

    Raises:
        FormatError: a manifest is damaged.

    Cost: where one is an ancestor of the other, their logs, and the manifests that hold what those
    list; otherwise a look at each node, and the manifests that only one of them uses. Memory: the
    references that differ, and those of the manifests of eight arrays.
    """
    found = await outline(engine, before, after, within=within)
    comparer = Comparer(engine, before, after, found.log, equal_sums=equal_sums)
    compared = await bounded_map(comparer.compare, found.arrays, limit=CONCURRENT_ARRAYS)
    chunks = {
        node.id: changes
        for (_, node), changes in zip(found.arrays, compared, strict=True)
        if not changes.is_empty()
    }
    return replace(found.nodes, chunks=chunks)


async def _touched_between(
    engine: Engine, one: SnapshotId, other: SnapshotId
) -> TransactionLog | None:
    """Return the joined logs of the commits between two snapshots, in either direction.

    None if neither is an ancestor of the other, or not every log is known. In format 1 that is
    never known: it does not record which commits expired between two snapshots.

    Cost: the ancestry, and one request for each commit between them.
    """
    if not engine.history.capabilities.operations_log:
        return None
    commits = await commits_between(engine, one, other)
    if commits is None:
        return None
    joined = TransactionLog(other)
    try:
        for log in await load_logs(engine.assets, commits, need_pruned=True):
            joined = joined.merge(log)
    except FormatError:  # a log is missing: the snapshots themselves are compared
        return None
    # With chunks of two ranks in one array, nobody can tell which of them the snapshots still have.
    return None if joined.stray_chunks else joined


async def commits_between(
    engine: Engine, one: SnapshotId, other: SnapshotId
) -> list[SnapshotInfo] | None:
    """Return the commits after the older of two snapshots up to the other, oldest first.

    None if neither is an ancestor of the other, or that is not known any more.
    """
    found = await _path(engine, one, other)
    return await _path(engine, other, one) if found is None else found


async def _path(engine: Engine, start: SnapshotId, end: SnapshotId) -> list[SnapshotInfo] | None:
    """Return the commits after ``start`` up to ``end``, oldest first; None if there is no way."""
    found: list[SnapshotInfo] = []
    try:
        async for info in engine.history.ancestry(end):
            if info.id == start:
                return found[::-1]
            found.append(info)
    except SnapshotNotFoundError:  # it expired
        return None
    return None


def nodes_of(log: TransactionLog) -> frozenset[NodeId]:
    """Return the nodes that a log names."""
    moved = (move.node_id for move in log.moves)
    new, deleted = log.new_groups | log.new_arrays, log.deleted_groups | log.deleted_arrays
    return frozenset((*new, *deleted, *log.updated_groups, *log.updated_arrays, *moved)).union(
        log.updated_chunks
    )


class _Pairs:
    """The nodes of two snapshots, matched by their ids."""

    def __init__(
        self,
        before: Snapshot,
        after: Snapshot,
        within: Callable[[str], bool] | None,
        touched: frozenset[NodeId] | None,
    ) -> None:
        self._before, self._after = _chosen(before, touched), _chosen(after, touched)
        if within is None:
            return
        sides = (self._before, self._after)
        wanted = {it.id for nodes in sides for it in nodes.values() if within(it.path)}
        for nodes in sides:
            for node_id in nodes.keys() - wanted:
                del nodes[node_id]

    def created(self) -> tuple[Node, ...]:
        return tuple(it for node_id, it in self._after.items() if node_id not in self._before)

    def deleted(self) -> tuple[Node, ...]:
        return tuple(it for node_id, it in self._before.items() if node_id not in self._after)

    def both(self) -> Iterator[tuple[Node, Node]]:
        for node_id, node in self._after.items():
            old = self._before.get(node_id)
            if old is not None:
                yield old, node

    def moved(self) -> Iterator[tuple[Node, Node]]:
        return ((old, new) for old, new in self.both() if old.path != new.path)

    def updated(self) -> Iterator[tuple[Node, Node]]:
        return ((old, new) for old, new in self.both() if old.user_data != new.user_data)

    def arrays(self) -> Iterator[tuple[Node, Node]]:
        """Iterate over the arrays that both have and whose chunks may differ."""
        for old, new in self.both():
            if old.array is not None and new.array is not None and old.array != new.array:
                yield old, new


def _chosen(snapshot: Snapshot, touched: frozenset[NodeId] | None) -> dict[NodeId, Node]:
    """Return nodes by their ids, ascending by path; only those that were touched if it is known."""
    nodes = snapshot.nodes
    if touched is None:
        return {node.id: node for node in nodes.values()}
    # Logs name ids, so only what they touch is decoded, and not every node.
    paths = sorted(path for it in touched if (path := nodes.path_of(it)) is not None)
    return {(node := nodes[path]).id: node for path in paths}


class Comparer:
    """Compares the references of arrays in two snapshots."""

    def __init__(
        self,
        engine: Engine,
        before: Snapshot,
        after: Snapshot,
        log: TransactionLog | None,
        *,
        equal_sums: bool,
    ) -> None:
        """Begin with two snapshots.

        Args:
            engine: of the repository.
            before: the first snapshot.
            after: the second one.
            log: what the commits between them touched; None if that is not known.
            equal_sums: see `compare_refs`.
        """
        self._assets = engine.assets
        self._before, self._after = reading(engine, before), reading(engine, after)
        self._log = log
        self._equal_sums = equal_sums

    async def compare(self, pair: ArrayPair) -> RefChanges:
        """Compare an array that both have, or list the references of one that is new."""
        old, new = pair
        rank = _rank(new)
        # With another number of axes no chunk is at the place of another, so nothing is compared.
        if old is None or _rank(old) != rank:
            return RefChanges(ChunkRefs.empty(rank), await self._after.all_refs(new.path))
        assert old.array is not None
        assert new.array is not None
        listed = self._listed(new.id, rank)
        # A few lookups read pieces of seekable manifests, and may find them in memory. Sums come
        # with whole manifests only.
        if listed is not None and len(listed) <= _FEW_CHUNKS and not self._equal_sums:
            before = await self._look_up(self._before, old.path, listed)
            after = await self._look_up(self._after, new.path, listed)
        else:
            before, after = await self._unshared(old.path, new.path, listed)
        return await self._compared(before, after)

    async def places(self, pair: ArrayPair) -> npt.NDArray[np.uint32]:
        """Return the coordinates of every chunk of an array that may differ, ``(n, rank)``.

        Cost: none if logs tell; otherwise that of `compare`.
        """
        listed = self._listed(pair[1].id, _rank(pair[1]))
        return (await self.compare(pair)).coords if listed is None else listed

    async def compare_box(self, path: str, box: Extents, *, anew: bool = False) -> RefChanges:
        """Compare the chunks that arrays at one path have in a box of the grid.

        If the array was created anew, or got another shape of chunks, all chunks differ. If it is
        missing on one side, that side has none. With ``anew`` the first side counts as empty.

        Cost: the manifests that hold some of the box and that only one side uses. Memory: the
        references of these manifests.
        """
        sides = self._before, self._after
        nodes = [side.node(path) for side in sides]
        old, new = (None if it is None or _rank(it) != len(box) else it for it in nodes)
        if anew:
            old = None
        if old is None or new is None or not _is_comparable(old, new):
            refs = [
                ChunkRefs.empty(len(box)) if it is None else await self._load_box(side, path, box)
                for side, it in zip(sides, (old, new), strict=True)
            ]
            return RefChanges(*refs)
        before, after = await self._unshared(path, path, None, box)
        return await self._compared(before, after)

    async def _compared(self, before: ChunkRefs, after: ChunkRefs) -> RefChanges:
        return await self._assets.compute(
            lambda: compare_refs(before, after, equal_sums=self._equal_sums),
            size_bytes=(len(before) + len(after)) * _BYTES_PER_REF,
        )

    async def _load_box(self, side: Workspace, path: str, box: Extents) -> ChunkRefs:
        state = side.array_state(path)
        wanted = [it for it in state.manifests if _meets(it, box)]
        refs = await self._load(side, state, wanted)
        return refs.take(refs.inside(box))

    def _listed(self, node_id: NodeId, rank: int) -> npt.NDArray[np.uint32] | None:
        """Return every chunk of an array that may differ; None if logs do not tell.

        They do not list the chunks that are lost when an array shrinks.
        """
        if self._log is None or node_id in self._log.updated_arrays:
            return None
        return self._log.chunks_of(node_id, rank)

    async def _look_up(
        self, side: Workspace, path: str, coords: npt.NDArray[np.uint32]
    ) -> ChunkRefs:
        """Return the references of some chunks, one by one."""
        rows: list[list[int]] = coords.tolist()
        places: list[Coordinates] = [tuple(row) for row in rows]
        found = await bounded_map(
            lambda at: side.find_chunk(path, at), places, limit=_CONCURRENT_CHUNKS
        )
        refs: dict[Coordinates, ChunkRef | None] = {
            at: it.ref for at, it in zip(places, found, strict=True) if it is not None
        }
        return ChunkRefs.from_mapping(coords.shape[1], refs)

    async def _unshared(
        self,
        old: str,
        new: str,
        listed: npt.NDArray[np.uint32] | None,
        box: Extents | None = None,
    ) -> tuple[ChunkRefs, ChunkRefs]:
        """Return the references of an array on both sides, without those in shared manifests.

        Nor those in manifests without any chunk that may differ, if these are ``listed``, nor those
        outside of a box, if there is one.
        """
        before, after = self._before.array_state(old), self._after.array_state(new)
        shared = set(before.manifests) & set(after.manifests)
        if before.box != after.box:  # of what lies in one grid only, a shared manifest says more
            grid = [
                min(one, other) for (_, one), (_, other) in zip(before.box, after.box, strict=True)
            ]
            shared = {ref for ref in shared if _lies_in(ref, grid)}
        wanted = [
            [
                it
                for it in state.manifests
                if it not in shared
                and (listed is None or _holds(it, listed))
                and (box is None or _meets(it, box))
            ]
            for state in (before, after)
        ]
        found = (
            await self._load(self._before, before, wanted[0]),
            await self._load(self._after, after, wanted[1]),
        )
        if box is not None:
            one, other = (refs.take(refs.inside(box)) for refs in found)
            return one, other
        if listed is None:
            return found
        # Others may lie elsewhere, with the same bytes: compaction lists nothing in its log.
        one, other = (refs.take(rows_in(refs.coords, listed)) for refs in found)
        return one, other

    async def _load(
        self, side: Workspace, state: ArrayState, manifests: list[ManifestRef]
    ) -> ChunkRefs:
        sums = self._equal_sums
        parts = await bounded_map(
            lambda manifest: side.manifest_refs(state, manifest, sums=sums),
            manifests,
            limit=CONCURRENT_ARRAYS,
        )
        # Each manifest is sorted by itself; boxes of two axes interleave.
        return ChunkRefs.concat([*parts, ChunkRefs.empty(len(state.box))]).sort()


def reading(engine: Engine, snapshot: Snapshot) -> Workspace:
    """Return the hierarchy of a snapshot, to be read."""
    return Workspace(
        snapshot, engine.assets, engine.virtual, inline_threshold_bytes=0, read_only=True
    )


def _lies_in(ref: ManifestRef, grid: list[int]) -> bool:
    return all(stop <= size for (_, stop), size in zip(ref.extents, grid, strict=True))


def _holds(ref: ManifestRef, coords: npt.NDArray[np.uint32]) -> bool:
    """Return whether some coordinates lie in the box of a manifest."""
    if not ref.extents:
        return len(coords) > 0
    low, high = (np.array(ends) for ends in zip(*ref.extents, strict=True))
    return bool(((coords >= low) & (coords < high)).all(axis=1).any())


def _meets(ref: ManifestRef, box: Extents) -> bool:
    """Return whether a manifest may hold chunks of a box."""
    if not ref.extents:
        return True
    spans = zip(ref.extents, box, strict=True)
    return all(low < stop and start < high for (low, high), (start, stop) in spans)


def _rank(node: Node) -> int:
    return 0 if node.array is None else len(node.array.dimensions)


def _is_comparable(old: Node, new: Node) -> bool:
    """Return whether chunks of two arrays at the same place are about the same elements."""
    if old.id != new.id:
        return False
    if old.user_data == new.user_data:
        return True
    return bool(chunk_grid(old) == chunk_grid(new))


def chunk_grid(node: Node) -> dict[str, Any]:
    """Return the chunk grid in the metadata document of an array.

    Raises:
        FormatError: there is no such grid.
    """
    try:
        document: object = json.loads(node.user_data)
    except (ValueError, RecursionError):
        document = None
    grid: object = document.get("chunk_grid") if is_object(document) else None
    if not is_object(grid):
        raise FormatError(
            f"The metadata document of {node.path!r} in a snapshot has no chunk grid."
        )
    return grid

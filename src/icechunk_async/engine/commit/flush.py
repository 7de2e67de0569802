"""From a session's changes to a new snapshot: manifests and nodes, encoded but not yet stored.

Manifests of arrays that did not change are reused; the others are rebuilt cell by cell, and small
arrays share them (`shared`). Nothing here is visible to other sessions: a commit stores the files
and then moves a reference.
"""

from __future__ import annotations

import hashlib
from dataclasses import field, replace
from functools import partial
from itertools import batched, islice, starmap
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.changes.change_set import (
    ArrayChanges,
    ChangeSet,
    WorkingTree,
    settle_together,
)
from icechunk_async.engine.changes.splitting import (
    MOST_CELLS,
    most_cells,
    occupied_cells,
    plan_manifests,
    split_sizes,
    wide_manifests,
)
from icechunk_async.engine.commit.shared import (
    MOST_REFS,
    Waiting,
    grouped,
    is_mostly_garbage,
    may_share,
)
from icechunk_async.engine.sidecars.digests import digests_of, listed
from icechunk_async.errors import FormatError
from icechunk_async.format.digests import CONTENT_ROOT, DigestList
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.seekable.writing import MAX_PATCHED_REFS
from icechunk_async.format.snapshot import Files, ManifestFileInfo, ManifestRef
from icechunk_async.format.sums import ArraySums, ManifestSums, SumsHead, without_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.changes.splitting import CellPlan, SplitPlan
    from icechunk_async.engine.commit.small import Small
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.format.config import ManifestSplittingConfig
    from icechunk_async.format.digests import Listed
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.manifest.chunk import Coordinates, Extents
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.seekable.writing import PatchedManifest
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import ArrayData, Node, Nodes, Snapshot

__all__ = [
    "Flushed",
    "Flusher",
    "ManifestOptions",
    "Sidecar",
    "Written",
    "count_cells",
    "plan_cells",
    "put_digests",
    "root_of",
    "with_digests",
    "within",
]

_CONCURRENT_MANIFESTS: Final = 16
_CONCURRENT_REWRITES: Final = 4
"""Arrays at a time, and manifests of each; several because reading and writing take time."""
_CELLS_TOGETHER: Final = MOST_CELLS
"""Cells that wait for a manifest to share, of one array and in a rewrite of all, at most: their
references are in memory."""
_FEWEST_SMALL: Final = 4
_SMALL_TOGETHER: Final = 512
"""Small arrays that are merged together. Fewer are quicker one by one; of more the manifests might
take much memory."""
_LOOKED_AT: Final = 64
"""Manifests that a commit looks at to see whether they are mostly garbage, at most: a deleted array
may leave thousands."""
_KEPT_REFS: Final = 4096
_KEPT_BYTES: Final = 1 << 18
"""The largest manifest, by references and by inline bytes, that stays decoded when it is replaced:
the next commit may need it."""
_BYTES_PER_REF: Final = 64
"""Roughly what a reference takes while it is encoded; decides what goes to a thread."""


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """How manifests are written."""

    splitting: ManifestSplittingConfig | None = None
    location_dictionary: LocationDictionary | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """The hierarchy of a new snapshot, and the manifests to store for it."""

    nodes: Nodes
    files: Files
    manifests: dict[ManifestId, bytes]
    """Encoded manifests that are not stored yet."""
    sums: dict[ManifestId, Sidecar] = field(default_factory=dict[ManifestId, "Sidecar"])
    """Checksums with all manifests that were made for it; empty if none are kept."""
    digests: DigestList | None = None
    """The digests of what the snapshot uses; None if no sums are kept."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The encoded checksums of a new manifest's chunks."""

    data: bytes
    """Empty once it is stored."""
    digests: Listed


@dataclass(frozen=True, slots=True)
class Written:
    """The manifests made for one array."""

    refs: tuple[ManifestRef, ...]
    files: dict[ManifestId, ManifestFileInfo] = field(
        default_factory=dict[ManifestId, ManifestFileInfo]
    )
    packed: dict[ManifestId, bytes] = field(default_factory=dict[ManifestId, bytes])
    sums: dict[ManifestId, Sidecar] = field(default_factory=dict[ManifestId, Sidecar])
    waiting: tuple[Waiting, ...] = ()
    """The references of cells that no manifest is made for yet."""


@dataclass(frozen=True, slots=True)
class _Made:
    """The manifest of one cell, or of several small arrays."""

    refs: tuple[ManifestRef, ...]
    """How each of the arrays refers to it."""
    info: ManifestFileInfo
    packed: bytes
    """Empty once it is stored."""
    sums: Sidecar | None


type _Recipe = tuple[tuple[ManifestRef, ...], tuple[int, ...], int]
"""The inputs of an array's manifests: those of the base, the grid, the changes."""


class Flusher:
    """Builds snapshots for one session; remembers manifests, so that a retry reuses them."""

    def __init__(self, assets: Assets, options: ManifestOptions) -> None:
        """Use ``assets`` to load the manifests that must be rebuilt."""
        self._assets = assets
        self.options = options
        self._made: dict[NodeId, tuple[_Recipe, Written]] = {}
        self._stored: set[ManifestId] = set()
        self._decoded: dict[ManifestId, Manifest] = {}
        """Small manifests that replace others and are not stored yet."""

    @property
    def has_stored(self) -> bool:
        """Whether manifests are stored that a later call would use again."""
        return bool(self._stored)

    def forget(self) -> None:
        """Make every manifest again, under new names: those that are stored may be collected."""
        self._made.clear()
        self._stored.clear()
        self._decoded.clear()

    async def flush(self, base: Snapshot, tree: WorkingTree) -> Flushed:
        """Build the nodes and manifests of a snapshot on top of ``base``.

        Raises:
            SnapshotNotFoundError: the base was collected.
            FormatError: a file that it needs is damaged or missing.

        Cost: loads the manifests that changes fall into, several at a time; manifests made by
        an earlier call for the same changes on the same base are not made again.
        """
        changed = tree.changed_arrays()
        settle_together(tree.changes.chunks.values())
        try:
            small = await self._write_small(changed, base, tree)
            others = [node for node in changed if node.id not in small]
            large = await bounded_map(
                lambda node: self._write(node, base, tree), others, limit=_CONCURRENT_MANIFESTS
            )
        except FormatError:
            # Collection deletes a snapshot before what it refers to. If the base's file is gone,
            # nothing is damaged: the base expired, and this says so.
            await self._assets.read_snapshot(base.id)
            raise
        small.update(zip((node.id for node in others), large, strict=True))
        written = await self._share([small[node.id] for node in changed])
        nodes, left = _with_written(tree, changed, written)
        moved = await self._move_out(base, nodes, left)
        if moved:
            nodes = nodes.edited(starmap(_with_manifests, moved))
            left |= _left_by(tree, moved)
            written += [it for _, it in moved]
        return self._flushed(base, nodes, written, left)

    async def rewrite(
        self, base: Snapshot, tree: WorkingTree, progress: ProgressCallback = no_progress
    ) -> Flushed:
        """Build a snapshot on top of ``base`` with all of its manifests rewritten.

        Each manifest is stored when it is made, so that only a few are in memory.
        """
        arrays = [node for node in tree.nodes() if node.array is not None]
        done = 0

        async def write(node: Node) -> Written:
            nonlocal done
            written = await self._write(node, base, tree, rewrite_all=True)
            done += 1
            progress(Progress("rewriting arrays", done, len(arrays)))
            return written

        def count(node: Node) -> int:
            return count_cells(node, base, self.options.splitting)

        written: list[Written] = []
        for some in _together(arrays, count):
            found = await bounded_map(write, some, limit=_CONCURRENT_REWRITES)
            written += await self._share(found, store=True)
        nodes, left = _with_written(tree, arrays, written)
        return self._flushed(base, nodes, written, left)

    async def cells(self, node: Node, base: Snapshot) -> list[CellPlan]:
        """Divide all references of an array among manifests, for `rewrite_cells`.

        Cost: reads the manifests whose boxes meet more cells than are planned by boxes.
        """
        assert node.array is not None
        none = np.empty((0, len(node.array.grid)), np.uint32)
        plan = await self._plan(node, base, node.array.manifests, none, rewrite_all=True)
        return plan.cells

    async def rewrite_cells(self, node: Node, base: Snapshot, cells: Sequence[CellPlan]) -> Written:
        """Rewrite some of an array's manifests and store them; other tasks rewrite the rest.

        Cost: reads the manifests that these cells come from, and no others.
        """
        assert node.array is not None
        nothing = ArrayChanges(len(node.array.dimensions))
        return await self._build_cells(
            node.id,
            cells,
            nothing.columns(),
            nothing,
            base,
            store=True,
        )

    def rewritten(self, base: Snapshot, written: Mapping[NodeId, Sequence[Written]]) -> Flushed:
        """Build a snapshot on top of ``base`` from manifests that are stored already."""
        tree = WorkingTree(base.nodes, ChangeSet())
        arrays = [node for node in tree.nodes() if node.array is not None]
        joined = [
            Written(
                tuple(ref for it in written.get(node.id, ()) for ref in it.refs),
                {key: info for it in written.get(node.id, ()) for key, info in it.files.items()},
                sums={
                    key: sums for it in written.get(node.id, ()) for key, sums in it.sums.items()
                },
            )
            for node in arrays
        ]
        nodes, left = _with_written(tree, arrays, joined)
        return self._flushed(base, nodes, joined, left)

    def _flushed(
        self, base: Snapshot, nodes: Nodes, written: list[Written], left: set[ManifestId]
    ) -> Flushed:
        """List the manifests of all nodes, of which some left those of the base."""
        made = {it: info for files in written for it, info in files.files.items()}
        used: dict[ManifestId, ManifestFileInfo] = {}
        for node in nodes.put.values():
            for ref in node.array.manifests if node.array is not None else ():
                info = made.get(ref.manifest_id) or base.manifests.get(ref.manifest_id)
                if info is None:
                    raise FormatError(
                        f"Array {node.path!r} uses manifest {ref.manifest_id}, which snapshot "
                        f"{base.id} does not list. The repository is damaged."
                    )
                used[ref.manifest_id] = info
        files = Files.of(base.manifests).edited(
            [info for manifest_id, info in used.items() if manifest_id in made],
            # Exactly the manifests that nodes use (spec, "Manifests"): one that a changed array
            # left stays listed while another array shares it.
            left - nodes.using(left - used.keys()) - used.keys(),
        )
        packed = {
            manifest_id: data
            for made in written
            for manifest_id, data in made.packed.items()
            # A try that lost its race stored them already, and they are used again.
            if manifest_id not in self._stored
        }
        sums = {key: sidecar for made in written for key, sidecar in made.sums.items()}
        return Flushed(nodes, files, packed, sums)

    async def _share(self, written: list[Written], *, store: bool = False) -> list[Written]:
        """Make manifests of references that wait for one; small arrays share them.

        With ``store`` they are stored, too.
        """
        groups = list(grouped(_in_turns([it.waiting for it in written])))
        if not groups:
            return written
        size_bytes = sum(it.size_bytes for group in groups for it in group)
        found = await self._assets.compute(
            lambda: [self._encode_group(group) for group in groups], size_bytes=size_bytes
        )
        if store:
            found = await bounded_map(self._store_made, found, limit=_CONCURRENT_REWRITES)
        made_for = {
            it: (made, ref)
            for group, made in zip(groups, found, strict=True)
            for it, ref in zip(group, made.refs, strict=True)
        }
        placed = [_placed(it, made_for) for it in written]
        by_waiting = {
            it.waiting: new for it, new in zip(written, placed, strict=True) if it.waiting
        }
        for node_id in {it.node_id for it in made_for}:
            known = self._made.get(node_id)
            if known is not None and known[1].waiting in by_waiting:
                self._made[node_id] = (known[0], by_waiting[known[1].waiting])
        return placed

    def _encode_group(self, group: list[Waiting]) -> _Made:
        """Encode the manifest of some arrays."""
        # Never derived from the contents (decision 23): two writers of equal manifests would share
        # one, and collection could delete it from under the second.
        manifest_id = ManifestId.random(self._assets.layout.id_bytes)
        arrays = {it.node_id: it.refs for it in group}
        return self._encode_refs(manifest_id, arrays, kept=all(it.replaces for it in group))

    async def _move_out(
        self, base: Snapshot, nodes: Nodes, left: set[ManifestId]
    ) -> list[tuple[Node, Written]]:
        """Move arrays that did not change out of shared manifests that are mostly garbage now.

        Cost: one request for each small manifest that deleted arrays shared with others, unless it
        is cached, several at a time; those of changed arrays were read for them.
        """
        if not self._assets.layout.manifests.shares:
            return []
        shared = {
            it
            for it in left
            if (info := base.manifests.get(it)) is not None and 1 < info.num_chunk_refs <= MOST_REFS
        }
        if not shared:
            return []
        users = dict(islice(nodes.users(shared).items(), _LOOKED_AT))
        found = await bounded_map(
            lambda it: self._mostly_garbage(base, it, users[it]),
            list(users),
            limit=_CONCURRENT_MANIFESTS,
        )
        moving: dict[NodeId, Node] = {}
        waiting: dict[NodeId, Written] = {}
        for manifest in (it for it in found if it is not None):
            for node, it in _movable(manifest, nodes, users[manifest.id]):
                assert node.array is not None
                moving[node.id] = node
                before = waiting.get(node.id, Written(node.array.manifests))
                kept = tuple(ref for ref in before.refs if ref.manifest_id != manifest.id)
                waiting[node.id] = Written(kept, waiting=(*before.waiting, it))
        moved = await self._share(list(waiting.values()))
        return list(zip(moving.values(), moved, strict=True))

    async def _mostly_garbage(
        self, base: Snapshot, manifest_id: ManifestId, users: list[NodeId]
    ) -> Manifest | None:
        """Return a manifest if its remaining users need less than half of it; else None.

        One that is damaged is left alone: a commit must not fail for arrays that it does not touch.
        """
        manifests = self._assets.manifests
        get = manifests.get_with_sums if self._assets.keeps_sums else manifests.get
        try:
            manifest = await get(manifest_id, base.manifests[manifest_id].size_bytes)
        except FormatError:
            return None
        used = [manifest.arrays[it] for it in users if it in manifest.arrays]
        return manifest if is_mostly_garbage(manifest, used) else None

    async def _store_made(self, made: _Made) -> _Made:
        """Store a manifest and its sidecar, and return it without their bytes."""
        await self._assets.manifests.put(made.info.id, made.packed)
        sidecar = made.sums
        if sidecar is not None:
            await self._assets.sums.put(made.info.id, sidecar.data)
            sidecar = replace(sidecar, data=b"")
        self._stored.add(made.info.id)
        return replace(made, packed=b"", sums=sidecar)

    async def store(self, flushed: Flushed) -> None:
        """Store the manifests that are not stored yet, several at a time, and their sidecars."""

        async def store(manifest_id: ManifestId) -> None:
            packed = flushed.manifests[manifest_id]
            sidecar = flushed.sums.get(manifest_id)
            put = self._assets.manifests.put(
                manifest_id, packed, keep=True, decoded=self._decoded.get(manifest_id)
            )
            if sidecar is None:
                await put
            else:
                await gather(put, self._assets.sums.put(manifest_id, sidecar.data))
            # Only now: after a failure it is stored again. Nobody else has its name.
            self._stored.add(manifest_id)
            self._decoded.pop(manifest_id, None)

        await bounded_map(store, list(flushed.manifests), limit=_CONCURRENT_MANIFESTS)

    def _inputs(self, node: Node, tree: WorkingTree) -> tuple[ArrayChanges, _Recipe]:
        """Return the changes of an array, and the inputs of its manifests."""
        array = node.array
        assert array is not None
        changes = tree.changes.chunks.get(node.id) or ArrayChanges(len(array.dimensions))
        base_node = tree.base_node(node)
        old = base_node.array.manifests if base_node and base_node.array else ()
        if changes.keeps_nothing:
            old = ()  # nothing of the base is left; the number of axes may differ
        return changes, (old, array.grid, changes.revision)

    def _known(self, node: Node, recipe: _Recipe) -> Written | None:
        """Return the manifests that were made from the same inputs before."""
        # A commit that lost a race comes here again, with manifests of the winner where it wrote
        # to the same ones. What has the same inputs is the same, and is stored already.
        known = self._made.get(node.id)
        return known[1] if known is not None and known[0] == recipe else None

    async def _write_small(
        self, nodes: Sequence[Node], base: Snapshot, tree: WorkingTree
    ) -> dict[NodeId, Written]:
        """Write the arrays that are small, for many of them at once; others are left out."""
        manifests = self._assets.manifests
        shares = self._assets.layout.manifests.shares and not self._assets.keeps_sums
        if not shares or len(nodes) < _FEWEST_SMALL:
            return {}
        from icechunk_async.engine.commit.small import merged, small_array  # noqa: PLC0415 -- on use

        written: dict[NodeId, Written] = {}
        recipes: dict[NodeId, _Recipe] = {}
        small: list[Small] = []
        for node in nodes:
            changes, recipe = self._inputs(node, tree)
            known = self._known(node, recipe)
            if known is not None:
                written[node.id] = known
                continue
            it = small_array(node, changes, recipe[0], base.manifests, self.options.splitting)
            if it is not None:
                small.append(it)
                recipes[node.id] = recipe

        async def load(manifest_id: ManifestId) -> Manifest:
            return await manifests.get(manifest_id, base.manifests[manifest_id].size_bytes)

        for some in batched(small if len(small) >= _FEWEST_SMALL else (), _SMALL_TOGETHER):
            sources = list({it.source: None for it in some if it.source is not None})
            loaded = await bounded_map(load, sources, limit=_CONCURRENT_MANIFESTS)
            work = partial(merged, some, dict(zip(sources, loaded, strict=True)))
            count = sum(it.changes.count() for it in some) + sum(map(len, loaded))
            found = await self._assets.compute(work, size_bytes=count * _BYTES_PER_REF)
            for node_id, waiting in found.items():
                made = Written((), waiting=() if waiting is None else (waiting,))
                written[node_id] = made
                self._made[node_id] = (recipes[node_id], made)
        return written

    async def _write(
        self, node: Node, base: Snapshot, tree: WorkingTree, *, rewrite_all: bool = False
    ) -> Written:
        array = node.array
        assert array is not None
        changes, recipe = self._inputs(node, tree)
        known = None if rewrite_all else self._known(node, recipe)
        if known is not None:
            return known
        columns = changes.columns()
        inside = columns.inside(tuple((0, size) for size in array.grid))
        if not inside.all():  # deletions outside of the grid, which shrinking left for the log
            columns = columns.take(inside)
        plan = await self._plan(
            node,
            base,
            recipe[0],
            columns.coords,
            kept=changes.kept_grid,
            rewrite_all=rewrite_all,
        )
        made = await self._build_cells(
            node.id,
            plan.cells,
            columns,
            changes,
            base,
            store=rewrite_all,
            share=len(plan.cells) <= _CELLS_TOGETHER,
        )
        written = replace(made, refs=(*plan.reused, *made.refs))
        self._made[node.id] = (recipe, written)
        return written

    async def _plan(
        self,
        node: Node,
        base: Snapshot,
        old: Sequence[ManifestRef],
        changed: npt.NDArray[np.uint32],
        *,
        kept: Coordinates | None = None,
        rewrite_all: bool,
    ) -> SplitPlan:
        """Decide which cells of an array are written; read what must be divided by references."""
        array = node.array
        assert array is not None
        grid, sizes = array.grid, split_sizes(node.path, array, self.options.splitting)

        async def occupied(manifest_id: ManifestId) -> npt.NDArray[np.int64]:
            refs = await self._refs(node.id, manifest_id, base, len(grid))
            return await self._assets.compute(
                lambda: occupied_cells(refs.coords, sizes, grid, kept=kept),
                size_bytes=len(refs) * _BYTES_PER_REF,
            )

        # Usually none. The others' cells are planned by boxes, and written if anything is in them.
        wide = wide_manifests(grid, sizes, old, kept=kept)
        found = await bounded_map(occupied, wide, limit=_CONCURRENT_REWRITES) if wide else ()
        return plan_manifests(
            grid,
            sizes,
            old,
            changed,
            kept=kept,
            rewrite_all=rewrite_all,
            occupied=dict(zip(wide, found, strict=True)),
        )

    async def _refs(
        self, node_id: NodeId, manifest_id: ManifestId, base: Snapshot, rank: int
    ) -> ChunkRefs:
        """Load the references of an array in one manifest."""
        manifests = self._assets.manifests
        get = manifests.get_with_sums if self._assets.keeps_sums else manifests.get
        info = base.manifests.get(manifest_id)
        manifest = await get(manifest_id, 0 if info is None else info.size_bytes)
        # References of another rank, which other engines may keep, are left behind here.
        return manifest.refs(node_id, rank)

    async def _build_cells(
        self,
        node_id: NodeId,
        cells: Sequence[CellPlan],
        columns: ChunkRefs,
        changes: ArrayChanges,
        base: Snapshot,
        *,
        store: bool,
        share: bool = False,
    ) -> Written:
        """Build the manifests of some cells; ``store`` each when it is made.

        With ``share`` those of cells with few references are left to `_share`.
        """
        share = share and self._assets.layout.manifests.shares

        async def build(cell: CellPlan) -> _Made | Waiting | None:
            made = await self._build(node_id, cell, columns, changes, base, share=share)
            return await self._store_made(made) if store and isinstance(made, _Made) else made

        limit = _CONCURRENT_REWRITES if store else _CONCURRENT_MANIFESTS
        found = await bounded_map(build, cells, limit=limit)
        made = [it for it in found if isinstance(it, _Made)]
        waiting = tuple(it for it in found if isinstance(it, Waiting))
        written = _written(made, tuple(ref for it in made for ref in it.refs))
        return replace(written, waiting=waiting) if waiting else written

    async def _build(
        self,
        node_id: NodeId,
        cell: CellPlan,
        columns: ChunkRefs,
        changes: ArrayChanges,
        base: Snapshot,
        *,
        share: bool,
    ) -> _Made | Waiting | None:
        """Build one cell's manifest; None if no reference is left in it.

        With ``share`` only its references, if they are few.
        """
        manifests = self._assets.manifests
        infos = [base.manifests.get(it.manifest_id) for it in cell.sources]
        if any(it is not None and manifests.may_be_patched(it.size_bytes) for it in infos):
            patched = await self._patch(node_id, cell, columns, changes, base)
            if patched is not None:
                return patched
        parts = [
            await self._refs(node_id, source.manifest_id, base, columns.rank)
            for source in cell.sources
        ]

        def encode() -> _Made | Waiting | None:
            return self._encode(node_id, cell, parts, columns, changes, share=share)

        count = sum(map(len, parts)) + len(cell.changes)
        return await self._assets.compute(encode, size_bytes=count * _BYTES_PER_REF)

    async def _patch(
        self,
        node_id: NodeId,
        cell: CellPlan,
        columns: ChunkRefs,
        changes: ArrayChanges,
        base: Snapshot,
    ) -> _Made | None:
        """Build a cell's manifest from the bytes of the old one, where only little changes."""
        source = cell.sources[0] if len(cell.sources) == 1 else None
        info = None if source is None else base.manifests.get(source.manifest_id)
        if source is None or info is None or not 0 < len(cell.changes) <= MAX_PATCHED_REFS:
            return None
        ours = columns.take(cell.changes)
        # The number of references, their order and the extents must stay: only then is nothing but
        # the changed entries different.
        if changes.kept_grid is not None or (ours.kinds == Kind.DELETED).any():
            return None
        if not (within(source.extents, cell.box) and ours.inside(source.extents).all()):
            return None
        # A patched manifest keeps the dictionary of the old one, which was not trained on the new
        # locations.
        if self.options.location_dictionary is not None:
            return None
        # Compressed blocks that do not change are copied without decompressing them.
        data = await self._assets.manifests.seekable_file(info.id, info.size_bytes)
        if data is None:
            return None
        manifest_id = ManifestId.random(self._assets.layout.id_bytes)
        changed = ours.sort()
        old_sums = await self._assets.sums.load(info.id) if self._assets.keeps_sums else None

        def work() -> tuple[bytes, Sidecar | None] | None:
            patched = self._assets.layout.manifests.patch(
                data,
                (info.id, manifest_id),
                node_id,
                changed,
                self._assets.compression_level,
            )
            if patched is None:
                return None
            if not self._assets.keeps_sums:
                return patched.data, None
            return patched.data, _patched_sums(manifest_id, node_id, patched, changed, old_sums)

        made = await self._assets.compute(work, size_bytes=len(data))
        if made is None:
            # Patching failed, so the next step reads the whole manifest: do not fetch it twice.
            await self._assets.manifests.keep(info.id, data)
            return None
        packed, sidecar = made
        new = ManifestFileInfo(manifest_id, len(packed), info.num_chunk_refs)
        return _Made((ManifestRef(manifest_id, source.extents),), new, packed, sidecar)

    def _encode(
        self,
        node_id: NodeId,
        cell: CellPlan,
        parts: list[ChunkRefs],
        columns: ChunkRefs,
        changes: ArrayChanges,
        *,
        share: bool,
    ) -> _Made | Waiting | None:
        box = cell.box
        if changes.kept_grid is not None:
            box = tuple((a, min(b, c)) for (a, b), c in zip(box, changes.kept_grid, strict=True))
        ours = columns if len(cell.changes) == len(columns) else columns.take(cell.changes)
        from icechunk_async.format.manifest.merging import merge  # noqa: PLC0415 -- loaded when it is used

        refs = merge(parts, ours, box)
        if len(refs) == 0:
            return None
        size_bytes = may_share(refs) if share else None
        if size_bytes is not None:
            return Waiting(node_id, refs, size_bytes, replaces=bool(parts))
        manifest_id = ManifestId.random(self._assets.layout.id_bytes)
        return self._encode_refs(manifest_id, {node_id: refs}, kept=bool(parts))

    def _encode_refs(
        self, manifest_id: ManifestId, arrays: Mapping[NodeId, ChunkRefs], *, kept: bool
    ) -> _Made:
        """Encode a manifest; with ``kept`` a small one stays in memory decoded."""
        packed = self._assets.manifests.encode(
            manifest_id, arrays, self.options.location_dictionary
        )
        count = sum(map(len, arrays.values()))
        if kept and count <= _KEPT_REFS:
            # An array that changes is likely to change again. To keep those of many new arrays
            # takes a tenth of the time of their commit. Without what `take` left of
            # larger pools, which it would keep in memory. Checksums are read from their own file,
            # and only by who wants them.
            small = _compact(arrays)
            if sum(refs.inline.nbytes for refs in small.values()) <= _KEPT_BYTES:
                self._decoded[manifest_id] = Manifest(manifest_id, small)
        info = ManifestFileInfo(manifest_id, len(packed), count)
        sidecar = _sidecar(manifest_id, arrays, packed) if self._assets.keeps_sums else None
        refs = tuple(ManifestRef(manifest_id, it.extents()) for it in arrays.values())
        return _Made(refs, info, packed, sidecar)


def _compact(arrays: Mapping[NodeId, ChunkRefs]) -> dict[NodeId, ChunkRefs]:
    """Return the references of arrays without sums, and without what others refer to."""
    several = None
    if any(refs.coords.base is not None for refs in arrays.values()):  # views of larger columns
        from icechunk_async.format.manifest.several import Several  # noqa: PLC0415 -- on use

        several = Several.of(list(arrays.values()))
    if several is None:
        return {it: replace(refs.narrow().compact(), sums=None) for it, refs in arrays.items()}
    return dict(zip(arrays, replace(several, sums=None).divided(), strict=True))


async def with_digests(assets: Assets, flushed: Flushed, base_list: DigestList | None) -> Flushed:
    """Return a hierarchy with the list of its digests; ``base_list`` is that of its base."""
    new = {manifest_id: sidecar.digests for manifest_id, sidecar in flushed.sums.items()}
    found = await digests_of(flushed.files, new, base_list, assets.sums)
    return replace(flushed, digests=DigestList.of(flushed.nodes.values(), found))


def root_of(flushed: Flushed) -> dict[str, JSON]:
    """Return the property of a snapshot that vouches for what it consists of.

    Empty if a manifest's digest is unknown: the root would not vouch for it.
    """
    digests = flushed.digests
    return {} if digests is None or not digests.is_complete else {CONTENT_ROOT: digests.root}


def put_digests(
    assets: Assets, snapshot_id: SnapshotId, flushed: Flushed
) -> list[Coroutine[Any, Any, None]]:
    """Return the coroutines that store the list of a new snapshot's digests: at most one."""
    digests = flushed.digests
    return [] if digests is None else [assets.digests.put(snapshot_id, digests)]


def plan_cells(node: Node, splitting: ManifestSplittingConfig | None) -> list[CellPlan] | None:
    """Divide all references of an array among manifests by the given rules.

    None if their boxes meet too many cells, so that manifests must be read.
    """
    array = node.array
    assert array is not None
    sizes = split_sizes(node.path, array, splitting)
    if wide_manifests(array.grid, sizes, array.manifests):
        return None
    none = np.empty((0, len(array.grid)), np.uint32)
    return plan_manifests(array.grid, sizes, array.manifests, none, rewrite_all=True).cells


def count_cells(node: Node, base: Snapshot, splitting: ManifestSplittingConfig | None) -> int:
    """Count the manifests that an array is divided among, at most, without reading any."""
    array = node.array
    assert array is not None
    cells = plan_cells(node, splitting)
    if cells is not None:
        return len(cells)
    infos = (base.manifests.get(ref.manifest_id) for ref in array.manifests)
    # What is not listed is an error for who reads it.
    counts = (0 if info is None else info.num_chunk_refs for info in infos)
    sizes = split_sizes(node.path, array, splitting)
    return most_cells(array.grid, sizes, zip(array.manifests, counts, strict=True))


def _together(arrays: Iterable[Node], num_cells: Callable[[Node], int]) -> Iterator[list[Node]]:
    """Divide arrays so that those of each part have a bounded number of cells."""
    part: list[Node] = []
    cells = 0
    for node in arrays:
        count = num_cells(node)
        if part and cells + count > _CELLS_TOGETHER:
            yield part
            part, cells = [], 0
        part.append(node)
        cells += count
    if part:
        yield part


def _in_turns(waiting: Sequence[tuple[Waiting, ...]]) -> Iterator[Waiting]:
    """Iterate over the first cells of all arrays, then over the second ones, and so on.

    Arrays that grow together grow by the same cells, which then share the same manifests.
    """
    for turn in range(max(map(len, waiting), default=0)):
        for cells in waiting:
            if turn < len(cells):
                yield cells[turn]


def _placed(it: Written, made_for: Mapping[Waiting, tuple[_Made, ManifestRef]]) -> Written:
    """Return the manifests of an array, with those that were made since for cells that waited."""
    if not it.waiting:
        return it
    new = [made_for[cell] for cell in it.waiting]
    more = _written([made for made, _ in new], (*it.refs, *(ref for _, ref in new)))
    return Written(
        more.refs,
        {**it.files, **more.files},
        {**it.packed, **more.packed},
        {**it.sums, **more.sums},
    )


def _written(made: Sequence[_Made], refs: tuple[ManifestRef, ...]) -> Written:
    return Written(
        refs,
        {it.info.id: it.info for it in made},
        {it.info.id: it.packed for it in made},
        {it.info.id: it.sums for it in made if it.sums is not None},
    )


def _movable(manifest: Manifest, nodes: Nodes, users: list[NodeId]) -> list[tuple[Node, Waiting]]:
    """Return the arrays that use a manifest, with their references.

    None if another writer laid it out in another way.
    """
    found: list[tuple[Node, Waiting]] = []
    for node_id in users:
        path = nodes.path_of(node_id)
        node = None if path is None else nodes[path]
        if node is None or node.array is None:
            return []
        refs = manifest.refs(node_id, len(node.array.dimensions)).narrow().compact()
        uses = [it.extents for it in node.array.manifests if it.manifest_id == manifest.id]
        if len(uses) != 1 or not (len(node.array.manifests) == 1 or refs.inside(uses[0]).all()):
            return []
        size_bytes = may_share(refs)
        if len(refs) == 0 or size_bytes is None:
            return []
        found.append((node, Waiting(node_id, refs, size_bytes, replaces=False)))
    return [] if manifest.strays else found


def _with_written(
    tree: WorkingTree, changed: Sequence[Node], written: Sequence[Written]
) -> tuple[Nodes, set[ManifestId]]:
    """Return all nodes with the manifests written for them, and those of the base that they left.

    Deleted arrays left theirs as well.
    """
    pairs = list(zip(changed, written, strict=True))
    left = _left_by(tree, pairs).union(*map(_manifests_of, tree.deleted_nodes()))
    return tree.edited().edited(starmap(_with_manifests, pairs)), left


def _left_by(tree: WorkingTree, written: Iterable[tuple[Node, Written]]) -> set[ManifestId]:
    """Return the manifests that arrays have in the base and use no longer."""
    left: set[ManifestId] = set()
    for node, now in written:
        left |= _manifests_of(tree.base_node(node)) - {ref.manifest_id for ref in now.refs}
    return left


def _manifests_of(node: Node | None) -> set[ManifestId]:
    array = None if node is None else node.array
    return set() if array is None else {ref.manifest_id for ref in array.manifests}


def _sidecar(manifest_id: ManifestId, arrays: Mapping[NodeId, ChunkRefs], packed: bytes) -> Sidecar:
    """Return the checksums of a manifest."""
    digest = hashlib.sha256(packed).digest()
    return _encoded(ManifestSums.of(Manifest(manifest_id, arrays), digest))


def _patched_sums(
    manifest_id: ManifestId,
    node_id: NodeId,
    patched: PatchedManifest,
    changed: ChunkRefs,
    old: ManifestSums | None,
) -> Sidecar:
    """Return the checksums of a manifest in which some references of another one changed."""
    key = (node_id, changed.rank)
    sums = None if old is None else old.arrays.get(key)
    fits = sums is not None and sums.count == patched.count
    codes = sums.codes() if sums is not None and fits else np.zeros(patched.count, np.uint64)
    # A place without a sum before is of any kind, so whether all are known cannot be said.
    complete = fits and old is not None and old.head.is_complete and not without_sum(changed).any()
    codes[patched.rows] = 0 if changed.sums is None else changed.sums
    head = SumsHead(manifest_id, hashlib.sha256(patched.data).digest(), complete)
    return _encoded(ManifestSums(head, {key: ArraySums.of(codes)}))


def _encoded(sums: ManifestSums) -> Sidecar:
    data = sums.encode()
    return Sidecar(data, listed(sums, data))


def within(extents: Extents, box: Extents) -> bool:
    """Return whether all that lies in one box lies in another."""
    return len(extents) == len(box) > 0 and all(
        low <= start and stop <= high
        for (start, stop), (low, high) in zip(extents, box, strict=True)
    )


def _with_manifests(node: Node, written: Written) -> Node:
    assert node.array is not None
    array: ArrayData = replace(node.array, manifests=written.refs)
    return replace(node, array=array)

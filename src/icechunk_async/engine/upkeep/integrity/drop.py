"""Drop references to chunks that are lost, and point others at sources that moved, in a commit."""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.publisher import Publisher
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.engine.upkeep.integrity.rebuild import coordinates_in
from icechunk_async.engine.upkeep.integrity.structure import uncached
from icechunk_async.errors import FormatError, InvalidInputError, ObjectNotFoundError
from icechunk_async.format.ids import ChunkId, ManifestId
from icechunk_async.format.manifest.chunk import Kind, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import Nodes
from icechunk_async.format.transaction_log import TransactionLog, unique_coordinates
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.integrity.report import Finding
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Coordinates, Extents
    from icechunk_async.format.snapshot import Node, Snapshot
    from icechunk_async.storage import Storage

__all__ = ["Damage", "Drop", "commit_drop", "plan_drop"]

_SHOWN: Final = 20


@dataclass(slots=True)
class Damage:
    """Chunks that are lost, by the place where they were."""

    sizes: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Chunk objects that are missing (-1) or too short, with the bytes that are left."""
    parts: dict[bytes, set[tuple[int, int]]] = field(
        default_factory=dict[bytes, set[tuple[int, int]]]
    )
    """Ranges (first byte, length) of chunk objects that hold damaged chunks."""
    virtual: dict[str, set[tuple[int, int]] | None] = field(
        default_factory=dict[str, "set[tuple[int, int]] | None"]
    )
    """Ranges of virtual objects; None: all of the object."""
    manifests: set[ManifestId] = field(default_factory=set[ManifestId])
    """Manifests that are missing or cannot be read."""
    inside: dict[tuple[ManifestId, str], set[Coordinates]] = field(
        default_factory=dict[tuple[ManifestId, str], set["Coordinates"]]
    )
    """Chunks inside manifests, by array."""
    whole: set[str] = field(default_factory=set[str])
    """Keys of objects of which nothing is sound."""

    @classmethod
    async def of(cls, engine: Engine, findings: Iterable[Finding]) -> Self:
        """Sort findings, and look at each object again."""
        # A report may be old. What was restored meanwhile is not dropped. What a cache of this
        # process holds does not count: others have lost it.
        damage, assets = cls(), uncached(engine)
        for it in findings:
            name = it.location.rpartition("/")[2]
            if it.kind == "virtual":
                damage._add_virtual(it)
            elif it.kind == "manifest":
                await damage._add_manifest(assets, it, ManifestId.parse(name))
            else:
                await damage._add_chunk(assets.storage, it, bytes(ChunkId.parse(name)))
        return damage

    def _add_virtual(self, it: Finding) -> None:
        if it.offset is None or it.length is None:
            self.virtual[it.location] = None
            return
        known = self.virtual.setdefault(it.location, set())
        if known is not None:
            known.add((it.offset, it.length))

    async def _add_manifest(self, assets: Assets, it: Finding, manifest_id: ManifestId) -> None:
        if it.problem == "undecodable":
            if it.array is not None and it.coordinates is not None:
                self.inside.setdefault((manifest_id, it.array), set()).add(it.coordinates)
            return
        try:
            await assets.manifests.read(manifest_id)
        except FormatError:
            self.manifests.add(manifest_id)
            self.whole.add(it.location)

    async def _add_chunk(self, storage: Storage, it: Finding, chunk_id: bytes) -> None:
        try:
            size = (await storage.get(it.location, ByteRange(0, 0))).size_bytes
        except ObjectNotFoundError:
            self.sizes[chunk_id] = -1
            return
        # Short, or lost as a whole: by its present length `lost` decides for each reference, as
        # chunks at the beginning of a pack may be sound.
        if it.problem in ("missing", "too short") or it.offset is None or it.length is None:
            self.sizes[chunk_id] = size
            return
        self.parts.setdefault(chunk_id, set()).add((it.offset, it.length))
        # One damaged chunk that is all of the object; of a pack the other chunks are still needed.
        if (it.offset, it.length) == (0, size):
            self.whole.add(it.location)

    def removable(self) -> list[str]:
        """Return the keys of objects of which nothing is sound."""
        return sorted(self.whole)

    def lost(self, refs: ChunkRefs) -> npt.NDArray[np.bool_]:
        """Return which references are to lost chunks."""
        found = np.zeros(len(refs), bool)
        native = np.flatnonzero(refs.kinds == Kind.NATIVE)
        if len(native) and (self.sizes or self.parts):
            names: list[bytes] = [bytes(it) for it in refs.chunk_ids]
            touched = np.array([it in self.sizes or it in self.parts for it in names], bool)
            for row in native[touched[refs.objects[native]]].tolist():
                name = names[int(refs.objects[row])]
                start, length = int(refs.offsets[row]), int(refs.lengths[row])
                size = self.sizes.get(name)
                # A missing object counts as -1 bytes long, so any reference to it is cut, also an
                # empty one.
                cut = size is not None and start + length > size
                found[row] = cut or (start, length) in self.parts.get(name, ())
        if self.virtual:
            for row in np.flatnonzero(refs.kinds == Kind.VIRTUAL).tolist():
                ref = refs.ref(row)
                assert isinstance(ref, VirtualChunk)
                if ref.location in self.virtual:
                    ranges = self.virtual[ref.location]
                    found[row] = ranges is None or (ref.offset, ref.length) in ranges
        return found


@dataclass(slots=True)
class Drop:
    """The changes of one branch."""

    branch: str
    base: Snapshot
    """The tip, without manifests that are lost."""
    lost: dict[str, npt.NDArray[np.uint32]] = field(
        default_factory=dict[str, "npt.NDArray[np.uint32]"]
    )
    """Coordinates of the chunks to drop, by array."""
    boxes: dict[str, list[Extents]] = field(default_factory=dict[str, "list[Extents]"])
    """Parts of arrays whose manifests are lost."""
    moved: dict[str, ChunkRefs] = field(default_factory=dict[str, ChunkRefs])
    """References to sources that moved."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to change."""
        return not (self.lost or self.boxes or self.moved)

    def detail(self) -> str:
        """Say which chunks are concerned."""
        parts: list[str] = []
        for path, coords in sorted(self.lost.items()):
            some = ", ".join("/".join(map(str, at)) or "()" for at in coords[:_SHOWN].tolist())
            more = f" and {len(coords) - _SHOWN} more" if len(coords) > _SHOWN else ""
            parts.append(f"{len(coords)} chunk(s) of {path!r} are dropped: {some}{more}")
        for path, boxes in sorted(self.boxes.items()):
            shown = ", ".join(repr(it) for it in boxes[:_SHOWN])
            parts.append(f"all chunks of {path!r} in {shown} are dropped, with their manifests")
        for path, refs in sorted(self.moved.items()):
            parts.append(f"{len(refs)} virtual chunk(s) of {path!r} are pointed at new sources")
        return "; ".join(parts)


async def plan_drop(
    engine: Engine, branch: str, damage: Damage, moved: Mapping[str, str]
) -> Drop | None:
    """Return the changes that a branch needs; None if it needs none."""
    tip = await engine.assets.snapshot(await engine.history.branch_tip(branch))
    drop = Drop(branch, tip)
    sources = _Sources(engine, moved)
    nodes: list[Node] = []
    for node in tip.nodes.values():
        if node.array is None:
            nodes.append(node)
            continue
        gone = [it for it in node.array.manifests if it.manifest_id in damage.manifests]
        kept = tuple(it for it in node.array.manifests if it.manifest_id not in damage.manifests)
        nodes.append(replace(node, array=replace(node.array, manifests=kept)) if gone else node)
        if gone:
            drop.boxes[node.path] = [it.extents for it in gone]
        await _look_at(node, kept, damage, sources, drop)
    if drop.boxes:
        # The commit builds on the tip without them, or it would read them to write the other
        # references.
        files = {it: info for it, info in tip.manifests.items() if it not in damage.manifests}
        drop.base = replace(tip, nodes=Nodes(nodes), manifests=files)
    return None if drop.is_empty else drop


async def _look_at(
    node: Node,
    manifests: Sequence[Any],
    damage: Damage,
    sources: _Sources,
    drop: Drop,
) -> None:
    """Find the chunks of one array that are lost or whose sources moved."""
    assert node.array is not None
    rank = len(node.array.dimensions)
    lost: list[npt.NDArray[np.uint32]] = []
    moved: dict[Coordinates, VirtualChunk] = {}
    for it in manifests:
        refs = (await sources.engine.assets.manifests.read(it.manifest_id)).refs(node.id, rank)
        new = await sources.moved(refs)
        moved |= new
        mask = damage.lost(refs)
        inside = damage.inside.get((it.manifest_id, node.path), set())
        for row in np.flatnonzero(refs.kinds == Kind.INLINE).tolist() if inside else ():
            mask[row] = tuple(refs.coords[row].tolist()) in inside
        # A chunk whose source was found again is not lost.
        for row in np.flatnonzero(mask).tolist() if new else ():
            mask[row] = tuple(refs.coords[row].tolist()) not in new
        if mask.any():
            lost.append(refs.coords[mask])
    if lost:
        drop.lost[node.path] = unique_coordinates(np.concatenate(lost))
    if moved:
        drop.moved[node.path] = ChunkRefs.from_mapping(rank, moved)


class _Sources:
    """Finds virtual sources that moved, and makes new guards for them."""

    def __init__(self, engine: Engine, moved: Mapping[str, str]) -> None:
        self.engine = engine
        # The longest beginning decides, as among containers.
        self._moved = sorted(moved.items(), key=lambda it: -len(it[0]))
        self._seen: dict[str, tuple[int, str | None, int | None]] = {}

    async def moved(self, refs: ChunkRefs) -> dict[Coordinates, VirtualChunk]:
        """Return the references of chunks whose location begins as one that moved."""
        found: dict[Coordinates, VirtualChunk] = {}
        for row in np.flatnonzero(refs.kinds == Kind.VIRTUAL).tolist() if self._moved else ():
            ref = refs.ref(row)
            assert isinstance(ref, VirtualChunk)
            for old, new in self._moved:
                if ref.location.startswith(new) and new.startswith(old):
                    break  # it has moved already: an earlier run was interrupted
                if ref.location.startswith(old):
                    location = new + ref.location[len(old) :]
                    found[tuple(refs.coords[row].tolist())] = await self._guarded(ref, location)
                    break
        return found

    async def _guarded(self, ref: VirtualChunk, location: str) -> VirtualChunk:
        """Return the reference with another location, guarded by the state found there.

        Raises:
            InvalidInputError: the object there is too short to be the same.
        """
        virtual = self.engine.virtual
        # One request for each object, however many chunks it has.
        if location not in self._seen:
            normal = virtual.locations.normalize(location)
            found = await virtual.fetch(normal, ByteRange(0, 0))
            seconds = None
            if found.last_modified is not None:
                seconds = -int(-found.last_modified.timestamp() // 1)  # rounded up
            self._seen[location] = (found.size_bytes, found.etag or found.version.token, seconds)
        size, etag, seconds = self._seen[location]
        if ref.offset + ref.length > size:
            raise InvalidInputError(
                f"{location!r} has {size} bytes, and a chunk needs {ref.offset + ref.length}: it "
                f"is not what {ref.location!r} was. Give another prefix.",
                location=location,
            )
        if ref.etag is not None:
            return VirtualChunk(location, ref.offset, ref.length, etag, None)
        newer = seconds if ref.last_modified is not None else None
        return VirtualChunk(location, ref.offset, ref.length, None, newer)


async def commit_drop(engine: Engine, drop: Drop) -> SnapshotId:
    """Publish the changes of a branch.

    Raises:
        ConflictError: the branch moved since they were planned.
    """
    workspace = Workspace(
        drop.base,
        engine.assets,
        engine.virtual,
        inline_threshold_bytes=0,
        read_only=False,
    )
    for path, coords in drop.lost.items():
        workspace.set_refs(path, ChunkRefs.build(coords, Kind.DELETED))
    for path, refs in drop.moved.items():
        workspace.set_refs(path, refs)
    # With the chunks of lost manifests, so that a session that wrote one of them is told of the
    # conflict.
    touched = {drop.base.nodes[path].id: it for path, it in _touched(drop).items()}
    publisher = Publisher(
        workspace,
        engine.history,
        engine.manifest_options,
        branch=drop.branch,
        mode=SessionMode.WRITABLE,
        default_metadata={},
        log=lambda snapshot_id: _log(snapshot_id, touched),
        writers=engine.neighbours.writers,
    )
    # Also where nothing is set: then the manifests that are left out are the change.
    return await publisher.commit("Repair: " + drop.detail(), allow_empty=True)


def _log(snapshot_id: SnapshotId, touched: dict[NodeId, npt.NDArray[np.uint32]]) -> TransactionLog:
    return TransactionLog(snapshot_id, updated_chunks=touched)


def _touched(drop: Drop) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the coordinates of all chunks that change, those of lost manifests included."""
    found: dict[str, list[npt.NDArray[np.uint32]]] = {}
    for path, coords in drop.lost.items():
        found.setdefault(path, []).append(coords)
    for path, refs in drop.moved.items():
        found.setdefault(path, []).append(refs.coords)
    for path, boxes in drop.boxes.items():
        array = drop.base.nodes[path].array
        assert array is not None
        found.setdefault(path, []).extend(coordinates_in(it, array.grid, path) for it in boxes)
    return {path: unique_coordinates(np.concatenate(parts)) for path, parts in found.items()}

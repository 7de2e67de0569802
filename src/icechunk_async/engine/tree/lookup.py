"""Finding the reference of one chunk: among the session's changes, then in the manifests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async.engine.changes.grid import covers, in_grid
from icechunk_async.errors import FormatError
from icechunk_async.format.manifest.held import Absent
from icechunk_async.format.manifest.refs import InlineChunk

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates
    from icechunk_async.format.snapshot import ManifestFileInfo, ManifestRef, Node, Snapshot

__all__ = ["ChunkHandle", "Undecided", "find_at_once", "find_in_manifests", "info_of"]


@dataclass(frozen=True, slots=True)
class ChunkHandle:
    """A chunk that exists."""

    ref: ChunkRef

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        ref = self.ref
        return len(ref.data) if isinstance(ref, InlineChunk) else ref.length

    @property
    def is_inline(self) -> bool:
        """Whether the bytes are in memory with the reference."""
        return isinstance(self.ref, InlineChunk)


@dataclass(frozen=True, slots=True)
class Undecided:
    """Neither the session's changes nor the manifests in memory have the chunk."""

    node: Node
    """The array in the base."""
    base: Snapshot


def find_at_once(
    workspace: Workspace, path: str, coords: Coordinates
) -> ChunkRef | Undecided | None:
    """Return the reference of a chunk as far as that takes no waiting; None if there is none.

    No lock is taken where nothing can change, and no change is looked for: each chunk that Zarr's
    fused pipeline reads comes through here, on several threads.
    """
    if workspace.is_fixed:
        base = workspace.base
        node = base.nodes.get(path)
        if node is None or node.array is None or not in_grid(coords, node.array):
            return None
        return _find_in_base(workspace.assets, base, node, coords)
    with workspace.lock:
        node = workspace.tree.get(path)
        if node is None or node.array is None or not in_grid(coords, node.array):
            return None
        changes = workspace.changes.chunks.get(node.id)
        if changes is not None:
            known, ref = changes.find(coords)
            if known or not changes.keeps(coords):
                return ref
        base_node, base = workspace.tree.base_node(node), workspace.base
    return None if base_node is None else _find_in_base(workspace.assets, base, base_node, coords)


def _find_in_base(
    assets: Assets, base: Snapshot, node: Node, coords: Coordinates
) -> ChunkRef | Undecided | None:
    if node.array is None:
        return None
    for manifest_ref in node.array.manifests:
        if covers(manifest_ref.extents, coords):
            found = assets.find_in_memory(manifest_ref.manifest_id, node.id, coords)
            if isinstance(found, Absent):
                return Undecided(node, base)
            if found is not None:  # else another may have it: boxes can be too wide
                return found
    return None


async def find_in_manifests(
    assets: Assets, undecided: Undecided, coords: Coordinates
) -> ChunkRef | None:
    """Return the reference of a chunk that the session did not change; None if there is none.

    Cost: one request for each manifest that may have it and is not cached.
    """
    node = undecided.node
    assert node.array is not None
    for manifest_ref in node.array.manifests:
        if covers(manifest_ref.extents, coords):
            info = info_of(manifest_ref, node, undecided.base)
            found = await assets.find_ref(info.id, info.size_bytes, node.id, coords)
            if found is not None:
                return found
    return None


def info_of(ref: ManifestRef, node: Node, base: Snapshot) -> ManifestFileInfo:
    """Return what a snapshot knows of a manifest that an array of it uses.

    Raises:
        FormatError: nothing.
    """
    info = base.manifests.get(ref.manifest_id)
    if info is None:
        raise FormatError(
            f"Array {node.path!r} uses manifest {ref.manifest_id}, which snapshot {base.id} "
            "does not list. The repository is damaged."
        )
    return info

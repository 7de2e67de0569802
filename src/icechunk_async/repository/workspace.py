"""Reading and changing a hierarchy in memory and in storage, short of publishing it.

A workspace is a base snapshot and a change set. Several tasks, threads and event loops may use
one at a time; a lock, held over no ``await``, guards what they share.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import (
    FormatError,
    InvalidCoordinatesError,
    InvalidInputError,
    NodeNotFoundError,
    ObjectNotFoundError,
    ReadOnlyError,
)
from icechunk_async.format.chunk_refs import ChunkRefs, InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.ids import ChunkId
from icechunk_async.repository.changes import ChangeSet, WorkingTree
from icechunk_async.repository.layout import chunk_key
from icechunk_async.storage import ByteRange, slice_range

if TYPE_CHECKING:
    from icechunk_async.format.chunk_refs import ChunkRef, Coordinates
    from icechunk_async.format.snapshot import (
        ArrayData,
        ManifestFileInfo,
        ManifestRef,
        Node,
        Snapshot,
    )
    from icechunk_async.repository.assets import Assets
    from icechunk_async.repository.virtual import VirtualChunks
    from icechunk_async.storage import Data, RangeRequest

__all__ = ["ChunkHandle", "Workspace"]

_CONCURRENT_MANIFESTS = 16


@dataclass(frozen=True, slots=True)
class ChunkHandle:
    """A chunk that exists: its reference and size."""

    ref: ChunkRef
    size_bytes: int

    @property
    def is_inline(self) -> bool:
        """Whether the bytes are in memory with the reference."""
        return isinstance(self.ref, InlineChunk)


class Workspace:
    """The hierarchy of one session."""

    def __init__(
        self,
        base: Snapshot,
        assets: Assets,
        virtual: VirtualChunks,
        *,
        inline_threshold_bytes: int,
        read_only: bool,
    ) -> None:
        """Begin at ``base`` without changes."""
        self.lock = threading.RLock()
        self.base = base
        self.changes = ChangeSet()
        self.tree = WorkingTree(base.nodes, self.changes)
        self.assets = assets
        self.virtual = virtual
        self.inline_threshold_bytes = inline_threshold_bytes
        self.why_read_only = "This session only reads." if read_only else None
        """Why changes are refused at present; None while they are allowed."""

    def rebase_to(self, base: Snapshot, changes: ChangeSet) -> None:
        """Stand on another snapshot with other changes."""
        with self.lock:
            self.base, self.changes = base, changes
            self.tree = WorkingTree(base.nodes, changes)

    def check_writable(self) -> None:
        """Refuse if changes are not allowed at present."""
        if self.why_read_only is not None:
            raise ReadOnlyError(
                f"{self.why_read_only} Begin a new session with Repository.writable_session."
            )

    def node(self, path: str) -> Node | None:
        """Answer the node at an absolute path."""
        with self.lock:
            return self.tree.get(path)

    def array(self, path: str) -> Node:
        """Answer the array at an absolute path.

        Raises:
            NodeNotFoundError: there is no array.
        """
        node = self.node(path)
        if node is None or node.array is None:
            found = "there is a group" if node is not None else "nothing is there"
            raise NodeNotFoundError(f"There is no array at {path!r}: {found}.", path=path)
        return node

    def set_node(
        self, path: str, user_data: bytes, array: ArrayData | None, *, if_absent: bool = False
    ) -> None:
        """Create a node, or replace its metadata document unless it must be absent.

        Raises:
            ReadOnlyError: changes are not allowed.
            NodeExistsError: a node of the other type is there.
        """
        with self.lock:
            self.check_writable()
            if not (if_absent and self.tree.get(path) is not None):
                self.tree.set_node(path, user_data, array)

    def delete_node(self, path: str) -> None:
        """Delete an array, or a group with all below it; a missing node is no error."""
        with self.lock:
            self.check_writable()
            self.tree.delete_node(path)

    def delete_chunk(self, path: str, coords: Coordinates) -> None:
        """Delete one chunk; one that cannot exist is no error."""
        with self.lock:
            self.check_writable()
            node = self.tree.get(path)
            if node is not None and node.array is not None and _in_grid(coords, node.array):
                self.tree.chunk_changes(node).set(coords, None)

    def set_ref(self, path: str, coords: Coordinates, ref: ChunkRef) -> None:
        """Set the reference of one chunk.

        Raises:
            ReadOnlyError, NodeNotFoundError, InvalidCoordinatesError: nothing was set.
        """
        with self.lock:
            self.tree.chunk_changes(self._check_target(path, coords)).set(coords, ref)

    def set_refs(self, path: str, refs: ChunkRefs) -> None:
        """Set or delete many chunks of an array at once.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidCoordinatesError: some lie outside of the grid; nothing was set.
            InvalidInputError: a chunk of no bytes.
        """
        with self.lock:
            self.check_writable()
            node = self.array(path)
            assert node.array is not None
            grid = node.array.grid
            if refs.rank != len(grid):
                raise _bad_rank(path, refs.rank, len(grid))
            outside = ~refs.inside(tuple((0, size) for size in grid))
            if outside.any():
                first = tuple(refs.coords[outside][0].tolist())
                raise _outside(path, first, grid, count=int(outside.sum()))
            if np.any((refs.lengths == 0) & (refs.kinds != Kind.DELETED)):
                raise _no_bytes(path)
            self.tree.chunk_changes(node).set_many(refs)

    async def write_chunk(
        self,
        path: str,
        coords: Coordinates,
        data: Data,
        *,
        direct: bool = False,
        if_absent: bool = False,
    ) -> None:
        """Store the bytes of one chunk: in the manifest if they are few, else as an object.

        With ``if_absent`` a chunk that this session set meanwhile is left as it is.

        Raises:
            ReadOnlyError, NodeNotFoundError, InvalidCoordinatesError: nothing was stored.
            InvalidInputError: there are no bytes.

        Cancellation: the chunk is unchanged; an object that nothing refers to may exist.
        """
        self._check_target(path, coords)
        if len(data) == 0:
            raise _no_bytes(path)
        ref: ChunkRef
        if len(data) <= self.inline_threshold_bytes:
            ref = InlineChunk(bytes(data))
        else:
            chunk_id = ChunkId.random()
            assets = self._direct if direct else self.assets
            await assets.storage.put(chunk_key(chunk_id), data)
            ref = NativeChunk(chunk_id, 0, len(data))
        with self.lock:  # the session may have changed while the object was stored
            changes = self.tree.chunk_changes(self._check_target(path, coords))
            if not (if_absent and changes.find(coords)[1] is not None):
                changes.set(coords, ref)

    def _check_target(self, path: str, coords: Coordinates) -> Node:
        with self.lock:
            self.check_writable()
            node = self.array(path)
        assert node.array is not None
        grid = node.array.grid
        if len(coords) != len(grid):
            raise _bad_rank(path, len(coords), len(grid))
        if not _in_grid(coords, node.array):
            raise _outside(path, coords, grid)
        return node

    async def find_chunk(
        self, path: str, coords: Coordinates, *, direct: bool = False
    ) -> ChunkHandle | None:
        """Answer the reference of a chunk; None if it was never written, or cannot exist.

        Cost: at most one request, for the manifest; none once that is cached.
        """
        with self.lock:
            node = self.tree.get(path)
            if node is None or node.array is None or not _in_grid(coords, node.array):
                return None
            changes = self.changes.chunks.get(node.id)
            if changes is not None:
                known, ref = changes.find(coords)
                if known or not changes.keeps(coords):
                    return None if ref is None else _handle(ref)
            base_node, base = self.tree.base_node(node), self.base
        if base_node is None or base_node.array is None:
            return None
        for manifest_ref in base_node.array.manifests:
            if _covers(manifest_ref, coords):
                info = self._info(manifest_ref, base_node, base)
                assets = self._direct if direct else self.assets
                found = await assets.find_ref(info.id, info.size_bytes, base_node.id, coords)
                if found is not None:  # else another may have it: boxes can be too wide
                    return _handle(found)
        return None

    async def read_chunk(
        self,
        path: str,
        coords: Coordinates,
        byte_range: RangeRequest = None,
        *,
        direct: bool = False,
    ) -> bytes | memoryview | None:
        """Answer the bytes of a chunk, or a part of them; None if there is no chunk.

        Ranges behave like slices.

        Raises:
            FormatError: its object is missing or too short.
            VirtualChunkError: its source cannot be read, see ``VirtualChunks.read``.

        Cost: one request, and one for the manifest unless that is cached.
        """
        handle = await self.find_chunk(path, coords, direct=direct)
        if handle is None:
            return None
        start, stop = slice_range(byte_range, handle.size_bytes)
        match handle.ref:
            case InlineChunk(data):
                return data[start:stop]
            case NativeChunk(chunk_id, offset, _):
                return await self._read_native(chunk_id, offset + start, offset + stop, direct)
            case VirtualChunk() as virtual:
                return await self.virtual.read(virtual, start, stop, direct=direct)

    async def _read_native(
        self,
        chunk_id: ChunkId,
        start: int,
        stop: int,
        direct: bool,  # noqa: FBT001
    ) -> bytes | memoryview:
        key = chunk_key(chunk_id)
        assets = self._direct if direct else self.assets
        try:
            retrieved = await assets.storage.get(key, ByteRange(start, stop))
        except ObjectNotFoundError as error:
            raise FormatError(
                f"A manifest refers to {key!r}, which is missing. The repository is damaged, or "
                "this snapshot expired and was collected."
            ) from error
        if len(retrieved.data) != stop - start:
            raise FormatError(
                f"{key!r} is truncated: bytes {start} to {stop} were asked for, and it has "
                f"{retrieved.size_bytes}. The repository is damaged."
            )
        return retrieved.data

    async def all_refs(self, path: str, *, direct: bool = False) -> ChunkRefs:
        """Answer the references of all chunks of an array, in ascending order.

        Raises:
            NodeNotFoundError: there is no array.

        Cost: one request for each manifest of the array that is not cached; memory in
        proportion to the chunks.
        """
        with self.lock:
            node = self.array(path)
            assert node.array is not None
            changes = self.changes.chunks.get(node.id)
            ours = ChunkRefs.empty(len(node.array.grid)) if changes is None else changes.columns()
            kept = node.array.grid if changes is None else changes.kept_grid or node.array.grid
            base_node, base = self.tree.base_node(node), self.base
        manifests: tuple[ManifestRef, ...] = ()
        if base_node is not None and base_node.array is not None:
            same_rank = len(base_node.array.grid) == len(node.array.grid)
            manifests = base_node.array.manifests if same_rank else ()
        parts = await bounded_map(
            lambda ref: self._refs(ref, base_node or node, base, direct=direct),
            manifests,
            limit=1 if direct else _CONCURRENT_MANIFESTS,
        )
        box = tuple((0, min(a, b)) for a, b in zip(node.array.grid, kept, strict=True))
        parts = [part.take(part.inside(box)) for part in parts]
        merged = ChunkRefs.concat([*parts, ours]).sort()
        return merged.take(merged.kinds != Kind.DELETED)

    @staticmethod
    def _info(ref: ManifestRef, node: Node, base: Snapshot) -> ManifestFileInfo:
        info = base.manifests.get(ref.manifest_id)
        if info is None:
            raise FormatError(
                f"Array {node.path!r} uses manifest {ref.manifest_id}, which snapshot {base.id} "
                "does not list. The repository is damaged."
            )
        return info

    async def _refs(
        self, ref: ManifestRef, node: Node, base: Snapshot, *, direct: bool
    ) -> ChunkRefs:
        info = self._info(ref, node, base)
        assets = self._direct if direct else self.assets
        manifest = await assets.manifest(info.id, info.size_bytes)
        assert node.array is not None
        return manifest.refs(node.id, len(node.array.dimensions))

    @property
    def can_work_directly(self) -> bool:
        """Tell whether reads and writes can run without an event loop."""
        return self.assets.direct is not None and self.virtual.can_read_directly

    @property
    def _direct(self) -> Assets:
        direct = self.assets.direct
        assert direct is not None  # callers asked can_work_directly
        return direct


def _covers(ref: ManifestRef, coords: Coordinates) -> bool:
    return len(ref.extents) == len(coords) and all(
        start <= at < stop for at, (start, stop) in zip(coords, ref.extents, strict=True)
    )


def _in_grid(coords: Coordinates, array: ArrayData) -> bool:
    grid = array.grid
    return len(coords) == len(grid) and all(
        0 <= at < size for at, size in zip(coords, grid, strict=True)
    )


def _handle(ref: ChunkRef) -> ChunkHandle:
    match ref:
        case InlineChunk(data):
            return ChunkHandle(ref, len(data))
        case NativeChunk(length=length) | VirtualChunk(length=length):
            return ChunkHandle(ref, length)


def _bad_rank(path: str, found: int, rank: int) -> InvalidCoordinatesError:
    return InvalidCoordinatesError(
        f"A chunk of {path!r} was named by {found} coordinates, and the array has {rank} axes.",
        path=path,
    )


def _outside(
    path: str, coords: Coordinates, grid: Coordinates, *, count: int = 1
) -> InvalidCoordinatesError:
    more = f" ({count} such chunks)" if count > 1 else ""
    return InvalidCoordinatesError(
        f"Chunk {coords} lies outside of the grid of {path!r}, which has {grid} chunks{more}. "
        "Nothing was stored. Resize the array first.",
        path=path,
        coords=coords,
    )


def _no_bytes(path: str) -> InvalidInputError:
    return InvalidInputError(
        f"A chunk of {path!r} was given no bytes. Delete the chunk instead, if it should hold "
        "fill values."
    )

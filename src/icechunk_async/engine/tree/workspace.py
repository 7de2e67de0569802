"""Reading and changing a hierarchy in memory and in storage, short of publishing it.

A workspace is a base snapshot and a change set. Several tasks, threads and event loops may use
one at a time; a lock, held over no ``await``, guards what they share.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.changes.grid import bad_rank, in_grid, no_bytes, outside
from icechunk_async.engine.files.chunks import read_native, store_native, store_packs
from icechunk_async.engine.tree.listing import ArrayState, all_refs
from icechunk_async.engine.tree.lookup import (
    ChunkHandle,
    Undecided,
    find_at_once,
    find_in_manifests,
    info_of,
)
from icechunk_async.errors import (
    NodeNotFoundError,
    ReadOnlyError,
    SessionStateError,
)
from icechunk_async.format.layout import chunk_key
from icechunk_async.format.manifest.refs import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.storage import slice_range

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.format.manifest.refs import ChunkRef, ChunkRefs, Coordinates
    from icechunk_async.format.snapshot import (
        ArrayData,
        ManifestRef,
        Node,
        Snapshot,
    )
    from icechunk_async.storage import Data, RangeRequest


__all__ = ["HERE", "ChunkBytes", "ChunkHandle", "Workspace"]

type ChunkBytes = bytes | memoryview | None
"""Of a chunk; None if there is none."""
HERE: Final = (bytes, memoryview, type(None))
"""What an answer of ``Workspace.begin_reading`` is where nothing is to be awaited."""


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
        rearranging: bool = False,
        packs: Packs | None = None,
    ) -> None:
        """Begin at ``base`` without changes.

        ``rearranging`` allows moves, and only those; ``packs`` get small chunks.
        """
        self.lock = threading.RLock()
        self.base = base
        self.changes = ChangeSet()
        self.tree = WorkingTree(base.nodes, self.changes)
        self.assets = assets
        self.virtual = virtual
        self.inline_threshold_bytes = inline_threshold_bytes
        self.why_read_only = "This session only reads." if read_only else None
        """Why changes are refused at present; None while they are allowed."""
        self._rearranging = rearranging
        self.packs = packs
        """Where small chunks go; None where every chunk gets an object of its own."""
        self.is_fixed = read_only
        """Whether nothing of it ever changes, so that reading needs no lock."""

    def rebase_to(self, base: Snapshot, changes: ChangeSet) -> None:
        """Stand on another snapshot with other changes."""
        with self.lock:
            self.is_fixed = False
            self.base, self.changes = base, changes
            self.tree = WorkingTree(base.nodes, changes)

    def check_open(self) -> None:
        """Refuse if no change of any kind is allowed at present."""
        if self.why_read_only is not None:
            again = "rearrange_session" if self._rearranging else "writable_session"
            raise ReadOnlyError(
                f"{self.why_read_only} Begin a new session with Repository.{again}."
            )

    def check_writable(self) -> None:
        """Refuse if nodes and chunks cannot be written at present."""
        self.check_open()
        if self._rearranging:
            raise SessionStateError(
                "This session was begun to move nodes, and does nothing else. Commit it, and "
                "write in a session of Repository.writable_session.",
                code="rearrange-session-only",
            )

    def move_node(self, source: str, target: str) -> None:
        """Move a node and all below it; see ``Moves.add``.

        Raises:
            SessionStateError: the session was not begun to move nodes.
        """
        with self.lock:
            self.check_open()
            if not self._rearranging:
                raise SessionStateError(
                    "Nodes are moved in a session of their own. Commit this one, and move in a "
                    "session of Repository.rearrange_session.",
                    code="non-rearrange-session",
                )
            self.changes.moves.add(self.base.nodes, source, target)

    def node(self, path: str) -> Node | None:
        """Return the node at an absolute path."""
        if self.is_fixed:
            return self.base.nodes.get(path)
        with self.lock:
            return self.tree.get(path)

    def array(self, path: str) -> Node:
        """Return the array at an absolute path.

        Raises:
            NodeNotFoundError: there is no array.
        """
        node = self.node(path)
        if node is None or node.array is None:
            found = "there is a group" if node is not None else "nothing is there"
            code = {} if node is None else {"code": "not-an-array"}
            raise NodeNotFoundError(f"There is no array at {path!r}: {found}.", path=path, **code)
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
            if node is not None and node.array is not None and in_grid(coords, node.array):
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
                raise bad_rank(path, refs.rank, len(grid))
            beyond = ~refs.inside(tuple((0, size) for size in grid))
            if beyond.any():
                first = tuple(refs.coords[beyond][0].tolist())
                raise outside(path, first, grid, count=int(beyond.sum()))
            if np.any((refs.lengths == 0) & (refs.kinds != Kind.DELETED)):
                raise no_bytes(path)
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

        Cost: one request. Where chunks are packed, one for each pack, and between them none.
        """
        self._check_target(path, coords)
        if len(data) == 0:
            raise no_bytes(path)
        ref = await self.store_bytes(data, direct=direct)
        with self.lock:  # the session may have changed while the object was stored
            changes = self.tree.chunk_changes(self._check_target(path, coords))
            if not (if_absent and changes.find(coords)[1] is not None):
                changes.set(coords, ref)

    async def store_bytes(self, data: Data, *, direct: bool = False) -> ChunkRef:
        """Store the bytes of a chunk that nothing refers to yet; few are kept in the reference."""
        if len(data) <= self.inline_threshold_bytes:
            return InlineChunk(bytes(data))
        storage = (self._direct if direct else self.assets).storage
        return await store_native(storage, self.packs, data, direct=direct)

    async def store_packs(self) -> None:
        """Return when every chunk that was written before the call is in the storage.

        Whatever makes references known to others does this first.

        Raises:
            StorageUnavailableError: some may not be. They stay here, and can be stored again.

        Cancellation: likewise.
        """
        await store_packs(self.assets.storage, self.packs)

    def _check_target(self, path: str, coords: Coordinates) -> Node:
        with self.lock:
            self.check_writable()
            node = self.array(path)
        assert node.array is not None
        if not in_grid(coords, node.array):
            grid = node.array.grid
            if len(coords) != len(grid):
                raise bad_rank(path, len(coords), len(grid))
            raise outside(path, coords, grid)
        return node

    async def find_chunk(
        self, path: str, coords: Coordinates, *, direct: bool = False
    ) -> ChunkHandle | None:
        """Return the reference of a chunk; None if it was never written, or cannot exist.

        Cost: at most one request, for the manifest; none once that is cached.
        """
        found = find_at_once(self, path, coords)
        if isinstance(found, Undecided):
            found = await find_in_manifests(self._direct if direct else self.assets, found, coords)
        return None if found is None else ChunkHandle(found)

    async def read_chunk(
        self,
        path: str,
        coords: Coordinates,
        byte_range: RangeRequest = None,
        *,
        direct: bool = False,
    ) -> bytes | memoryview | None:
        """Return the bytes of a chunk, or a part of them; None if there is no chunk.

        Ranges behave like slices.

        Raises:
            FormatError: its object is missing or too short.
            VirtualChunkError: its source cannot be read, see ``VirtualChunks.read``.

        Cost: one request, and one for the manifest unless that is cached.
        """
        found = self.begin_reading(path, coords, byte_range, direct=direct)
        return found if isinstance(found, HERE) else await found

    def begin_reading(
        self,
        path: str,
        coords: Coordinates,
        byte_range: RangeRequest = None,
        *,
        direct: bool = False,
    ) -> ChunkBytes | Coroutine[Any, Any, ChunkBytes]:
        """Return what :meth:`read_chunk` does, or else what is to be awaited for it at once.

        What is in memory takes no step of an event loop, and no coroutine is made for it.
        """
        ref = find_at_once(self, path, coords)
        if isinstance(ref, Undecided):
            return self._find_and_read(ref, coords, byte_range, direct=direct)
        return None if ref is None else self._read(ref, byte_range, direct=direct)

    async def _find_and_read(
        self, undecided: Undecided, coords: Coordinates, byte_range: RangeRequest, *, direct: bool
    ) -> ChunkBytes:
        assets = self._direct if direct else self.assets
        ref = await find_in_manifests(assets, undecided, coords)
        found = None if ref is None else self._read(ref, byte_range, direct=direct)
        return found if isinstance(found, HERE) else await found

    def _read(
        self, ref: ChunkRef, byte_range: RangeRequest, *, direct: bool
    ) -> ChunkBytes | Coroutine[Any, Any, ChunkBytes]:
        match ref:
            case NativeChunk(chunk_id, offset, length):
                start, stop = slice_range(byte_range, length)
                start, stop = offset + start, offset + stop
                assets = self._direct if direct else self.assets
                read = assets.read_now(chunk_key(chunk_id), start, stop)
                if read is not None:
                    return read
                return read_native(assets.storage, self.packs, chunk_id, start, stop)
            case InlineChunk(data):
                start, stop = slice_range(byte_range, len(data))
                return data[start:stop]
            case VirtualChunk():
                start, stop = slice_range(byte_range, ref.length)
                return self.virtual.read(ref, start, stop, direct=direct)

    async def all_refs(self, path: str, *, direct: bool = False) -> ChunkRefs:
        """Return the references of all chunks of an array, in ascending order.

        Raises:
            NodeNotFoundError: there is no array.

        Cost: one request for each manifest of the array that is not cached; memory in
        proportion to the chunks.
        """
        return await all_refs(self, ArrayState.of(self, path), direct=direct)

    async def manifest_refs(
        self, ref: ManifestRef, node: Node, base: Snapshot, *, direct: bool = False
    ) -> ChunkRefs:
        """Return the references of a manifest that belong to an array of ``base``.

        Raises:
            FormatError: ``base`` does not list the manifest, or it is damaged.

        Cost: one request unless it is cached.
        """
        info = info_of(ref, node, base)
        assets = self._direct if direct else self.assets
        manifest = await assets.manifest(info.id, info.size_bytes)
        assert node.array is not None
        return manifest.refs(node.id, len(node.array.dimensions))

    @property
    def can_work_directly(self) -> bool:
        """Return whether reads and writes can run without an event loop."""
        return self.assets.direct is not None and self.virtual.can_read_directly

    @property
    def _direct(self) -> Assets:
        direct = self.assets.direct
        assert direct is not None  # callers asked can_work_directly
        return direct

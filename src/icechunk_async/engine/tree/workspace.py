"""One session's hierarchy: nodes and chunks, in memory and in storage, short of publishing it.

A workspace is a base snapshot and a change set. Several tasks, threads and event loops may use
one at a time; a lock, held over no ``await``, guards what they share.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ChangeSet, WorkingTree
from icechunk_async.engine.files.checks import damaged_chunk
from icechunk_async.engine.tree.array_state import (
    ArrayState,
    bad_rank,
    covers,
    in_grid,
    no_bytes,
    outside,
)
from icechunk_async.errors import (
    FormatError,
    NodeNotFoundError,
    OutcomeUnknownError,
    ReadOnlyError,
    SessionStateError,
    StorageUnavailableError,
)
from icechunk_async.format.crc import sum_of
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.held import Undecided
from icechunk_async.storage import slice_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.engine.tree.deduplication import Deduplication
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import (
        ArrayData,
        ManifestFileInfo,
        ManifestRef,
        Node,
        Snapshot,
    )
    from icechunk_async.storage import Data, RangeRequest


__all__ = [
    "REFUSALS",
    "ChunkHandle",
    "ChunkRecorder",
    "Closed",
    "InManifests",
    "Workspace",
    "document_of",
    "read_native",
    "read_ref",
]

_CONCURRENT_MANIFESTS: Final = 16


@dataclass(frozen=True, slots=True)
class ChunkHandle:
    """A chunk that exists."""

    ref: ChunkRef

    @property
    def size_bytes(self) -> int:
        """The length of the chunk."""
        ref = self.ref
        return len(ref.data) if isinstance(ref, InlineChunk) else ref.length

    @property
    def is_inline(self) -> bool:
        """Whether the bytes are in memory with the reference."""
        return isinstance(self.ref, InlineChunk)


@dataclass(frozen=True, slots=True)
class InManifests:
    """Whether a chunk exists is decided by manifests that are not in memory, or not all of them."""

    node: Node
    """The array in the base."""
    base: Snapshot

    def candidates(self, coords: Coordinates) -> Iterator[ManifestFileInfo]:
        """Iterate over the manifests that may have a chunk; boxes can be too wide.

        Raises:
            FormatError: the snapshot does not list one.
        """
        assert self.node.array is not None
        for ref in self.node.array.manifests:
            if covers(ref.extents, coords):
                yield _info(ref, self.node, self.base)


def _info(ref: ManifestRef, node: Node, base: Snapshot) -> ManifestFileInfo:
    info = base.manifests.get(ref.manifest_id)
    if info is None:
        raise FormatError(
            f"Array {node.path!r} uses manifest {ref.manifest_id}, which snapshot {base.id} "
            "does not list. The repository is damaged."
        )
    return info


class Closed(Enum):
    """Why a workspace refuses changes."""

    READ_ONLY = "read-only"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    IN_DOUBT = "in doubt"
    MERGING = "merging"
    DETACHED = "detached"


REFUSALS: Final = {
    Closed.READ_ONLY: "This session only reads.",
    Closed.PUBLISHING: "The session is being committed or rebased.",
    Closed.PUBLISHED: "The session was committed and only reads now.",
    Closed.IN_DOUBT: "Whether the last commit landed is unknown: commit again to find out.",
    Closed.MERGING: "Forks are being merged into the session.",
    Closed.DETACHED: "The fork was detached.",
}


class Leased(Protocol):
    """The lease of a session, as far as its hierarchy asks for it."""

    used: bool
    """Whether the session was used since somebody looked last."""

    def check(self) -> None:
        """Note that the session is used; raise if it may not be changed any more."""
        ...


class ChunkRecorder(Protocol):
    """Makes statistics of the chunks that a session writes, and stores them with its commit.

    It never raises for what chunks are: statistics that are missing are unknown, and nothing more.
    """

    def size_bytes(self, node: Node) -> int:
        """Return the size of a decoded chunk of an array; 0 if none is measured."""
        ...

    def measure(self, node: Node, coords: Coordinates, data: Data) -> object:
        """Return the statistics of the bytes of a chunk; decodes on the calling thread."""
        ...

    def keep(self, node: Node, coords: Coordinates, ref: ChunkRef, measured: object) -> None:
        """Keep what `measure` returned for a chunk that was set."""
        ...

    async def store(self) -> None:
        """Store what was kept so far; failures are logged."""
        ...


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
        deduplicate: bool = False,
    ) -> None:
        """Begin at ``base`` without changes.

        ``rearranging`` allows moves, and only those; ``packs`` get small chunks; ``deduplicate``
        stores no bytes that the session finds in place, or stored itself.
        """
        # A thread lock, not one of an event loop: Zarr runs its own loop in another thread, and
        # both use one session. Nothing awaits while it is held.
        self.lock = threading.RLock()
        self.base = base
        self.began_at = base.id
        """The snapshot that the first change was made on; replaying changes does not move it."""
        self.line = 0
        """Counts how often the changes were replaced by others that do not continue them."""
        self.changes = ChangeSet()
        self.tree = WorkingTree(base.nodes, self.changes)
        self.assets = assets
        self.virtual = virtual
        self.inline_threshold_bytes = inline_threshold_bytes
        self.closed: Closed | None = Closed.READ_ONLY if read_only else None
        """Why changes are refused at present; None while they are allowed."""
        self._rearranging = rearranging
        self.packs = packs
        """Where small chunks go; None if every chunk gets a separate object."""
        self.deduplication: Deduplication | None = None
        """Remembers what the session stored; None if every chunk is stored as it comes."""
        if deduplicate:
            from icechunk_async.engine.tree import deduplication  # noqa: PLC0415 -- loaded on use

            self.deduplication = deduplication.Deduplication()
        self.lease: Leased | None = None
        """Refuses changes once the session may have lost what it wrote; None without a lease."""
        self.recorder: ChunkRecorder | None = None
        """Makes statistics of chunks as they are written; None unless they are asked for."""
        self.is_fixed = read_only
        """Whether nothing of it ever changes, so that reading needs no lock."""

    def rebase_to(
        self,
        base: Snapshot,
        changes: ChangeSet,
        *,
        replayed: bool = False,
        continues: bool = False,
    ) -> None:
        """Stand on another snapshot with other changes.

        ``replayed`` says that they are the changes made so far, on top of newer commits;
        ``continues`` that they are those made so far against the same snapshot, and more.
        """
        with self.lock:
            # Forks remember it: what was forked from changes that are gone cannot be merged any
            # more.
            self.line += not continues
            # Discarded changes included: what comes after them is made on this base.
            if not (replayed or continues):
                self.began_at = base.id
            # Base and changes can be replaced from now on: readers need the lock to see both of one
            # moment.
            self.is_fixed = False
            self.base, self.changes = base, changes
            self.tree = WorkingTree(base.nodes, changes)

    def number_nodes(self) -> None:
        """Give created nodes ids that the layout can store beside those of the base.

        Raises:
            UnsupportedBySpecError: there are more nodes than the layout has ids.
        """
        with self.lock:
            created = [node.id for node in self.changes.new.values()]
            ids = self.assets.layout.numbered(created, self.base.nodes)
            if ids:
                self.changes.renumber(ids)

    def check_open(self) -> None:
        """Refuse if no change of any kind is allowed at present.

        Raises:
            ReadOnlyError: it only reads, or not at present.
            LeaseExpiredError, LeaseLostError: the session had a lease.
        """
        if self.closed is not None:
            again = "rearrange_session" if self._rearranging else "writable_session"
            raise ReadOnlyError(
                f"{REFUSALS[self.closed]} Begin a new session with Repository.{again}."
            )
        if self.lease is not None:
            self.lease.check()

    def check_writable(self) -> None:
        """Refuse if nodes and chunks cannot be written at present."""
        self.check_open()
        if self._rearranging:
            raise SessionStateError(
                "This session moves nodes and does nothing else. Commit it, and "
                "write in a session of Repository.writable_session.",
                code="rearrange-session-only",
            )

    def move_node(self, source: str, target: str) -> None:
        """Move a node and all below it; see ``Moves.add``.

        Raises:
            SessionStateError: it is not a session to move nodes.
        """
        with self.lock:
            self.check_open()
            if not self._rearranging:
                raise SessionStateError(
                    "Nodes are moved in a separate session. Commit this one, and move in a "
                    "session of Repository.rearrange_session.",
                    code="non-rearrange-session",
                )
            self.changes.moves.add(self.base.nodes, source, target)

    def node(self, path: str) -> Node | None:
        """Return the node at an absolute path."""
        if self.is_fixed:
            return self.base.nodes.get(path)
        with self.lock:
            if self.lease is not None:
                self.lease.used = True
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
            UnsupportedBySpecError: the repository's layout cannot express the document.
            NodeExistsError: a node of the other type is there.
        """
        with self.lock:
            self.check_writable()
            if not (if_absent and self.tree.get(path) is not None):
                document = self.assets.layout.document(path, user_data)
                self.tree.set_node(path, document, array)

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
            UnsupportedBySpecError: the repository's layout cannot express the reference.
        """
        self.assets.layout.check_ref(path, ref)
        with self.lock:
            self.tree.chunk_changes(self._target(path, coords)).set(coords, ref)

    def set_refs(self, path: str, refs: ChunkRefs) -> None:
        """Set or delete many chunks of an array at once.

        Raises:
            NodeNotFoundError: there is no array.
            InvalidCoordinatesError: some lie outside of the grid; nothing was set.
            InvalidInputError: a chunk of no bytes.
            UnsupportedBySpecError: the repository's layout cannot express some.
        """
        self.assets.layout.check_refs(path, refs)
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
        self, path: str, coords: Coordinates, data: Data, *, if_absent: bool = False
    ) -> None:
        """Store the bytes of one chunk: in the manifest if they are few, else as an object.

        With ``if_absent`` a chunk that this session set meanwhile is left unchanged.

        Raises:
            ReadOnlyError, NodeNotFoundError, InvalidCoordinatesError: nothing was stored.
            InvalidInputError: there are no bytes.

        Cancellation: the chunk is unchanged; an object that nothing refers to may exist.

        Cost: one request. If chunks are packed, one for each pack, and none in between. With
        deduplication that of finding the reference, and none for bytes that are there already; if
        the lengths and the sums, as far as known, are equal, one request to read the chunk; with
        sums, the array's manifest is decoded whole.
        """
        # Before bytes are stored, so that a mistake leaves no object behind; `put_ref` looks again.
        self.check_target(path, coords, data)
        if self.deduplication is not None:
            handle = await self.find_chunk(path, coords)
            keeps_sums = self.assets.keeps_sums
            if handle is not None and await self.deduplication.is_there(
                handle.ref,
                data,
                with_sum=(lambda: self._find_with_sum(path, coords)) if keeps_sums else None,
                read=lambda: self.read_chunk(path, coords),
            ):
                return
        recorder = self.recorder
        if recorder is None:
            ref = await self.store_bytes(data)
            self.put_ref(path, coords, ref, if_absent=if_absent)
            return
        # As of now: statistics are those of the bytes as this document reads them, even if the
        # array gets another one while they are stored.
        node = self.array(path)
        ref, measured = await gather(
            self.store_bytes(data),
            self.assets.compute(
                lambda: recorder.measure(node, coords, data), size_bytes=recorder.size_bytes(node)
            ),
        )
        self.put_ref(path, coords, ref, if_absent=if_absent)
        recorder.keep(node, coords, ref, measured)

    async def _find_with_sum(self, path: str, coords: Coordinates) -> ChunkRef | None:
        """Return a chunk of the base with its sum, if that is known; None without a chunk."""
        base = self.in_base(path)
        if base is None:
            return None
        for info in base.candidates(coords):
            found = await self.assets.manifests.find_with_sum(
                info.id, info.size_bytes, base.node.id, coords
            )
            if found is not None:
                return found
        return None

    def check_target(self, path: str, coords: Coordinates, data: Data) -> None:
        """Raise unless a chunk can be written; errors as `write_chunk`."""
        self._target(path, coords)
        if len(data) == 0:
            raise no_bytes(path)

    def put_ref(
        self, path: str, coords: Coordinates, ref: ChunkRef, *, if_absent: bool = False
    ) -> None:
        """Set the reference of a chunk whose bytes were stored meanwhile; as `write_chunk`."""
        with self.lock:  # the session may have changed while the object was stored
            changes = self.tree.chunk_changes(self._target(path, coords))
            if not (if_absent and changes.find(coords)[1] is not None):
                changes.set(coords, ref)

    async def store_bytes(self, data: Data) -> ChunkRef:
        """Store the bytes of a chunk that nothing refers to yet; few are kept in the reference."""
        if len(data) <= self.inline_threshold_bytes:
            # A copy: the caller may fill its buffer anew, and these bytes are kept until the
            # commit.
            return InlineChunk(bytes(data))
        if self.deduplication is not None:
            return await self.deduplication.store(data, self.store_object)
        return await self.store_object(data)

    async def store_object(self, data: Data) -> NativeChunk:
        """Store the bytes of a chunk as a separate object, or give them a place in a pack.

        Cancellation: an object that nothing refers to may exist.
        """
        # Before the bytes are sent, so that damage on the way to the storage is found, too.
        code = sum_of(data) if self.assets.keeps_sums else 0
        if self.packs is not None and self.packs.takes(len(data)):
            ref = await self.packs.add(data, self.assets.storage)
        else:
            ref = await self.assets.chunks.store(data)
        return NativeChunk(ref.chunk_id, ref.offset, ref.length, code) if code else ref

    async def store_packs(self) -> None:
        """Return when every chunk that was written before the call is in the storage.

        Call this before references are made known to others.

        Raises:
            StorageUnavailableError: some may not be. They stay here, and can be stored again.

        Cancellation: as after an error.
        """
        if self.packs is None or self.packs.are_stored:
            return
        try:
            await self.packs.store_all(self.assets.storage)
        except OutcomeUnknownError as error:  # about an object that nothing refers to yet
            raise StorageUnavailableError(
                f"A chunk object may not be stored: {error} Nothing was published and no change "
                "was lost; try again."
            ) from error

    async def store_statistics(self) -> None:
        """Store the statistics of chunks that were written so far, if any are made.

        Failures are logged, and chunks stay unknown. Cost: one request for each array.
        """
        if self.recorder is not None:
            await self.recorder.store()

    def _target(self, path: str, coords: Coordinates) -> Node:
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

    def find_in_memory(self, path: str, coords: Coordinates) -> ChunkRef | InManifests | None:
        """Return the reference of a chunk, None if it does not exist, or what decides that.

        A workspace that cannot change takes no lock and looks for no change: each chunk that
        Zarr's fused pipeline reads comes through here, on several threads.
        """
        if self.is_fixed:
            base = self.base
            node = base.nodes.get(path)
            if node is None or node.array is None or not in_grid(coords, node.array):
                return None
            return self._find_in_base(base, node, coords)
        with self.lock:
            if self.lease is not None:
                self.lease.used = True
            node = self.tree.get(path)
            if node is None or node.array is None or not in_grid(coords, node.array):
                return None
            changes = self.changes.chunks.get(node.id)
            if changes is not None:
                known, ref = changes.find(coords)
                # A chunk that was cut off by shrinking is gone, also if the array has grown again
                # since.
                if known or not changes.keeps(coords):
                    return ref
            base_node, base = self.tree.base_node(node), self.base
        return None if base_node is None else self._find_in_base(base, base_node, coords)

    def in_base(self, path: str) -> InManifests | None:
        """Return where the base has the chunks of an array; None if it has no such array."""
        with self.lock:
            node = self.tree.get(path)
            base_node = None if node is None else self.tree.base_node(node)
            found = base_node is not None and base_node.array is not None
            return InManifests(base_node, self.base) if base_node is not None and found else None

    def _find_in_base(
        self, base: Snapshot, node: Node, coords: Coordinates
    ) -> ChunkRef | InManifests | None:
        if node.array is None:
            return None
        manifests = self.assets.manifests
        for ref in node.array.manifests:
            if covers(ref.extents, coords):
                found = manifests.find_in_memory(ref.manifest_id, node.id, coords)
                if isinstance(found, Undecided):
                    return InManifests(node, base)
                if found is not None:  # else another manifest may have it: boxes can be too wide
                    return found
        return None

    async def _find_in_manifests(
        self, undecided: InManifests, coords: Coordinates
    ) -> ChunkRef | None:
        for info in undecided.candidates(coords):
            found = await self.assets.manifests.find_ref(
                info.id, info.size_bytes, undecided.node.id, coords
            )
            if found is not None:
                return found
        return None

    async def find_chunk(self, path: str, coords: Coordinates) -> ChunkHandle | None:
        """Return the reference of a chunk; None if it was never written, or cannot exist.

        Cost: at most one request, for the manifest; none once that is cached.
        """
        found = self.find_in_memory(path, coords)
        if isinstance(found, InManifests):
            found = await self._find_in_manifests(found, coords)
        return None if found is None else ChunkHandle(found)

    async def read_chunk(
        self, path: str, coords: Coordinates, byte_range: RangeRequest = None
    ) -> bytes | memoryview | None:
        """Return the bytes of a chunk, or a part of them; None if there is no chunk.

        Ranges behave like slices.

        Raises:
            FormatError: its object is missing or too short.
            ChunkDamagedError: reads are verified, and its bytes are not those that were written.
            VirtualChunkError: its source cannot be read, see ``VirtualChunks.read``.

        Cost: one request, and one for the manifest unless that is cached.
        """
        ref = self.find_in_memory(path, coords)
        if isinstance(ref, InManifests):
            ref = await self._find_in_manifests(ref, coords)
        match ref:
            case NativeChunk(chunk_id, offset, length):
                start, stop = slice_range(byte_range, length)
                start, stop = offset + start, offset + stop
                if self.packs is not None:
                    # The reference exists before its pack is stored: a session reads what it wrote.
                    unstored = self.packs.read(chunk_id, start, stop)
                    if unstored is not None:
                        return unstored
                return await read_native(self.assets, ref, start, stop, path=path, coords=coords)
            case InlineChunk(data):
                start, stop = slice_range(byte_range, len(data))
                return data[start:stop]
            case VirtualChunk():
                start, stop = slice_range(byte_range, ref.length)
                return await self.virtual.read(ref, start, stop)
            case None:
                return None

    def array_state(self, path: str) -> ArrayState:
        """Return the state of an array as of now.

        Raises:
            NodeNotFoundError: there is no array.
        """
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        with self.lock:
            node = self.array(path)
            assert node.array is not None
            grid = kept = node.array.grid
            changes = self.changes.chunks.get(node.id)
            ours = ChunkRefs.empty(len(grid)) if changes is None else changes.columns()
            if changes is not None and changes.kept_grid is not None:
                kept = changes.kept_grid
            base_node, base = self.tree.base_node(node), self.base
            if changes is not None and changes.keeps_nothing:
                base_node = None
        manifests: tuple[ManifestRef, ...] = ()
        if base_node is not None and base_node.array is not None:
            same_rank = len(base_node.array.grid) == len(grid)
            if same_rank:
                # In the order of their boxes, so that chunks come in ascending order as far as
                # boxes are disjoint.
                manifests = tuple(sorted(base_node.array.manifests, key=lambda it: it.extents))
        box = tuple((0, min(a, b)) for a, b in zip(grid, kept, strict=True))
        revision = 0 if changes is None else changes.revision
        return ArrayState(node, base_node or node, base, manifests, box, ours, revision)

    async def manifest_refs(
        self, state: ArrayState, manifest: ManifestRef, *, sums: bool = False
    ) -> ChunkRefs:
        """Return those references of a manifest that still count in a state of an array.

        With ``sums`` they have their checksums, as far as those are known.

        Raises:
            FormatError: the snapshot does not list the manifest, or it is damaged.

        Cost: one request unless the manifest is cached.
        """
        info = _info(manifest, state.source, state.base)
        manifests = self.assets.manifests
        get = manifests.get_with_sums if sums else manifests.get
        decoded = await get(info.id, info.size_bytes)
        assert state.source.array is not None
        refs = decoded.refs(state.source.id, len(state.source.array.dimensions))
        return state.counting(manifest, refs)

    async def all_refs(self, path: str) -> ChunkRefs:
        """Return the references of all chunks of an array, in ascending order.

        Raises:
            NodeNotFoundError: there is no array.

        Cost: one request for each manifest of the array that is not cached; memory in
        proportion to the chunks.
        """
        return await self.refs_of(self.array_state(path))

    async def refs_of(self, state: ArrayState) -> ChunkRefs:
        """Return the references of all chunks in a state of an array; as `all_refs`.

        They have their checksums if the repository keeps such.
        """
        from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

        parts = await bounded_map(
            lambda manifest: self.manifest_refs(state, manifest, sums=self.assets.keeps_sums),
            state.manifests,
            limit=_CONCURRENT_MANIFESTS,
        )
        return ChunkRefs.concat([*parts, state.set_chunks()]).sort()


def document_of(node: Node) -> dict[str, Any]:
    """Return the metadata document of a node.

    Raises:
        FormatError: it is no JSON object, or nests too deeply.
    """
    from icechunk_async.format.json.reading import parse_json  # noqa: PLC0415 -- loaded when it is used

    # What a session writes is parsed first; what a snapshot brings was written by anybody.
    return dict(parse_json(node.user_data, f"metadata document of {node.path!r}").members)


async def read_native(
    assets: Assets, ref: NativeChunk, start: int, stop: int, *, path: str, coords: Coordinates
) -> bytes | memoryview:
    """Return bytes ``[start, stop)`` of the object of a chunk.

    Raises:
        FormatError: the object is missing or too short.
        ChunkDamagedError: reads are verified, and the bytes are not those that were written.
    """
    found = await assets.chunks.read(ref.chunk_id, start, stop)
    checks = assets.checks
    if checks is None or checks.passes(ref, found):
        return found
    # A network, or a cache, may have damaged it on the way.
    found = await assets.chunks.read_again(ref.chunk_id, start, stop)
    if checks.passes(ref, found):
        return found
    raise damaged_chunk(path, coords, ref, found)


async def read_ref(
    assets: Assets, virtual: VirtualChunks, ref: ChunkRef, path: str, coords: Coordinates
) -> bytes | memoryview:
    """Return the bytes of a chunk by its reference; ``path`` and ``coords`` are for messages.

    Raises:
        FormatError, ChunkDamagedError: as `read_native`.
        VirtualChunkError: its source cannot be read, see ``VirtualChunks.read``.

    Cost: one request; none for bytes in a manifest.
    """
    match ref:
        case NativeChunk(_, offset, length):
            return await read_native(assets, ref, offset, offset + length, path=path, coords=coords)
        case InlineChunk(data):
            return data
        case VirtualChunk():
            return await virtual.read(ref, 0, ref.length)

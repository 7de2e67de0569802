"""Reading and writing chunks on the calling thread, without an event loop.

Zarr's fused codec pipeline calls a store's synchronous methods from worker threads. Where the
backend answers without waiting for a network (memory, local disks), a hop to an event loop would
take longer than the read itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from icechunk_async.engine.files.checks import damaged_chunk
from icechunk_async.engine.tree.workspace import InManifests
from icechunk_async.format.crc import sum_of
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.storage import slice_range

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import BlockingFiles
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.storage import Data, RangeRequest

__all__ = ["BlockingChunks"]


class BlockingChunks:
    """The chunks of one session, on the calling thread. Usable from any thread."""

    def __init__(self, workspace: Workspace, files: BlockingFiles) -> None:
        """Use `of`."""
        self.workspace = workspace
        self.files = files

    @classmethod
    def of(cls, workspace: Workspace) -> Self | None:
        """Return the chunks of a session; None if some storage needs an event loop."""
        files = workspace.assets.blocking
        return cls(workspace, files) if files is not None and workspace.virtual.can_block else None

    def read(
        self, path: str, coords: Coordinates, byte_range: RangeRequest = None
    ) -> bytes | memoryview | None:
        """Return the bytes of a chunk, or a part of them; as `Workspace.read_chunk`."""
        workspace = self.workspace
        ref = workspace.find_in_memory(path, coords)
        if isinstance(ref, InManifests):
            ref = self._find(ref, coords)
        match ref:
            case NativeChunk(chunk_id, offset, length):
                start, stop = slice_range(byte_range, length)
                start, stop = offset + start, offset + stop
                if workspace.packs is not None:
                    unstored = workspace.packs.read(chunk_id, start, stop)
                    if unstored is not None:
                        return unstored
                found = self.files.chunks.read(chunk_id, start, stop)
                # Not read a second time, as `read_native` does: neither a network nor a cache that
                # could have damaged the bytes lies between a local storage and this process.
                checks = workspace.assets.checks
                if checks is not None and not checks.passes(ref, found):
                    raise damaged_chunk(path, coords, ref, found)
                return found
            case InlineChunk(data):
                start, stop = slice_range(byte_range, len(data))
                return data[start:stop]
            case VirtualChunk():
                start, stop = slice_range(byte_range, ref.length)
                return workspace.virtual.read_blocking(ref, start, stop)
            case None:
                return None

    def find(self, path: str, coords: Coordinates) -> ChunkRef | None:
        """Return the reference of a chunk; as `Workspace.find_chunk`."""
        ref = self.workspace.find_in_memory(path, coords)
        return self._find(ref, coords) if isinstance(ref, InManifests) else ref

    def _find(self, undecided: InManifests, coords: Coordinates) -> ChunkRef | None:
        for info in undecided.candidates(coords):
            found = self.files.manifests.find_ref(
                info.id, info.size_bytes, undecided.node.id, coords
            )
            if found is not None:
                return found
        return None

    def write(self, path: str, coords: Coordinates, data: Data) -> None:
        """Store the bytes of one chunk; as `Workspace.write_chunk`."""
        workspace = self.workspace
        workspace.check_target(path, coords, data)
        known = workspace.deduplication
        if known is not None:
            found, keeps_sums = self.find(path, coords), workspace.assets.keeps_sums
            if found is not None and known.is_there_blocking(
                found,
                data,
                with_sum=(lambda: self._find_with_sum(path, coords)) if keeps_sums else None,
                read=lambda: self.read(path, coords),
            ):
                return
        recorder = workspace.recorder
        if recorder is None:
            workspace.put_ref(path, coords, self._store(data))
            return
        node = workspace.array(path)
        # On this thread: Zarr calls from its worker threads, so nothing waits for it but this
        # chunk.
        measured = recorder.measure(node, coords, data)
        ref = self._store(data)
        workspace.put_ref(path, coords, ref)
        recorder.keep(node, coords, ref, measured)

    def _find_with_sum(self, path: str, coords: Coordinates) -> ChunkRef | None:
        """Return a chunk of the base with its sum, if that is known; None without a chunk."""
        base = self.workspace.in_base(path)
        if base is None:
            return None
        for info in base.candidates(coords):
            found = self.files.manifests.find_with_sum(
                info.id, info.size_bytes, base.node.id, coords, self.workspace.assets.sums
            )
            if found is not None:
                return found
        return None

    def _store(self, data: Data) -> ChunkRef:
        workspace = self.workspace
        if len(data) <= workspace.inline_threshold_bytes:
            return InlineChunk(bytes(data))
        if workspace.deduplication is not None:
            return workspace.deduplication.store_blocking(data, self._store_object)
        return self._store_object(data)

    def _store_object(self, data: Data) -> NativeChunk:
        workspace, chunks = self.workspace, self.files.chunks
        code = sum_of(data) if workspace.assets.keeps_sums else 0
        if workspace.packs is not None and workspace.packs.takes(len(data)):
            ref = workspace.packs.add_blocking(data, chunks.storage)
        else:
            ref = chunks.store(data)
        return NativeChunk(ref.chunk_id, ref.offset, ref.length, code) if code else ref

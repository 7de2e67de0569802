"""Load, search and store manifests; what was loaded is cached.

As much of a manifest is read and decoded as a lookup needs: a few pieces of a seekable one, the
decompressed bytes for a few chunks, columns for many. The cache holds whichever form was paid for
(`format.manifest.held`).

A damaged index only costs a request: the whole file is read instead. Under a sound index, a piece
with another checksum is an error: the whole file has no checksum of its own, and would return a
wrong reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from icechunk_async._runtime.concurrency import SingleFlight, bounded_map
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest.held import BYTES_PER_REF, EXPAND, Absent, HeldManifest
from icechunk_async.format.manifest.packed import ManifestFile, open_manifest
from icechunk_async.format.manifest.reading import Manifest, decode_manifest
from icechunk_async.format.manifest.seekable.reading import (
    longer_tail,
    open_seekable,
    tail_extent,
)
from icechunk_async.format.manifest.seekable.writing import pack_manifest
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from icechunk_async.engine.files.chunks import AssetStorage
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.held import Extent
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

__all__ = ["MIN_SEEKABLE_FILE_BYTES", "ManifestFiles", "check_id"]

MIN_SEEKABLE_FILE_BYTES: Final = 1 << 20
"""Stored manifests from this size are searched by their index; smaller ones are read whole."""
_MIN_PATCHED_FILE_BYTES: Final = 1 << 17
"""Stored manifests from this size are changed in place, if they were written in pieces."""
_OFFLOAD_BYTES: Final = 1 << 18
"""Work on files from this size runs on a thread, so that the event loop is not held up."""
_MAX_ROUNDS: Final = 8
"""Rounds of reading pieces for one lookup; two or three are usual."""
_CONCURRENT_PIECES: Final = 8


class ManifestFiles:
    """The manifests of one repository, cached by weight, each loaded once at a time."""

    def __init__(
        self, storage: AssetStorage, *, spec_version: int, compression_level: int, chunk_refs: int
    ) -> None:
        """Keep up to ``chunk_refs`` references in memory.

        Args:
            storage: where the files are.
            spec_version: the version that new files are written to.
            compression_level: zstd level of new files.
            chunk_refs: capacity of the cache.
        """
        self.storage = storage
        self.spec_version = spec_version
        self.compression_level = compression_level
        self._manifests: WeightedCache[ManifestId, HeldManifest] = WeightedCache(chunk_refs)
        self._flights: SingleFlight[object, Any] | None = SingleFlight()
        """None where nothing runs at the same time: without an event loop."""

    async def manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest, decoded.

        Args:
            manifest_id: which one.
            size_bytes: the size of its file if known, so that exactly that is requested.

        Raises:
            FormatError: it is missing, though a snapshot refers to it, or is damaged.

        Cost: one request unless cached; memory in proportion to its references.
        """
        held = self._manifests.get(manifest_id)
        while held is None or (columns := held.columns) is None:
            held = await self._expand(manifest_id, size_bytes, held)
        return columns

    def find_in_memory(
        self, manifest_id: ManifestId, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | Absent | None:
        """Return the reference of a chunk if the cache decides it; see `HeldManifest.lookup`."""
        held = self._manifests.get(manifest_id)
        return EXPAND if held is None else held.lookup(node_id, coords)

    async def find_ref(
        self, manifest_id: ManifestId, size_bytes: int, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Return the reference of a chunk; None if the manifest has none.

        Args:
            manifest_id: which manifest.
            size_bytes: the size of its file if known, so that exactly that is requested.
            node_id: the array.
            coords: the chunk.

        Raises:
            FormatError: the manifest is missing, though a snapshot refers to it, or is damaged.

        Cancellation: what was read stays in the cache.

        Cost: one request unless cached. A large manifest is decoded only after a few lookups. Of a
        seekable one only a few pieces are read, in two rounds of requests for the first chunk.
        """
        held = await self._open(manifest_id, size_bytes)
        rounds = 0
        while True:
            found = held.lookup(node_id, coords)
            if not isinstance(found, Absent):
                return found
            if found.extents and rounds < _MAX_ROUNDS:
                rounds += 1
                await self._fill(manifest_id, held, found)
            else:
                held = await self._expand(manifest_id, size_bytes, held)

    async def load(self, manifest_id: ManifestId, size_bytes: int = 0) -> None:
        """Have a manifest in memory, in any form. Args, errors and cost as `manifest`."""
        if self._manifests.get(manifest_id) is None:
            await self._expand(manifest_id, size_bytes, None)

    async def _open(self, manifest_id: ManifestId, size_bytes: int) -> HeldManifest:
        """Have a manifest in memory; of a large one not more than its index, if it has one."""

        async def load() -> HeldManifest | None:
            tail = await self._fetch(manifest_id, *tail_extent(size_bytes))
            longer = longer_tail(size_bytes, tail)
            if longer is not None:
                tail = await self._fetch(manifest_id, *longer)
            opened = open_seekable(manifest_id, size_bytes, tail)
            if opened is not None:
                self._manifests.put(manifest_id, opened, opened.weight)
            return opened

        held = self._manifests.get(manifest_id)
        if held is None and size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            held = await self._once((manifest_id, "index"), load)
        return await self._expand(manifest_id, size_bytes, None) if held is None else held

    async def _fill(self, manifest_id: ManifestId, held: HeldManifest, absent: Absent) -> None:
        """Read parts of a file that a lookup needs, each once at a time."""

        async def load(extent: Extent) -> None:
            data = await self._fetch(manifest_id, *extent)
            await self.compute(lambda: absent.fill(extent, data), size_bytes=4 * len(data))
            if self._manifests.get(manifest_id) is held:
                self._manifests.put(manifest_id, held, held.weight)

        def fill(extent: Extent) -> Coroutine[Any, Any, None]:
            return self._once((manifest_id, extent), lambda: load(extent))

        limit = 1 if self._flights is None else _CONCURRENT_PIECES
        await bounded_map(fill, absent.extents, limit=limit)

    async def _expand(
        self, manifest_id: ManifestId, size_bytes: int, held: HeldManifest | None
    ) -> HeldManifest:
        """Return a manifest in a fuller form than ``held``, reading its whole file if needed."""

        async def load() -> HeldManifest:
            if held is None or not held.is_whole:
                data = await self._fetch(manifest_id, 0, size_bytes or None)
                return await self.keep_manifest(manifest_id, data)
            size = BYTES_PER_REF * held.weight
            return self._keep(manifest_id, await self.compute(held.expand, size_bytes=size))

        return await self._once((manifest_id, id(held)), load)

    def _keep(self, manifest_id: ManifestId, held: HeldManifest) -> HeldManifest:
        check_id(manifest_key(manifest_id), held.id, manifest_id)
        self._manifests.put(manifest_id, held, held.weight)
        return held

    async def keep_manifest(
        self, manifest_id: ManifestId, data: bytes | memoryview
    ) -> HeldManifest:
        """Keep a manifest whose file was read. Errors as `manifest`."""
        held = await self.compute(lambda: open_manifest(data), size_bytes=len(data))
        return self._keep(manifest_id, held)

    async def read_manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest as it is stored, and do not keep it.

        For readers that look at each manifest once, or check that its file is there.

        Args and errors as `manifest`. Cost: one request, whatever is cached.
        """
        data = await self._fetch(manifest_id, 0, size_bytes or None)
        manifest = await self.compute(
            lambda: decode_manifest(unpack(data, FileType.MANIFEST).payload), size_bytes=len(data)
        )
        check_id(manifest_key(manifest_id), manifest.id, manifest_id)
        return manifest

    async def seekable_file(
        self, manifest_id: ManifestId, size_bytes: int
    ) -> bytes | memoryview | None:
        """Return the file of a manifest that may be seekable; None if it is in memory whole.

        Args and errors as `manifest`. Cost: a request, or two for large files; a large file
        without an index is kept.
        """
        if size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            held: HeldManifest | None = await self._open(manifest_id, size_bytes)
        else:
            held = self._manifests.get(manifest_id)
        if size_bytes < _MIN_PATCHED_FILE_BYTES or (held is not None and held.is_whole):
            return None
        return await self._fetch(manifest_id, 0, size_bytes)

    async def _fetch(
        self, manifest_id: ManifestId, start: int, stop: int | None
    ) -> bytes | memoryview:
        key = manifest_key(manifest_id)
        try:
            return (await self.storage.get(key, ByteRange(start, stop))).data
        except ObjectNotFoundError as error:
            raise FormatError(
                f"A snapshot refers to {key!r}, which is missing. The repository is damaged: "
                "restore the object, or go back to a snapshot that does not need it."
            ) from error

    def pack_manifest(self, payload: memoryview) -> bytes:
        """Wrap the FlatBuffer of a manifest as this repository writes files."""
        return pack_manifest(payload, self.spec_version, level=self.compression_level)

    async def put_manifest(
        self, manifest_id: ManifestId, packed: bytes, *, keep: bool = False
    ) -> None:
        """Store a manifest that is already encoded.

        Args:
            manifest_id: which one.
            packed: its file.
            keep: it may be read soon, so keep its file in memory, unless it is so large that
                readers take only pieces of it.

        Cancellation: the object may exist; nothing refers to it.
        """
        await self.storage.put(manifest_key(manifest_id), packed)
        if keep and len(packed) < MIN_SEEKABLE_FILE_BYTES:
            file = ManifestFile(manifest_id, packed)
            self._manifests.put(manifest_id, file, file.weight)

    async def compute[T](self, work: Callable[[], T], *, size_bytes: int) -> T:
        """Run ``work``, on a thread if it handles so many bytes that the loop would be held up."""
        if self._flights is None or size_bytes < _OFFLOAD_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work)

    async def _once[T](self, key: object, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._flights is None:
            return await load()
        result: T = await self._flights.run(key, load)
        return result


def check_id(key: str, found: bytes, expected: bytes) -> None:
    """Raise FormatError if a file is another one than the one that was asked for."""
    if found != expected:
        raise FormatError(f"{key!r} holds another file: it calls itself {found!s}.")

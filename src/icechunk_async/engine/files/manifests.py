"""Load, search and store manifests; what was loaded is cached.

Where an index is damaged the caller reads the whole file. Where an index is whole and a piece has
another checksum, the file is damaged, and that is said: the whole file has no checksum of its own,
and would give a wrong reference.

As much of a manifest is read and decoded as what is asked of it needs: a few pieces of a seekable
one, the bytes for a few chunks, columns for many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from icechunk_async._runtime.concurrency import SingleFlight, bounded_map
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.layout import manifest_key
from icechunk_async.format.manifest.packed import BYTES_PER_REF, PackedManifest
from icechunk_async.format.manifest.reading import Manifest, decode_manifest
from icechunk_async.format.manifest.seekable.index import SeekIndex, index_size
from icechunk_async.format.manifest.seekable.reading import AbsentPiecesError, SeekableManifest
from icechunk_async.format.manifest.seekable.writing import pack_manifest
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from icechunk_async.engine.files.chunks import AssetStorage
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates
    from icechunk_async.format.manifest.seekable.reading import Extent

    type Read = Callable[[Extent], Awaitable[bytes | memoryview]]
    type Fill = Callable[[Extent], Awaitable[None]]
    type _OpenManifest = Manifest | PackedManifest | SeekableManifest
    type _CachedManifest = _OpenManifest | bytes
    """Bytes are a file as it was stored, which nobody has looked into since."""

__all__ = [
    "MIN_SEEKABLE_FILE_BYTES",
    "ManifestFiles",
    "check_id",
    "find_by_pieces",
    "open_seekable",
]


MIN_SEEKABLE_FILE_BYTES: Final = 1 << 20
"""Manifests from this size on storage are asked for an index; smaller ones are read whole."""
_MIN_TAIL_BYTES: Final = 1 << 14
_MAX_TAIL_BYTES: Final = 1 << 18
_TAIL_SHARE: Final = 512
"""An index takes less than one part of so many of its file, in most files."""
_MAX_ROUNDS: Final = 8


async def open_seekable(
    manifest_id: ManifestId, size_bytes: int, read: Read
) -> SeekableManifest | None:
    """Read the index of a manifest; None if it has none, or none that is of use.

    Args:
        manifest_id: which one.
        size_bytes: the size of its file.
        read: answers an extent of the file.

    Cost: one request; two where the index is unusually large.
    """
    guess = min(max(size_bytes // _TAIL_SHARE, _MIN_TAIL_BYTES), _MAX_TAIL_BYTES, size_bytes)
    tail = await read((size_bytes - guess, size_bytes))
    size = index_size(tail)
    if size is None or size > size_bytes:
        return None
    if size > len(tail):
        tail = await read((size_bytes - size, size_bytes))
    try:
        return SeekableManifest(manifest_id, SeekIndex.decode(tail, size_bytes))
    except (FormatError, MemoryError):  # nobody has as much as it says
        return None


async def find_by_pieces(
    manifest: SeekableManifest, node_id: NodeId, coords: Coordinates, fill: Fill, *, limit: int
) -> ChunkRef | None:
    """Find the reference of a chunk; None if it was not found, whether or not it is there.

    Args:
        manifest: where to look.
        node_id: the array.
        coords: the chunk.
        fill: reads an extent of the file and puts it in its place.
        limit: how many extents are read at a time.

    Raises:
        FormatError: a piece is damaged.

    Cancellation: what was read stays.

    Cost: one round of requests, rarely two or three, for the pieces that are not here yet: of the
    vector of references, of references and of locations.
    """
    wanted: Sequence[int] = manifest.likely(node_id, coords)
    for _ in range(_MAX_ROUNDS):
        await bounded_map(fill, manifest.extents(wanted), limit=limit)
        try:
            return manifest.find(node_id, coords)
        except AbsentPiecesError as absent:
            wanted = absent.pieces
        except FormatError:
            return None  # the whole file tells what is wrong
    return None


_OFFLOAD_BYTES: Final = 1 << 18
"""Work on files from this size is done on a thread, so that the event loop goes on."""
_LARGE_BYTES: Final = 1 << 18
"""Manifests from this size, decompressed, are decoded only once more than a few chunks of them are
looked for."""
_PEEKS: Final = 16
"""So many chunks are looked for in a manifest that is not decoded."""
_CONCURRENT_PIECES: Final = 8
_MIN_PATCHED_FILE_BYTES: Final = 1 << 17
"""Manifests from this size on storage are changed by pieces, if they were written in such."""


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
        self._manifests: WeightedCache[ManifestId, _CachedManifest] = WeightedCache(chunk_refs)
        self._flights: SingleFlight[object, Any] | None = SingleFlight()
        """None where nothing runs at the same time: without an event loop."""

    async def manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest.

        Args:
            manifest_id: which one.
            size_bytes: its size where known, so that exactly that is asked for.

        Raises:
            FormatError: it is missing, though a snapshot refers to it, or is damaged.

        Cost: one request unless cached; memory in proportion to its references.
        """
        cached = self._manifests.get(manifest_id)
        if isinstance(cached, Manifest):
            return cached
        return await self._once(manifest_id, lambda: self._decode_manifest(manifest_id, size_bytes))

    async def find_ref(
        self, manifest_id: ManifestId, size_bytes: int, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Return the reference of a chunk; None if the manifest has none.

        Args:
            manifest_id: which manifest.
            size_bytes: its size where known, so that exactly that is asked for.
            node_id: the array.
            coords: the chunk.

        Raises:
            FormatError: the manifest is missing, though a snapshot refers to it, or is damaged.

        Cost: one request unless cached. A large manifest is only decompressed for the first few
        chunks that are looked for and found; then it is decoded. Of a seekable one only a few
        pieces are read, in two rounds of requests for the first chunk.
        """
        manifest = await self._look_into(manifest_id, size_bytes)
        if manifest is None:
            manifest = await self.manifest_file(manifest_id, size_bytes)
        if isinstance(manifest, SeekableManifest):
            found = await self._seek(manifest, node_id, coords)
            if found is not None:
                return found
            manifest = await self.manifest(manifest_id, size_bytes)
        if isinstance(manifest, PackedManifest):
            found = manifest.find(node_id, coords) if manifest.finds < _PEEKS else None
            if found is not None:
                return found
            manifest = await self.manifest(manifest_id, size_bytes)
        refs = manifest.refs(node_id, len(coords))
        row = refs.find(coords)
        return None if row is None else refs.ref(row)

    async def _look_into(self, manifest_id: ManifestId, size_bytes: int) -> _OpenManifest | None:
        """Have as much of a manifest as is here or in its index; None if it has to be read."""

        async def load() -> SeekableManifest | None:
            opened = await open_seekable(
                manifest_id, size_bytes, lambda it: self._fetch_manifest(manifest_id, *it)
            )
            if opened is not None:
                self._manifests.put(manifest_id, opened, 1)
            return opened

        cached = self._manifests.get(manifest_id)
        if cached is None and size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            cached = await self._once((manifest_id, "index"), load)
        return None if isinstance(cached, bytes) else cached

    async def _seek(
        self, manifest: SeekableManifest, node_id: NodeId, coords: Coordinates
    ) -> ChunkRef | None:
        """Find a reference by reading pieces; None if it was not found, or is not worth it."""

        async def load(extent: Extent) -> None:
            data = await self._fetch_manifest(manifest.id, *extent)
            await self.compute(lambda: manifest.fill(extent, data), size_bytes=4 * len(data))
            if self._manifests.get(manifest.id) is manifest:
                self._manifests.put(manifest.id, manifest, manifest.weight)

        def fill(extent: Extent) -> Coroutine[Any, Any, None]:
            return self._once((manifest.id, extent), lambda: load(extent))

        if manifest.worn_out:
            return None
        limit = 1 if self._flights is None else _CONCURRENT_PIECES
        return await find_by_pieces(manifest, node_id, coords, fill, limit=limit)

    def find_known(
        self, manifest_id: ManifestId, node_id: NodeId, coords: Coordinates
    ) -> tuple[bool, ChunkRef | None]:
        """Return whether a manifest is decoded already, and then what :meth:`find_ref` would."""
        manifest = self._manifests.get(manifest_id)
        if not isinstance(manifest, Manifest):
            return False, None
        refs = manifest.refs(node_id, len(coords))
        row = refs.find(coords)
        return True, None if row is None else refs.ref(row)

    async def _decode_manifest(self, manifest_id: ManifestId, size_bytes: int) -> Manifest:
        packed = await self.manifest_file(manifest_id, size_bytes)
        if isinstance(packed, Manifest):
            return packed
        payload = packed.payload
        manifest = await self.compute(lambda: decode_manifest(payload), size_bytes=len(payload))
        self._manifests.put(manifest_id, manifest, 1 + len(manifest))
        return manifest

    async def manifest_file(
        self, manifest_id: ManifestId, size_bytes: int = 0
    ) -> Manifest | PackedManifest:
        """Have a manifest in memory, decoded only if it is small or was needed so before.

        Args and errors as :meth:`manifest`. Cost: one request unless cached.
        """
        cached = self._manifests.get(manifest_id)
        if isinstance(cached, Manifest | PackedManifest):
            return cached
        return await self._once(
            (manifest_id, "packed"), lambda: self._load_manifest(manifest_id, size_bytes)
        )

    async def _load_manifest(
        self, manifest_id: ManifestId, size_bytes: int
    ) -> Manifest | PackedManifest:
        stored = self._manifests.get(manifest_id)
        if isinstance(stored, bytes):
            return await self.keep_manifest(manifest_id, stored)
        data = await self._fetch_manifest(manifest_id, 0, size_bytes or None)
        return await self.keep_manifest(manifest_id, data)

    async def keep_manifest(
        self, manifest_id: ManifestId, data: bytes | memoryview
    ) -> Manifest | PackedManifest:
        """Keep a manifest whose file was read; decode it if it is small. Errors as there."""
        manifest = await self.compute(lambda: _open_manifest(data), size_bytes=len(data))
        check_id(manifest_key(manifest_id), manifest.id, manifest_id)
        if isinstance(manifest, Manifest):
            self._manifests.put(manifest_id, manifest, 1 + len(manifest))
        else:
            self._manifests.put(manifest_id, manifest, manifest.weight)
        return manifest

    async def read_manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Return a manifest as it is stored, and do not keep it: for what looks at each once.

        Args and errors as :meth:`manifest`. Cost: one request, whatever is cached: a check would
        else not notice that the file is gone.
        """
        data = await self._fetch_manifest(manifest_id, 0, size_bytes or None)
        manifest = await self.compute(
            lambda: decode_manifest(unpack(data, FileType.MANIFEST).payload), size_bytes=len(data)
        )
        check_id(manifest_key(manifest_id), manifest.id, manifest_id)
        return manifest

    async def seekable_file(
        self, manifest_id: ManifestId, size_bytes: int
    ) -> bytes | memoryview | None:
        """Return the file of a manifest that may be seekable; None of those in memory already.

        Args and errors as :meth:`manifest`. Cost: a request, or two for large files; manifests
        that have no index after all are kept.
        """
        if size_bytes < _MIN_PATCHED_FILE_BYTES:
            return None
        if size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            found = await self._look_into(manifest_id, size_bytes)
            if found is None:
                found = await self.manifest_file(manifest_id, size_bytes)
            if not isinstance(found, SeekableManifest):
                return None
        elif self._manifests.get(manifest_id) is not None:
            return None
        return await self._fetch_manifest(manifest_id, 0, size_bytes)

    async def _fetch_manifest(
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
            keep: it may be read soon, so that its file stays in memory; not if it is so large
                that readers take only pieces of it.

        Cancellation: the object may exist; nothing refers to it.
        """
        await self.storage.put(manifest_key(manifest_id), packed)
        if keep and len(packed) < MIN_SEEKABLE_FILE_BYTES:
            self._manifests.put(manifest_id, packed, 1 + len(packed) // BYTES_PER_REF)

    async def compute[T](self, work: Callable[[], T], *, size_bytes: int) -> T:
        """Run ``work``: on a thread if it handles many bytes, so that the event loop goes on."""
        if self._flights is None or size_bytes < _OFFLOAD_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work)

    async def _once[T](self, key: object, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._flights is None:
            return await load()
        result: T = await self._flights.run(key, load)
        return result


def _open_manifest(data: bytes | memoryview) -> Manifest | PackedManifest:
    payload = unpack(data, FileType.MANIFEST).payload
    return PackedManifest(payload) if len(payload) >= _LARGE_BYTES else decode_manifest(payload)


def check_id(key: str, found: bytes, expected: bytes) -> None:
    """Refuse a file that is another than the one that was asked for."""
    if found != expected:
        raise FormatError(f"{key!r} holds another file: it calls itself {found!s}.")

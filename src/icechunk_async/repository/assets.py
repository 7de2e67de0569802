"""Loading and storing snapshots, manifests and transaction logs; what was loaded is kept.

These files never change once written (spec 1 expiration aside, which rewrites parents only), so
a cached one is always right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread

from icechunk_async._concurrency import SingleFlight
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.manifest import Manifest, decode_manifest
from icechunk_async.format.manifest_peek import BYTES_PER_REF, PackedManifest
from icechunk_async.format.manifest_seek import SeekableManifest
from icechunk_async.format.manifest_seek_write import pack_manifest
from icechunk_async.format.manifest_unpack import unpack_manifest
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.format.snapshot_write import encode_snapshot
from icechunk_async.format.transaction_log import (
    decode_transaction_log,
    encode_transaction_log,
    fitting_level,
)
from icechunk_async.repository.cache import WeightedCache
from icechunk_async.repository.direct import DirectStorage
from icechunk_async.repository.layout import manifest_key, snapshot_key, transaction_key
from icechunk_async.repository.seeking import (
    MIN_SEEKABLE_FILE_BYTES,
    find_by_pieces,
    open_seekable,
)
from icechunk_async.storage import BlockingStorage, ByteRange
from icechunk_async.storage.byte_reads import ByteReads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from icechunk_async.format.chunk_refs import ChunkRef, Coordinates
    from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
    from icechunk_async.format.manifest_seek import Extent
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.repository.direct import AssetStorage

    type _OpenManifest = Manifest | PackedManifest | SeekableManifest
    type _CachedManifest = _OpenManifest | bytes
    """Bytes are a file as it was stored, which nobody has looked into since."""
    type ByteRead = Callable[[str, int, int], bytes | memoryview | None]

__all__ = ["Assets"]

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


class Assets:
    """The immutable files of one repository, cached by weight, each loaded once at a time."""

    def __init__(
        self,
        storage: AssetStorage,
        *,
        spec_version: int,
        compression_level: int,
        snapshot_nodes: int,
        chunk_refs: int,
        blocking: object = None,
        bypass: bool = True,
    ) -> None:
        """Keep up to ``snapshot_nodes`` nodes and ``chunk_refs`` references in memory.

        Args:
            storage: where the files are.
            spec_version: the version that new files are written to.
            compression_level: zstd level of new files.
            snapshot_nodes: capacity of the snapshot cache.
            chunk_refs: capacity of the manifest cache.
            blocking: the storage's backend; used without an event loop where it can be.
            bypass: ask the backend itself also on an event loop, for bytes of chunks that are
                in memory; not where what wraps it has to see each read.
        """
        self.storage = storage
        self.spec_version = spec_version
        self.compression_level = compression_level
        self._snapshots: WeightedCache[SnapshotId, Snapshot] = WeightedCache(snapshot_nodes)
        self._manifests: WeightedCache[ManifestId, _CachedManifest] = WeightedCache(chunk_refs)
        self._flights: SingleFlight[object, Any] | None = SingleFlight()
        self.direct: Assets | None = None
        """The same files without an event loop; None where the storage cannot."""
        self.blocking = blocking
        self._now: ByteRead | None = None
        if bypass and isinstance(blocking, ByteReads):
            self._now = blocking.read_bytes_at_once
        if isinstance(blocking, BlockingStorage):
            self.direct = self._directly(blocking)

    def _directly(self, blocking: BlockingStorage) -> Assets:
        twin = object.__new__(Assets)
        twin.__dict__.update(self.__dict__)
        twin.storage = DirectStorage(blocking)
        twin._flights = None
        twin._now = blocking.read_bytes if isinstance(blocking, ByteReads) else None
        return twin

    def read_now(self, key: str, start: int, stop: int) -> bytes | memoryview | None:
        """Answer bytes of a chunk object without waiting; None where ``storage`` is to be asked."""
        return None if self._now is None else self._now(key, start, stop)

    async def snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Answer a snapshot.

        Raises:
            SnapshotNotFoundError: there is no such file.
            FormatError: it is damaged, or is another snapshot.

        Cost: one request unless cached.
        """
        cached = self._snapshots.get(snapshot_id)
        if cached is not None:
            return cached
        return await self._once(snapshot_id, lambda: self._load_snapshot(snapshot_id))

    async def snapshot_if_there(self, snapshot_id: SnapshotId) -> Snapshot | None:
        """Answer a snapshot that may be gone; None if it is, or cannot be read."""
        try:
            return await self.snapshot(snapshot_id)
        except IcechunkError:
            return None

    async def read_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Answer a snapshot as it is stored now, and do not keep it.

        Errors as :meth:`snapshot`. Cost: one request.
        """
        key = snapshot_key(snapshot_id)
        try:
            retrieved = await self.storage.get(key)
        except ObjectNotFoundError as error:
            raise SnapshotNotFoundError(
                f"There is no snapshot {snapshot_id} in this repository: {key!r} is missing. "
                "It may have expired; 'ancestry' lists the snapshots of a branch.",
                snapshot_id=str(snapshot_id),
            ) from error
        envelope = unpack(retrieved.data, FileType.SNAPSHOT)
        snapshot = await self.compute(
            lambda: decode_snapshot(envelope), size_bytes=len(envelope.payload)
        )
        _check_id(key, snapshot.id, snapshot_id)
        return snapshot

    async def _load_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        snapshot = await self.read_snapshot(snapshot_id)
        self._snapshots.put(snapshot_id, snapshot, 1 + len(snapshot.nodes))
        return snapshot

    def forget_snapshot(self, snapshot_id: SnapshotId) -> None:
        """Keep a snapshot no longer: its file goes, or has another parent now (spec 1)."""
        self._snapshots.discard(snapshot_id)

    async def manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Answer a manifest.

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
        """Answer the reference of a chunk; None if the manifest has none.

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

    async def _look_into(self, manifest_id: ManifestId, size_bytes: int) -> _OpenManifest:
        """Have as much of a manifest as a first lookup needs."""

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
        if cached is None or isinstance(cached, bytes):
            return await self.manifest_file(manifest_id, size_bytes)
        return cached

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
        """Answer whether a manifest is decoded already, and then what :meth:`find_ref` would."""
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
        _check_id(manifest_key(manifest_id), manifest.id, manifest_id)
        if isinstance(manifest, Manifest):
            self._manifests.put(manifest_id, manifest, 1 + len(manifest))
        else:
            self._manifests.put(manifest_id, manifest, manifest.weight)
        return manifest

    async def read_manifest(self, manifest_id: ManifestId, size_bytes: int = 0) -> Manifest:
        """Answer a manifest as it is stored, and do not keep it: for what looks at each once.

        Args and errors as :meth:`manifest`. Cost: one request, whatever is cached: a check would
        else not notice that the file is gone.
        """
        data = await self._fetch_manifest(manifest_id, 0, size_bytes or None)
        manifest = await self.compute(
            lambda: decode_manifest(unpack_manifest(data).payload), size_bytes=len(data)
        )
        _check_id(manifest_key(manifest_id), manifest.id, manifest_id)
        return manifest

    async def seekable_file(
        self, manifest_id: ManifestId, size_bytes: int
    ) -> bytes | memoryview | None:
        """Answer the file of a manifest that may be seekable; None of those in memory already.

        Args and errors as :meth:`manifest`. Cost: a request, or two for large files; manifests
        that have no index after all are kept.
        """
        if size_bytes < _MIN_PATCHED_FILE_BYTES:
            return None
        if size_bytes >= MIN_SEEKABLE_FILE_BYTES:
            if not isinstance(await self._look_into(manifest_id, size_bytes), SeekableManifest):
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

    async def transaction_log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Answer the transaction log of a snapshot.

        Raises:
            ObjectNotFoundError: there is none; spec 1 has none for the first snapshot.
            FormatError: it is damaged, or belongs to another snapshot.

        Cost: one request; logs are not cached.
        """
        key = transaction_key(snapshot_id)
        retrieved = await self.storage.get(key)
        log = await self.compute(
            lambda: decode_transaction_log(
                unpack(retrieved.data, FileType.TRANSACTION_LOG).payload
            ),
            size_bytes=len(retrieved.data),
        )
        _check_id(key, log.id, snapshot_id)
        return log

    def pack_manifest(self, payload: memoryview) -> bytes:
        """Wrap the FlatBuffer of a manifest as this repository writes files."""
        return pack_manifest(payload, self.spec_version, level=self.compression_level)

    def pack(self, payload: bytes | memoryview, file_type: FileType) -> bytes:
        """Wrap a FlatBuffer as this repository writes files."""
        return pack(payload, file_type, self.spec_version, level=self.compression_level)

    async def put_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot, and keep it.

        Cancellation: the object may exist; nothing refers to it.
        """
        packed = await self.compute(
            lambda: self.pack(encode_snapshot(snapshot, self.spec_version), FileType.SNAPSHOT),
            size_bytes=1000 * len(snapshot.nodes),
        )
        await self.storage.put(snapshot_key(snapshot.id), packed)
        self._snapshots.put(snapshot.id, snapshot, 1 + len(snapshot.nodes))

    async def pack_transaction_log(self, log: TransactionLog) -> bytes:
        """Encode a transaction log as this repository writes files."""

        def encode() -> bytes:
            payload = encode_transaction_log(log, self.spec_version)
            level = fitting_level(log, self.compression_level)
            return pack(payload, FileType.TRANSACTION_LOG, self.spec_version, level=level)

        size_bytes = sum(coords.nbytes for coords in log.updated_chunks.values())
        return await self.compute(encode, size_bytes=size_bytes)

    async def put_transaction_log(self, log: TransactionLog) -> None:
        """Store a transaction log.

        Cancellation: the object may exist; nothing refers to it.
        """
        await self.put_packed_log(log.id, await self.pack_transaction_log(log))

    async def put_packed_log(self, snapshot_id: SnapshotId, packed: bytes) -> None:
        """Store the transaction log of a snapshot, already encoded. Cancellation: as above."""
        await self.storage.put(transaction_key(snapshot_id), packed)

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
    payload = unpack_manifest(data).payload
    return PackedManifest(payload) if len(payload) >= _LARGE_BYTES else decode_manifest(payload)


def _check_id(key: str, found: bytes, expected: bytes) -> None:
    if found != expected:
        raise FormatError(f"{key!r} holds another file: it calls itself {found!s}.")

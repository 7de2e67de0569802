"""Loading and storing snapshots, manifests and transaction logs; what was loaded is kept.

These files never change once written (spec 1 expiration aside, which rewrites parents only), so
a cached one is always right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.engine.files.chunks import DirectStorage
from icechunk_async.engine.files.manifests import ManifestFiles, check_id
from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.layout import snapshot_key, transaction_key
from icechunk_async.format.snapshot import decode_snapshot, encode_snapshot
from icechunk_async.format.transaction_log import (
    decode_transaction_log,
    encode_transaction_log,
    fitting_level,
)
from icechunk_async.storage import BlockingStorage
from icechunk_async.storage.extensions import ByteReads

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.files.chunks import AssetStorage
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

    type ByteRead = Callable[[str, int, int], bytes | memoryview | None]

__all__ = ["Assets"]


class Assets(ManifestFiles):
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
        super().__init__(
            storage,
            spec_version=spec_version,
            compression_level=compression_level,
            chunk_refs=chunk_refs,
        )
        self._snapshots: WeightedCache[SnapshotId, Snapshot] = WeightedCache(snapshot_nodes)
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
        """Return bytes of a chunk object without waiting; None where ``storage`` is to be asked."""
        return None if self._now is None else self._now(key, start, stop)

    async def snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Return a snapshot.

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
        """Return a snapshot that may be gone; None if it is, or cannot be read."""
        try:
            return await self.snapshot(snapshot_id)
        except IcechunkError:
            return None

    async def read_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Return a snapshot as it is stored now, and do not keep it.

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
        check_id(key, snapshot.id, snapshot_id)
        return snapshot

    async def _load_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        snapshot = await self.read_snapshot(snapshot_id)
        self._snapshots.put(snapshot_id, snapshot, 1 + len(snapshot.nodes))
        return snapshot

    def forget_snapshot(self, snapshot_id: SnapshotId) -> None:
        """Keep a snapshot no longer: its file goes, or has another parent now (spec 1)."""
        self._snapshots.discard(snapshot_id)

    async def transaction_log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Return the transaction log of a snapshot.

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
        check_id(key, log.id, snapshot_id)
        return log

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

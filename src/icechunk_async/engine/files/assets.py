"""Load and store the immutable files of one repository; what was loaded is cached.

These files never change once written (except that spec 1 expiration rewrites parents), so a cached
one is always right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import SingleFlight, bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.engine.files.recent import RecentFiles
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.storage import BlockingStorage
from icechunk_async.storage.extensions import ByteReads, TellsUnchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.files.checks import ReadChecks
    from icechunk_async.engine.files.chunks import BlockingChunkFiles, ChunkFiles
    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.engine.files.manifests import BlockingManifestFiles, ManifestFiles
    from icechunk_async.engine.sidecars.digests import DigestFiles
    from icechunk_async.engine.sidecars.statistics import StatisticsFiles
    from icechunk_async.engine.sidecars.sums import SumFiles
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.format.manifest.held import HeldManifest
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.storage import Storage, Version

__all__ = ["Assets", "BlockingFiles"]

_CONCURRENT_FILES: Final = 8
_FEW_MANIFESTS: Final = 8
_EXPANSION: Final = 4
"""Roughly how much larger a snapshot is than its file; decides what goes to a thread."""
_BYTES_PER_NODE: Final = 1000


@dataclass(frozen=True, slots=True)
class BlockingFiles:
    """The files that reading and writing chunks needs, on the calling thread."""

    manifests: BlockingManifestFiles
    chunks: BlockingChunkFiles


class Assets:
    """The immutable files of one repository, cached by weight, each loaded once at a time."""

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        *,
        compression_level: int,
        snapshot_nodes: int,
        chunk_refs: int,
        backend: object = None,
        bypass: bool = True,
        verify_reads: bool = False,
        recent: RecentFiles | None = None,
    ) -> None:
        """Keep up to ``snapshot_nodes`` nodes and ``chunk_refs`` references in memory.

        Args:
            storage: where the files are.
            layout: names and encodes them.
            compression_level: zstd level of new files.
            snapshot_nodes: capacity of the snapshot cache.
            chunk_refs: capacity of the manifest cache.
            backend: the storage without its policies; used without an event loop if it can be.
            bypass: ask the backend itself also on an event loop, for bytes of chunks that are
                in memory; False if the policies have to see each read.
            verify_reads: compare chunks that are read with their checksums.
            recent: what this process stored last at this place; by default with these alone.
        """
        self.storage = storage
        self.layout = layout
        self.compression_level = compression_level
        self.backend = backend
        self.keeps_sums = False
        """Whether checksums of chunks are computed and stored with new manifests."""
        self.keeps_statistics = False
        """Whether sessions make statistics of the chunks that they write."""
        self._verify_reads = verify_reads
        self._bypass = bypass
        self._held: WeightedCache[ManifestId, HeldManifest] = WeightedCache(chunk_refs)
        self._snapshots: WeightedCache[SnapshotId, Snapshot] = WeightedCache(snapshot_nodes)
        self._flights: SingleFlight[SnapshotId, Snapshot] = SingleFlight(eager=True)
        self.recent = recent or RecentFiles()
        self._chunk_refs = chunk_refs

    # What reads and writes arrays is put together, and imported, when it is first used: reading
    # history and moving refs need none of it.

    @cached_property
    def checks(self) -> ReadChecks | None:
        """Compares chunks that are read with their sums; None if that was not asked for."""
        from icechunk_async.engine.files.checks import ReadChecks  # noqa: PLC0415 -- on use

        return ReadChecks() if self._verify_reads else None

    @cached_property
    def sums(self) -> SumFiles:
        """Checksums of chunks."""
        from icechunk_async.engine.sidecars.sums import SumFiles  # noqa: PLC0415 -- on use

        return SumFiles(self.storage, self._chunk_refs)

    @cached_property
    def digests(self) -> DigestFiles:
        """Lists of digests of snapshots."""
        from icechunk_async.engine.sidecars.digests import DigestFiles  # noqa: PLC0415 -- on use

        return DigestFiles(self.storage)

    @cached_property
    def manifests(self) -> ManifestFiles:
        """Manifests."""
        from icechunk_async.engine.files.manifests import ManifestFiles  # noqa: PLC0415 -- on use

        return ManifestFiles(
            self.storage,
            self._held,
            self.layout,
            compression_level=self.compression_level,
            sums=self.sums,
            attach_sums=self._verify_reads,
        )

    @cached_property
    def chunks(self) -> ChunkFiles:
        """Chunk objects."""
        from icechunk_async.engine.files.chunks import ChunkFiles  # noqa: PLC0415 -- on use

        at_once = None
        if self._bypass and isinstance(self.backend, ByteReads):
            at_once = self.backend.read_bytes_at_once
        return ChunkFiles(self.storage, self.layout, at_once)

    @cached_property
    def blocking(self) -> BlockingFiles | None:
        """The same files without an event loop; None if the backend cannot."""
        if not isinstance(self.backend, BlockingStorage):
            return None
        from icechunk_async.engine.files.chunks import BlockingChunkFiles  # noqa: PLC0415 -- on use
        from icechunk_async.engine.files.manifests import BlockingManifestFiles  # noqa: PLC0415

        sums = self.sums if self._verify_reads else None
        return BlockingFiles(
            BlockingManifestFiles(self.backend, self._held, self.layout, sums),
            BlockingChunkFiles(self.backend, self.layout),
        )

    @cached_property
    def statistics(self) -> StatisticsFiles:
        """Statistics of chunks."""
        from icechunk_async.engine.sidecars.statistics import StatisticsFiles  # noqa: PLC0415 -- on use

        return StatisticsFiles(self.storage, self._chunk_refs)

    @cached_property
    def is_unchanged(self) -> Callable[[str, Version], bool] | None:
        """Tells without waiting, on any thread, whether an object is what it was, if that works."""
        backend = self.backend
        return backend.is_at if self._bypass and isinstance(backend, TellsUnchanged) else None

    async def compute[T](self, work: Callable[[], T], *, size_bytes: int) -> T:
        """Run ``work``, on a thread if it handles enough bytes to hold up the event loop."""
        from icechunk_async.engine.files.manifests import offload  # noqa: PLC0415 -- on use

        return await offload(work, size_bytes=size_bytes)

    async def snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Return a snapshot.

        Raises:
            SnapshotNotFoundError: there is no such file.
            FormatError: it is damaged, or is another snapshot.

        Cost: one request unless cached.
        """
        # Looked for first: a flight costs a future, and most sessions begin at a snapshot that is
        # here.
        cached = self._snapshots.get(snapshot_id)
        if cached is not None:
            return cached
        return await self._flights.run(snapshot_id, lambda: self._load_snapshot(snapshot_id))

    def known_snapshot(self, snapshot_id: SnapshotId) -> Snapshot | None:
        """Return a snapshot if it is in memory; from any thread."""
        return self._snapshots.get(snapshot_id)

    def holds_all_of(self, snapshot: Snapshot) -> bool:
        """Return whether this process made a snapshot, and has its few manifests in memory.

        For others it would have to look at a file, which may be large or damaged.
        """
        # By identity: one that was read from the storage is equal, and its bytes are not ours.
        if self.recent.snapshots.get(snapshot.id) is not snapshot:
            return False
        manifests = snapshot.manifests
        return len(manifests) <= _FEW_MANIFESTS and all(
            self._held.get(it) is not None for it in manifests
        )

    async def snapshot_of_commit(self, snapshot_id: SnapshotId) -> Snapshot:
        """Return a snapshot as `snapshot` does, or as this process stored it a short time ago."""
        return self.recent.snapshots.get(snapshot_id) or await self.snapshot(snapshot_id)

    async def snapshot_if_there(self, snapshot_id: SnapshotId) -> Snapshot | None:
        """Return a snapshot; None if it is gone or cannot be read."""
        try:
            return await self.snapshot(snapshot_id)
        except IcechunkError:
            return None

    async def read_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        """Read a snapshot from the storage, and do not cache it.

        Errors as `snapshot`. Cost: one request; one more for each file that it needs besides, all
        at the same time.
        """
        from icechunk_async.engine.files.manifests import check_id  # noqa: PLC0415 -- on use

        key, codec = self.layout.names.snapshot(snapshot_id), self.layout.snapshots
        try:
            retrieved = await self.storage.get(key)
        except ObjectNotFoundError as error:
            raise SnapshotNotFoundError(
                f"There is no snapshot {snapshot_id} in this repository: {key!r} is missing. "
                "It may have expired; 'ancestry' lists the snapshots of a branch.",
                snapshot_id=str(snapshot_id),
            ) from error
        size_bytes = _EXPANSION * len(retrieved.data)
        opened = await self.compute(
            lambda: codec.open(snapshot_id, retrieved.data), size_bytes=size_bytes
        )
        # Formats 1 and 2 need no further files; layouts before them keep documents apart.
        found: dict[str, bytes | memoryview] = {}
        if opened.needs:
            files = await bounded_map(self._companion, opened.needs, limit=_CONCURRENT_FILES)
            found = dict(zip(opened.needs, files, strict=True))
        snapshot = await self.compute(lambda: opened.decode(found), size_bytes=size_bytes)
        # As for manifests: a snapshot under the name of another would be read in its place.
        check_id(key, snapshot.id, snapshot_id)
        return snapshot

    async def _companion(self, key: str) -> bytes | memoryview:
        """Read a file that a snapshot needs besides its own."""
        try:
            return (await self.storage.get(key)).data
        except ObjectNotFoundError as error:
            raise FormatError(
                f"A snapshot refers to {key!r}, which is missing. The repository is damaged: "
                "restore the object, or read another snapshot."
            ) from error

    async def _load_snapshot(self, snapshot_id: SnapshotId) -> Snapshot:
        snapshot = await self.read_snapshot(snapshot_id)
        self._snapshots.put(snapshot_id, snapshot, 1 + len(snapshot.nodes))
        return snapshot

    def forget_snapshot(self, snapshot_id: SnapshotId) -> None:
        """Drop a snapshot from the cache: its file is deleted, or has another parent (spec 1)."""
        self._snapshots.discard(snapshot_id)
        self.recent.snapshots.discard(snapshot_id)

    async def transaction_log(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Return the transaction log of a snapshot; where none are stored, its equivalent.

        Raises:
            ObjectNotFoundError: it does not exist; in spec 1 the first snapshot has no log.
            FormatError: it is damaged, or belongs to another snapshot.

        Cost: one request; logs are not cached. Where none are stored the snapshot, the one before
        it, and the manifests in which they differ.
        """
        from icechunk_async.engine.files.manifests import check_id  # noqa: PLC0415 -- on use

        codec = self.layout.logs
        if codec is None:
            return await self._compare_with_parent(snapshot_id)
        key = codec.key(snapshot_id)
        retrieved = await self.storage.get(key)
        log = await self.compute(
            lambda: codec.decode(retrieved.data), size_bytes=len(retrieved.data)
        )
        # A log copied to another name decodes without an error, and a rebase would look for
        # conflicts with another commit.
        check_id(key, log.id, snapshot_id)
        return log

    def known_log(self, snapshot_id: SnapshotId) -> TransactionLog | None:
        """Return a log that was stored, or read to compare commits, if it is in memory."""
        return self.recent.logs.get(snapshot_id) or self.recent.compared.get(snapshot_id)

    async def log_of_commit(self, snapshot_id: SnapshotId) -> TransactionLog:
        """Return a log as `transaction_log` does, or as this process stored it a short time ago."""
        return self.recent.logs.get(snapshot_id) or await self.transaction_log(snapshot_id)

    async def _compare_with_parent(self, snapshot_id: SnapshotId) -> TransactionLog:
        from icechunk_async.engine.files.differences import difference  # noqa: PLC0415 -- on use

        after = await self.snapshot(snapshot_id)
        before = None if after.parent_id is None else await self.snapshot(after.parent_id)
        return await difference(before, after, self.manifests)

    @property
    def spec_version(self) -> int:
        """The version that new files are written to."""
        return self.layout.spec_version

    def pack(self, payload: bytes | memoryview, file_type: FileType) -> bytes:
        """Wrap a FlatBuffer as a repository of this format version writes files."""
        return pack(payload, file_type, self.spec_version, level=self.compression_level)

    async def put_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot, and keep it.

        Raises:
            UnsupportedBySpecError: the layout cannot express it; nothing was stored.

        Cancellation: objects may exist; nothing refers to them.
        """
        codec, level = self.layout.snapshots, self.compression_level
        parent = None
        if codec.needs_parent and snapshot.parent_id is not None:
            parent = await self.snapshot(snapshot.parent_id)
        encoded = await self.compute(
            lambda: codec.encode(snapshot, parent, level),
            size_bytes=_BYTES_PER_NODE * len(snapshot.nodes),
        )
        if encoded.companions:
            # Before the snapshot, which refers to them.
            files = encoded.companions.items()
            await bounded_map(lambda it: self.storage.put(*it), files, limit=_CONCURRENT_FILES)
        await self.storage.put(self.layout.names.snapshot(snapshot.id), encoded.data)
        # Only what is stored is kept: after an error nobody may build on it.
        self._snapshots.put(snapshot.id, encoded.snapshot, 1 + len(snapshot.nodes))
        self.recent.keep_snapshot(encoded.snapshot)

    async def pack_transaction_log(self, log: TransactionLog) -> bytes:
        """Encode a transaction log as this repository writes files; empty if it writes none."""
        codec, level = self.layout.logs, self.compression_level
        if codec is None:
            return b""
        from icechunk_async.format.transaction_log import in_stored_order  # noqa: PLC0415 -- on use

        size_bytes = sum(coords.nbytes for coords in log.updated_chunks.values())
        packed = await self.compute(lambda: codec.encode(log, level), size_bytes=size_bytes)
        # As it is read; it is not stored yet, and until then nobody asks for it.
        self.recent.keep_log(replace(log, moves=in_stored_order(log.moves)))
        return packed

    async def put_transaction_log(self, log: TransactionLog) -> None:
        """Store a transaction log.

        Cancellation: the object may exist; nothing refers to it.
        """
        await self.put_packed_log(log.id, await self.pack_transaction_log(log))

    async def put_packed_log(self, snapshot_id: SnapshotId, packed: bytes) -> None:
        """Store the encoded transaction log of a snapshot; as `put_transaction_log`."""
        if self.layout.logs is not None:
            await self.storage.put(self.layout.logs.key(snapshot_id), packed)

"""Checksums for chunks that have none yet, and checks of content roots."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.files.manifests import check_id
from icechunk_async.engine.sidecars.digests import listed
from icechunk_async.engine.sidecars.sums import with_sums
from icechunk_async.engine.upkeep.integrity.structure import stored, uncached
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.crc import sum_of
from icechunk_async.format.digests import CONTENT_ROOT, DigestList, Listed, node_lines
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.layout import digests_key, manifest_key, sums_key
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.sums import ArraySums, ManifestSums, SumsHead, without_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["AddedSums", "ContentReport", "add_sums", "check_content"]

_log = logging.getLogger(__name__)
_CHUNKS_AT_ONCE: Final = 32
_MANIFESTS_AT_ONCE: Final = 8
_MAX_ROWS: Final = 1024
_MAX_BYTES: Final = 256 << 20
"""Of chunks that are read at a time, unless a single one is longer."""


@dataclass(frozen=True, slots=True)
class AddedSums:
    """The checksums that were added to a snapshot."""

    snapshot_id: SnapshotId
    manifests: int
    """Manifests of the snapshot."""
    manifests_completed: int
    """Those that lacked sums before."""
    chunks: int
    """Chunks that were read, and have a sum now."""
    bytes_read: int
    """Their size."""
    unreadable: tuple[str, ...] = ()
    """Messages about chunks that could not be read. Their sums stay unknown."""


@dataclass(frozen=True, slots=True)
class ContentReport:
    """Whether a snapshot consists of the bytes that its content root vouches for."""

    snapshot_id: SnapshotId
    root: str | None
    """The content root, in hexadecimal digits; None if the snapshot has no list of digests."""
    recorded: str | None
    """The root that the snapshot itself records; None if it was committed without one."""
    manifests: int
    """Manifests of the snapshot."""
    incomplete: int
    """Manifests with native chunks that have no sum: their bytes are not vouched for."""
    problems: tuple[str, ...] = ()
    """Each object that is missing or other than it was, and what the list lacks."""

    @property
    def is_right(self) -> bool:
        """Return whether a root exists, nothing differs from it, and no sum is missing."""
        return self.root is not None and not self.problems and not self.incomplete


async def add_sums(
    engine: Engine, snapshot: Snapshot, progress: ProgressCallback | None = None
) -> AddedSums:
    """Compute the checksums that a snapshot lacks; see `Repository.add_sums`."""
    engine.history.capabilities.require("sums")
    engine.check_safe()
    with telemetry.span("add_sums"):
        work = _Adding(engine, snapshot, progress or no_progress)
        report = await work.run()
    _log.info("checksums added: %s", report)
    return report


class _Adding:
    """One call: the manifests of a snapshot, one after the other."""

    def __init__(self, engine: Engine, snapshot: Snapshot, progress: ProgressCallback) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._progress = progress
        self._chunks = self._bytes = self._completed = 0
        self._unreadable: list[str] = []

    async def run(self) -> AddedSums:
        entries: dict[ManifestId, Listed | None] = {}
        total = len(self._snapshot.manifests)
        for manifest_id in sorted(self._snapshot.manifests):
            entries[manifest_id] = await self._complete(manifest_id)
            self._progress(Progress("adding sums to manifests", len(entries), total))
        await self._list(entries)
        return AddedSums(
            self._snapshot.id,
            total,
            self._completed,
            self._chunks,
            self._bytes,
            tuple(self._unreadable),
        )

    async def _complete(self, manifest_id: ManifestId) -> Listed:
        """Store the sums that a manifest lacks, and return its digests."""
        manifest, digest = await _read_manifest(self._engine, manifest_id)
        sums = await _usable_sums(self._engine, manifest_id)
        # Sums of another content under this name would accuse chunks that are whole.
        if sums is not None and sums.head.manifest_digest == digest:
            if sums.head.is_complete:
                return listed(sums)
            manifest = with_sums(manifest, sums)
        codes = {
            (node_id, refs.rank): await self._codes(refs)
            for node_id, refs in [
                *manifest.arrays.items(),
                *((key[0], refs) for key, refs in manifest.strays.items()),
            ]
        }
        complete = all(missing == 0 for _, missing in codes.values())
        made = ManifestSums(
            SumsHead(manifest_id, digest, complete), {key: it for key, (it, _) in codes.items()}
        )
        data = made.encode()
        # By the manifest: the next run continues behind the last one that an interrupted run
        # stored.
        await self._engine.assets.sums.put(manifest_id, data)
        self._completed += 1
        return listed(made, data)

    async def _codes(self, refs: ChunkRefs) -> tuple[ArraySums, int]:
        """Return the sums of one array's chunks, and how many are still unknown."""
        codes = np.zeros(len(refs), np.uint64) if refs.sums is None else refs.sums.copy()
        for rows in _batches(refs, np.flatnonzero(without_sum(refs)).tolist()):
            found = await bounded_map(lambda row: self._sum(refs, row), rows, limit=_CHUNKS_AT_ONCE)
            codes[rows] = found
            self._progress(Progress("reading chunks", self._chunks))
        return ArraySums.of(codes), int(np.count_nonzero(without_sum(refs) & (codes == 0)))

    async def _sum(self, refs: ChunkRefs, row: int) -> int:
        """Read a chunk, and return the code of its sum; 0 if it cannot be read."""
        ref = refs.ref(row)
        assert isinstance(ref, NativeChunk)  # only these were chosen
        try:
            data = await self._engine.assets.chunks.read(
                ref.chunk_id, ref.offset, ref.offset + ref.length
            )
        except FormatError as error:  # missing, or too short
            # One lost chunk must not keep all others without sums.
            self._unreadable.append(str(error))
            return 0
        self._chunks += 1
        self._bytes += len(data)
        return sum_of(data)

    async def _list(self, entries: dict[ManifestId, Listed | None]) -> None:
        """Store the list of the snapshot's digests, unless its recorded root stands for another."""
        digests = DigestList.of(self._snapshot.nodes.values(), entries)
        recorded = self._snapshot.metadata.get(CONTENT_ROOT)
        # It would be reported as damage: the root in the snapshot does not vouch for it.
        if recorded is not None and recorded != digests.root:
            return
        await self._engine.assets.digests.put(self._snapshot.id, digests)


def _batches(refs: ChunkRefs, rows: list[int]) -> Iterator[list[int]]:
    """Divide chunks into lists that fit into memory."""
    batch: list[int] = []
    size_bytes = 0
    for row in rows:
        length = int(refs.lengths[row])
        # Lengths are as the manifest says; what is read is never more than the object has.
        if batch and (size_bytes + length > _MAX_BYTES or len(batch) >= _MAX_ROWS):
            yield batch
            batch, size_bytes = [], 0
        batch.append(row)
        size_bytes += length
    if batch:
        yield batch


async def _read_manifest(engine: Engine, manifest_id: ManifestId) -> tuple[Manifest, bytes]:
    """Read a manifest and the digest of its object, past all caches of decoded ones."""
    key = manifest_key(manifest_id)
    try:
        data = (await engine.storage.get(key)).data
    except ObjectNotFoundError as error:
        raise FormatError(f"A snapshot refers to {key!r}, which is missing.") from error

    def work() -> tuple[Manifest, bytes]:
        manifest = decode_manifest(unpack(data, FileType.MANIFEST).payload)
        return manifest, hashlib.sha256(data).digest()

    manifest, digest = await engine.assets.compute(work, size_bytes=len(data))
    check_id(key, manifest.id, manifest_id)
    return manifest, digest


async def _usable_sums(engine: Engine, manifest_id: ManifestId) -> ManifestSums | None:
    try:
        return await engine.assets.sums.read(manifest_id)
    except FormatError as error:
        _log.warning("checksums are made anew: %s", error)
        return None


async def check_content(engine: Engine, snapshot: Snapshot) -> ContentReport:
    """Compare what a snapshot consists of with its digests; see `Repository.check_content`."""
    engine.history.capabilities.require("sums")
    found = snapshot.metadata.get(CONTENT_ROOT)
    recorded = found if isinstance(found, str) else None
    problems: list[str] = []
    digests = None
    try:
        # From the storage, as all below: a cache may hold what was damaged since.
        digests = await uncached(engine).digests.read(snapshot.id)
    except FormatError as error:
        problems.append(str(error))
    # Without the list only manifests could be compared, and nothing vouches for them.
    if digests is None:
        if not problems:
            problems.append(f"There is no list of digests at {digests_key(snapshot.id)!r}.")
        return ContentReport(
            snapshot.id, None, recorded, len(snapshot.manifests), 0, tuple(problems)
        )
    if recorded is not None and recorded != digests.root:
        problems.append(
            f"The list of digests has the content root {digests.root}, and the snapshot records "
            f"{recorded}."
        )
    if list(digests.nodes) != node_lines(snapshot.nodes.values()):
        problems.append("The nodes of the snapshot are others than those of the list of digests.")
    if set(digests.manifests) != set(snapshot.manifests):
        problems.append("The snapshot uses other manifests than the list of digests has.")
    await bounded_map(
        lambda it: _check_manifest(engine, it, digests.manifests[it], problems),
        sorted(digests.manifests),
        limit=_MANIFESTS_AT_ONCE,
    )
    incomplete = sum(it is None or it.sums is None for it in digests.manifests.values())
    return ContentReport(
        snapshot.id,
        digests.root,
        recorded,
        len(snapshot.manifests),
        incomplete,
        tuple(sorted(problems)),
    )


async def _check_manifest(
    engine: Engine, manifest_id: ManifestId, entry: Listed | None, problems: list[str]
) -> None:
    key = manifest_key(manifest_id)
    if entry is None:
        problems.append(f"The list of digests has no digest of {key!r}.")
        return
    wanted = {key: entry.manifest}
    if entry.sums is not None:
        wanted[sums_key(manifest_id)] = entry.sums
    for name, digest in wanted.items():
        try:
            data = (await stored(engine).get(name)).data
        except ObjectNotFoundError:
            problems.append(f"{name!r} is missing.")
        else:
            work = partial(hashlib.sha256, data)
            found = (await engine.assets.compute(work, size_bytes=len(data))).digest()
            if found != digest:
                problems.append(f"{name!r} has the SHA-256 {found.hex()}, not {digest.hex()}.")

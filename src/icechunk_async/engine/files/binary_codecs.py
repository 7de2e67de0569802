"""How format versions 1 and 2 encode their immutable files: FlatBuffers in envelopes.

Their names and limits are in `binary_layout`, so that the formats of snapshots, manifests and logs
are not loaded where only history and refs are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format import layout as keys
from icechunk_async.format.envelope import (
    Envelope,
    FileType,
    may_cut_seconds,
    pack,
    unpack,
    with_cut_seconds,
)
from icechunk_async.format.manifest.packed import ManifestFile, open_manifest
from icechunk_async.format.snapshot import decode_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.engine.files.layout import (
        Bytes,
        EncodedSnapshot,
        LogCodec,
        ManifestCodec,
        SnapshotCodec,
    )
    from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
    from icechunk_async.format.manifest.held import Extent, HeldManifest
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.seekable.writing import PatchedManifest
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["log_codec", "manifest_codec", "snapshot_codec"]


@dataclass(frozen=True, slots=True)
class _OpenedSnapshot:
    envelope: Envelope
    needs: Sequence[str] = ()

    def decode(self, files: Mapping[str, Bytes]) -> Snapshot:
        del files
        return decode_snapshot(self.envelope)


@dataclass(frozen=True, slots=True)
class _Snapshots:
    spec_version: int
    needs_parent: bool = False

    def open(self, snapshot_id: SnapshotId, data: Bytes) -> _OpenedSnapshot:
        # The caller compares the id in the file with this one.
        del snapshot_id  # the file has it
        return _OpenedSnapshot(unpack(data, FileType.SNAPSHOT))

    def encode(self, snapshot: Snapshot, parent: Snapshot | None, level: int) -> EncodedSnapshot:
        from icechunk_async.engine.files.layout import EncodedSnapshot  # noqa: PLC0415 -- on use
        from icechunk_async.format.snapshot.writing import encode_snapshot  # noqa: PLC0415 -- on use

        del parent
        payload = encode_snapshot(snapshot, self.spec_version)
        data = pack(payload, FileType.SNAPSHOT, self.spec_version, level=level)
        if not snapshot.nodes.is_light:
            # Its nodes are found in the new file from now on, and copied from there.
            stored = decode_snapshot(Envelope(self.spec_version, payload))
            snapshot = replace(snapshot, nodes=stored.nodes, manifests=stored.manifests)
        return EncodedSnapshot(data, snapshot)


class _Pieces:
    # Snapshots of these formats list the size of every manifest; a file without one is read whole.
    unsized_tail = 0

    def tail_extent(self, size_bytes: int) -> Extent:
        from icechunk_async.format.manifest.seekable.reading import tail_extent  # noqa: PLC0415 -- on use

        return tail_extent(size_bytes)

    def longer_tail(self, size_bytes: int, tail: Bytes) -> Extent | None:
        from icechunk_async.format.manifest.seekable.reading import longer_tail  # noqa: PLC0415 -- on use

        return longer_tail(size_bytes, tail)

    def open(self, manifest_id: ManifestId, size_bytes: int, tail: Bytes) -> HeldManifest | None:
        from icechunk_async.format.manifest.seekable.reading import open_seekable  # noqa: PLC0415 -- on use

        return open_seekable(manifest_id, size_bytes, tail)


_PIECES: Final = _Pieces()
_SEVERAL: Final = 4
"""Arrays whose references are written together; of fewer it is quicker one by one."""


@dataclass(frozen=True, slots=True)
class _Manifests:
    spec_version: int
    pieces: _Pieces = _PIECES
    patches: bool = True
    shares: bool = True

    def open(self, manifest_id: ManifestId, data: Bytes) -> HeldManifest:
        del manifest_id  # the file has it
        return open_manifest(data)

    def hold(self, manifest_id: ManifestId, data: bytes) -> HeldManifest:
        return ManifestFile(manifest_id, data, open_manifest)

    def decode(self, manifest_id: ManifestId, data: Bytes) -> Manifest:
        from icechunk_async.format.manifest.reading import decode_manifest  # noqa: PLC0415 -- on use

        del manifest_id
        # The official engine rounds times of virtual chunks down to seconds; the stamp in the
        # header tells whose file it is.
        payload = unpack(data, FileType.MANIFEST).payload
        return decode_manifest(payload, seconds_cut=may_cut_seconds(data))

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        level: int,
        dictionary: LocationDictionary | None,
    ) -> bytes:
        from icechunk_async.format.manifest.seekable.writing import pack_manifest  # noqa: PLC0415 -- on use
        from icechunk_async.format.manifest.writing import encode_manifest  # noqa: PLC0415 -- on use

        payload = _encoded_small(manifest_id, arrays)
        if payload is None:
            payload = encode_manifest(manifest_id, arrays, location_dictionary=dictionary)
        if any(refs.has_cut_seconds for refs in arrays.values()):  # such a file is not seekable
            return with_cut_seconds(
                pack(payload, FileType.MANIFEST, self.spec_version, level=level)
            )
        return pack_manifest(payload, self.spec_version, level=level)

    def patch(
        self,
        data: Bytes,
        ids: tuple[ManifestId, ManifestId],
        node_id: NodeId,
        changed: ChunkRefs,
        level: int,
    ) -> PatchedManifest | None:
        from icechunk_async.format.manifest.seekable.writing import patch_manifest  # noqa: PLC0415 -- on use

        return patch_manifest(data, ids, node_id, changed, self.spec_version, level=level)


def _encoded_small(
    manifest_id: ManifestId, arrays: Mapping[NodeId, ChunkRefs]
) -> memoryview | None:
    """Return the FlatBuffer of a manifest of few references, or of several small arrays; else None.

    What makes it is loaded when it is used.
    """
    if len(arrays) >= _SEVERAL:
        from icechunk_async.format.manifest.several import encode_several  # noqa: PLC0415

        found = encode_several(manifest_id, arrays)
        if found is not None:
            return found
    from icechunk_async.format.manifest.few import encode_few  # noqa: PLC0415

    return encode_few(manifest_id, arrays)


@dataclass(frozen=True, slots=True)
class _Logs:
    spec_version: int

    def key(self, snapshot_id: SnapshotId) -> str:
        return keys.transaction_key(snapshot_id)

    def decode(self, data: Bytes) -> TransactionLog:
        from icechunk_async.format.transaction_log import decode_transaction_log  # noqa: PLC0415 -- on use

        return decode_transaction_log(unpack(data, FileType.TRANSACTION_LOG).payload)

    def encode(self, log: TransactionLog, level: int) -> bytes:
        from icechunk_async.format.transaction_log import encode_transaction_log, fitting_level  # noqa: PLC0415 -- on use

        payload = encode_transaction_log(log, self.spec_version)
        level = fitting_level(log, level)
        return pack(payload, FileType.TRANSACTION_LOG, self.spec_version, level=level)


def snapshot_codec(spec_version: int) -> SnapshotCodec:
    """Return how snapshots are read, and written in a format version."""
    return _Snapshots(spec_version)


def manifest_codec(spec_version: int) -> ManifestCodec:
    """Return how manifests are read, and written in a format version."""
    return _Manifests(spec_version)


def log_codec(spec_version: int) -> LogCodec:
    """Return how transaction logs are read, and written in a format version."""
    return _Logs(spec_version)

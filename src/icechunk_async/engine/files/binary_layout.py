"""The layouts of format versions 1 and 2: FlatBuffers in envelopes (spec, "File layout")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from icechunk_async.engine.files.layout import EncodedSnapshot
from icechunk_async.errors import InvalidInputError, UnsupportedBySpecError
from icechunk_async.format import layout as keys
from icechunk_async.format.envelope import (
    Envelope,
    FileType,
    may_cut_seconds,
    pack,
    unpack,
    with_cut_seconds,
)
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.format.manifest.packed import ManifestFile, open_manifest
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.seekable.patching import patch_manifest
from icechunk_async.format.manifest.seekable.reading import (
    longer_tail,
    open_seekable,
    tail_extent,
)
from icechunk_async.format.manifest.seekable.writing import pack_manifest
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.snapshot import decode_snapshot, encode_snapshot
from icechunk_async.format.transaction_log import (
    decode_transaction_log,
    encode_transaction_log,
    fitting_level,
)
from icechunk_async.format.zarr_document import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.engine.files.layout import Bytes
    from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
    from icechunk_async.format.manifest.held import Extent, HeldManifest
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRef, ChunkRefs
    from icechunk_async.format.manifest.seekable.patching import PatchedManifest
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import Nodes, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["BinaryLayout"]


@dataclass(frozen=True, slots=True)
class _Names:
    spec_version: int
    chunks: str = keys.CHUNKS

    def snapshot(self, snapshot_id: SnapshotId) -> str:
        return keys.snapshot_key(snapshot_id)

    def manifest(self, manifest_id: ManifestId) -> str:
        return keys.manifest_key(manifest_id)

    def chunk(self, chunk_id: ChunkId) -> str:
        return keys.chunk_key(chunk_id)

    def is_immutable(self, key: str) -> bool:
        return keys.is_immutable(key, spec_version=self.spec_version)

    def is_written_once(self, key: str) -> bool:
        return keys.is_written_once(key)


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
        del snapshot_id  # the file has it
        return _OpenedSnapshot(unpack(data, FileType.SNAPSHOT))

    def encode(self, snapshot: Snapshot, parent: Snapshot | None, level: int) -> EncodedSnapshot:
        del parent
        payload = encode_snapshot(snapshot, self.spec_version)
        data = pack(payload, FileType.SNAPSHOT, self.spec_version, level=level)
        if not snapshot.nodes.is_light:
            # Its nodes are found in the new file from now on, and copied from there.
            stored = decode_snapshot(Envelope(self.spec_version, payload))
            snapshot = replace(snapshot, nodes=stored.nodes, manifests=stored.manifests)
        return EncodedSnapshot(data, snapshot)


class _Pieces:
    unsized_tail = 0

    def tail_extent(self, size_bytes: int) -> Extent:
        return tail_extent(size_bytes)

    def longer_tail(self, size_bytes: int, tail: Bytes) -> Extent | None:
        return longer_tail(size_bytes, tail)

    def open(self, manifest_id: ManifestId, size_bytes: int, tail: Bytes) -> HeldManifest | None:
        return open_seekable(manifest_id, size_bytes, tail)


_PIECES: Final = _Pieces()


@dataclass(frozen=True, slots=True)
class _Manifests:
    spec_version: int
    pieces: _Pieces = _PIECES
    patches: bool = True

    def open(self, manifest_id: ManifestId, data: Bytes) -> HeldManifest:
        del manifest_id  # the file has it
        return open_manifest(data)

    def hold(self, manifest_id: ManifestId, data: bytes) -> HeldManifest:
        return ManifestFile(manifest_id, data, open_manifest)

    def decode(self, manifest_id: ManifestId, data: Bytes) -> Manifest:
        del manifest_id
        payload = unpack(data, FileType.MANIFEST).payload
        return decode_manifest(payload, seconds_cut=may_cut_seconds(data))

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        level: int,
        dictionary: LocationDictionary | None,
    ) -> bytes:
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
        return patch_manifest(data, ids, node_id, changed, self.spec_version, level=level)


@dataclass(frozen=True, slots=True)
class _Logs:
    spec_version: int

    def key(self, snapshot_id: SnapshotId) -> str:
        return keys.transaction_key(snapshot_id)

    def decode(self, data: Bytes) -> TransactionLog:
        return decode_transaction_log(unpack(data, FileType.TRANSACTION_LOG).payload)

    def encode(self, log: TransactionLog, level: int) -> bytes:
        payload = encode_transaction_log(log, self.spec_version)
        level = fitting_level(log, level)
        return pack(payload, FileType.TRANSACTION_LOG, self.spec_version, level=level)


class BinaryLayout:
    """The `Layout` of format version 1 or 2."""

    id_bytes = SnapshotId.size_bytes

    def __init__(self, spec_version: int) -> None:
        """Write files of this version; both are read, by their own headers."""
        if spec_version not in (1, 2):
            raise InvalidInputError(f"There is no format version {spec_version}.")
        self.spec_version = spec_version
        self.names = _Names(spec_version)
        self.snapshots = _Snapshots(spec_version)
        self.manifests = _Manifests(spec_version)
        self.logs = _Logs(spec_version)

    def first_snapshot_id(self) -> SnapshotId:
        """Return the id that every repository begins with."""
        return INITIAL_SNAPSHOT_ID

    def document(self, path: str, document: bytes) -> bytes:
        """Return the document unchanged."""
        if self.spec_version == 1 and not parse_document(document, path).regular_grid:
            raise UnsupportedBySpecError(
                f"Array {path!r} would have a rectilinear chunk grid, and format version 1 stores "
                "regular grids only. Migrate the repository to format version 2 with "
                "icechunk_async.upkeep.upgrade.",
                path=path,
            )
        return document

    def check_ref(self, path: str, ref: ChunkRef) -> None:
        """Return: all references can be stored."""

    def check_refs(self, path: str, refs: ChunkRefs) -> None:
        """Return: all references can be stored."""

    def numbered(self, new: Iterable[NodeId], base: Nodes) -> dict[NodeId, NodeId]:
        """Return nothing: ids are random and long enough."""
        del new, base
        return {}

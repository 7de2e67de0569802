"""The layout of the alpha: JSON documents below ``s/``, ``m/``, ``a/`` and ``c/``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.layout import EncodedSnapshot
from icechunk_async.errors import UnsupportedBySpecError
from icechunk_async.format.alpha import references as keys
from icechunk_async.format.alpha.manifests import decode_manifest, encode_manifest
from icechunk_async.format.alpha.parts import ID_BYTES, MAX_U32
from icechunk_async.format.alpha.snapshots import (
    REFUSALS,
    OpenedSnapshot,
    encode_snapshot,
    node_number,
)
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import VirtualChunk
from icechunk_async.format.manifest.packed import ManifestFile
from icechunk_async.format.manifest.refs import NO_ETAG
from icechunk_async.format.zarr_array import ZarrArray, array_document, group_document, parse_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.engine.files.layout import Bytes
    from icechunk_async.format.ids import ChunkId, ManifestId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.manifest.held import HeldManifest
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import Nodes, Snapshot

__all__ = ["ALPHA_LAYOUT", "AlphaLayout"]

_WRITTEN_ONCE: Final = (keys.SNAPSHOTS, keys.MANIFESTS, keys.ATTRIBUTES, f"{keys.CHUNKS}/")


@dataclass(frozen=True, slots=True)
class _Names:
    chunks: str = keys.CHUNKS

    def snapshot(self, snapshot_id: SnapshotId) -> str:
        return keys.snapshot_key(snapshot_id)

    def manifest(self, manifest_id: ManifestId) -> str:
        return keys.manifest_key(manifest_id)

    def chunk(self, chunk_id: ChunkId) -> str:
        return keys.chunk_key(chunk_id)

    def is_immutable(self, key: str) -> bool:
        return self.is_written_once(key)

    def is_written_once(self, key: str) -> bool:
        return key.startswith(_WRITTEN_ONCE)


@dataclass(frozen=True, slots=True)
class _Snapshots:
    needs_parent: bool = True

    def open(self, snapshot_id: SnapshotId, data: Bytes) -> OpenedSnapshot:
        del snapshot_id  # the file has it
        return OpenedSnapshot(data)

    def encode(self, snapshot: Snapshot, parent: Snapshot | None, level: int) -> EncodedSnapshot:
        del level  # documents are not compressed
        encoded = encode_snapshot(snapshot, parent)
        return EncodedSnapshot(encoded.data, encoded.snapshot, encoded.files)


@dataclass(frozen=True, slots=True)
class _Manifests:
    pieces: None = None
    patches: bool = False
    shares: bool = False

    def open(self, manifest_id: ManifestId, data: Bytes) -> HeldManifest:
        return decode_manifest(manifest_id, data)

    def hold(self, manifest_id: ManifestId, data: bytes) -> HeldManifest:
        return ManifestFile(manifest_id, data, lambda found: decode_manifest(manifest_id, found))

    def decode(self, manifest_id: ManifestId, data: Bytes) -> Manifest:
        return decode_manifest(manifest_id, data)

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        level: int,
        dictionary: LocationDictionary | None,
    ) -> bytes:
        del manifest_id, level, dictionary  # neither an id nor compression
        return encode_manifest(arrays)

    def patch(
        self,
        data: Bytes,
        ids: tuple[ManifestId, ManifestId],
        node_id: NodeId,
        changed: ChunkRefs,
        level: int,
    ) -> None:
        del data, ids, node_id, changed, level


class AlphaLayout:
    """The `Layout` of the alpha."""

    spec_version = 0
    id_bytes = ID_BYTES
    logs = None

    def __init__(self) -> None:
        """Make the one value that there is."""
        self.names = _Names()
        self.snapshots = _Snapshots()
        self.manifests = _Manifests()

    def first_snapshot_id(self) -> SnapshotId:
        """Return a random id."""
        return SnapshotId.random(ID_BYTES)

    def document(self, path: str, document: bytes) -> bytes:
        """Return the document that zarr-python would write for what the alpha stores of it."""
        parsed = parse_node(document, path, REFUSALS)
        return array_document(parsed) if isinstance(parsed, ZarrArray) else group_document(parsed)

    def check_ref(self, path: str, ref: ChunkRef) -> None:
        """Refuse a virtual chunk with a checksum, which the alpha cannot store."""
        if isinstance(ref, VirtualChunk) and (ref.etag is not None or ref.last_modified):
            raise _no_checksums(path)

    def check_refs(self, path: str, refs: ChunkRefs) -> None:
        """Refuse virtual chunks with checksums, which the alpha cannot store."""
        if (refs.etags != NO_ETAG).any() or refs.modified.any():
            raise _no_checksums(path)

    def numbered(self, new: Iterable[NodeId], base: Nodes) -> dict[NodeId, NodeId]:
        """Return random numbers for nodes whose ids are no numbers, or taken."""
        taken = set(new)
        chosen: dict[NodeId, NodeId] = {}
        for node_id in sorted(taken):
            if node_number(node_id) is None or base.path_of(node_id) is not None:
                if len(taken) + len(base) >= MAX_U32:
                    raise UnsupportedBySpecError("The alpha numbers nodes with 32 bits.")
                # Random, so that two writers that create nodes at once rarely choose the same: a
                # rebase would have to give new ones.
                number = node_id
                while number in taken or base.path_of(number) is not None:
                    number = NodeId(clock.random_bytes(4).rjust(NodeId.size_bytes, b"\0"))
                taken.add(number)
                chosen[node_id] = number
        return chosen


def _no_checksums(path: str) -> UnsupportedBySpecError:
    return UnsupportedBySpecError(
        f"Virtual chunks of {path!r} have ETags or times of their sources, and the alpha stores "
        "neither. Nothing was changed. Give references without them, or migrate the repository to "
        "format version 2 with icechunk_async.upkeep.upgrade.",
        path=path,
    )


ALPHA_LAYOUT: Final = AlphaLayout()

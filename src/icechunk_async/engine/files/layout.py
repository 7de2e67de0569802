"""Layouts: the names, encodings and limits of a repository's immutable files, as values.

The files of format versions 1 and 2 are FlatBuffers below ``snapshots/``, ``manifests/`` and so on.
Layouts before them name and encode everything differently. The rest of the engine asks the layout
of its repository, and never which one it has. Pure: nothing here reads or writes.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.format.ids import ChunkId, ManifestId, NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.manifest.held import Extent, HeldManifest
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.seekable.writing import PatchedManifest
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import Nodes, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

    type Bytes = bytes | memoryview

__all__ = [
    "EncodedSnapshot",
    "Layout",
    "LogCodec",
    "ManifestCodec",
    "ManifestPieces",
    "Names",
    "OpenedSnapshot",
    "SnapshotCodec",
]


class Names(Protocol):
    """The keys of immutable files."""

    @property
    def chunks(self) -> str:
        """The folder of chunk objects, without a slash at its end."""
        ...

    def snapshot(self, snapshot_id: SnapshotId) -> str:
        """Return the key of a snapshot."""
        ...

    def manifest(self, manifest_id: ManifestId) -> str:
        """Return the key of a manifest."""
        ...

    def chunk(self, chunk_id: ChunkId) -> str:
        """Return the key of a chunk object."""
        ...

    def is_immutable(self, key: str) -> bool:
        """Return whether the object of a key holds the same bytes for its whole life."""
        ...

    def is_written_once(self, key: str) -> bool:
        """Return whether a key has a random name, so that its writer may write it again."""
        ...


class OpenedSnapshot(Protocol):
    """The file of a snapshot, checked as far as it goes by itself."""

    @property
    def needs(self) -> Sequence[str]:
        """Keys of further files without which the snapshot cannot be decoded."""
        ...

    def decode(self, files: Mapping[str, Bytes]) -> Snapshot:
        """Decode the snapshot; ``files`` has the contents of those that it needs.

        Raises:
            FormatError: one of them is damaged.
        """
        ...


@dataclass(frozen=True, slots=True)
class EncodedSnapshot:
    """The file of a new snapshot, and those to be stored with it."""

    data: bytes
    snapshot: Snapshot
    """As it will be read back."""
    companions: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Further new files, by key."""


class SnapshotCodec(Protocol):
    """Snapshots, from bytes and to bytes."""

    @property
    def needs_parent(self) -> bool:
        """Whether `encode` must be given the parent."""
        ...

    def open(self, snapshot_id: SnapshotId, data: Bytes) -> OpenedSnapshot:
        """Open the file of a snapshot.

        Raises:
            FormatError: it is damaged.
        """
        ...

    def encode(self, snapshot: Snapshot, parent: Snapshot | None, level: int) -> EncodedSnapshot:
        """Return the file of a snapshot.

        Args:
            snapshot: what to encode.
            parent: the snapshot before it, if `needs_parent`; None for the first.
            level: of compression, where files are compressed.

        Raises:
            UnsupportedBySpecError: the layout cannot express it.
        """
        ...


class ManifestPieces(Protocol):
    """Reading the pieces of large manifests that a lookup needs."""

    @property
    def unsized_tail(self) -> int:
        """Bytes at the end of a file that are read first if its size is unknown.

        0 if such files are read whole.
        """
        ...

    def tail_extent(self, size_bytes: int) -> Extent:
        """Return the end of a file that most likely holds the whole index, if it has one."""
        ...

    def longer_tail(self, size_bytes: int, tail: Bytes) -> Extent | None:
        """Return a longer end of the file to read instead; None if ``tail`` is enough."""
        ...

    def open(self, manifest_id: ManifestId, size_bytes: int, tail: Bytes) -> HeldManifest | None:
        """Open a manifest by its index; None if it has no usable one."""
        ...


class ManifestCodec(Protocol):
    """Manifests, from bytes and to bytes."""

    @property
    def pieces(self) -> ManifestPieces | None:
        """How to read large manifests in pieces; None if they are read whole."""
        ...

    @property
    def patches(self) -> bool:
        """Whether `patch` can ever work."""
        ...

    @property
    def shares(self) -> bool:
        """Whether one manifest can hold the references of several arrays."""
        ...

    def open(self, manifest_id: ManifestId, data: Bytes) -> HeldManifest:
        """Open the whole file of a manifest; decode it if it is small.

        Raises:
            FormatError: it is damaged.
        """
        ...

    def hold(self, manifest_id: ManifestId, data: bytes) -> HeldManifest:
        """Hold the file of a manifest that was just written; nothing is decoded."""
        ...

    def decode(self, manifest_id: ManifestId, data: Bytes) -> Manifest:
        """Decode the whole file of a manifest.

        Raises:
            FormatError: it is damaged.
        """
        ...

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        level: int,
        dictionary: LocationDictionary | None,
    ) -> bytes:
        """Return the file of a manifest.

        Args:
            manifest_id: its id.
            arrays: references of each array, sorted by coordinates, without deletions.
            level: of compression, where files are compressed.
            dictionary: compress locations, where the layout can.

        Raises:
            InvalidInputError: more than a manifest can hold; split it.
        """
        ...

    def patch(
        self,
        data: Bytes,
        ids: tuple[ManifestId, ManifestId],
        node_id: NodeId,
        changed: ChunkRefs,
        level: int,
    ) -> PatchedManifest | None:
        """Return a manifest with some references changed; None if it must be encoded anew.

        Args:
            data: the file.
            ids: the manifest's id, and that of the new one.
            node_id: the array.
            changed: its new references, sorted; the file has others for the same chunks.
            level: of compression.
        """
        ...


class LogCodec(Protocol):
    """Transaction logs, from bytes and to bytes."""

    def key(self, snapshot_id: SnapshotId) -> str:
        """Return the key of the transaction log of a snapshot."""
        ...

    def decode(self, data: Bytes) -> TransactionLog:
        """Decode the file of a log.

        Raises:
            FormatError: it is damaged.
        """
        ...

    def encode(self, log: TransactionLog, level: int) -> bytes:
        """Return the file of a log."""
        ...


class Layout(Protocol):
    """The names, encodings and limits of a repository's immutable files."""

    @property
    def spec_version(self) -> int:
        """The version of the format; 0 for layouts before version 1."""
        ...

    @property
    def id_bytes(self) -> int:
        """Length of the ids of snapshots, manifests and chunk objects."""
        ...

    @property
    def names(self) -> Names:
        """The keys of files."""
        ...

    @property
    def snapshots(self) -> SnapshotCodec:
        """How snapshots are encoded."""
        ...

    @property
    def manifests(self) -> ManifestCodec:
        """How manifests are encoded."""
        ...

    @property
    def logs(self) -> LogCodec | None:
        """How transaction logs are encoded.

        None if no logs are stored, and what a commit touched is found by comparing snapshots.
        """
        ...

    def first_snapshot_id(self) -> SnapshotId:
        """Return the id of the first snapshot of a new repository."""
        ...

    def document(self, path: str, document: bytes) -> bytes:
        """Return a metadata document as it will be read back.

        Raises:
            InvalidMetadataError: it is no document.
            UnsupportedBySpecError: the layout cannot express it.
        """
        ...

    def check_ref(self, path: str, ref: ChunkRef) -> None:
        """Refuse a reference that cannot be stored; as `check_refs`."""
        ...

    def check_refs(self, path: str, refs: ChunkRefs) -> None:
        """Refuse references that cannot be stored.

        Raises:
            UnsupportedBySpecError: there are some.
        """
        ...

    def numbered(self, new: Iterable[NodeId], base: Nodes) -> dict[NodeId, NodeId]:
        """Return other ids for new nodes whose ids cannot be stored beside those of ``base``.

        Raises:
            UnsupportedBySpecError: there are more nodes than the layout has ids.
        """
        ...

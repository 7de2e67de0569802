"""The layouts of format versions 1 and 2: FlatBuffers in envelopes (spec, "File layout")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, UnsupportedBySpecError
from icechunk_async.format import layout as keys
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.engine.files.layout import LogCodec, ManifestCodec, SnapshotCodec
    from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import Nodes

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


class BinaryLayout:
    """The `Layout` of format version 1 or 2."""

    id_bytes = SnapshotId.size_bytes

    def __init__(self, spec_version: int) -> None:
        """Write files of this version; both are read, by their own headers."""
        if spec_version not in (1, 2):
            raise InvalidInputError(f"There is no format version {spec_version}.")
        self.spec_version = spec_version
        self.names = _Names(spec_version)

    @property
    def snapshots(self) -> SnapshotCodec:
        """How snapshots are read and written."""
        from icechunk_async.engine.files.binary_codecs import snapshot_codec  # noqa: PLC0415 -- on use

        return snapshot_codec(self.spec_version)

    @property
    def manifests(self) -> ManifestCodec:
        """How manifests are read and written."""
        from icechunk_async.engine.files.binary_codecs import manifest_codec  # noqa: PLC0415 -- on use

        return manifest_codec(self.spec_version)

    @property
    def logs(self) -> LogCodec:
        """How transaction logs are read and written."""
        from icechunk_async.engine.files.binary_codecs import log_codec  # noqa: PLC0415 -- on use

        return log_codec(self.spec_version)

    def first_snapshot_id(self) -> SnapshotId:
        """Return the id that every repository begins with."""
        return INITIAL_SNAPSHOT_ID

    def document(self, path: str, document: bytes) -> bytes:
        """Return the document unchanged."""
        if self.spec_version != 1:
            return document
        from icechunk_async.format.zarr_document import parse_document  # noqa: PLC0415 -- on use

        # Spec 1 keeps a length of chunks for each dimension, so chunks of several lengths have no
        # place.
        if not parse_document(document, path).regular_grid:
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

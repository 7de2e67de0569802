"""The layout of the first draft: Parquet below ``s/``, ``i/`` and ``a/``, chunks below ``c/``.

A structure file has only nodes. All else about a snapshot is in the state file, so the layout of an
open repository looks snapshots up in the newest state that its history has seen.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.layout import EncodedSnapshot
from icechunk_async.errors import (
    MissingDriverError,
    UnsupportedBySpecError,
)
from icechunk_async.format.draft import metadata, names
from icechunk_async.format.draft.state import check_expressible, stored_time
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, VirtualChunk
from icechunk_async.format.manifest.packed import ManifestFile
from icechunk_async.format.manifest.refs import NO_ETAG
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.format.snapshot import ManifestFileInfo, Snapshot
from icechunk_async.format.zarr_array import ZarrArray, array_document, group_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from icechunk_async.engine.files.layout import Bytes
    from icechunk_async.format.draft.state import Entry, State
    from icechunk_async.format.draft.structure import Structure
    from icechunk_async.format.ids import ChunkId, ManifestId
    from icechunk_async.format.manifest.chunk import ChunkRef
    from icechunk_async.format.manifest.held import Extent, HeldManifest
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.snapshot import Nodes

__all__ = ["Catalog", "DraftLayout", "has_parquet", "load_parquet"]

_STRUCTURE: Final = "icechunk_async.format.draft.structure"
_MAX_NODES: Final = 1 << 16
_MAX_LENGTH: Final = (1 << 32) - 1


async def load_parquet() -> None:
    """Import what reads and writes Parquet, on a thread: it takes a second the first time."""
    if _STRUCTURE not in sys.modules:
        await anyio.to_thread.run_sync(_load)


def _load() -> None:
    from icechunk_async.format.draft.manifests import UNSIZED_TAIL  # noqa: PLC0415 -- pyarrow is slow to import
    from icechunk_async.format.draft.structure import warm_up  # noqa: PLC0415 -- as above

    assert UNSIZED_TAIL
    warm_up()


def has_parquet() -> bool:
    """Return whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


class Catalog:
    """The snapshots of a repository, as its history has seen them last."""

    def __init__(self) -> None:
        """Know none, until `follow` is called."""
        self._newest: Callable[[], State] | None = None

    def follow(self, newest: Callable[[], State]) -> None:
        """Look into what ``newest`` returns from now on."""
        self._newest = newest

    def get(self, snapshot_id: SnapshotId) -> Entry | None:
        """Return the entry of a snapshot; None if it is not known."""
        return None if self._newest is None else self._newest().snapshots.get(snapshot_id)


@dataclass(frozen=True, slots=True)
class _Names:
    catalog: Catalog
    root: str

    @property
    def chunks(self) -> str:
        return f"{self.root}{names.CHUNKS}".removesuffix("/")

    def snapshot(self, snapshot_id: SnapshotId) -> str:
        entry = self.catalog.get(snapshot_id)
        name = f"{snapshot_id}{names.SUFFIX}" if entry is None else entry.structure_file
        return f"{self.root}{names.STRUCTURES}{name}"

    def manifest(self, manifest_id: ManifestId) -> str:
        return f"{self.root}{names.MANIFESTS}{names.name_of(manifest_id)}"

    def chunk(self, chunk_id: ChunkId) -> str:
        return f"{self.root}{names.CHUNKS}{names.name_of(chunk_id)}"

    def is_immutable(self, key: str) -> bool:
        return self.is_written_once(key)

    def is_written_once(self, key: str) -> bool:
        folders = (names.STRUCTURES, names.ATTRIBUTES, names.MANIFESTS, names.CHUNKS)
        return key.startswith(tuple(f"{self.root}{it}" for it in folders))


@dataclass(frozen=True, slots=True)
class _OpenedSnapshot:
    info: SnapshotInfo
    structure: Structure
    root: str

    @property
    def needs(self) -> Sequence[str]:
        return [f"{self.root}{it}" for it in self.structure.needs]

    def decode(self, files: Mapping[str, Bytes]) -> Snapshot:
        nodes, places = self.structure.decode(
            {key.removeprefix(self.root): data for key, data in files.items()}
        )
        refs = (ref for it in nodes.values() if it.array for ref in it.array.manifests)
        ids = dict.fromkeys(ref.manifest_id for ref in refs)
        return Snapshot(
            self.info.id,
            self.info.parent_id,
            self.info.flushed_at,
            self.info.message,
            self.info.metadata,
            nodes,
            {it: ManifestFileInfo(it, 0, 0) for it in ids},  # neither size nor number are stored
            attribute_places=places,
        )


@dataclass(frozen=True, slots=True)
class _Snapshots:
    catalog: Catalog
    root: str
    needs_parent: bool = True

    def open(self, snapshot_id: SnapshotId, data: Bytes) -> _OpenedSnapshot:
        from icechunk_async.format.draft.structure import read_structure  # noqa: PLC0415 -- pyarrow is slow to import

        entry = self.catalog.get(snapshot_id)
        # Those that forks begin at, and those of commits that failed, are in no state file.
        info = SnapshotInfo.of(snapshot_id, None, 0, "", {}) if entry is None else entry.info
        return _OpenedSnapshot(info, read_structure(data), self.root)

    def encode(self, snapshot: Snapshot, parent: Snapshot | None, level: int) -> EncodedSnapshot:
        from icechunk_async.format.draft.structure import encode_structure  # noqa: PLC0415 -- as above

        check_expressible(snapshot)
        encoded = encode_structure(snapshot, parent, level)
        parent_at = None if parent is None else parent.flushed_at
        stored = replace(
            snapshot,
            flushed_at=stored_time(snapshot.flushed_at, parent_at),
            attribute_places=encoded.places,
        )
        companions = {f"{self.root}{key}": data for key, data in encoded.files.items()}
        return EncodedSnapshot(encoded.data, stored, companions)


class _Pieces:
    @property
    def unsized_tail(self) -> int:
        from icechunk_async.format.draft.manifests import UNSIZED_TAIL  # noqa: PLC0415 -- as above

        return UNSIZED_TAIL

    def tail_extent(self, size_bytes: int) -> Extent:
        return max(0, size_bytes - self.unsized_tail), size_bytes

    def longer_tail(self, size_bytes: int, tail: Bytes) -> Extent | None:
        from icechunk_async.format.draft.manifests import longer_tail  # noqa: PLC0415 -- as above

        return longer_tail(size_bytes, tail)

    def open(self, manifest_id: ManifestId, size_bytes: int, tail: Bytes) -> HeldManifest | None:
        from icechunk_async.format.draft.manifests import open_pieces  # noqa: PLC0415 -- as above

        return open_pieces(manifest_id, size_bytes, tail)


_PIECES: Final = _Pieces()


@dataclass(frozen=True, slots=True)
class _Manifests:
    pieces: _Pieces = _PIECES
    patches: bool = False
    shares: bool = False

    def open(self, manifest_id: ManifestId, data: Bytes) -> HeldManifest:
        return self.decode(manifest_id, data)

    def hold(self, manifest_id: ManifestId, data: bytes) -> HeldManifest:
        return ManifestFile(manifest_id, data, lambda found: self.decode(manifest_id, found))

    def decode(self, manifest_id: ManifestId, data: Bytes) -> Manifest:
        from icechunk_async.format.draft.manifests import decode_manifest  # noqa: PLC0415 -- as above

        return decode_manifest(manifest_id, data)

    def encode(
        self,
        manifest_id: ManifestId,
        arrays: Mapping[NodeId, ChunkRefs],
        level: int,
        dictionary: LocationDictionary | None,
    ) -> bytes:
        from icechunk_async.format.draft.manifests import encode_manifest  # noqa: PLC0415 -- as above

        del manifest_id, dictionary
        return encode_manifest(arrays, level)

    def patch(
        self,
        data: Bytes,
        ids: tuple[ManifestId, ManifestId],
        node_id: NodeId,
        changed: ChunkRefs,
        level: int,
    ) -> None:
        del data, ids, node_id, changed, level


class DraftLayout:
    """The `Layout` of the first draft, of one repository."""

    spec_version = 0
    id_bytes = names.ID_BYTES
    logs = None

    def __init__(self, root: str = "") -> None:
        """Name files below ``root``, which is empty or ends with a slash.

        Raises:
            MissingDriverError: pyarrow is not installed.
        """
        if not has_parquet():
            raise MissingDriverError(
                "A repository in the layout of the first draft is made of Parquet files, which "
                "need pyarrow, which is not installed. Install it with: pip install "
                "'icechunk-async[parquet]'",
                module="pyarrow",
            )
        self.root = root
        self.catalog = Catalog()
        self.names = _Names(self.catalog, root)
        self.snapshots = _Snapshots(self.catalog, root)
        self.manifests = _Manifests()

    def first_snapshot_id(self) -> SnapshotId:
        """Return a random id."""
        return SnapshotId.random(names.ID_BYTES)

    def document(self, path: str, document: bytes) -> bytes:
        """Return the document that zarr-python would write for what the draft stores of it."""
        parsed = metadata.parse(document, path)
        return array_document(parsed) if isinstance(parsed, ZarrArray) else group_document(parsed)

    def check_ref(self, path: str, ref: ChunkRef) -> None:
        """Refuse a reference that the draft cannot store; see `_problem`."""
        if isinstance(ref, VirtualChunk):
            guarded = ref.etag is not None or bool(ref.last_modified)
            _refuse(path, guarded=guarded, locations=[ref.location])
        length = len(ref.data) if isinstance(ref, InlineChunk) else ref.length
        _refuse(path, length=length)

    def check_refs(self, path: str, refs: ChunkRefs) -> None:
        """Refuse references that the draft cannot store; see `_problem`."""
        guarded = bool((refs.etags != NO_ETAG).any() or refs.modified.any())
        virtual = refs.take(refs.kinds == Kind.VIRTUAL).narrow()
        locations = [virtual.locations.get(at) for at in range(len(virtual.locations))]
        length = int(refs.lengths.max()) if len(refs) else 0
        _refuse(path, guarded=guarded, locations=locations, length=length)

    def numbered(self, new: Iterable[NodeId], base: Nodes) -> dict[NodeId, NodeId]:
        """Return numbers, from a random one on, for nodes whose ids are no numbers, or taken."""
        taken = set(new)
        chosen: dict[NodeId, NodeId] = {}
        for node_id in sorted(taken):
            if int.from_bytes(node_id) < _MAX_NODES and base.path_of(node_id) is None:
                continue
            if len(taken) + len(base) > _MAX_NODES:
                raise UnsupportedBySpecError(
                    f"The first draft numbers nodes with 16 bits: there are at most {_MAX_NODES}. "
                    "Nothing was changed. Migrate the repository to format version 2 with "
                    "icechunk_async.upkeep.upgrade."
                )
            # From a random number on: writers that all counted from 0 would give the same ids to
            # different nodes, and each rebase would renumber them.
            number = int.from_bytes(clock.random_bytes(2))
            while _node_id(number) in taken or base.path_of(_node_id(number)) is not None:
                number = (number + 1) % _MAX_NODES
            taken.discard(node_id)
            taken.add(_node_id(number))
            chosen[node_id] = _node_id(number)
        return chosen


def _node_id(number: int) -> NodeId:
    return NodeId(number.to_bytes(NodeId.size_bytes))


def _refuse(
    path: str, *, guarded: bool = False, locations: Sequence[str] = (), length: int = 0
) -> None:
    """Refuse references with something that has no column.

    Raises:
        UnsupportedBySpecError: virtual chunks have checksums or no URL, or a chunk is too long.
    """
    problem = ""
    if guarded:
        problem = "have ETags or times of their sources, which have no column. Leave them out"
    elif not all(map(names.is_url, locations)):
        problem = "are in files whose names are no URLs. Give their URLs"
    elif length > _MAX_LENGTH:
        problem = f"have {length} bytes, and lengths are at most {_MAX_LENGTH}. Use smaller chunks"
    if problem:
        raise UnsupportedBySpecError(
            f"A repository of the first draft's layout cannot store chunks of {path!r} that "
            f"{problem}, or migrate the repository to format version 2 with "
            "icechunk_async.upkeep.upgrade. Nothing was changed.",
            path=path,
        )

"""Snapshot files: every node of the hierarchy at one moment (spec, "Snapshot files")."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from icechunk_async.errors import FormatError, UnsupportedBySpecError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.flatbuffers.writing import (
    REF,
    Shape,
    blob,
    finish,
    string,
    structs,
    table,
    vector,
)
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.json.metadata import decode_items, encode_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.flatbuffers.writing import Block
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.manifest.refs import Extents

__all__ = [
    "Ancestor",
    "ArrayData",
    "AttributesPlace",
    "Dimension",
    "ManifestFileInfo",
    "ManifestRef",
    "Node",
    "Nodes",
    "Snapshot",
    "decode_metadata",
    "decode_snapshot",
    "encode_metadata",
    "encode_snapshot",
    "with_parent",
]


_ARRAY: Final = 1
_GROUP: Final = 2
_MAX_INDEX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Dimension:
    """One axis of an array."""

    array_length: int
    """Elements along the axis."""
    num_chunks: int
    """Chunks along the axis."""


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest that holds references of an array, and the box of the grid they lie in.

    The box of a 0-dimensional array is empty and holds its one chunk.
    """

    manifest_id: ManifestId
    extents: Extents


@dataclass(frozen=True, slots=True)
class ArrayData:
    """The data of an array in a snapshot besides its metadata document."""

    dimensions: tuple[Dimension, ...]
    dimension_names: tuple[str | None, ...] | None = None
    manifests: tuple[ManifestRef, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(dimension.num_chunks for dimension in self.dimensions)


@dataclass(frozen=True, slots=True)
class Node:
    """One array or group."""

    id: NodeId
    path: str
    """Absolute, ``/`` for the root."""
    user_data: bytes = field(repr=False)
    """The metadata document (``zarr.json``), byte for byte as Zarr gave it."""
    array: ArrayData | None = None
    """None for a group."""


@dataclass(frozen=True, slots=True)
class ManifestFileInfo:
    """A manifest that some node of the snapshot uses."""

    id: ManifestId
    size_bytes: int
    """Size of the object, header included; 0 where unknown."""
    num_chunk_refs: int


class Nodes(Mapping[str, Node]):
    """The nodes of a snapshot by path, in ascending order of the paths' UTF-8 bytes.

    Nodes are created on access, so that a large hierarchy is cheap to open.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        """Hold these nodes; each path once."""
        self._known = {node.path: node for node in nodes}
        self.paths = sorted(self._known)
        self._columns: _NodeColumns | None = None
        self._rows: dict[str, int] = {}
        self._paths_by_id: dict[NodeId, str] | None = None

    @classmethod
    def from_columns(cls, columns: _NodeColumns) -> Self:
        """Hold the nodes of a file; each is created on access."""
        nodes = cls()
        nodes._columns = columns
        nodes._rows = {path: row for row, path in enumerate(columns.paths)}
        if len(nodes._rows) != len(columns.paths):
            raise FormatError("A snapshot lists a node path twice.")
        nodes.paths = sorted(columns.paths)  # in order already, unless another writer erred
        return nodes

    def __getitem__(self, path: str) -> Node:
        """Return the node at ``path``; raise KeyError if it is missing."""
        node = self._known.get(path)
        if node is None:
            row = self._rows[path]
            assert self._columns is not None
            node = self._known[path] = self._columns.node(row)
        return node

    @overload
    def get(self, path: str, /) -> Node | None: ...

    @overload
    def get[T](self, path: str, /, default: Node | T) -> Node | T: ...

    def get(self, path: str, /, default: Any = None) -> Any:
        """Return the node at ``path``, or the default; faster than through an exception."""
        node = self._known.get(path)
        if node is not None:
            return node
        return self[path] if path in self._rows else default

    def __iter__(self) -> Iterator[str]:
        """Iterate over paths in order."""
        return iter(self.paths)

    def __len__(self) -> int:
        """Count the nodes."""
        return len(self.paths)

    def __contains__(self, path: object) -> bool:
        """Return whether there is a node at ``path``."""
        return path in self._rows or path in self._known

    def path_of(self, node_id: NodeId) -> str | None:
        """Return the path of a node by its id."""
        if self._paths_by_id is None:
            if self._columns is None:
                self._paths_by_id = {node.id: path for path, node in self._known.items()}
            else:
                self._paths_by_id = dict(zip(self._columns.ids, self._columns.paths, strict=True))
        return self._paths_by_id.get(node_id)

    def below(self, path: str) -> Iterator[str]:
        """Iterate over the paths of all descendants of ``path``, in order."""
        prefix = path if path.endswith("/") else f"{path}/"
        for index in range(bisect_left(self.paths, prefix), len(self.paths)):
            if not self.paths[index].startswith(prefix):
                return
            if self.paths[index] != path:
                yield self.paths[index]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state of the whole hierarchy."""

    id: SnapshotId
    parent_id: SnapshotId | None
    """Spec 1 only; spec 2 keeps ancestry in the repo info."""
    flushed_at: int
    """Microseconds since the epoch."""
    message: str
    metadata: dict[str, JSON] = field(default_factory=dict[str, "JSON"])
    nodes: Nodes = field(default_factory=Nodes, repr=False)
    manifests: Mapping[ManifestId, ManifestFileInfo] = field(
        default_factory=dict[ManifestId, ManifestFileInfo], repr=False
    )
    ancestors: tuple[Ancestor, ...] = field(default=(), repr=False)
    """The nearest ones, newest first, where a layout lists them in the file."""
    num_ancestors: int = 0
    """All of them, where a layout counts them in the file."""
    attribute_places: Mapping[NodeId, AttributesPlace] = field(
        default_factory=dict[NodeId, "AttributesPlace"], repr=False
    )
    """Where attributes are, of nodes that have them in another file than the snapshot."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor that a snapshot's file lists."""

    id: SnapshotId
    flushed_at: int
    """Microseconds since the epoch."""
    message: str


@dataclass(frozen=True, slots=True)
class AttributesPlace:
    """The place of a node's attributes in a file of attributes."""

    file: str
    """The key of the file."""
    row: int


def decode_snapshot(envelope: Envelope) -> Snapshot:
    """Read a snapshot by its own header's version.

    Raises:
        FormatError: the payload is damaged.
    """
    root = Tables.root(Buffer(envelope.payload))
    parent = None
    if root.has(1)[0]:
        parent = SnapshotId(root.struct(1, SnapshotId.size_bytes, field="parent_id").tobytes())
    nodes = root.vector(2, 4, 4, required="nodes").tables()
    metadata = root.vector(5, 4, 4, required="metadata").tables()
    return Snapshot(
        id=SnapshotId(root.struct(0, SnapshotId.size_bytes, field="id").tobytes()),
        parent_id=parent,
        flushed_at=int(root.scalar(3, 8)[0]),
        message=root.strings(4, required="message")[0],
        metadata=decode_metadata(metadata, envelope.spec_version),
        nodes=Nodes.from_columns(_NodeColumns(nodes)),
        manifests={info.id: info for info in _manifest_files(root)},
    )


def decode_metadata(items: Tables, spec_version: int) -> dict[str, JSON]:
    """Read MetadataItem tables."""
    names = items.strings(0, required="name")
    values = items.vector(1, 1, 1, required="value").bytes()
    return decode_items(list(zip(names, values, strict=True)), spec_version)


def _manifest_files(root: Tables) -> Iterator[ManifestFileInfo]:
    structs = root.vector(6, 32, 8, required="manifest_files").structs()
    size = structs[:, 16:24].copy().view("<u8").ravel().tolist()
    count = structs[:, 24:28].copy().view("<u4").ravel().tolist()
    for row in range(len(structs)):
        yield _file_info(structs[row, :12], size[row], count[row])
    tables = root.vector(7, 4, 4).tables()
    ids = tables.struct(0, ManifestId.size_bytes, field="id")
    size = tables.scalar(1, 8).tolist()
    count = tables.scalar(2, 4).tolist()
    for row in range(len(tables)):
        yield _file_info(ids[row], size[row], count[row])


def _file_info(raw_id: npt.NDArray[np.uint8], size_bytes: int, count: int) -> ManifestFileInfo:
    if size_bytes >= 1 << 63:
        raise FormatError("A snapshot has a manifest beyond any object's size.")
    return ManifestFileInfo(ManifestId(raw_id.tobytes()), size_bytes, count)


class _NodeColumns:
    """The NodeSnapshot tables of a file, decoded as far as vectorised code goes."""

    def __init__(self, tables: Tables) -> None:
        self.paths = _normalise(tables.strings(1, required="path"))
        self.ids = [NodeId(raw.tobytes()) for raw in tables.struct(0, 8, field="id")]
        self.user_data = tables.vector(2, 1, 1, required="user_data")
        kinds = tables.scalar(3, 1)
        if np.any((kinds != _ARRAY) & (kinds != _GROUP)):
            raise FormatError("A snapshot has a node that is neither an array nor a group.")
        rows = np.flatnonzero(kinds == _ARRAY)
        self.array_row = {int(row): index for index, row in enumerate(rows)}
        self.arrays = _ArrayColumns(tables.select(rows).tables(4, required="node_data"))

    def node(self, row: int) -> Node:
        index = self.array_row.get(row)
        return Node(
            self.ids[row],
            self.paths[row],
            bytes(self.user_data.raw(row)),
            None if index is None else self.arrays.array(index),
        )


def _normalise(paths: list[str]) -> list[str]:
    """Give every path its normal form, unless another node has that.

    The official engine stores paths such as ``/b/`` and ``/d/./e`` unchanged.
    """
    if any(path[:1] != "/" for path in paths):
        raise FormatError("A snapshot has a node whose path does not begin with a slash.")
    odd = [row for row, path in enumerate(paths) if _may_be_odd(path)]
    taken = set(paths) if odd else set[str]()
    for row in odd:
        normal = _normal_form(paths[row])
        if normal not in taken:
            taken.add(normal)
            paths[row] = normal
    return paths


def _may_be_odd(path: str) -> bool:
    return "/." in path or "//" in path or path[-1] == "/"


def _normal_form(path: str) -> str:
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in {"", "."}:
            segments.append(segment)
    return "/" + "/".join(segments)


class _ArrayColumns:
    """The ArrayNodeData tables of a file; lists of all rows, and where each row's part is."""

    def __init__(self, tables: Tables) -> None:
        old, new = tables.has(3), tables.vector(3, 4, 4)
        shapes = tables.vector(0, 16, 8, required="shape")
        self.is_new = old.tolist()
        self.old_bounds, self.new_bounds = _bounds(shapes.counts), _bounds(new.counts)
        lengths = shapes.structs().view("<u8").reshape(-1, 2)
        self.old_dimensions = _regular(lengths)
        dimensions = new.tables()
        self.new_dimensions = [
            Dimension(length, chunks)
            for length, chunks in zip(
                dimensions.scalar(0, 8).tolist(), dimensions.scalar(1, 4).tolist(), strict=True
            )
        ]
        self.has_names = tables.has(1).tolist()
        names = tables.vector(1, 4, 4)
        self.name_bounds = _bounds(names.counts)
        self.names = names.tables().strings(0)
        manifests = tables.vector(2, 4, 4, required="manifests")
        self.manifest_bounds = _bounds(manifests.counts)
        refs = manifests.tables()
        self.manifest_ids = refs.struct(0, ManifestId.size_bytes, field="object_id")
        extents = refs.vector(1, 8, 4, required="extents")
        self.extent_bounds = _bounds(extents.counts)
        self.extents = extents.structs().view("<u4").reshape(-1, 2)

    def array(self, row: int) -> ArrayData:
        bounds = self.new_bounds if self.is_new[row] else self.old_bounds
        dimensions = self.new_dimensions if self.is_new[row] else self.old_dimensions
        axes = tuple(dimensions[bounds[row] : bounds[row + 1]])
        return ArrayData(
            axes,
            tuple(
                name or None
                for name in self.names[self.name_bounds[row] : self.name_bounds[row + 1]]
            )
            if self.has_names[row]
            else None,
            tuple(
                self._manifest(index, axes)
                for index in range(self.manifest_bounds[row], self.manifest_bounds[row + 1])
            ),
        )

    def _manifest(self, index: int, axes: tuple[Dimension, ...]) -> ManifestRef:
        """Make a reference whose box has the rank of the array.

        The official engine takes the rank of the box from the first reference in the manifest, and
        compares only the axes that exist.
        """
        box = self.extents[self.extent_bounds[index] : self.extent_bounds[index + 1]].tolist()
        box += [(0, min(axis.num_chunks, _MAX_INDEX)) for axis in axes[len(box) :]]
        return ManifestRef(
            ManifestId(self.manifest_ids[index].tobytes()),
            tuple((start, stop) for start, stop in box[: len(axes)]),
        )


def _regular(lengths: npt.NDArray[Any]) -> list[Dimension]:
    """Derive chunk counts from the array and chunk lengths of spec 1."""
    dimensions: list[Dimension] = []
    for array_length, chunk_length in lengths.tolist():
        if chunk_length == 0 and array_length > 0:
            raise FormatError("A snapshot has an array with chunks of length 0.")
        chunks = -(-array_length // chunk_length) if chunk_length else 0
        dimensions.append(Dimension(array_length, chunks))
    return dimensions


def _bounds(counts: npt.NDArray[np.int64]) -> list[int]:
    """Return where each row's items begin in the list of all; one more for the end."""
    return [0, *np.cumsum(counts).tolist()]


_ROOT: Final = Shape("12s", "12s", REF, "Q", REF, REF, REF, REF)
_NODE: Final = Shape("8s", REF, REF, "B", REF)
_GROUP_SHAPE: Final = Shape()
_ARRAY_SHAPE: Final = Shape(REF, REF, REF, REF)
_MANIFEST: Final = Shape("12s", REF)
_NAME: Final = Shape(REF)
_DIMENSION: Final = Shape("Q", "I")
_FILE: Final = Shape("12s", "Q", "I")
_ITEM: Final = Shape(REF, REF)


def encode_snapshot(snapshot: Snapshot, spec_version: int) -> bytes:
    """Return the FlatBuffer of a snapshot.

    Raises:
        UnsupportedBySpecError: spec 1 cannot express it.

    Cost: some microseconds for each node, axis, and manifest of a node.
    """
    files = sorted(snapshot.manifests.values(), key=lambda info: info.id)
    packed, tables = b"", None
    if spec_version == 1:
        packed = b"".join(_file_struct(info) for info in files)
    else:
        tables = vector([_file_table(info) for info in files])
    parent = snapshot.parent_id if spec_version == 1 else None
    return finish(
        table(
            _ROOT,
            bytes(snapshot.id),
            None if parent is None else bytes(parent),
            vector([_node(node, spec_version) for node in snapshot.nodes.values()]),
            snapshot.flushed_at,
            string(snapshot.message),
            encode_metadata(snapshot.metadata, spec_version),
            structs(packed, 32),
            tables,
        )
    )


def with_parent(payload: bytes | memoryview, parent_id: SnapshotId) -> bytes:
    """Return the FlatBuffer of a snapshot with another parent; all else stays, byte for byte.

    Raises:
        FormatError: it is damaged, or has no parent: roots do not get one.
    """
    root = Tables.root(Buffer(payload))
    (place,) = root.places(1, SnapshotId.size_bytes, field="parent_id").tolist()
    return b"".join([payload[:place], parent_id, payload[place + SnapshotId.size_bytes :]])


def encode_metadata(metadata: Mapping[str, JSON], spec_version: int) -> Block:
    """Build MetadataItem tables, sorted by name."""
    items = encode_items(metadata, spec_version)
    return vector([table(_ITEM, string(name), blob(value)) for name, value in items])


def _node(node: Node, spec_version: int) -> Block:
    is_group = node.array is None
    data = table(_GROUP_SHAPE) if node.array is None else _array(node, node.array, spec_version)
    fields = (string(node.path), blob(node.user_data), 2 if is_group else 1, data)
    return table(_NODE, bytes(node.id), *fields)


def _array(node: Node, array: ArrayData, spec_version: int) -> Block:
    manifests = vector(
        [
            table(
                _MANIFEST,
                bytes(ref.manifest_id),
                structs(b"".join(struct.pack("<II", *it) for it in ref.extents), 8),
            )
            for ref in array.manifests
        ]
    )
    names = None
    if array.dimension_names is not None:
        names = vector(
            [table(_NAME, None if name is None else string(name)) for name in array.dimension_names]
        )
    old, new = b"", None
    if spec_version == 1:
        old = b"".join(
            struct.pack(
                "<QQ", dim.array_length, _chunk_length(node, dim.array_length, dim.num_chunks)
            )
            for dim in array.dimensions
        )
    else:
        _check_grid(node, array)
        new = vector([table(_DIMENSION, it.array_length, it.num_chunks) for it in array.dimensions])
    return table(_ARRAY_SHAPE, structs(old, 16), names, manifests, new)


def _chunk_length(node: Node, array_length: int, num_chunks: int) -> int:
    """Return a chunk length that gives the right number of chunks; spec 1 stores only that."""
    length = -(-array_length // num_chunks) if num_chunks else 0
    if length and -(-array_length // length) == num_chunks:
        return length
    if array_length == num_chunks == 0:
        return 1
    raise UnsupportedBySpecError(
        f"Array {node.path!r} has {num_chunks} chunks along an axis of {array_length} elements, "
        "which format version 1 cannot express. Use a repository of format version 2."
    )


def _check_grid(node: Node, array: ArrayData) -> None:
    """Raise an error for grids that spec 1 files can describe but not address."""
    if max(array.grid, default=0) >= 1 << 32:
        raise UnsupportedBySpecError(
            f"Array {node.path!r} has {max(array.grid)} chunks along an axis, and the format "
            "numbers chunks with 32 bits. Use larger chunks."
        )


def _file_struct(info: ManifestFileInfo) -> bytes:
    return struct.pack("<12s4xQI4x", info.id, info.size_bytes, info.num_chunk_refs)


def _file_table(info: ManifestFileInfo) -> Block:
    return table(_FILE, bytes(info.id), info.size_bytes, info.num_chunk_refs)

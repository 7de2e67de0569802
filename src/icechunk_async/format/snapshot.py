"""Snapshot files: every node of the hierarchy at one moment (spec, "Snapshot files")."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.buffer import Buffer
from icechunk_async.format.flat import Tables
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.metadata import decode_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from icechunk_async.format.chunk_refs import Extents
    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.metadata import JSON

__all__ = [
    "ArrayData",
    "Dimension",
    "ManifestFileInfo",
    "ManifestRef",
    "Node",
    "Nodes",
    "Snapshot",
    "decode_metadata",
    "decode_snapshot",
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
    """What a snapshot knows of an array besides its metadata document."""

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

    Nodes are made when they are asked for, so that a large hierarchy costs little to open.
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
        """Hold the nodes of a file; each is made when it is asked for."""
        nodes = cls()
        nodes._columns = columns
        nodes._rows = {path: row for row, path in enumerate(columns.paths)}
        if len(nodes._rows) != len(columns.paths):
            raise FormatError("A snapshot lists a node path twice.")
        nodes.paths = sorted(columns.paths)  # in order already, unless another writer erred
        return nodes

    def __getitem__(self, path: str) -> Node:
        """Answer the node at ``path``; KeyError if there is none."""
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
        """Answer the node at ``path``, or the default; faster than through an exception."""
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
        """Tell whether there is a node at ``path``."""
        return path in self._rows or path in self._known

    def path_of(self, node_id: NodeId) -> str | None:
        """Answer the path of a node by its id."""
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

    The official engine stores paths such as ``/b/`` and ``/d/./e`` as it is given them.
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

        The official engine takes the rank of the box from the first reference in the manifest,
        whatever it is, and compares only the axes that there are.
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
    """Answer where each row's items begin in the list of all; one more for the end."""
    return [0, *np.cumsum(counts).tolist()]

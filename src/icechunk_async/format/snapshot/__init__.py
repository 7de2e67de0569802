"""Snapshot files: every node of the hierarchy at one moment (spec, "Snapshot files").

`nodes.Nodes` finds each `node` by path and holds what changed on top of a file (`table`), in which
nothing is decoded that was not asked for. `files.Files` are the manifests that it lists.
`writing.encode_snapshot` copies what did not change, by its `layout`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.flatbuffers.single import Reader
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.json.metadata import decode_items, read_each
from icechunk_async.format.snapshot.files import Files, ManifestFileInfo
from icechunk_async.format.snapshot.node import ArrayData, Dimension, ManifestRef, Node
from icechunk_async.format.snapshot.nodes import Nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.json.metadata import JSON

__all__ = [
    "Ancestor",
    "ArrayData",
    "AttributesPlace",
    "Dimension",
    "Files",
    "ManifestFileInfo",
    "ManifestRef",
    "Node",
    "Nodes",
    "Snapshot",
    "decode_snapshot",
    "with_parent",
]


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
    manifests: Mapping[ManifestId, ManifestFileInfo] = field(default_factory=Files, repr=False)
    ancestors: tuple[Ancestor, ...] = field(default=(), repr=False)
    """The nearest ones, newest first, where a layout lists them in the file."""
    num_ancestors: int = 0
    """All of them, where a layout counts them in the file."""
    attribute_places: Mapping[NodeId, AttributesPlace] = field(
        default_factory=dict["NodeId", "AttributesPlace"], repr=False
    )
    """Where attributes are, of nodes that have them in another file than the snapshot."""

    def check(self) -> None:
        """Decode all that is decoded only when it is asked for.

        Raises:
            FormatError: something is damaged.
        """
        for _ in self.nodes.values():
            pass
        for _ in self.manifests.values():
            pass


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

    Nodes and manifests are decoded when they are asked for, and raise then if they are damaged.

    Raises:
        FormatError: the payload is damaged.

    Cost: does not depend on the number of nodes.
    """
    from icechunk_async.format.snapshot.table import NodeTable  # noqa: PLC0415 -- loaded when it is used

    reader = Reader(envelope.payload)
    root, size, version = reader.root(), SnapshotId.size_bytes, envelope.spec_version
    # Where it is present, whatever the version: files of version 1 lie unchanged in repositories
    # that were migrated.
    parent = SnapshotId(root.struct(1, size, field="parent_id")) if root.has(1) else None
    items = read_each(root.tables(5, required="metadata"))
    return Snapshot(
        id=SnapshotId(root.struct(0, size, field="id")),
        parent_id=parent,
        flushed_at=root.number(3, 8),
        message=root.text(4, required="message"),
        metadata=decode_items(items, version),
        nodes=Nodes.from_table(NodeTable(*root.table_list(2, required="nodes"), version)),
        manifests=Files.from_root(reader, root),
    )


def with_parent(payload: bytes | memoryview, parent_id: SnapshotId) -> bytes:
    """Return the FlatBuffer of a snapshot with another parent; all else stays, byte for byte.

    Raises:
        FormatError: it is damaged, or has no parent: roots do not get one.
    """
    from icechunk_async.format.flatbuffers.buffer import Buffer  # noqa: PLC0415 -- for expiration
    from icechunk_async.format.flatbuffers.reading import Tables  # noqa: PLC0415 -- for expiration

    root = Tables.root(Buffer(payload))
    # An inline struct: other bytes of the same length, so no offset changes.
    (place,) = root.places(1, SnapshotId.size_bytes, field="parent_id").tolist()
    return b"".join([payload[:place], parent_id, payload[place + SnapshotId.size_bytes :]])

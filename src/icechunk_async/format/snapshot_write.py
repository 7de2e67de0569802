"""Encoding snapshots and the metadata items that other files share with them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import UnsupportedBySpecError
from icechunk_async.format.blocks import (
    REF,
    Shape,
    blob,
    finish,
    string,
    structs,
    table,
    vector,
)
from icechunk_async.format.buffer import Buffer
from icechunk_async.format.flat import Tables
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.metadata import encode_items

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.blocks import Block
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.snapshot import ArrayData, ManifestFileInfo, Node, Snapshot

__all__ = ["encode_metadata", "encode_snapshot", "with_parent"]

_ROOT: Final = Shape("12s", "12s", REF, "Q", REF, REF, REF, REF)
_NODE: Final = Shape("8s", REF, REF, "B", REF)
_GROUP: Final = Shape()
_ARRAY: Final = Shape(REF, REF, REF, REF)
_MANIFEST: Final = Shape("12s", REF)
_NAME: Final = Shape(REF)
_DIMENSION: Final = Shape("Q", "I")
_FILE: Final = Shape("12s", "Q", "I")
_ITEM: Final = Shape(REF, REF)


def encode_snapshot(snapshot: Snapshot, spec_version: int) -> bytes:
    """Answer the FlatBuffer of a snapshot.

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
    """Answer the FlatBuffer of a snapshot with another parent; all else stays, byte for byte.

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
    data = table(_GROUP) if node.array is None else _array(node, node.array, spec_version)
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
    return table(_ARRAY, structs(old, 16), names, manifests, new)


def _chunk_length(node: Node, array_length: int, num_chunks: int) -> int:
    """Answer a chunk length that gives the right number of chunks; spec 1 stores only that."""
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
    """Refuse grids that spec 1 files can describe, though not even they could address them."""
    if max(array.grid, default=0) >= 1 << 32:
        raise UnsupportedBySpecError(
            f"Array {node.path!r} has {max(array.grid)} chunks along an axis, and the format "
            "numbers chunks with 32 bits. Use larger chunks."
        )


def _file_struct(info: ManifestFileInfo) -> bytes:
    return struct.pack("<12s4xQI4x", info.id, info.size_bytes, info.num_chunk_refs)


def _file_table(info: ManifestFileInfo) -> Block:
    return table(_FILE, bytes(info.id), info.size_bytes, info.num_chunk_refs)

"""Encoding snapshots and the metadata items that other files share with them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from icechunk_async.errors import UnsupportedBySpecError
from icechunk_async.format.builder import Offset, Scalar, Struct, TableBuilder
from icechunk_async.format.flat import Buffer
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.metadata import encode_items

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.snapshot import ArrayData, ManifestFileInfo, Node, Snapshot

__all__ = ["encode_metadata", "encode_snapshot", "with_parent"]


def encode_snapshot(snapshot: Snapshot, spec_version: int) -> bytes:
    """Answer the FlatBuffer of a snapshot.

    Raises:
        UnsupportedBySpecError: spec 1 cannot express it.

    Cost: tens of microseconds a node.
    """
    out = TableBuilder(1024 + 1024 * len(snapshot.nodes))
    nodes = out.offsets([_node(out, node, spec_version) for node in snapshot.nodes.values()])
    files = sorted(snapshot.manifests.values(), key=lambda info: info.id)
    structs, tables = b"", None
    if spec_version == 1:
        structs = b"".join(_file_struct(info) for info in files)
    else:
        tables = out.offsets([_file_table(out, info) for info in files])
    parent = snapshot.parent_id if spec_version == 1 else None
    root = {
        2: nodes,
        4: out.string(snapshot.message),
        5: encode_metadata(out, snapshot.metadata, spec_version),
        6: out.structs(structs, 32, 8),
        7: tables,
    }
    return out.finish(
        out.table(
            {
                0: Struct(snapshot.id),
                1: None if parent is None else Struct(parent),
                3: Scalar(snapshot.flushed_at, 8),
                **root,
            }
        )
    )


def with_parent(payload: bytes, parent_id: SnapshotId) -> bytes:
    """Answer the FlatBuffer of a snapshot with another parent; all else stays, byte for byte.

    Raises:
        FormatError: it is damaged, or has no parent: roots do not get one.
    """
    (place,) = Buffer(payload).root().places(1, SnapshotId.size_bytes, field="parent_id").tolist()
    return b"".join([payload[:place], parent_id, payload[place + SnapshotId.size_bytes :]])


def encode_metadata(out: TableBuilder, metadata: Mapping[str, JSON], spec_version: int) -> Offset:
    """Write MetadataItem tables, sorted by name."""
    return out.offsets(
        [
            out.table({0: out.string(name), 1: out.blob(value)})
            for name, value in encode_items(metadata, spec_version)
        ]
    )


def _node(out: TableBuilder, node: Node, spec_version: int) -> Offset:
    path, user_data = out.string(node.path), out.blob(node.user_data)
    data = out.table({}) if node.array is None else _array(out, node, node.array, spec_version)
    kind = Scalar(2 if node.array is None else 1, 1)
    return out.table({0: Struct(node.id), 1: path, 2: user_data, 3: kind, 4: data})


def _array(out: TableBuilder, node: Node, array: ArrayData, spec_version: int) -> Offset:
    manifests = out.offsets(
        [
            out.table(
                {
                    1: out.structs(b"".join(struct.pack("<II", *it) for it in ref.extents), 8, 4),
                    0: Struct(ref.manifest_id),
                }
            )
            for ref in array.manifests
        ]
    )
    names = None
    if array.dimension_names is not None:
        names = out.offsets(
            [
                out.table({0: None if name is None else out.string(name)})
                for name in array.dimension_names
            ]
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
        new = out.offsets(
            [
                out.table({0: Scalar(dim.array_length, 8), 1: Scalar(dim.num_chunks, 4)})
                for dim in array.dimensions
            ]
        )
    return out.table({0: out.structs(old, 16, 8), 1: names, 2: manifests, 3: new})


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


def _file_table(out: TableBuilder, info: ManifestFileInfo) -> Offset:
    return out.table(
        {0: Struct(info.id), 1: Scalar(info.size_bytes, 8), 2: Scalar(info.num_chunk_refs, 4)}
    )

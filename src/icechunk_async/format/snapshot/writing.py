"""Write snapshot files: nodes that did not change are copied from the file that they came from."""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import UnsupportedBySpecError
from icechunk_async.format.flatbuffers.blocks import (
    REF,
    Long,
    Shape,
    blob,
    long_table,
    string,
    structs,
    table,
    vector,
)
from icechunk_async.format.flatbuffers.splicing import (
    FEWEST_COPIED,
    NewTable,
    Source,
    Spliced,
    place_before,
    weave,
)
from icechunk_async.format.flatbuffers.writing import column_vector, finish_long, long_vector
from icechunk_async.format.json.metadata import encode_items, items_block
from icechunk_async.format.json.values import check_text
from icechunk_async.format.snapshot.files import Files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.snapshot.files import FileColumns
    from icechunk_async.format.snapshot.node import ArrayData, Dimension, Node
    from icechunk_async.format.snapshot.nodes import Nodes
    from icechunk_async.format.snapshot.table import NodeTable


__all__ = ["encode_snapshot"]

_ROOT: Final = Shape("12s", "12s", REF, "Q", REF, REF, REF, REF)
_NODE: Final = Shape("8s", REF, REF, "B", REF)
_GROUP_SHAPE: Final = Shape()
_ARRAY_SHAPE: Final = Shape(REF, REF, REF, REF)
_MANIFEST: Final = Shape("12s", REF)
_NAME: Final = Shape(REF)
_DIMENSION: Final = Shape("Q", "I")
_FILE: Final = Shape("12s", "Q", "I")
# The schema's struct has four zero bytes behind the id and four at its end, by its alignment.
_FILE_STRUCT: Final = np.dtype(
    {"names": ["id", "size", "count"], "formats": ["V12", "<u8", "<u4"], "offsets": [0, 16, 24],
     "itemsize": 32}
)  # fmt: skip


def encode_snapshot(snapshot: Snapshot, spec_version: int) -> bytes | memoryview:
    """Return the FlatBuffer of a snapshot.

    Raises:
        UnsupportedBySpecError: spec 1 cannot express it.
        InvalidInputError: its message has lone surrogates.
        FormatError: a node of the file that it is based on is damaged.

    Cost: some microseconds for each node that lies on top of the file below, and for each axis, and
    manifest, of one; for the others, time to copy their bytes. The first time for a file, that of
    looking at all of its nodes, by columns.
    """
    check_text(snapshot.message, "The message")
    # Version 2 leaves the list of structs, which the schema requires, empty and has one of tables.
    columns = Files.of(snapshot.manifests).columns
    old, new = b"", None
    if spec_version == 1:
        old = _file_structs(columns)
    else:
        numbers = (columns.size_bytes, columns.num_chunk_refs)
        new = column_vector(_FILE, (columns.ids, *numbers))
    # In version 2 only the repo info file knows parents, so that expiration rewrites no snapshot.
    parent = snapshot.parent_id if spec_version == 1 else None
    root = long_table(
        _ROOT,
        bytes(snapshot.id),
        None if parent is None else bytes(parent),
        _nodes(snapshot.nodes, spec_version),
        snapshot.flushed_at,
        string(snapshot.message),
        items_block(encode_items(snapshot.metadata, spec_version)),
        structs(old, _FILE_STRUCT.itemsize),
        new,
    )
    return finish_long(root)


def _file_structs(columns: FileColumns) -> bytes:
    records = np.zeros(len(columns.ids), _FILE_STRUCT)
    records["id"] = np.ascontiguousarray(columns.ids).view("V12").ravel()
    records["size"], records["count"] = columns.size_bytes, columns.num_chunk_refs
    return records.tobytes()


def _nodes(nodes: Nodes, spec_version: int) -> Block | tuple[Long, int]:
    """Build the vector of nodes."""
    stored = nodes.table
    if stored is not None and stored.spec_version == spec_version:
        stays = len(stored) - len(nodes.covered)
        if stays >= FEWEST_COPIED:
            copied = _spliced(nodes, stored, spec_version)
            if copied is not None:
                return copied
    write = _NodeWriter(spec_version).node
    if nodes.is_light and len(nodes) <= 2 * FEWEST_COPIED:  # the next commit may need them
        return vector(nodes.blocks(spec_version, write))
    return vector([write(node) for node in nodes.values()])


def _spliced(nodes: Nodes, stored: NodeTable, spec_version: int) -> tuple[Long, int] | None:
    """Build the vector of nodes with those of the file copied; None if that would not pay.

    Nodes in a form that we do not write are written anew.
    """
    layout, index = stored.layout, stored.index
    gone = layout.foreign | index.is_odd
    odd = [index.by_row[row] for row in np.flatnonzero(gone).tolist()]
    put = {path: nodes[path] for path in odd if path not in nodes.covered}
    put.update(nodes.put)
    gone[list(nodes.covered.values())] = True
    if np.count_nonzero(~gone) < FEWEST_COPIED:
        return None
    writer = _NodeWriter(spec_version)
    new = [
        NewTable(bisect_left(index.paths, path), *writer.node(put[path])) for path in sorted(put)
    ]
    source = Source(stored.payload, stored.tables.positions, layout.spans)
    spliced: Spliced | None
    if index.is_plain and layout.spans.are_blocks:
        spliced = weave(source, gone, new)
    else:
        order = np.array(index.rows, np.int64)
        spliced = place_before(source, stored.bare_spans, order, gone, new)
    return None if spliced is None else long_vector(spliced.positions, spliced.parts)


class _NodeWriter:
    """Builds nodes; of what many arrays have in common the bytes are made once."""

    def __init__(self, spec_version: int) -> None:
        self._spec_version = spec_version
        self._arrays: dict[ArrayData, Block] = {}
        """Arrays of one shape, whose references fill one box of one manifest, are the same."""
        self._axes: dict[tuple[Dimension, ...], tuple[bytes, Block | None]] = {}
        self._names: dict[tuple[str | None, ...], Block] = {}

    def node(self, node: Node) -> Block:
        """Build a node."""
        array = node.array
        if array is None:
            data = table(_GROUP_SHAPE)
        else:
            data = self._arrays.get(array) or self._array(node, array)
        # The document is stored as Zarr gave it, byte for byte, as the official engine does. So
        # equal documents stay equal, and setting one again is no change.
        kind = 2 if array is None else 1
        return table(_NODE, bytes(node.id), string(node.path), blob(node.user_data), kind, data)

    def _array(self, node: Node, array: ArrayData) -> Block:
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
            names = self._names.get(array.dimension_names)
            if names is None:
                names = self._names[array.dimension_names] = _names(array.dimension_names)
        axes = self._axes.get(array.dimensions)
        if axes is None:
            axes = self._axes[array.dimensions] = _axes(node, array, self._spec_version)
        old, new = axes
        block = self._arrays[array] = table(_ARRAY_SHAPE, structs(old, 16), names, manifests, new)
        return block


def _names(names: Iterable[str | None]) -> Block:
    """Build the names of an array's dimensions."""
    return vector([table(_NAME, None if name is None else string(name)) for name in names])


def _axes(node: Node, array: ArrayData, spec_version: int) -> tuple[bytes, Block | None]:
    """Build an array's shape: the structs of spec 1, and the vector of spec 2."""
    if spec_version == 1:
        lengths = [(it.array_length, it.num_chunks) for it in array.dimensions]
        return b"".join(
            struct.pack("<QQ", length, _chunk_length(node, length, chunks))
            for length, chunks in lengths
        ), None
    _check_grid(node, array)
    # Its presence, not its length, tells a reader that the array is described so: an array
    # without axes has an empty list of either kind.
    return b"", vector(
        [table(_DIMENSION, it.array_length, it.num_chunks) for it in array.dimensions]
    )


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

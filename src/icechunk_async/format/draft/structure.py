"""Structure files of the first draft, a row a node, and the files of attributes beside them.

The specification leaves the files of attributes open. Here they have one column, ``attrs``, of JSON
objects; a node's ``row`` counts from the first. Inline attributes are JSON objects, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError, UnsupportedBySpecError
from icechunk_async.format.draft.metadata import dump_json, parse, read_array, text, write_array
from icechunk_async.format.draft.names import (
    ATTRIBUTES,
    SUFFIX,
    check_name,
    manifest_id,
    name_of,
)
from icechunk_async.format.draft.parquet import (
    ParquetReader,
    python_values,
    write_parquet,
)
from icechunk_async.format.envelope import believable_bytes
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.snapshot import (
    ArrayData,
    AttributesPlace,
    Dimension,
    ManifestRef,
    Node,
    Nodes,
)
from icechunk_async.format.zarr_array import ZarrArray, array_document, group_document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.format.json.values import JSON
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.snapshot import Snapshot

__all__ = [
    "STRUCTURE_SCHEMA",
    "Encoded",
    "Structure",
    "encode_structure",
    "read_structure",
    "warm_up",
]

_STRUCTURE: Final = "structure file"
_ATTRIBUTES: Final = "file of attributes"
MAX_NODES: Final = 1 << 16
"""Ids of nodes have 16 bits."""
_MAX_ROWS: Final = 1 << 16
_MIN_FILE_BYTES: Final = 1 << 14
"""Attributes of a node from this size are stored in a file, so that commits do not repeat them."""


def _described(name: str, kind: pa.DataType, about: str, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": about})


_U16: Final = pa.uint16()
_LENGTHS: Final = pa.list_(_U16)
_METADATA: Final = pa.struct(
    [
        pa.field("shape", _LENGTHS, nullable=False),
        pa.field("data_type", pa.string(), nullable=False),
        pa.field("fill_value", pa.binary()),
        pa.field("dimension_names", pa.list_(pa.string())),
        pa.field(
            "chunk_grid",
            pa.struct(
                [
                    pa.field("name", pa.string(), nullable=False),
                    pa.field(
                        "configuration",
                        pa.struct([pa.field("chunk_shape", _LENGTHS, nullable=False)]),
                        nullable=False,
                    ),
                ]
            ),
            nullable=False,
        ),
        pa.field(
            "chunk_key_encoding",
            pa.struct(
                [
                    pa.field("name", pa.string(), nullable=False),
                    pa.field(
                        "configuration",
                        pa.struct([pa.field("separator", pa.string(), nullable=False)]),
                        nullable=False,
                    ),
                ]
            ),
            nullable=False,
        ),
        pa.field(
            "codecs",
            pa.list_(
                pa.struct(
                    [
                        pa.field("name", pa.string(), nullable=False),
                        pa.field("configuration", pa.binary()),
                    ]
                )
            ),
        ),
    ]
)
_PLACE: Final = pa.struct(
    [
        pa.field("attrs_file", pa.string(), nullable=False),
        pa.field("row", _U16, nullable=False),
        pa.field("flags", _U16),
    ]
)
_INVENTORIES: Final = pa.list_(
    pa.struct(
        [
            pa.field("inventory_file", pa.string(), nullable=False),
            pa.field("row", _U16, nullable=False),
            pa.field("extent", pa.list_(pa.list_(_U16, 2)), nullable=False),
            pa.field("flags", _U16),
        ]
    )
)
STRUCTURE_SCHEMA: Final = pa.schema(
    [
        _described("id", _U16, "unique identifier for the node", nullable=False),
        _described("type", pa.string(), "array or group", nullable=False),
        _described("path", pa.string(), "path to the node within the store", nullable=False),
        _described("array_metadata", _METADATA, "All the Zarr array metadata"),
        _described(
            "inline_attrs", pa.binary(), "user-defined attributes, stored inline with this entry"
        ),
        _described(
            "attrs_reference",
            _PLACE,
            "user-defined attributes, stored in a separate attributes file",
        ),
        pa.field("inventories", _INVENTORIES),
    ]
)
_ATTRIBUTES_SCHEMA: Final = pa.schema([pa.field("attrs", pa.binary(), nullable=False)])


class Structure:
    """The rows of a structure file, and the files of attributes that they need."""

    def __init__(self, data: bytes | memoryview) -> None:
        """Read the rows.

        Raises:
            FormatError: they are damaged.
        """
        self._limit = believable_bytes(len(data))
        # Rows are counted from the footer before anything is decoded: Parquet can claim billions of
        # equal rows in a few bytes.
        reader = ParquetReader(data, _STRUCTURE, schema=STRUCTURE_SCHEMA)
        if reader.footer.num_rows > MAX_NODES:
            raise FormatError(
                f"A {_STRUCTURE} claims to have {reader.footer.num_rows} nodes; there are at "
                f"most {MAX_NODES}."
            )
        table = reader.read()
        names = STRUCTURE_SCHEMA.names
        columns = [python_values(table[name], _STRUCTURE) for name in names]
        self._rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        self._parsed: dict[bytes, Mapping[str, JSON]] = {}
        self._places = [_place(row["attrs_reference"]) for row in self._rows]
        self.needs: Sequence[str] = tuple(
            dict.fromkeys(it.file for it in self._places if it is not None)
        )

    def decode(
        self, files: Mapping[str, bytes | memoryview]
    ) -> tuple[Nodes, dict[NodeId, AttributesPlace]]:
        """Return the nodes, and where those have attributes that have them in a file.

        Raises:
            FormatError: a file is damaged.
        """
        stored = {key: _read_attributes(data) for key, data in files.items()}
        nodes: dict[str, Node] = {}
        places: dict[NodeId, AttributesPlace] = {}
        for row, place in zip(self._rows, self._places, strict=True):
            path = _path(row["path"])
            node_id = _node_id(row["id"], path)
            attributes = self._attributes(row, place, stored, path)
            if place is not None:
                places[node_id] = place
            if path in nodes:
                raise FormatError(f"A {_STRUCTURE} has two nodes at {path!r:.100}.")
            nodes[path] = _node(row, path, node_id, attributes)
            # Rows can refer to one row of attributes, so a small file can stand for documents of
            # any size.
            self._limit -= len(nodes[path].user_data)
            if self._limit < 0:
                raise FormatError(f"A {_STRUCTURE} stands for documents that are not believed.")
        # References are found by the id of a node, so two of one would share their chunks.
        if len({node.id for node in nodes.values()}) != len(nodes):
            raise FormatError(f"A {_STRUCTURE} has two nodes of one id.")
        return Nodes(nodes.values()), places

    def _attributes(
        self,
        row: Mapping[str, Any],
        place: AttributesPlace | None,
        stored: Mapping[str, list[bytes]],
        path: str,
    ) -> Mapping[str, JSON]:
        raw: bytes | None = row["inline_attrs"]
        if place is not None:
            if raw is not None:
                raise FormatError(f"A {_STRUCTURE}, at {path!r:.100}, has attributes twice.")
            rows = stored[place.file]
            if place.row >= len(rows):
                raise FormatError(
                    f"A {_STRUCTURE} refers to attributes {place.row} of {place.file!r:.100}, "
                    f"which has {len(rows)}."
                )
            raw = rows[place.row]
        if raw is None:
            return {}
        # By their bytes: all nodes that refer to one row of attributes share what was parsed.
        if raw not in self._parsed:
            self._parsed[raw] = parse_json(raw, f"node's attributes, at {path!r:.100},").members
        return self._parsed[raw]


def warm_up() -> None:
    """Write and read a file, so that pyarrow imports all of itself that it imports when used."""
    table = pa.Table.from_pylist([{"attrs": b"{}"}], schema=_ATTRIBUTES_SCHEMA)
    _read_attributes(write_parquet(table, 1))


def read_structure(data: bytes | memoryview) -> Structure:
    """Read a structure file; see `Structure`."""
    return Structure(data)


def _read_attributes(data: bytes | memoryview) -> list[bytes]:
    reader = ParquetReader(data, _ATTRIBUTES, schema=_ATTRIBUTES_SCHEMA)
    if reader.footer.num_rows > _MAX_ROWS:
        raise FormatError(f"A {_ATTRIBUTES} has more than {_MAX_ROWS} rows.")
    rows = python_values(reader.read()["attrs"], _ATTRIBUTES)
    if None in rows:
        raise FormatError(f"A {_ATTRIBUTES} has a row that is null.")
    return rows


def _place(value: Mapping[str, Any] | None) -> AttributesPlace | None:
    if value is None:
        return None
    name, row = check_name(text(value["attrs_file"], "attrs_reference")), value["row"]
    # Other writers may have used signed numbers, and a negative one would count from the end.
    if row is None or row < 0:
        raise FormatError(f"A {_STRUCTURE} refers to row {row} of {name!r:.100}.")
    return AttributesPlace(f"{ATTRIBUTES}{name}", row)


def _path(value: Any) -> str:
    """Return the path of a node; other writers may leave out the slash at its beginning."""
    path = "/" + text(value, "path").removeprefix("/")
    if path != "/" and any(part in {"", ".", ".."} for part in path[1:].split("/")):
        raise FormatError(f"A {_STRUCTURE} has a node at {path!r:.100}, which is no path.")
    return path


def _node_id(number: Any, path: str) -> NodeId:
    if number is None or not 0 <= number < MAX_NODES:
        raise FormatError(f"A {_STRUCTURE}, at {path!r:.100}, has the id {number}.")
    return NodeId(number.to_bytes(NodeId.size_bytes))


def _node(
    row: Mapping[str, Any], path: str, node_id: NodeId, attributes: Mapping[str, JSON]
) -> Node:
    kind, metadata = text(row["type"], path), row["array_metadata"]
    if kind == "group" and metadata is None:
        return Node(node_id, path, group_document(attributes))
    if kind != "array" or metadata is None:
        raise FormatError(
            f"A {_STRUCTURE}, at {path!r:.100}, has a node of type {kind!r:.60} "
            f"{'without' if metadata is None else 'with'} metadata of an array."
        )
    array = read_array(metadata, path, attributes)
    if len(array.shape) > MAX_RANK:
        raise FormatError(f"A {_STRUCTURE}, at {path!r:.100}, has more than {MAX_RANK} axes.")
    dimensions = tuple(
        Dimension(length, -(-length // chunk))
        for length, chunk in zip(array.shape, array.chunk_shape, strict=True)
    )
    refs = tuple(_manifest(it, path, len(dimensions)) for it in row["inventories"] or ())
    names = array.dimension_names
    names = None if names is None else tuple(name or None for name in names)
    return Node(node_id, path, array_document(array), ArrayData(dimensions, names, refs))


def _manifest(value: Mapping[str, Any] | None, path: str, rank: int) -> ManifestRef:
    extent: Any = None if value is None else value["extent"]
    if value is None or extent is None or len(extent) != rank:
        raise FormatError(f"A {_STRUCTURE}, at {path!r:.100}, has the extent {extent!r:.60}.")
    for axis in extent:
        if axis is None or len(axis) != 2 or None in axis or not 0 <= axis[0] <= axis[1]:
            raise FormatError(f"A {_STRUCTURE}, at {path!r:.100}, has the extent {extent!r:.60}.")
    box: Extents = tuple((start, stop) for start, stop in extent)
    return ManifestRef(manifest_id(text(value["inventory_file"], path)), box)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The files of a new snapshot."""

    data: bytes
    places: Mapping[NodeId, AttributesPlace]
    """Where those nodes have attributes that have them in a file."""
    files: Mapping[str, bytes]
    """New files of attributes, by key."""


def encode_structure(snapshot: Snapshot, parent: Snapshot | None, level: int) -> Encoded:
    """Return the files of a snapshot's nodes.

    Args:
        snapshot: the snapshot, whose nodes have ids that are numbers.
        parent: the one before it; None for the first.
        level: of compression.

    Raises:
        UnsupportedBySpecError: it has something that the layout cannot express.
    """
    if len(snapshot.nodes) > MAX_NODES:
        raise UnsupportedBySpecError(f"The first draft has at most {MAX_NODES} nodes.")
    key = f"{ATTRIBUTES}{ManifestId.random()}{SUFFIX}"
    new: list[bytes] = []
    places: dict[NodeId, AttributesPlace] = {}
    rows: list[dict[str, Any]] = []
    for path, node in snapshot.nodes.items():
        parsed = parse(node.user_data, path)
        attributes = _attributes_of(parsed)
        stored = dump_json(attributes)
        place = _known_place(node, attributes, parent)
        # Further ones stay inline: a row's number has 16 bits.
        if place is None and len(stored) >= _MIN_FILE_BYTES and len(new) < _MAX_ROWS:
            place = AttributesPlace(key, len(new))
            new.append(stored)
        if place is not None:
            places[node.id] = place
        rows.append(_row(node, parsed, stored if attributes else None, place))
    files: dict[str, bytes] = {}
    if new:
        table = pa.Table.from_pylist([{"attrs": it} for it in new], schema=_ATTRIBUTES_SCHEMA)
        files[key] = write_parquet(table, level)
    table = pa.Table.from_pylist(rows, schema=STRUCTURE_SCHEMA)
    return Encoded(write_parquet(table, level, repeated=_REPEATED), places, files)


_REPEATED: Final = ("type", "array_metadata.data_type", "array_metadata.codecs.list.element.name")


def _attributes_of(parsed: ZarrArray | Mapping[str, JSON]) -> Mapping[str, JSON]:
    return parsed.attributes if isinstance(parsed, ZarrArray) else parsed


def _known_place(
    node: Node, attributes: Mapping[str, JSON], parent: Snapshot | None
) -> AttributesPlace | None:
    """Return where the parent has the same attributes of a node in a file."""
    known = None if parent is None else parent.attribute_places.get(node.id)
    if known is None or parent is None:
        return None
    before = parent.nodes.get(parent.nodes.path_of(node.id) or "")
    if before is None or attributes != _attributes_of(parse(before.user_data, before.path)):
        return None
    return known


def _row(
    node: Node,
    parsed: ZarrArray | Mapping[str, JSON],
    attributes: bytes | None,
    place: AttributesPlace | None,
) -> dict[str, Any]:
    number = int.from_bytes(node.id)
    if number >= MAX_NODES:
        raise InvalidInputError(f"Node {node.path!r} has the id {node.id}, which is no number.")
    row: dict[str, Any] = {"id": number, "type": "group", "path": node.path}
    if place is None:
        row["inline_attrs"] = attributes
    else:
        file = place.file.removeprefix(ATTRIBUTES)
        row["attrs_reference"] = {"attrs_file": file, "row": place.row, "flags": None}
    if isinstance(parsed, ZarrArray) and node.array is not None:
        row["type"] = "array"
        row["array_metadata"] = write_array(parsed)
        row["inventories"] = [
            {
                "inventory_file": name_of(ref.manifest_id),
                "row": 0,
                "extent": [list(axis) for axis in ref.extents],
                "flags": None,
            }
            for ref in node.array.manifests
        ]
    return row

"""Snapshot files of the alpha (schema ``Snapshot``), and the files of attributes beside them.

Attributes are in the snapshot (``Inline``), or in a file that several nodes and snapshots share
(``Ref``). The specification leaves the format of those files open; here they are JSON, a list of
objects, and a location is an index into it.

Metadata of arrays (schema ``ZarrArrayMetadata``) has finite numbers as tagged JSON numbers
(``{"Float32": 0.5}``). NaN and infinities, which JSON does not have, are the bytes of an element
(``{"RawBits": [0, 0, 192, 127]}``, little-endian), which the schema allows with every data type.
That keeps the payload of a NaN.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.alpha.parts import (
    ID_BYTES,
    MAX_U16,
    MAX_U32,
    named,
    read_bytes,
    read_id,
    read_time,
    write_time,
)
from icechunk_async.format.alpha.references import ATTRIBUTES
from icechunk_async.format.flatbuffers.checks import MAX_SHARING
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.json.values import check_text, checked_json, is_list, is_object
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.snapshot import (
    Ancestor,
    ArrayData,
    AttributesPlace,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
)
from icechunk_async.format.zarr_array import (
    FLOATS,
    Extension,
    FillError,
    Refusals,
    ZarrArray,
    array_document,
    element_bytes,
    fill_to_bytes,
    group_document,
    parse_stored_node,
    raw_bits,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.format.json.reading import Part
    from icechunk_async.format.json.values import JSON
    from icechunk_async.format.manifest.chunk import Extents

__all__ = [
    "REFUSALS",
    "OpenedSnapshot",
    "encode_snapshot",
    "node_number",
    "read_array",
    "write_array",
]

_MAX_LENGTH: Final = 1 << 64
_ENCODINGS: Final = ("Slash", "Dot", "Default")
"""How the alpha's engine named chunks in its Zarr store. Chunks are stored by coordinates, so that
the document says ``/`` for all of them, the only one that keys of a session's store have."""
_TAGS: Final = {
    "bool": "Bool",
    **{f"int{bits}": f"Int{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UInt{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"Float{bits}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"Complex{bits}" for bits in (64, 128)},
}
_RAW: Final = "RawBits"
_TRANSFORMERS: Final = "storage_transformers"
REFUSALS: Final = Refusals("a repository of the alpha layout")
_MIN_FILE_BYTES: Final = 1 << 14
"""Attributes of a node from this size are stored in a file, so that commits do not repeat them."""
_KEPT_HISTORY: Final = 64
"""Ancestors that a snapshot lists; those before are found in the file of the last of them."""
_MAX_INDEX: Final = 1 << 64
_MAX_COORDINATE: Final = (1 << 32) - 1
_NUMBER_BYTES: Final = 4
_FLOOR_BYTES: Final = 64 << 20
"""Documents of this size in all are believed of any snapshot."""


def write_array(array: ZarrArray) -> dict[str, JSON]:
    """Return the metadata of an array without its attributes."""
    bits = raw_bits(array.data_type)
    return {
        "shape": array.shape,
        "data_type": array.data_type if bits is None else {"rawbits": bits},
        "chunk_shape": array.chunk_shape,
        "chunk_key_encoding": "Slash",
        "fill_value": _write_fill(array.data_type, array.fill_value),
        "codecs": [_write_extension(it) for it in array.codecs],
        _TRANSFORMERS: [_write_extension(it) for it in array.storage_transformers],
        "dimension_names": array.dimension_names,
    }


def _write_extension(it: Extension) -> dict[str, JSON]:
    return {"name": it.name, "configuration": it.configuration}


def _write_fill(data_type: str, raw: bytes) -> dict[str, JSON]:
    tag = _TAGS.get(data_type)
    numbers: tuple[Any, ...]
    if data_type == "bool":
        return {"Bool": bool(raw[0])}
    if "int" in data_type:
        return {tag or _RAW: int.from_bytes(raw, "little", signed=data_type.startswith("int"))}
    if data_type in FLOATS:
        numbers = struct.unpack(FLOATS[data_type], raw)
    elif tag is not None:  # complex: the real part, then the imaginary one
        numbers = struct.unpack(f"<2{'f' if data_type == 'complex64' else 'd'}", raw)
    else:
        numbers = ()
    if tag is None or not all(map(math.isfinite, numbers)):
        return {_RAW: list(raw)}
    return {tag: numbers[0] if len(numbers) == 1 else list(numbers)}


def read_array(part: Part, attributes: Mapping[str, JSON]) -> ZarrArray:
    """Return the metadata of an array, with attributes that are stored apart.

    Raises:
        FormatError: it is damaged.
    """
    shape = tuple(part.naturals("shape", _MAX_LENGTH))
    chunks = tuple(part.naturals("chunk_shape", _MAX_LENGTH))
    if len(chunks) != len(shape) or len(shape) > MAX_RANK or not all(chunks):
        raise part.fault(f"has the chunk shape {chunks!r:.60} of an array of shape {shape!r:.60}")
    encoding = part.members.get("chunk_key_encoding")
    if encoding not in _ENCODINGS:
        raise part.fault(f"has the unknown chunk key encoding {encoding!r:.60}")
    data_type = _read_data_type(part)
    names = part.json_list("dimension_names") if part.has("dimension_names") else None
    if names is not None and (
        len(names) != len(shape) or not all(it is None or isinstance(it, str) for it in names)
    ):
        raise part.fault(f"has the dimension names {names!r:.60} of an array of {len(shape)} axes")
    transformers = part.parts(_TRANSFORMERS) if part.has(_TRANSFORMERS) else []
    return ZarrArray(
        shape,
        chunks,
        data_type,
        _read_fill(part, data_type),
        tuple(_read_extension(it) for it in part.parts("codecs")),
        None if names is None else tuple(names),
        tuple(_read_extension(it) for it in transformers),
        attributes,
    )


def _read_extension(part: Part) -> Extension:
    configuration = part.json_object("configuration") if part.has("configuration") else None
    return Extension(part.text("name"), configuration)


def _read_data_type(part: Part) -> str:
    if is_object(part.members.get("data_type")):
        name = f"r{part.part('data_type').natural('rawbits', 1 << 30)}"
    else:
        name = part.text("data_type")
        if name not in _TAGS:
            raise part.fault(f"has the unknown data type {name!r:.60}")
    if element_bytes(name) is None:
        raise part.fault(f"has a raw data type of {name[1:]} bits, which are no whole bytes")
    return name


def _read_fill(part: Part, data_type: str) -> bytes:
    fill = part.part("fill_value").members
    if len(fill) != 1:
        raise part.fault(f"has {len(fill)} fill values")
    ((tag, value),) = fill.items()
    if tag == _RAW:
        raw = read_bytes(part, value)
        if len(raw) != element_bytes(data_type):
            raise part.fault(f"has a fill value of {len(raw)} bytes for {data_type}")
        return raw
    if tag != _TAGS.get(data_type):
        raise part.fault(f"has a fill value of {tag!r:.60} for {data_type}")
    if any(isinstance(it, str) for it in (value if is_list(value) else [value])):
        raise part.fault(f"has the fill value {value!r:.60}")  # names are no part of the alpha
    try:
        return fill_to_bytes(data_type, value)
    except FillError as error:
        raise part.fault(f"is damaged: {error}") from error


def node_number(node_id: NodeId) -> int | None:
    """Return the number that stands for a node in the alpha; None if its id is no number."""
    number = int.from_bytes(node_id)
    return number if number < MAX_U32 else None


def _node_id(number: int) -> NodeId:
    return NodeId(number.to_bytes(NodeId.size_bytes))


class OpenedSnapshot:
    """The parsed file of a snapshot, and the attribute files that it needs."""

    def __init__(self, data: bytes | memoryview) -> None:
        """Parse a snapshot's file.

        Raises:
            FormatError: it is no JSON object, or has no nodes.
        """
        self._size_bytes = len(data)
        self._document = parse_json(data, "snapshot")
        self._nodes = self._document.part("nodes")
        # First where all attributes are: the caller reads those files, all at once, and then
        # decodes.
        self._attributes = {
            path: self._stored_attributes(path, node) for path, node in self._nodes.members.items()
        }
        files = [it[1].file for it in self._attributes.values() if it[1] is not None]
        self.needs: Sequence[str] = tuple(dict.fromkeys(files))

    def _stored_attributes(
        self, path: str, node: object
    ) -> tuple[Mapping[str, JSON], AttributesPlace | None]:
        """Return the attributes of a node, or the place where they are."""
        part = self._nodes.as_part(node, f"A snapshot, at {path!r:.100},")
        value = part.members.get("user_attributes")
        if value is None:
            return {}, None
        found = part.part("user_attributes")
        if found.only("Inline"):
            return found.json_object("Inline"), None
        if found.only("Ref"):
            ref = found.part("Ref")
            key = f"{ATTRIBUTES}{named(read_id(ref, 'object_id'))}"
            return {}, AttributesPlace(key, ref.natural("location", MAX_U32))
        raise found.fault("are neither inline nor a reference")

    def decode(self, files: Mapping[str, bytes | memoryview]) -> Snapshot:
        """Decode the snapshot, given its attribute files.

        Raises:
            FormatError: one of the files is damaged, or its rows are shared without end.
        """
        # All nodes may refer to one row of attributes, so small files can stand for documents of
        # any size. Genuine ones are a few times as long as the files, since they are indented.
        size_bytes = self._size_bytes + sum(map(len, files.values()))
        left = max(_FLOOR_BYTES, MAX_SHARING * size_bytes)
        stored = {key: _attribute_list(key, data) for key, data in files.items()}
        manifests: dict[ManifestId, ManifestFileInfo] = {}
        nodes: list[Node] = []
        places: dict[NodeId, AttributesPlace] = {}
        for path, value in self._nodes.members.items():
            part = self._nodes.as_part(value, f"A snapshot, at {path!r:.100},")
            attributes, place = self._attributes[path]
            node_id = _node_id(part.natural("id", MAX_U32))
            if place is not None:
                attributes = _attributes_at(stored[place.file], place)
                places[node_id] = place
            nodes.append(_node(part, path, node_id, attributes, manifests))
            left -= len(nodes[-1].user_data)
            if left < 0:
                raise self._document.fault("stands for documents that are not believed")
        # References are found by the id of a node, so two of one would share their chunks.
        if len({node.id for node in nodes}) != len(nodes):
            raise self._document.fault("has two nodes of one id")
        return self._snapshot(nodes, manifests, places)

    def _snapshot(
        self,
        nodes: list[Node],
        manifests: dict[ManifestId, ManifestFileInfo],
        places: dict[NodeId, AttributesPlace],
    ) -> Snapshot:
        document = self._document
        about = document.part("metadata")
        ancestors = tuple(_ancestor(it) for it in document.parts("short_term_history"))
        num_ancestors = document.natural("total_parents", MAX_U32)
        listed = document.natural("short_term_parents", MAX_U16)
        # Without the first ancestor a history would end here, and everything before it look like
        # garbage.
        if not (listed == len(ancestors) <= num_ancestors) or (num_ancestors and not ancestors):
            raise document.fault(
                f"lists {len(ancestors)} of {num_ancestors} ancestors and counts {listed}"
            )
        read_time(document, "started_at")
        return Snapshot(
            SnapshotId(read_id(about, "id")),
            ancestors[0].id if ancestors else None,
            read_time(about, "written_at"),
            about.text("message"),
            _properties(document),
            Nodes(nodes),
            manifests,
            ancestors,
            num_ancestors,
            places,
        )


def _properties(document: Part) -> dict[str, JSON]:
    properties = document.json_object("properties")
    try:
        checked_json(properties, "properties")
    except InvalidInputError as error:
        raise document.fault(f"has damaged properties: {error}") from error
    return properties


def _ancestor(part: Part) -> Ancestor:
    return Ancestor(
        SnapshotId(read_id(part, "id")), read_time(part, "written_at"), part.text("message")
    )


def _attribute_list(key: str, data: bytes | memoryview) -> list[Part]:
    return parse_json(data, f"file of attributes, {key!r},").parts("attributes")


def _attributes_at(stored: list[Part], place: AttributesPlace) -> Mapping[str, JSON]:
    if place.row >= len(stored):
        raise FormatError(
            f"A snapshot refers to attributes {place.row} of {place.file!r}, which has "
            f"{len(stored)}."
        )
    return stored[place.row].members


def _node(
    part: Part,
    path: str,
    node_id: NodeId,
    attributes: Mapping[str, JSON],
    manifests: dict[ManifestId, ManifestFileInfo],
) -> Node:
    if part.text("path") != path or path[:1] != "/" or (path != "/" and path[-1] == "/"):
        raise part.fault(f"has the path {part.members['path']!r:.100}")
    data = part.members.get("node_data")
    if data == "Group":
        return Node(node_id, path, group_document(attributes))
    found = part.part("node_data").json_list("Array")
    if len(found) != 2 or not is_list(found[1]):
        raise part.fault("has an array that is not its metadata and its manifests")
    array = read_array(part.as_part(found[0], part.name), attributes)
    dimensions = tuple(
        Dimension(length, -(-length // chunk))
        for length, chunk in zip(array.shape, array.chunk_shape, strict=True)
    )
    grid = tuple(it.num_chunks for it in dimensions)
    refs = tuple(_manifest(part.as_part(it, part.name), grid) for it in found[1])
    for ref in refs:  # neither size nor number of references are stored
        manifests[ref.manifest_id] = ManifestFileInfo(ref.manifest_id, 0, 0)
    names = array.dimension_names
    names = None if names is None else tuple(name or None for name in names)
    return Node(node_id, path, array_document(array), ArrayData(dimensions, names, refs))


def _manifest(part: Part, grid: tuple[int, ...]) -> ManifestRef:
    """Return a manifest of an array, and the box that its references lie in.

    The box is the smallest one with all chunks that the extents list; it is the whole grid if they
    list none.
    """
    corners = [part.check_naturals(it, _MAX_INDEX) for it in part.json_list("extents")]
    if any(len(it) != len(grid) for it in corners):
        raise part.fault(f"has extents that are no chunks of a grid of {len(grid)} axes")
    # The specification does not say what the chunks listed as extents are: corners, or all of them.
    # The box around them holds in either case.
    box: Extents = tuple((0, min(size, _MAX_COORDINATE)) for size in grid)
    if corners:
        box = tuple((min(axis), max(axis) + 1) for axis in zip(*corners, strict=True))
    # A flag that is not known may change what everything else means.
    if part.json_list("flags"):
        raise part.fault("has flags, which no version of the layout defines")
    return ManifestRef(ManifestId(read_id(part, "object_id")), box)


@dataclass(slots=True)
class _AttributeFile:
    """A new file of attributes."""

    object_id: bytes
    rows: list[Mapping[str, JSON]]

    def place(self, attributes: Mapping[str, JSON]) -> AttributesPlace:
        self.rows.append(attributes)
        return AttributesPlace(f"{ATTRIBUTES}{named(self.object_id)}", len(self.rows) - 1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The files of a new snapshot."""

    data: bytes
    snapshot: Snapshot
    """As it will be read back."""
    files: Mapping[str, bytes]
    """New files of attributes, by key."""


def encode_snapshot(snapshot: Snapshot, parent: Snapshot | None) -> Encoded:
    """Return the files of a snapshot.

    Args:
        snapshot: the snapshot, whose nodes have ids that are numbers.
        parent: the one before it; None for the first.

    Raises:
        UnsupportedBySpecError: it has something that the alpha cannot express.
        InvalidInputError: its message has lone surrogates.
        FormatError: a node that the parent brought is damaged.
    """
    check_text(snapshot.message, "The message")
    ancestors, num_ancestors = _ancestors(parent)
    new = _AttributeFile(clock.random_bytes(ID_BYTES), [])
    places: dict[NodeId, AttributesPlace] = {}
    nodes: dict[str, JSON] = {}
    for path, node in snapshot.nodes.items():
        parsed = parse_stored_node(node.user_data, path, REFUSALS)
        attributes = parsed.attributes if isinstance(parsed, ZarrArray) else parsed
        place = _place_of(node, attributes, parent, new)
        if place is not None:
            places[node.id] = place
        nodes[path] = _write_node(node, parsed, attributes, place)
    document: dict[str, JSON] = {
        "metadata": _write_metadata(Ancestor(snapshot.id, snapshot.flushed_at, snapshot.message)),
        "nodes": nodes,
        "properties": snapshot.metadata,
        "short_term_history": [_write_metadata(it) for it in ancestors],
        "short_term_parents": len(ancestors),
        "started_at": write_time(snapshot.flushed_at),
        "total_parents": num_ancestors,
    }
    files: dict[str, bytes] = {}
    if new.rows:
        files[f"{ATTRIBUTES}{named(new.object_id)}"] = _dump({"attributes": new.rows})
    complete = replace(
        snapshot, ancestors=ancestors, num_ancestors=num_ancestors, attribute_places=places
    )
    return Encoded(_dump(document), complete, files)


def _dump(document: Mapping[str, JSON]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _ancestors(parent: Snapshot | None) -> tuple[tuple[Ancestor, ...], int]:
    """Return the ancestors that a child of ``parent`` lists, newest first, and how many it has."""
    if parent is None:
        return (), 0
    # Only what the parent's file tells: no older snapshot is read for a commit.
    first = Ancestor(parent.id, parent.flushed_at, parent.message)
    return (first, *parent.ancestors)[:_KEPT_HISTORY], parent.num_ancestors + 1


def _place_of(
    node: Node, attributes: Mapping[str, JSON], parent: Snapshot | None, new: _AttributeFile
) -> AttributesPlace | None:
    """Return the place of a node's attributes in a file; None if they are few, and stay inline."""
    # A file of attributes stays as long as a snapshot refers to it, so a commit that leaves them
    # alone writes none.
    known = None if parent is None else parent.attribute_places.get(node.id)
    if known is not None and parent is not None:
        before = parent.nodes.get(parent.nodes.path_of(node.id) or "")
        if before is not None:
            was = parse_stored_node(before.user_data, before.path, REFUSALS)
            if attributes == (was.attributes if isinstance(was, ZarrArray) else was):
                return known
    if len(_dump(attributes)) < _MIN_FILE_BYTES:
        return None
    return new.place(attributes)


def _write_metadata(it: Ancestor) -> dict[str, JSON]:
    return {"id": list(it.id), "message": it.message, "written_at": write_time(it.flushed_at)}


def _write_node(
    node: Node,
    parsed: ZarrArray | Mapping[str, JSON],
    attributes: Mapping[str, JSON],
    place: AttributesPlace | None,
) -> dict[str, JSON]:
    number = node_number(node.id)
    if number is None:
        raise InvalidInputError(f"Node {node.path!r} has the id {node.id}, which is no number.")
    data: JSON = "Group"
    if isinstance(parsed, ZarrArray) and node.array is not None:
        refs = [_write_manifest(it) for it in node.array.manifests]
        data = {"Array": [write_array(parsed), refs]}
    stored: JSON = {"Inline": attributes} if attributes else None
    if place is not None:
        stored = {"Ref": {"flags": [], "location": place.row, "object_id": _raw_id(place.file)}}
    return {"id": number, "node_data": data, "path": node.path, "user_attributes": stored}


def _raw_id(key: str) -> list[int]:
    return list(ManifestId.parse(key.removeprefix(ATTRIBUTES)))


def _write_manifest(ref: ManifestRef) -> dict[str, JSON]:
    """Return a manifest of an array; its extents are the first and the last chunk of its box."""
    box = ref.extents
    corners: list[list[int]] = []
    if box:
        corners = [[start for start, _ in box], [stop - 1 for _, stop in box]]
    return {"extents": corners, "flags": [], "object_id": list(ref.manifest_id)}

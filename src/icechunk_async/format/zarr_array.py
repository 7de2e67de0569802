"""The parts of ``zarr.json`` that layouts before format version 1 store, and the document of them.

Those layouts do not keep the document itself. What they cannot express is refused, and the document
that is read back is the one that zarr-python would write.

Fill values are the bytes of one element, little-endian (Zarr v3, "Fill value"). They keep every
bit: that of a negative zero, and the payload of a NaN.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, InvalidMetadataError, UnsupportedBySpecError
from icechunk_async.format.json.values import JSON, is_list, is_object
from icechunk_async.format.zarr_document import parse_document

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "FLOATS",
    "Extension",
    "FillError",
    "Refusals",
    "ZarrArray",
    "array_document",
    "element_bytes",
    "fill_from_bytes",
    "fill_to_bytes",
    "group_document",
    "parse_node",
    "parse_stored_node",
    "raw_bits",
]

_GROUP_MEMBERS: Final = {"zarr_format", "node_type", "attributes"}
_ARRAY_MEMBERS: Final = _GROUP_MEMBERS | {
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "dimension_names",
    "storage_transformers",
}
_INTEGERS: Final = {
    f"{sign}int{bits}": (bits // 8, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}
FLOATS: Final = {"float16": "<e", "float32": "<f", "float64": "<d"}
"""The names of floating-point types, and their formats in `struct`."""
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}
# Nine digits at most: elements of 125 MB, and no number that `int` refuses to read.
_RAW: Final = re.compile(r"r([1-9][0-9]{0,8})")
_NAMED: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_HEX: Final = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Extension:
    """A codec or a storage transformer."""

    name: str
    configuration: Mapping[str, JSON] | None = None

    def to_json(self) -> dict[str, JSON]:
        """Return the object that ``zarr.json`` has for it."""
        if self.configuration is None:
            return {"name": self.name}
        return {"name": self.name, "configuration": self.configuration}


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array's metadata without its attributes."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    data_type: str
    """A core type of Zarr v3, or ``r<bits>``."""
    fill_value: bytes
    """Those of one element, little-endian."""
    codecs: tuple[Extension, ...]
    dimension_names: tuple[str | None, ...] | None = None
    storage_transformers: tuple[Extension, ...] = ()
    attributes: Mapping[str, JSON] = field(default_factory=dict[str, "JSON"])


@dataclass(frozen=True, slots=True)
class Refusals:
    """The errors about what a layout cannot express."""

    layout: str
    """How messages call it."""

    def refuse(self, path: str, problem: str) -> NoReturn:
        """Raise `UnsupportedBySpecError` about a node."""
        raise UnsupportedBySpecError(
            f"{path!r} cannot be stored in {self.layout}: {problem}. Nothing was changed. Migrate "
            "the repository to format version 2 with icechunk_async.upkeep.upgrade, which can "
            "store it.",
            path=path,
        )


def parse_node(data: bytes, path: str, refusals: Refusals) -> ZarrArray | Mapping[str, JSON]:
    """Return the metadata of an array, or the attributes of a group.

    Raises:
        InvalidMetadataError: it is no document of Zarr format 3.
        UnsupportedBySpecError: it has something that the layout cannot express.
    """
    # Parsed twice: once to be checked as any document of a session, then for what only these
    # layouts store.
    parsed = parse_document(data, path)
    document: dict[str, Any] = json.loads(data)
    known = _GROUP_MEMBERS if parsed.array is None else _ARRAY_MEMBERS
    for name, value in document.items():
        # What is not stored would be missing when it is read back, and nobody would notice. Null
        # says nothing and may go.
        if name not in known and value is not None:
            refusals.refuse(path, f"its document has {name!r}")
    attributes: Any = document.get("attributes")
    if attributes is None:
        attributes = dict[str, JSON]()
    if not is_object(attributes):
        refusals.refuse(path, "its attributes are no JSON object")
    _check_json(attributes, path, "attributes", refusals)
    if parsed.array is None:
        return attributes
    # Before `chunk_shape` is looked at, which other grids do not have.
    if not parsed.regular_grid:
        refusals.refuse(path, "it has a rectilinear chunk grid")
    chunks = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
    if not all(chunks):
        refusals.refuse(path, "it has chunks of length 0")
    _check_json(document.get("dimension_names"), path, "dimension names", refusals)
    data_type = _data_type(document.get("data_type"), path, refusals)
    try:
        fill = fill_to_bytes(data_type, document.get("fill_value"))
    except FillError as error:
        refusals.refuse(path, str(error))
    return ZarrArray(
        tuple(document["shape"]),
        chunks,
        data_type,
        fill,
        _extensions(document.get("codecs"), "codecs", path, refusals),
        None if parsed.array.dimension_names is None else tuple(document["dimension_names"]),
        _extensions(document.get("storage_transformers"), "transformers", path, refusals),
        attributes,
    )


def parse_stored_node(data: bytes, path: str, refusals: Refusals) -> ZarrArray | Mapping[str, JSON]:
    """Parse, as `parse_node` does, a document that was read, or was parsed before.

    Raises:
        FormatError: it is no document of Zarr format 3.
        UnsupportedBySpecError: it has something that the layout cannot express.
    """
    try:
        return parse_node(data, path, refusals)
    except InvalidMetadataError as error:
        raise FormatError(f"The repository has a damaged node at {path!r}. {error}") from error


def _check_json(value: JSON, path: str, name: str, refusals: Refusals) -> None:
    try:
        # Python's parser lets NaN and lone surrogates pass; other parsers refuse the file that
        # would hold them.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        refusals.refuse(path, f"its {name} have no JSON form ({error})")


def _data_type(value: Any, path: str, refusals: Refusals) -> str:
    """Return the name of a core type; raw types are ``r<bits>``."""
    name = value
    if is_object(value):
        name = value.get("name")
        configuration: Any = value.get("configuration") or None
        size = configuration.get("length_bytes") if is_object(configuration) else None
        if name == "raw_bytes" and isinstance(size, int) and not isinstance(size, bool):
            name = f"r{8 * size}"
        elif configuration or name == "raw_bytes":
            name = None
    # A type with a configuration, such as text, means more than its name, which is all that these
    # layouts store.
    if not isinstance(name, str) or element_bytes(name) is None:
        refusals.refuse(path, f"its data type is {value!r:.100}")
    return name


def _extensions(value: Any, what: str, path: str, refusals: Refusals) -> tuple[Extension, ...]:
    found: list[Extension] = []
    for it in value if is_list(value) else []:
        if isinstance(it, str):
            found.append(Extension(it))
            continue
        if not is_object(it) or it.keys() - {"name", "configuration"}:
            refusals.refuse(path, f"its {what} have {it!r:.100}")
        name, configuration = it.get("name"), it.get("configuration")
        if not isinstance(name, str) or not (configuration is None or is_object(configuration)):
            refusals.refuse(path, f"its {what} have {it!r:.100}")
        _check_json([name, configuration], path, what, refusals)
        found.append(Extension(name, configuration))
    return tuple(found)


def array_document(array: ZarrArray) -> bytes:
    """Return the ``zarr.json`` of an array, as zarr-python writes it.

    Raises:
        FormatError: the fill value does not fit the data type.
    """
    try:
        fill = fill_from_bytes(array.data_type, array.fill_value)
    except FillError as error:
        raise FormatError(f"The metadata of an array is damaged: {error}.") from error
    bits = raw_bits(array.data_type)
    data_type: JSON = array.data_type
    if bits is not None:
        data_type = {"name": "raw_bytes", "configuration": {"length_bytes": bits // 8}}
    document: dict[str, JSON] = {
        "shape": array.shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [it.to_json() for it in array.codecs],
        "attributes": array.attributes,
    }
    if array.dimension_names is not None:
        document["dimension_names"] = array.dimension_names
    document["zarr_format"] = 3
    document["node_type"] = "array"
    document["storage_transformers"] = [it.to_json() for it in array.storage_transformers]
    return json.dumps(document, indent=2).encode()


def group_document(attributes: Mapping[str, JSON]) -> bytes:
    """Return the ``zarr.json`` of a group, as zarr-python writes it."""
    document = {"attributes": attributes, "zarr_format": 3, "node_type": "group"}
    return json.dumps(document, indent=2).encode()


class FillError(Exception):
    """A fill value does not fit its type; the message says why."""


def raw_bits(data_type: str) -> int | None:
    """Return the bits of a raw type, such as 24 for ``r24``; None for other types."""
    found = _RAW.fullmatch(data_type)
    bits = 0 if found is None else int(found[1])
    return bits if bits and bits % 8 == 0 else None


def element_bytes(data_type: str) -> int | None:
    """Return the length of an element; None if the type is not a core type of Zarr v3."""
    if data_type == "bool":
        return 1
    if data_type in _INTEGERS:
        return _INTEGERS[data_type][0]
    if data_type in FLOATS:
        return struct.calcsize(FLOATS[data_type])
    if data_type in _COMPLEX:
        return 2 * struct.calcsize(FLOATS[_COMPLEX[data_type]])
    bits = raw_bits(data_type)
    return None if bits is None else bits // 8


def fill_to_bytes(data_type: str, fill: Any) -> bytes:
    """Return the bytes of a fill value of ``zarr.json``.

    Args:
        data_type: a core type, or ``r<bits>``.
        fill: the value.

    Raises:
        FillError: it does not fit the type.
    """
    if data_type == "bool":
        if isinstance(fill, bool):
            return bytes([fill])
    elif data_type in _INTEGERS:
        return _integer(data_type, fill)
    elif data_type in FLOATS:
        return _float(data_type, fill)
    elif data_type in _COMPLEX:
        if is_list(fill) and len(fill) == 2:
            return b"".join(_float(_COMPLEX[data_type], it) for it in fill)
    else:
        return _raw(data_type, fill)
    raise FillError(f"the fill value {fill!r:.60} is not one of {data_type}")


def _integer(data_type: str, fill: Any) -> bytes:
    size, signed = _INTEGERS[data_type]
    # Documents of JavaScript and others write 0.0 for an integer's fill value.
    if isinstance(fill, float) and fill.is_integer():
        fill = int(fill)
    if isinstance(fill, int) and not isinstance(fill, bool):
        try:
            return fill.to_bytes(size, "little", signed=signed)
        except OverflowError:
            pass
    raise FillError(f"the fill value {fill!r:.60} is not one of {data_type}")


def _float(data_type: str, fill: Any) -> bytes:
    layout = FLOATS[data_type]
    size = struct.calcsize(layout)
    if isinstance(fill, str):
        # Zarr writes such a number with its most significant byte first.
        if _HEX.fullmatch(fill) and len(fill) == 2 + 2 * size:
            return bytes.fromhex(fill[2:])[::-1]
        fill = _NAMED.get(fill, fill)
    if isinstance(fill, int | float) and not isinstance(fill, bool):
        try:
            return struct.pack(layout, fill)
        except (OverflowError, struct.error):
            pass
    raise FillError(f"the fill value {fill!r:.60} is not one of {data_type}")


def _raw(data_type: str, fill: Any) -> bytes:
    size = element_bytes(data_type)
    raw: bytes | None = None
    try:
        if isinstance(fill, str):
            # Zarr-Python writes base64, the specification a list of bytes.
            raw = base64.b64decode(fill, validate=True)
        elif is_list(fill):
            raw = bytes(fill)
    except (binascii.Error, ValueError, TypeError):
        pass
    if raw is None or len(raw) != size:
        raise FillError(f"the fill value {fill!r:.60} is not one of {data_type}")
    return raw


def fill_from_bytes(data_type: str, raw: bytes) -> JSON:
    """Return the fill value of ``zarr.json`` that the bytes of an element stand for.

    Raises:
        FillError: the bytes are not those of one element.
    """
    if len(raw) != element_bytes(data_type):
        raise FillError(f"a fill value of {data_type} has {len(raw)} bytes")
    if data_type == "bool":
        # NumPy would read any other byte as true, and write it back as 1.
        if raw[0] > 1:
            raise FillError(f"a fill value of bool is the byte {raw[0]}")
        return bool(raw[0])
    if data_type in _INTEGERS:
        return int.from_bytes(raw, "little", signed=_INTEGERS[data_type][1])
    if data_type in FLOATS:
        return _float_text(data_type, raw)
    if data_type in _COMPLEX:
        half = len(raw) // 2
        return [_float_text(_COMPLEX[data_type], it) for it in (raw[:half], raw[half:])]
    return base64.b64encode(raw).decode()


def _float_text(data_type: str, raw: bytes) -> JSON:
    layout = FLOATS[data_type]
    value: float = struct.unpack(layout, raw)[0]
    if math.isfinite(value):
        return value
    # Only the NaN that everybody means has a name. Others keep their payload as a number in
    # hexadecimal.
    for name, named in _NAMED.items():
        if struct.pack(layout, named) == raw:
            return name
    return f"0x{raw[::-1].hex()}"

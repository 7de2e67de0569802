"""The metadata of arrays in a structure file (the draft's spec, "Structure Files").

What the specification leaves open: a fill value is the bytes of one element, little-endian; the
configuration of a codec is JSON. Lengths have 16 bits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import FormatError
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.zarr_array import (
    Extension,
    Refusals,
    ZarrArray,
    element_bytes,
    parse_node,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.json.values import JSON

__all__ = ["REFUSALS", "dump_json", "parse", "read_array", "write_array"]

REFUSALS: Final = Refusals("a repository of the first draft's layout")
_MAX_U16: Final = (1 << 16) - 1
_SEPARATORS: Final = ("/", ".")
"""Of chunk keys. Chunks are stored by coordinates, so that the document says ``/`` for all of them,
the only one that keys of a session's store have."""


def dump_json(value: JSON) -> bytes:
    """Return a value as JSON without white space."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse(document: bytes, path: str) -> ZarrArray | Mapping[str, JSON]:
    """Return the metadata of an array, or the attributes of a group, as far as it can be stored.

    Raises:
        InvalidMetadataError: it is no document of Zarr format 3.
        UnsupportedBySpecError: the layout cannot express it.
    """
    parsed = parse_node(document, path, REFUSALS)
    if isinstance(parsed, ZarrArray):
        for what, lengths in (("shape", parsed.shape), ("chunk shape", parsed.chunk_shape)):
            if max(lengths, default=0) > _MAX_U16:
                REFUSALS.refuse(
                    path, f"its {what} is {list(lengths)}, and lengths are at most {_MAX_U16}"
                )
        if parsed.storage_transformers:
            REFUSALS.refuse(path, "it has storage transformers")
    return parsed


def write_array(array: ZarrArray) -> dict[str, Any]:
    """Return the value of the column ``array_metadata``."""
    return {
        "shape": array.shape,
        "data_type": array.data_type,
        "fill_value": array.fill_value,
        "dimension_names": array.dimension_names,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [
            {
                "name": it.name,
                "configuration": None if it.configuration is None else dump_json(it.configuration),
            }
            for it in array.codecs
        ],
    }


def read_array(value: Mapping[str, Any], path: str, attributes: Mapping[str, JSON]) -> ZarrArray:
    """Return the metadata of an array, with attributes that are stored apart.

    Args:
        value: of the column ``array_metadata``; texts are bytes or text.
        path: of the array.
        attributes: its attributes.

    Raises:
        FormatError: it is damaged.
    """
    shape = tuple(_lengths(value, "shape", path))
    grid, encoding = _part(value, "chunk_grid", path), _part(value, "chunk_key_encoding", path)
    # Every part that this reader does not know is refused: chunks would be read with another
    # meaning.
    if text(grid["name"], path) != "regular":
        raise _fault(path, f"has the unknown chunk grid {grid['name']!r:.60}")
    separator = text(_part(encoding, "configuration", path)["separator"], path)
    if separator not in _SEPARATORS:
        raise _fault(path, f"has the unknown separator {separator!r:.60} of chunk keys")
    chunks = tuple(_lengths(_part(grid, "configuration", path), "chunk_shape", path))
    if len(chunks) != len(shape) or not all(chunks):
        raise _fault(path, f"has the chunk shape {chunks!r:.60} of an array of {shape!r:.60}")
    data_type = text(value["data_type"], path)
    size = element_bytes(data_type)
    if size is None:
        raise _fault(path, f"has the unknown data type {data_type!r:.60}")
    fill = value["fill_value"]
    names = value["dimension_names"]
    if names is not None and len(names) != len(shape):
        raise _fault(path, f"has {len(names)} dimension names for {len(shape)} axes")
    return ZarrArray(
        shape,
        chunks,
        data_type,
        # The specification lets it be null; zeros are what Zarr takes for a fill value that is not
        # given.
        bytes(size) if fill is None else fill,
        tuple(_codec(it, path) for it in value["codecs"] or ()),
        None if names is None else tuple(None if it is None else text(it, path) for it in names),
        (),
        attributes,
    )


def _part(value: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    """Return a structure that must not be null."""
    found: Mapping[str, Any] | None = value[name]
    if found is None:
        raise _fault(path, f"has the {name} null")
    return found


def _lengths(part: Mapping[str, Any], name: str, path: str) -> list[int]:
    lengths: Any = part[name]
    # The schema of a file may allow nulls and negative numbers, whatever the specification says.
    if lengths is None or any(it is None or it < 0 for it in lengths):
        raise _fault(path, f"has the {name} {lengths!r:.60}")
    return list(lengths)


def _codec(value: Mapping[str, Any] | None, path: str) -> Extension:
    if value is None:
        raise _fault(path, "has a codec that is null")
    raw = value["configuration"]
    configuration = None if raw is None else parse_json(raw, f"codec of {path!r:.100}").members
    return Extension(text(value["name"], path), configuration)


def text(value: Any, path: str) -> str:
    """Return text.

    Raises:
        FormatError: it is missing, or not UTF-8.
    """
    try:
        # `python_values` returns texts as bytes, since a column may hold bytes that are no text.
        return value if isinstance(value, str) else str(value, "utf-8")
    except (UnicodeDecodeError, TypeError):
        raise _fault(path, f"has {value!r:.60} in place of text") from None


def _fault(path: str, problem: str) -> FormatError:
    return FormatError(f"A structure file, at {path!r:.100}, {problem}.")

"""The metadata of arrays in the alpha (schema ``ZarrArrayMetadata``).

Finite numbers are tagged JSON numbers (``{"Float32": 0.5}``). NaN and infinities, which JSON does
not have, are the bytes of an element (``{"RawBits": [0, 0, 192, 127]}``, little-endian), which the
schema allows with every data type. That keeps the payload of a NaN.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.format.alpha.parts import read_bytes
from icechunk_async.format.elements import (
    FLOATS,
    FillError,
    element_bytes,
    fill_to_bytes,
    raw_bits,
)
from icechunk_async.format.json.values import is_list, is_object
from icechunk_async.format.manifest.reading import MAX_RANK
from icechunk_async.format.zarr_array import Extension, ZarrArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.json.reading import Part
    from icechunk_async.format.json.values import JSON

__all__ = ["read_array", "write_array"]

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

"""Turn metadata of Zarr format 2, as references of other libraries have it, into format 3. Pure.

Chunks are not rewritten, so every codec is kept, in the same order, under its name in format 3.
"""

from __future__ import annotations

import json
import struct
from base64 import standard_b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec
from zarr.core.metadata.v2 import ArrayV2Metadata
from zarr.errors import UnknownCodecError
from zarr.registry import get_codec_class

from icechunk_async.errors import InvalidMetadataError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["array_document", "fill_attribute", "group_document"]

_DIMENSIONS: Final = "_ARRAY_DIMENSIONS"
# They make bytes of objects themselves, so no `bytes` codec comes beside them.
_OBJECT_CODECS: Final = ("vlen-utf8", "vlen-bytes")
_BLOSC_SHUFFLES: Final = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """Return the document of a group."""
    return _encode({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def array_document(path: str, array: Mapping[str, Any], attributes: Mapping[str, Any]) -> bytes:
    """Return the document of an array.

    Args:
        path: the array, for messages.
        array: its ``.zarray``.
        attributes: its ``.zattrs``. ``_ARRAY_DIMENSIONS`` becomes the names of its dimensions, and
            a fill value also the attribute ``_FillValue``, as xarray takes it in format 2.

    Raises:
        InvalidMetadataError: it is no array of format 2, or has a data type or a codec that
            format 3 cannot express.
    """
    try:
        old = ArrayV2Metadata.from_dict({**array, "attributes": {}})
        dtype: Any = old.dtype
        # Format 3 has no arrays without a fill value.
        fill = dtype.default_scalar() if old.fill_value is None else old.fill_value
        data_type = dtype.to_json(zarr_format=3)
        fill_value = dtype.to_json_scalar(fill, zarr_format=3)
        codecs = _codecs(path, array, dtype.to_native_dtype())
    except InvalidMetadataError:
        raise
    except Exception as error:
        raise _invalid(path, f"{type(error).__name__}: {error}") from error
    attributes = dict(attributes)
    # xarray keeps names of dimensions in an attribute where the format has no place for them.
    names = attributes.pop(_DIMENSIONS, None)
    if names is not None and len(names) != len(old.shape):
        raise _invalid(path, f"{_DIMENSIONS} has {len(names)} names for {len(old.shape)} axes")
    if old.fill_value is not None and "_FillValue" not in attributes:
        shown = fill_attribute(old.fill_value, dtype.to_native_dtype())
        attributes |= {} if shown is None else {"_FillValue": shown}
    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(old.shape),
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(old.chunks)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value,
            "codecs": codecs,
            "attributes": attributes,
            **({} if names is None else {"dimension_names": list(names)}),
        }
    )


def _codecs(path: str, array: Mapping[str, Any], dtype: np.dtype[Any]) -> list[dict[str, Any]]:
    """Return the codecs, of which one turns an array into bytes."""
    # Format 2 applies filters in the order that they have, then the compressor. Format 3 wants the
    # same sorted by what they take: codecs of arrays, one that makes bytes, codecs of bytes.
    before: list[dict[str, Any]] = []
    serializer: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    rank = len(array["shape"])
    if array.get("order", "C") == "F" and rank > 1:
        before.append({"name": "transpose", "configuration": {"order": [*range(rank)][::-1]}})
    order = dtype.byteorder
    compressor = array.get("compressor")
    for old in [*(array.get("filters") or ()), *((compressor,) if compressor else ())]:
        codec, kind = _codec(path, old, dtype)
        if issubclass(kind, ArrayArrayCodec):
            if serializer or after:
                raise _invalid(path, f"its filter {old['id']!r} comes after one that makes bytes")
            before.append(codec)
            # A filter such as FixedScaleOffset stores another type than the array has, so the bytes
            # are in the order of that one.
            encoded = old.get("astype") or old.get("encode_dtype")
            order = np.dtype(encoded).byteorder if encoded else order
        elif issubclass(kind, ArrayBytesCodec):
            serializer.append(codec)
        else:
            after.append(codec)
    if not serializer:
        endian = {"endian": "big" if order == ">" else "little"}
        serializer.append({"name": "bytes"} if order == "|" else _named("bytes", endian))
    return [*before, *serializer, *after]


def _codec(
    path: str, old: Mapping[str, Any], dtype: np.dtype[Any]
) -> tuple[dict[str, Any], type[Any]]:
    """Return a codec by the name that format 3 has for it, and what kind it is."""
    name = str(old.get("id"))
    configuration = {key: value for key, value in old.items() if key != "id"}
    match name:
        case "gzip":
            new = _named(name, {"level": configuration.get("level", 1)})
        case "zstd":
            checksum = bool(configuration.get("checksum", False))
            new = _named(name, {"level": configuration.get("level", 0), "checksum": checksum})
        case "blosc":
            # Format 3 has neither the automatic shuffle of numcodecs (-1) nor a size of elements
            # that is left to the data: both are written out.
            automatic = "bitshuffle" if dtype.itemsize == 1 else "shuffle"
            configuration["shuffle"] = _BLOSC_SHUFFLES.get(
                configuration.get("shuffle", -1), automatic
            )
            new = _named(name, {"typesize": dtype.itemsize, **configuration})
        case _ if name in _OBJECT_CODECS:
            new = {"name": name}
        case _:
            new = _named(f"numcodecs.{name}", configuration)
    try:
        return new, get_codec_class(new["name"])
    except UnknownCodecError as error:
        raise _invalid(path, f"no codec of Zarr format 3 decodes {name!r}") from error


def _named(name: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "configuration": dict(configuration)}


def fill_attribute(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value as xarray writes it into attributes; None where it cannot."""
    match dtype.kind:
        case "f":
            # As xarray's `FillValueCoder`, which decodes these attributes of format 3.
            return _base64(fill)
        case "c":
            return [_base64(fill.real), _base64(fill.imag)]
        case "b":
            return bool(fill)
        case "i" | "u":
            return int(fill)
        case _:  # xarray decodes no others
            return None


def _base64(number: Any) -> str:
    return standard_b64encode(struct.pack("<d", float(number))).decode()


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _invalid(path: str, problem: str) -> InvalidMetadataError:
    return InvalidMetadataError(
        f"The metadata of {path!r} in the references cannot be stored as Zarr format 3: {problem}.",
        path=path,
    )

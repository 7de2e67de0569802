"""Metadata values, JSON, to bytes and back: MessagePack in version 1, FlexBuffers in version 2.

Which of the two it is depends on the header of the file that holds the bytes, not on the
repository: a migrated repository has both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack

from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    UnsupportedSpecVersionError,
    WrongTypeError,
)
from icechunk_async.format.flatbuffers.writing import REF, Shape, blob, string, table, vector
from icechunk_async.format.json.flexbuffers import decode_flexbuffer, encode_flexbuffer
from icechunk_async.format.json.values import JSON, MAX_DEPTH, checked_json, utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.flatbuffers.writing import Block

    type RawMetadata = tuple[tuple[str, bytes], ...]
    """Names and encoded values."""

__all__ = [
    "JSON",
    "decode_items",
    "decode_value",
    "encode_items",
    "encode_value",
    "items_block",
    "read_items",
]

_ITEM: Final = Shape(REF, REF)

_SCALAR_HEADS: Final = frozenset(
    head
    for span in ((0, 0x80), (0xA0, 0xC1), (0xC2, 0xC4), (0xCA, 0xD4), (0xD9, 0xDC), (0xE0, 0x100))
    for head in range(*span)
)
"""First bytes of nil, booleans, numbers and text. Left out: binary and extension types."""


def encode_value(value: JSON, spec_version: int, *, name: str = "value") -> bytes:
    """Write one value as the official engine does, byte for byte.

    Args:
        value: None, bool, int from -2^63 to 2^64-1, finite float, str, list, dict.
        spec_version: 1 or 2, that of the file's header.
        name: how messages call the value.

    Raises:
        InvalidInputError: the value, or something in it, is not JSON; names the path to it.
    """
    if spec_version not in (1, 2):
        raise InvalidInputError(f"spec version {spec_version} has no metadata encoding; use 1 or 2")
    plain = checked_json(value, name, nul_in_keys=spec_version == 1)
    return msgpack.packb(plain) if spec_version == 1 else encode_flexbuffer(plain)


def decode_value(data: bytes | memoryview, spec_version: int) -> JSON:
    """Read one value from bytes that need not be trusted.

    NaN and infinities, which JSON lacks, become None as in the official engine. Time and memory are
    in proportion to the bytes.

    Raises:
        FormatError: the bytes are damaged, hold what JSON cannot, or nest too deeply.
    """
    match spec_version:
        case 1:
            return _MessagePackReader(bytes(data)).document()
        case 2:
            return decode_flexbuffer(data)
        case _:
            raise UnsupportedSpecVersionError(
                f"metadata of spec version {spec_version} cannot be read; known are 1 and 2",
                found=spec_version,
            )


def encode_items(metadata: Mapping[str, JSON], spec_version: int) -> list[tuple[str, bytes]]:
    """Write a metadata map item by item, in the order of the UTF-8 bytes of the names.

    Raises:
        InvalidInputError: a name is no text, or a value is not JSON; a `WrongTypeError` if its
            type is to blame.
    """
    items: list[tuple[str, bytes]] = []
    given: Mapping[object, JSON] = cast("Any", metadata)
    for name, value in given.items():
        if not _is_text(name):
            problem = InvalidInputError if isinstance(name, str) else WrongTypeError
            raise problem(
                f"the metadata name {name!r:.64} cannot be stored; names are str with a UTF-8 form"
            )
        called = f"metadata[{name!r:.64}]"
        items.append((str(name), encode_value(value, spec_version, name=called)))
    return sorted(items)


def decode_items(items: Iterable[tuple[str, bytes]], spec_version: int) -> dict[str, JSON]:
    """Read a metadata map; of several items with one name the last counts.

    Raises:
        FormatError: a value is damaged; names the item.
    """
    metadata: dict[str, JSON] = {}
    for name, data in items:
        try:
            metadata[name] = decode_value(data, spec_version)
        except UnsupportedSpecVersionError:
            raise
        except FormatError as error:
            raise FormatError(
                f"metadata item {name!r:.64}: {error.message}", item=name, **error.context
            ) from error
    return metadata


def read_items(tables: Tables) -> RawMetadata:
    """Read MetadataItem tables; values stay encoded."""
    names = tables.strings(0, required="name")
    values = tables.vector(1, 1, 1, required="value").bytes()
    return tuple(zip(names, values, strict=True))


def items_block(items: Iterable[tuple[str, bytes]]) -> Block:
    """Build MetadataItem tables."""
    return vector([table(_ITEM, string(name), blob(value)) for name, value in items])


def _is_text(name: object) -> bool:
    return isinstance(name, str) and utf8(name) is not None


class _MessagePackReader:
    """Reads containers header by header, so that a claimed length reserves no memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), strict_map_key=True)
        self._unpacker.feed(data)

    def document(self) -> JSON:
        try:
            value = self._value(MAX_DEPTH)
        except (ValueError, msgpack.UnpackException) as error:
            raise FormatError(f"metadata is not MessagePack: {error}") from error
        if self._unpacker.tell() != len(self._data):
            raise FormatError("metadata has bytes after its MessagePack value")
        return value

    def _value(self, depth: int) -> JSON:
        at = self._unpacker.tell()
        if at >= len(self._data):
            raise FormatError("metadata in MessagePack ends too early")
        head = self._data[at]
        if head in _SCALAR_HEADS:
            scalar = self._unpacker.unpack()
            infinite = isinstance(scalar, float) and not math.isfinite(scalar)
            return None if infinite else scalar
        if depth == 0:
            raise FormatError(f"metadata in MessagePack is nested more than {MAX_DEPTH} deep")
        if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
            length = self._unpacker.read_array_header()
            return [self._value(depth - 1) for _ in range(length)]
        if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
            return self._map(self._unpacker.read_map_header(), depth - 1)
        raise FormatError(f"metadata in MessagePack has type {head:#x}, which JSON has not")

    def _map(self, length: int, depth: int) -> dict[str, JSON]:
        values: dict[str, JSON] = {}
        for _ in range(length):
            key = self._value(depth)
            if not isinstance(key, str):
                raise FormatError(f"metadata in MessagePack has the key {key!r:.64}, no text")
            values[key] = self._value(depth)
        return values

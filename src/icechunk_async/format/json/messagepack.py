"""JSON values as MessagePack, as version 1 of the format stores them."""

from __future__ import annotations

import math
from typing import Final

import msgpack

from icechunk_async.errors import FormatError
from icechunk_async.format.json.values import JSON, MAX_DEPTH

__all__ = ["decode_messagepack", "encode_messagepack"]

_SCALAR_HEADS: Final = frozenset(
    head
    for span in ((0, 0x80), (0xA0, 0xC1), (0xC2, 0xC4), (0xCA, 0xD4), (0xD9, 0xDC), (0xE0, 0x100))
    for head in range(*span)
)
"""First bytes of nil, booleans, numbers and text. Left out: binary and extension types."""


def encode_messagepack(value: JSON) -> bytes:
    """Write a value that was checked before (``checked_json``)."""
    # Byte for byte as the official engine writes it: shortest integers, and floats of eight bytes.
    data: bytes = msgpack.packb(value)
    return data


def decode_messagepack(data: bytes | memoryview) -> JSON:
    """Read a value from bytes that need not be trusted; errors as `decode_value`."""
    return _MessagePackReader(bytes(data)).document()


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
        # Each container takes a byte of the input, and a frame of the interpreter's stack here.
        if depth == 0:
            raise FormatError(f"metadata in MessagePack is nested more than {MAX_DEPTH} deep")
        if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
            # A claimed length of billions ends with the data: each item takes a byte.
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

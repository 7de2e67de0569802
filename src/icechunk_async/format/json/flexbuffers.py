"""Read JSON values from FlexBuffers, as version 2 of the format stores them.

Writing (`flexbuffers_writing`) goes through the ``flatbuffers`` library. Reading does not: the
library's reader follows offsets that point before the buffer round to its end, cuts text that runs
over the end instead of refusing it, and copies the rest of the buffer for every key. This reader
visits each byte a bounded number of times and refuses what does not fit. It does without NumPy,
which the library imports.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FormatError
from icechunk_async.format.json.values import JSON, MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Type", "decode_flexbuffer"]


class Type(IntEnum):
    """Types of values; the numbers are those of the FlexBuffers format."""

    NULL = 0
    INT = 1
    UINT = 2
    FLOAT = 3
    KEY = 4
    STRING = 5
    INDIRECT_INT = 6
    INDIRECT_UINT = 7
    INDIRECT_FLOAT = 8
    MAP = 9
    VECTOR = 10
    VECTOR_INT = 11
    VECTOR_UINT = 12
    VECTOR_FLOAT = 13
    VECTOR_KEY = 14
    VECTOR_STRING_DEPRECATED = 15
    VECTOR_INT2 = 16
    VECTOR_UINT2 = 17
    VECTOR_FLOAT2 = 18
    VECTOR_INT3 = 19
    VECTOR_UINT3 = 20
    VECTOR_FLOAT3 = 21
    VECTOR_INT4 = 22
    VECTOR_UINT4 = 23
    VECTOR_FLOAT4 = 24
    BLOB = 25
    BOOL = 26
    VECTOR_BOOL = 36


_FACTOR: Final = 8
"""Values and bytes of text read per byte of input. Honest writers need 1; shared offsets more."""

_SMALL_BYTES: Final = 64
_FLOATS: Final = {4: "<f", 8: "<d"}
_NUMBER_CODES: Final = {Type.INT: "bhiq", Type.UINT: "BHIQ", Type.BOOL: "BHIQ"}
_INDIRECT: Final = {
    Type.INDIRECT_INT: Type.INT,
    Type.INDIRECT_UINT: Type.UINT,
    Type.INDIRECT_FLOAT: Type.FLOAT,
}
_INLINE: Final = frozenset({Type.NULL, Type.INT, Type.UINT, Type.FLOAT, Type.BOOL})
_TYPED: Final = {
    Type.VECTOR_INT: Type.INT,
    Type.VECTOR_UINT: Type.UINT,
    Type.VECTOR_FLOAT: Type.FLOAT,
    Type.VECTOR_KEY: Type.KEY,
    # The width of the sizes is unknown; the texts end in NUL as keys do.
    Type.VECTOR_STRING_DEPRECATED: Type.KEY,
    Type.VECTOR_BOOL: Type.BOOL,
}
_FIXED: Final = {
    Type(Type.VECTOR_INT2 + 3 * (length - 2) + place): (element, length)
    for length in (2, 3, 4)
    for place, element in enumerate((Type.INT, Type.UINT, Type.FLOAT))
}


def decode_flexbuffer(data: bytes | memoryview) -> JSON:
    """Read a value from bytes that need not be trusted.

    NaN and infinities become None, as the official engine reads them.

    Raises:
        FormatError: the bytes are no FlexBuffer, hold what JSON cannot, are nested too deeply,
            or refer to the same bytes so often that the value would dwarf them.
    """
    raw = bytes(data)
    # Most values are short, and those of a history alike: most of a reader's time is its making.
    if 2 < len(raw) <= _SMALL_BYTES and raw[-2] >> 2 <= Type.STRING:
        return _small_scalar(raw)
    return _Reader(raw).root()


@lru_cache(maxsize=1 << 12)
def _small_scalar(raw: bytes) -> JSON:
    """Decode a number or text."""
    return _Reader(raw).root()


class _Reader:
    """Follows a FlexBuffer from its end, within budgets set by its size."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        # Vectors can refer to one another any number of times, so that n levels would have 2^n
        # values.
        self._values_left = _FACTOR * len(data)
        self._text_left = _FACTOR * len(data)
        # Keys, and in some writers strings, are shared: each is searched and decoded once.
        self._keys: dict[int, str] = {}
        self._texts: dict[tuple[int, int], str] = {}

    def root(self) -> JSON:
        if len(self._data) < 3:
            raise FormatError(f"a FlexBuffer has at least 3 bytes, not {len(self._data)}")
        # A FlexBuffer is read from its end: the root, its type, and its width, a byte each for the
        # last two.
        packed, width = self._data[-2], self._data[-1]
        return self._value(packed, len(self._data) - 2 - width, self._width(width), MAX_DEPTH)

    def _value(self, packed: int, at: int, width: int, depth: int) -> JSON:
        """Read the value at ``at``; ``width`` is that of the container's slots."""
        self._spend(1)
        kind, own_width = self._type(packed), 1 << (packed & 3)
        # Numbers stand in the slot itself; all others are offsets back from it. A hostile offset of
        # 0 leads back into its own vector: depth and the budget end such a circle.
        if kind in _INLINE:
            return self._scalar(kind, at, width)
        target = self._follow(at, width)
        if kind is Type.KEY:
            return self._key(target)
        if kind is Type.STRING:
            return self._string(target, own_width)
        if kind in _INDIRECT:
            return self._scalar(_INDIRECT[kind], target, own_width)
        if depth == 0:
            raise FormatError(f"a FlexBuffer is nested more than {MAX_DEPTH} deep")
        if kind is Type.MAP:
            return self._map(target, own_width, depth - 1)
        if kind is Type.VECTOR:
            return self._vector(target, own_width, depth - 1)
        if kind in _TYPED:
            return self._typed(_TYPED[kind], target, own_width, self._size(target, own_width))
        if kind in _FIXED:
            element, size = _FIXED[kind]
            return self._typed(element, target, own_width, size)
        raise FormatError(f"FlexBuffers {kind.name} is no JSON value")

    def _map(self, target: int, width: int, depth: int) -> dict[str, JSON]:
        # Before the values of a map: the offset to its keys, their width, its size.
        keys_width = self._width(self._uint(target - 2 * width, width))
        keys_at = self._follow(target - 3 * width, width)
        size = self._size(keys_at, keys_width)
        if size != self._size(target, width):
            raise FormatError("a FlexBuffers map has different numbers of keys and values")
        values = self._vector(target, width, depth)
        keys = self._key_list(keys_at, keys_width, size)
        return dict(zip(keys, values, strict=True))

    def _vector(self, target: int, width: int, depth: int) -> list[JSON]:
        size = self._size(target, width)
        types_at = target + size * width
        self._need(target, size * width + size)
        return [
            self._value(self._data[types_at + place], target + place * width, width, depth)
            for place in range(size)
        ]

    def _key_list(self, target: int, width: int, size: int) -> list[str]:
        self._need(target, size * width)
        self._spend(size)
        places = range(target, target + size * width, width)
        return [self._key(self._follow(place, width)) for place in places]

    def _typed(self, element: Type, target: int, width: int, size: int) -> Sequence[JSON]:
        if element is Type.KEY:
            return self._key_list(target, width, size)
        self._need(target, size * width)
        self._spend(size)
        if element is Type.FLOAT:
            places = range(target, target + size * width, width)
            return [self._scalar(element, place, width) for place in places]
        code = _NUMBER_CODES[element][width.bit_length() - 1]
        numbers = struct.unpack_from(f"<{size}{code}", self._data, target)
        return [number != 0 for number in numbers] if element is Type.BOOL else list(numbers)

    def _scalar(self, kind: Type, at: int, width: int) -> bool | int | float | None:
        self._need(at, width)
        raw = self._data[at : at + width]
        match kind:
            case Type.NULL:
                return None
            case Type.BOOL:
                return any(raw)
            case Type.FLOAT:
                if width not in _FLOATS:
                    raise FormatError(f"a FlexBuffers float has {width} bytes, not 4 or 8")
                number: float = struct.unpack(_FLOATS[width], raw)[0]
                return number if math.isfinite(number) else None
            case _:
                return int.from_bytes(raw, "little", signed=kind is Type.INT)

    def _string(self, target: int, width: int) -> str:
        size = self._size(target, width)
        self._need(target, size)
        return self._text(target, target + size)

    def _key(self, target: int) -> str:
        key = self._keys.get(target)
        if key is None:
            # At most once for each place, and what it passes over counts as text.
            end = self._data.find(0, target)
            if end < 0:
                raise FormatError("a FlexBuffers key has no end")
            key = self._keys[target] = self._text(target, end)
        return key

    def _text(self, start: int, end: int) -> str:
        text = self._texts.get((start, end))
        if text is None:
            self._text_left -= end - start
            if self._text_left < 0:
                raise FormatError("a FlexBuffer has overlapping texts")
            try:
                text = self._data[start:end].decode()
            except UnicodeDecodeError as error:
                raise FormatError("a FlexBuffers text is not UTF-8") from error
            self._texts[start, end] = text
        return text

    def _follow(self, at: int, width: int) -> int:
        target = at - self._uint(at, width)
        if target < 0:
            raise FormatError("a FlexBuffers offset points before the buffer")
        return target

    def _size(self, target: int, width: int) -> int:
        return self._uint(target - width, width)

    def _uint(self, at: int, width: int) -> int:
        self._need(at, width)
        return int.from_bytes(self._data[at : at + width], "little")

    def _need(self, at: int, length: int) -> None:
        if at < 0 or at + length > len(self._data):
            raise FormatError(
                f"a FlexBuffer of {len(self._data)} bytes refers to {length} bytes at {at}"
            )

    def _spend(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise FormatError("a FlexBuffer repeats values beyond all proportion to its size")

    @staticmethod
    def _width(width: int) -> int:
        if width not in (1, 2, 4, 8):
            raise FormatError(f"a FlexBuffers width is {width}, not 1, 2, 4 or 8")
        return width

    @staticmethod
    def _type(packed: int) -> Type:
        try:
            return Type(packed >> 2)
        except ValueError as error:
            raise FormatError(f"FlexBuffers type {packed >> 2} is unknown") from error

"""Write JSON values as FlexBuffers; `flexbuffers` reads them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from flatbuffers.flexbuffers import Builder, Type, Value

from icechunk_async.format.json.values import SignedInt

if TYPE_CHECKING:
    from icechunk_async.format.json.values import JSON

__all__ = ["encode_flexbuffer"]


def encode_flexbuffer(value: JSON) -> bytes:
    """Write a value as the official engine does, byte for byte.

    Args:
        value: checked before (``checked_json``); the text of map keys is laid out in the order of
            the dict; the index of a map is always sorted.
    """
    writer = _Writer()
    writer.write(value)
    return bytes(writer.builder.Finish())


class _Builder(Builder):
    """The library's builder, but looking at a key does not copy all that follows it."""

    def _ReadKey(self, offset: int) -> bytearray:  # noqa: N802
        return self._buf[offset : self._buf.index(0, offset)]


class _Writer:
    """Chooses the types that the official writer chooses."""

    def __init__(self) -> None:
        # The library's own pool of keys loses some: it searches a list that it does not keep
        # sorted.
        self.builder = _Builder(share_keys=False)
        self._keys: dict[str, Value] = {}

    def write(self, value: JSON) -> None:
        builder = self.builder
        match value:
            case None:
                builder.Null()
            case bool():
                builder.Bool(value)
            case int():
                write = builder.Int if _scalar_type(value) is Type.INT else builder.UInt
                write(value)
            case float():
                builder.Float(value, byte_width=_float_width(value))
            case str():
                builder.String(value)
            case dict():
                with builder.Map():
                    for key, item in value.items():
                        self._write_key(key)
                        self.write(item)
            case list():
                self._write_list(value)
            case _:
                raise TypeError(f"{type(value).__name__} was not checked before writing")

    def _write_key(self, key: str) -> None:
        earlier = self._keys.get(key)
        if earlier is not None:
            self.builder.ReuseValue(earlier)
        else:
            self.builder.Key(key.encode())
            self._keys[key] = self.builder.LastValue

    def _write_list(self, items: list[JSON]) -> None:
        element = _common_type(items)
        if element is None:
            with self.builder.Vector():
                for item in items:
                    self.write(item)
        elif element is not Type.BOOL and 2 <= len(items) <= 4:
            numbers = [item for item in items if isinstance(item, (int, float))]
            # The library asks for the width of floats in a way that fails beyond float32.
            width = max(map(_float_width, numbers)) if element is Type.FLOAT else 0
            self.builder.FixedTypedVectorFromElements(
                numbers, element_type=element, byte_width=width
            )
        else:
            with self.builder.TypedVector():
                for item in items:
                    self.write(item)


def _common_type(items: list[JSON]) -> Type | None:
    """The element type of a typed vector, or None where the vector must be untyped."""
    kinds = {_scalar_type(item) for item in items}
    return kinds.pop() if len(kinds) == 1 else None


def _scalar_type(item: JSON) -> Type | None:
    match item:
        case bool():
            return Type.BOOL
        case int():
            # The library itself makes signed numbers of all; the official writer of these only.
            return Type.INT if item < 0 or isinstance(item, SignedInt) else Type.UINT
        case float():
            return Type.FLOAT
        case _:
            return None


def _float_width(value: float) -> int:
    """Return the bytes of the narrowest float that loses nothing, as the official writer does."""
    try:
        lossless: bool = struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        return 8
    return 4 if lossless else 8

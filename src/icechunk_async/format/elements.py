"""Fill values as the bytes of one element, and as ``zarr.json`` has them (Zarr v3, "Fill value").

Layouts before format version 1 store fill values apart from the document. Bytes are little-endian.
They keep every bit: that of a negative zero, and the payload of a NaN.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.format.json.values import is_list

if TYPE_CHECKING:
    from icechunk_async.format.json.values import JSON

__all__ = ["FLOATS", "FillError", "element_bytes", "fill_from_bytes", "fill_to_bytes", "raw_bits"]

_INTEGERS: Final = {
    f"{sign}int{bits}": (bits // 8, not sign) for sign in ("", "u") for bits in (8, 16, 32, 64)
}
FLOATS: Final = {"float16": "<e", "float32": "<f", "float64": "<d"}
"""The names of floating-point types, and their formats in `struct`."""
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}
_RAW: Final = re.compile(r"r([1-9][0-9]{0,8})")
_NAMED: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_HEX: Final = re.compile(r"0x[0-9a-fA-F]+")


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
    for name, named in _NAMED.items():
        if struct.pack(layout, named) == raw:
            return name
    return f"0x{raw[::-1].hex()}"

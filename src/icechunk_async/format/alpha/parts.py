"""The parts that several documents of the alpha share: ids, times, bytes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.format.ids import encode_base32
from icechunk_async.format.json.values import is_list

if TYPE_CHECKING:
    from icechunk_async.format.json.reading import Part

__all__ = ["ID_BYTES", "MAX_U16", "MAX_U32", "read_bytes", "read_id", "read_time", "write_time"]

ID_BYTES: Final = 16
MAX_U16: Final = 1 << 16
MAX_U32: Final = 1 << 32
_OFFSET: Final = len("2024-10-15")


def read_bytes(part: Part, value: object) -> bytes:
    """Return bytes that are a list of numbers."""
    try:
        if is_list(value):
            # Refuses what is no integer from 0 to 255, and is quicker than looking at each.
            return bytes(value)
    except (TypeError, ValueError):
        pass
    raise part.fault(f"has {value!r:.60} in place of a list of bytes")


def read_id(part: Part, key: str) -> bytes:
    """Return the 16 bytes of an object id."""
    raw = read_bytes(part, part.members.get(key))
    if len(raw) != ID_BYTES:
        raise part.fault(f"has an id {key!r} of {len(raw)} bytes; ids have {ID_BYTES}")
    return raw


def read_time(part: Part, key: str) -> int:
    """Return a time (RFC 3339) in microseconds since the epoch; smaller parts are cut off."""
    text = part.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = datetime.min
    # Python also reads a date alone, which would be midnight of no zone.
    if moment.tzinfo is None or len(text) <= _OFFSET:
        raise part.fault(f"has {text!r:.60} as {key!r} in place of a time with its zone")
    return clock.to_us(moment)


def write_time(moment_us: int) -> str:
    """Return a time in the form of RFC 3339."""
    return clock.from_us(moment_us).isoformat(timespec="microseconds").replace("+00:00", "Z")


def named(raw: bytes) -> str:
    """Return the text form of an id."""
    return encode_base32(raw)

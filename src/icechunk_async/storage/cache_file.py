"""How one cached answer lies on disk: a checksum, what it answers, and the bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import IO, TYPE_CHECKING, Final

from icechunk_async import _clock
from icechunk_async.storage.protocol import (
    ByteRange,
    Retrieved,
    SuffixRange,
    Version,
    slice_range,
)

if TYPE_CHECKING:
    from icechunk_async.storage.protocol import RangeRequest

__all__ = ["dump", "fits", "load", "part_name"]

_MAGIC: Final = b"ICACHE\r\n"
_HEADER: Final = struct.Struct(">8s32s")
_LENGTHS: Final = struct.Struct(">IQ")
_START: Final = _HEADER.size + _LENGTHS.size
_MAX_ABOUT_BYTES: Final = 16 * 1024
"""A key has at most 1 KiB, six times that when escaped; versions are short."""


def part_name(request: RangeRequest) -> str:
    """Answer a short name for what was asked of an object."""
    match request:
        case None | ByteRange(0, None):
            return "all"
        case ByteRange(start, stop):
            return f"{start}-{'' if stop is None else stop}"
        case SuffixRange(length):
            return f"-{length}"


def fits(request: RangeRequest, retrieved: Retrieved) -> bool:
    """Tell whether an answer has as many bytes as the request has in an object of that size."""
    start, stop = slice_range(request, retrieved.size_bytes)
    return len(retrieved.data) == stop - start


def dump(namespace: str, key: str, request: RangeRequest, retrieved: Retrieved) -> bytes:
    """Answer what precedes the bytes of an answer in its file."""
    modified = retrieved.last_modified
    about = json.dumps(
        [
            *(namespace, key, part_name(request), retrieved.version.token, retrieved.size_bytes),
            None if modified is None else _clock.to_us(modified),
        ]
    ).encode()
    rest = _LENGTHS.pack(len(about), len(retrieved.data)) + about
    return _HEADER.pack(_MAGIC, _digest(rest, retrieved.data)) + rest


def load(
    file: IO[bytes], size_bytes: int, namespace: str, key: str, request: RangeRequest
) -> Retrieved:
    """Read an answer from an unbuffered file of ``size_bytes``.

    Raises:
        ValueError: the file is damaged, or answers something else.
    """
    start = file.read(_START)
    if len(start) != _START:
        raise ValueError("the file is too short")
    magic, digest = _HEADER.unpack_from(start)
    about_bytes, data_bytes = _LENGTHS.unpack_from(start, _HEADER.size)
    # Sizes are compared before they are believed: no file can ask for more memory than it has.
    if (
        magic != _MAGIC
        or about_bytes > _MAX_ABOUT_BYTES
        or _START + about_bytes + data_bytes != size_bytes
    ):
        raise ValueError("the header is damaged")
    about, data = file.read(about_bytes), _read(file, data_bytes)
    if _digest(start[_HEADER.size :] + about, data) != digest:
        raise ValueError("the checksum is wrong")
    try:
        *place, token, size, modified = json.loads(about)
    except RecursionError as error:
        raise ValueError("the description is damaged") from error
    if place != [namespace, key, part_name(request)]:
        raise ValueError("the file answers something else")
    if (
        not isinstance(token, str)
        or not isinstance(size, int)
        or not isinstance(modified, int | None)
    ):
        raise ValueError("the description is damaged")  # noqa: TRY004 - the caller's one error
    at = None if modified is None else _clock.from_us(modified)
    retrieved = Retrieved(data, Version(token), size, at)
    if size < 0 or not fits(request, retrieved):
        raise ValueError("the number of bytes is wrong")
    return retrieved


def _read(file: IO[bytes], count: int) -> bytes:
    """Read exactly ``count`` bytes; systems answer at most about 2 GiB at once."""
    data = file.read(count)
    if len(data) == count:
        return data
    pieces = [data]
    while pieces[-1] and (missing := count - sum(map(len, pieces))):
        pieces.append(file.read(missing))
    return b"".join(pieces)


def _digest(rest: bytes, data: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(rest)
    checksum.update(data)
    return checksum.digest()

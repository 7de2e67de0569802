"""Bytes of an answer: as many as were promised, and no more than are wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import StorageError, StorageUnavailableError
from icechunk_async.storage import RangeRequest, Retrieved, slice_range
from icechunk_async_http.answers import last_modified, part_of, version

if TYPE_CHECKING:
    import aiohttp

    from icechunk_async.storage import Version

__all__ = ["read_part", "read_whole"]

_PIECE_BYTES: Final = 256 * 1024


async def read_part(
    answer: aiohttp.ClientResponse,
    key: str,
    asked: RangeRequest,
    *,
    nothing: bool,
    unversioned: bool = False,
) -> Retrieved:
    """Read a partial answer to ``asked``, or to its first byte where ``nothing`` is wanted.

    Raises:
        StorageError: it is of other bytes.
        StorageUnavailableError: it broke off.
    """
    _check_encoding(answer, key)
    part = part_of(answer.headers, key)
    expected = (0, 1) if nothing else slice_range(asked, part.size_bytes)
    if (part.start, part.stop) != expected:
        raise StorageError(
            f"The server answered bytes {part.start} to {part.stop} of {key!r}, not {asked}. "
            "Use a server that implements ranges.",
            key=key,
        )
    data = await _read(answer, key, 0, part.stop - part.start, ends=True)
    found = b"" if nothing else data
    return _retrieved(answer, key, found, part.size_bytes, unversioned=unversioned)


async def read_whole(
    answer: aiohttp.ClientResponse,
    key: str,
    wanted: RangeRequest,
    known: Version | None = None,
    *,
    max_bytes: float = math.inf,
    unversioned: bool = False,
) -> Retrieved | None:
    """Read what is ``wanted`` of a whole answer; None where it is at the ``known`` version.

    Raises:
        StorageError: it is encoded, or no version can be told; or more than ``max_bytes`` would
            have to be fetched for a part of it.
        StorageUnavailableError: it broke off.
    """
    _check_encoding(answer, key)
    size = answer.content_length
    limit = math.inf if wanted is None else max_bytes
    if size is None:  # it is sent in pieces, and only its end tells
        body = await _read_to_end(answer, key, limit)
        size = len(body)
        start, stop = slice_range(wanted, size)
        part = memoryview(body)[start:stop]
        found = _retrieved(answer, key, part, size, unversioned=unversioned)
        return None if found.version == known else found
    if known is not None:
        now = version(answer.headers, size, key, required=not unversioned)
        if now == known:
            return None
    start, stop = slice_range(wanted, size)
    if stop > limit:
        raise _too_long(answer, key, stop, limit)
    data = await _read(answer, key, start, stop, ends=stop == size)
    return _retrieved(answer, key, data, size, unversioned=unversioned)


async def _read_to_end(answer: aiohttp.ClientResponse, key: str, limit: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.content.iter_chunked(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise _too_long(answer, key, size, limit)
    return b"".join(pieces)


def _too_long(answer: aiohttp.ClientResponse, key: str, needed: int, limit: float) -> StorageError:
    answer.close()
    return StorageError(
        f"The server ignores ranges: for a part of {key!r} the first {needed} bytes would have to "
        f"be fetched, and {limit:.0f} are allowed. Use a server that implements ranges, or allow "
        "more with 'max_unranged_bytes'.",
        key=key,
        option="max_unranged_bytes",
    )


async def _read(
    answer: aiohttp.ClientResponse, key: str, start: int, stop: int, *, ends: bool
) -> bytes:
    """Read bytes ``[start, stop)`` of a body, which ``ends`` there or is left."""
    pieces: list[bytes] = []
    position = 0
    needed = start < stop or ends
    if needed:
        async for piece in answer.content.iter_chunked(_PIECE_BYTES):
            pieces.append(piece[max(0, start - position) : max(0, stop - position)])
            position += len(piece)
            if position > stop or (position == stop and not ends):
                break
    if not answer.content.at_eof():
        answer.close()
    if (needed and position < stop) or (ends and position > stop):
        raise StorageUnavailableError(
            f"The server promised {stop} bytes of {key!r} and sent "
            f"{'more' if position > stop else position}. Try again.",
            key=key,
        )
    return b"".join(pieces)


def _retrieved(
    answer: aiohttp.ClientResponse,
    key: str,
    data: bytes | memoryview,
    size_bytes: int,
    *,
    unversioned: bool,
) -> Retrieved:
    headers = answer.headers
    found = version(headers, size_bytes, key, required=not unversioned)
    return Retrieved(data, found, size_bytes, last_modified(headers), headers.get("ETag"))


def _check_encoding(answer: aiohttp.ClientResponse, key: str) -> None:
    """Refuse encoded bodies: ranges, sizes and ETags of those are not the object's."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(
            f"The server sent {key!r} with the encoding {encoding[:40]!r}, though none was "
            "accepted. Switch compression off for these objects, or remove that header.",
            key=key,
        )

"""Bytes of an answer: as many as were promised, and no more than are wanted."""

from __future__ import annotations

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
    answer: aiohttp.ClientResponse, key: str, asked: RangeRequest, *, nothing: bool
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
    return _retrieved(answer, key, b"" if nothing else data, part.size_bytes)


async def read_whole(
    answer: aiohttp.ClientResponse, key: str, wanted: RangeRequest, known: Version | None = None
) -> Retrieved | None:
    """Read what is ``wanted`` of a whole answer; None where it is at the ``known`` version.

    Raises:
        StorageError: it is encoded, or no version can be told.
        StorageUnavailableError: it broke off.
    """
    _check_encoding(answer, key)
    size = answer.content_length
    if size is None:  # it is sent in pieces, and only its end tells
        body = await answer.read()
        size = len(body)
        start, stop = slice_range(wanted, size)
        found = _retrieved(answer, key, memoryview(body)[start:stop], size)
        return None if found.version == known else found
    if known is not None and version(answer.headers, size, key) == known:
        return None
    start, stop = slice_range(wanted, size)
    data = await _read(answer, key, start, stop, ends=stop == size)
    return _retrieved(answer, key, data, size)


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
    answer: aiohttp.ClientResponse, key: str, data: bytes | memoryview, size_bytes: int
) -> Retrieved:
    headers = answer.headers
    return Retrieved(data, version(headers, size_bytes, key), size_bytes, last_modified(headers))


def _check_encoding(answer: aiohttp.ClientResponse, key: str) -> None:
    """Refuse encoded bodies: ranges, sizes and ETags of those are not the object's."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(
            f"The server sent {key!r} with the encoding {encoding[:40]!r}, though none was "
            "accepted. Switch compression off for these objects, or remove that header.",
            key=key,
        )

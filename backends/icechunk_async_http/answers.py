"""Replies of web servers: status, headers and bodies, checked against what was asked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import (
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
)
from icechunk_async.storage import (
    ByteRange,
    RangeRequest,
    Retrieved,
    SuffixRange,
    Version,
    slice_range,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from icechunk_async.errors import IcechunkError

__all__ = [
    "UNKNOWN",
    "Part",
    "error_of",
    "last_modified",
    "part_of",
    "range_header",
    "read_part",
    "read_whole",
    "strong_etag",
    "version",
]

UNKNOWN: Final = "unknown"
"""The prefix of versions of objects whose changes cannot be detected."""
# Up to 19 digits hold every size there is; Python refuses to read more than 4300.
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_STRONG: Final = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes ``[start, stop)`` that a body holds, and the size of the object."""

    start: int
    stop: int
    size_bytes: int


def range_header(request: RangeRequest) -> str | None:
    """Return the ``Range`` header for a request; None for all or no bytes."""
    match request:
        case ByteRange(start, stop) if stop is not None:
            return f"bytes={start}-{stop - 1}" if start < stop else None
        case ByteRange(start):
            return f"bytes={start}-"
        case SuffixRange(length):
            return f"bytes=-{length}" if length else None
        case None:
            return None


def part_of(headers: Mapping[str, str], key: str) -> Part:
    """Parse the range that a partial reply holds.

    Raises:
        StorageError: it does not say so, or contradicts itself.
    """
    text = headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is not None:
        first, last, size = map(int, match.groups())
        if first <= last < size:
            return Part(first, last + 1, size)
    raise StorageError(
        f"The server's answer to a range of {key!r} has the Content-Range {text[:100]!r}, which is "
        "no range of bytes in an object of known size. Use a server that implements ranges.",
        key=key,
    )


def strong_etag(text: str | None) -> str | None:
    """Return a strong ETag; weak ones may stand for different bytes."""
    return text if text is not None and _STRONG.fullmatch(text) else None


def version(
    headers: Mapping[str, str], size_bytes: int, key: str, *, required: bool = True
) -> Version:
    """Return the version of an object: its ETag, or modification time and size.

    Raises:
        StorageError: the server sends neither, and one is ``required``.
    """
    etag = strong_etag(headers.get("ETag"))
    if etag is not None:
        return Version(etag)
    modified = headers.get("Last-Modified")
    if modified is None and required:
        raise StorageError(
            f"The server tells neither ETag nor Last-Modified of {key!r}, so that a change of it "
            "could not be seen. Let it send one of these headers, or give 'unversioned=True'.",
            key=key,
        )
    if modified is None:
        return Version(f"{UNKNOWN}, {size_bytes} bytes")
    return Version(f"modified {modified}, {size_bytes} bytes")


def last_modified(headers: Mapping[str, str]) -> datetime | None:
    """Return when the object was written, if the server says so."""
    return _date(headers.get("Last-Modified"))


def error_of(status: int, headers: Mapping[str, str], key: str, host: str) -> IcechunkError:
    """Return the error for a status that is not a success."""
    context: dict[str, object] = {"key": key, "host": host, "status": status}
    asked = f"Reading {key!r} from {host}: the server answered with status {status}"
    if status in (404, 410):
        return ObjectNotFoundError(f"There is no object {key!r} on {host}.", **context)
    if status in (401, 403, 407):
        return PermissionDeniedError(
            f"{asked}. Give 'headers' that it accepts; some servers also say so of objects that "
            "do not exist.",
            **context,
        )
    pause = _retry_after(headers)
    if pause is not None:
        context["retry_after_seconds"] = pause
    # A bare 503 may be a server that is down; only one that names a pause asks for fewer requests.
    if status == 429 or (status == 503 and pause is not None):
        return ThrottledError(f"{asked}. Try again later, with fewer requests at once.", **context)
    if status >= 500:
        return StorageUnavailableError(f"{asked}. Try again later.", **context)
    return StorageError(f"{asked}, which is no answer to reading. Check the URL.", **context)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the pause that the server requests, in seconds."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        # Nine digits are thirty years: a server cannot ask for a pause that no clock can count.
        return float(text[:9])
    until = _date(text)
    if until is None:
        return None
    # By the server's clock, from which ours may differ.
    now = _date(headers.get("Date")) or datetime.now(UTC)
    return max(0.0, (until - now).total_seconds())


def _date(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = parsedate_to_datetime(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # a year, or a zone, that no clock has
        return None


_PIECE_BYTES: Final = 256 * 1024


async def read_part(
    answer: aiohttp.ClientResponse,
    key: str,
    asked: RangeRequest,
    *,
    nothing: bool,
    unversioned: bool = False,
) -> Retrieved:
    """Read a partial reply to ``asked``, or to its first byte if ``nothing`` is wanted.

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
    """Read the ``wanted`` part of a whole reply; None if it is at the ``known`` version.

    Raises:
        StorageError: it is encoded, or has no version; or more than ``max_bytes`` would have to be
            fetched for a part of it.
        StorageUnavailableError: it broke off.
    """
    _check_encoding(answer, key)
    size = answer.content_length
    # A whole object may have any size, as in every storage.
    limit = math.inf if wanted is None else max_bytes
    if size is None:  # it is sent in chunks of unknown total size
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
    """Read bytes ``[start, stop)`` of a body, which ``ends`` there or is abandoned."""
    pieces: list[bytes] = []
    position = 0
    needed = start < stop or ends
    if needed:
        async for piece in answer.content.iter_chunked(_PIECE_BYTES):
            # Bytes before the part are dropped as they come: memory holds the part, and the time is
            # bounded by `max_unranged_bytes`.
            pieces.append(piece[max(0, start - position) : max(0, stop - position)])
            position += len(piece)
            if position > stop or (position == stop and not ends):
                break
    # The rest is not wanted. To read it, so that the connection can be used again, may take long.
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
    """Raise an error for encoded bodies: their ranges, sizes and ETags are not the object's."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise StorageError(
            f"The server sent {key!r} with the encoding {encoding[:40]!r}, though none was "
            "accepted. Switch compression off for these objects, or remove that header.",
            key=key,
        )

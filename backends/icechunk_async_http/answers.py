"""What the headers of an answer say, and what they must not say. Pure."""

from __future__ import annotations

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
from icechunk_async.storage import ByteRange, SuffixRange, Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.errors import IcechunkError
    from icechunk_async.storage import RangeRequest

__all__ = [
    "UNKNOWN",
    "Part",
    "error_of",
    "last_modified",
    "part_of",
    "range_header",
    "strong_etag",
    "version",
]

UNKNOWN: Final = "unknown"
"""How the versions begin of objects whose changes cannot be seen."""
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_STRONG: Final = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')


@dataclass(frozen=True, slots=True)
class Part:
    """Which bytes ``[start, stop)`` a body holds, of an object of how many."""

    start: int
    stop: int
    size_bytes: int


def range_header(request: RangeRequest) -> str | None:
    """Return the ``Range`` header for a request; None where all or nothing is asked for."""
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
    """Return what a partial answer says that it holds.

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
        "none of bytes in an object of known size. Use a server that implements ranges.",
        key=key,
    )


def strong_etag(text: str | None) -> str | None:
    """Return a strong ETag; weak ones may stand for different bytes."""
    return text if text is not None and _STRONG.fullmatch(text) else None


def version(
    headers: Mapping[str, str], size_bytes: int, key: str, *, required: bool = True
) -> Version:
    """Return the state of an object: its ETag, or when it was modified and how long it is.

    Raises:
        StorageError: the server tells neither, and that is ``required``.
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
    """Return when the object was written, where the server tells."""
    return _date(headers.get("Last-Modified"))


def error_of(status: int, headers: Mapping[str, str], key: str, host: str) -> IcechunkError:
    """Return the error for a status that is no success."""
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
    if status == 429 or (status == 503 and pause is not None):
        return ThrottledError(f"{asked}. Try again later, with fewer requests at once.", **context)
    if status >= 500:
        return StorageUnavailableError(f"{asked}. Try again later.", **context)
    return StorageError(f"{asked}, which is no answer to reading. Check the URL.", **context)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the pause that the server asks for, in seconds."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    until = _date(text)
    if until is None:
        return None
    now = _date(headers.get("Date")) or datetime.now(UTC)
    return max(0.0, (until - now).total_seconds())


def _date(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)

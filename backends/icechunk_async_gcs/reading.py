"""Reads and listings: objects whole, in part or only if changed, and names in order."""

from __future__ import annotations

import re
from base64 import b64decode
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import StorageError, StorageUnavailableError
from icechunk_async.storage import (
    MAX_KEY_BYTES,
    ByteRange,
    CommonPrefix,
    ObjectInfo,
    Retrieved,
    SuffixRange,
    Version,
    slice_range,
)
from icechunk_async_gcs.writing import generation_of, version_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from icechunk_async.storage import ListEntry, RangeRequest
    from icechunk_async_gcs.options import Location
    from icechunk_async_gcs.service import Reply, Service

__all__ = ["etag_of", "get", "get_if_changed", "list_prefix", "time_of"]

# Up to 19 digits hold every size there is; Python refuses to read more than 4300.
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_ODD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions of a document that lacks something, or has another shape."""
_TRIES: Final = 5
"""Tries to read a range of an object whose size keeps changing."""


async def get(service: Service, key: str, name: str, byte_range: RangeRequest) -> Retrieved:
    """Read an object or part of it; a range beyond the end costs a second request."""
    header = _range_header(byte_range)
    for _ in range(_TRIES):
        if header != "":
            reply = await service.ask(
                "GET",
                service.object(name),
                f"read {key!r}",
                key=key,
                accept=(416,),
                query={"alt": "media"},
                headers={"Range": header} if header else {},
            )
            if reply.status != 416:
                return _retrieved(reply, key, byte_range)
        found = await _empty_part(service, key, name, byte_range)
        if found is not None:
            return found
    raise StorageUnavailableError(
        f"Could not read a range of {key!r}: the object changes its size all the time. Try again.",
        key=key,
    )


async def get_if_changed(
    service: Service, key: str, name: str, version: Version
) -> Retrieved | None:
    """Read a whole object unless it is at a version."""
    query = {"alt": "media"}
    generation = generation_of(version)
    if generation is not None:
        # A text that is no generation is not sent: the service would call it a bad request, and the
        # object counts as changed.
        query["ifGenerationNotMatch"] = generation
    reply = await service.ask(
        "GET", service.object(name), f"read {key!r}", key=key, accept=(304,), query=query
    )
    return None if reply.status == 304 else _retrieved(reply, key, None)


def _range_header(request: RangeRequest) -> str | None:
    """Return the header; None for the whole object, empty for no bytes of it."""
    match request:
        case None | ByteRange(0, None):
            return None
        case ByteRange(start, None):
            return f"bytes={start}-"
        case ByteRange(start, stop) if stop is not None and stop > start:
            return f"bytes={start}-{stop - 1}"
        case SuffixRange(length) if length > 0:
            return f"bytes=-{length}"
        case _:
            return ""


async def _empty_part(
    service: Service, key: str, name: str, byte_range: RangeRequest
) -> Retrieved | None:
    """Return an empty read with size and version, or None if the range has bytes after all."""
    # HTTP has no range of no bytes, and a 416 tells neither size nor generation.
    reply = await service.ask(
        "GET",
        service.object(name),
        f"read {key!r}",
        key=key,
        query={"fields": "generation,size,updated", "prettyPrint": "false"},
    )
    document = reply.document()
    try:
        size, updated = int(document["size"]), time_of(document["updated"])
    except _ODD as error:
        raise _odd(f"read {key!r}", error) from error
    start, stop = slice_range(byte_range, size)
    if stop > start:
        return None
    return Retrieved(b"", version_in(document), size, updated)


def _odd(what: str, error: Exception) -> StorageError:
    return StorageError(
        f"Could not {what}: the service answered with another document ({type(error).__name__}). "
        "Check the endpoint, and proxies before it."
    )


def _retrieved(reply: Reply, key: str, byte_range: RangeRequest) -> Retrieved:
    """Parse the reply of a download; a body of other bytes than requested is an error."""
    data: bytes = reply.body
    version = Version(reply.headers.get("X-Goog-Generation", ""))
    if generation_of(version) is None:
        raise StorageError(
            f"Could not read {key!r}: the service does not tell the generation of what it sent, "
            "which commits rely on. Use Google Cloud Storage, or an emulator that does.",
            key=key,
        )
    # A caller joins parts by what it asked for, so that shifted bytes would be a damaged chunk
    # without an error.
    if reply.status == 206:
        match = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
        size = int(match[3]) if match else -1
        start, stop = slice_range(byte_range, max(size, 0))
        good = match is not None and (int(match[1]), int(match[2]) + 1) == (start, stop)
        good = good and len(data) == stop - start
    else:
        size = len(data)
        # They differ if the service decompressed the object on its way.
        stored = reply.headers.get("X-Goog-Stored-Content-Length", str(size))
        good = _NUMBER.fullmatch(stored) is not None and int(stored) == size
        start, stop = slice_range(byte_range, size)
        data = data[start:stop]
    if not good:
        raise StorageError(
            f"Could not read {key!r}: the service sent other bytes than were asked for (an object "
            "that is stored compressed, or a proxy that changes bodies?).",
            key=key,
        )
    modified, etag = _last_modified(reply.headers), etag_of(reply.headers)
    return Retrieved(data, version, size, modified, etag)


def etag_of(headers: Mapping[str, str]) -> str | None:
    """Return the ETag that the XML API gives an object, by which other programs know it.

    The JSON API has a different ETag. That of the XML API is the MD5 of the bytes in hexadecimal;
    composed objects have none.
    """
    hashes = ",".join(value for name, value in headers.items() if name.lower() == "x-goog-hash")
    for part in hashes.split(","):
        kind, _, digest = part.strip().partition("=")
        if kind == "md5":
            with suppress(ValueError):  # no base64
                return b64decode(digest).hex()
    return headers.get("ETag")


def _last_modified(headers: Mapping[str, str]) -> datetime | None:
    value = headers.get("Last-Modified")
    if value is None:
        return None
    try:
        return parsedate_to_datetime(value).astimezone(UTC)
    except (ValueError, OverflowError):  # a year, or a zone, that no clock has
        return None


def time_of(text: str) -> datetime:
    """Read a time of a document."""
    return datetime.fromisoformat(text).astimezone(UTC)


_FIELDS: Final = "items(name,size,updated),prefixes,nextPageToken"


async def list_prefix(
    service: Service,
    location: Location,
    prefix: str,
    start_after: str | None,
    delimiter: str | None,
) -> AsyncIterator[ListEntry]:
    """List objects; see `icechunk_async.storage.Storage.list_prefix`."""
    service.check_open()
    wanted = location.prefix + prefix
    if _sendable(wanted) != wanted or len(wanted.encode()) > MAX_KEY_BYTES:
        return  # no name begins like this
    query = {"fields": _FIELDS, "prettyPrint": "false"}
    if wanted:
        query["prefix"] = wanted
    if delimiter is not None:
        query["delimiter"] = delimiter
    if start_after:
        # Inclusive, and cut if it cannot be sent: earlier entries are dropped below.
        query["startOffset"] = location.prefix + _sendable(start_after)
    last = start_after
    more = True
    while more:
        service.check_open()
        page, more = await _next_page(service, prefix, query, len(location.prefix))
        for name, entry in page:
            if start_after is not None and name <= start_after:
                continue
            # Garbage collection and copies continue after the last name: of a server that does not
            # sort they would miss objects silently.
            if last is not None and name < last:
                raise _unreliable(prefix, f"it answered {name!r} after {last!r}, out of order")
            if name != last:  # else a group that continues in the next page
                last = name
                yield entry


async def _next_page(
    service: Service, prefix: str, query: dict[str, str], cut: int
) -> tuple[list[tuple[str, ListEntry]], bool]:
    """Return a page, and whether another one follows, which ``query`` then asks for."""
    reply = await service.ask("GET", service.objects, f"list {prefix!r}", query=query)
    document = reply.document()
    try:
        page = _entries(document, cut)
    except _ODD as error:
        raise _odd(f"list {prefix!r}", error) from error
    token = str(document.get("nextPageToken") or "")
    # The same token again would be the same page, for ever.
    if token and token == query.get("pageToken"):
        raise _unreliable(prefix, "it answered the same page again")
    query["pageToken"] = token
    return page, bool(token)


def _unreliable(prefix: str, what: str) -> StorageError:
    return StorageError(
        f"Could not list {prefix!r}: {what}. Use Google Cloud Storage, or an emulator that lists "
        "in order."
    )


def _entries(document: dict[str, Any], cut: int) -> list[tuple[str, ListEntry]]:
    """Return one page in order: code points sort like UTF-8 bytes."""
    found: list[tuple[str, ListEntry]] = []
    for item in document.get("items", ()):
        key = str(item["name"])[cut:]
        if key and not key.endswith("/"):  # consoles create such empty "folders"
            found.append((key, ObjectInfo(key, int(item["size"]), time_of(item["updated"]))))
    for group in document.get("prefixes", ()):
        key = str(group)[cut:]
        found.append((key, CommonPrefix(key)))
    found.sort(key=lambda pair: pair[0])
    return found


def _sendable(text: str) -> str:
    """Return the longest beginning that can be part of a name."""
    for index, character in enumerate(text):
        if character in "\0\r\n" or "\ud800" <= character <= "\udfff":
            return text[:index]
    return text

"""Reads and listings: objects whole, in part or only if changed, and keys in order."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from heapq import merge
from typing import TYPE_CHECKING, Any, Final, Literal

from icechunk_async.errors import InvalidObjectKeyError, StorageError, StorageUnavailableError
from icechunk_async.storage import (
    MAX_KEY_BYTES,
    ByteRange,
    CommonPrefix,
    ObjectInfo,
    Retrieved,
    SuffixRange,
    check_key,
    slice_range,
)
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async_s3.failures import LostReplyError, explain
from icechunk_async_s3.transport import RefusedError, condition, is_etag, version_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from icechunk_async.storage import ListEntry, RangeRequest, Version
    from icechunk_async_s3.options import Options
    from icechunk_async_s3.transport import Reply, Transport

__all__ = ["PAGE_KEYS", "Reader", "walk"]

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(-?\d+)/(\d+)")
_TRIES: Final = 5
"""Tries to read a range of an object that is replaced again and again."""


class Reader:
    """Reads objects of one storage."""

    def __init__(self, transport: Transport, options: Options) -> None:
        """Use `open_s3`."""
        self._transport = transport
        self._options = options

    async def get(self, key: str, full: str, request: RangeRequest) -> Retrieved:
        """Read an object or part of it.

        Cost: one request; two for a range that lies outside the object.
        """
        wanted = _range_header(request)
        for _ in range(_TRIES):
            if wanted is None and request is not None and not _is_everything(request):
                return await self._nothing(key, full)
            headers = {} if wanted is None else {"range": wanted}
            into = request.into if isinstance(request, PlacedRange) else None
            reply = await self._transport.read("GET", full, headers, into=into)
            if reply.status == 200:
                return self._whole(key, reply, request)
            if reply.status == 206 and request is not None:
                return self._part(key, reply, request)
            if reply.status != 416 or request is None:
                raise await self._transport.explain(reply, f"reading {key!r} in", key)
            nothing = await self._nothing(key, full)
            start, stop = slice_range(request, nothing.size_bytes)
            if start == stop:
                return nothing
            # Else it has grown since the server said that the range lies outside: read again.
        raise StorageUnavailableError(
            f"reading {key!r} in {self._transport.place.url!r}: the object changed each of "
            f"{_TRIES} times. Try again.",
            key=key,
        )

    async def get_if_changed(self, key: str, full: str, version: Version) -> Retrieved | None:
        """Read an object unless it is still at ``version``."""
        if not is_etag(version):  # no server has such a version, so the object is not at it
            return await self.get(key, full, None)
        known = condition(version, quoted=self._options.quote_etags)
        reply = await self._transport.read("GET", full, {"if-none-match": known})
        if reply.status == 304:
            return None
        if reply.status != 200:
            raise await self._transport.explain(reply, f"reading {key!r} in", key)
        found = self._whole(key, reply, None)
        return None if found.version == version else found

    async def _nothing(self, key: str, full: str) -> Retrieved:
        """Return an empty read of an existing object."""
        reply = await self._transport.read("HEAD", full)
        if reply.status == 200:
            size = reply.headers.get("content-length", "")
            if not size.isdecimal():
                raise self._odd(key, "its size is not told")
            return self._retrieved(reply, b"", int(size), key)
        # The reply to a HEAD has no body: a read of one byte gives the reason.
        told = await self._transport.read("GET", full, {"range": "bytes=0-0"})
        if told.status in (200, 206, 416):
            told = reply
        raise await self._transport.explain(told, f"reading {key!r} in", key)

    def _whole(self, key: str, reply: Reply, request: RangeRequest) -> Retrieved:
        size = len(reply.body)
        start, stop = slice_range(request, size)  # servers may send the whole object
        data = reply.body if stop - start == size else memoryview(reply.body)[start:stop]
        return self._retrieved(reply, data, size, key)

    def _part(self, key: str, reply: Reply, request: ByteRange | SuffixRange) -> Retrieved:
        told = reply.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(told)
        if match is None:
            raise self._odd(key, f"part of it came as {told!r}")
        first, last, size = (int(number) for number in match.groups())
        expected = slice_range(request, size)
        if (first, last + 1) != expected or len(reply.body) != last + 1 - first:
            raise self._odd(key, f"bytes {expected} were asked, and {told!r} came")
        return self._retrieved(reply, reply.body, size, key)

    def _retrieved(self, reply: Reply, data: bytes | memoryview, size: int, key: str) -> Retrieved:
        version = version_of(reply.headers, f"reading {key!r} in", self._transport.place)
        return Retrieved(data, version, size, _moment(reply.headers.get("last-modified")))

    def _odd(self, key: str, what: str) -> StorageError:
        return StorageError(
            f"reading {key!r} in {self._transport.place.url!r}: {what}. The server does not follow "
            "the protocol; use another one.",
            key=key,
        )


def _is_everything(request: RangeRequest) -> bool:
    return isinstance(request, ByteRange) and request.start == 0 and request.stop is None


def _range_header(request: RangeRequest) -> str | None:
    """Return a range as a header; None for everything and for nothing."""
    match request:
        case ByteRange(start, None) if start:
            return f"bytes={start}-"
        case ByteRange(start, int(stop)) if stop > start:
            return f"bytes={start}-{stop - 1}"
        case SuffixRange(length) if length:
            return f"bytes=-{length}"
        case _:
            return None


@lru_cache(maxsize=1024)
def _moment(value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        return parsedate_to_datetime(value).astimezone(UTC)
    except ValueError:
        return None


PAGE_KEYS: Final = 1000
"""As many as the service lists in one request."""


async def walk(
    transport: Transport, prefix: str, start_after: str | None, delimiter: Literal["/"] | None
) -> AsyncIterator[ListEntry]:
    """List what begins with ``prefix``; one request a page."""
    place = transport.place
    asked = f"listing {prefix[:200]!r} in"
    full = place.prefix + prefix
    if _sendable(full) != full:  # no key begins so
        return
    parameters: dict[str, Any] = {"Prefix": full, "MaxKeys": PAGE_KEYS}
    parameters |= {"Delimiter": delimiter} if delimiter else {}
    # A string that cannot be sent is cut; entries that come too early are dropped below.
    parameters |= {"StartAfter": _sendable(place.prefix + start_after)} if start_after else {}
    last = start_after
    while True:
        page = await _page(transport, asked, parameters)
        for name, entry in merge(
            _objects(page, place.prefix), _groups(page, place.prefix), key=lambda item: item[0]
        ):
            if start_after is not None and name <= start_after:
                continue
            if last is not None and name < last:
                raise _out_of_order(asked, place.url, name, last)
            if name != last:  # else a group that continues in the next page
                last = name
                yield entry
        if not page.get("IsTruncated"):
            return
        token = page.get("NextContinuationToken")
        if not token or token == parameters.get("ContinuationToken"):
            raise StorageError(
                f"{asked} {place.url!r}: the server says that more follows, and not how to get it. "
                "Use a server that lists in pages.",
                url=place.url,
            )
        parameters["ContinuationToken"] = token


def _out_of_order(asked: str, url: str, name: str, last: str) -> StorageError:
    return StorageError(
        f"{asked} {url!r}: the server answered {name!r} after {last!r}, which is not the order of "
        "their bytes. Use a server that lists in order.",
        url=url,
    )


async def _page(transport: Transport, asked: str, parameters: dict[str, Any]) -> dict[str, Any]:
    for last in (False, True):
        try:
            return await transport.call("list_objects_v2", asked, **parameters)
        except RefusedError as error:
            raise explain(error.refusal, asked, transport.place) from error
        except LostReplyError as error:
            if last or error.timed_out:
                raise error.as_read(asked, transport.place) from error
    raise AssertionError  # the second round returns or raises


def _objects(page: dict[str, Any], prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for item in page.get("Contents", ()):
        name: str = item["Key"][len(prefix) :]
        if _is_key(name):  # consoles make "folders" whose keys end in a slash
            yield name, ObjectInfo(name, item["Size"], item["LastModified"])


def _groups(page: dict[str, Any], prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for item in page.get("CommonPrefixes", ()):
        name: str = item["Prefix"][len(prefix) :]
        if _is_key(name.removesuffix("/")):
            yield name, CommonPrefix(name)


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except InvalidObjectKeyError:
        return False
    return True


def _sendable(text: str) -> str:
    """Return the longest beginning of ``text`` that can begin a key in a request."""
    kept: list[str] = []
    size = 0
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            break
        size += len(character.encode())
        if size > MAX_KEY_BYTES:
            break
        kept.append(character)
    return "".join(kept)

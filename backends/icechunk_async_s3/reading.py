"""Reads: objects whole, in part or only if changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import StorageError, StorageUnavailableError
from icechunk_async.storage import (
    ByteRange,
    Retrieved,
    SuffixRange,
    slice_range,
)
from icechunk_async.storage.extensions import PlacedRange
from icechunk_async_s3.transport import condition, is_etag, version_of

if TYPE_CHECKING:
    from icechunk_async.storage import RangeRequest, Version
    from icechunk_async_s3.options import Options
    from icechunk_async_s3.transport import Reply, Transport

__all__ = ["Reader"]

# Up to 19 digits hold every size there is; Python refuses to read more than 4300.
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(-?\d{1,19})/(\d{1,19})", re.ASCII)
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
            # HTTP has no range of no bytes, so a HEAD tells size and version.
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
        # Servers may ignore the condition and send the object again.
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
        # It is there by now, or empty: what the HEAD said counts.
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
        # A caller joins parts by what it asked for: one that is shifted would become a damaged
        # chunk without an error.
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
    except (ValueError, OverflowError):  # a year, or a zone, that no clock has
        return None

"""The storage: reads only, because web servers have no common way to list or write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NoReturn
from urllib.parse import quote

from yarl import URL

from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import (
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    RangeRequest,
    Retrieved,
    StorageDescription,
    Version,
    check_key,
    slice_range,
)
from icechunk_async_http.answers import (
    UNKNOWN,
    error_of,
    range_header,
    read_part,
    read_whole,
    strong_etag,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    import aiohttp

    from icechunk_async_http.transport import Sessions, Transport

__all__ = ["HTTPStorage"]

_ONLY_READS: Final = "a web server is only read from; write through the bucket or disk behind it"
_CAPABILITIES: Final = Capabilities(
    writable=False,
    conditional_create=False,
    conditional_update=False,
    listing=False,
    reasons={
        "writable": _ONLY_READS,
        "conditional_create": _ONLY_READS,
        "conditional_update": _ONLY_READS,
        "listing": "HTTP has no listings; open the bucket or disk behind the server to list",
    },
)


class HTTPStorage:
    """A `Storage` to read from; made by `open_http`."""

    def __init__(
        self,
        base: str,
        sessions: Sessions,
        transport: Transport,
        description: StorageDescription,
        *,
        max_unranged_bytes: int,
        unversioned: bool,
    ) -> None:
        """Make a handle; use `open_http`."""
        self._base = base
        self._max_unranged_bytes = max_unranged_bytes
        self._unversioned = unversioned
        self._sessions = sessions
        self._transport = transport
        self._description = description

    def __repr__(self) -> str:
        """Show the URL."""
        return f"HTTPStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """Only reads are promised."""
        return _CAPABILITIES

    @property
    def description(self) -> StorageDescription:
        """The URL, and the options that were given."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it.

        A server that ignores ranges sends everything up to their end; more is not fetched, nor more
        than ``max_unranged_bytes``.
        """
        url = self._url(key)
        asked = range_header(byte_range)
        nothing = byte_range is not None and asked is None
        # HTTP has no empty ranges: a read of one byte gives the size as well.
        first = "bytes=0-0" if nothing else asked
        async with self._transport.get(url, key, {"Range": first} if first else {}) as answer:
            if answer.status == 206 and first:
                return await self._part(answer, key, byte_range, nothing=nothing)
            if answer.status != 416 or not first:
                return await self._whole(answer, key, byte_range)
        # The range is outside the object; a read of its first byte gives version and size.
        async with self._transport.get(url, key, {"Range": "bytes=0-0"}) as answer:
            if answer.status == 206:
                found = await self._part(answer, key, byte_range, nothing=True)
                start, stop = slice_range(byte_range, found.size_bytes)
                if start == stop:
                    return found
            elif answer.status != 416:
                return await self._whole(answer, key, byte_range)
        # The object is empty, or became longer in between.
        async with self._transport.get(url, key, {}) as answer:
            return await self._whole(answer, key, byte_range)

    async def _part(
        self, answer: aiohttp.ClientResponse, key: str, asked: RangeRequest, *, nothing: bool
    ) -> Retrieved:
        return await read_part(answer, key, asked, nothing=nothing, unversioned=self._unversioned)

    async def _whole(
        self, answer: aiohttp.ClientResponse, key: str, wanted: RangeRequest
    ) -> Retrieved:
        _check(answer, key)
        found = await read_whole(
            answer,
            key,
            wanted,
            max_bytes=self._max_unranged_bytes,
            unversioned=self._unversioned,
        )
        assert found is not None  # no version was given that it could be at
        return found

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``.

        Without an ETag the object is requested, and its body is fetched only if it changed.
        """
        etag = strong_etag(version.token)
        own = {"If-None-Match": etag} if etag else {}
        async with self._transport.get(self._url(key), key, own) as answer:
            # A 304 that was not asked for says nothing about the object.
            if answer.status == 304 and etag:
                return None
            _check(answer, key)
            # Such a version may stand for other bytes of the same length: the object counts as
            # changed.
            known = None if version.token.startswith(UNKNOWN) else version
            return await read_whole(answer, key, None, known, unversioned=self._unversioned)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse."""
        del data, if_version
        self._refuse(f"write {check_key(key)!r}")

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Refuse."""
        for key in keys:
            check_key(key)
        self._refuse("delete objects")

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """Refuse, with the first entry."""
        del start_after, delimiter
        self._sessions.check_open()
        raise UnsafeStorageError(
            f"{self!r} cannot list objects (below {prefix!r}): {_CAPABILITIES.reasons['listing']}.",
            prefix=prefix,
        )
        yield  # pragma: no cover - makes this an asynchronous generator

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Refuse."""
        del if_version
        self._refuse(f"copy {check_key(source)!r} to {check_key(target)!r}")

    async def sync(self) -> None:
        """Return at once: nothing is written."""
        self._sessions.check_open()

    def _refuse(self, what: str) -> NoReturn:
        self._sessions.check_open()
        raise UnsafeStorageError(f"{self!r} cannot {what}: {_ONLY_READS}.")

    def _url(self, key: str) -> URL:
        # Encoded here, once and for all: yarl would decode some of it again, such as ``%27``.
        return URL(f"{self._base}/{quote(check_key(key), safe='/')}", encoded=True)


def _check(answer: aiohttp.ClientResponse, key: str) -> None:
    if answer.status != 200:
        raise error_of(answer.status, answer.headers, key, answer.url.host or "")

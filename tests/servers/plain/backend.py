"""The client of the plain server: a storage with one connection a request."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlencode, urlsplit

from icechunk_async.errors import (
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageClosedError,
    StorageUnavailableError,
    ThrottledError,
    UnreachableError,
)
from icechunk_async.storage import (
    ABSENT,
    ByteRange,
    Capabilities,
    CommonPrefix,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    StorageDescription,
    SuffixRange,
    Version,
    check_key,
)
from icechunk_async.testing._http import MAX_LINE_BYTES, Message, read_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping


_ANY = "surrogatepass"  # a prefix may be any string


@asynccontextmanager
async def open_plain(url: str, *, endpoint: str) -> AsyncIterator[PlainStorage]:
    """Open ``plain://space`` on the server at ``endpoint``."""
    storage = PlainStorage(url, endpoint)
    try:
        yield storage
    finally:
        storage.is_closed = True


@dataclass
class PlainStorage:
    """Contracts are those of a storage."""

    url: str
    endpoint: str = field(repr=False)
    is_closed: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return Capabilities()

    @property
    def description(self) -> StorageDescription:
        """Where it is."""
        return StorageDescription(self.url, {"endpoint": self.endpoint})

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read; what the server cannot express as a range is read as the first byte."""
        headers, is_empty = {}, byte_range == SuffixRange(0)
        match byte_range:
            case ByteRange(start, stop):
                is_empty = start == stop
                # HTTP has no empty range: one byte is read for it, and dropped.
                last = "" if stop is None else max(start, stop - 1)
                headers["Range"] = f"bytes={start}-{last}"
            case SuffixRange(length):
                headers["Range"] = f"bytes=-{max(1, length)}"
            case None:
                pass
        reply = await self._ask("GET", key, headers)
        return _retrieved(reply, b"" if is_empty or reply.status == 416 else reply.body)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read what is new."""
        reply = await self._ask("GET", key, {"If-None-Match": version.token})
        return None if reply.status == 304 else _retrieved(reply, reply.body)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        headers = {}
        if if_version is ABSENT:
            headers["If-None-Match"] = "*"
        elif isinstance(if_version, Version):
            headers["If-Match"] = if_version.token
        reply = await self._ask("PUT", key, headers, bytes(data), expected=if_version)
        return Version(reply.header("etag") or "")

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete, all at once: all or nothing."""
        doomed = [check_key(key) for key in keys]
        self._check_open()
        try:
            body = json.dumps(doomed).encode()
            await self._ask("POST", body=body, query={"delete": "1"})
        except StorageUnavailableError as error:
            return [DeleteFailure(key, error) for key in doomed]
        return []

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List, page by page."""
        after = start_after or ""
        while True:
            query = {"list": "1", "prefix": prefix, "start-after": after}
            if delimiter:
                query["delimiter"] = delimiter
            reply = await self._ask("GET", query=query)
            page = json.loads(reply.body)
            for name, size, written in page:
                if size < 0:
                    yield CommonPrefix(name)
                else:
                    yield ObjectInfo(name, size, datetime.fromisoformat(written))
            self._check_open()
            if not page:
                return
            after = page[-1][0]

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy."""
        headers = {"X-Copy-Source": self._path(source)}
        if if_version is not None:
            headers["X-Copy-If-Match"] = if_version.token
        reply = await self._ask("PUT", target, headers, expected=if_version, about=source)
        return Version(reply.header("etag") or "")

    async def sync(self) -> None:
        """Return: what was acknowledged is stored."""
        self._check_open()

    def _path(self, key: str) -> str:
        return f"{self._space}/{quote(check_key(key))}"

    @property
    def _space(self) -> str:
        return f"/{self.url.removeprefix('plain://')}"

    def _check_open(self) -> None:
        if self.is_closed:
            raise StorageClosedError(f"{self.url!r} was used after its 'async with' block ended.")

    async def _ask(
        self,
        method: str,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        query: Mapping[str, str] | None = None,
        expected: Expected = None,
        about: str | None = None,
    ) -> Message:
        """Send a request; answer its response, or raise what it means for the key."""
        path = (
            f"{self._space}?{urlencode(query or {}, errors=_ANY)}"
            if key is None
            else self._path(key)
        )
        about = about or key or path
        self._check_open()
        lines = [f"{method} {path} HTTP/1.1", "Host: plain", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        try:
            reply = await self._exchange(method, head.encode() + body)
        except ConnectionRefusedError as error:
            raise UnreachableError(f"{about!r}: nobody listens at {self.endpoint}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _unheard(method, f"{about!r}: no answer came") from error
        self._check_open()
        match reply.status:
            case 404:
                raise ObjectNotFoundError(f"There is no object {about!r}.", key=about)
            case 412:
                raise PreconditionFailedError(
                    f"{about!r} is not at {expected}.", key=about, expected=expected
                )
            case 429 | 503:
                seconds = float(reply.header("retry-after") or 0)
                raise ThrottledError(f"{about!r}: slow down", retry_after_seconds=seconds)
            case status if status >= 500:
                raise _unheard(method, f"{about!r}: the server failed with {status}")
            case _:
                return reply

    async def _exchange(self, method: str, request: bytes) -> Message:
        parts = urlsplit(self.endpoint)
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port, limit=MAX_LINE_BYTES
        )
        try:
            writer.write(request)
            await writer.drain()
            return await read_response(reader, method)
        finally:
            # Not closed in order: a request that was cancelled must not wait for a server that is
            # silent.
            writer.transport.abort()


def _unheard(method: str, sentence: str) -> StorageUnavailableError | OutcomeUnknownError:
    # Reads and deletions can be asked again; a write may have landed.
    return OutcomeUnknownError(sentence) if method == "PUT" else StorageUnavailableError(sentence)


def _retrieved(reply: Message, data: bytes) -> Retrieved:
    return Retrieved(
        data,
        Version(reply.header("etag") or ""),
        int(reply.header("x-size") or 0),
        datetime.fromisoformat(reply.header("x-written") or ""),
    )

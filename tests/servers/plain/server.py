"""A small object server over HTTP: conditional writes, ranges, pages of listings.

``PUT`` and ``GET`` of ``/space/key``; ``GET /space?list=1&prefix=...`` answers a page as JSON;
``POST /space?delete=1`` deletes the keys in its body; a ``PUT`` with ``X-Copy-Source`` copies.
What it holds outlives a restart.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

from icechunk_async.testing._http import MAX_LINE_BYTES, Message, read_request, read_request_head
from icechunk_async.testing._serving import ServerThread
from tests.servers.whole_repository import Location

PAGE = 1000


@dataclass(frozen=True)
class Stored:
    """One object."""

    data: bytes
    etag: str
    written: str


class PlainServer:
    """Serves within an ``async with`` block, on a separate thread."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self._numbers = count(1)
        self._listening = ServerThread(self._connection, limit_bytes=MAX_LINE_BYTES)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._listening.port is not None
        return self._listening.port

    def location(self, endpoint: str) -> Location:
        """Return an empty place."""
        return Location(f"plain://{uuid4()}", {"endpoint": endpoint})

    async def restart(self) -> None:
        """End and begin again, with the same objects."""
        await self._listening.__aexit__()
        await self._listening.__aenter__()

    async def __aenter__(self) -> Self:
        await self._listening.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listening.__aexit__()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await read_request_head(reader)) is not None:
                request = await read_request(reader, head)
                writer.write(self._answer(request))
                await writer.drain()
                if request.ends_connection:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone

    def _answer(self, request: Message) -> bytes:
        # No await in here: the look and the write are one step.
        url = urlsplit(request.target)
        path = unquote(url.path)
        fields = parse_qs(url.query, errors="surrogatepass")
        query = {name: values[0] for name, values in fields.items()}
        if "list" in query:
            return _response(200, json.dumps(self._page(path, query)).encode())
        found = self.objects.get(path)
        match request.method:
            case "GET":
                return _read(request, found)
            case "PUT":
                return self._write(request, path, found)
            case "POST" if "delete" in query:
                for key in json.loads(request.body):
                    self.objects.pop(f"{path}/{key}", None)
                return _response(204)
            case _:
                return _response(405)

    def _write(self, request: Message, path: str, found: Stored | None) -> bytes:
        expected = request.header("if-match")
        if expected is not None and (found is None or found.etag != expected):
            return _response(412)
        if request.header("if-none-match") == "*" and found is not None:
            return _response(412)
        data, source = request.body, request.header("x-copy-source")
        if source is not None:
            original = self.objects.get(unquote(source))
            if original is None:
                return _response(404)
            if request.header("x-copy-if-match") not in (None, original.etag):
                return _response(412)
            data = original.data
        stored = Stored(data, f'"{next(self._numbers)}"', datetime.now(UTC).isoformat())
        self.objects[path] = stored
        return _response(200, headers={"ETag": stored.etag})

    def _page(self, space: str, query: dict[str, str]) -> list[tuple[str, int, str]]:
        """Return keys or groups with size and time; a group has size -1."""
        prefix, start_after = query.get("prefix", ""), query.get("start-after", "")
        entries: dict[str, tuple[int, str]] = {}
        for path in sorted(self.objects):
            key = path.removeprefix(f"{space}/")
            if key == path or not key.startswith(prefix):
                continue
            cut = key.find("/", len(prefix)) if "delimiter" in query else -1
            name = key if cut < 0 else key[: cut + 1]
            if name > start_after:
                stored = self.objects[path]
                entries[name] = (len(stored.data), stored.written) if cut < 0 else (-1, "")
        return [(name, *rest) for name, rest in list(entries.items())[:PAGE]]


def _read(request: Message, found: Stored | None) -> bytes:
    if found is None:
        return _response(404)
    headers = {"ETag": found.etag, "X-Written": found.written, "X-Size": str(len(found.data))}
    if request.header("if-none-match") == found.etag:
        return _response(304, headers=headers)
    data, asked = found.data, request.header("range")
    if asked is None:
        return _response(200, data, headers)
    first, last = asked.removeprefix("bytes=").split("-")
    start = int(first) if first else max(0, len(data) - int(last))
    stop = int(last) + 1 if first and last else len(data)
    if start >= len(data):
        return _response(416, headers=headers)
    return _response(206, data[start:stop], headers)


def _response(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Plain", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body

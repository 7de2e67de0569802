"""Reads of the HTTP backend keep every promise of the contract.

It cannot write, so objects are put, listed and deleted in memory, and a web server offers them:
each ``get`` of the suite goes through the backend, everything else through the memory behind it.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote
from uuid import uuid4

import pytest

pytest.importorskip("aiohttp", reason="the driver of the HTTP backend is not installed")

from aiohttp import web

from icechunk_async.errors import ObjectNotFoundError
from icechunk_async.storage import (
    ByteRange,
    Retrieved,
    StorageDescription,
    SuffixRange,
    Version,
    open_storage,
)
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async_memory import forget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import RangeRequest, Storage


class TestHTTP(StorageConformance):
    """Reads through a complete server on a separate loop."""

    @pytest.fixture
    def server(self) -> Iterator[tuple[str, str]]:
        """Run a server of fresh memory; answer the URLs of both."""
        memory = f"memory://{uuid4()}"
        with _Serving(memory) as url:
            yield memory, url
        forget(memory)

    @pytest.fixture
    async def storage(self, server: tuple[str, str]) -> AsyncIterator[Storage]:
        """Open both sides of the server as one storage."""
        memory, url = server
        async with _opened(StorageDescription(memory, {"url": url})) as storage:
            yield storage

    @staticmethod
    def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
        """Open both sides again."""
        return _opened(description)


class _BothSides(WrappedStorage):
    """Memory, but for reading, which the server's answers do.

    Both call versions the same: the server's ETag is the quoted version of the memory.
    """

    def __init__(self, memory: Storage, http: Storage, description: StorageDescription) -> None:
        super().__init__(memory)
        self._http = http
        self._description = description

    @property
    def description(self) -> StorageDescription:
        """Memory and server."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read through the server."""
        return _unquoted(await self._http.get(key, byte_range))

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read through the server."""
        found = await self._http.get_if_changed(key, Version(f'"{version.token}"'))
        return None if found is None else _unquoted(found)


def _unquoted(found: Retrieved) -> Retrieved:
    version = Version(found.version.token.strip('"'))
    return Retrieved(found.data, version, found.size_bytes, found.last_modified)


@asynccontextmanager
async def _opened(description: StorageDescription) -> AsyncIterator[Storage]:
    url = description.options["url"]
    assert isinstance(url, str)
    async with open_storage(description.url) as memory, open_storage(url) as http:
        yield _BothSides(memory, http, description)


class _Serving:
    """A web server of a memory storage on a thread."""

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._url = ""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(60)
        return self._url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with open_storage(self._memory) as memory:

            async def answer(request: web.BaseRequest) -> web.StreamResponse:
                return await _answer(memory, request)

            runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self._url = f"http://{host}:{port}/some%20where"
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()


async def _answer(memory: Storage, request: web.BaseRequest) -> web.Response:
    key = unquote(request.rel_url.raw_path).removeprefix("/some where/")
    byte_range = _requested(request.headers.get("Range"))
    try:
        found = await memory.get(key, byte_range)
    except ObjectNotFoundError:
        return web.Response(status=404)
    headers = {"ETag": f'"{found.version.token}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    size = found.size_bytes
    if byte_range is None:
        return web.Response(body=bytes(found.data), headers=headers)
    if not found.data:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
    start = size - len(found.data)
    if isinstance(byte_range, ByteRange):
        start = byte_range.start
    headers["Content-Range"] = f"bytes {start}-{start + len(found.data) - 1}/{size}"
    return web.Response(status=206, body=bytes(found.data), headers=headers)


def _requested(header: str | None) -> RangeRequest:
    if header is None:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return SuffixRange(int(last))
    return ByteRange(int(first), int(last) + 1 if last else None)

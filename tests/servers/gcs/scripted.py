"""The server within the test's own loop, told what to do with the next requests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from tests.servers.gcs.json_api.server import Server
from tests.servers.gcs.json_api.state import State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    type Step = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

__all__ = ["Scripted", "scripted"]


class Scripted:
    """A server with one bucket, ``bucket``; steps stand for the next requests that they match."""

    def __init__(self) -> None:
        """Begin with an empty bucket and no steps."""
        self.state = State()
        self.state.create_bucket("bucket")
        self.server = Server(self.state, rewrite_bytes=1 << 20)
        self.steps: list[tuple[str, Step]] = []
        self.seen: list[str] = []
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Take the first step that is meant for this method, or answer as always."""
        self.seen.append(f"{request.method} {request.raw_path}")
        for index, (method, step) in enumerate(self.steps):
            if method == request.method:
                del self.steps[index]
                return await step(request)
        return await self.server.handle(request)

    def lose_reply(self, method: str) -> None:
        """Carry the next such request out, and break the connection instead of answering."""

        async def step(request: web.BaseRequest) -> web.StreamResponse:
            await self.server.handle(request)
            return _break(request)

        self.steps.append((method, step))

    def lose_request(self, method: str) -> None:
        """Break the connection of the next such request; nothing is carried out."""

        async def step(request: web.BaseRequest) -> web.StreamResponse:
            return _break(request)

        self.steps.append((method, step))

    def answer(
        self, method: str, status: int, *, applied: bool = False, body: str = "", **headers: str
    ) -> None:
        """Return the next such request with a status, carried out or not."""

        async def step(request: web.BaseRequest) -> web.StreamResponse:
            if applied:
                await self.server.handle(request)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(status=status, text=body, headers=named)

        self.steps.append((method, step))

    def truncate(self, method: str) -> None:
        """Return the next such request, but break off in the middle of the body."""

        async def step(request: web.BaseRequest) -> web.StreamResponse:
            reply = await self.server.handle(request)
            assert isinstance(reply.body, bytes)
            broken = web.StreamResponse(status=reply.status, headers=reply.headers)
            broken.content_length = len(reply.body)
            await broken.prepare(request)
            await broken.write(reply.body[: len(reply.body) // 2])
            return _break(request)

        self.steps.append((method, step))


def _break(request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport is not None
    # A reset and no end of the stream, which HTTP could take for the end of a body.
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    """Serve on a free port for the length of the block."""
    script = Scripted()
    runner = web.ServerRunner(web.Server(script.handle), access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield script
    finally:
        await runner.cleanup()

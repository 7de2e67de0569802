"""A web server on loopback whose every answer a test decides."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    type Handler = Callable[[Any], Awaitable[web.StreamResponse]]

__all__ = ["drop", "serving", "silent"]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve ``handler`` on a free port; answer the server's URL, without a slash at its end."""
    runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def drop(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@contextmanager
def silent() -> Iterator[str]:
    """Let connections be made, and never answer on them; answer the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"

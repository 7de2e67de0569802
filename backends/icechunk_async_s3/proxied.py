"""HTTP/1.1 to one server through a proxy, by aiohttp: it knows how to ask proxies for a way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from icechunk_async_s3.direct import PIECE_BYTES, pieces

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

    from aiohttp import ClientResponse

    type Body = bytes | memoryview

__all__ = ["ProxiedClient"]

_KEEP_ALIVE_SECONDS: Final = 12.0


class ProxiedClient:
    """The connections of one loop to one server; see `DirectClient`."""

    def __init__(
        self,
        origin: str,
        proxy: str,
        tls: ssl.SSLContext | None,
        *,
        connect_seconds: float | None,
        silence_seconds: float | None,
    ) -> None:
        """Open nothing yet; ``origin`` is the server's URL without a path."""
        self._origin = origin
        self._proxy = proxy
        connector = aiohttp.TCPConnector(
            limit=0,  # the budget of the repository counts requests
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            ssl=tls or True,
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Content-Type", "Accept", "Accept-Encoding", "User-Agent"),
            timeout=aiohttp.ClientTimeout(sock_connect=connect_seconds, sock_read=silence_seconds),
        )
        # aiohttp would repeat a write, and the second reply would be taken for the first.
        self._http._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._http.closed

    async def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
        into: memoryview | None,
    ) -> tuple[int, Mapping[str, str], Body]:
        """Send a request once; see `DirectClient.exchange`."""
        async with self._http.request(
            method,
            URL(self._origin + target, encoded=True),
            headers=headers,
            data=_body_to_send(body) if method in ("PUT", "POST") else None,
            allow_redirects=False,  # the signature is for this host, and not for another's eyes
            proxy=self._proxy,
        ) as response:
            return response.status, response.headers, await _receive(response, into)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


def _body_to_send(body: Body) -> bytes | AsyncIterator[Body]:
    """Return a body for aiohttp; a large one in pieces, so that other tasks run in between."""
    return bytes(body) if len(body) <= PIECE_BYTES else _pieces(memoryview(body))


async def _pieces(view: memoryview) -> AsyncIterator[Body]:
    for piece in pieces(view):
        yield piece


async def _receive(response: ClientResponse, into: memoryview | None) -> Body:
    """Return the body of a reply: ``into``, filled, if it is a part of exactly that length."""
    if into is None or response.status != 206 or response.content_length != len(into):
        return await response.read()
    filled = 0
    async for piece, _ in response.content.iter_chunks():
        into[filled : filled + len(piece)] = piece
        filled += len(piece)
    # aiohttp raises if a connection ends early, and reads no more than the announced length.
    assert filled == len(into)
    return into

"""The two ways to a bucket on one event loop: aiobotocore's client and a plain HTTP session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from icechunk_async_s3.routes import find_route
from icechunk_async_s3.stock import Stock, given_keys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async_s3.keys import KeySource
    from icechunk_async_s3.options import Options
    from icechunk_async_s3.routes import Route

__all__ = ["Connection", "Wiring", "connect", "prepare", "rewire"]

_KEEP_ALIVE_SECONDS: Final = 12.0


@dataclass(frozen=True, slots=True)
class Wiring:
    """What one loop needs before its first request."""

    route: Route
    keys: KeySource
    stock: Stock


@dataclass(frozen=True, slots=True)
class Connection:
    """A wiring with the HTTP session of its loop."""

    wiring: Wiring
    http: aiohttp.ClientSession


def prepare(options: Options, bucket: str) -> Wiring:
    """Find out where the bucket is and whose requests these are; reads files.

    Not to be called on an event loop, but used on one.

    Raises:
        InvalidInputError: botocore cannot make sense of an option or of the AWS configuration.
    """
    given = given_keys(options)
    stock = Stock(options, bucket, given)
    return Wiring(find_route(options, bucket, stock), given or stock.chain(), stock)


def rewire(route: Route, options: Options, bucket: str) -> Wiring | None:
    """Return the same for another loop, at once; None where the usual chain has to be searched."""
    given = given_keys(options)
    return None if given is None else Wiring(route, given, Stock(options, bucket, given))


async def connect(wiring: Wiring, options: Options) -> AsyncGenerator[Connection]:
    """Return the one connection of the running loop, and close it when the generator is closed.

    A loop that ends closes its asynchronous generators, and so also the sockets of a storage that
    is open longer than the loop runs.
    """
    connector = aiohttp.TCPConnector(
        limit=0,  # the budget of the repository counts requests
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        ssl=wiring.route.tls or True,
    )
    http = aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Content-Type", "Accept", "Accept-Encoding", "User-Agent"),
        timeout=aiohttp.ClientTimeout(
            sock_connect=options.connect_timeout_seconds or None,
            sock_read=options.network_stream_timeout_seconds or None,
        ),
    )
    # aiohttp would send a write again, and the second answer would be taken for the first.
    http._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        yield Connection(wiring, http)
    finally:
        try:
            await http.close()
        finally:
            await wiring.stock.close()

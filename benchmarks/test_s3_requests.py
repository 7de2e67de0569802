"""Processor time of one small request to S3: the stock client beside our own path.

The server on the other end of loopback is a process of its own that answers every request alike,
so that what is measured is the client.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from icechunk_async._concurrency import bounded_map
from icechunk_async.storage import open_storage
from icechunk_async_s3.options import make_options
from icechunk_async_s3.wiring import prepare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

REQUESTS: Final = 2000
AT_A_TIME: Final = 32
BODY: Final = bytes(1024)

SERVER: Final = """
import asyncio
ANSWER = (b'HTTP/1.1 200 OK\\r\\nETag: "0123"\\r\\nContent-Length: 1024\\r\\n'
          b'Last-Modified: Sat, 01 Nov 2025 00:00:00 GMT\\r\\n\\r\\n' + bytes(1024))
WRITTEN = b'HTTP/1.1 200 OK\\r\\nETag: "0123"\\r\\nContent-Length: 0\\r\\n\\r\\n'
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            if b"100-continue" in head:
                writer.write(b"HTTP/1.1 100 Continue\\r\\n\\r\\n")
            if head.startswith(b"PUT"):
                size = head.lower().partition(b"content-length:")[2].partition(b"\\r\\n")[0]
                await reader.readexactly(int(size))
            writer.write(WRITTEN if head.startswith(b"PUT") else ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def server() -> Iterator[str]:
    """Run a server that answers everything alike; answer where."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def measure(one: Callable[[int], Awaitable[object]]) -> float:
    """Answer the microseconds of processor time that a request costs this process."""
    await bounded_map(one, range(AT_A_TIME * 4), limit=AT_A_TIME)
    began = time.process_time()
    await bounded_map(one, range(REQUESTS), limit=AT_A_TIME)
    return (time.process_time() - began) / REQUESTS * 1e6


async def stock(endpoint: str, method: str) -> float:
    """Measure aiobotocore's own operations."""
    options = make_options(None, {"endpoint_url": endpoint, "allow_http": True, **KEYS})
    wiring = await asyncio.to_thread(prepare, options, "bucket")

    async def get(number: int) -> bytes:
        answer: Any = await wiring.client.get_object(Bucket="bucket", Key=f"chunks/{number}")
        async with answer["Body"] as body:
            data: bytes = await body.read()
            return data

    async def put(number: int) -> None:
        await wiring.client.put_object(Bucket="bucket", Key=f"chunks/{number}", Body=BODY)

    try:
        return await measure(get if method == "get" else put)
    finally:
        await wiring.manager.__aexit__(None, None, None)


async def ours(endpoint: str, method: str) -> float:
    """Measure the storage."""
    options: dict[str, Any] = {"endpoint_url": endpoint, "allow_http": True, **KEYS}
    async with open_storage("s3://bucket", **options) as storage:

        async def get(number: int) -> object:
            return await storage.get(f"chunks/{number}")

        async def put(number: int) -> object:
            return await storage.put(f"chunks/{number}", BODY)

        return await measure(get if method == "get" else put)


KEYS: Final = {"access_key_id": "id", "secret_access_key": "secret"}


@pytest.mark.parametrize("client", [stock, ours])
@pytest.mark.parametrize("method", ["get", "put"])
def test_processor_time_of_a_small_request(
    benchmark: BenchmarkFixture, client: Callable[[str, str], Awaitable[float]], method: str
) -> None:
    """Microseconds for 1 KiB, 32 at a time, with signatures, without TLS."""
    costs: list[float] = []

    def run() -> None:
        with server() as endpoint:
            costs.append(asyncio.run(_cost(client, endpoint, method)))

    benchmark.pedantic(run, rounds=3, iterations=1)
    benchmark.extra_info["cpu_microseconds_per_request"] = min(costs)


async def _cost(
    client: Callable[[str, str], Awaitable[float]], endpoint: str, method: str
) -> float:
    return await client(endpoint, method)

"""A server of S3's protocol in memory, in a separate process, with configurable latency.

``with s3_server() as server:`` starts it. It serves some ten thousand small requests a second, so
that the server does not limit the figures. Besides a port without latency it has others that delay
the bytes in both directions, as from a distant region. Opening a connection takes one round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.certificates import AUTHORITY, SERVER, make_certificates
from benchmarks.s3_objects import Objects, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KEYS", "S3Server", "s3_server"]

KEYS: Final = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "not-a-secret-key"}
WIRES: Final[dict[str, tuple[float, float]]] = {
    "near": (0.0, 0.0),
    "20 ms": (0.020, 0.0),
    "50 ms": (0.040, 0.020),
    "50-300 ms": (0.050, 0.250),
}
"""Seconds of a round trip, and of its jitter."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens."""

    ports: dict[str, int]
    """By wire; ``tls`` is near and encrypted."""
    certificate: str
    """File of the certificate that clients of ``tls`` must trust."""

    def endpoint(self, wire: str = "near") -> str:
        """Return the URL at the near end of a wire."""
        scheme = "https" if wire == "tls" else "http"
        host = "localhost" if wire == "tls" else "127.0.0.1"
        return f"{scheme}://{host}:{self.ports[wire]}"

    def counts(self) -> dict[str, int]:
        """Return how often each operation was asked for since the last time."""
        with urllib.request.urlopen(f"{self.endpoint()}/-/counts") as reply:  # noqa: S310 -- ours
            found: dict[str, int] = json.load(reply)
            return found

    def forget_large(self) -> None:
        """Delete objects of a megabyte and more, so that others can have their memory."""
        urllib.request.urlopen(f"{self.endpoint()}/-/forget").close()  # noqa: S310 -- ours


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        command = [sys.executable, "-m", "benchmarks.s3_server", f"{folder}/{SERVER}"]
        root = Path(__file__).parents[1]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
            try:
                assert process.stdout is not None
                yield S3Server(json.loads(process.stdout.readline()), f"{folder}/{AUTHORITY}")
            finally:
                process.terminate()


class _Connection(asyncio.Protocol):
    """Takes requests apart; delays what comes in and what goes out."""

    def __init__(self, objects: Objects, wire: tuple[float, float]) -> None:
        self._objects = objects
        self._round_trip, self._jitter = wire
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._opened = self._arrival = self._departure = 0.0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # The handshake of TCP, which this machine does at once.
        self._opened = self._loop.time() + self._round_trip

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if not self._round_trip:
            self._take(data)
            return
        # The first request follows the handshake.
        sent = max(self._opened, self._loop.time())
        # Never before what was sent earlier: jitter must not reorder the bytes of a stream.
        self._arrival = max(self._arrival, sent + self._half())
        self._loop.call_at(self._arrival, self._take, data)

    def _half(self) -> float:
        jitter = self._jitter * random.random()  # noqa: S311 -- delays, not secrets
        return (self._round_trip + jitter) / 2

    def _send(self, data: bytes | memoryview) -> None:
        if self._transport is None:
            return
        if not self._round_trip:
            self._transport.write(data)
            return
        self._departure = max(self._departure, self._loop.time() + self._half())
        self._loop.call_at(self._departure, self._depart, data)

    def _depart(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if self._head is None and not self._take_head():
                return
            assert self._head is not None
            method, target, headers = self._head
            size = int(headers.get("content-length", "0"))
            if len(self._buffer) < size:
                return
            # Through a view: a slice of the buffer would copy a body of megabytes twice. Its one
            # copy is let go of before the buffer is cut, which a view that is held would forbid.
            body = bytes(memoryview(self._buffer)[:size])
            del self._buffer[:size]
            self._head = None
            self._reply(method, self._answer(method, target, headers, body))

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *rest = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, target, _ = first.split(" ")
        headers = {}
        for line in rest:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self._head = method, target, headers
        if "expect" in headers:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        if target == "/-/counts":
            counts = json.dumps(self._objects.counts).encode()
            self._objects.counts.clear()
            return Reply("200 OK", counts)
        if target == "/-/forget":
            self._objects.forget_large()
            return Reply("200 OK")
        # SDKs send bodies in chunks of their own (aws-chunked) with a checksum at the end.
        if "x-amz-decoded-content-length" in headers:
            body = _unchunked(body)
        return self._objects.answer(method, target, headers, body)

    def _reply(self, method: str, reply: Reply) -> None:
        head = f"HTTP/1.1 {reply.status}\r\nServer: bench\r\n{reply.headers}"
        size = len(reply.body)
        # A reply to HEAD has the length of a body that does not follow.
        if method == "HEAD" and "X-Length: " in head:
            head = head.replace("X-Length: ", "Content-Length: ")
        elif not reply.status.startswith(("204", "304")):
            head += f"Content-Length: {size}\r\n"
        encoded = f"{head}\r\n".encode("latin-1")
        # One packet for a small reply; to join a large one would copy it.
        if size < 65536:
            self._send(encoded + bytes(reply.body))
        else:
            self._send(encoded)
            self._send(reply.body)


def _unchunked(body: bytes) -> bytes:
    """Return the contents of a body sent in chunks, each with a signature or a checksum."""
    parts: list[bytes] = []
    place = 0
    while True:
        end = body.index(b"\r\n", place)
        size = int(body[place:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 4 + size


async def _serve(certificate: str) -> None:
    import ssl  # noqa: PLC0415 -- only in the server

    loop = asyncio.get_running_loop()
    objects = Objects()
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate)
    ports = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, wire in {**WIRES, "tls": (0.0, 0.0)}.items():
            server = await loop.create_server(
                lambda wire=wire: _Connection(objects, wire),
                "127.0.0.1",
                0,
                backlog=1024,
                ssl=secure if name == "tls" else None,
            )
            await stack.enter_async_context(server)
            ports[name] = server.sockets[0].getsockname()[1]
        # After all ports listen: who reads the line may connect.
        sys.stdout.write(json.dumps(ports) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(sys.argv[1]))
    else:
        uvloop.run(_serve(sys.argv[1]))

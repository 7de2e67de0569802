"""Requests over connections that are kept, and replies that are malformed, hostile or late."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.errors import TLSError
from icechunk_async.storage import open_storage
from icechunk_async_s3.direct import BrokenReplyError, DirectClient, NotConnectedError
from icechunk_async_s3.failures import not_sent
from icechunk_async_s3.options import place_of
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MIB = 1 << 20
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Server:
    """A server that sends the same reply to each request."""

    def __init__(self) -> None:
        """Say that there is nothing."""
        self.pieces = [EMPTY]
        """Sent one after the other, each by itself."""
        self.reads = True
        """Whether bodies are read before the answer."""
        self.then_closes = False
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.gone = asyncio.Event()
        self.asked = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.asked.set()
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if self.reads:
                    self.bodies.append(await reader.readexactly(int(length or b"0")))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.then_closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.open -= 1
            self.gone.set()


@asynccontextmanager
async def connected(
    server: Server, *, silence_seconds: float | None = 60
) -> AsyncIterator[DirectClient]:
    """Yield a client of a server."""
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = DirectClient(
            "127.0.0.1", port, None, connect_seconds=60, silence_seconds=silence_seconds
        )
        try:
            yield client
        finally:
            await client.close()


async def get(
    client: DirectClient, into: memoryview | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes | memoryview]:
    """Ask for something."""
    return await client.exchange(method, "/bucket/key", {"host": "there"}, b"", into)


def replied(body: bytes, *headers: str, status: int = 200) -> bytes:
    """Return a reply with a length."""
    lines = "".join(f"{it}\r\n" for it in headers)
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(*chunks: bytes) -> bytes:
    """Return a reply in chunks, with an extension and a trailer."""
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(it), it) for it in chunks)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + body + b"0\r\nTrailer: x\r\n\r\n"


async def test_requests_that_follow_share_a_connection_and_those_at_once_do_not() -> None:
    """No more are opened than there are requests at the same time, and each is used again."""
    server = Server()
    async with connected(server) as client:
        for _ in range(3):
            await client.exchange(
                "PUT", "/k?a=b", {"host": "h", "content-length": "4"}, b"body", None
            )
        assert server.connections == 1
        assert server.heads == [b"PUT /k?a=b HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\n"] * 3
        assert server.bodies == [b"body"] * 3
        await asyncio.gather(*(get(client) for _ in range(5)))
        await asyncio.gather(*(get(client) for _ in range(5)))
        assert server.connections == 5


async def test_a_small_request_is_one_call_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body go together, and the reply is one more."""
    server = Server()
    async with connected(server) as client:
        await get(client)
        (line,) = client._lines
        sent: list[bytes] = []
        monkeypatch.setattr(line, "_transport", _Counting(line._transport, sent))
        await client.exchange("PUT", "/k", {"content-length": "4"}, b"body", None)
    assert len(sent) == 1


class _Counting:
    """A transport whose writes are kept."""

    def __init__(self, transport: Any, sent: list[bytes]) -> None:
        self._transport = transport
        self._sent = sent

    def write(self, data: bytes) -> None:
        self._sent.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (replied(b"some bytes", "ETag: 1"), b"some bytes"),
        (chunked(b"some", b" ", b"bytes"), b"some bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + replied(b"ten bytes!"), b"ten bytes!"),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 304 No\r\nContent-Length: 10\r\n\r\n", b""),
        (chunked(), b""),
    ],
    ids=["length", "chunked", "interim", "204", "304", "no chunks"],
)
async def test_replies_however_they_come(reply: bytes, body: bytes, cut: int) -> None:
    """Cut anywhere; the connection can be used afterwards."""
    server = Server()
    server.pieces = [reply[at : at + cut] for at in range(0, len(reply), cut)]
    async with connected(server) as client:
        assert (await get(client))[2] == body
        assert (await get(client))[2] == body
        assert server.connections == 1


async def test_names_of_headers_are_lower_and_the_first_counts() -> None:
    """As the callers look for them."""
    server = Server()
    server.pieces = [replied(b"", "ETag:  first \t", "Etag: second", "X-Empty:")]
    async with connected(server) as client:
        status, headers, _ = await get(client)
    assert status == 200
    assert headers == {"etag": "first", "x-empty": "", "content-length": "0"}


async def test_the_reply_to_head_has_no_body() -> None:
    """The length in its headers is that of the object."""
    server = Server()
    server.pieces = [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"]
    async with connected(server) as client:
        assert (await get(client, method="HEAD"))[2] == b""
        await get(client, method="HEAD")
        assert server.connections == 1


@pytest.mark.parametrize("size", [10, 9 * MIB])
async def test_a_part_is_received_where_it_is_wanted(size: int) -> None:
    """Only one of exactly that length; anything else is left to itself."""
    body = bytes(range(256)) * (size // 256) + b"?" * (size % 256)
    server = Server()
    server.pieces = [replied(body, status=206)]
    async with connected(server) as client:
        into = memoryview(bytearray(size))
        assert (await get(client, into))[2] is into
        assert into == body
        other = memoryview(bytearray(size + 1))
        assert (await get(client, other))[2] == body
        assert bytes(other).count(0) == size + 1
        server.pieces = [replied(body)]
        kept = memoryview(bytearray(size))
        assert (await get(client, kept))[2] == body
        assert bytes(kept).count(0) == size


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n12",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"a" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"x" * 100_000,
    ],
)
async def test_what_is_no_reply_ends_the_connection(reply: bytes) -> None:
    """It is refused, and nothing else comes over that connection."""
    server = Server()
    server.pieces = [reply]
    async with connected(server) as client:
        with pytest.raises(BrokenReplyError):
            await get(client)
        server.pieces = [EMPTY]
        await get(client)
        assert server.connections == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n123456789",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        # A length is no reason to take memory.
        b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999999999\r\n\r\n12345",
    ],
)
async def test_a_reply_that_ends_early_is_none(reply: bytes) -> None:
    """It is never taken for the whole."""
    server = Server()
    server.pieces, server.then_closes = [reply], True
    async with connected(server) as client:
        with pytest.raises((BrokenReplyError, ConnectionError)):
            await get(client)


async def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    """As old servers do it."""
    server = Server()
    server.pieces, server.then_closes = [b"HTTP/1.0 200 OK\r\n\r\n", b"some ", b"bytes"], True
    async with connected(server) as client:
        assert (await get(client))[2] == b"some bytes"
        assert (await get(client))[2] == b"some bytes"
        assert server.connections == 2


@pytest.mark.parametrize(
    "reply",
    [
        replied(b"", "Connection: close"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        EMPTY + EMPTY,
    ],
    ids=["told", "old", "one too many"],
)
async def test_a_connection_that_is_not_to_be_used_again_is_not(reply: bytes) -> None:
    """A reply that nobody asked for would be taken for the next one."""
    server = Server()
    server.pieces = [reply]
    async with connected(server) as client:
        await get(client)
        await get(client)
        assert server.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used() -> None:
    """Neither is one over which something came unasked."""
    server = Server()
    server.then_closes = True
    async with connected(server) as client:
        await get(client)
        await server.gone.wait()
        while client._lines:  # noqa: ASYNC110 -- nothing else tells
            await asyncio.sleep(0)
        server.then_closes = False
        await get(client)
        assert server.connections == 2


async def test_an_early_answer_ends_a_large_body() -> None:
    """The rest is not sent, and the connection is not used again."""
    server = Server()
    server.reads = False
    server.pieces = [replied(b"no", status=403)]
    body = bytes(64 * MIB)
    async with connected(server) as client:
        headers = {"content-length": str(len(body))}
        status, _, said = await client.exchange("PUT", "/k", headers, body, None)
        assert (status, said) == (403, b"no")
        assert not client._idle


async def test_a_cancelled_request_gives_up_its_connection() -> None:
    """Its late reply must not be taken for that of the next request."""
    server = Server()
    server.pieces = []
    async with connected(server) as client:
        asking = asyncio.create_task(get(client))
        await server.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.gone.wait()
        server.pieces = [EMPTY]
        await get(client)
        assert server.connections == 2


async def test_silence_is_a_timeout_that_one_timer_finds() -> None:
    """However many requests follow one another."""
    server = Server()
    async with connected(server, silence_seconds=0.05) as client:
        await get(client)
        (line,) = client._lines
        timer = line._timer
        await get(client)
        assert line._timer is timer
        server.pieces = [b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"]
        with pytest.raises(TimeoutError):
            await get(client)
        assert not line.is_free


async def test_closing_breaks_what_is_on_its_way() -> None:
    """And closes every connection."""
    server = Server()
    async with connected(server) as client:
        await asyncio.gather(get(client), get(client))
        server.pieces = []
        server.asked.clear()
        asking = asyncio.create_task(get(client))
        await server.asked.wait()
        await client.close()
        with pytest.raises(BrokenReplyError):
            await asking
        assert not client._lines
        with pytest.raises(RuntimeError):
            await get(client)


async def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sees the end."""
    monkeypatch.setattr("icechunk_async_s3.direct._KEEP_ALIVE_SECONDS", 0.01)
    server = Server()
    async with connected(server) as client:
        await get(client)
        await server.gone.wait()
        assert not client._idle


async def test_the_end_of_a_line_in_a_header_is_refused() -> None:
    """It would be another header, or another request."""
    server = Server()
    async with connected(server) as client:
        for value in ("a\r\nb: c", "a\nb", "a\rb", "a\0"):
            with pytest.raises(ValueError, match="end of a line"):
                await client.exchange("GET", "/k", {"x": value}, b"", None)
    assert server.connections == 0


async def test_over_tls_it_is_the_same(tmp_path: Path) -> None:
    """Whole objects and parts, of which large ones come in many records."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate, is not installed")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    await asyncio.to_thread(
        subprocess.run,
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
            ),
            *("-nodes", "-days", "1", "-subj", "/CN=own", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server, body = Server(), bytes(range(256)) * (MIB // 64)
    async with await asyncio.start_server(server, "127.0.0.1", 0, ssl=context) as listening:
        client = DirectClient(
            "127.0.0.1",
            listening.sockets[0].getsockname()[1],
            ssl.create_default_context(cafile=certificate),
            connect_seconds=60,
            silence_seconds=60,
        )
        headers = {"content-length": str(len(body))}
        await client.exchange("PUT", "/k", headers, body, None)
        server.pieces = [replied(body)]
        assert (await get(client))[2] == body
        server.pieces = [replied(body, status=206)]
        into = memoryview(bytearray(len(body)))
        assert (await get(client, into))[2] is into
        assert into == body
        await client.close()
    assert server.bodies[0] == body
    assert server.connections == 1


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak something else than TLS."""
    writer.write(b"220 mail.test ready, and not to be taken for a record of TLS\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("answer", ["refused", "unknown name", "no TLS"])
async def test_why_there_is_no_connection(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sent, so that it may be tried again."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        host, tls = "127.0.0.1", None
        kind: type[OSError] = ConnectionRefusedError
        if answer == "unknown name":
            host, kind = "nowhere.invalid", socket.gaierror

            async def unknown(*_: Any, **__: Any) -> list[Any]:
                raise socket.gaierror(-2, "unknown")

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
        async with await asyncio.start_server(_greet, "127.0.0.1", 0) as listening:
            if answer == "no TLS":
                port, kind = listening.sockets[0].getsockname()[1], ssl.SSLError
                tls = ssl.create_default_context()
            client = DirectClient(host, port, tls, connect_seconds=60, silence_seconds=60)
            with pytest.raises(NotConnectedError) as raised:
                await get(client)
            await client.close()
    assert isinstance(raised.value.cause, kind)


async def test_addresses_are_asked_for_once_and_taken_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By connections that are opened at the same time."""
    server = Server()
    asked: list[str] = []
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]

        async def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        client = DirectClient("a.test", port, None, connect_seconds=60, silence_seconds=60)
        await asyncio.gather(*(get(client) for _ in range(5)))
        await client.close()
    assert server.connections == 5
    assert asked == ["a.test"]


async def test_a_proxy_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then requests go through aiohttp, in the form that proxies expect; large bodies as well."""
    seen: list[tuple[str, str, int]] = []
    body = bytes(range(256)) * 4096

    async def answer(request: web.Request) -> web.Response:
        sent = await request.read()
        seen.append((request.method, request.raw_path, len(sent)))
        if request.method == "PUT":
            return web.Response(headers={"etag": '"1"'})
        return web.Response(body=body, headers={"etag": '"1"'})

    async with serving(answer) as url:
        monkeypatch.setenv("http_proxy", url)
        options = {"endpoint_url": "http://far.test", "region": "us-east-1", "allow_http": True}
        async with open_storage("s3://bucket/p", anonymous=True, **options) as storage:
            await storage.put("key", body)
            assert (await storage.get("key")).data == body
    assert seen == [
        ("PUT", "http://far.test/bucket/p/key", len(body)),
        ("GET", "http://far.test/bucket/p/key", 0),
    ]


def test_what_tls_refuses_is_said() -> None:
    """A certificate of nobody that is trusted is named as such."""
    cause = ssl.SSLCertVerificationError(1, "bad")
    error = not_sent(
        NotConnectedError("there", 443, cause), "reading in", place_of("s3://bucket/p")
    )
    assert isinstance(error, TLSError)

"""The fault proxy does to a client what its plan says, and passes on everything else."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import pytest

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.testing._http import (
    MAX_LINE_BYTES,
    Message,
    read_request,
    read_request_head,
    read_response,
)
from icechunk_async.testing._serving import ServerThread
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import (
    S3_SLOW_DOWN,
    Delay,
    Fault,
    FaultPlan,
    Hang,
    Reset,
    Respond,
    Rule,
    SlowBody,
    Truncate,
)
from tests.helpers import cancelled_when, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RESET_OR_END = (ConnectionError, asyncio.IncompleteReadError)


class Echo:
    """A server that answers what it was sent, and remembers it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.connections = 0
        self.listening = ServerThread(self._serve, limit_bytes=MAX_LINE_BYTES)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self.listening.port is not None
        return self.listening.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(*RESET_OR_END):
            while (head := await read_request_head(reader)) is not None:
                request = await read_request(reader, head)
                self.seen.append(request.head + request.body)
                writer.write(self._answer(request))
                if request.ends_connection or request.target == "/close":
                    return

    def _answer(self, request: Message) -> bytes:
        body = request.head + request.body
        match request.target:
            case "/chunked":
                parts = b"".join(b"%x;x=1\r\n%s\r\n" % (len(it), it) for it in (b"one", b"three"))
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                return head + parts + b"0\r\nTrailer: 1\r\n\r\n"
            case "/interim":
                head = b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\n"
            case "/nothing":
                return b"HTTP/1.1 304 Not Modified\r\nETag: 1\r\n\r\n"
            case "/nonsense":
                return b"HTTP/1.1 200 OK\r\nContent-Length: NaN\r\n\r\n"
            case _:
                head = b"HTTP/1.1 200 OK\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        return head if request.method == "HEAD" else head + body


@pytest.fixture
async def server() -> AsyncIterator[Echo]:
    """Run the server for the test."""
    echo = Echo()
    async with echo.listening:
        yield echo


@pytest.fixture
async def proxy(server: Echo) -> AsyncIterator[FaultProxy]:
    """Stand before the server, without faults."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()

    async def ask(
        self, method: str = "GET", target: str = "/x", body: bytes = b"", headers: str = ""
    ) -> Message:
        """Send a request and read its response."""
        head = f"{method} {target} HTTP/1.1\r\nHost: a.example\r\n{headers}"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await read_response(self.reader, method)


async def ask(proxy: FaultProxy, method: str = "GET", target: str = "/x") -> Message:
    """Send one request on a new connection."""
    async with Client(proxy.port) as client:
        return await client.ask(method, target)


def only(fault: Fault, **conditions: object) -> FaultPlan:
    """Return a plan of one rule."""
    return FaultPlan((Rule(fault, **conditions),))  # type: ignore[arg-type]


async def test_requests_pass_byte_for_byte(server: Echo, proxy: FaultProxy) -> None:
    """Request line, raw path, case and order of headers, and the framing of bodies."""
    request = (
        b"PUT /a%2Fb/%F0%9F%98%80+c?x=%20&y HTTP/1.1\r\nhOST: bucket.example:9\r\nX-Amz: \xe9 1\r\n"
        b"Content-Length: 5\r\n\r\nhello"
    )
    chunked = (
        b"PUT /x HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;chunk-signature=abc\r\nhello\r\n0\r\nx-amz-trailer: 1\r\n\r\n"
    )
    async with Client(proxy.port) as client:
        for sent in (request, chunked):
            client.writer.write(sent)
            response = await read_response(client.reader, "PUT")
            assert server.seen[-1] == response.body == sent
    assert [entry.outcome for entry in proxy.log] == ["passed"] * 2
    assert proxy.log[0].target == "/a%2Fb/%F0%9F%98%80+c?x=%20&y"
    assert ("host", "bucket.example:9") in proxy.log[0].headers
    assert "bucket.example" not in repr(proxy.log), "headers may hold credentials"


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/chunked", b"3;x=1\r\none\r\n5;x=1\r\nthree\r\n0\r\nTrailer: 1\r\n\r\n"),
        ("HEAD", "/x", b""),
        ("GET", "/nothing", b""),
    ],
)
async def test_responses_of_every_framing_pass(
    proxy: FaultProxy, method: str, target: str, body: bytes
) -> None:
    """The connection stays usable after each."""
    async with Client(proxy.port) as client:
        for _ in range(3):
            assert (await client.ask(method, target)).body == body
        assert (await client.ask("GET", "/interim")).status == 200


async def test_a_client_that_waits_to_be_told_to_continue_is_told(
    server: Echo, proxy: FaultProxy
) -> None:
    """S3 clients send large bodies only then."""
    async with Client(proxy.port) as client:
        client.writer.write(
            b"PUT /x HTTP/1.1\r\nHost: b\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        )
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"body")
        assert (await read_response(client.reader, "PUT")).status == 200
    assert server.seen[0].endswith(b"body")


async def test_a_connection_that_the_server_ended_is_not_used_again(
    server: Echo, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's connection stays open."""
    heard_by: set[threading.Thread | None] = set()
    feed_eof = asyncio.StreamReader.feed_eof

    def note(self: asyncio.StreamReader) -> None:
        feed_eof(self)
        heard_by.add(threading.current_thread())

    monkeypatch.setattr(asyncio.StreamReader, "feed_eof", note)
    async with Client(proxy.port) as client:
        assert (await client.ask()).status == 200
        assert (await client.ask(target="/close")).status == 200
        await until(lambda: proxy._listening._thread in heard_by)
        assert (await client.ask()).status == 200
    assert server.connections == 2


@pytest.mark.parametrize(
    ("fault", "outcome", "reaches_server"),
    [
        (Reset(applied=False), "reset before", False),
        (Reset(applied=True), "reset after", True),
        (Truncate(), "truncated", True),
    ],
)
async def test_an_answer_that_does_not_come_whole(
    server: Echo, proxy: FaultProxy, fault: Fault, outcome: str, *, reaches_server: bool
) -> None:
    """The client gets an error, the server the request or not; the next request is fine."""
    proxy.use(only(fault, first=1))
    with pytest.raises(RESET_OR_END):
        await ask(proxy, "PUT")
    assert len(server.seen) == reaches_server
    assert proxy.log[0].outcome == outcome
    assert (await ask(proxy, "PUT")).status == 200


async def test_a_truncated_body_is_announced_whole(proxy: FaultProxy) -> None:
    """Its headers come, then half of it, then an orderly end: only counting finds out."""
    proxy.use(only(Truncate()))
    async with Client(proxy.port) as client:
        client.writer.write(b"GET /x HTTP/1.1\r\nHost: b\r\n\r\n")
        received = await client.reader.read()
    head, _, body = received.partition(b"\r\n\r\n")
    announced = int(head.rpartition(b": ")[2])
    assert len(body) == announced // 2


async def test_a_busy_service_answers_with_what_was_given(server: Echo, proxy: FaultProxy) -> None:
    """Status, body and headers; nothing of it reaches the server; HEAD gets no body."""
    proxy.use(only(S3_SLOW_DOWN))
    async with Client(proxy.port) as client:
        response = await client.ask("PUT", body=b"x" * 1000)
        assert (response.status, response.body) == (503, S3_SLOW_DOWN.body)
        assert response.header("retry-after") == "0"
        assert response.header("content-type") == "application/xml"
        assert (await client.ask("HEAD")).body == b""
        proxy.use(only(Respond(429, b"{}")))
        assert (await client.ask()).status == 429
    assert server.seen == []
    assert [entry.outcome for entry in proxy.log] == ["answered"] * 3


@pytest.mark.parametrize("applied", [False, True])
async def test_a_request_that_hangs_ends_with_its_client(
    server: Echo, proxy: FaultProxy, *, applied: bool
) -> None:
    """Until then nothing comes."""
    proxy.use(only(Hang(applied)))
    await cancelled_when(ask(proxy), lambda: len(proxy.log) > 0)
    assert len(server.seen) == applied
    assert proxy.log[0].outcome == ("hung after" if applied else "hung before")


async def test_slow_bodies_come_whole(proxy: FaultProxy) -> None:
    """Their headers at once, the rest over the time that was asked for."""
    proxy.use(only(SlowBody(200)))
    began = time.monotonic()
    async with Client(proxy.port) as client:
        client.writer.write(b"GET /x HTTP/1.1\r\nHost: b\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        assert time.monotonic() - began < 100
    proxy.use(only(SlowBody(0.5)))
    began = time.monotonic()
    assert b"GET /x" in (await ask(proxy, target="/x")).body
    assert time.monotonic() - began > 0.5


async def test_latency_jitter_and_delays_add_up(proxy: FaultProxy) -> None:
    """Every request takes longer, and one of them still longer."""
    proxy.use(FaultPlan((Rule(Delay(0.1), path="/late"),), latency_seconds=0.05))
    began = time.monotonic()
    await ask(proxy)
    assert time.monotonic() - began >= 0.05
    await ask(proxy, target="/late")
    assert time.monotonic() - began >= 0.2
    assert [entry.outcome for entry in proxy.log] == ["passed", "delayed"]


async def test_rules_match_method_and_path_and_count(proxy: FaultProxy) -> None:
    """The first rule that matches decides; one that is used up does no longer match."""
    rules = (
        Rule(Respond(500), method="PUT", path=r"/refs/", first=2),
        Rule(Respond(503), method="PUT|POST"),
    )
    proxy.use(FaultPlan(rules))
    asked = [("GET", "/refs/a"), *[("PUT", "/refs/a")] * 3, ("POST", "/b"), ("DELETE", "/b")]
    found = [(await ask(proxy, *it)).status for it in asked]
    assert found == [200, 500, 500, 503, 503, 200]
    proxy.forget()
    proxy.use(FaultPlan(rules))
    assert (await ask(proxy, "PUT", "/refs/a")).status == 500, "a plan begins from its beginning"
    assert [entry.status for entry in proxy.log] == [500]


async def test_equal_seeds_make_equal_faults(proxy: FaultProxy) -> None:
    """Other seeds make other faults, about as often as the rate says."""

    async def outcomes(seed: int) -> list[str]:
        proxy.forget()
        proxy.use(FaultPlan((Rule(Respond(503), rate=0.3),), seed=seed))
        async with Client(proxy.port) as client:
            for _ in range(200):
                await client.ask()
        return [entry.outcome for entry in proxy.log]

    first, again, other = await outcomes(1), await outcomes(1), await outcomes(2)
    assert first == again != other
    assert 30 < first.count("answered") < 90
    with pytest.raises(ValueError, match="a rate is from 0 to 1"):
        Rule(Truncate(), rate=2)


async def test_a_server_that_is_gone_is_a_reset(server: Echo, proxy: FaultProxy) -> None:
    """The proxy uses it again when it is back."""
    await server.listening.__aexit__()
    with pytest.raises(RESET_OR_END):
        await ask(proxy)
    await server.listening.__aenter__()
    assert (await ask(proxy)).status == 200
    assert [entry.outcome for entry in proxy.log] == ["server gone", "passed"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /x HTTP/2\r\n\r\n",
        b"GET /x HTTP/1.1\r\nno header\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n",
        b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"GET /nonsense HTTP/1.1\r\nHost: b\r\n\r\n",
    ],
)
async def test_malformed_http_is_an_error(proxy: FaultProxy, request_bytes: bytes) -> None:
    """From either side: a guess would only move the trouble."""
    async with Client(proxy.port) as client:
        client.writer.write(request_bytes)
        response = await read_response(client.reader, "GET")
    assert response.status == 502
    assert b"the fault proxy cannot pass this on" in response.body


async def test_a_request_cut_short_never_reaches_the_server(
    server: Echo, proxy: FaultProxy
) -> None:
    """A client that was cancelled while it sent has not written."""
    async with Client(proxy.port) as client:
        client.writer.write(b"PUT /x HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        client.writer.write_eof()
        with pytest.raises(RESET_OR_END):
            await client.reader.readexactly(1)
    assert server.seen == []


async def test_large_bodies_and_many_connections_pass(proxy: FaultProxy) -> None:
    """32 MB in both directions, and 64 clients at once."""
    body = bytes(range(256)) * (32 * 4096)
    async with Client(proxy.port) as client:
        assert (await client.ask("PUT", body=body)).body.endswith(body)
    answers = await bounded_map(lambda _: ask(proxy), range(64), limit=64)
    assert {answer.status for answer in answers} == {200}


def _ours() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name == "server-thread"]


async def test_everything_ends_with_the_block(server: Echo) -> None:
    """Hanging clients are let go, the port is closed, the thread has ended."""
    before = len(_ours())
    async with FaultProxy("127.0.0.1", server.port, only(Hang(applied=True))) as proxy:
        assert len(_ours()) == before + 1
        client = Client(proxy.port)
        async with client:
            client.writer.write(b"GET /x HTTP/1.1\r\n\r\n")
            await until(lambda: bool(proxy.log))
            await proxy.__aexit__()
            with pytest.raises(RESET_OR_END):
                await client.reader.readexactly(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
    assert len(_ours()) == before


@pytest.mark.parametrize("turns", range(6))
async def test_everything_ends_when_the_block_is_cancelled(server: Echo, turns: int) -> None:
    """While it starts, while it runs, while it ends."""
    before = len(_ours())

    async def work() -> None:
        async with FaultProxy("127.0.0.1", server.port) as proxy:
            await ask(proxy)

    task = asyncio.create_task(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # and again, while it ends
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(_ours()) == before


def test_it_serves_clients_without_an_event_loop() -> None:
    """Blocking libraries, and loops of other threads."""
    echo = Echo()
    with echo.listening, FaultProxy("127.0.0.1", echo.port) as proxy:
        assert asyncio.run(ask(proxy)).status == 200
        assert proxy.url == f"http://127.0.0.1:{proxy.port}"

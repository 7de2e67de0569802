"""A proxy that fails on purpose, in the same way for each seed.

It stands between a client and a server, so that the real client library meets the faults::

    plan = FaultPlan(rules=(Rule(Reset(applied=True), method="PUT", first=1),))
    async with FaultProxy("127.0.0.1", server_port, plan) as proxy:
        async with open_storage("s3://bucket/prefix", endpoint=proxy.url) as storage:
            ...
    assert [it.outcome for it in proxy.log] == ["reset after", ...]

Requests are passed on byte for byte, ``Host`` and percent-encoding included, so that signatures
stay valid. Plain HTTP/1.1 only.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING, Final, Self, assert_never

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.testing._http import (
    MAX_LINE_BYTES,
    FramingError,
    Message,
    read_request,
    read_request_head,
    read_response,
)
from icechunk_async.testing._serving import HOST, ServerThread
from icechunk_async.testing.proxy_plan import (
    Chooser,
    Delay,
    FaultPlan,
    Hang,
    Reset,
    Respond,
    SlowBody,
    Truncate,
)

if TYPE_CHECKING:
    from icechunk_async.testing.proxy_plan import Fault

__all__ = ["FaultProxy", "LoggedRequest"]

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # linger for no time: close sends a reset
_PARTS: Final = 8


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One complete request that reached the proxy, and its outcome."""

    method: str
    target: str
    """Path and query, as they were sent."""
    outcome: str
    """``passed``, ``delayed``, ``answered``, ``reset before``, ``reset after``, ``hung before``,
    ``hung after``, ``truncated``, ``slow``, or ``server gone`` where the server itself gave no
    answer."""
    status: int | None
    """The status sent to the client, or that would have been; None if there was no reply."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Those of the request; names in lower case. They may hold credentials."""


class FaultProxy:
    """Passes requests on to one server, except those that the plan spoils.

    Runs on a separate thread and event loop, so that clients on any loop, or on none, can use it.
    It ends with its block, with every connection and the thread, also when the block is cancelled.
    """

    def __init__(self, target_host: str, target_port: int, plan: FaultPlan | None = None) -> None:
        """Proxy the server at ``target_host:target_port``; nothing is opened yet."""
        self._target = (target_host, target_port)
        self._chooser = Chooser(plan or FaultPlan())
        self._log: list[LoggedRequest] = []
        self._listening = ServerThread(self._connection, limit_bytes=MAX_LINE_BYTES)

    @property
    def host(self) -> str:
        """The address that clients connect to."""
        return HOST

    @property
    def port(self) -> int:
        """The port that clients connect to, known within the block."""
        assert self._listening.port is not None, "the proxy was not started"
        return self._listening.port

    @property
    def url(self) -> str:
        """The endpoint for clients: scheme, address and port."""
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> list[LoggedRequest]:
        """Requests so far, in the order in which they were settled."""
        return list(self._log)

    def use(self, plan: FaultPlan) -> None:
        """Follow another plan from the next request on, from its beginning."""
        self._chooser = Chooser(plan)

    def forget(self) -> None:
        """Begin a new log."""
        self._log = []

    def __enter__(self) -> Self:
        """Start; for tests without an event loop. Blocks until the port is open."""
        self._listening.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End every connection, and the thread. Blocks."""
        self._listening.__exit__(*error)

    async def __aenter__(self) -> Self:
        """Start, without blocking the loop.

        Cancellation: nothing is left running.
        """
        await self._listening.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End every connection, and the thread, also while being cancelled."""
        await self._listening.__aexit__(*error)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it, the server or a fault ends the connection."""
        server = _Server(self._target)
        try:
            while await self._exchange(reader, writer, server):
                pass
        except FramingError as error:
            text = f"the fault proxy cannot pass this on: {error}\n".encode()
            writer.write(_encode(Respond(502, text, (("Connection", "close"),)), "GET"))
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        finally:
            server.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: _Server
    ) -> bool:
        """Handle one request; return whether the connection stays open."""
        head = await read_request_head(reader)
        if head is None:
            return False
        # The server is asked once all of the request is here, and this client waits to be told.
        if (head.header("expect") or "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = await read_request(reader, head)
        # Once all of the request is here: the client has sent its body, as to a server that fails
        # then.
        choice = self._chooser.choose(request.method, request.target)
        if choice.delay_seconds:
            await asyncio.sleep(choice.delay_seconds)
        match choice.fault:
            case Respond() as answer:
                self._note(request, "answered", answer.status)
                writer.write(_encode(answer, request.method))
                await writer.drain()
                return not request.ends_connection
            case Reset(applied=False):
                self._note(request, "reset before", None)
                _reset(writer)
                return False
            case Hang(applied=False):
                self._note(request, "hung before", None)
                await reader.read(1)  # until the client gives up
                return False
            case Delay(seconds):
                await asyncio.sleep(seconds)
            case _:
                pass
        # From here on the server has carried the request out; faults above came before that.
        response = await self._ask(server, request, writer)
        if response is None:
            return False
        return await self._deliver(choice.fault, request, response, reader, writer)

    async def _ask(
        self, server: _Server, request: Message, writer: asyncio.StreamWriter
    ) -> Message | None:
        """Return the server's response, or end the connection as the server ended its side."""
        try:
            return await server.ask(request)
        except (OSError, asyncio.IncompleteReadError):
            self._note(request, "server gone", None)
            _reset(writer)
            return None

    async def _deliver(
        self,
        fault: Fault | None,
        request: Message,
        response: Message,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass the server's response on, or spoil it; return whether the connection stays open."""
        status, whole = response.status, response.head + response.body
        match fault:
            case None | Delay() | Respond():  # delayed, and answered, before the server was asked
                self._note(request, "passed" if fault is None else "delayed", status)
                writer.write(whole)
            case Reset():
                self._note(request, "reset after", status)
                _reset(writer)
                return False
            case Hang():
                self._note(request, "hung after", status)
                await reader.read(1)
                return False
            case Truncate():
                self._note(request, "truncated", status)
                kept = len(response.body) // 2
                # The head promises the whole length, so that the client can see that something is
                # missing.
                cut = len(response.head) + kept if response.body else len(response.head) // 2
                writer.write(whole[:cut])
                await writer.drain()
                return False
            case SlowBody(seconds):
                self._note(request, "slow", status)
                writer.write(response.head)
                step = max(1, -(-len(response.body) // _PARTS))
                for start in range(0, len(response.body), step):
                    await asyncio.sleep(seconds / _PARTS)
                    writer.write(response.body[start : start + step])
                    await writer.drain()
            case _:
                assert_never(fault)
        await writer.drain()
        return not (request.ends_connection or response.ends_connection)

    def _note(self, request: Message, outcome: str, status: int | None) -> None:
        entry = LoggedRequest(request.method, request.target, outcome, status, request.headers)
        self._log.append(entry)


class _Server:
    """The connection to the server that belongs to one connection of a client."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: Message) -> Message:
        """Pass a request on and answer the response."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server ended it while it was not used
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._target, limit=MAX_LINE_BYTES)
        reader, writer = self._streams
        writer.write(request.head + request.body)
        await writer.drain()
        response = await read_response(reader, request.method)
        if response.ends_connection:
            self.close()
        return response

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _encode(answer: Respond, method: str) -> bytes:
    lines = [f"HTTP/1.1 {answer.status} On purpose", f"Content-Length: {len(answer.body)}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    # A body after the reply to a HEAD would be taken for the next reply.
    return head if method == "HEAD" else head + answer.body


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):  # the client may have gone already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()

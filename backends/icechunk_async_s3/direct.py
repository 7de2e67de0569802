"""HTTP/1.1 to one server over connections that are kept: the way of every request without a proxy.

A small request takes aiohttp six times the processor time that this module takes, since this one
needs few of its features. It sends a request once, and receives what it is answered, into the
caller's memory where there is room for it. What the server sends is untrusted: lengths are checked
before they are believed, memory grows with what came, and anything malformed ends the connection.
"""

from __future__ import annotations

import asyncio
import re
import socket
from typing import TYPE_CHECKING, Any, Final

import aiohappyeyeballs

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping

    type Body = bytes | memoryview

__all__ = ["PIECE_BYTES", "BrokenReplyError", "DirectClient", "NotConnectedError", "pieces"]

_KEEP_ALIVE_SECONDS: Final = 12.0
_FIRST_ADDRESS_SECONDS: Final = 0.25
"""After this time without a connection the next address is tried as well."""
_RESOLVED_SECONDS: Final = 10.0
PIECE_BYTES: Final = 256 * 1024
"""A larger body is sent in such pieces, so that other tasks run in between."""
_SCRATCH_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 4 * 1024 * 1024
_LONGEST_HEAD: Final = 64 * 1024
_LONGEST_LINE: Final = 4096
"""Of a line that announces a chunk."""
_MOST_INTERIM: Final = 16
"""Replies such as ``100 Continue`` before the one that counts."""

_STATUS: Final = re.compile(r"HTTP/1\.([01]) ([1-5]\d\d)(?: .*)?")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


class NotConnectedError(Exception):
    """No connection was made, so that nothing was sent; the cause says why."""

    def __init__(self, host: str, port: int, cause: OSError) -> None:
        """Keep where, and what the system or the TLS library said."""
        super().__init__(f"no connection to {host}:{port}")
        self.host = host
        self.port = port
        self.cause = cause


class BrokenReplyError(Exception):
    """The reply is malformed or incomplete."""

    def __init__(self, strerror: str) -> None:
        """Keep a description, without anything that the server sent."""
        super().__init__(strerror)
        self.strerror = strerror


class DirectClient:
    """The connections of one loop to one server."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        connect_seconds: float | None,
        silence_seconds: float | None,
    ) -> None:
        """Open nothing yet.

        Args:
            host: a name or an address, without brackets.
            port: of the server.
            tls: how to encrypt; None not to.
            connect_seconds: for how long to wait for a connection.
            silence_seconds: for how long nothing may come or go during a request.
        """
        self._host = host
        self._port = port
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._idle: list[_Line] = []
        """The one that was used last comes last."""
        self._lines: set[_Line] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._addresses: asyncio.Task[list[Any]] | None = None
        self._resolved_at = 0.0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        """Of all connections: it is emptied before another one is read."""
        self.closed = False

    async def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
        into: memoryview | None,
    ) -> tuple[int, dict[str, str], Body]:
        """Send a request once, and return status, headers and body of the reply.

        Args:
            method: the verb, in capitals.
            target: path and query, encoded.
            headers: all of them.
            body: sent after them; ``headers`` tell its length.
            into: where to put a body of status 206 of exactly that length; it is then returned.

        Returns:
            Names of headers are in lower case; of one that is repeated, the first.

        Raises:
            NotConnectedError: nothing was sent.
            BrokenReplyError: the server may have acted.
            TimeoutError: as that, after silence.
            OSError: as that.

        Cancellation: the connection is given up; the server may have acted.
        """
        if self.closed:
            raise RuntimeError("Session is closed")
        head = _head(method, target, headers)
        line = self._take() or await self._connect()
        reply = await line.exchange(head, body, into, expects_body=method != "HEAD")
        if line.is_free:
            self._keep(line)
        else:
            line.abort()
        return reply

    async def close(self) -> None:
        """Close all connections, and break requests that are on their way."""
        self.closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._idle.clear()
        for line in list(self._lines):
            line.abort()
        # Sockets are closed by callbacks of the loop: of TLS, by one that another one adds.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _take(self) -> _Line | None:
        since = asyncio.get_running_loop().time() - _KEEP_ALIVE_SECONDS
        while self._idle:
            line = self._idle.pop()
            if line.is_free and line.active_at >= since:
                return line
            line.abort()
        return None

    def _keep(self, line: _Line) -> None:
        if self.closed:
            line.abort()
            return
        self._idle.append(line)
        if self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(_KEEP_ALIVE_SECONDS, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that nobody used for long."""
        since = loop.time() - _KEEP_ALIVE_SECONDS
        for line in self._idle:
            if line.active_at <= since:
                line.abort()
        self._idle = [it for it in self._idle if it.is_free]
        self._sweeping = None
        if self._idle:
            due = self._idle[0].active_at + _KEEP_ALIVE_SECONDS
            self._sweeping = loop.call_at(due, self._sweep, loop)

    async def _connect(self) -> _Line:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                sock = await aiohappyeyeballs.start_connection(  # pyright: ignore[reportUnknownMemberType]
                    await self._resolve(loop),
                    happy_eyeballs_delay=_FIRST_ADDRESS_SECONDS,
                    interleave=1,
                    loop=loop,
                )
                try:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    _, line = await loop.create_connection(
                        lambda: _Line(loop, self._scratch, self._silence_seconds, self._lines),
                        sock=sock,
                        ssl=self._tls,
                        server_hostname=None if self._tls is None else self._host.rstrip("."),
                    )
                except BaseException:
                    sock.close()
                    raise
        except OSError as error:  # a timeout and what TLS refuses among them
            raise NotConnectedError(self._host, self._port, error) from error
        if self.closed:
            line.abort()
            raise RuntimeError("Session is closed")
        return line

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        """Return the addresses of the server; several that ask share one answer."""
        if self._addresses is None or loop.time() - self._resolved_at > _RESOLVED_SECONDS:
            self._resolved_at = loop.time()
            self._addresses = loop.create_task(_addresses(loop, self._host, self._port))
            self._addresses.add_done_callback(_retrieve)
        asked = self._addresses
        try:
            found = await asyncio.shield(asked)
        except OSError:
            if self._addresses is asked:
                self._addresses = None  # the next one asks again
            raise
        found.append(found.pop(0))  # connections are spread over the addresses
        return list(found)


async def _addresses(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[Any]:
    try:  # what is an address already needs no thread
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def pieces(view: memoryview) -> Iterator[Body]:
    """Yield a large body in pieces.

    A connection that is given up still sends the bytes it holds, which must not change. So it gets
    copies of anything the owner may change after a cancellation: one piece at a time, copied just
    before it is sent and so still in the processor's cache.
    """
    is_fixed = isinstance(view.obj, bytes)
    for start in range(0, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        yield piece if is_fixed else bytes(piece)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody may be waiting for, so that the loop does not report it."""
    if future.done() and not future.cancelled():
        future.exception()


def _head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = f"{method} {target} HTTP/1.1\r\n{''.join(lines)}"
    ends = len(lines) + 1
    if text.count("\n") != ends or text.count("\r") != ends or "\0" in text:
        raise ValueError("A header that is to be sent contains the end of a line.")
    return f"{text}\r\n".encode()


class _Line(asyncio.BufferedProtocol):
    """One connection, which carries one request at a time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scratch: memoryview,
        silence_seconds: float | None,
        lines: set[_Line],
    ) -> None:
        self._loop = loop
        self._scratch = scratch
        self._silence_seconds = silence_seconds
        self._lines = lines
        """All of the client, this one among them while it is open."""
        self._transport: Any = None
        self._waiter: asyncio.Future[tuple[int, dict[str, str], Body]] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reply = _Reply(None, expects_body=False)
        self.active_at = loop.time()
        """When something came or went."""
        self._is_usable = True
        self._is_paused = False

    @property
    def is_free(self) -> bool:
        """Whether another request can be sent."""
        return self._is_usable and self._waiter is None

    async def exchange(
        self, head: bytes, body: Body, into: memoryview | None, *, expects_body: bool
    ) -> tuple[int, dict[str, str], Body]:
        """Send a request and return the reply."""
        waiter: asyncio.Future[tuple[int, dict[str, str], Body]] = self._loop.create_future()
        self._waiter = waiter
        self._reply = _Reply(into, expects_body=expects_body)
        self._touch()
        if self._silence_seconds is not None and self._timer is None:
            self._timer = self._loop.call_later(self._silence_seconds, self._check)
        try:
            if len(body) <= PIECE_BYTES:
                # One call of the system. The owner of the body may change it once this is
                # cancelled, and the transport may still hold it: so it is copied.
                self._transport.write(head + body)
            else:
                await self._send(head, memoryview(body), waiter)
            return await waiter
        except BaseException:
            self.abort()
            _retrieve(waiter)
            raise
        finally:
            self._waiter = None
            self._reply = _Reply(None, expects_body=False)  # the caller's memory is its own again

    async def _send(self, head: bytes, view: memoryview, waiter: asyncio.Future[Any]) -> None:
        """Send a large body; stop if the reply comes before its end."""
        self._transport.write(head)
        for piece in pieces(view):
            if waiter.done():
                self._is_usable = False  # the server takes what would follow for the rest
                return
            self._transport.write(piece)
            if self._is_paused:
                self._drained = self._loop.create_future()
                await self._drained
            else:
                await asyncio.sleep(0)
            self._touch()

    def abort(self) -> None:
        """Close the connection at once."""
        self._is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._lines.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_usable = False
        self._lines.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if exc is None and self._reply.ends_with_connection:
            self._finish()
        self._fail(exc or BrokenReplyError("the server closed the connection"))
        self._wake()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._touch()
        self._wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._reply.room() or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._touch()
        if self._waiter is None or self._waiter.done():
            self.abort()  # nobody asked
            return
        reply = self._reply
        try:
            if reply.room() is not None:
                reply.fill(nbytes)
            else:
                reply.feed(self._scratch[:nbytes])
        except BrokenReplyError as error:
            self._fail(error)
            self.abort()
            return
        if reply.is_complete:
            self._finish()

    def eof_received(self) -> None:
        """Have the transport closed, which ends a reply without a length."""

    def _finish(self) -> None:
        reply, waiter = self._reply, self._waiter
        # A server that answers before it has all would take the next request for the rest.
        self._is_usable = (
            self._is_usable and reply.keeps_alive and self._transport.get_write_buffer_size() == 0
        )
        if waiter is not None and not waiter.done():
            waiter.set_result((reply.status, reply.headers, reply.body()))
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._is_usable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def _touch(self) -> None:
        self.active_at = self._loop.time()

    def _check(self) -> None:
        """Give up after silence; there is one timer, however many requests follow one another."""
        self._timer = None
        if self._waiter is None or self._silence_seconds is None:
            return  # the next request begins another
        due = self.active_at + self._silence_seconds
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._check)
            return
        self._fail(TimeoutError())
        self.abort()


class _Reply:
    """A reply while it comes. Pure."""

    def __init__(self, into: memoryview | None, *, expects_body: bool) -> None:
        self._into = into
        self._expects_body = expects_body
        self._came = bytearray()
        """What was not taken apart yet."""
        self._step: Callable[[], bool] = self._take_head
        self._interim = 0
        self._left = 0
        """How much is still to come: of a body, or of one chunk."""
        self._blocks: list[bytearray] = []
        self._block: memoryview | None = None
        self._filled = 0
        """How much of the block that comes last."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keeps_alive = False
        self.ends_with_connection = False
        self.is_complete = False

    def feed(self, data: memoryview) -> None:
        """Take in what came.

        Raises:
            BrokenReplyError: it is malformed.
        """
        self._came += data
        while not self.is_complete and self._step():
            pass
        if self.is_complete and self._came:
            self.keeps_alive = False  # more than was asked for

    def room(self) -> memoryview | None:
        """Return where the next bytes of the body go; None if they are not known to be such."""
        return None if self._block is None else self._block[self._filled :]

    def fill(self, size: int) -> None:
        """Note the number of bytes that were put where there was room."""
        assert self._block is not None
        self._filled += size
        self._left -= size
        if self._filled == len(self._block):
            self._next_block()

    def body(self) -> Body:
        """Return the complete body."""
        if self._into is not None:
            return self._into
        return b"".join(self._blocks)

    def _take_head(self) -> bool:
        end = self._came.find(b"\r\n\r\n")
        if end > _LONGEST_HEAD or (end < 0 and len(self._came) > _LONGEST_HEAD):
            raise BrokenReplyError("the headers of the reply are too long")
        if end < 0:
            return False
        text = self._came[:end].decode("utf-8", "surrogateescape")
        del self._came[: end + 4]
        first, *lines = text.split("\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise BrokenReplyError("what the server sent is no reply of HTTP/1")
        self.status = int(status[2])
        if self.status < 200:
            self._interim += 1
            if self.status == 101 or self._interim > _MOST_INTERIM:
                raise BrokenReplyError("the server changed the protocol, or never replied")
            return True
        coding, length = self._take_headers(lines)
        said = self.headers.get("connection", "").lower()
        self.keeps_alive = status[1] == "1" and "close" not in said
        self._begin_body(coding, length)
        return not self.is_complete

    def _take_headers(self, lines: list[str]) -> tuple[str, int | None]:
        """Return the coding of the body and its length."""
        coding, length = "", None
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not _NAME.fullmatch(name):
                raise BrokenReplyError("a header of the reply is malformed")
            name, value = name.lower(), value.strip(" \t")
            if name == "content-length":
                if not _LENGTH.fullmatch(value) or length not in (None, int(value)):
                    raise BrokenReplyError("the reply tells no length, or several")
                length = int(value)
            elif name == "transfer-encoding":
                coding += value.lower()
            self.headers.setdefault(name, value)
        if coding not in ("", "chunked"):
            raise BrokenReplyError("the coding of the reply is unknown")
        if coding and length is not None:
            raise BrokenReplyError("the reply tells two lengths")
        return coding, length

    def _begin_body(self, coding: str, length: int | None) -> None:
        wanted, self._into = self._into, None
        if not self._expects_body or self.status in (204, 304) or length == 0:
            self.is_complete = True
        elif coding:
            self._step = self._take_chunk_line
        elif length is None:
            self.ends_with_connection, self.keeps_alive = True, False
            self._step = self._take_rest
        else:
            self._left = length
            if wanted is not None and self.status == 206 and length == len(wanted):
                self._into = self._block = wanted
            else:
                self._next_block()
            self._step = self._take_known

    def _take_known(self) -> bool:
        """Move what came into the blocks; what follows is received there."""
        block = self._block
        if block is None or not self._came:
            return False
        size = min(len(self._came), len(block) - self._filled)
        block[self._filled : self._filled + size] = self._came[:size]
        del self._came[:size]
        self.fill(size)
        return True

    def _next_block(self) -> None:
        """Make room, but no more than is likely to be filled, whatever length was told."""
        self._block, self._filled = None, 0
        if self._left == 0:
            self.is_complete = True
            return
        block = bytearray(min(self._left, _BLOCK_BYTES))
        self._blocks.append(block)
        self._block = memoryview(block)

    def _take_rest(self) -> bool:
        self._blocks.append(self._came)
        self._came = bytearray()
        return False

    def _take_chunk_line(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise BrokenReplyError("a chunk of the reply is malformed")
        self._left = int(found[1], 16)
        self._step = self._take_chunk if self._left else self._take_trailer
        return True

    def _take_chunk(self) -> bool:
        size = min(len(self._came), self._left)
        if not self._blocks:
            self._blocks.append(bytearray())
        self._blocks[0] += self._came[:size]
        del self._came[:size]
        self._left -= size
        if self._left:
            return False
        self._step = self._take_end_of_chunk
        return True

    def _take_end_of_chunk(self) -> bool:
        if len(self._came) < 2:
            return False
        if not self._came.startswith(b"\r\n"):
            raise BrokenReplyError("a chunk of the reply is malformed")
        del self._came[:2]
        self._step = self._take_chunk_line
        return True

    def _take_trailer(self) -> bool:
        line = self._take_line()
        if line == b"":
            self.is_complete = True
        return line is not None

    def _take_line(self) -> bytes | None:
        end = self._came.find(b"\r\n")
        if end > _LONGEST_LINE or (end < 0 and len(self._came) > _LONGEST_LINE):
            raise BrokenReplyError("a chunk of the reply is malformed")
        if end < 0:
            return None
        line = bytes(self._came[:end])
        del self._came[: end + 2]
        return line

"""Framing of HTTP/1.1 messages, byte for byte: enough to pass them on unchanged.

Strict on purpose: framing that deviates from the standard (RFC 9112) is an error here, because a
guess would only move the failure to a less obvious place.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "MAX_LINE_BYTES",
    "FramingError",
    "Message",
    "read_request",
    "read_request_head",
    "read_response",
]

MAX_LINE_BYTES: Final = 1024 * 1024
"""The longest head of a message; what streams have to be opened with as their limit."""

_REQUEST_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.[01]")
_STATUS_LINE: Final = re.compile(r"HTTP/1\.[01] ([1-9][0-9]{2})(?: .*)?")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WITHOUT_BODY: Final = frozenset({204, 304})


class FramingError(Exception):
    """The bytes are not an HTTP/1.1 message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One request or response as it was on the wire."""

    head: bytes
    """First line and headers, with the empty line that ends them."""
    first_line: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, in their order."""
    body: bytes = b""
    """As framed: with the sizes of its chunks, where it is chunked."""
    ends_connection: bool = False
    """Whether the connection closes after this message."""

    @property
    def method(self) -> str:
        """The method of a request."""
        return self.first_line.split(" ")[0]

    @property
    def target(self) -> str:
        """The target of a request, as it was sent: path and query, percent-encoded."""
        return self.first_line.split(" ")[1]

    @property
    def status(self) -> int:
        """The status of a response."""
        return int(self.first_line.split(" ")[1])

    def header(self, name: str) -> str | None:
        """Return the value of a header that may be there once."""
        values = [value for other, value in self.headers if other == name]
        if len(set(values)) > 1:
            raise FramingError(f"the header {name!r} is there with several values: {values}")
        return values[0] if values else None


async def read_request_head(reader: asyncio.StreamReader) -> Message | None:
    """Read a request up to its body; None where the connection ends before it begins.

    Raises:
        FramingError: it is no request.
        asyncio.IncompleteReadError: the connection ended within it.
    """
    message = await _read_head(reader, at_start=True)
    if message is not None and not _REQUEST_LINE.fullmatch(message.first_line):
        raise FramingError(f"no request line: {message.first_line[:200]!r}")
    return message


async def read_request(reader: asyncio.StreamReader, head: Message) -> Message:
    """Read the body of a request, and return the whole request."""
    # A request without either has no body; a response without either ends with its connection.
    if head.header("transfer-encoding") is None and head.header("content-length") is None:
        return _whole(head, b"", ends=_closes(head))
    return _whole(head, await _read_body(reader, head), ends=_closes(head))


async def read_response(reader: asyncio.StreamReader, method: str) -> Message:
    """Read the final response to a request; interim ones (1xx) are left out.

    Raises:
        FramingError: it is no response.
        asyncio.IncompleteReadError: the connection ended before it, or within it.
    """
    while True:
        head = await _read_head(reader, at_start=False)
        assert head is not None  # only a request may be missing
        if not _STATUS_LINE.fullmatch(head.first_line):
            raise FramingError(f"no status line: {head.first_line[:200]!r}")
        if head.status >= 200:
            break
    # Their heads may name the length that the body would have.
    if method == "HEAD" or head.status in _WITHOUT_BODY:
        return _whole(head, b"", ends=_closes(head))
    framed = head.header("transfer-encoding") or head.header("content-length")
    if framed is None:
        return _whole(head, await reader.read(), ends=True)
    return _whole(head, await _read_body(reader, head), ends=_closes(head))


async def _read_head(reader: asyncio.StreamReader, *, at_start: bool) -> Message | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if at_start and not error.partial:
            return None
        raise
    except asyncio.LimitOverrunError as error:
        raise FramingError(f"a head of more than {MAX_LINE_BYTES} bytes") from error
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    return Message(head, first, tuple(_headers(lines)))


def _headers(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise FramingError(f"no header: {line[:200]!r}")
        yield name.lower(), value.strip(" \t")


async def _read_body(reader: asyncio.StreamReader, head: Message) -> bytes:
    encoding, length = head.header("transfer-encoding"), head.header("content-length")
    if encoding is not None:
        # Both headers at once is how requests are smuggled past proxies.
        if encoding.lower() != "chunked" or length is not None:
            raise FramingError(f"transfer encoding {encoding!r} with content length {length!r}")
        return await _read_chunks(reader)
    if length is None or not re.fullmatch(r"[0-9]+", length):
        raise FramingError(f"no content length: {length!r}")
    return await reader.readexactly(int(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while True:
        line = await reader.readuntil(b"\r\n")
        # Kept as it came, sizes and all: signatures of chunks stay valid.
        parts.append(line)
        digits = line[:-2].partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]+", digits):
            raise FramingError(f"no size of a chunk: {line[:200]!r}")
        size = int(digits, 16)
        if size == 0:
            break
        chunk = await reader.readexactly(size + 2)
        if not chunk.endswith(b"\r\n"):
            raise FramingError("a chunk is longer than its size")
        parts.append(chunk)
    while parts[-1] != b"\r\n":  # trailers, and the empty line that ends them
        parts.append(await reader.readuntil(b"\r\n"))
    return b"".join(parts)


def _whole(head: Message, body: bytes, *, ends: bool) -> Message:
    return Message(head.head, head.first_line, head.headers, body, ends)


def _closes(head: Message) -> bool:
    words = {
        word.strip().lower()
        for name, value in head.headers
        if name == "connection"
        for word in value.split(",")
    }
    old = "HTTP/1.0" in head.first_line and "keep-alive" not in words
    return "close" in words or old

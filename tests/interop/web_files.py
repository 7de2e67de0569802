"""Files on a web server of this process: ranges and preconditions as RFC 9110 has them."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["WebFile", "WebFiles", "web_files"]


@dataclass
class WebFile:
    """One file, and what the server says of it."""

    body: bytes
    etag: str | None = '"first"'
    modified: datetime | None = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


@dataclass
class WebFiles:
    """A server's files by path, decoded, and what it is like."""

    url: str
    files: dict[str, WebFile] = field(default_factory=dict[str, WebFile])
    ranges: bool = True
    asked: list[str] = field(default_factory=list[str])
    during: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Called with the path of each request, which is answered within the block."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.served = WebFiles(f"http://127.0.0.1:{self.server_port}")

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients leave when they have heard enough."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        with self.server.served.during(self.path):
            self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _answer(self, *, with_body: bool) -> None:
        served = self.server.served
        path = unquote(self.path.partition("?")[0])
        served.asked.append(f"{self.command} {path} {self.headers['Range']}")
        found = served.files.get(path)
        status, headers, body = (404, {}, b"") if found is None else self._found(found)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self, found: WebFile) -> tuple[int, dict[str, str], bytes]:
        ranges = self.server.served.ranges
        headers: dict[str, str] = {"Accept-Ranges": "bytes"} if ranges else {}
        if found.etag is not None:
            headers["ETag"] = found.etag
        if found.modified is not None:
            headers["Last-Modified"] = format_datetime(found.modified, usegmt=True)
        if not self._as_expected(found):
            return 412, headers, b""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        size = len(found.body)
        if match is None or not ranges:
            return 200, headers, found.body
        start, stop = int(match[1]), min(int(match[2] or size) + 1, size)
        if start >= size:
            return 416, {**headers, "Content-Range": f"bytes */{size}"}, b""
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, headers, found.body[start:stop]

    def _as_expected(self, found: WebFile) -> bool:
        wanted = self.headers["If-Match"]
        if wanted is not None:
            strong = found.etag is not None and not found.etag.startswith("W/")
            return strong and (found.etag or "").strip('"') == wanted.strip('"')
        limit = self.headers["If-Unmodified-Since"]
        if limit is None or found.modified is None:
            return True
        return found.modified <= parsedate_to_datetime(limit)


@contextmanager
def web_files() -> Iterator[WebFiles]:
    """Serve files on a free port of loopback until the block ends."""
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.served
        finally:
            server.shutdown()
            thread.join()

"""HTTP: which request is which operation, who may ask, and batches."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Final

from aiohttp import web

from tests.servers.gcs.json_api.asking import Ask
from tests.servers.gcs.json_api.objects import Objects
from tests.servers.gcs.json_api.replies import Refusal, json_reply
from tests.servers.gcs.json_api.uploads import Uploads, parse_document, split_multipart
from tests.servers.gcs.json_api.xml import XML

if TYPE_CHECKING:
    from tests.servers.gcs.json_api.state import State

__all__ = ["Server"]

_MOST_CALLS: Final = 100
"""Calls in one batch."""


class Server:
    """The API over one state."""

    def __init__(self, state: State, rewrite_bytes: int | None = None) -> None:
        """Serve ``state`` to everybody, until tokens are set."""
        self._objects = Objects(state, rewrite_bytes)
        self._uploads = Uploads(state)
        self._xml = XML(state)
        self._tokens: dict[str, str] | None = None
        """Bearer tokens and what each is: ``valid``, ``expired`` or ``denied``."""
        self.requests: list[str] = []

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Return one request."""
        plain = False
        try:
            ask = Ask.parse(request.method, request.raw_path)
            plain = ask.media and ask.method == "GET"
            if ask.segments[0] == "_test":
                return await self._control(ask, request)
            self.requests.append(f"{ask.method} {request.raw_path}")
            self._authorize(request.headers.get("Authorization"))
            match ask.segments:
                case ["batch", "storage", "v1"]:
                    return await self._batch(request)
                case ["upload", "storage", "v1", "b", bucket, "o"]:
                    return await self._uploads.handle(ask, bucket, request)
                case [bucket, *_] if bucket not in ("storage", "upload", "batch", "download"):
                    body = await request.content.read()
                    return self._xml.answer(ask, request.headers, body)
                case _:
                    body = await request.content.read()
                    return self._answer(ask, body, request.headers.get("Range"))
        except Refusal as refusal:
            return refusal.reply(plain=plain)

    def _answer(self, ask: Ask, body: bytes, byte_range: str | None) -> web.Response:
        """Return the reply to a request that is neither an upload nor a batch."""
        document = parse_document(body)
        match ask.method, ask.segments:
            case (("GET" | "POST"), ["storage", "v1", "b"]):
                return self._objects.buckets(ask, document)
            case (("GET" | "DELETE"), ["storage", "v1", "b", bucket]):
                return self._objects.bucket(ask, bucket)
            case "GET", ["storage", "v1", "b", bucket, "o"]:
                return self._objects.list(ask, bucket)
            case "GET", ["storage", "v1", "b", bucket, "o", name]:
                return self._objects.get(ask, bucket, name, byte_range)
            case "GET", ["download", "storage", "v1", "b", bucket, "o", name] if ask.media:
                return self._objects.get(ask, bucket, name, byte_range)
            case "DELETE", ["storage", "v1", "b", bucket, "o", name]:
                return self._objects.delete(ask, bucket, name)
            case "PATCH", ["storage", "v1", "b", bucket, "o", name]:
                return self._objects.patch(ask, bucket, name, document)
            case "POST", ["storage", "v1", "b", sb, "o", source, "copyTo", "b", tb, "o", target]:
                return self._objects.copy(ask, (sb, source), (tb, target), document)
            case "POST", ["storage", "v1", "b", sb, "o", source, "rewriteTo", "b", tb, "o", target]:
                return self._objects.rewrite(ask, (sb, source), (tb, target), document)
            case _:
                raise Refusal(501, "notImplemented", "This server does not know this operation.")

    def _authorize(self, header: str | None) -> None:
        if self._tokens is None:
            return
        if header is None:
            raise Refusal(401, "required", "Anonymous caller does not have storage access.")
        match self._tokens.get(header.removeprefix("Bearer ")):
            case "valid":
                return
            case "denied":
                raise Refusal(403, "forbidden", "The caller does not have storage access.")
            case _:
                raise Refusal(401, "authError", "Invalid Credentials")

    async def _control(self, ask: Ask, request: web.BaseRequest) -> web.Response:
        """Set which tokens are valid, or answer the requests that came so far."""
        match ask.method, ask.segments[1:]:
            case "POST", ["tokens"]:
                self._tokens = json.loads(await request.content.read())
            case "GET", ["requests"]:
                return json_reply(self.requests)
            case "DELETE", ["requests"]:
                self.requests.clear()
            case _:
                raise Refusal(404, "notFound", "There is no such control.")
        return json_reply({})

    async def _batch(self, request: web.BaseRequest) -> web.Response:
        # Google's own client ends lines of batches with LF; those of uploads, with CRLF.
        body = re.sub(rb"\r?\n", b"\r\n", await request.content.read())
        parts = split_multipart(request.headers.get("Content-Type", ""), "multipart/mixed", body)
        if len(parts) > _MOST_CALLS:
            raise Refusal(400, "invalid", f"A batch has at most {_MOST_CALLS} calls.")
        boundary = f"batch_{secrets.token_hex(8)}"
        answer: list[bytes] = []
        for headers, content in parts:
            identity = headers.get("content-id", "").strip("<>")
            answer.append(_section(boundary, identity, self._one_of_batch(content)))
        answer.append(f"--{boundary}--\r\n".encode())
        kind = f"multipart/mixed; boundary={boundary}"
        return web.Response(body=b"".join(answer), headers={"Content-Type": kind})

    def _one_of_batch(self, content: bytes) -> web.Response:
        lines, _, body = content.partition(b"\r\n\r\n")
        method, target, *_ = lines.decode("latin-1").split("\r\n")[0].split(" ")
        self.requests.append(f"{method} {target}")
        try:
            ask = Ask.parse(method, re.sub(r"^https?://[^/]+", "", target))
            if ask.media:
                return Refusal(400, "invalid", "Media cannot be part of a batch.").reply()
            return self._answer(ask, body, None)
        except Refusal as refusal:
            return refusal.reply()


def _section(boundary: str, identity: str, reply: web.Response) -> bytes:
    body = reply.body if isinstance(reply.body, bytes) else b""
    lines = [
        f"--{boundary}",
        "Content-Type: application/http",
        f"Content-ID: <response-{identity}>",
        "",
        f"HTTP/1.1 {reply.status} {reply.reason}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body + b"\r\n"

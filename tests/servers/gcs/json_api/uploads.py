"""The three ways to upload: media, multipart, resumable."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

from aiohttp import web

from tests.servers.gcs.json_api.asking import CONDITIONS, check_name
from tests.servers.gcs.json_api.objects import settings_of
from tests.servers.gcs.json_api.replies import Refusal, json_reply, object_resource, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.servers.gcs.json_api.asking import Ask
    from tests.servers.gcs.json_api.state import Conditions, State, StoredObject

__all__ = ["Uploads", "parse_document", "split_multipart"]

_QUANTUM: Final = 256 * 1024
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(slots=True)
class _Session:
    """A resumable upload: what was said when it began, and what has come so far."""

    bucket: str
    name: str
    settings: dict[str, Any]
    conditions: Conditions
    received: bytearray
    done: StoredObject | None = None


class Uploads:
    """Replies to upload requests. A body is complete before anything is decided."""

    def __init__(self, state: State) -> None:
        """Serve ``state``."""
        self._state = state
        self._sessions: dict[str, _Session] = {}

    async def handle(self, ask: Ask, bucket: str, request: web.BaseRequest) -> web.Response:
        """Return one request below ``/upload``."""
        kind = ask.text("uploadType")
        if kind == "resumable" and "upload_id" in ask.parameters:
            return await self._continue(ask, request)
        if ask.method != "POST":
            raise Refusal(405, "methodNotAllowed", "Uploads begin with POST.")
        ask.allow("uploadType", "name", "contentEncoding", *CONDITIONS)
        body = await request.content.read()
        content_type = request.headers.get("Content-Type", "application/octet-stream")
        if kind == "media":
            settings: dict[str, Any] = {"contentType": content_type}
            if "contentEncoding" in ask.parameters:
                settings["contentEncoding"] = ask.text("contentEncoding")
            return self._finish(ask, bucket, ask.text("name"), body, settings)
        if kind == "multipart":
            return self._multipart(ask, bucket, content_type, body)
        if kind == "resumable":
            return self._begin(ask, bucket, request, parse_document(body))
        raise Refusal(400, "invalid", f"Unknown upload type {kind!r}.")

    def _finish(
        self, ask: Ask, bucket: str, name: str, data: bytes, settings: Mapping[str, Any]
    ) -> web.Response:
        self._state.bucket(bucket)
        item = self._state.write(bucket, check_name(name), data, settings, ask.conditions())
        return json_reply(select(object_resource(item), ask.parameters.get("fields")))

    def _multipart(self, ask: Ask, bucket: str, content_type: str, body: bytes) -> web.Response:
        parts = split_multipart(content_type, "multipart/related", body)
        if len(parts) != 2:
            raise Refusal(400, "badContent", "A multipart upload has a document and the bytes.")
        document = parse_document(parts[0][1])
        name = ask.text("name") or document.get("name", "")
        settings = settings_of(document)
        settings.setdefault("contentType", parts[1][0].get("content-type"))
        return self._finish(ask, bucket, str(name), parts[1][1], settings)

    def _begin(
        self, ask: Ask, bucket: str, request: web.BaseRequest, document: dict[str, Any]
    ) -> web.Response:
        self._state.bucket(bucket)
        name = check_name(ask.text("name") or str(document.get("name", "")))
        settings = settings_of(document)
        content_type = request.headers.get("X-Upload-Content-Type", "application/octet-stream")
        settings.setdefault("contentType", content_type)
        conditions = ask.conditions()
        # Here and again at the end: of two uploads that begin under the same condition one is
        # refused then.
        self._state.check_write(bucket, name, conditions)
        upload_id = secrets.token_urlsafe(24)
        self._sessions[upload_id] = _Session(bucket, name, settings, conditions, bytearray())
        location = (
            f"http://{request.headers['Host']}/upload/storage/v1/b/{quote(bucket)}/o"
            f"?uploadType=resumable&name={quote(name, safe='')}&upload_id={upload_id}"
        )
        return web.Response(headers={"Location": location, "X-GUploader-UploadID": upload_id})

    async def _continue(self, ask: Ask, request: web.BaseRequest) -> web.Response:
        ask.allow("uploadType", "name", "upload_id", *CONDITIONS)
        session = self._sessions.get(ask.text("upload_id"))
        if session is None:
            raise Refusal(404, "notFound", "No such upload session.")
        if ask.method == "DELETE":
            del self._sessions[ask.text("upload_id")]
            # What Cloud Storage replies to a session that was cancelled.
            return web.Response(status=499)
        first, total, data = _announced(request.headers.get("Content-Range"))
        begins = first if data else len(session.received)
        if session.done is None and begins > len(session.received):
            raise Refusal(400, "invalid", "The range leaves a gap.")
        at = begins
        async for piece in request.content.iter_any():  # what came before a break is kept
            if session.done is None and data:
                # Bytes that came before may come again after a broken connection, and count once.
                fresh = piece[max(0, len(session.received) - at) :]
                session.received += fresh
            at += len(piece)
        if session.done is not None:
            return json_reply(object_resource(session.done))
        if total is not None and len(session.received) > total:
            raise Refusal(400, "invalid", "More bytes came than were announced.")
        if total is None and data and request.headers.get("Content-Range") is None:
            total = len(session.received)
        if total is None or len(session.received) < total:
            return _incomplete(session)
        where = session.bucket, session.name
        body = bytes(session.received)
        session.done = self._state.write(*where, body, session.settings, session.conditions)
        session.received.clear()
        return json_reply(object_resource(session.done))


def _announced(header: str | None) -> tuple[int, int | None, bool]:
    """Return first byte, total size where it is known, and whether bytes come at all."""
    if header is None:
        return 0, None, True
    match = _CONTENT_RANGE.fullmatch(header)
    if match is None:
        raise Refusal(400, "invalid", f"Invalid Content-Range {header!r}.")
    total = None if match[3] == "*" else int(match[3])
    if match[1] is None:
        return 0, total, False
    first, last = int(match[1]), int(match[2])
    ends = total is not None and last == total - 1
    if last < first or (not ends and (last + 1 - first) % _QUANTUM):
        raise Refusal(400, "invalid", "All chunks but the last are multiples of 256 KiB.")
    return first, total, True


def _incomplete(session: _Session) -> web.Response:
    # As Cloud Storage does: what is not a whole quantum is forgotten, and must be sent again.
    kept = len(session.received) // _QUANTUM * _QUANTUM
    del session.received[kept:]
    headers = {"Range": f"bytes=0-{kept - 1}"} if kept else {}
    return web.Response(status=308, reason="Resume Incomplete", headers=headers)


def parse_document(body: bytes) -> dict[str, Any]:
    """Return a JSON object; nothing is an empty one."""
    try:
        document: object = json.loads(body) if body.strip() else {}
    except ValueError:
        raise Refusal(400, "parseError", "The document is not JSON.") from None
    if not isinstance(document, dict):
        raise Refusal(400, "parseError", "The document is no JSON object.")
    return cast("dict[str, Any]", document)


def split_multipart(
    content_type: str, kind: str, body: bytes
) -> list[tuple[dict[str, str], bytes]]:
    """Return headers and bytes of each part; lines end in CRLF, as the standard demands."""
    found = re.fullmatch(rf"{kind}\s*;\s*boundary=(?:\"([^\"]+)\"|([^\s;]+))", content_type)
    if found is None:
        raise Refusal(400, "badContent", f"Content-Type is not {kind} with a boundary.")
    boundary = b"--" + (found[1] or found[2]).encode()
    # With a line end in front, so that the first boundary is like all others.
    sections = (b"\r\n" + body).split(b"\r\n" + boundary)
    if len(sections) < 3 or not sections[-1].startswith(b"--"):
        raise Refusal(400, "badContent", "Malformed multipart body.")
    parts: list[tuple[dict[str, str], bytes]] = []
    for section in sections[1:-1]:
        head, separator, content = section.partition(b"\r\n\r\n")
        if not separator:
            raise Refusal(400, "badContent", "A part has no empty line after its headers.")
        lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line.strip())
        parts.append(({name.strip().lower(): value.strip() for name, _, value in pairs}, content))
    return parts

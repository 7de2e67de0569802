"""The part of the XML API that object_store uses, as do obstore and the official engine.

Over the same objects as the JSON API: PUT, GET, HEAD, DELETE, copies by header, listings of
version 2, multipart uploads, and ``x-goog-if-generation-match``.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.servers.gcs.json_api.asking import check_name
from tests.servers.gcs.json_api.objects import part_of
from tests.servers.gcs.json_api.replies import Refusal, object_headers
from tests.servers.gcs.json_api.state import Conditions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.servers.gcs.json_api.asking import Ask
    from tests.servers.gcs.json_api.state import State, StoredObject

__all__ = ["XML"]

_PAGE: Final = 1000
_META: Final = "x-goog-meta-"
_KNOWN_HEADERS: Final = {
    *("x-goog-if-generation-match", "x-goog-copy-source", "x-goog-user-project"),
}


@dataclass(slots=True)
class _Upload:
    where: tuple[str, str]
    settings: dict[str, object]
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


class XML:
    """Replies to requests from a state. No method waits."""

    def __init__(self, state: State) -> None:
        """Serve ``state``."""
        self._state = state
        self._uploads: dict[str, _Upload] = {}

    def answer(self, ask: Ask, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Return one request."""
        named = {name.lower(): value for name, value in headers.items()}
        unknown = [
            name
            for name in named
            if name.startswith("x-goog-") and name not in _KNOWN_HEADERS and _META not in name
        ]
        if unknown:
            raise Refusal(501, "NotImplemented", f"This server does not know {unknown}.")
        bucket, name = ask.segments[0], "/".join(ask.segments[1:])
        self._state.bucket(bucket)
        if not name:
            return self._list(ask, bucket)
        if {"uploads", "uploadId"} & set(ask.parameters):
            return self._in_parts(ask, (bucket, name), named, body)
        match ask.method, sorted(set(ask.parameters) - {"userProject"}):
            case (("GET" | "HEAD"), ([] | ["generation"])):
                return self._get(ask, bucket, name, named)
            case "PUT", []:
                return self._put(bucket, name, named, body)
            case "DELETE", []:
                self._state.delete(bucket, name, None, _conditions(named))
                return web.Response(status=204)
            case _, parameters:
                raise Refusal(501, "NotImplemented", f"This server does not know {parameters}.")

    def _in_parts(
        self, ask: Ask, where: tuple[str, str], headers: Mapping[str, str], body: bytes
    ) -> web.Response:
        match ask.method, sorted(set(ask.parameters) - {"userProject"}):
            case "PUT", ["partNumber", "uploadId"]:
                upload = self._upload(ask, where)
                upload.parts[int(ask.text("partNumber"))] = body
                return web.Response(headers={"ETag": f'"{len(body)}"'})
            case "POST", ["uploads"]:
                return self._begin(*where, headers)
            case "POST", ["uploadId"]:
                return self._complete(ask, *where, headers)
            case "DELETE", ["uploadId"]:
                self._uploads.pop(ask.text("uploadId"), None)
                return web.Response(status=204)
            case _, parameters:
                raise Refusal(501, "NotImplemented", f"This server does not know {parameters}.")

    def _get(self, ask: Ask, bucket: str, name: str, headers: Mapping[str, str]) -> web.Response:
        found = self._state.find(bucket, name, ask.number("generation"))
        _conditions(headers).check(found, reading=True)
        about = object_headers(found)
        tag = about["ETag"] = _tag(found)
        if headers.get("if-match", tag) not in (tag, "*"):
            raise Refusal.condition("If-Match")
        if headers.get("if-none-match") in (tag, "*"):
            raise Refusal.not_modified()
        metadata = found.settings.get("metadata")
        if isinstance(metadata, dict):
            about |= {f"{_META}{key}": str(value) for key, value in metadata.items()}
        size = len(found.data)
        start, stop = part_of(headers.get("range"), size) or (0, size)
        if "range" not in headers:
            return web.Response(body=found.data, headers=about)
        if start >= stop:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        about["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return web.Response(status=206, body=found.data[start:stop], headers=about)

    def _put(self, bucket: str, name: str, headers: Mapping[str, str], body: bytes) -> web.Response:
        source = headers.get("x-goog-copy-source")
        settings = _settings(headers)
        if source is not None:
            from_bucket, _, from_name = unquote(source.removeprefix("/")).partition("/")
            found = self._state.find(from_bucket, from_name)
            body, settings = found.data, dict(found.settings)
        item = self._state.write(bucket, check_name(name), body, settings, _conditions(headers))
        answer = "<CopyObjectResult/>" if source is not None else ""
        return _written(item, answer)

    def _begin(self, bucket: str, name: str, headers: Mapping[str, str]) -> web.Response:
        identity = secrets.token_hex(16)
        self._uploads[identity] = _Upload((bucket, check_name(name)), _settings(headers))
        return _document(
            "InitiateMultipartUploadResult",
            f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"
            f"<UploadId>{identity}</UploadId>",
        )

    def _complete(
        self, ask: Ask, bucket: str, name: str, headers: Mapping[str, str]
    ) -> web.Response:
        upload = self._upload(ask, (bucket, name))
        data = b"".join(upload.parts[number] for number in sorted(upload.parts))
        item = self._state.write(bucket, name, data, upload.settings, _conditions(headers))
        del self._uploads[ask.text("uploadId")]
        inner = f"<ETag>{escape(_tag(item))}</ETag><Key>{escape(name)}</Key>"
        return _written(item, _text("CompleteMultipartUploadResult", inner))

    def _upload(self, ask: Ask, where: tuple[str, str]) -> _Upload:
        upload = self._uploads.get(ask.text("uploadId"))
        if upload is None or upload.where != where:
            raise Refusal(404, "NoSuchUpload", "The requested upload was not found.")
        return upload

    def _list(self, ask: Ask, bucket: str) -> web.Response:
        ask.allow(
            *("list-type", "prefix", "delimiter", "max-keys"),
            *("continuation-token", "start-after"),
        )
        if ask.method != "GET" or ask.text("list-type") != "2":
            raise Refusal(501, "NotImplemented", "This server lists in version 2 only.")
        token, after = ask.text("continuation-token"), ask.parameters.get("start-after")
        if token:
            after = base64.urlsafe_b64decode(token).decode()
        limit = min(ask.number("max-keys") or _PAGE, _PAGE)
        between = (after or "", "")
        page = self._state.bucket(bucket).list(
            ask.text("prefix"), ask.text("delimiter"), between, after, limit
        )
        inner = f"<Name>{escape(bucket)}</Name><Prefix>{escape(ask.text('prefix'))}</Prefix>"
        more = page.next_after is not None
        inner += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if page.next_after is not None:
            token = base64.urlsafe_b64encode(page.next_after.encode()).decode()
            inner += f"<NextContinuationToken>{token}</NextContinuationToken>"
        for item in page.items:
            when = (item.updated or item.created).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
            inner += (
                f"<Contents><Key>{escape(item.name)}</Key><Size>{len(item.data)}</Size>"
                f"<Generation>{item.generation}</Generation><LastModified>{when}</LastModified>"
                f"<ETag>{escape(_tag(item))}</ETag></Contents>"
            )
        for prefix in page.prefixes:
            inner += f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
        return _document("ListBucketResult", inner)


def _conditions(headers: Mapping[str, str]) -> Conditions:
    value = headers.get("x-goog-if-generation-match")
    if value is None:
        return Conditions()
    if not (value.isascii() and value.isdigit()):
        raise Refusal(400, "InvalidArgument", "Invalid generation.")
    return Conditions(generation_match=int(value))


def _settings(headers: Mapping[str, str]) -> dict[str, object]:
    metadata = {
        name.removeprefix(_META): value for name, value in headers.items() if name.startswith(_META)
    }
    settings: dict[str, object] = {"metadata": metadata} if metadata else {}
    settings["contentType"] = headers.get("content-type", "application/octet-stream")
    return settings


def _tag(item: StoredObject) -> str:
    return f'"{item.md5}"'


def _written(item: StoredObject, text: str) -> web.Response:
    headers = {"ETag": _tag(item), "X-Goog-Generation": str(item.generation)}
    return web.Response(text=text, content_type="application/xml", headers=headers)


def _text(name: str, inner: str) -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{inner}</{name}>'


def _document(name: str, inner: str) -> web.Response:
    return web.Response(text=_text(name, inner), content_type="application/xml")

"""The replies to a client: documents of the API, and its errors."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Self, cast

from aiohttp import web

if TYPE_CHECKING:
    from tests.servers.gcs.json_api.state import Bucket, StoredObject

__all__ = [
    "Refusal",
    "bucket_resource",
    "json_reply",
    "object_headers",
    "object_resource",
    "select",
]


class Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """An answer that is an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Keep what the error document says."""
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    @classmethod
    def condition(cls, location: str) -> Self:
        """Return status 412."""
        message = f"At least one of the pre-conditions you specified did not hold ({location})."
        return cls(412, "conditionNotMet", message)

    @classmethod
    def not_modified(cls) -> Self:
        """Return status 304."""
        return cls(304, "notModified", "")

    @classmethod
    def hold(cls, bucket: str, name: str) -> Self:
        """Return the error for an object under a hold."""
        return cls(
            403,
            "forbidden",
            f"Object '{bucket}/{name}' is under active Temporary hold and cannot be deleted, "
            "overwritten or archived until hold is removed.",
        )

    def reply(self, *, plain: bool = False) -> web.Response:
        """Return the error document; media downloads get the bare message."""
        if self.status == 304:
            return web.Response(status=304)
        if plain:
            return web.Response(status=self.status, text=self.message)
        error = {"domain": "global", "reason": self.reason, "message": self.message}
        return json_reply(
            {"error": {"code": self.status, "message": self.message, "errors": [error]}},
            status=self.status,
        )


def json_reply(document: object, *, status: int = 200) -> web.Response:
    """Return a document."""
    text = json.dumps(document)
    return web.Response(status=status, text=text, content_type="application/json")


def bucket_resource(bucket: Bucket) -> dict[str, Any]:
    """Return the document about a bucket."""
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "name": bucket.name,
        "location": "US",
        "storageClass": "STANDARD",
        "metageneration": "1",
        "timeCreated": _time(bucket.created),
        "updated": _time(bucket.created),
    }


def object_resource(item: StoredObject) -> dict[str, Any]:
    """Return the document about an object."""
    return {
        "kind": "storage#object",
        "id": f"{item.bucket}/{item.name}/{item.generation}",
        "name": item.name,
        "bucket": item.bucket,
        "generation": str(item.generation),
        "metageneration": str(item.metageneration),
        "storageClass": "STANDARD",
        "size": str(len(item.data)),
        "md5Hash": item.md5,
        "crc32c": item.crc32c,
        "etag": f"{item.generation}/{item.metageneration}",
        "timeCreated": _time(item.created),
        "updated": _time(item.updated or item.created),
        **item.settings,
    }


def object_headers(item: StoredObject) -> dict[str, str]:
    """Return the headers of a media download."""
    encoding = str(item.settings.get("contentEncoding", "identity"))
    written = item.updated or item.created
    return {
        "X-Goog-Generation": str(item.generation),
        "X-Goog-Metageneration": str(item.metageneration),
        "X-Goog-Stored-Content-Length": str(len(item.data)),
        "X-Goog-Stored-Content-Encoding": encoding,
        "X-Goog-Hash": f"crc32c={item.crc32c},md5={item.md5}",
        "X-Goog-Storage-Class": "STANDARD",
        "ETag": f"{item.generation}/{item.metageneration}",
        "Last-Modified": written.strftime("%a, %d %b %Y %H:%M:%S GMT"),
        "Accept-Ranges": "bytes",
        "Content-Type": str(item.settings.get("contentType", "application/octet-stream")),
    }


def _time(when: Any) -> str:
    return cast("str", when.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z")


_TOKENS = re.compile(r"[A-Za-z0-9_*-]+|[(),/]")


def select(document: dict[str, Any], fields: str | None) -> dict[str, Any]:
    """Return the part of a document that ``fields`` asks for: ``a,b/c,d(e,f)``."""
    if not fields or fields == "*":
        return document
    tokens = _TOKENS.findall(fields)
    if "".join(tokens) != fields:
        raise Refusal(400, "invalidParameter", f"Invalid field selection {fields}")
    wanted = _selection(tokens)
    if tokens:
        raise Refusal(400, "invalidParameter", f"Invalid field selection {fields}")
    return cast("dict[str, Any]", _part(document, wanted))


def _selection(tokens: list[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    while tokens and tokens[0] != ")":
        name = tokens.pop(0)
        below = wanted.setdefault(name, {})
        while tokens and tokens[0] == "/":
            tokens.pop(0)
            below = below.setdefault(tokens.pop(0), {})
        if tokens and tokens[0] == "(":
            tokens.pop(0)
            below.update(_selection(tokens))
            if not tokens or tokens.pop(0) != ")":
                raise Refusal(400, "invalidParameter", "Invalid field selection: missing ')'")
        if tokens and tokens[0] == ",":
            tokens.pop(0)
    return wanted


def _part(value: Any, wanted: dict[str, Any]) -> Any:
    if not wanted or "*" in wanted:
        return value
    if isinstance(value, list):
        return [_part(item, wanted) for item in value]
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: _part(found[key], below) for key, below in wanted.items() if key in found}
    return value

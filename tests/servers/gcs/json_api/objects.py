"""Operations on objects and buckets that are no uploads."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from tests.servers.gcs.json_api.asking import CONDITIONS, SOURCE_CONDITIONS, check_name
from tests.servers.gcs.json_api.replies import (
    Refusal,
    bucket_resource,
    json_reply,
    object_headers,
    object_resource,
    select,
)

if TYPE_CHECKING:
    from tests.servers.gcs.json_api.asking import Ask
    from tests.servers.gcs.json_api.state import State, StoredObject

__all__ = ["Objects", "part_of", "settings_of"]

_PAGE: Final = 100
"""Fewer than the 1,000 of Cloud Storage, so that tests of paging need fewer objects."""
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_MIB: Final = 1 << 20
_SETTABLE: Final = {
    *("contentType", "contentEncoding", "cacheControl", "contentDisposition"),
    *("contentLanguage", "customTime", "metadata", "temporaryHold", "eventBasedHold"),
}


@dataclass(slots=True)
class _Rewrite:
    source: StoredObject
    target: tuple[str, str]
    done: int = 0


class Objects:
    """Replies to requests from a state. No method waits."""

    def __init__(self, state: State, rewrite_bytes: int | None = None) -> None:
        """Serve ``state``; a rewrite copies at most ``rewrite_bytes`` with each call."""
        self._state = state
        self._rewrite_bytes = rewrite_bytes
        self._rewrites: dict[str, _Rewrite] = {}

    def buckets(self, ask: Ask, document: dict[str, Any]) -> web.Response:
        """Create a bucket, or list them all."""
        if ask.method == "POST":
            ask.allow("project", "predefinedAcl", "predefinedDefaultObjectAcl")
            bucket = self._state.create_bucket(str(document.get("name", "")))
            return json_reply(bucket_resource(bucket))
        ask.allow("project", "prefix", "maxResults")
        found = sorted(self._state.buckets)
        items = [bucket_resource(self._state.buckets[name]) for name in found]
        items = [item for item in items if item["name"].startswith(ask.text("prefix"))]
        return json_reply({"kind": "storage#buckets", "items": items})

    def bucket(self, ask: Ask, name: str) -> web.Response:
        """Return or delete a bucket."""
        ask.allow()
        if ask.method == "DELETE":
            self._state.delete_bucket(name)
            return web.Response(status=204)
        return json_reply(
            select(bucket_resource(self._state.bucket(name)), ask.parameters.get("fields"))
        )

    def list(self, ask: Ask, bucket: str) -> web.Response:
        """Return one page of a listing."""
        ask.allow("prefix", "delimiter", "startOffset", "endOffset", "maxResults", "pageToken")
        limit = ask.number("maxResults")
        if limit == 0:
            raise Refusal(400, "invalid", "Invalid value for maxResults: 0")
        after = None
        if ask.text("pageToken"):
            try:
                after = base64.urlsafe_b64decode(ask.text("pageToken")).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise Refusal(400, "invalid", "Invalid page token.") from None
        page = self._state.bucket(bucket).list(
            ask.text("prefix"),
            ask.text("delimiter"),
            (ask.text("startOffset"), ask.text("endOffset")),
            after,
            min(limit or _PAGE, _PAGE),
        )
        document: dict[str, Any] = {"kind": "storage#objects"}
        if page.next_after is not None:
            token = base64.urlsafe_b64encode(page.next_after.encode()).decode()
            document["nextPageToken"] = token
        if page.prefixes:
            document["prefixes"] = page.prefixes
        if page.items:
            document["items"] = [object_resource(item) for item in page.items]
        return json_reply(select(document, ask.parameters.get("fields")))

    def get(self, ask: Ask, bucket: str, name: str, byte_range: str | None) -> web.Response:
        """Return the document about an object, or its bytes."""
        ask.allow("generation", *CONDITIONS)
        found = self._state.find(bucket, name, ask.number("generation"))
        ask.conditions().check(found, reading=True)
        if not ask.media:
            return json_reply(select(object_resource(found), ask.parameters.get("fields")))
        headers, size = object_headers(found), len(found.data)
        part = part_of(byte_range, size)
        if part is None:
            return web.Response(body=found.data, headers=headers)
        start, stop = part
        if start >= stop:
            return web.Response(
                status=416,
                text="The requested range cannot be satisfied.",
                headers={"Content-Range": f"bytes */{size}"},
            )
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return web.Response(status=206, body=found.data[start:stop], headers=headers)

    def delete(self, ask: Ask, bucket: str, name: str) -> web.Response:
        """Delete an object."""
        ask.allow("generation", *CONDITIONS)
        self._state.delete(bucket, name, ask.number("generation"), ask.conditions())
        return web.Response(status=204)

    def patch(self, ask: Ask, bucket: str, name: str, document: dict[str, Any]) -> web.Response:
        """Change settings of an object."""
        ask.allow(*CONDITIONS)
        item = self._state.patch(bucket, name, settings_of(document), ask.conditions())
        return json_reply(object_resource(item))

    def copy(
        self, ask: Ask, source: tuple[str, str], target: tuple[str, str], document: dict[str, Any]
    ) -> web.Response:
        """Copy an object in one step."""
        ask.allow("sourceGeneration", *CONDITIONS, *SOURCE_CONDITIONS)
        found = self._source(ask, source)
        settings = settings_of(document) if document else found.settings
        item = self._state.write(
            target[0], check_name(target[1]), found.data, settings, ask.conditions()
        )
        return json_reply(object_resource(item))

    def rewrite(
        self, ask: Ask, source: tuple[str, str], target: tuple[str, str], document: dict[str, Any]
    ) -> web.Response:
        """Copy an object, in several steps if it is large. It appears with the last step."""
        ask.allow(
            *("sourceGeneration", "rewriteToken", "maxBytesRewrittenPerCall"),
            *CONDITIONS,
            *SOURCE_CONDITIONS,
        )
        found = self._source(ask, source)
        step = ask.number("maxBytesRewrittenPerCall")
        if step is not None and (step == 0 or step % _MIB):
            raise Refusal(400, "invalid", "maxBytesRewrittenPerCall must be a multiple of 1 MiB.")
        token = ask.text("rewriteToken")
        # A token counts once, as a lost reply makes its client begin anew.
        progress = self._rewrites.pop(token, None) if token else _Rewrite(found, target)
        if progress is None or (progress.source, progress.target) != (found, target):
            raise Refusal(400, "invalid", "The rewrite token does not match the request.")
        self._state.check_write(*target, ask.conditions())
        size = len(found.data)
        progress.done += min(x for x in (size, step, self._rewrite_bytes) if x is not None)
        answer: dict[str, Any] = {"kind": "storage#rewriteResponse", "objectSize": str(size)}
        if progress.done >= size:
            settings = settings_of(document) if document else found.settings
            item = self._state.write(
                target[0], check_name(target[1]), found.data, settings, ask.conditions()
            )
            answer |= {"done": True, "resource": object_resource(item)}
        else:
            token = secrets.token_urlsafe(12)
            self._rewrites[token] = progress
            answer |= {"done": False, "rewriteToken": token}
        answer["totalBytesRewritten"] = str(min(progress.done, size))
        return json_reply(select(answer, ask.parameters.get("fields")))

    def _source(self, ask: Ask, source: tuple[str, str]) -> StoredObject:
        found = self._state.find(*source, ask.number("sourceGeneration"))
        ask.conditions(SOURCE_CONDITIONS).check(found)
        return found


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a client. Raise `Refusal` for those that this server does not keep."""
    unknown = set(document) - _SETTABLE - {"name", "bucket", "crc32c", "md5Hash"}
    if unknown:
        # Not ignored: a setting that a client relies on would be missing without a word.
        raise Refusal(501, "notImplemented", f"This server does not know {sorted(unknown)}.")
    metadata = document.get("metadata") or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise Refusal(400, "invalid", "Metadata values are strings.")
    return {key: value for key, value in document.items() if key not in ("name", "bucket")}


def part_of(byte_range: str | None, size: int) -> tuple[int, int] | None:
    """Return start and stop of a Range header; None for all, as for what is no valid range."""
    match = _RANGE.fullmatch(byte_range.strip()) if byte_range else None
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        # "bytes=-5": the last five; "bytes=-": no valid range, and so all
        return (max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size

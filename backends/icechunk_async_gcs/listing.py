"""Listings: page by page, names and groups in one order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.storage import MAX_KEY_BYTES, CommonPrefix, ObjectInfo
from icechunk_async_gcs.reading import time_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import ListEntry
    from icechunk_async_gcs.options import Location
    from icechunk_async_gcs.service import Service

__all__ = ["list_prefix"]

_FIELDS: Final = "items(name,size,updated),prefixes,nextPageToken"


async def list_prefix(
    service: Service,
    location: Location,
    prefix: str,
    start_after: str | None,
    delimiter: str | None,
) -> AsyncIterator[ListEntry]:
    """List objects; see :meth:`icechunk_async.storage.Storage.list_prefix`."""
    service.check_open()
    wanted = location.prefix + prefix
    if _sendable(wanted) != wanted or len(wanted.encode()) > MAX_KEY_BYTES:
        return  # no name begins like this
    query = {"fields": _FIELDS, "prettyPrint": "false"}
    if wanted:
        query["prefix"] = wanted
    if delimiter is not None:
        query["delimiter"] = delimiter
    if start_after:
        # Inclusive, and cut where it cannot be sent: what is too early is left out below.
        query["startOffset"] = location.prefix + _sendable(start_after)
    last = start_after  # entries are ascending; a group may come again with the next page
    while True:
        service.check_open()
        reply = await service.ask("GET", service.objects, f"list {prefix!r}", query=query)
        document: dict[str, Any] = json.loads(reply.body)
        for name, entry in _entries(document, len(location.prefix)):
            if last is None or name > last:
                last = name
                yield entry
        token = document.get("nextPageToken")
        if not token:
            return
        query["pageToken"] = token


def _entries(document: dict[str, Any], cut: int) -> list[tuple[str, ListEntry]]:
    """Return one page in order: code points sort like UTF-8 bytes."""
    found: list[tuple[str, ListEntry]] = []
    for item in document.get("items", ()):
        key = str(item["name"])[cut:]
        if key and not key.endswith("/"):  # consoles keep empty objects of such names as folders
            found.append((key, ObjectInfo(key, int(item["size"]), time_of(item["updated"]))))
    for group in document.get("prefixes", ()):
        key = str(group)[cut:]
        found.append((key, CommonPrefix(key)))
    found.sort(key=lambda pair: pair[0])
    return found


def _sendable(text: str) -> str:
    """Return the beginning that can be part of a name."""
    for index, character in enumerate(text):
        if character in "\0\r\n" or "\ud800" <= character <= "\udfff":
            return text[:index]
    return text

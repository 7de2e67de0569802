"""Listings: the keys of a bucket in order, a page with each request.

Pages are XML, whose text the server encodes as in URLs, because XML has no place for some
characters that keys may have.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from heapq import merge
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote_plus
from xml.etree.ElementTree import ParseError

from icechunk_async.errors import InvalidObjectKeyError, StorageError
from icechunk_async.storage import MAX_KEY_BYTES, CommonPrefix, ObjectInfo, check_key
from icechunk_async_s3.documents import fields_of, parse, tag_of
from icechunk_async_s3.failures import Refusal, explain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from xml.etree.ElementTree import Element

    from icechunk_async.storage import ListEntry
    from icechunk_async_s3.transport import Transport

__all__ = ["PAGE_KEYS", "walk"]

PAGE_KEYS: Final = 1000
"""As many as the service lists in one request."""


@dataclass(frozen=True, slots=True)
class _Page:
    objects: list[tuple[str, int, datetime]]
    """Keys, sizes, and times of change."""
    groups: list[str]
    """Common beginnings of keys, up to the delimiter."""
    is_truncated: bool
    token: str | None
    """How to get the next page."""


async def walk(
    transport: Transport, prefix: str, start_after: str | None, delimiter: Literal["/"] | None
) -> AsyncIterator[ListEntry]:
    """List what begins with ``prefix``; one request a page."""
    place = transport.place
    asked = f"listing {prefix[:200]!r} in"
    full = place.prefix + prefix
    # Cut, the prefix would list what was not asked for.
    if _sendable(full) != full:  # no key begins so
        return
    query = {"list-type": "2", "encoding-type": "url", "max-keys": str(PAGE_KEYS), "prefix": full}
    query |= {"delimiter": delimiter} if delimiter else {}
    # A string that cannot be sent is cut; entries that come too early are dropped below.
    query |= {"start-after": _sendable(place.prefix + start_after)} if start_after else {}
    last = start_after
    while True:
        page = await _ask(transport, asked, query)
        for name, entry in merge(
            _objects(page, place.prefix), _groups(page, place.prefix), key=lambda item: item[0]
        ):
            if start_after is not None and name <= start_after:
                continue
            # Garbage collection and copies continue after the last name: of a server that does not
            # sort they would miss objects silently.
            if last is not None and name < last:
                raise _out_of_order(asked, place.url, name, last)
            if name != last:  # else a group that continues in the next page
                last = name
                yield entry
        if not page.is_truncated:
            return
        # The same token again would be the same page, for ever.
        if not page.token or page.token == query.get("continuation-token"):
            raise StorageError(
                f"{asked} {place.url!r}: the server says that more follows, and not how to get it. "
                "Use a server that lists in pages.",
                url=place.url,
            )
        query["continuation-token"] = page.token


def _out_of_order(asked: str, url: str, name: str, last: str) -> StorageError:
    return StorageError(
        f"{asked} {url!r}: the server answered {name!r} after {last!r}, which is not the order of "
        "their bytes. Use a server that lists in order.",
        url=url,
    )


async def _ask(transport: Transport, asked: str, query: dict[str, str]) -> _Page:
    reply = await transport.read("GET", "", query=tuple(query.items()), asked=asked)
    if reply.status != 200:
        raise explain(await transport.refusal(reply), asked, transport.place)
    try:
        root = parse(reply.body)
        if tag_of(root) == "Error":  # inside a success
            refusal = Refusal.of_reply(500, reply.headers, reply.body, None)
            raise explain(refusal, asked, transport.place)
        return _page(root)
    except (ParseError, ValueError, OverflowError) as error:
        raise StorageError(
            f"{asked} {transport.place.url!r}: the answer is no list of objects ({error}). The "
            "server does not follow the protocol; use another one.",
            url=transport.place.url,
        ) from error


def _page(root: Element) -> _Page:
    """Read a page.

    Raises:
        ValueError, OverflowError: it lacks something, or a number or time is not one.
    """
    top = fields_of(root)
    decode = unquote_plus if top.get("EncodingType") == "url" else str
    objects: list[tuple[str, int, datetime]] = []
    groups: list[str] = []
    for child in root:
        tag = tag_of(child)
        if tag == "Contents":
            found = fields_of(child)
            modified = _moment(_given(found, "LastModified"))
            objects.append((decode(_given(found, "Key")), int(_given(found, "Size")), modified))
        elif tag == "CommonPrefixes":
            groups.append(decode(_given(fields_of(child), "Prefix")))
    truncated = top.get("IsTruncated", "").strip().lower() == "true"
    return _Page(objects, groups, truncated, top.get("NextContinuationToken"))


def _given(fields: dict[str, str], name: str) -> str:
    found = fields.get(name)
    if not found:
        raise ValueError(f"an entry has no {name}")
    return found


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        found = parsedate_to_datetime(text)
    # Some servers leave out the "Z"; times of S3 are in UTC.
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _objects(page: _Page, prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for key, size_bytes, modified in page.objects:
        name = key[len(prefix) :]
        if _is_key(name):  # consoles make "folders" whose keys end in a slash
            yield name, ObjectInfo(name, size_bytes, modified)


def _groups(page: _Page, prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for group in page.groups:
        name = group[len(prefix) :]
        if _is_key(name.removesuffix("/")):
            yield name, CommonPrefix(name)


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except InvalidObjectKeyError:
        return False
    return True


def _sendable(text: str) -> str:
    """Return the longest beginning of ``text`` that can begin a key in a request."""
    kept: list[str] = []
    size = 0
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            break
        size += len(character.encode())
        if size > MAX_KEY_BYTES:
            break
        kept.append(character)
    return "".join(kept)

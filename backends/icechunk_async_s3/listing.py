"""Listing: pages of the server, put in one order and checked to be in it."""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING, Any, Final, Literal

from icechunk_async.errors import InvalidObjectKeyError, StorageError
from icechunk_async.storage import MAX_KEY_BYTES, CommonPrefix, ObjectInfo, check_key
from icechunk_async_s3.failures import LostReplyError, explain
from icechunk_async_s3.transport import RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from icechunk_async.storage import ListEntry
    from icechunk_async_s3.transport import Transport

__all__ = ["walk"]

_PAGE_KEYS: Final = 1000


async def walk(
    transport: Transport, prefix: str, start_after: str | None, delimiter: Literal["/"] | None
) -> AsyncIterator[ListEntry]:
    """List what begins with ``prefix``; one request a page."""
    place = transport.place
    asked = f"listing {prefix[:200]!r} in"
    full = place.prefix + prefix
    if _sendable(full) != full:  # no key begins so
        return
    parameters: dict[str, Any] = {"Prefix": full, "MaxKeys": _PAGE_KEYS}
    parameters |= {"Delimiter": delimiter} if delimiter else {}
    # A string that cannot be sent is cut, and what comes too early is left out below.
    parameters |= {"StartAfter": _sendable(place.prefix + start_after)} if start_after else {}
    last = start_after
    while True:
        page = await _page(transport, asked, parameters)
        for name, entry in merge(
            _objects(page, place.prefix), _groups(page, place.prefix), key=lambda item: item[0]
        ):
            if start_after is not None and name <= start_after:
                continue
            if last is not None and name < last:
                raise _out_of_order(asked, place.url, name, last)
            if name != last:  # else a group that goes on in the next page
                last = name
                yield entry
        if not page.get("IsTruncated"):
            return
        token = page.get("NextContinuationToken")
        if not token or token == parameters.get("ContinuationToken"):
            raise StorageError(
                f"{asked} {place.url!r}: the server says that more follows, and not how to get it. "
                "Use a server that lists in pages.",
                url=place.url,
            )
        parameters["ContinuationToken"] = token


def _out_of_order(asked: str, url: str, name: str, last: str) -> StorageError:
    return StorageError(
        f"{asked} {url!r}: the server answered {name!r} after {last!r}, which is not the order of "
        "their bytes. Use a server that lists in order.",
        url=url,
    )


async def _page(transport: Transport, asked: str, parameters: dict[str, Any]) -> dict[str, Any]:
    for last in (False, True):
        try:
            return await transport.call("list_objects_v2", asked, **parameters)
        except RefusedError as error:
            raise explain(error.refusal, asked, transport.place) from error
        except LostReplyError as error:
            if last or error.timed_out:
                raise error.as_read(asked, transport.place) from error
    raise AssertionError  # the second round returns or raises


def _objects(page: dict[str, Any], prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for item in page.get("Contents", ()):
        name: str = item["Key"][len(prefix) :]
        if _is_key(name):  # consoles make "folders" whose keys end in a slash
            yield name, ObjectInfo(name, item["Size"], item["LastModified"])


def _groups(page: dict[str, Any], prefix: str) -> Iterator[tuple[str, ListEntry]]:
    for item in page.get("CommonPrefixes", ()):
        name: str = item["Prefix"][len(prefix) :]
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

"""Reads and listings: objects whole or in part, and keys in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import obstore

from icechunk_async.errors import InvalidObjectKeyError, StorageError, StorageUnavailableError
from icechunk_async.storage import (
    MAX_KEY_BYTES,
    ByteRange,
    CommonPrefix,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    SuffixRange,
    check_key,
    slice_range,
)
from icechunk_async_obstore.failures import read_report
from icechunk_async_obstore.options import Service, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from obstore import GetOptions, GetResult, ListResult, ObjectMeta

    from icechunk_async.storage import ListEntry
    from icechunk_async_obstore.options import Client

__all__ = [
    "Ordered",
    "first_offset",
    "folder_of",
    "groups_and_objects",
    "is_sendable",
    "look",
    "offset_before",
    "read_body",
    "read_range",
]

_LOOKS: Final = 8
"""Tries to read a range of an object that changes between two requests."""


async def read_range(
    client: Client, service: Service, key: str, path: str, byte_range: RangeRequest
) -> Retrieved:
    """Read an object or part of it; the client's errors are raised unchanged.

    Raises:
        StorageUnavailableError: the object changed again and again, or came in part.
    """
    if _fits_one_request(byte_range, service):
        try:
            options = _options(byte_range)
            answer = await obstore.get_async(client, path, options=options)
            return await read_body(service, answer, key, byte_range)
        except Exception as error:
            if byte_range is None or not _is_outside(error):
                raise
    for _ in range(_LOOKS):
        found = await _read_measured(client, service, key, path, byte_range)
        if found is not None:
            return found
    raise StorageUnavailableError(
        f"{key!r} changed {_LOOKS} times while {byte_range} of it was read. Try again.", key=key
    )


async def look(client: Client, service: Service, path: str) -> GetResult:
    """Return the metadata of an object."""
    # In answers of GCS to HEAD the length of an empty object may be missing, which the client
    # takes for an error. The body of a GET is not fetched before it is asked for.
    return await obstore.get_async(client, path, options={"head": service is not Service.GS})


async def read_body(
    service: Service, answer: GetResult, key: str, byte_range: RangeRequest = None
) -> Retrieved:
    """Fetch the body of a reply, which must have the announced length.

    Raises:
        StorageUnavailableError: it is not.
    """
    meta = answer.meta
    version = version_of(service, meta, key)
    expected = slice_range(byte_range, meta["size"])
    data = memoryview(await answer.bytes_async())
    if tuple(answer.range) != expected or len(data) != expected[1] - expected[0]:
        raise StorageUnavailableError(
            f"{key!r}: bytes {expected} were asked for, and {len(data)} bytes of "
            f"{tuple(answer.range)} came. Try again.",
            key=key,
        )
    return Retrieved(data, version, meta["size"], meta["last_modified"])


async def _read_measured(
    client: Client, service: Service, key: str, path: str, byte_range: RangeRequest
) -> Retrieved | None:
    """Fetch the size first; return None if the object changed before it was read."""
    meta = (await look(client, service, path)).meta
    version = version_of(service, meta, key)
    start, stop = slice_range(byte_range, meta["size"])
    if start == stop:
        return Retrieved(b"", version, meta["size"], meta["last_modified"])
    try:
        answer = await obstore.get_async(client, path, options={"range": (start, stop)})
        found = await read_body(service, answer, key, ByteRange(start, stop))
    except Exception as error:
        if _is_outside(error):
            return None
        raise
    return found if found.version == version else None


def _options(byte_range: RangeRequest) -> GetOptions:
    match byte_range:
        case ByteRange(start, stop) if stop is not None:
            return {"range": (start, stop)}
        case ByteRange(start):
            return {"range": {"offset": start}}
        case SuffixRange(length):
            return {"range": {"suffix": length}}
        case None:
            return {}


def _fits_one_request(byte_range: RangeRequest, service: Service) -> bool:
    match byte_range:
        case ByteRange(start, stop):
            return start != stop
        case SuffixRange(length):
            return length > 0 and service is not Service.AZ
        case None:
            return True


def _is_outside(error: Exception) -> bool:
    """Return whether a failure means that the range is outside the object."""
    text = str(error)
    return (
        read_report(error).status == 416
        or "StartTooLarge" in text
        or "CONTENT_RANGE header" in text
    )


def is_sendable(key: str) -> bool:
    """Return whether the client takes this as a path: a key without control characters."""
    try:
        check_key(key)
    except InvalidObjectKeyError:
        return False
    return not any(character < " " or character == "\x7f" for character in key)


def folder_of(prefix: str) -> str | None:
    """Return the folder, without its last slash, that holds all keys with this prefix.

    None where no key can begin like this.
    """
    folder = prefix.rpartition("/")[0]
    if not folder:
        return None if prefix.startswith("/") else ""
    return folder if is_sendable(folder) else None


def offset_before(start_after: str) -> str | None:
    """Return the longest beginning of a string that the client takes as an offset, if any.

    A prefix of a string is not greater than it, so listing after it loses nothing.
    """
    for length in range(min(len(start_after), MAX_KEY_BYTES), 0, -1):
        if is_sendable(start_after[:length]):
            return start_after[:length]
    return None


def first_offset(prefix: str, start_after: str | None) -> str | None:
    """Return an offset that skips unwanted entries and no wanted ones."""
    offset = offset_before(start_after) if start_after is not None else None
    if prefix and not prefix.endswith("/"):
        # For the prefix ``ab`` the offset ``aa``: all that begins with ``ab`` follows it, and of
        # what comes before only names that begin with ``aa``, which are dropped.
        below = prefix[:-1] + chr(ord(prefix[-1]) - 1) if prefix[-1] != "\0" else prefix[:-1]
        if is_sendable(below) and (offset is None or below > offset):
            return below
    return offset


class Ordered:
    """Turns pages into entries, and checks that the service lists in order."""

    def __init__(self, root: str, prefix: str, start_after: str | None) -> None:
        """Take keys below ``root`` that begin with ``prefix`` and follow ``start_after``."""
        self._root = root
        self._prefix = prefix
        self._start_after = start_after
        self._last: str | None = None
        self.ended = False
        """Whether later pages cannot hold wanted entries."""

    def entries(self, page: Iterable[ObjectMeta]) -> Iterator[ObjectInfo]:
        """Return the wanted entries of a page.

        Raises:
            StorageError: the service does not list in order.
        """
        for meta in page:
            key = meta["path"][len(self._root) :]
            if self._last is not None and key <= self._last:
                if meta["size"] == 0:  # a console's placeholder "folder/", told as "folder"
                    continue
                raise StorageError(
                    f"The service lists {key!r} after {self._last!r}, out of order, so that the "
                    "listing cannot be trusted. Use a general purpose bucket.",
                    key=key,
                )
            self._last = key
            if key.startswith(self._prefix):
                if self._start_after is None or key > self._start_after:
                    yield ObjectInfo(key, meta["size"], meta["last_modified"])
            # In order, so that nothing behind this begins with the prefix.
            elif key > self._prefix:
                self.ended = True
                return


def groups_and_objects(
    found: ListResult[Iterable[ObjectMeta]], root: str, prefix: str, start_after: str | None
) -> list[ListEntry]:
    """Return the entries of a folder that are wanted, in order."""
    entries: dict[str, ListEntry] = {}
    for meta in found["objects"]:
        key = meta["path"][len(root) :]
        entries[key] = ObjectInfo(key, meta["size"], meta["last_modified"])
    for path in found["common_prefixes"]:
        group = path[len(root) :].rstrip("/") + "/"
        entries[group] = CommonPrefix(group)
    return [
        entries[name]
        for name in sorted(entries)
        if name.startswith(prefix) and (start_after is None or name > start_after)
    ]

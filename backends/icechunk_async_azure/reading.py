"""Reads and listings: blobs whole, in part or only if changed, and names in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from azure.core import MatchConditions

from icechunk_async.errors import InvalidObjectKeyError, StorageUnavailableError
from icechunk_async.storage import (
    ByteRange,
    CommonPrefix,
    ObjectInfo,
    Retrieved,
    SuffixRange,
    Version,
    check_key,
)
from icechunk_async_azure.clients import released
from icechunk_async_azure.failures import FOREIGN, code_of, status_of
from icechunk_async_azure.requests import is_etag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from azure.storage.blob import BlobProperties
    from azure.storage.blob.aio import StorageStreamDownloader

    from icechunk_async.storage import ListEntry, RangeRequest
    from icechunk_async_azure.clients import Client
    from icechunk_async_azure.requests import Requests

__all__ = ["PAGE_ENTRIES", "in_order", "list_entries", "lowest_start", "read", "read_if_changed"]

_TRIES: Final = 10
"""Tries to read a suffix of an object that is replaced between two requests."""


async def read(requests: Requests, key: str, byte_range: RangeRequest) -> Retrieved:
    """Read an object or part of it; a suffix, and a range of nothing, cost two requests at most.

    The service has no suffix ranges, so they are requested by the size of one version.
    """
    requests.name(key)
    client = await requests.client("read", key)
    match byte_range:
        case ByteRange(start, stop) if stop is None or stop > start:
            found = await _download(requests, client, key, start, stop)
            return found if found is not None else await _nothing(requests, client, key)
        case SuffixRange(length) if length > 0:
            return await _read_suffix(requests, client, key, length)
        case None:
            found = await _download(requests, client, key, 0, None)
            return found if found is not None else await _nothing(requests, client, key)
        case _:
            return await _nothing(requests, client, key)


async def read_if_changed(requests: Requests, key: str, version: Version) -> Retrieved | None:
    """Read a whole object unless it is at ``version``, which costs one small reply."""
    requests.name(key)
    if not is_etag(version):  # the service never issued such a version
        return await read(requests, key, None)
    client = await requests.client("read", key)
    conditions = {"etag": version.token, "match_condition": MatchConditions.IfModified}
    try:
        found = await _download(requests, client, key, 0, None, **conditions)
    except _Unmet:
        return None
    return found if found is not None else await _nothing(requests, client, key)


class _Unmet(Exception):  # noqa: N818 - a signal between two functions
    """The object is in another state than the request assumed."""


async def _read_suffix(requests: Requests, client: Client, key: str, length: int) -> Retrieved:
    for _ in range(_TRIES):
        whole = await requests.properties(client, key)
        if whole.size == 0:
            return _empty(whole)
        start = max(0, whole.size - length)
        # At the version whose size is known: the end of another one begins elsewhere.
        conditions = {"etag": whole.etag, "match_condition": MatchConditions.IfNotModified}
        try:
            found = await _download(requests, client, key, start, None, **conditions)
        except _Unmet:
            continue
        if found is not None:
            return found
    raise StorageUnavailableError(
        f"Could not read the end of {key!r}: it was replaced {_TRIES} times meanwhile. Try again.",
        key=key,
    )


async def _nothing(requests: Requests, client: Client, key: str) -> Retrieved:
    """Return an empty read with size and version of the object."""
    return _empty(await requests.properties(client, key))


def _empty(whole: BlobProperties) -> Retrieved:
    return Retrieved(b"", Version(whole.etag), whole.size, whole.last_modified)


async def _download(
    requests: Requests,
    client: Client,
    key: str,
    start: int,
    stop: int | None,
    **conditions: object,
) -> Retrieved | None:
    """Return bytes from ``start`` on, or None if the object ends before.

    Raises:
        _Unmet: a condition was not met.
    """
    blob: Any = client.blob(requests.name(key))
    bounds: dict[str, int] = {}
    if start or stop is not None:  # without bounds the driver also copes with empty objects
        bounds["offset"] = start
    if stop is not None:
        bounds["length"] = stop - start
    try:
        # The driver leaves the connection to the garbage collector if this is cancelled.
        with released():
            answer: StorageStreamDownloader[bytes] = await blob.download_blob(
                **bounds, **conditions, decompress=False, max_concurrency=1
            )
            data = await answer.readall()
    except FOREIGN as error:
        if status_of(error) == 416:
            return None
        unmet = status_of(error) == 304 or (status_of(error) == 412 and conditions)
        if unmet and code_of(error) in ("ConditionNotMet", ""):
            signal: Exception = _Unmet()
        else:
            signal = requests.explain(error, "read", key=key)
    except RuntimeError as error:
        if not requests.clients.closed:
            raise
        signal = requests.explain(error, "read", key=key)
    else:
        whole = answer.properties
        version = requests.version(whole, key)
        return Retrieved(data, version, _size(whole), whole.last_modified)
    # Outside of the handler: the foreign error may quote a SAS token and must not become the
    # context.
    raise signal


def _size(whole: BlobProperties) -> int:
    # The driver computes the range itself from the size of the whole object.
    return int((whole.content_range or "").rpartition("/")[2])


_HIGH: Final = "\ud800"
"""From this character on UTF-16 and UTF-8 sort differently."""
_MAX_PREFIX_BYTES: Final = 1024
PAGE_ENTRIES: Final = 500
"""Fewer than the 5000 that the service allows: the driver takes 0.2 ms for each, on the loop."""


async def list_entries(
    requests: Requests, prefix: str, start_after: str | None, *, grouped: bool
) -> AsyncIterator[ListEntry]:
    """List what begins with ``prefix``, from one page to the next.

    Memory: a page, and names with equal text before a character from U+E000 on.
    """
    if not _can_begin_a_key(prefix):
        requests.clients.check_open()
        return
    root = requests.place.prefix
    run: list[ListEntry] = []
    beginning: str | None = None
    last: str | None = None
    async for page in _pages(requests, prefix, start_after, grouped=grouped):
        requests.clients.check_open()
        entries = [_entry(item, len(root)) for item in page]
        for entry in in_order([entry for entry in entries if entry is not None]):
            name = _name(entry)
            # The start is inclusive and may have been cut; a group may come again with the next
            # page.
            if (start_after is not None and name <= start_after) or name == last:
                continue
            # The service sorts by UTF-16, where characters beyond U+FFFF come before U+E000 to
            # U+FFFF; in UTF-8 they come after these. Only names that are equal up to such a
            # character can be out of order, so a run of them is collected and sorted, and all
            # others pass.
            low = _low_part(name, len(prefix))
            if run and low != beginning:
                for one in in_order(run):
                    yield one
                run = []
            last = name
            if low is None:
                yield entry
            else:
                run.append(entry)
                beginning = low
    for one in in_order(run):
        yield one
    requests.clients.check_open()


def in_order(run: list[ListEntry]) -> Iterator[ListEntry]:
    """Yield entries in the order of their names' code points, which is that of UTF-8 bytes."""
    yield from sorted(run, key=_name)


def lowest_start(start_after: str) -> str:
    """Return a lower bound of all later strings, in the order of UTF-8 or of UTF-16."""
    for index, character in enumerate(start_after):
        if character >= _HIGH:
            return start_after[:index]
    return start_after


async def _pages(
    requests: Requests, prefix: str, start_after: str | None, *, grouped: bool
) -> AsyncIterator[list[Any]]:
    client = await requests.ask(requests.clients.here(), "list objects")
    container: Any = client.container
    begin = requests.place.prefix + prefix
    options: dict[str, Any] = {"results_per_page": PAGE_ENTRIES}
    if start_after is not None:
        start = requests.place.prefix + lowest_start(start_after)
        if start > begin:
            options["start_from"] = start
    if grouped:
        listing = container.walk_blobs(name_starts_with=begin, delimiter="/", **options)
    else:
        listing = container.list_blobs(name_starts_with=begin, **options)
    pages = listing.by_page()
    while True:
        requests.clients.check_open()
        items = await requests.ask(_next(pages), "list objects")
        if items is None:
            return
        yield items


async def _next(pages: Any) -> list[Any] | None:
    try:
        page = await anext(pages)
    except StopAsyncIteration:
        return None
    return [item async for item in page]


def _entry(item: Any, root: int) -> ListEntry | None:
    name = str(item.name)[root:]
    if not hasattr(item, "last_modified"):
        return CommonPrefix(name)
    try:
        check_key(name)
    except InvalidObjectKeyError:
        return None  # another program's blob, which no key names
    return ObjectInfo(name, item.size, item.last_modified)


def _name(entry: ListEntry) -> str:
    return entry.key if isinstance(entry, ObjectInfo) else entry.prefix


def _low_part(name: str, begin: int) -> str | None:
    """Return ``name`` up to its first character whose order differs, if it has one."""
    for index in range(begin, len(name)):
        if name[index] >= _HIGH:
            return name[:index]
    return None


def _can_begin_a_key(prefix: str) -> bool:
    try:
        return len(prefix.encode()) <= _MAX_PREFIX_BYTES and "\0" not in prefix
    except UnicodeEncodeError:
        return False

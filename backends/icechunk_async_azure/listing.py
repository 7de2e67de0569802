"""Listings in the order of UTF-8 bytes, from a service that may order by UTF-16.

The two orders differ only between characters from U+E000 on, in names that are equal up to the
first of them. In both orders such names stand together, so sorting each such run is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import InvalidObjectKeyError
from icechunk_async.storage import CommonPrefix, ObjectInfo, check_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from icechunk_async.storage import ListEntry
    from icechunk_async_azure.requests import Requests

__all__ = ["in_order", "list_entries", "lowest_start"]

_HIGH: Final = "\ud800"
"""From here on UTF-16 and UTF-8 order characters differently."""
_MAX_PREFIX_BYTES: Final = 1024
_PAGE_ENTRIES: Final = 500
"""Fewer than the 5000 that the service answers: the driver takes 0.2 ms for each, on the loop."""


async def list_entries(
    requests: Requests, prefix: str, start_after: str | None, *, grouped: bool
) -> AsyncIterator[ListEntry]:
    """List what begins with ``prefix``, from one page to the next.

    Memory: a page, and names that are alike up to a character from U+E000 on.
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
            if (start_after is not None and name <= start_after) or name == last:
                continue
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
    """Return what no greater string is less than, in the order of UTF-8 or of UTF-16."""
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
    options: dict[str, Any] = {"results_per_page": _PAGE_ENTRIES}
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
    """Return ``name`` up to its first character whose order is in doubt, if it has one."""
    for index in range(begin, len(name)):
        if name[index] >= _HIGH:
            return name[:index]
    return None


def _can_begin_a_key(prefix: str) -> bool:
    try:
        return len(prefix.encode()) <= _MAX_PREFIX_BYTES and "\0" not in prefix
    except UnicodeEncodeError:
        return False

"""Helpers for backends: conditions, listings, and storages of blocking functions."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.errors import (
    InvalidObjectKeyError,
    PreconditionFailedError,
    StorageClosedError,
    UnsafeStorageError,
)
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    CommonPrefix,
    DeleteFailure,
    Expected,
    ListEntry,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    StorageDescription,
    ThreadedStorage,
    Version,
    check_expected,
    listed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NOW = datetime.now(UTC)


class Objects:
    """Returns fixed results, and records calls and threads."""

    def __init__(self, count: int = 0) -> None:
        self.asked: list[Any] = []
        self.threads: set[int] = set()
        self.drawn = 0
        self.count = count

    def get(self, key: str, byte_range: RangeRequest) -> Retrieved:
        """Return two bytes."""
        self.threads.add(threading.get_ident())
        return Retrieved(b"ab", Version("1"), 2)

    def put(self, key: str, data: bytes, expected: Expected) -> Version:
        """Take anything."""
        self.asked.append((key, data, expected))
        return Version("2")

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """Delete nothing."""
        self.asked.append(list(keys))
        return []

    def list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield more than is wanted."""
        for number in range(self.count):
            self.drawn += 1
            yield info(f"a/{number:05}")


def info(key: str) -> ObjectInfo:
    """Return an object of one byte."""
    return ObjectInfo(key, 1, NOW)


def storage_of(objects: Objects, **promises: Any) -> ThreadedStorage:
    """Make a storage of them."""
    return ThreadedStorage(objects, StorageDescription("test://x"), Capabilities(**promises))


def names(entries: Iterator[ListEntry]) -> list[str]:
    """Return the names in a listing."""
    return [it.prefix if isinstance(it, CommonPrefix) else it.key for it in entries]


@pytest.mark.parametrize(
    ("expected", "found", "holds"),
    [
        (None, ABSENT, True),
        (None, Version("1"), True),
        (ABSENT, ABSENT, True),
        (Version("1"), Version("1"), True),
        (ABSENT, Version("1"), False),
        (Version("1"), Version("2"), False),
        (Version("1"), ABSENT, False),
    ],
)
def test_an_expectation_is_compared_with_the_found_version(
    *, expected: Expected, found: Any, holds: bool
) -> None:
    """The error of a mismatch has the key and the expectation."""
    if holds:
        check_expected("key", expected, found)
        return
    with pytest.raises(PreconditionFailedError, match="nothing was changed") as caught:
        check_expected("key", expected, found)
    assert (caught.value.context["key"], caught.value.context["expected"]) == ("key", expected)


@pytest.mark.parametrize(
    ("prefix", "after", "delimiter", "shown"),
    [
        ("", None, None, ["a", "a-", "a/b", "a/c", "b/c/d", "b/e"]),
        ("", None, "/", ["a", "a-", "a/", "b/"]),
        ("a", None, "/", ["a", "a-", "a/"]),
        ("a/", None, "/", ["a/b", "a/c"]),
        ("b/", None, "/", ["b/c/", "b/e"]),
        ("", "a-", "/", ["a/", "b/"]),
        ("", "a/", "/", ["b/"]),
        ("", "a/b", None, ["a/c", "b/c/d", "b/e"]),
        ("c", None, "/", []),
    ],
)
def test_listed_filters_and_groups_entries(
    prefix: str, after: str | None, delimiter: Any, shown: list[str]
) -> None:
    """The entries may come in pages of any size."""
    objects = [info(key) for key in ("a", "a-", "a/b", "a/c", "b/c/d", "b/e")]
    assert names(listed(objects, prefix, after, delimiter)) == shown
    for size in (1, 2, 3):
        found: list[str] = []
        last = after
        for start in range(0, len(objects), size):
            page = objects[start : start + size]
            found += names(listed(page, prefix, last, delimiter))
            last = max(last or "", page[-1].key)
        assert found == shown


async def test_a_listing_is_drawn_as_it_is_read() -> None:
    """A thousand objects with each hop; a group that fills many pages is shown once."""
    objects = Objects(5000)
    async with storage_of(objects) as storage:
        entries = storage.list_prefix(start_after="a/00998")
        assert await anext(entries) == info("a/00999")
        assert objects.drawn == 1000
        assert await anext(entries) == info("a/01000")
        assert objects.drawn == 2000
        assert [it async for it in storage.list_prefix(delimiter="/")] == [CommonPrefix("a/")]


async def test_a_write_on_a_thread_copies_its_buffer() -> None:
    """A buffer that the caller changes meanwhile is not what is written."""
    objects = Objects()
    async with storage_of(objects) as storage:
        data = bytearray(b"one")
        put = asyncio.ensure_future(storage.put("key", data, if_version=ABSENT))
        await asyncio.sleep(0)
        data[:] = b"two"
        assert await put == Version("2")
        assert objects.asked == [("key", b"one", ABSENT)]
        assert await storage.get_if_changed("key", Version("1")) is None
        assert (await storage.get("key")).data == b"ab"
        assert threading.get_ident() not in objects.threads
        await storage.copy("key", "other", if_version=Version("1"))
        assert objects.asked[-1] == ("other", b"ab", None)
        with pytest.raises(PreconditionFailedError):
            await storage.copy("key", "other", if_version=Version("0"))
        with pytest.raises(InvalidObjectKeyError):
            await storage.delete(["key", "../key"])
        assert len(objects.asked) == 2


async def test_unpromised_operations_are_refused() -> None:
    """The error gives the reason."""
    reasons = dict.fromkeys(("conditional_create", "conditional_update", "listing"), "too old")
    promises = dict.fromkeys(reasons, False)
    objects = Objects()
    async with storage_of(objects, reasons=reasons, **promises) as storage:
        for operation in (
            storage.put("key", b"", if_version=ABSENT),
            storage.put("key", b"", if_version=Version("1")),
            anext(storage.list_prefix()),
        ):
            with pytest.raises(UnsafeStorageError, match="too old"):
                await operation
        await storage.put("key", b"")
        assert len(objects.asked) == 1
    reasons = dict.fromkeys((*reasons, "writable"), "read only")
    async with storage_of(objects, reasons=reasons, writable=False) as storage:
        with pytest.raises(UnsafeStorageError, match="read only"):
            await storage.put("key", b"")
        with pytest.raises(UnsafeStorageError, match="read only"):
            await storage.delete([])
    assert len(objects.asked) == 1


async def test_a_storage_ends_with_its_block() -> None:
    """It also ends in the middle of a listing."""
    async with storage_of(Objects(3)) as storage:
        entries = storage.list_prefix()
        await anext(entries)
    for operation in (anext(entries), storage.get("key"), storage.sync(), storage.delete([])):
        with pytest.raises(StorageClosedError):
            await operation

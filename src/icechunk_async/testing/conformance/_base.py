"""The base of all groups of tests: sizes and hooks of a backend, and helpers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import pytest

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import ObjectNotFoundError
from icechunk_async.storage import CommonPrefix, ObjectInfo, registry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Data, ListEntry, Storage, StorageDescription

__all__ = [
    "Promises",
    "check_same",
    "exists",
    "fill",
    "listed",
    "names",
    "read",
    "skip_unless_promised",
    "take",
]


class Promises:
    """Base of all groups of tests."""

    many_keys: ClassVar[int] = 10_000
    """Keys in the largest listing: more than ten pages of any service."""

    page_keys: ClassVar[int] = 1_000
    """Keys that the service lists, or deletes, in one request; tests of paging use some more."""

    large_bytes: ClassVar[int] = 20 * 1024 * 1024
    """Size of the largest object: beyond what services take in one part."""

    @staticmethod
    def reopen(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
        """Open another handle on the same objects.

        It is also called in other processes, so it must be importable by name. These stay for the
        next test and end with the run. The default uses the backend's entry point.
        """
        return registry.reopen(description)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None] | None:
        """Return a block in which deleting ``key`` fails, or None if that cannot be arranged."""
        del storage, key
        return None


def check_same(found: Data, expected: bytes) -> None:
    """Fail unless a large body is the expected one; say where they differ.

    ``assert found == expected`` would write out both, megabytes of them.
    """
    body = bytes(found)
    if body != expected:
        pairs = enumerate(zip(body, expected, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(body), len(expected)))
        pytest.fail(
            f"{len(expected):,} bytes were stored and {len(body):,} came back; "
            f"they differ from byte {same:,} on"
        )


type Promise = Literal["conditional_create", "conditional_update", "listing", "shared"]


async def fill(storage: Storage, keys: Iterable[str], data: bytes = b"x") -> None:
    """Write an object under each key."""

    async def put(key: str) -> None:
        await storage.put(key, data)

    # Ten thousand objects one after another would take minutes at a service.
    await bounded_map(put, keys, limit=64)


async def read(storage: Storage, key: str) -> bytes:
    """Return the bytes of an object."""
    return bytes((await storage.get(key)).data)


async def exists(storage: Storage, key: str) -> bool:
    """Return whether there is an object."""
    try:
        await storage.get(key)
    except ObjectNotFoundError:
        return False
    return True


async def listed(
    storage: Storage,
    prefix: str = "",
    *,
    start_after: str | None = None,
    delimiter: Literal["/"] | None = None,
) -> list[ListEntry]:
    """Return all entries of a listing."""
    entries = storage.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
    return [entry async for entry in entries]


async def take(entries: AsyncIterator[ListEntry], count: int) -> list[ListEntry]:
    """Return the next entries of a listing, fewer at its end."""
    found: list[ListEntry] = []
    while len(found) < count:
        entry = await anext(entries, None)
        if entry is None:
            break
        found.append(entry)
    return found


def names(entries: Iterable[ListEntry]) -> list[str]:
    """Return the keys and groups of a listing."""
    found: list[str] = []
    for entry in entries:
        match entry:
            case ObjectInfo(key=name) | CommonPrefix(prefix=name):
                found.append(name)
    return found


def skip_unless_promised(storage: Storage, promise: Promise) -> None:
    """Skip the test, with the backend's reason, if a promise is not made.

    Separate tests check that such an operation is refused, and that there is a reason.
    """
    if not getattr(storage.capabilities, promise):
        reason = storage.capabilities.reasons.get(promise, "no reason given")
        pytest.skip(f"{promise} is not promised: {reason}")

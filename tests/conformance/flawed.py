"""A storage that passes everything on, as a base for storages that each break one promise."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from icechunk_async.errors import ObjectNotFoundError, PermissionDeniedError
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    RangeRequest,
    Retrieved,
    StorageDescription,
    Version,
)
from icechunk_async_memory import MemoryStorage, open_memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

__all__ = ["FLAWS", "Flawed", "breaks", "opened", "turn"]

type Delimiter = Literal["/"] | None


class Flawed:
    """Passes everything on to a memory storage, which keeps all promises.

    ``stuck`` holds keys that cannot be deleted.
    """

    breaks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: MemoryStorage) -> None:
        """Wrap an open storage."""
        self.inner = inner
        self.stuck: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        """All but sharing."""
        return self.inner.capabilities

    @property
    def description(self) -> StorageDescription:
        """That of the memory."""
        return self.inner.description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read."""
        return await self.inner.get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read what is new."""
        return await self.inner.get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        return await self.inner.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete what is not stuck."""
        wanted = list(keys)
        await self.inner.delete(key for key in wanted if key not in self.stuck)
        error = PermissionDeniedError("it is stuck")
        return [DeleteFailure(key, error) for key in wanted if key in self.stuck]

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """List."""
        found = self.inner.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async for entry in found:
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy."""
        return await self.inner.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Sync."""
        await self.inner.sync()

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read on this thread."""
        return self.inner.get_blocking(key, byte_range)

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write on this thread."""
        return self.inner.put_blocking(key, data)

    def close(self) -> None:
        """Say that the block ended."""

    async def everything(self) -> list[ListEntry]:
        """Return all entries, unspoilt."""
        return [entry async for entry in self.inner.list_prefix()]


FLAWS: list[type[Flawed]] = []
"""All storages that break a promise."""


def breaks[F: type[Flawed]](*tests: str) -> Callable[[F], F]:
    """Register a storage, with the names of the tests that must find it out."""

    def register(flaw: F) -> F:
        flaw.breaks = tests
        FLAWS.append(flaw)
        return flaw

    return register


@asynccontextmanager
async def opened(flaw: type[Flawed], url: str) -> AsyncIterator[Flawed]:
    """Open a flawed handle on the objects of a memory storage."""
    async with open_memory(url) as inner:
        storage = flaw(inner)
        yield storage
        storage.close()


async def turn() -> None:
    """Let everyone else run once."""
    await asyncio.sleep(0)


async def look_then_write(
    storage: MemoryStorage, key: str, data: Data, expected: Expected
) -> Version:
    """Write on condition in two steps, which is not atomic."""
    if expected is ABSENT:
        found = [entry async for entry in storage.list_prefix(key)]
        if found:
            return await storage.put(key, data, if_version=expected)
    elif expected is not None:
        found_version = None
        with suppress(ObjectNotFoundError):
            found_version = (await storage.get(key)).version
        if found_version != expected:
            return await storage.put(key, data, if_version=expected)
    # Here another writer comes between the look and the write.
    await turn()
    return await storage.put(key, data)


def with_data(found: Retrieved, data: bytes | memoryview) -> Retrieved:
    """Return the same with other bytes."""
    return replace(found, data=data)

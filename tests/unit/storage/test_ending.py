"""Storages that are used after their end: the error says which end it was."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from icechunk_async import Repository
from icechunk_async.errors import StorageClosedError
from icechunk_async.storage import CacheOptions, StorageDescription, ThreadedStorage, open_storage
from icechunk_async.storage.policies.cache import Cached
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import BlockingObjects, Storage

BY_LOOP = r"was used after its event loop ended.* Open it again on the event loop that uses it"
BY_BLOCK = r"was used after its 'async with' block ended\. Open it again\.$"


@asynccontextmanager
async def threaded(path: Path) -> AsyncGenerator[Storage]:
    """Open a storage as authors of backends make them."""
    objects = cast("BlockingObjects", SimpleNamespace(get=bytes))
    async with ThreadedStorage(objects, StorageDescription(str(path))) as storage:
        yield storage


@asynccontextmanager
async def cached(path: Path) -> AsyncGenerator[Storage]:
    """Open a cache around a storage that stays open."""
    del path
    async with open_storage(memory_url()) as storage:
        with closing(Cached(storage, CacheOptions(), immutable=lambda _: True)) as cache:
            yield cache


OPENING: dict[str, Callable[[Path], AbstractAsyncContextManager[Storage]]] = {
    "memory": lambda _: open_storage(memory_url()),
    "local": lambda path: open_storage(path.as_uri()),
    "threads": threaded,
    "cache": cached,
}


async def _get(storage: Storage) -> object:
    return await storage.get("chunks/key")


async def _session(repository: Repository) -> object:
    return await repository.readonly_session("main")


@pytest.mark.parametrize("kind", OPENING)
def test_an_error_says_whether_the_block_or_the_loop_ended(kind: str, tmp_path: Path) -> None:
    """Advice about a block does not help where none was written."""
    manager = OPENING[kind](tmp_path)

    async def opened() -> Storage:
        return await manager.__aenter__()

    async def left() -> Storage:
        async with OPENING[kind](tmp_path) as storage:
            return storage

    async def cancelled() -> Storage:
        with pytest.raises(asyncio.CancelledError):
            async with OPENING[kind](tmp_path) as storage:
                raise asyncio.CancelledError
        with pytest.raises(StorageClosedError, match=BY_BLOCK):
            await _get(storage)
        return storage

    for work, message in ((opened, BY_LOOP), (left, BY_BLOCK), (cancelled, BY_LOOP)):
        storage = asyncio.run(work())
        with pytest.raises(StorageClosedError, match=message):
            asyncio.run(_get(storage))


def test_a_repository_that_was_awaited_ended_with_its_loop() -> None:
    """It was in no block at all."""

    async def opened() -> Repository:
        return await Repository.create(memory_url())

    with pytest.warns(ResourceWarning, match="never closed"):
        repository = asyncio.run(opened())
    with pytest.raises(StorageClosedError, match=BY_LOOP):
        asyncio.run(_session(repository))
    del repository
    gc.collect()

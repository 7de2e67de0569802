"""Storages with retries. Other processes find them here, and import no more than they need."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from icechunk_async.format.layout import is_written_once
from icechunk_async.storage import registry
from icechunk_async.storage.policies.retry import Retrying
from icechunk_async.storage.policies.values import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

__all__ = ["dependable", "open_dependably", "reopen_dependably"]


def dependable(storage: Storage) -> Storage:
    """Wrap a storage as repositories do, with short pauses."""
    policy = RetryPolicy(max_tries=20, initial_seconds=0.01, max_seconds=0.3)
    return Retrying(storage, policy, immutable=is_written_once)


def reopen_dependably(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Open another handle with retries; found by this name in other processes."""
    return open_dependably(registry.reopen(description))


@asynccontextmanager
async def open_dependably(storage: AbstractAsyncContextManager[Storage]) -> AsyncIterator[Storage]:
    """Open a storage with retries."""
    async with storage as plain:
        yield dependable(plain)

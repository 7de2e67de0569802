"""Running the engine's coroutines without an event loop, where the storage never waits.

Zarr's synchronous store methods run on worker threads. Where a storage can answer on the calling
thread, the same coroutines that serve asynchronous callers run to their end in one step; there
is no second implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from icechunk_async.storage import BlockingStorage, Data, RangeRequest, Retrieved, Version

__all__ = ["AssetStorage", "DirectStorage", "run_directly"]


class AssetStorage(Protocol):
    """The part of a storage that files written once need."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        ...

    async def put(self, key: str, data: Data) -> Version:
        """Write one whole object."""
        ...

    async def sync(self) -> None:
        """Return when all that was written is durable."""
        ...


class DirectStorage:
    """The reading and writing half of a storage, answering on the calling thread."""

    def __init__(self, storage: BlockingStorage) -> None:
        """Wrap ``storage``."""
        self._storage = storage

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it, without ever waiting."""
        return self._storage.get_blocking(key, byte_range)

    async def put(self, key: str, data: Data) -> Version:
        """Write one whole object, without ever waiting."""
        return self._storage.put_blocking(key, data)

    async def sync(self) -> None:
        """Do nothing: who publishes syncs the storage itself, which knows what this half wrote."""


def run_directly[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Answer the result of a coroutine that awaits nothing that waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine that must not wait did")

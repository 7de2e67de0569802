"""A storage around a storage: the base of those that delay, count or fail on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from icechunk_async._runtime.concurrency import closing
from icechunk_async.storage.policies.wrapping import PassingStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from icechunk_async.storage import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Version,
    )

__all__ = ["WrappedStorage"]


class WrappedStorage(PassingStorage):
    """Passes every call on; subclasses override `before`, `after` or operations.

    ``sync`` takes no time, as for a service whose writes are durable at once.
    """

    async def before(self, operation: str, key: str) -> None:
        """Run before each request reaches the wrapped storage."""

    async def after(self, operation: str, key: str) -> None:
        """Run after each request that the wrapped storage carried out."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        await self.before("get", key)
        retrieved = await self.wrapped.get(key, byte_range)
        await self.after("get", key)
        return retrieved

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        await self.before("get_if_changed", key)
        retrieved = await self.wrapped.get_if_changed(key, version)
        await self.after("get_if_changed", key)
        return retrieved

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        await self.before("put", key)
        version = await self.wrapped.put(key, data, if_version=if_version)
        await self.after("put", key)
        return version

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects."""
        doomed = list(keys)
        await self.before("delete", ",".join(doomed))
        failures = await self.wrapped.delete(doomed)
        await self.after("delete", ",".join(doomed))
        return failures

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; counts as one request."""
        # With the first entry, when the request is made; a listing that is left half-way has no
        # `after`.
        await self.before("list_prefix", prefix)
        entries = self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async with closing(entries):
            async for entry in entries:
                yield entry
        await self.after("list_prefix", prefix)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        await self.before("copy", target)
        version = await self.wrapped.copy(source, target, if_version=if_version)
        await self.after("copy", target)
        return version

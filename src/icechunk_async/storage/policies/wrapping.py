"""A storage around a storage that changes nothing: the base of every policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from icechunk_async.storage.protocol import (
        Capabilities,
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        StorageDescription,
        Version,
    )

__all__ = ["PassingStorage"]


class PassingStorage:
    """Passes every call on; a subclass overrides the operations it changes.

    Contracts are those of `Storage`. It has no blocking methods even if the wrapped storage has
    them, because they would bypass the subclass.
    """

    def __init__(self, storage: Storage) -> None:
        """Wrap ``storage``, which is left open."""
        self.wrapped = storage

    def __repr__(self) -> str:
        """Show the layers."""
        return f"{type(self).__name__}({self.wrapped!r})"

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped storage."""
        return self.wrapped.capabilities

    @property
    def description(self) -> StorageDescription:
        """That of the wrapped storage; a policy does not travel with it."""
        return self.wrapped.description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        return await self.wrapped.get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await self.wrapped.get_if_changed(key, version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        return await self.wrapped.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects."""
        return await self.wrapped.delete(keys)

    def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects."""
        return self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        return await self.wrapped.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        await self.wrapped.sync()

"""What a storage is: the description of a place, which the engine opens."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, override

from icechunk_async.storage import ObjectInfo, open_storage
from icechunk_async.sync._display import Displayed
from icechunk_async.sync._mirrors import to_native
from icechunk_async.sync._settings import (
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
)
from icechunk_async.sync._states import StorageObjectInfo
from icechunk_async.sync.errors import translated
from icechunk_async.sync.portal import run
from icechunk_async.sync.storage._memory import MemoryObjects
from icechunk_async.sync.storage._redirect import follow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async.storage import Storage as AsyncStorage

__all__ = ["Place"]


class Place(Displayed):
    """Where objects are, and how they are reached."""

    def __init__(
        self,
        location: str | MemoryObjects | AsyncStorage,
        options: Mapping[str, object] | None = None,
        *,
        credentials: object = None,
        rows: Mapping[str, object] | None = None,
        redirects: bool = False,
    ) -> None:
        """Describe a place. Use the functions of this module instead."""
        self._location = location
        self._options = dict(options or {})
        self._credentials = credentials
        self._shown = dict(rows or {})
        self._redirects = redirects

    @override
    def __eq__(self, other: object) -> bool:
        """Compare what is described."""
        return isinstance(other, Place) and self.__dict__ == other.__dict__

    @override
    def __hash__(self) -> int:
        """Hash the place."""
        return hash(self._location)

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(name, value) for name, value in self._shown.items() if value is not None]

    async def place(self) -> tuple[str | AsyncStorage, dict[str, object]]:
        """Return what the engine's ``Repository.open`` and ``open_storage`` take.

        Returns: a location, and options (``storage_options``) with the credentials.

        Raises:
            StorageError: a redirect leads nowhere.
            IcechunkError: there are no credentials.
        """
        if isinstance(self._location, MemoryObjects):
            return self._location.url, {}
        if not isinstance(self._location, str):
            return self._location, {}
        if self._redirects:
            return await follow(self._location)
        options = dict(self._options)
        if self._credentials is not None and not options.get("anonymous"):
            options = {**await to_native(self._credentials).storage_options(), **options}
        return self._location, options

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[AsyncStorage]:
        """Open the engine's storage for the length of a block."""
        location, options = await self.place()
        if not isinstance(location, str):
            yield location
            return
        async with open_storage(location, **options) as storage:
            yield storage

    def default_settings(self) -> StorageSettings:
        """Return the settings that count for this kind of storage where nothing is set."""
        if self._shown.get("type") not in ("in-memory", "local filesystem"):
            return StorageSettings()
        local = self._shown["type"] == "local filesystem"
        return StorageSettings(
            concurrency=StorageConcurrencySettings(5, 4096 if local else 1),
            retries=StorageRetriesSettings(1, 0, 0),
            unsafe_use_conditional_update=False if local else None,
            unsafe_use_metadata=False if local else None,
        )

    def list_objects(
        self, settings: StorageSettings | None = None, prefix: str | None = None
    ) -> list[tuple[str, int]]:
        """Return key and size of every object; :meth:`list_objects_metadata` tells more."""
        return [(it.key, it.size_bytes) for it in self.list_objects_metadata(settings, prefix)]

    def list_objects_metadata(
        self, settings: StorageSettings | None = None, prefix: str | None = None
    ) -> list[StorageObjectInfo]:
        """Return key, size and time of every object, in the order of their keys.

        Args:
            settings: their retries count.
            prefix: only keys that begin so.

        Raises:
            StorageError: the storage failed.

        Cost: one request a page of the listing; all of it is in memory.
        """
        return run(self._listed(settings or self.default_settings(), prefix or ""))

    async def _listed(self, settings: StorageSettings, prefix: str) -> list[StorageObjectInfo]:
        from icechunk_async.engine.policies import policies_of  # noqa: PLC0415 - needs NumPy
        from icechunk_async.storage.policies.stack import with_retries  # noqa: PLC0415 - needs NumPy

        with translated():
            async with self.opened() as storage:
                retry = policies_of(settings.to_native()).retry
                entries = with_retries(storage, retry).list_prefix(prefix)
                return [
                    StorageObjectInfo(it.key, it.size_bytes, it.last_modified)
                    async for it in entries
                    if isinstance(it, ObjectInfo)
                ]

    @classmethod
    def from_url(cls, url: str | os.PathLike[str], **options: object) -> Self:
        """Describe a path or URL of any installed backend, with the options of that backend.

        This is an addition to the official class. See ``icechunk_async.storage.open_storage``.
        """
        location = os.fspath(url)
        if "://" not in location:
            location = Path(location).expanduser().absolute().as_uri()
        return cls(location, options, rows={"type": "url", "url": location})

    @classmethod
    def from_storage(cls, storage: AsyncStorage) -> Self:
        """Use an open asynchronous storage, such as one of your own. Does not pickle.

        This is an addition to the official class. The storage stays open as long as its own
        block does, and must work on the facade's event loop.
        """
        return cls(storage, rows={"type": "object", "url": storage.description.url})

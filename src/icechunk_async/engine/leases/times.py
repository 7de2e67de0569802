"""The time by the clock of a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime.concurrency import closing
from icechunk_async.errors import StorageError
from icechunk_async.format.ids import BackupId
from icechunk_async.storage import ObjectInfo
from icechunk_async.storage.extensions import TellsTime

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.storage import Storage

__all__ = ["listed_at", "modified_at", "storage_time", "told_time"]

_CLEANUP_SECONDS: Final = 15


async def modified_at(storage: Storage, key: str) -> datetime:
    """Return when an object was written, by the storage's clock, perhaps in whole seconds.

    Raises:
        ObjectNotFoundError: no object has this key.
        StorageError: the storage does not tell.

    Cost: one request, or two where reading an object does not tell its time.
    """
    found = await storage.get(key)
    if found.last_modified is not None:
        return found.last_modified
    return await listed_at(storage, key)


async def told_time(backend: object) -> datetime | None:
    """Return the time by the storage's clock if the backend simply tells it; else None."""
    if not isinstance(backend, TellsTime):
        return None
    try:
        return await backend.current_time()
    except StorageError:
        return None


async def storage_time(storage: Storage) -> datetime:
    """Return the time by the storage's clock, perhaps in whole seconds.

    Raises:
        StorageFullError: there is no room for an empty object.
        StorageError: the storage does not tell.

    Cost: three requests: an empty object is written, listed and deleted.

    Cancellation: waits some seconds for the deletion. An object that stays is not part of the
    repository and does no harm.
    """
    from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

    # Named like those of a trial, so that collection removes what a killed process leaves.
    key = f"{PROBE_PREFIX}{BackupId.random()}"
    try:
        await storage.put(key, b"")
        return await listed_at(storage, key)
    finally:
        # Also if the caller was cancelled, but not for longer than somebody waits.
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
            await storage.delete([key])


async def listed_at(storage: Storage, key: str) -> datetime:
    """Return when an object was written, as a listing tells.

    Raises:
        StorageError: it is not listed.
    """
    entries = storage.list_prefix(key)
    async with closing(entries):
        async for entry in entries:
            if isinstance(entry, ObjectInfo) and entry.key == key:
                return entry.last_modified
    raise StorageError(f"The storage does not list {key!r}, which was written there just now.")

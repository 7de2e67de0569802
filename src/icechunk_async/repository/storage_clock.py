"""Asking a storage what time it is, since ages of objects are by its clock."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import BackupId
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.storage import Storage

__all__ = ["check_is_past"]

_CLEANUP_SECONDS: Final = 15
_COARSENESS: Final = timedelta(seconds=1)
"""Stores cut times off to the second, and file systems to some milliseconds."""


async def check_is_past(storage: Storage, moment: datetime) -> None:
    """Refuse a time that by the storage's clock is still to come.

    Raises:
        InvalidInputError: it is; one of the two clocks is wrong.

    Cost: three requests: an empty object is written, listed and deleted.

    Cancellation: waits for the deletion, for a while. An object that stays all the same is no part
    of the repository, and in nobody's way.
    """
    from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

    key = f"{PROBE_PREFIX}{BackupId.random()}"
    try:
        await storage.put(key, b"")
        times = [
            entry.last_modified
            async for entry in storage.list_prefix(key)
            if isinstance(entry, ObjectInfo)
        ]
    finally:
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
            await storage.delete([key])
    for time in times:
        if moment >= time + _COARSENESS:
            raise InvalidInputError(
                f"Garbage collection was asked to delete what is older than {moment.isoformat()}, "
                f"and by the clock of the storage it is only {time.isoformat()}: objects that are "
                "written at this moment would count as old. Set this machine's clock right, or "
                "name an earlier time."
            )

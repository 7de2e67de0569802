"""The clock of the storage, by which objects are dated, beside that of this machine.

Garbage is told from work in progress by its age alone. Both the age and the cutoff must therefore
be times of one clock. Objects have theirs from the storage; a cutoff is usually counted back from
the time of the machine that collects.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async.engine.leases.times import storage_time, told_time
from icechunk_async.errors import InvalidInputError, StorageFullError

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["MOST_AHEAD", "checked_by_storage"]

MOST_AHEAD: Final = timedelta(minutes=5)
"""How far this machine's clock may be ahead. A cutoff that counts back from a clock further ahead
would protect less than it says."""

_COARSENESS: Final = timedelta(seconds=1)
"""Stores truncate times to seconds, and file systems to some milliseconds."""


async def checked_by_storage(
    storage: Storage, backend: object, cutoff: datetime, newest: datetime
) -> datetime:
    """Return a cutoff that is past by the storage's clock, so that what is written later is young.

    That is the given one, or the present time of a storage's clock that is a little behind.

    Args:
        storage: whose clock counts.
        backend: the storage without its policies, which may be able to tell the time.
        cutoff: the time before which objects are to be deleted.
        newest: when the newest object that is known was written. If the cutoff is before that, a
            storage that cannot simply tell the time is not asked.

    Raises:
        InvalidInputError: one of the two clocks is wrong; it says which times they show.
        StorageFullError: there is no room to ask for the time; it names a cutoff that needs none.

    Cost: none if the backend tells the time, else at most three requests: an empty object is
    written, listed and deleted.

    Cancellation: waits some seconds for the deletion. An object that stays is not part of the
    repository and does no harm.
    """
    now = await told_time(backend)
    if now is None:
        if cutoff < newest:
            return cutoff
        now = await _tried(storage, newest)
    here = clock.from_us(clock.now_us())
    if cutoff >= now + _COARSENESS:
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {cutoff.isoformat()}, "
            f"and by the clock of the storage it is only {now.isoformat()}: objects that are "
            "written at this moment would count as old. Set this machine's clock right, or "
            "name an earlier time."
        )
    if here > now + MOST_AHEAD:
        raise InvalidInputError(
            f"Garbage collection was asked to delete what is older than {cutoff.isoformat()}. By "
            f"this machine's clock it is {here.isoformat()}, and by the clock of the storage only "
            f"{now.isoformat()}: a time that was counted back from the former is later than it "
            "should be, so work in progress could be deleted. Set the wrong one of the two clocks "
            "right, or collect from a machine whose clock agrees with the storage's."
        )
    # Of whole seconds the rest is unknown, and `is_older` takes that into account.
    return cutoff if now.microsecond == 0 else min(cutoff, now)


async def _tried(storage: Storage, newest: datetime) -> datetime:
    """Return the time of an empty object that is written now."""
    try:
        return await storage_time(storage)
    except StorageFullError as error:
        raise StorageFullError(
            "The storage has no room for the empty object by which its clock is read, so nothing "
            f"was collected. Name a cutoff before {newest.isoformat()}, when the newest snapshot "
            "was written: that needs no reading of the clock. Or make room."
        ) from error

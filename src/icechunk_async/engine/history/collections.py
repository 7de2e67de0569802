"""Garbage collections beside open sessions: what they may delete, as far as it can be known.

A collection first makes known that it runs (format 2: an entry in the operations log), and deletes
afterwards, for as long as it takes. So a chunk that is still there when a commit looks for it may
be gone when the commit has landed. What decides is the age: a collection deletes only what is older
than its cutoff. The log does not tell the cutoff, so our collector leaves a note of it, as the name
of an empty object, before it makes itself known. Of a collection without a note, as the official
engine runs them, nothing but its time is known.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import closing, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import OutcomeUnknownError, StorageUnavailableError
from icechunk_async.format.ids import BackupId
from icechunk_async.format.layout import COLLECTIONS
from icechunk_async.format.operations_log import GarbageCollectionRan
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Storage

__all__ = [
    "Collection",
    "DraftOutdatedError",
    "Guard",
    "collected_since",
    "leave_note",
    "read_notes",
]

_MARGIN: Final = timedelta(hours=1)
"""How wrongly the length of a session may be measured: clocks are set, machines are suspended."""
_DIGITS: Final = 17
_TRIES: Final = 3
_KEPT: Final = timedelta(days=30)
"""How long notes stay. Sessions that are open for longer ask for each of their chunks."""


class DraftOutdatedError(Exception):
    """Files of a publication may have been collected: make it again, under new names."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A garbage collection that ran, or still runs."""

    ran_at_us: int
    """Its time in the operations log."""
    cutoff: datetime | None = None
    """It deletes what is older, by the storage's clock; None if nobody knows."""
    noted_at: datetime | None = None
    """When the cutoff was noted, by the storage's clock."""
    name: str = ""
    """The note's name."""

    def may_reach(self, age: timedelta) -> bool:
        """Return whether it may delete what a session wrote that has been open for ``age``.

        Only lengths of time are compared: what the session wrote was at most this old when the
        note was left, whatever the clocks of the machines show.
        """
        # Without a note the collection may be one of another engine, with any cutoff.
        if self.cutoff is None or self.noted_at is None:
            return True
        return self.noted_at - self.cutoff < age + _MARGIN


class Guard(Protocol):
    """Keeps a session from publishing references to what was collected."""

    @property
    def since_us(self) -> int:
        """The place in the operations log up to which everything was looked at."""
        ...

    async def admit(self, ran: Sequence[Collection], up_to_us: int, *, stored: bool) -> None:
        """Return if a publication may land although collections ran.

        Args:
            ran: the collections after ``since_us``; without an operations log, all that left a
                note.
            up_to_us: the place in the log where they were looked for; 0 without a log.
            stored: whether files of the publication may be stored already.

        Raises:
            ChunksCollectedError: chunks that the session wrote are gone, or are being deleted.
            DraftOutdatedError: its other files may be; the publication must be made again.
        """
        ...


def collected_since(info: RepoInfo, since_us: int) -> list[Collection]:
    """Return the collections in the operations log after a place in it.

    If the log that is at hand begins later, one more is assumed.
    """
    ran: list[Collection] = []
    for update in info.updates:
        if update.updated_at <= since_us:  # times descend along the log, whatever clocks say
            return ran
        if isinstance(update.detail, GarbageCollectionRan):
            ran.append(Collection(update.updated_at))
    # The rest of the log is in backups. One collection too many costs a look at the chunks; one too
    # few could cost chunks.
    if info.before_updates is not None:
        ran.append(Collection(since_us))
    return ran


async def leave_note(storage: Storage, ran_at_us: int, cutoff: datetime) -> None:
    """Note what a collection that is about to make itself known may delete.

    Raises:
        StorageUnavailableError: it may not be stored; the collection must not continue.

    Cost: two requests at once, and one more if there are old notes, which are deleted.
    """
    # All of it is in the name, so that one listing reads every note. The random part keeps notes of
    # tries apart, of which only one has the time of the entry that landed.
    times = f"{ran_at_us:0{_DIGITS}d}.{max(0, clock.to_us(cutoff)):0{_DIGITS}d}"
    key = f"{COLLECTIONS}{times}.{BackupId.random()}"

    async def put() -> None:
        for tries_left in reversed(range(_TRIES)):  # written twice it is the same note
            try:
                await storage.put(key, b"")
            except OutcomeUnknownError as error:
                if not tries_left:
                    raise StorageUnavailableError(
                        f"The note about a garbage collection may not be stored: {error} Nothing "
                        "was deleted; try again."
                    ) from error
            else:
                return

    await gather(put(), _forget_old_notes(storage))


async def read_notes(storage: Storage) -> list[Collection]:
    """Return the collections that left a note. Cost: one request, for up to some hundred."""
    found: list[Collection] = []
    entries = storage.list_prefix(COLLECTIONS)
    async with closing(entries):
        async for entry in entries:
            note = _parse(entry) if isinstance(entry, ObjectInfo) else None
            if note is not None:
                found.append(note)
    return found


def _parse(entry: ObjectInfo) -> Collection | None:
    """Read the name of a note; None if it is something else."""
    name = entry.key.removeprefix(COLLECTIONS)
    ran_at, _, rest = name.partition(".")
    cutoff = rest.partition(".")[0]
    # `isdecimal` accepts digits of all scripts, which `int` reads as well: only ASCII is ours.
    if not (ran_at.isdecimal() and cutoff.isdecimal() and name.isascii()):
        return None
    return Collection(int(ran_at), clock.from_us(int(cutoff)), entry.last_modified, name)


async def _forget_old_notes(storage: Storage) -> None:
    """Delete notes that no session needs any more.

    Their times are compared with each other, so that no machine's clock matters.
    """
    notes = await read_notes(storage)
    times = [it.noted_at for it in notes if it.noted_at is not None]
    if times:
        limit = max(times) - _KEPT
        old = [it.name for it in notes if it.noted_at is not None and it.noted_at < limit]
        if old:  # one that cannot be deleted does no harm
            await storage.delete([f"{COLLECTIONS}{name}" for name in old])

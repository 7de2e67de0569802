"""Count what killed processes left: it takes room, is part of no snapshot, and harms nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.leases.register import count_expired
from icechunk_async.engine.upkeep.copying.contents import MARK
from icechunk_async.engine.upkeep.copying.marks import Mark, read_references
from icechunk_async.engine.upkeep.room import count_unfinished, trial_objects

if TYPE_CHECKING:
    from icechunk_async.engine.open import Engine
    from icechunk_async.storage import Storage

__all__ = ["NOTHING_LEFT", "Leftovers", "find_leftovers"]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The remains of killed processes at the place of a repository.

    Files that writers are writing at this moment are counted, too: a second look tells. Objects
    that were stored and never committed are garbage like any other; a dry run of garbage
    collection counts those.
    """

    unfinished: int = 0
    """Files on a local disk that never became objects, and objects by which the storage was
    tried."""
    unfinished_bytes: int = 0
    expired_sessions: int = 0
    """Sessions whose leases nobody renewed in time, by this machine's clock and an hour; they may
    have spilled changes."""
    stopped_copies: int = 0
    """1 if a copy to this place was stopped before it showed what it was to bring."""

    @property
    def advice(self) -> tuple[str, ...]:
        """Return a sentence for each kind that was found: what it is, and how it goes."""
        found: list[str] = []
        if self.unfinished:
            found.append(
                f"{self.unfinished:,} file(s) of killed writers, {self.unfinished_bytes:,} bytes: "
                "garbage collection removes those that are older than its cutoff"
            )
        if self.expired_sessions:
            found.append(
                f"{self.expired_sessions:,} session(s) whose lease expired: garbage collection "
                "removes them a day later, with what they spilled"
            )
        if self.stopped_copies:
            found.append(
                "a copy to this place that was stopped: run the same copy again to finish it"
            )
        return tuple(found)


NOTHING_LEFT: Final = Leftovers()


async def find_leftovers(engine: Engine) -> Leftovers:
    """Count what killed processes left.

    Raises:
        StorageError: the storage failed.

    Cost: about five requests, and two for each session with a lease. On a local disk all folders
    are listed.
    """
    storage = engine.storage
    unfinished, trials, sessions, stopped = await gather(
        count_unfinished(engine),
        trial_objects(storage),
        count_expired(storage),
        _has_stopped_copy(storage),
    )
    return Leftovers(
        unfinished.count + len(trials),
        unfinished.size_bytes + sum(it.size_bytes for it in trials),
        sessions,
        int(stopped),
    )


async def _has_stopped_copy(storage: Storage) -> bool:
    found = await read_if_there(storage, MARK)
    if found is None:
        return False
    mark, there = Mark.decode(found.data), await read_references(storage)
    if there is None or not mark.interrupted(there):
        return False
    # What somebody changed after a copy had ended is among neither of its states.
    return all(it in mark.references.get(key, ()) for key, it in there.sums.items())

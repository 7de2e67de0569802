"""Check that every object exists that branches and tags lead to, virtual sources included.

This is a verification at the level *length*, told in fewer words. It also counts what killed
processes left, which takes room, is part of no snapshot, and harms nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.leases.register import count_expired
from icechunk_async.engine.upkeep.copying.contents import MARK
from icechunk_async.engine.upkeep.copying.marks import Mark, read_references
from icechunk_async.engine.upkeep.integrity.report import Level
from icechunk_async.engine.upkeep.integrity.verify import VerifyOptions, verify
from icechunk_async.engine.upkeep.room import count_unfinished, trial_objects

if TYPE_CHECKING:
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.integrity.report import VerifyReport
    from icechunk_async.storage import Storage

__all__ = [
    "CHECK",
    "NOTHING_LEFT",
    "BrokenReference",
    "Leftovers",
    "ReferenceReport",
    "check_references",
    "find_leftovers",
]

CHECK: Final = VerifyOptions(Level.LENGTH)
"""The level of a check, of all refs and chunks."""


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


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """An object that is not as it must be, or with references that it cannot serve."""

    kind: str
    location: str
    """Its key in the repository, or its URL if it is virtual."""
    problem: str
    """See `icechunk_async.upkeep.Finding`."""
    detail: str
    references: int
    """The number of references to it, in all manifests; 0 for an object without chunks."""


@dataclass(frozen=True, slots=True)
class ReferenceReport:
    """The number of objects that were looked up, and those that are not usable."""

    snapshots: int
    transaction_logs: int
    manifests: int
    chunk_objects: int
    """Of the repository."""
    virtual_objects: int
    """Outside of the repository. An object with references to several states counts for each."""
    virtual_not_authorized: int
    """Virtual objects in containers that were not authorised."""
    broken: tuple[BrokenReference, ...] = ()
    """References first, then snapshots, what they refer to, and so on."""
    not_looked_at: tuple[str, ...] = ()
    """Sentences about parts that were in question and not looked at."""
    leftovers: Leftovers = NOTHING_LEFT
    """The remains of killed processes, which are no damage."""

    @property
    def is_whole(self) -> bool:
        """Return whether every object that could be looked up is usable."""
        return not self.broken

    @classmethod
    def of(cls, report: VerifyReport, leftovers: Leftovers) -> Self:
        """Return a verification in these words, with what killed processes left."""
        return cls(
            report.snapshots,
            report.transaction_logs,
            report.manifests,
            report.chunk_objects,
            report.virtual_objects,
            report.virtual_not_authorized,
            tuple(
                BrokenReference(it.kind, it.location, it.problem, it.detail, it.references)
                for it in report.findings
            ),
            tuple(it.what for it in report.not_looked_at),
            leftovers,
        )


async def check_references(
    engine: Engine, progress: ProgressCallback | None = None
) -> ReferenceReport:
    """Check all objects; see `Repository.check_references`."""
    report = await verify(engine, CHECK, progress=progress)
    return ReferenceReport.of(report, await find_leftovers(engine))

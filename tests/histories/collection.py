"""Writers, expirers, collectors and readers of one repository, and a check of their work."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import numpy as np

from icechunk_async import ForkSession, Packing, Repository, RepositoryConfig
from icechunk_async._runtime import clock
from icechunk_async.conflicts import BasicConflictSolver
from icechunk_async.errors import (
    ChunksCollectedError,
    ConflictError,
    FormatError,
    IcechunkError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.storage import ObjectInfo
from icechunk_async.testing.histories import Attempt, Outcome, find_anomalies
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async import Session, SnapshotId
    from icechunk_async.storage import Data, Expected, ListEntry, Storage, Version

__all__ = [
    "Actor",
    "Book",
    "Collector",
    "Dated",
    "Expirer",
    "Reader",
    "Writer",
    "check",
    "now",
    "prepare",
]

BRANCHES: Final = ("main", "dev")
CHUNKS: Final = 8
STEPS: Final = 4
HOUR: Final = 3600.0
LEASE: Final = timedelta(hours=6)
PACKED: Final[dict[str, Any]] = {
    "packing": Packing(target_bytes=2_000, max_chunk_bytes=1_000),
    "config": RepositoryConfig(inline_chunk_threshold_bytes=0),
}
"""Every chunk goes to an object that others share; of one writer in two."""


class Dated(WrappedStorage):
    """Dates objects by the clock of the history, as a service does by its own."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._times: dict[str, Any] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write an object."""
        version = await self.wrapped.put(key, data, if_version=if_version)
        self._times[key] = clock.from_us(clock.now_us())
        return version

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object."""
        version = await self.wrapped.copy(source, target, if_version=if_version)
        self._times[target] = clock.from_us(clock.now_us())
        return version

    async def get(self, key: str, byte_range: Any = None) -> Any:
        """Read an object."""
        return replace(await self.wrapped.get(key, byte_range), last_modified=self._times.get(key))

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects."""
        async for it in self.wrapped.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            if isinstance(it, ObjectInfo) and it.key in self._times:
                yield replace(it, last_modified=self._times[it.key])
            else:
                yield it


class Slow(WrappedStorage):
    """Deletes late at times: a commit may land between the decision to delete and the deletion."""

    def __init__(self, storage: Storage, rng: random.Random, seconds: float) -> None:
        super().__init__(storage)
        self._rng = rng
        self._seconds = seconds

    async def before(self, operation: str, key: str) -> None:
        """Wait before deletions."""
        if operation == "delete":
            await anyio.sleep(self._rng.choice([0.0, self._rng.random() * self._seconds]))


@dataclass
class Book:
    """The attempts, the answers that were given, and the promises that were broken."""

    attempts: list[Attempt] = field(default_factory=list[Attempt])
    writes: dict[str, dict[str, bytes]] = field(default_factory=dict[str, "dict[str, bytes]"])
    """By name of the commit: the bytes of each chunk."""
    replaced: set[str] = field(default_factory=set[str])
    """Names of commits that an amendment took the place of, or may have."""
    snapshots: dict[SnapshotId, str] = field(default_factory=dict["SnapshotId", str])
    """Commits that were acknowledged, and their names."""
    expired_before: float = 0.0
    """Snapshots that were written before this may have expired."""
    collections_begun: int = 0
    collections_incomplete: int = 0
    """Those that run or failed: they may be about to delete what is still there."""
    counts: Counter[str] = field(default_factory=Counter[str])
    anomalies: list[str] = field(default_factory=list[str])

    def report(self, anomaly: str) -> None:
        """Note that a promise was broken."""
        self.anomalies.append(f"{now():.3f}: {anomaly}")


def now() -> float:
    """Return the time of the history, in seconds."""
    return asyncio.get_running_loop().time()


class Actor:
    """A program that opens handles for itself and decides at random."""

    def __init__(self, storage: Storage, name: str, seed: int, book: Book) -> None:
        self.storage = storage
        self.name = name
        self.seed = seed
        self.rng = random.Random(f"{seed}/{name}")
        self.book = book

    async def pause(self, hours: float) -> None:
        """Wait for a random time: often a moment, at times hours."""
        # Of virtual time, so hours cost nothing. Moments make races, and hours make things old.
        longest = self.rng.choice([0.01, 60.0, hours * HOUR, hours * HOUR])
        await anyio.sleep(self.rng.random() * longest)

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[Repository]:
        """Open the repository, trying again while the service is busy."""
        async with AsyncExitStack() as stack:
            while True:
                try:
                    repository = await stack.enter_async_context(
                        Repository.open(self.storage, **options)
                    )
                except IcechunkError:
                    continue
                break
            yield repository


class Collector(Actor):
    """Deletes garbage, mostly all that is older than this moment."""

    slowest_seconds = HOUR / 2
    """The longest time that a deletion takes to begin."""

    async def run(self, over: anyio.Event) -> None:
        """Collect again and again until the writers are done, and once more."""
        self.storage = Slow(self.storage, self.rng, self.slowest_seconds)
        while not over.is_set():
            await self.pause(2)
            await self.collect()
        await self.collect()

    async def collect(self) -> None:
        """Collect once."""
        back = self.rng.choice([0.0, 0.0, 0.0, self.rng.random() * HOUR])
        cutoff = clock.from_us(clock.now_us()) - timedelta(seconds=back)
        self.book.collections_begun += 1
        # Also before: from here on chunks may go.
        self.book.collections_incomplete += 1
        try:
            async with self.opened() as repository:
                report = await repository.garbage_collect(cutoff)
        except IcechunkError:
            self.book.counts["collections failed"] += 1
            return
        self.book.counts["chunk objects deleted"] += report.chunks_deleted
        self.book.counts["snapshots deleted"] += report.snapshots_deleted
        # One that failed may have left requests that land later, so that it never counts as
        # complete.
        if not report.failures:
            self.book.collections_incomplete -= 1


class Expirer(Actor):
    """Drops old snapshots from the history."""

    longest_seconds = 3 * HOUR
    """The oldest cutoff, before the present."""

    async def run(self, over: anyio.Event) -> None:
        """Expire again and again until the writers are done."""
        while not over.is_set():
            await self.pause(3)
            await self.expire()

    async def expire(self) -> None:
        """Expire once."""
        back = self.rng.random() * self.longest_seconds * self.rng.choice([0.0, 0.3, 1.0])
        # Before it is asked for: a commit may vanish while the reply is on its way.
        self.book.expired_before = max(self.book.expired_before, now() - back)
        cutoff = clock.from_us(clock.now_us()) - timedelta(seconds=back)
        with suppress(IcechunkError):
            async with self.opened() as repository:
                gone = await repository.expire_snapshots(cutoff)
                self.book.counts["snapshots expired"] += len(gone)


class Reader(Actor):
    """Reads what was committed, while it is part of a branch."""

    async def run(self, over: anyio.Event) -> None:
        """Read again and again until the writers are done."""
        while not over.is_set():
            await self.pause(1)
            if not self.book.snapshots:
                continue
            snapshot_id = self.rng.choice(list(self.book.snapshots))
            try:
                async with self.opened() as repository:
                    await self.look(repository, snapshot_id)
            except IcechunkError:
                pass  # the service was busy

    async def look(self, repository: Repository, snapshot_id: SnapshotId) -> None:
        """Read a commit; it may be gone only if no branch leads to it any more."""
        name = self.book.snapshots[snapshot_id]
        try:
            session = await repository.readonly_session(snapshot_id=snapshot_id)
            for key, data in self.book.writes[name].items():
                found = await read(session, key)
                if found != data:
                    self.book.report(f"{key} of {name} reads {found!r:.60}")
            self.book.counts["commits read meanwhile"] += 1
        except (StorageUnavailableError, OutcomeUnknownError):
            raise
        except IcechunkError as error:
            for branch in BRANCHES:
                line = [it.id async for it in repository.ancestry(branch=branch)]
                # Gone from all branches, it may be damaged or missing: it was expired, or amended
                # away.
                if snapshot_id in line:
                    self.book.report(f"{name} is on {branch} and not whole: {error}")


class Writer(Actor):
    """Commits to random branches, alone or with forks, with a lease or without."""

    leases_hold = True
    """Whether all who collect here know of leases."""

    async def run(self) -> None:
        """Work until all steps are done."""
        packed = PACKED if self.rng.random() < 0.5 else {}
        for count in range(STEPS):
            await self.pause(1)
            name = f"{self.name}-{count}"
            # A lease shields the sessions beside it, so some histories have no leases.
            kinds = [self.plain, *[self.leased, self.resumed][: self.seed % 3], self.plain]
            kind = self.rng.choice(kinds)
            async with self.opened(**packed) as repository:
                await kind(repository, name, packed)

    async def plain(self, repository: Repository, name: str, _packed: dict[str, Any]) -> None:
        """Commit, or amend, without a lease."""
        branch = self.rng.choice(BRANCHES)
        amend = repository.spec_version > 1 and self.rng.random() < 0.25

        async def work() -> Session:
            session = await repository.writable_session(branch)
            await self.fill(session, name)
            return session

        await self.attempt(name, branch, work, amend=amend)

    async def leased(self, repository: Repository, name: str, _packed: dict[str, Any]) -> None:
        """Commit with a lease."""
        branch = self.rng.choice(BRANCHES)

        async def work() -> Session:
            session = await repository.writable_session(branch, lease=LEASE)
            await self.fill(session, name)
            return session

        await self.attempt(name, branch, work, leased=True)

    async def resumed(self, _: Repository, name: str, packed: dict[str, Any]) -> None:
        """Spill, crash, and let another process continue, hours later."""
        branch = self.rng.choice(BRANCHES)
        async with AsyncExitStack() as stack:

            async def work() -> Session:
                async with self.opened(**packed) as first:
                    session = await first.writable_session(branch, lease=LEASE)
                    await self.fill(session, name)
                    await session.spill()
                    session_id = session.session_id
                await self.pause(4)
                second = await stack.enter_async_context(self.opened(**packed))
                again = await second.resume_session(session_id)
                for key, data in self.book.writes[name].items() if self.leases_hold else ():
                    if await read(again, key) != data:
                        self.book.report(f"{key} of {name} is lost in the session resumed")
                self.book.counts["sessions resumed"] += 1
                await self.fill(again, name)
                return again

            await self.attempt(name, branch, work, leased=True)

    async def fill(self, session: Session, name: str) -> None:
        """Write some chunks, here and in forks, and take time."""
        written = self.book.writes.setdefault(name, {})
        for _ in range(self.rng.randint(1, 3)):
            await self.put(session, name, written)
            await self.pause(1)
        if self.rng.random() < 0.4:
            forks: list[ForkSession] = []
            for _ in range(2):
                fork = await session.fork()
                if self.rng.random() < 0.5:
                    fork = pickle.loads(pickle.dumps(fork))
                async with fork.attached(self.storage):
                    await self.put(fork, name, written)
                forks.append(fork)
                await self.pause(1)
            await session.merge(*forks)

    async def put(
        self, session: Session | ForkSession, name: str, written: dict[str, bytes]
    ) -> None:
        """Write a chunk that no other has the bytes of, inline or as an object."""
        key = f"a/c/{self.rng.randrange(CHUNKS)}"
        data = f"{name} {key} {self.rng.random()} ".encode()
        data *= self.rng.choice([1, 30])
        await write(session, key, data)
        # After the write: one that raised is not part of the session.
        written[key] = data

    async def attempt(
        self, name: str, branch: str, work: Any, *, leased: bool = False, amend: bool = False
    ) -> None:
        """Work and publish; note the outcome, and what was refused for which reason."""
        began, outcome = now(), Outcome.REFUSED
        session: Session | None = None
        try:
            session = await work()
            await self.pause(2)
            await self.publish(session, name, leased=leased, amend=amend)
            outcome = Outcome.ACKNOWLEDGED
            self.book.snapshots[session.snapshot_id] = name
        except OutcomeUnknownError:
            # The outcome of another request may be unknown, such as that of a lease. That commits
            # nothing.
            committing = session is not None and (session.read_only or session.outcome_unknown)
            outcome = Outcome.UNKNOWN if committing else Outcome.REFUSED
        except IcechunkError as error:
            self.book.counts[type(error).__name__] += 1
            if isinstance(error, FormatError):
                self.book.report(f"{name} was told of damage, and nothing is damaged: {error}")
            if session is not None and session.outcome_unknown:
                outcome = Outcome.UNKNOWN
        self.book.counts[outcome.value] += 1
        self.book.attempts.append(Attempt(name, branch, began, now(), outcome))

    async def publish(self, session: Session, name: str, *, leased: bool, amend: bool) -> None:
        """Publish; write again what was collected, unless patience ends."""
        for _ in range(6):
            begun = self.book.collections_begun
            try:
                await self.publish_once(session, name, amend=amend)
            except ChunksCollectedError:
                self.book.counts["commits refused for collected chunks"] += 1
                if leased and self.leases_hold:
                    self.book.report(f"{name} has a lease and lost chunks")
                await self.rewrite(session, name, begun)
            else:
                return
        raise ConflictError("collected over and over")

    async def publish_once(self, session: Session, name: str, *, amend: bool) -> None:
        """Commit or amend."""
        if amend:
            # Before the amendment: if its reply is lost, the tip may have been replaced.
            self.book.replaced.add(await self.message_of_tip(session))
            await session.amend(name)
        else:
            await session.commit(name, rebase_with=BasicConflictSolver(), rebase_tries=20)

    async def message_of_tip(self, session: Session) -> str:
        """Return the name of the commit that an amendment replaces."""
        async with self.opened() as repository:
            return (await repository.lookup_snapshot(session.snapshot_id)).message

    async def rewrite(self, session: Session, name: str, begun: int) -> None:
        """Check what a session says to be collected, and write that again."""
        written = self.book.writes[name]
        lost = {f"a/c/{row[0]}" for row in session.collected_chunks.get("/a", np.empty((0, 1)))}
        if not lost:
            self.book.report(f"{name} was refused and nothing of it is said to be collected")
        for key in lost - written.keys():
            self.book.report(f"{name} was told that {key} is gone, which it did not write")
        for key, data in written.items():
            await self.compare(session, f"{key} of {name}", key, data, begun, lost=key in lost)
        if self.rng.random() < 0.2:
            raise ConflictError("no patience")
        for key in sorted(lost & written.keys()):
            await write(session, key, written[key])

    async def compare(
        self, session: Session, what: str, key: str, data: bytes, begun: int, *, lost: bool
    ) -> None:
        """Look whether a chunk is gone if and only if the session was told so."""
        incomplete = self.book.collections_incomplete
        found: object
        try:
            found = await read(session, key)
        except (StorageUnavailableError, OutcomeUnknownError):
            return
        except IcechunkError as error:
            found = error
        self.book.counts["chunks that were told to be gone"] += lost
        # A collection that is under way may be about to delete it: then the session was right.
        if lost and found == data and not incomplete:
            self.book.report(f"{what} was told to be gone, and is there")
        # One that began since is not known to the session yet.
        if not lost and found != data and self.book.collections_begun == begun:
            self.book.report(f"{what} was not told to be gone: {found!r:.60}")


async def prepare(storage: Storage, layout: str) -> None:
    """Create a repository with branches."""
    async with Repository.create(storage, layout=layout) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (CHUNKS,), (1,))
        await repository.create_branch("dev", await session.commit("array"))


async def check(storage: Storage, book: Book) -> None:
    """Compare what there is with what was told."""
    by_name = {attempt.name: attempt for attempt in book.attempts}
    lost = {
        name
        for name, attempt in by_name.items()
        if attempt.began < book.expired_before or name in book.replaced
    }
    async with Repository.open(storage) as repository:
        for branch in BRANCHES:
            infos = [info async for info in repository.ancestry(branch=branch)]
            names = [info.message for info in infos]
            book.anomalies += find_anomalies(book.attempts, branch, names, dropped=lost)
            for place, info in enumerate(infos):
                await check_whole(repository, info.id, names[place:], book)


async def check_whole(
    repository: Repository, snapshot_id: SnapshotId, names: list[str], book: Book
) -> None:
    """Read all of a snapshot; ``names`` are of the commits up to it, newest first."""
    session = await repository.readonly_session(snapshot_id=snapshot_id)
    for number in range(CHUNKS):
        key = f"a/c/{number}"
        try:
            found = await read(session, key)
        except IcechunkError as error:
            book.report(f"{names[0]} is not whole: {key}: {error}")
            continue
        wanted = next(
            (book.writes[it][key] for it in names if key in book.writes.get(it, {})), None
        )
        # An expired commit's chunks stay in those after it, though its name is in no history.
        author = None if found is None else found.split(b" ")[0].decode()
        gone = author is not None and author not in names and author in book.writes
        if found != wanted and not (gone and book.writes[author or ""].get(key) == found):
            book.report(f"{names[0]}: {key} reads {found!r:.60} in place of {wanted!r:.60}")

"""Random work on several branches: commits, amendments, forks that are merged, and resets.

The storage loses replies, writes late, refuses and delays; writers lose patience. Every snapshot
says in its properties which names it added to its branch, so that an amendment, which replaces
the tip, has to carry on what was there.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from icechunk_async import ForkSession, Packing, Repository, RepositoryConfig
from icechunk_async._runtime.clock import use_clock
from icechunk_async.conflicts import BasicConflictSolver
from icechunk_async.errors import (
    ConflictError,
    IcechunkError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.histories import Attempt, Outcome, SeededClock, find_anomalies
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, read, write
from tests.without_updates import suited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async import Session, SnapshotId
    from icechunk_async.storage import Storage

LAYOUTS = ("format-1", "format-2", "format-2-numbered", "alpha", "first-draft")
AMENDING = ("format-2", "format-2-numbered")
SEEDS = range(int(os.environ.get("HISTORY_SEEDS", "2")))
BRANCHES = ("main", "dev", "old")
PACKED: dict[str, Any] = {
    "packing": Packing(target_bytes=1_000, max_chunk_bytes=1_000),
    "config": RepositoryConfig(inline_chunk_threshold_bytes=0),
}
"""Every chunk goes to an object that others share; of one writer in two."""
WRITERS, STEPS, CHUNKS = 4, 5, 6
ON_REFERENCES = FaultRates(
    lost_replies=0.1, lost_requests=0.05, late_writes=0.08, refusals=0.03, delays=0.7
)
ON_FILES = FaultRates(lost_replies=0.03, lost_requests=0.02, refusals=0.03, delays=0.3)


@dataclass
class History:
    """The outcomes that the writers saw."""

    attempts: list[Attempt] = field(default_factory=list[Attempt])
    resets: list[tuple[str, SnapshotId, SnapshotId]] = field(
        default_factory=list[tuple[str, "SnapshotId", "SnapshotId"]]
    )
    """Branch, where it was, where it was set to; those that landed or may have."""


def is_reference(key: str) -> bool:
    """Return whether commits are decided by this object."""
    return key in {"repo", "state.json"} or key.startswith(("refs/", "r/", "states/"))


def names_of(metadata: Any) -> list[str]:
    """Return the names that a snapshot added, oldest first."""
    return list(metadata.get("names", []))


async def names_along(repository: Repository, snapshot_id: SnapshotId) -> list[str]:
    """Return the names along an ancestry, newest first."""
    names: list[str] = []
    async for info in repository.ancestry(snapshot_id=snapshot_id):
        names += reversed(names_of(info.metadata))
    return names


class Writer:
    """Does random things to random branches."""

    def __init__(self, storage: Storage, number: int, seed: object, history: History) -> None:
        self.storage = storage
        self.number = number
        self.rng = random.Random(f"{seed}/{number}")
        self.history = history
        self.session: Session | None = None
        """The one whose outcome counts."""

    async def run(self) -> None:
        """Work until all steps are done."""
        async with opened(self.storage, packed=self.number % 2 == 1) as repository:
            for count in range(STEPS):
                await self.step(repository, f"w{self.number}-{count}")

    async def step(self, repository: Repository, name: str) -> None:
        """Do one thing, with more or less patience, and note what came of it."""
        branch = self.rng.choice(BRANCHES)
        kinds = [self.commit, self.commit, self.share, self.share]
        if repository.layout in AMENDING:
            kinds.append(self.amend)
        kind = self.rng.choice([*kinds, self.reset])
        patience = self.rng.choice([0.05, 0.4, 1000.0, 1000.0])
        began, outcome = asyncio.get_running_loop().time(), Outcome.UNKNOWN
        self.session = None
        with anyio.move_on_after(patience):
            outcome = await self.classified(kind(repository, branch, name))
        if kind != self.reset:
            ended = asyncio.get_running_loop().time()
            self.history.attempts.append(Attempt(name, branch, began, ended, outcome))

    async def classified(self, work: Awaitable[object]) -> Outcome:
        """Await work, and say what we were told about it."""
        try:
            await work
        except ConflictError:
            return Outcome.REFUSED
        except OutcomeUnknownError:
            committing = self.session is None or self.session.read_only or self.in_doubt
            return Outcome.UNKNOWN if committing else Outcome.REFUSED
        except IcechunkError:  # the service was busy
            return Outcome.UNKNOWN if self.in_doubt else Outcome.REFUSED
        return Outcome.ACKNOWLEDGED

    @property
    def in_doubt(self) -> bool:
        """Whether the session knows of a try that may have landed."""
        return self.session is not None and self.session.outcome_unknown

    async def commit(self, repository: Repository, branch: str, name: str) -> None:
        """Write a chunk or two."""
        self.session = session = await repository.writable_session(branch)
        for chunk in self.rng.sample(range(CHUNKS), 2):
            await write(session, f"a/c/{chunk}", name.encode())
        await session.commit(
            name, {"names": [name]}, rebase_with=BasicConflictSolver(), rebase_tries=20
        )

    async def share(self, repository: Repository, branch: str, name: str) -> None:
        """Let forks write, here and elsewhere, and merge them one way or another."""
        self.session = session = await repository.writable_session(branch)
        if self.rng.random() < 0.5:
            await write(session, f"a/c/{self.rng.randrange(CHUNKS)}", name.encode())
        forks: list[ForkSession] = []
        for chunk in self.rng.sample(range(CHUNKS), 3):
            fork = await session.fork()
            if self.rng.random() < 0.7:
                fork = pickle.loads(pickle.dumps(fork))
            async with fork.attached(self.storage):
                await write(fork, f"a/c/{chunk}", name.encode() * self.rng.choice([1, 200]))
            forks.append(fork)
        if self.rng.random() < 0.5:
            await forks[0].merge(*forks[1:])
            forks = [ForkSession.from_bytes(forks[0].to_bytes())]
        await session.merge(*forks)
        await session.commit(
            name, {"names": [name]}, rebase_with=BasicConflictSolver(), rebase_tries=20
        )

    async def amend(self, repository: Repository, branch: str, name: str) -> None:
        """Replace the tip, and carry on the names that it added."""
        self.session = session = await repository.writable_session(branch)
        info = await repository.lookup_snapshot(session.snapshot_id)
        await write(session, f"a/c/{self.rng.randrange(CHUNKS)}", name.encode())
        await session.amend(name, {"names": [*names_of(info.metadata), name]})

    async def reset(self, repository: Repository, branch: str, _name: str) -> None:
        """Set a branch back by a few snapshots, if it is still where it was seen."""
        tip = await repository.lookup_branch(branch)
        line = [info.id async for info in repository.ancestry(snapshot_id=tip)]
        target = self.rng.choice(line[:-1][:3])  # not before the array was made
        self.history.resets.append((branch, tip, target))
        try:
            await repository.reset_branch(branch, target, from_snapshot_id=tip)
        except (ConflictError, StorageUnavailableError):
            self.history.resets.remove((branch, tip, target))


class opened:  # noqa: N801 -- reads as a verb
    """Open a repository, trying again while the service is busy."""

    def __init__(self, storage: Storage, *, packed: bool = False) -> None:
        self._storage = storage
        self._options = PACKED if packed else {}

    async def __aenter__(self) -> Repository:
        while True:
            self._manager = Repository.open(self._storage, **self._options)
            try:
                return await self._manager.__aenter__()
            except IcechunkError:
                continue

    async def __aexit__(self, *error: object) -> None:
        await self._manager.__aexit__(None, None, None)


async def prepare(storage: Storage, layout: str) -> None:
    """Create a repository with branches."""
    async with Repository.create(storage, layout=layout) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (CHUNKS,), (1,))
        tip = await session.commit("array")
        for branch in BRANCHES[1:]:
            await repository.create_branch(branch, tip)


async def anomalies_of(storage: Storage, history: History) -> list[str]:
    """Compare what the writers were told with what there is."""
    anomalies: list[str] = []
    async with Repository.open(storage) as repository:
        for branch in BRANCHES:
            dropped: set[str] = set()
            for where, tip, target in history.resets:
                if where == branch:
                    kept = set(await names_along(repository, target))
                    dropped |= set(await names_along(repository, tip)) - kept
            names = await names_along(repository, await repository.lookup_branch(branch))
            anomalies += find_anomalies(history.attempts, branch, names, dropped=dropped)
            if len(set(names)) != len(names):
                anomalies.append(f"{branch} has a name twice: {names}")
            session = await repository.readonly_session(branch)
            for chunk in range(CHUNKS):
                value = await read(session, f"a/c/{chunk}")
                text = value.decode() if value is not None else ""
                name = text[: len(text) // 200] if len(text) > 200 else text  # some are long
                if name and name not in names:
                    anomalies.append(f"{branch}: chunk {chunk} holds {name}, not committed")
    return anomalies


async def scenario(seed: int, layout: str) -> tuple[History, list[str]]:
    """Let the writers work at once; answer what they were told, and what is wrong."""
    history = History()
    async with open_storage(memory_url()) as whole:
        plain = suited(whole, layout)
        await prepare(plain, layout)
        references = FaultyStorage(plain, ON_REFERENCES, seed=seed, affects=is_reference)
        faulty = FaultyStorage(
            references, ON_FILES, seed=seed, affects=lambda key: not is_reference(key)
        )
        writers = [Writer(faulty, number, seed, history) for number in range(WRITERS)]
        async with anyio.create_task_group() as group:
            for writer in writers:
                group.start_soon(writer.run)
        await references.settle()
        return history, await anomalies_of(plain, history)


def run(seed: int, layout: str) -> tuple[History, list[str]]:
    """Run a scenario in virtual time, with ids and times of the seed."""
    with use_clock(SeededClock(seed)), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario(seed, layout))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_doubled_or_invented(seed: int, layout: str) -> None:
    """Each acknowledged commit is there once, in order, and no refused commit is there."""
    history, anomalies = run(seed, layout)
    assert anomalies == [], f"seed {seed}, {layout}"
    told = [attempt.outcome for attempt in history.attempts]
    assert told.count(Outcome.ACKNOWLEDGED) > 1, f"the faults left nothing to check: {told}"


@pytest.mark.parametrize(
    "layout",
    [it if it in AMENDING else pytest.param(it, marks=pytest.mark.thorough) for it in LAYOUTS],
)
def test_equal_seeds_make_equal_histories(layout: str) -> None:
    """A failing seed can be run again: ids, times, outcomes and resets are the same."""
    assert run(3, layout) == run(3, layout)
    assert run(3, layout) != run(4, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_cancellation_at_every_await_loses_nothing(layout: str) -> None:
    """Forking, writing elsewhere, merging, committing, amending: cancelled wherever it waits."""
    history, waits = History(), 0
    async with open_storage(memory_url()) as whole:
        plain = suited(whole, layout)
        await prepare(plain, layout)
        waiting = LatencyStorage(plain, seconds=0)
        kinds = ("share", "commit", "amend")[: None if layout in AMENDING else 2]
        for kind in kinds:
            start = partial(_one, waiting, history, kind)
            async for _ in at_every_wait(start):
                waits += 1
            assert await anomalies_of(plain, history) == []
    assert waits > 10
    assert [it.outcome for it in history.attempts].count(Outcome.ACKNOWLEDGED) == len(kinds)


async def _one(storage: Storage, history: History, kind: str, n: int) -> None:
    """Do one thing; it is of unknown outcome until it ended."""
    name, now = f"{kind}-{n}", asyncio.get_running_loop().time
    place, began = len(history.attempts), now()
    history.attempts.append(Attempt(name, "main", began, began, Outcome.UNKNOWN))
    writer = Writer(storage, n, name, history)
    work: Callable[..., Awaitable[None]] = getattr(writer, kind)
    async with Repository.open(storage) as repository:
        await work(repository, "main", name)
    history.attempts[place] = Attempt(name, "main", began, now(), Outcome.ACKNOWLEDGED)


def test_checker_ignores_commits_that_were_reset() -> None:
    """A commit that a reset dropped is not lost; another one is."""
    attempts = [Attempt(name, "main", 0, 1, Outcome.ACKNOWLEDGED) for name in ("a", "b", "c")]
    assert find_anomalies(attempts, "main", ["a"], dropped={"b", "c"}) == []
    assert find_anomalies(attempts, "main", ["a"], dropped={"c"}) == [
        "b was acknowledged and is lost"
    ]

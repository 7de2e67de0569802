"""Random work of a session and its forks, who publish and refresh, equals a sequential model."""

from __future__ import annotations

import pickle
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.leases import spiller
from icechunk_async.errors import LeaseLostError
from tests.helpers import array_document, make_array, read, write
from tests.unit.engine.leases.lease_tools import World, filled

if TYPE_CHECKING:
    from icechunk_async.session import AnySession, Session

    type State = dict[str, bytes | None]

TICK = timedelta(milliseconds=1)
CHUNKS = 6


@dataclass
class Published:
    """A publication in the model."""

    stamp: int
    fork_id: str
    state: State


@dataclass
class Shared:
    """The state that the session shares in the model, and what it did not take in yet."""

    state: State = field(default_factory=dict)
    waiting: list[Published] = field(default_factory=list)
    clock: int = 0

    def seen(self) -> State:
        """Return the view of somebody who refreshes now."""
        found = dict(self.state)
        for it in sorted(self.waiting, key=lambda it: (it.stamp, it.fork_id)):
            found |= it.state
        return found

    def newest(self) -> int:
        """Return the highest stamp."""
        return max([self.clock, *(it.stamp for it in self.waiting)])


@dataclass
class Worker:
    """A fork, with what it sees and changed in the model."""

    fork: ForkSession
    skew: timedelta
    seen: State
    clock: int
    own: State = field(default_factory=dict)
    marked: bool = False
    """Whether it published or refreshed."""


class Model:
    """A session with forks, for real and in the model."""

    def __init__(
        self, repository: Repository, session: Session, world: World, chance: random.Random
    ) -> None:
        self.repository = repository
        self.session = session
        self.world = world
        self.chance = chance
        self.skews = [timedelta(0)]
        self.shared = Shared()
        self.own: State = {}
        """What the session changed since it shared its state."""
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        """Forks of a session that another process continues."""
        self.step = 0

    def stamp(self, skew: timedelta, clock: int) -> int:
        """Return a stamp as the library makes it."""
        now = self.world.now + skew
        return max(round(now.timestamp() * 1_000_000), clock + 1)

    def pick(self) -> Worker:
        """Return some fork."""
        return self.chance.choice(self.workers)

    async def fork(self) -> None:
        """Fork; the session's changes are shared."""
        if self.own:
            self.shared.clock = self.stamp(timedelta(0), self.shared.clock)
            self.shared.state |= self.own
            self.own = {}
        fork = await self.session.fork()
        skew = self.chance.choice(self.skews)
        self.workers.append(Worker(fork, skew, dict(self.shared.state), self.shared.clock))

    async def write(self) -> None:
        """Set or delete a chunk, or make an array, in the session or in a fork."""
        worker = self.pick() if self.chance.random() < 0.8 else None
        session: AnySession = self.session if worker is None else worker.fork
        own = self.own if worker is None else worker.own
        seen = (self.shared.state if worker is None else worker.seen) | own
        made = [key.removesuffix("/zarr.json") for key in seen if key.endswith("/zarr.json")]
        if self.chance.random() < 0.15:
            name = f"n{self.step}"
            await make_array(session, name, (CHUNKS,), (1,))
            own[f"{name}/zarr.json"] = array_document((CHUNKS,), (1,))
            return
        key = f"{self.chance.choice(['a', *made])}/c/{self.chance.randrange(CHUNKS)}"
        if self.chance.random() < 0.15:
            await session.store.delete(key)
            own[key] = None
            return
        data = str(self.step).encode().ljust(self.chance.choice([5, 600]), b".")
        await write(session, key, data)
        own[key] = data

    async def publish(self) -> None:
        """Let a fork publish."""
        worker = self.pick()
        with self.world.clock_wrong_by(worker.skew):
            new = await worker.fork.publish()
        known = self.shared.seen()
        assert new or all(known[key] == value for key, value in worker.own.items())
        if new:
            worker.clock = self.stamp(worker.skew, worker.clock)
            published = Published(worker.clock, worker.fork.fork_id, worker.own)
            self.shared.waiting.append(published)
        assert not worker.fork.has_uncommitted_changes
        worker.seen |= worker.own
        worker.own, worker.marked = {}, True

    async def refresh(self) -> None:
        """Let a fork refresh."""
        worker = self.pick()
        await worker.fork.refresh()
        worker.seen, worker.marked = self.shared.seen(), True
        worker.clock = max(worker.clock, self.shared.newest())

    async def refresh_session(self) -> None:
        """Let the session refresh."""
        await self.session.refresh()
        self._refreshed()

    def _refreshed(self) -> None:
        shared = self.shared
        state, shared.clock = shared.seen() | self.own, shared.newest()
        if self.own:
            shared.clock = self.stamp(timedelta(0), shared.clock)
        shared.state, shared.waiting, self.own = state, [], {}

    async def merge(self) -> None:
        """Merge a fork by hand; it may continue afterwards."""
        worker = self.chance.choice([*self.workers, *self.gone])
        await self.session.merge(worker.fork)
        if worker.marked:
            self._refreshed()
        self.own |= worker.own

    async def discard(self) -> None:
        """Let a fork forget what it did not publish."""
        worker = self.pick()
        worker.fork.discard_changes()
        worker.own = {}

    async def travel(self) -> None:
        """Send a fork to another process."""
        worker = self.pick()
        await worker.fork.store_pending_chunks()
        fork: ForkSession = pickle.loads(pickle.dumps(worker.fork))
        assert fork.has_uncommitted_changes == worker.fork.has_uncommitted_changes
        engine = self.repository.engine
        fork.attach(engine, await engine.assets.snapshot(fork.snapshot_id))
        worker.fork = fork

    async def resume(self) -> None:
        """Continue the session in another process."""
        await self.session.spill()
        self.session = await self.repository.resume_session(self.session.session_id)
        shared = self.shared
        shared.state, shared.clock, shared.waiting = shared.seen(), shared.newest(), []
        for worker in self.workers:
            with pytest.raises(LeaseLostError):
                await worker.fork.publish()
        self.gone += self.workers
        self.workers = []
        for _ in range(3):
            await self.fork()

    async def spill(self) -> None:
        """Spill, which no fork sees."""
        await self.session.spill()

    async def check(self) -> None:
        """Compare what everybody sees."""
        views: list[tuple[AnySession, State]] = [(self.session, self.shared.state | self.own)]
        views += [(it.fork, it.seen | it.own) for it in (*self.workers, *self.gone)]
        for session, state in views:
            for key, value in state.items():
                assert await read(session, key) == value, (session, key)


STEPS = {
    "write": 40,
    "publish": 14,
    "refresh": 12,
    "refresh_session": 6,
    "fork": 2,
    "merge": 5,
    "travel": 5,
    "discard": 2,
    "resume": 1,
    "spill": 5,
}


@pytest.mark.parametrize(
    "seed", [*range(9), *(pytest.param(it, marks=pytest.mark.thorough) for it in range(9, 600))]
)
async def test_any_order_of_work_of_three_forks_equals_a_sequential_model(seed: int) -> None:
    """The views of all, all along, and the commit; with packs, travel, and few segments.

    For a third of the seeds the clocks of forks are wrong: what was written with another
    publication in view lies above it all the same.
    """
    chance, world = random.Random(seed), World()
    packing = Packing(target_bytes=2048, max_chunk_bytes=1024) if seed % 2 else None
    async with filled(world, 1 + seed // 2 % 2) as storage:
        with ExitStack() as stack:
            stack.enter_context(patch.object(spiller, "_MOST_SEGMENTS", chance.choice([3, 64])))
            async with Repository.open(storage, packing=packing) as repository:
                session = await repository.writable_session("main", lease=True)
                model = Model(repository, session, world, chance)
                if seed % 3 == 0:
                    model.skews = [timedelta(hours=it) for it in (-2, 0, 2)]
                for _ in range(3):
                    await model.fork()
                for model.step in range(60):
                    world.wait(TICK)
                    (name,) = chance.choices(list(STEPS), list(STEPS.values()))
                    await getattr(model, name)()
                    if model.step % 10 == 0:
                        await model.check()
                await model.check()
                if not (model.own or model.shared.seen()):
                    return
                await model.session.commit("all", allow_missing_forks=True)
                expected = model.shared.seen() | model.own
                reader = await repository.readonly_session("main")
                for key, value in expected.items():
                    assert await read(reader, key) == value, key
                assert not [it async for it in storage.list_prefix("leases/spills/")]

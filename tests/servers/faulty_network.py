"""A backend behind a bad network: the shared suite and whole histories through a fault proxy."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, ClassVar

import anyio
import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.commit.conflicts import BasicConflictSolver
from icechunk_async.errors import ConflictError, IcechunkError, OutcomeUnknownError
from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async.testing.histories import Attempt, Outcome, find_anomalies
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import (
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    FaultPlan,
    Reset,
    Respond,
    Rule,
    SlowBody,
    Truncate,
)
from tests.helpers import make_array, read, write
from tests.servers.dependable import open_dependably, reopen_dependably
from tests.servers.whole_repository import BothSpecs, Location, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage

__all__ = ["ConformanceThroughFaults", "FaultyHistories", "harsh", "mild"]

SEEDS = range(int(os.environ.get("NETWORK_SEEDS", "3")))
BRANCHES = ("main", "dev")
WRITERS = 4
COMMITS = 4


def mild(busy: Respond) -> tuple[Rule, ...]:
    """Return faults that leave no doubt whether a write landed."""
    return (
        Rule(busy, rate=0.03),
        # Reads only: a connection that breaks under a write leaves it in doubt.
        Rule(Reset(applied=False), method="GET|HEAD", rate=0.02),
        Rule(Truncate(), method="GET", rate=0.02),
        Rule(SlowBody(0.01), method="GET", rate=0.02),
    )


def harsh(busy: Respond, failed: Respond) -> tuple[Rule, ...]:
    """Return faults that lose requests and replies of writes as well."""
    return (
        *mild(busy),
        Rule(failed, rate=0.02),
        Rule(Reset(applied=False), rate=0.03),
        Rule(Reset(applied=True), rate=0.05),
        Rule(Truncate(), rate=0.02),
    )


@pytest.mark.slow_requests
class ConformanceThroughFaults(StorageConformance):
    """The whole suite, with faults on the way and retries against them.

    A subclass gives ``server``. ``faults`` are mild: a backend that settles lost replies of
    conditional writes by itself says ``faults = harsh(...)``.
    """

    many_keys = 2500
    half: ClassVar[int | None] = None
    """0 or 1: only these of every two tests by default. One service runs all of them, and two
    others a half each: the retries are the same, and answers of services have tests apart."""
    busy: ClassVar[Respond] = S3_SLOW_DOWN
    faults: ClassVar[tuple[Rule, ...] | None] = None
    """None: the mild ones."""
    reopen = staticmethod(reopen_dependably)

    @pytest.fixture
    def server(self) -> Server:
        """Return the server; test files override this."""
        raise NotImplementedError

    @pytest.fixture
    async def storage(self, server: Server) -> AsyncIterator[Storage]:
        """Open an empty storage behind a proxy."""
        plan = FaultPlan(mild(self.busy) if self.faults is None else self.faults)
        async with FaultProxy("127.0.0.1", server.port, plan) as proxy:
            location = server.location(proxy.url)
            async with open_dependably(open_storage(location.url, **location.options)) as storage:
                yield storage


class FaultyHistories(BothSpecs):
    """Random sessions commit through lost requests, lost replies, and a service that is busy."""

    busy: ClassVar[Respond] = S3_SLOW_DOWN
    failed: ClassVar[Respond] = S3_INTERNAL_ERROR

    @pytest.mark.sampled
    @pytest.mark.parametrize("seed", SEEDS)
    async def test_no_commit_is_lost_doubled_or_invented(
        self, server: Server, spec: int, seed: int
    ) -> None:
        """Every acknowledged commit is there exactly once, and no refused one."""
        async with FaultProxy("127.0.0.1", server.port) as proxy:
            location = server.location(proxy.url)
            await _prepare(location, spec)
            proxy.use(FaultPlan(harsh(self.busy, self.failed), jitter_seconds=0.005, seed=seed))
            attempts: list[Attempt] = []
            await bounded_map(
                lambda number: _writer(location, number, seed, attempts),
                range(WRITERS),
                limit=WRITERS,
            )
            proxy.use(FaultPlan())
            assert await _anomalies(location, attempts) == []
            told = [attempt.outcome for attempt in attempts]
            # Else the history would show nothing: writers that never land break no promise.
            assert told.count(Outcome.ACKNOWLEDGED) > len(told) // 2, told
            outcomes = {entry.outcome for entry in proxy.log}
            # "reset after": a write that was applied and whose reply was lost, at least once.
            assert {"answered", "reset after"} <= outcomes, "the faults did not happen"


async def _prepare(location: Location, spec: int) -> None:
    options = dict(location.options)
    async with Repository.create(
        location.url, spec_version=spec, storage_options=options, probe=False
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await repository.create_branch("dev", await session.commit("array"))


async def _writer(location: Location, number: int, seed: int, attempts: list[Attempt]) -> None:
    """Commit to random branches through an own handle; sometimes lose patience."""
    rng = random.Random(f"{seed}/{number}")
    loop = asyncio.get_running_loop()
    async with open_storage(location.url, **location.options) as storage:
        for count in range(COMMITS):
            name = f"w{number}-{count}"
            branch = rng.choice(BRANCHES)
            # A cancelled commit counts as unknown, and must be whole or absent as any other.
            patience = rng.choice([0.05, 60.0, 60.0, 60.0])
            # Unknown until it is told: of a commit that is cancelled nothing else is known.
            began, outcome = loop.time(), Outcome.UNKNOWN
            with anyio.move_on_after(patience):
                outcome = await _commit(storage, name, branch, rng.randrange(4))
            attempts.append(Attempt(name, branch, began, loop.time(), outcome))


async def _commit(storage: Storage, name: str, branch: str, chunk: int) -> Outcome:
    """Commit once, and classify what we were told."""
    session = None
    try:
        async with Repository.open(storage) as repository:
            session = await repository.writable_session(branch)
            await write(session, f"a/c/{chunk}", name.encode())
            await session.commit(name, rebase_with=BasicConflictSolver(), rebase_tries=20)
    except ConflictError:
        return Outcome.REFUSED
    except OutcomeUnknownError:
        return Outcome.UNKNOWN
    except IcechunkError:
        doubtful = session is not None and session.outcome_unknown
        return Outcome.UNKNOWN if doubtful else Outcome.REFUSED
    return Outcome.ACKNOWLEDGED


async def _anomalies(location: Location, attempts: list[Attempt]) -> list[str]:
    """Return the faults of the repository, a sentence each."""
    anomalies: list[str] = []
    options = dict(location.options)
    async with Repository.open(location.url, storage_options=options) as repository:
        for branch in BRANCHES:
            messages = [info.message async for info in repository.ancestry(branch=branch)]
            anomalies += find_anomalies(attempts, branch, messages)
            session = await repository.readonly_session(branch)
            for chunk in range(4):
                value = await read(session, f"a/c/{chunk}")
                if value is not None and value.decode() not in messages:
                    anomalies.append(f"chunk {chunk} holds {value!r}, which was not committed")
    return anomalies

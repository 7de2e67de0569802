"""A migration among writers that do not stop, on a storage that loses answers and is late."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import anyio
import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.commit.conflicts import BasicConflictSolver
from icechunk_async.errors import IcechunkError, OutcomeUnknownError
from icechunk_async.storage import open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.histories import Attempt, Outcome, find_anomalies
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.upkeep import upgrade
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

COMMITS = 12
SEEDS = range(int(os.environ.get("HISTORY_SEEDS", "2")))
RATES = FaultRates(
    lost_replies=0.1,
    lost_requests=0.1,
    late_writes=0.1,
    refusals=0.02,
    delays=0.5,
    delay_seconds=0.2,
)
BRANCHES = ("main", "side")


async def _prepare(url: str) -> None:
    async with Repository.create(url, spec_version=1) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (100,), (1,))
        await repository.create_branch("side", await session.commit("array"))


async def _commit(storage: Storage, branch: str, name: str, chunk: int) -> Attempt:
    began = anyio.current_time()
    outcome = Outcome.ACKNOWLEDGED
    try:
        async with Repository.open(storage) as repository:
            session = await repository.writable_session(branch)
            await write(session, f"a/c/{chunk}", name.encode())
            await session.commit(name, rebase_with=BasicConflictSolver(), rebase_tries=3)
    except OutcomeUnknownError:
        outcome = Outcome.UNKNOWN
    except IcechunkError:
        outcome = Outcome.REFUSED
    return Attempt(name, branch, began, anyio.current_time(), outcome)


async def _migrate(storage: Storage) -> None:
    """Try until it works; each try may be told that others write, or not be answered."""
    while True:
        await anyio.sleep(0.5)
        try:
            await upgrade(storage)
        except IcechunkError:
            continue
        return


async def _scenario(seed: int) -> None:
    url = memory_url()
    await _prepare(url)
    async with open_storage(url) as plain:
        storages = [FaultyStorage(plain, RATES, seed=10 * seed + it) for it in range(4)]
        attempts: list[Attempt] = []

        async def writer(number: int) -> None:
            for count in range(COMMITS):
                branch = BRANCHES[(number + count) % 2]
                name = f"{number}-{count}"
                chunk = number * COMMITS + count
                attempts.append(await _commit(storages[number], branch, name, chunk))

        await gather(writer(0), writer(1), writer(2), _migrate(storages[3]))
        for storage in storages:
            await storage.settle()
        await upgrade(plain)
        async with Repository.open(plain) as repository:
            assert repository.spec_version == 2
            assert (await repository.get_status()).limited_availability_reason is None
            for branch in BRANCHES:
                line = [info.message async for info in repository.ancestry(branch=branch)]
                assert find_anomalies(attempts, branch, line) == []
    landed = [it for it in attempts if it.outcome is Outcome.ACKNOWLEDGED]
    assert landed


@pytest.mark.parametrize("seed", SEEDS)
def test_no_acknowledged_commit_is_lost(seed: int) -> None:
    """Each is in the migrated repository once, whichever format version it was made with."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_scenario(seed))

"""Writers that share transactions, over a storage that fails, delays and cancels."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from icechunk_async import Repository, Transaction
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.errors import IcechunkError
from icechunk_async.storage import open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, write
from tests.without_updates import suited

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

LAYOUTS = ("format-1", "format-2", "format-2-numbered", "alpha", "first-draft")
SEEDS = range(int(os.environ.get("HISTORY_SEEDS", "2")))
APPS = ("daily", "hourly")
TWINS = 2
"""Writers that all do the whole work of an application, as after a restart that left one alive."""
BATCHES = 5
RATES = FaultRates(
    lost_replies=0.15, lost_requests=0.05, late_writes=0.1, refusals=0.03, delays=0.7
)


def _is_reference(key: str) -> bool:
    return key in {"repo", "state.json"} or key.startswith(("refs/", "r/", "states/"))


async def _writer(storage: Storage, app_id: str, number: int, seed: int) -> None:
    """Commit every batch of an application, starting again wherever it fails or loses patience."""
    rng = random.Random(f"{seed}/{app_id}/{number}")
    solver = ConflictDetector() if number == 0 else BasicConflictSolver()
    for batch in range(BATCHES):
        done = False
        while not done:
            with anyio.move_on_after(rng.choice([0.05, 0.3, 1000.0])):
                try:
                    async with Repository.open(storage) as repository:
                        session = await repository.writable_session("main")
                        await write(session, f"{app_id}/c/{batch}", b"%d" % batch)
                        await session.commit(
                            f"{app_id} {batch}", once=Transaction(app_id, batch), rebase_with=solver
                        )
                        done = True
                except IcechunkError:
                    continue  # a new session knows nothing of this one


async def _scenario(seed: int, layout: str) -> None:
    async with open_storage(memory_url()) as whole:
        plain = suited(whole, layout)
        async with Repository.create(plain, layout=layout) as repository:
            session = await repository.writable_session("main")
            for app_id in APPS:
                await make_array(session, app_id, (BATCHES,), (1,))
            await session.commit("arrays")
        storage = FaultyStorage(plain, RATES, seed=seed, affects=_is_reference)
        async with anyio.create_task_group() as writers:
            for app_id in APPS:
                for number in range(TWINS):
                    writers.start_soon(_writer, storage, app_id, number, seed)
        await storage.settle()
        async with Repository.open(plain) as repository:
            infos = [info async for info in repository.ancestry(branch="main")][::-1]
    landed: list[Any] = [info.metadata.get("spark-transaction") for info in infos[2:]]
    counts = Counter((it["app-id"], it["version"]) for it in landed)
    assert counts == {(app_id, batch): 1 for app_id in APPS for batch in range(BATCHES)}
    for app_id in APPS:
        versions = [it["version"] for it in landed if it["app-id"] == app_id]
        assert versions == sorted(versions)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_transaction_lands_exactly_once(seed: int, layout: str) -> None:
    """Over lost replies, late writes, refusals, delays, cancellation, restarts and twins."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_scenario(seed, layout))

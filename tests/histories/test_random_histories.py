"""Random writers on several branches, over a storage that fails, delays and cancels."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from icechunk_async import Packing, Repository, RepositoryConfig
from icechunk_async.engine.commit.conflicts import BasicConflictSolver
from icechunk_async.errors import ConflictError, IcechunkError, OutcomeUnknownError
from icechunk_async.storage import open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.histories import Attempt, Outcome, find_anomalies
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import make_array, memory_url, read, write
from tests.without_updates import suited

if TYPE_CHECKING:
    from typing import Any

    from icechunk_async.storage import Storage

LAYOUTS = ("format-1", "format-2", "format-2-numbered", "alpha", "first-draft")
SEEDS = range(int(os.environ.get("HISTORY_SEEDS", "2")))
BRANCHES = ("main", "dev")
PACKED = {
    "packing": Packing(target_bytes=20, max_chunk_bytes=20),
    "config": RepositoryConfig(inline_chunk_threshold_bytes=0),
}
"""Every chunk goes to an object that others share. With odd seeds."""
WRITERS = 5
COMMITS = 6
RATES = FaultRates(lost_replies=0.1, lost_requests=0.05, late_writes=0.1, refusals=0.03, delays=0.7)


def _is_reference(key: str) -> bool:
    """Return whether commits are decided by this object."""
    return key in {"repo", "state.json"} or key.startswith(("refs/", "r/", "states/"))


async def _one_commit(repository: Repository, name: str, branch: str, chunk: int) -> Outcome:
    """Commit once, and classify what we were told."""
    session = None
    try:
        session = await repository.writable_session(branch)
        await write(session, f"a/c/{chunk}", name.encode())
        await session.commit(name, rebase_with=BasicConflictSolver(), rebase_tries=20)
    except ConflictError:
        return Outcome.REFUSED
    except OutcomeUnknownError:
        return Outcome.UNKNOWN
    except IcechunkError:
        # The service was busy: refused, and a session that is not in doubt knows it.
        doubtful = session is not None and session.outcome_unknown
        return Outcome.UNKNOWN if doubtful else Outcome.REFUSED
    return Outcome.ACKNOWLEDGED


async def _writer(storage: Storage, number: int, seed: int, attempts: list[Attempt]) -> None:
    """Commit to random branches through an own handle; sometimes lose patience."""
    rng = random.Random(f"{seed}/{number}")
    loop = asyncio.get_running_loop()
    async with _opened(storage, packed=seed % 2 == 1) as repository:
        for count in range(COMMITS):
            name = f"w{number}-{count}"
            branch = rng.choice(BRANCHES)
            began = loop.time()
            outcome = Outcome.UNKNOWN
            patience = rng.choice([0.05, 0.3, 1000.0, 1000.0])
            with anyio.move_on_after(patience):
                outcome = await _one_commit(repository, name, branch, rng.randrange(4))
            attempts.append(Attempt(name, branch, began, loop.time(), outcome))


class _opened:  # noqa: N801 -- reads as a verb
    """Open a repository, trying again while the service is busy."""

    def __init__(self, storage: Storage, *, packed: bool) -> None:
        self._storage = storage
        self._options: dict[str, Any] = PACKED if packed else {}

    async def __aenter__(self) -> Repository:
        while True:
            self._manager = Repository.open(self._storage, **self._options)
            try:
                return await self._manager.__aenter__()
            except IcechunkError:
                continue

    async def __aexit__(self, *error: object) -> None:
        await self._manager.__aexit__(None, None, None)


async def _scenario(seed: int, layout: str) -> list[str]:
    async with open_storage(memory_url()) as whole:
        plain = suited(whole, layout)
        async with Repository.create(plain, layout=layout) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            await repository.create_branch("dev", await session.commit("array"))
        storage = FaultyStorage(plain, RATES, seed=seed, affects=_is_reference)
        attempts: list[Attempt] = []
        async with anyio.create_task_group() as writers:
            for number in range(WRITERS):
                writers.start_soon(_writer, storage, number, seed, attempts)
        await storage.settle()
        anomalies: list[str] = []
        landed = 0
        async with Repository.open(plain) as repository:
            for branch in BRANCHES:
                messages = [info.message async for info in repository.ancestry(branch=branch)]
                landed += len(messages)
                anomalies += find_anomalies(attempts, branch, messages)
                session = await repository.readonly_session(branch)
                for chunk in range(4):  # every chunk that the history names can be read
                    value = await read(session, f"a/c/{chunk}")
                    if value is not None and value.decode() not in messages:
                        anomalies.append(f"chunk {chunk} holds {value!r}, which was not committed")
        acknowledged = sum(attempt.outcome is Outcome.ACKNOWLEDGED for attempt in attempts)
        assert acknowledged > 3, "the faults left nothing to check"
        assert landed > 5
        return anomalies


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_commit_is_lost_doubled_or_invented(seed: int, layout: str) -> None:
    """Over lost replies, late writes, refusals, delays and cancellation."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(_scenario(seed, layout)) == []


@pytest.mark.parametrize(
    ("newest_first", "expected"),
    [
        (["b", "a"], []),
        (["a", "b"], ["b began after a was acknowledged, and lies below it"]),
        (["b", "a", "a"], ["a is there 2 times"]),
        (["a"], ["b was acknowledged and is lost"]),
        (["r", "b", "a"], ["r was refused and is there"]),
    ],
)
def test_the_checker_sees_each_anomaly(newest_first: list[str], expected: list[str]) -> None:
    """Lost, doubled, invented and reordered commits are named."""
    attempts = [
        Attempt("a", "main", 0, 1, Outcome.ACKNOWLEDGED),
        Attempt("b", "main", 2, 3, Outcome.ACKNOWLEDGED),
        Attempt("r", "main", 2, 3, Outcome.REFUSED),
        Attempt("x", "dev", 2, 3, Outcome.ACKNOWLEDGED),
    ]
    assert find_anomalies(attempts, "main", newest_first) == expected

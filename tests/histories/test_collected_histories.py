"""Random work beside expiration and garbage collection with cutoffs up to the present moment.

Writers with and without leases, forks, crashes and resumptions, amendments, expirers and collectors
share one storage that loses replies, writes late, refuses and delays. Time is virtual: sessions
stay open for hours. What is checked:

* A snapshot that a branch holds is whole: each of its chunks reads, as it was written.
* A commit that could not be whole was refused with `ChunksCollectedError`, and
  ``collected_chunks`` named what is gone, and nothing else.
* A session with a lease loses nothing.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import anyio
import pytest

from icechunk_async._runtime import clock
from icechunk_async.storage import open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.histories import Outcome, SeededClock
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import memory_url
from tests.histories.collection import (
    Book,
    Collector,
    Dated,
    Expirer,
    Reader,
    Writer,
    check,
    prepare,
)
from tests.without_updates import suited

SEEDS: Final = range(int(os.environ.get("COLLECTION_SEEDS", "2")))
WRITERS: Final = 4
ON_REFERENCES: Final = FaultRates(
    lost_replies=0.08, lost_requests=0.04, late_writes=0.06, refusals=0.03, delays=0.7
)
ON_FILES: Final = FaultRates(lost_replies=0.02, lost_requests=0.02, refusals=0.02, delays=0.3)


def is_reference(key: str) -> bool:
    """Return whether commits are decided by this object."""
    return key == "repo" or key.startswith(("refs/", "states/"))


async def scenario(seed: int, layout: str) -> Book:
    """Let everybody work at once; return what happened."""
    book = Book()
    async with open_storage(memory_url()) as plain:
        dated = Dated(suited(plain, layout))
        await prepare(dated, layout)
        references = FaultyStorage(dated, ON_REFERENCES, seed=seed, affects=is_reference)
        faulty = FaultyStorage(
            references, ON_FILES, seed=seed, affects=lambda key: not is_reference(key)
        )
        over = anyio.Event()
        async with anyio.create_task_group() as others:
            for number in range(2):
                # One that fails may be about to delete anything, so that less can be checked.
                place = faulty if seed % 2 else dated
                others.start_soon(Collector(place, f"c{number}", seed, book).run, over)
            others.start_soon(Expirer(faulty, "e", seed, book).run, over)
            others.start_soon(Reader(faulty, "r", seed, book).run, over)
            async with anyio.create_task_group() as writers:
                for number in range(WRITERS):
                    writers.start_soon(Writer(faulty, f"w{number}", seed, book).run)
            over.set()
        await references.settle()
        await faulty.settle()
        await check(dated, book)
    return book


def run(seed: int, layout: str) -> Book:
    """Run a scenario in virtual time, with ids and times of the seed."""
    with (
        clock.use_clock(SeededClock(seed)),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        return runner.run(scenario(seed, layout))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["format-1", "format-2", "format-2-numbered"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_commit_loses_chunks_to_a_collection(seed: int, layout: str) -> None:
    """Whole or refused, and leased sessions are never robbed."""
    book = run(seed, layout)
    assert book.anomalies == [], f"seed {seed}, {layout}"
    assert book.counts[Outcome.ACKNOWLEDGED.value] > 0  # seed 155 has two

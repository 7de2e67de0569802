"""Random work on a local disk beside the official engine, which expires and collects.

Its collector knows of no leases and leaves no note of its cutoff. On a local disk it overwrites the
``repo`` file blindly. So commits and its upkeep take turns here; sessions write,
fork and spill at any time.
"""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import anyio
import pytest

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.testing.histories import Outcome
from tests.helpers import read
from tests.histories.collection import (
    BRANCHES,
    CHUNKS,
    Actor,
    Book,
    Collector,
    Expirer,
    Writer,
    check,
    now,
    prepare,
)
from tests.interop.test_collected import read_official
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import Session

SEEDS: Final = range(int(os.environ.get("INTEROP_SEEDS", "1")))
WRITERS: Final = 3
MOMENT: Final = 0.02


class Turns:
    """Let one at a time change the ``repo`` file."""

    lock: asyncio.Lock
    moment = 10 * MOMENT
    """Seconds in place of an hour: time is real here. Upkeep is rarer than writing."""

    async def pause(self, hours: float) -> None:
        """Wait for a moment."""
        assert isinstance(self, Actor)
        await anyio.sleep(self.rng.random() * self.moment * hours)


class DiskWriter(Turns, Writer):
    """Commits in turn with the official engine's upkeep."""

    leases_hold = False
    moment = MOMENT

    async def publish_once(self, session: Session, name: str, *, amend: bool) -> None:
        """Commit or amend."""
        async with self.lock:
            await super().publish_once(session, name, amend=amend)


class OurCollector(Turns, Collector):
    """Collects with this engine."""

    slowest_seconds = MOMENT

    async def collect(self) -> None:
        """Collect once."""
        async with self.lock:
            await super().collect()


class OurExpirer(Turns, Expirer):
    """Expires with this engine."""

    longest_seconds = 5 * MOMENT

    async def expire(self) -> None:
        """Expire once."""
        async with self.lock:
            await super().expire()


class TheirCollector(Turns, Actor):
    """Collects, and expires at times, with the official engine."""

    root: Path

    async def run(self, over: anyio.Event) -> None:
        """Collect again and again until the writers are done, and once more."""
        while not over.is_set():
            await self.pause(2)
            await self.collect()
        await self.collect()

    async def collect(self) -> None:
        """Expire and collect once, on a thread: sessions write meanwhile."""
        async with self.lock:
            self.book.collections_begun += 1
            self.book.collections_incomplete += 1
            official = await asyncio.to_thread(open_official, self.root)
            if self.rng.random() < 0.3:
                self.book.expired_before = now()
                await asyncio.to_thread(official.expire_snapshots, datetime.now(UTC))
            report = await asyncio.to_thread(official.garbage_collect, datetime.now(UTC))
            self.book.counts["chunk objects deleted by theirs"] += report.chunks_deleted
            self.book.collections_incomplete -= 1


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_commit_loses_chunks_to_the_official_collector(seed: int, tmp_path: Path) -> None:
    """Whole or refused; the official engine reads what this one reads."""
    book, root = Book(), tmp_path / "repo"
    async with open_storage(root) as storage:
        await prepare(storage, "format-2")
        lock, over = asyncio.Lock(), anyio.Event()
        writers = [DiskWriter(storage, f"w{it}", seed, book) for it in range(WRITERS)]
        theirs = TheirCollector(storage, "t", seed, book)
        theirs.root = root
        others = (
            theirs,
            OurCollector(storage, "c", seed, book),
            OurExpirer(storage, "e", seed, book),
        )
        for it in (*writers, *others):
            it.lock = lock
        async with anyio.create_task_group() as busy:
            for other in others:
                busy.start_soon(other.run, over)
            async with anyio.create_task_group() as writing:
                for writer in writers:
                    writing.start_soon(writer.run)
            over.set()
        await check(storage, book)
        assert book.anomalies == [], f"seed {seed}"
        assert book.counts[Outcome.ACKNOWLEDGED.value] > 2
        async with Repository.open(storage) as repository:
            for branch in BRANCHES:
                session = await repository.readonly_session(branch)
                official = open_official(root).readonly_session(branch).store
                for number in range(CHUNKS):
                    if (data := await read(session, f"a/c/{number}")) is not None:
                        assert await read_official(official, f"a/c/{number}") == data

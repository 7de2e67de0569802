"""Many writers of one branch.

Each has its own repository and changes its own chunk, all at the same time; each commit that loses
its race is rebased onto the winner.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.peers import PACKAGES, chunked, create, open_repository
from benchmarks.s3_peers import blocking_storage
from benchmarks.s3_server import WIRES
from benchmarks.waiting import processes, threads

if TYPE_CHECKING:
    from benchmarks.contest import Contest
    from benchmarks.s3_server import S3Server
    from benchmarks.waiting import Waits

ENGINES = ("ours", "official")
MANY = 64


async def _contend(engine: str, end: str, prefix: str, writers: int) -> None:
    package = PACKAGES[engine]
    start = asyncio.Event()

    async def writer(number: int) -> None:
        storage = blocking_storage(engine, end, prefix)
        repository = await package.Repository.open_async(storage)
        session = await repository.writable_session_async("main")
        value = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(b"%0600d" % number)
        await session.store.set(f"a/c/{number}", value)
        await start.wait()
        await session.commit_async(f"writer {number}", rebase_with=package.ConflictDetector())

    async with asyncio.TaskGroup() as group:
        for number in range(writers):
            group.create_task(writer(number))
        start.set()


@pytest.mark.parametrize("writers", [16, 64])
@pytest.mark.parametrize("spec", [2])
def test_contention(contest: Contest, s3: S3Server, writers: int, spec: int) -> None:
    """All commits land, once each."""
    if writers == MANY and contest.size == "full":
        pytest.skip("this number of writers of one branch take many minutes: use --size huge")
    count = contest.pick(4, writers)
    wire = contest.pick("near", "50-300 ms")
    samples: dict[str, list[float]] = {}
    for engine in ENGINES:
        prefix = uuid4().hex
        repository = create(engine, blocking_storage(engine, s3.endpoint(), prefix), spec=spec)
        session = repository.writable_session("main")
        chunked(session.store, count, 600)[:1] = 1
        session.commit("array")
        began = time.perf_counter()
        asyncio.run(_contend(engine, s3.endpoint(wire), prefix, count))
        samples[engine] = [time.perf_counter() - began]
        found: Any = open_repository(engine, blocking_storage(engine, s3.endpoint(), prefix))
        messages = [it.message for it in found.ancestry(branch="main")]
        assert {f"writer {it}" for it in range(count)} <= set(messages)
        assert len(messages) == count + 2
    shortest, spread = WIRES[wire]
    # Each has to see what the one before it wrote.
    samples[FLOOR] = [count * 2 * (shortest + spread / 2)]
    contest.add(
        f"{count} writers of one branch, S3 50 to 300 ms away, format {spec}",
        samples,
        metric="seconds",
        targets={"official": 1},
        floor="a read and a write for each writer, one after another, by arithmetic",
        note="once; each opens the repository first",
    )


@pytest.mark.parametrize("wire", ["near", "20 ms"])
@pytest.mark.parametrize("writers", [8, 16, 64])
@pytest.mark.parametrize("where", ["processes", "threads"])
def test_waits(contest: Contest, s3: S3Server, where: str, writers: int, wire: str) -> None:
    """Writers in a hurry: each commits again as soon as it has committed."""
    if writers == MANY and contest.size == "full":
        pytest.skip("this number of writers take many minutes: use --size huge")
    if contest.is_quick and (writers, wire) != (8, "near"):
        pytest.skip("a quick look is the same for any number of writers")
    count, commits = contest.pick(2, writers), contest.pick(2, 160 // writers)
    crowd = {"processes": processes, "threads": threads}[where]
    found: dict[str, Waits] = {}
    for engine in ENGINES:
        prefix = uuid4().hex
        repository = create(engine, blocking_storage(engine, s3.endpoint(), prefix))
        session = repository.writable_session("main")
        chunked(session.store, count, 600)[:1] = 1
        session.commit("array")
        near = contest.pick("near", wire)
        found[engine] = crowd(engine, s3.endpoint(near), prefix, count, commits)
        opened: Any = open_repository(engine, blocking_storage(engine, s3.endpoint(), prefix))
        assert len(list(opened.ancestry(branch="main"))) == count * commits + 2
    away = "next to them" if wire == "near" else f"{wire} away"
    title = f"{count} writers in a hurry, {where}, S3 {away}"
    note = "once; a commit after the other by each, of a chunk that it alone changes"
    shares = {"median wait": 0.5, "95 % wait less": 0.95, "longest wait": 1.0}
    contest.add(
        title,
        {engine: [seconds / len(waits)] for engine, (seconds, waits, _) in found.items()},
        metric="seconds",
        cpu={engine: [cpu / len(waits)] for engine, (_, waits, cpu) in found.items()},
        targets={"official": 1},
        note=f"{note}; the time until all are done, for each commit",
    )
    for name, share in shares.items():
        contest.add(
            title,
            {engine: [_share(waits, share)] for engine, (_, waits, _) in found.items()},
            metric=f"{name}, seconds",
            note=note,
        )


def _share(waits: list[float], share: float) -> float:
    """Return the value that a share of all does not exceed."""
    return sorted(waits)[max(0, math.ceil(share * len(waits)) - 1)]

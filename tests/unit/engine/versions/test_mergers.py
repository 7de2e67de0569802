"""Two who merge into one branch at once, of which one dies at one of its requests after another."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import array_document, group_document, memory_url, write
from tests.unit.engine.versions.stories import contents_at

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

THOROUGH = os.environ.get("EXAMPLES") == "all"
SEEDS = range(20 if THOROUGH else 2)
STEP = 1 if THOROUGH else 7
BRANCHES = ("left", "right")


class Dead(Exception):  # noqa: N818 -- no error: it stands for the end of a process
    """The process is gone."""


class Mortal(WrappedStorage):
    """Lets others run at random, and ends with its n-th request, before or after that is done."""

    def __init__(self, storage: Storage, chance: random.Random, place: int) -> None:
        """Die at a place, two for each request."""
        super().__init__(storage)
        self._chance, self._left = chance, place
        self.died = False

    async def before(self, operation: str, key: str) -> None:
        """Wait a few turns of the loop, and perhaps die."""
        del operation, key
        for _ in range(self._chance.randint(0, 4)):
            await asyncio.sleep(0)
        self.died = self.died or self._left <= 0
        if self.died:
            raise Dead
        self._left -= 1

    async def after(self, operation: str, key: str) -> None:
        """Perhaps die."""
        await self.before(operation, key)


async def begin(repository: Repository) -> None:
    """Commit an array, and to each of both branches other chunks and a group."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await write(session, "a/zarr.json", array_document((24,), (3,)))
    base = await session.commit("begin")
    for number, name in enumerate(BRANCHES):
        await repository.create_branch(name, base)
        for step in range(2):
            session = await repository.writable_session(name)
            await write(session, f"a/c/{2 * step + number}", bytes([number, step, 7]))
            await write(session, f"{name}{step}/zarr.json", group_document(n=step))
            await session.commit(f"{name} {step}")


async def merged(repository: Repository) -> list[str]:
    """Return the branches that were merged into ``main``, in order, one for each commit of it."""
    tips = {str(await repository.lookup_branch(name)): name for name in BRANCHES}
    found: list[str] = []
    async for info in repository.ancestry():
        noted = info.metadata.get("icechunk-async")
        if isinstance(noted, dict):
            sources = noted["merged"]
            assert isinstance(sources, list)
            found += [tips[str(it)] for it in sources]
    return found[::-1]


async def race(storage: Storage, seed: int, place: int) -> tuple[bool, int]:
    """Let two merge at once; return whether the first died, and how many merges were published."""
    sides = [
        Mortal(storage, random.Random(2 * seed + at), place if at == 0 else 1 << 30)
        for at in range(2)
    ]

    async def merge(side: Mortal, branch: str) -> None:
        try:
            async with Repository.open(side) as repository:
                await repository.merge(branch)
        except Dead:
            assert side.died

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for side, branch in zip(sides, BRANCHES, strict=True):
            tasks.create_task(merge(side, branch))
    async with Repository.open(storage) as repository:
        landed = await merged(repository)
        assert "right" in landed, "the one that lived did not land"
        assert len(set(landed)) == len(landed), "a merge is there twice"
        assert sides[0].died or len(landed) == 2
        found = await contents_at(repository)
        for name in BRANCHES:  # each as a whole, or nothing of it
            parts = {f"{name}0/zarr.json" in found, f"{name}1/zarr.json" in found}
            assert parts == {name in landed}
        for name in BRANCHES:
            await repository.merge(name)
        assert sorted(await merged(repository)) == sorted(BRANCHES)
        found = await contents_at(repository)
        assert {f"a/c/{at}" for at in range(4)} <= found.keys()
        assert (await repository.check_references()).is_whole
    return sides[0].died, len(landed)


@pytest.mark.parametrize("spec_version", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_merger_that_dies_leaves_all_of_its_merge_or_nothing(
    seed: int, spec_version: int
) -> None:
    """The other lands in any case, neither lands twice, and merging again completes both."""
    died, place, landed = True, seed % STEP, set[int]()
    while died:
        async with open_storage(memory_url()) as storage:
            async with Repository.create(
                storage, probe=False, spec_version=spec_version
            ) as repository:
                await begin(repository)
            died, count = await race(storage, seed, place)
            landed.add(count)
        place += STEP
    assert place > 10
    assert landed == {1, 2}

"""Laws of undo, restore and merge, over random histories."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import AppendSolver
from icechunk_async.errors import MergeConflictError
from tests.helpers import memory_url
from tests.unit.engine.versions.stories import Story, contents_at
from tests.unit.zarr.test_append import append, begin, series

if TYPE_CHECKING:
    from icechunk_async import SnapshotId

SEEDS = range(1000 if os.environ.get("EXAMPLES") == "all" else 2)


async def line(repository: Repository, branch: str = "main") -> list[SnapshotId]:
    """Return the commits of a branch, oldest first."""
    return [it.id async for it in repository.ancestry(branch=branch)][::-1]


@pytest.mark.parametrize("seed", SEEDS)
async def test_reverting_the_last_commit_restores_every_byte(seed: int) -> None:
    """Moves, resizes, shifts and deletions included; and reverting that brings it back."""
    story = Story(random.Random(seed))
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        for _ in range(4):
            await story.commit(repository)
        *_, before, after = await line(repository)
        report = await repository.revert("main")
        assert await contents_at(repository) == await contents_at(repository, snapshot_id=before)
        if report.snapshot_id is not None:
            await repository.revert("main")
            assert await contents_at(repository) == await contents_at(repository, snapshot_id=after)


@pytest.mark.parametrize("seed", SEEDS)
async def test_restore_brings_back_every_byte_of_any_snapshot(seed: int) -> None:
    """Also of another branch."""
    story = Story(random.Random(seed))
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        for _ in range(3):
            await story.commit(repository)
        commits = await line(repository)
        await repository.create_branch("other", commits[2])
        for _ in range(2):
            await story.commit(repository, "other")
        for ref in (commits[1], commits[-1], "other"):
            await repository.restore(ref, on="main")
            wanted = {"branch": ref} if isinstance(ref, str) else {"snapshot_id": ref}
            assert await contents_at(repository) == await contents_at(repository, **wanted)


@pytest.mark.parametrize("seed", SEEDS)
async def test_merging_disjoint_work_equals_doing_it_on_one_branch(seed: int) -> None:
    """And the order of merging does not matter."""
    found = []
    for order in ("left right", "right left", "one branch"):
        async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
            left, right = (
                Story(random.Random(1000 * seed + at), top) for at, top in enumerate("lr")
            )
            await left.begin(repository)
            await right.begin(repository)
            tip = await repository.lookup_branch("main")
            branches = {"left": left, "right": right}
            for name, story in branches.items():
                if order != "one branch":
                    await repository.create_branch(name, tip)
                for _ in range(3):
                    await story.commit(repository, "main" if order == "one branch" else name)
            if order != "one branch":
                for name in order.split():
                    await repository.merge(name)
                for name in order.split():
                    assert (await repository.merge(name)).snapshot_id is None
            found.append(await contents_at(repository))
    assert found[0] == found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize("seed", SEEDS)
async def test_picking_every_commit_equals_merging(seed: int) -> None:
    """Where nothing clashes."""
    story, other = (Story(random.Random(7000 * seed + at), top) for at, top in enumerate("lr"))
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        await other.begin(repository)
        tip = await repository.lookup_branch("main")
        for name in ("side", "picked"):
            await repository.create_branch(name, tip)
        for _ in range(3):
            await story.commit(repository, "side")
            await other.commit(repository, "main")
        await repository.reset_branch("picked", await repository.lookup_branch("main"))
        for commit in (await line(repository, "side"))[3:]:
            await repository.cherry_pick(commit, onto="picked")
        await repository.merge("side")
        assert await contents_at(repository) == await contents_at(repository, branch="picked")


@pytest.mark.parametrize("seed", SEEDS)
async def test_appending_on_both_sides_equals_concatenation(seed: int) -> None:
    """Of any lengths, and wherever chunks end: values, coordinates and the rest."""
    chance = random.Random(seed)
    chunk, length = chance.randint(1, 5), chance.randint(0, 9)
    theirs, ours = ([chance.randint(1, 7) for _ in range(chance.randint(1, 3))] for _ in range(2))
    async with begin(memory_url(), length, chunk, spec_version=1 + seed % 2) as repository:
        wanted = list(range(length))
        for branch, blocks, first in (("main", theirs, 100), ("side", ours, 1000)):
            day = first
            for count in blocks:
                session = await repository.writable_session(branch)
                await append(session, range(day, day + count))
                day += count
                await session.commit(f"{count} days")
            wanted += range(first, day)
        await repository.merge("side", solver=AppendSolver("time"))
        assert await series(repository) == wanted


@pytest.mark.parametrize("seed", SEEDS)
async def test_squashing_keeps_every_byte(seed: int) -> None:
    """One commit, and the same state."""
    story = Story(random.Random(seed))
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        for _ in range(4):
            await story.commit(repository)
        commits, wanted = await line(repository), await contents_at(repository)
        made = await repository.squash("main", since=commits[1])
        assert await line(repository) == [*commits[:2], made]
        assert await contents_at(repository) == wanted


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_merge_takes_each_chunk_and_document_from_a_side_that_changed_it(
    seed: int,
) -> None:
    """Both sides change the same nodes: a merge is refused with the clashes, or mixes nothing."""
    chance = random.Random(seed)
    story = Story(chance, names="a", moves=False)
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        await story.commit(repository)
        tip = await repository.lookup_branch("main")
        await repository.create_branch("side", tip)
        await story.commit(repository, "side", steps=2)
        await story.commit(repository, "main", steps=2)
        base, ours, theirs = [
            await contents_at(repository, snapshot_id=it)
            for it in (
                tip,
                await repository.lookup_branch("side"),
                await repository.lookup_branch("main"),
            )
        ]
        if (await repository.merge("side", dry_run=True)).conflicts:
            with pytest.raises(MergeConflictError):
                await repository.merge("side")
            assert await contents_at(repository) == theirs
            return
        await repository.merge("side")
        merged = await contents_at(repository)
        for key in {*base, *ours, *theirs, *merged}:
            mine, other, old = ours.get(key), theirs.get(key), base.get(key)
            assert merged.get(key) == (mine if other == old else other), key

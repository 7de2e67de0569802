"""Expiration and garbage collection beside the official engine: the same goes, the same stays."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, views_agree
from tests.interop.edits import apply, array, group, write
from tests.interop.files import FOLDERS, Files
from tests.interop.hierarchies import SOURCE_FILES
from tests.interop.steps import HISTORY, history
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.engine.upkeep.collect import GarbageReport
    from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
    from tests.interop.answers import Repo
    from tests.interop.edits import Sources


SEEDS = range(int(os.environ.get("UPKEEP_SEEDS", "2")))
SPECS = pytest.mark.parametrize("spec", [1, 2])
DAYS = 20
"""How far back the ages of files reach."""


@dataclass
class _Maker:
    """Makes a history at random: commits, branches, tags, resets, amendments, lost work."""

    repo: Repo
    spec: int
    rng: random.Random
    known: list[str]
    names: int = 0

    async def step(self) -> None:
        actions: list[Any] = [self.commit] * 6 + [self.lose, self.flush, self.branch, self.branch]
        actions += [self.tag, self.delete_tag, self.delete_branch, self.reset, self.reset]
        if self.spec > 1:
            actions += [self.amend] * 2
        await self.rng.choice(actions)()

    def _name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    async def _any_branch(self) -> str:
        return self.rng.choice(sorted(await self.repo.branches()))

    async def edited(self) -> Any:
        work = await self.repo.work(await self._any_branch())
        start = self.rng.randrange(0, 400, 100)
        seed = self.rng.randrange(1000)
        stop = min(400, start + self.rng.choice([100, 150]))
        edits = [write("big", [start], [stop], seed, "<f8")]
        if work.snapshot == self.known[0]:
            edits.insert(0, array("big", [400], [100], "<f8"))
        if self.rng.random() < 0.3:
            edits.append(group(self._name()))
        await apply(work.store, edits)
        return work

    async def commit(self) -> None:
        self.known.append(await (await self.edited()).commit("commit"))

    async def amend(self) -> None:
        branches = await self.repo.branches()
        if self.known[0] not in branches.values():  # which cannot be amended
            self.known.append(await (await self.edited()).amend("amended"))

    async def flush(self) -> None:
        detached = await (await self.edited()).flush("flushed")
        if self.spec > 1:
            self.known.append(detached)

    async def lose(self) -> None:
        await self.edited()

    async def branch(self) -> None:
        await self.repo.create_branch(self._name(), self.rng.choice(self.known))

    async def tag(self) -> None:
        await self.repo.create_tag(self._name(), self.rng.choice(self.known))

    async def reset(self) -> None:
        await self.repo.reset_branch(await self._any_branch(), self.rng.choice(self.known))

    async def delete_branch(self) -> None:
        name = await self._any_branch()
        if name != "main":
            await self.repo.delete_branch(name)

    async def delete_tag(self) -> None:
        tags = sorted(await self.repo.tags())
        if tags:
            await self.repo.delete_tag(self.rng.choice(tags))


async def make_history(root: Path, spec: int, seed: int, steps: int) -> list[str]:
    """Create a repository; answer the snapshots made, the first one first."""
    rng = random.Random(seed)
    engine = rng.choice(list(ENGINES.values()))
    await engine.create(root, spec, Settings(inline=rng.choice([0, 512])))
    async with engine.open(root) as repo:
        known = list((await repo.branches()).values())
        maker = _Maker(repo, spec, rng, known)
        known.append(await (await maker.edited()).commit("first"))
        for _ in range(steps):
            await maker.step()
    return known


def age(root: Path, rng: random.Random) -> None:
    """Make every file between 1 and ``DAYS`` days old, at random."""
    now = datetime.now(UTC).timestamp()
    for folder in FOLDERS:
        for path in (root / folder).glob("*"):
            moment = now - 86400 * rng.uniform(1, DAYS)
            os.utime(path, (moment, moment))


def copies(root: Path) -> dict[str, Path]:
    """Copy a repository for each engine, with the times of its files."""
    return {
        name: shutil.copytree(root, root.with_name(f"for-{name}"), symlinks=True)
        for name in ENGINES
    }


async def our_collection(root: Path, cutoff: datetime, *, dry_run: bool = False) -> GarbageReport:
    """Run our garbage collection."""
    async with Repository.open(root) as repository:
        return await repository.garbage_collect(cutoff, dry_run=dry_run)


def same_history(ours: Path, theirs: Path) -> None:
    """Compare refs, parents and remembered logs; other things of the repo info as well."""
    one, two = Files(ours).info, Files(theirs).info
    if one is None or two is None:
        assert one is two
        for snapshot_id in Files(ours).ids("snapshots"):
            snapshots = [Files(root).snapshot(snapshot_id) for root in (ours, theirs)]
            assert snapshots[0].parent_id == snapshots[1].parent_id
            assert snapshots[0].nodes == snapshots[1].nodes
            assert snapshots[0].metadata == snapshots[1].metadata
            assert snapshots[0].flushed_at == snapshots[1].flushed_at
        names = [it for it in Files(ours).names() if it.startswith("refs/")]
        assert names == [it for it in Files(theirs).names() if it.startswith("refs/")]
        return
    assert (one.branches, one.tags, one.deleted_tags) == (two.branches, two.tags, two.deleted_tags)
    assert one.snapshots == two.snapshots
    assert [type(it.detail) for it in one.updates] == [type(it.detail) for it in two.updates]


def counts(summary: Any) -> dict[str, int]:
    """Return the counts that both engines report."""
    names = ("chunks", "manifests", "snapshots", "attributes", "transaction_logs", "bytes")
    return {name: getattr(summary, f"{name}_deleted") for name in names}


async def stats_agree(root: Path) -> ChunkStorageStats:
    """Count chunks with both engines."""
    async with Repository.open(root) as repository:
        ours = await repository.chunk_storage_stats()
    theirs = open_official(root).chunk_storage_stats()
    assert ours.native_bytes == theirs.native_bytes
    assert ours.virtual_bytes == theirs.virtual_bytes
    assert ours.inlined_bytes == theirs.inlined_bytes
    assert ours.total_bytes() == theirs.total_bytes()
    assert ours.non_virtual_bytes() == theirs.non_virtual_bytes()
    return ours


@pytest.mark.sampled
@SPECS
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_histories_expire_and_are_collected_alike(
    spec: int, seed: int, tmp_path: Path
) -> None:
    """Of a random history both engines drop the same, and afterwards each reads the other's."""
    rng = random.Random(f"{seed}/{spec}")
    root = tmp_path / "repo"
    known = await make_history(root, spec, seed, 30)
    age(root, rng)
    places = copies(root)
    delete_branches, delete_tags = rng.random() < 0.5, rng.random() < 0.5
    moment = Files(root).snapshot(rng.choice(known)).flushed_at + rng.choice([0, 1])
    older_than = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=moment)
    options = {"delete_expired_branches": delete_branches, "delete_expired_tags": delete_tags}
    expired = set(open_official(places["theirs"]).expire_snapshots(older_than, **options))
    async with Repository.open(places["ours"]) as repository:
        names = Files(places["ours"]).names()
        planned = await repository.expire_snapshots(older_than, dry_run=True, **options)
        assert Files(places["ours"]).names() == names
        done = await repository.expire_snapshots(older_than, **options)
    assert set(map(str, done)) == set(map(str, planned)) == expired
    same_history(places["ours"], places["theirs"])
    await views_agree(places["ours"], spec, everything=True)

    age(places["ours"], random.Random(seed))
    for folder in FOLDERS:  # what expiration wrote again has the same age in both
        for path in (places["ours"] / folder).glob("*"):
            times = (path.stat().st_mtime, path.stat().st_mtime)
            os.utime(places["theirs"] / folder / path.name, times)
    cutoff = datetime.now(UTC) - timedelta(days=rng.choice([0, 5, 10]))
    names = Files(places["ours"]).names()
    dry = await our_collection(places["ours"], cutoff, dry_run=True)
    assert Files(places["ours"]).names() == names
    theirs = open_official(places["theirs"]).garbage_collect(cutoff)
    ours = await our_collection(places["ours"], cutoff)
    assert not ours.failures
    assert counts(ours) == counts(dry)
    expected = counts(theirs)
    if spec == 1:  # snapshots that were written again compress a little differently
        expected["bytes"] = counts(ours)["bytes"]
    assert counts(ours) == expected
    same_history(places["ours"], places["theirs"])
    for folder in FOLDERS:
        assert Files(places["ours"]).ids(folder) == Files(places["theirs"]).ids(folder)
    for place in places.values():  # nothing is left for the other
        assert not any(counts(await our_collection(place, cutoff, dry_run=True)).values())
        summary = open_official(place).garbage_collect(cutoff, dry_run=True)
        assert not any(counts(summary).values())
        assert not any(Files(place).missing().values())
        await views_agree(place, spec, everything=True)
        await stats_agree(place)


@SPECS
@pytest.mark.parametrize("first", list(ENGINES))
async def test_chunks_of_every_kind_are_counted_alike(
    spec: int, first: str, sources: Sources, tmp_path: Path
) -> None:
    """Native, inline and virtual ones, shared by snapshots and not."""
    root = tmp_path / "repo"
    await history(ENGINES[first], root, spec, HISTORY, Settings(source=sources.directory))
    async with ENGINES[first].open(root, sources.directory) as repo:
        work = await repo.work()
        await apply(work.store, [array("v", [8], [1], "<i4")])
        store: Any = work.store
        urls = [f"{sources.url}{file}" for file in SOURCE_FILES]
        for number in range(8):  # each range twice, in each of two files
            store.set_virtual_ref(
                f"v/c/{number}", urls[number % 2], offset=number // 4 * 8, length=4
            )
        await work.commit("virtual")
    stats = await stats_agree(root)
    assert stats.virtual_bytes == 16
    assert min(stats.native_bytes, stats.inlined_bytes) > 0

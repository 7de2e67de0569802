"""The engines take turns on one repository; after each turn both see the same, bit for bit."""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from tests.interop.answers import CONFIGS, Settings, Touched
from tests.interop.comparing import ENGINES, check_garbage, collect, other, view, views_agree
from tests.interop.edits import apply, contents
from tests.interop.files import FOLDERS, Files
from tests.interop.hierarchies import JSON_KINDS, Hierarchy, samples, seeded

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from tests.interop.answers import Engine, Repo
    from tests.interop.edits import Edit, Sources


SEEDS = range(int(os.environ.get("INTEROP_SEEDS", "1")))
pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))


@dataclass
class Line:
    """A branch as it should be: a model to make edits from, and the oracle's keys."""

    model: Hierarchy
    keys: dict[str, Any] = field(default_factory=dict)

    def branch_off(self) -> Line:
        """Return another line that begins like this one."""
        model = Hierarchy(self.model.random, self.model.virtual)
        model.groups = set(self.model.groups)
        model.arrays = copy.deepcopy(self.model.arrays)
        return Line(model, dict(self.keys))


@dataclass
class Story:
    """A repository, how it should look, and what happens to it next."""

    root: Path
    spec: int
    sources: Sources
    pick: Random
    lines: dict[str, Line] = field(default_factory=dict)
    expected: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Contents of snapshots."""
    names: int = 0

    async def turn(self, engine: Engine) -> None:
        """Let an engine edit a branch, commit, and change some refs."""
        async with engine.open(self.root, self.sources.directory) as repo:
            branch = self.pick.choice(sorted(self.lines))
            await self._work(repo, branch)
            if self.pick.random() < 0.5:
                await self._refs(repo)

    async def _work(self, repo: Repo, branch: str) -> None:
        line = self.lines[branch]
        work = await repo.work(branch)
        how = self.pick.choices(("commit", "amend", "flush"), (6, 2, 1))[0]
        amended = (await repo.ancestry(work.snapshot))[0]
        if how == "amend" and (self.spec == 1 or amended.parent is None):
            how = "commit"
        if how == "flush":
            line = line.branch_off()
        edits: list[Edit] = []
        while work.status() == Touched():  # some edits change nothing
            more = line.model.edits(self.pick.randint(4, 14))
            await apply(work.store, more, self.sources)
            edits += more
        oracle = MemoryStore(line.keys)
        await apply(oracle, edits, self.sources)
        kinds = self.pick.sample(sorted(JSON_KINDS), self.pick.randrange(4))
        metadata = {name: JSON_KINDS[name] for name in kinds}
        start, pending = work.snapshot, work.status()
        if how == "flush":
            snapshot = await work.flush("détaché")
            name = self._name("flushed")
            await repo.create_branch(name, snapshot)
            self.lines[name] = line
        elif how == "amend":
            snapshot = await work.amend("amended", metadata)
        else:
            snapshot = await work.commit(self.pick.choice(["", "message", "多 words"]), metadata)
        if how != "amend":
            assert await repo.diff(start, snapshot) == pending
        self.expected[snapshot] = await contents(oracle)

    def _name(self, start: str) -> str:
        self.names += 1
        return f"{start}.{self.names}-x"

    async def _refs(self, repo: Repo) -> None:
        branches, tags = await repo.branches(), await repo.tags()
        source = self.pick.choice(sorted(branches))
        match self.pick.randrange(5):
            case 0:
                name = self._name("branch")
                await repo.create_branch(name, branches[source])
                self.lines[name] = self.lines[source].branch_off()
            case 1 if source != "main":
                await repo.delete_branch(source)
                del self.lines[source]
            case 2 if tags:
                await repo.delete_tag(self.pick.choice(sorted(tags)))
            case 3:
                target = self.pick.choice(sorted(branches))
                await repo.reset_branch(target, branches[source])
                self.lines[target] = self.lines[source].branch_off()
            case _:
                await repo.create_tag(self._name("tag"), branches[source])

    async def begin(self, engine: Engine) -> None:
        """Create the repository with one of several configurations."""
        chosen = self.pick.choice(CONFIGS)
        settings = Settings(
            chosen.inline, chosen.splits, self.sources.directory, chosen.max_updates
        )
        await engine.create(self.root, self.spec, settings)
        self.lines["main"] = Line(Hierarchy(self.pick, virtual=True))

    async def check(self, *, everything: bool = False) -> None:
        """Both engines see the same, and what the oracle says."""
        await views_agree(
            self.root,
            self.spec,
            expected=self.expected,
            source=self.sources.directory,
            everything=everything,
        )


@pytest.mark.sampled
@SPECS
@FIRST
@pytest.mark.parametrize("seed", SEEDS)
async def test_engines_take_turns_and_agree_after_each(
    spec: int, first: str, seed: int, tmp_path: Path, sources: Sources
) -> None:
    """Each engine reads and continues the other's commits byte for byte, also after collection."""
    story = Story(tmp_path / "repo", spec, sources, seeded(f"{spec} {first} {seed}"))
    engines = [ENGINES[first], other(first)]
    await story.begin(engines[0])
    for turn in range(5):
        await story.turn(engines[turn % 2])
        await story.check()
    await story.check(everything=True)
    check_garbage(story.root)
    await _survives_collection(story)


async def _survives_collection(story: Story) -> None:
    """Collect for real on a copy. Everything reads as before, and both still commit."""
    before = await views_agree(story.root, story.spec, source=story.sources.directory)
    shutil.copytree(story.root, copied := story.root.with_name("collected"))
    collect(copied, dry_run=False)
    nothing = {folder: set[str]() for folder in FOLDERS}
    assert Files(copied).garbage() == nothing
    assert Files(copied).missing() == nothing
    story.root = copied
    after = await views_agree(
        copied, story.spec, expected=story.expected, source=story.sources.directory
    )
    assert after.contents == before.contents
    assert after.ancestries == before.ancestries
    for engine in ENGINES.values():
        await story.turn(engine)
        await story.check()


@SPECS
@FIRST
async def test_every_type_rank_and_size_crosses_over(spec: int, first: str, tmp_path: Path) -> None:
    """One array of each data type, rank and interesting size reads equal in both engines."""
    engine, root = ENGINES[first], tmp_path / "repo"
    await engine.create(root, spec)
    async with engine.open(root) as repo:
        work = await repo.work()
        await apply(work.store, samples())
        tip = await work.commit("samples", JSON_KINDS)
    oracle = MemoryStore()
    await apply(oracle, samples())
    seen = await views_agree(root, spec, expected={tip: await contents(oracle)})
    assert len(seen.arrays[tip]) == sum(edit.kind == "array" for edit in samples())
    assert check_garbage(root)["bytes"] == 0


@SPECS
@pytest.mark.parametrize("pipeline", ["BatchedCodecPipeline", "FusedCodecPipeline"])
async def test_zarrs_synchronous_functions_write_the_same(
    spec: int, pipeline: str, tmp_path: Path
) -> None:
    """A hierarchy written on Zarr's own loop, also without a loop, reads equal in both."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    with zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{pipeline}"}):
        async with ENGINES["ours"].open(root) as repo:
            work = await repo.work()
            await asyncio.to_thread(sync, apply(work.store, samples()))
            tip = await work.commit("synchronous")
        oracle = MemoryStore()
        await apply(oracle, samples())
        await views_agree(root, spec, expected={tip: await contents(oracle)})


@SPECS
@FIRST
async def test_an_open_handle_follows_the_other_engine(
    spec: int, first: str, tmp_path: Path
) -> None:
    """A repository opened before the other engine wrote sees what that wrote, and commits on."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec)
    model = Hierarchy(seeded(7))
    async with ENGINES[first].open(root) as held:
        for turn in range(4):
            async with other(first).open(root) as repo:
                work = await repo.work()
                await apply(work.store, model.edits(6))
                tip = await work.commit(f"other {turn}", empty=True)
                await repo.create_tag(f"t{turn}", tip)
            work = await held.work()
            assert work.snapshot == tip
            assert (await held.tags())[f"t{turn}"] == tip
            await apply(work.store, model.edits(6))
            await work.commit(f"held {turn}", empty=True)
        seen = await view(held, spec, everything=True)
    assert seen == await views_agree(root, spec, everything=True)

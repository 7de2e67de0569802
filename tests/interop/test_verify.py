"""Verification calls nothing damaged that the official engine wrote, and repairs please it."""

from __future__ import annotations

import random
import shutil
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.credentials import LocalFileSystemAccess
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES
from tests.interop.edits import apply, group
from tests.interop.files import Files
from tests.interop.steps import HISTORY, history
from tests.interop.test_golden import EACH, GOLDEN
from tests.interop.test_upkeep import SPECS, age, make_history
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.upkeep import VerifyReport
    from tests.interop.edits import Sources


async def verified(root: Path, *prefixes: str) -> VerifyReport:
    """Verify down to the contents of chunks."""
    access = dict.fromkeys(prefixes, LocalFileSystemAccess())
    async with Repository.open(root, authorize_virtual_chunk_access=access) as repository:
        return await repository.verify()


@EACH
async def test_repositories_of_older_releases_are_healthy(name: str, tmp_path: Path) -> None:
    """Those of 0.x, too."""
    root = shutil.copytree(GOLDEN / name, tmp_path / "repo")
    report = await verified(root)
    assert report.findings == ()
    assert report.snapshots > 2


@SPECS
@pytest.mark.parametrize("first", list(ENGINES))
async def test_histories_of_both_engines_are_healthy(
    spec: int, first: str, sources: Sources, tmp_path: Path
) -> None:
    """Native, inline and virtual chunks; every kind of change."""
    root = tmp_path / "repo"
    await history(ENGINES[first], root, spec, HISTORY, Settings(source=sources.directory))
    report = await verified(root, sources.url)
    assert report.findings == ()
    assert report.chunks_read > 0


@pytest.mark.sampled
@SPECS
@pytest.mark.parametrize("seed", range(2))
async def test_expired_and_collected_histories_are_healthy(
    spec: int, seed: int, tmp_path: Path
) -> None:
    """Branches that were reset, amendments, lost work; the official engine expires and collects."""
    rng = random.Random(f"verify {seed}/{spec}")
    root = tmp_path / "repo"
    known = await make_history(root, spec, seed, 30)
    assert (await verified(root)).findings == ()
    age(root, rng)
    moment = Files(root).snapshot(rng.choice(known)).flushed_at
    older_than = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=moment)
    open_official(root).expire_snapshots(older_than)
    assert (await verified(root)).findings == ()
    open_official(root).garbage_collect(datetime.now(UTC))
    assert (await verified(root)).findings == ()


@SPECS
@pytest.mark.parametrize("first", list(ENGINES))
async def test_official_engine_works_on_after_a_repair(
    spec: int, first: str, tmp_path: Path
) -> None:
    """It opens, reads, compares, commits, and collects; both engines see the same."""
    root = tmp_path / "repo"
    await history(ENGINES[first], root, spec, HISTORY, Settings(inline=0))
    async with Repository.open(root) as repository:
        tip = str(await repository.lookup_branch("main"))
        (root / "transactions" / tip).unlink()
        used = await repository.list_manifest_files(tip)
        (root / "manifests" / str(used[0].id)).write_bytes(b"damaged")
        chunk = max((root / "chunks").iterdir(), key=lambda it: it.name)
        chunk.write_bytes(chunk.read_bytes()[:-1])
        report = await repository.verify()
        assert {it.kind for it in report.findings} >= {"transaction log", "manifest"}
        await (await repository.plan_repair(report)).apply()
        branches = sorted(await repository.branches())
        assert (await repository.verify(refs=branches, ancestry=False)).findings == ()
    async with ENGINES["theirs"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("after")])
        made = await work.commit("after the repair")
    official = open_official(root)
    official.diff(from_snapshot_id=tip, to_snapshot_id=made)
    async with Repository.open(root) as repository:
        report = await repository.verify(refs=branches, ancestry=False)
        assert report.findings == ()
    official.expire_snapshots(datetime.now(UTC), delete_expired_tags=True)
    official.garbage_collect(datetime.now(UTC))
    assert (await verified(root)).findings == ()

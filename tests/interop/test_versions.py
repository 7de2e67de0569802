"""Merges, picks, reverts, restores and squashes are ordinary commits to the official engine."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.conflicts import AppendSolver
from tests.interop.theirs import icechunk
from tests.unit.engine.versions.stories import Story, contents_at
from tests.unit.zarr.test_append import append, begin, series, values

if TYPE_CHECKING:
    from pathlib import Path


def theirs(root: Path) -> icechunk.Repository:
    """Open the repository with the official engine."""
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))


async def official_contents(root: Path, branch: str) -> dict[str, bytes]:
    """Return every document and chunk of a branch as the official engine reads it."""
    store = theirs(root).readonly_session(branch).store
    prototype = zarr.core.buffer.default_buffer_prototype()
    found: dict[str, bytes] = {}
    async for key in store.list():
        value = await store.get(key, prototype)
        assert value is not None
        found[key] = value.to_bytes()
    return found


@pytest.mark.parametrize(("spec", "length"), [(1, 4), (2, 4), (2, 3)])
async def test_the_official_engine_reads_what_two_appenders_wrote(
    tmp_path: Path, spec: int, length: int
) -> None:
    """Where the second block was moved by reference, and where its seam was rewritten."""
    async with begin(str(tmp_path), 4, 4, spec_version=spec) as repository:
        for branch, first in (("main", 100), ("side", 1000)):
            session = await repository.writable_session(branch)
            await append(session, range(first, first + length))
            await session.commit(f"days of {branch}")
        await repository.merge("side", solver=AppendSolver("time"))
        days = await series(repository)
        assert days == [*range(4), *range(100, 100 + length), *range(1000, 1000 + length)]
    store = theirs(tmp_path).readonly_session("main").store
    for path, expected in (("time", np.array(days)), ("rain", values(days))):
        read = zarr.open_array(store, path=path, mode="r")
        np.testing.assert_array_equal(np.asarray(read[...]), expected)


@pytest.mark.parametrize("seed", range(int(os.environ.get("INTEROP_SEEDS", "1")) * 6))
async def test_the_official_engine_reads_and_continues_every_result(
    seed: int, tmp_path: Path
) -> None:
    """It reads equal bytes, commits on top, expires and collects, and we read that."""
    left, right = (
        Story(random.Random(50 * seed + at), top, virtual=False) for at, top in enumerate("lr")
    )
    async with Repository.create(tmp_path, spec_version=1 + seed % 2) as repository:
        await left.begin(repository)
        await right.begin(repository)
        await repository.create_branch("side", await repository.lookup_branch("main"))
        for _ in range(3):
            await left.commit(repository, "side")
            await right.commit(repository, "main")
        await repository.create_branch("picked", await repository.lookup_branch("main"))
        commits = [it.id async for it in repository.ancestry(branch="side")][:3]
        for commit in reversed(commits):
            await repository.cherry_pick(commit, onto="picked")
        await repository.merge("side")
        assert await official_contents(tmp_path, "main") == await contents_at(repository)
        assert await official_contents(tmp_path, "picked") == await contents_at(repository)
        await repository.revert("main")
        await repository.restore("side", paths=["l"])
        await repository.squash("main", since="main~2")
        assert await official_contents(tmp_path, "main") == await contents_at(repository)
    other = theirs(tmp_path)
    session = other.writable_session("main")
    zarr.create_array(session.store, name="theirs", shape=(4,), chunks=(2,), dtype="i4")[:] = 5
    session.commit("on top")
    now = datetime.now(UTC)
    other.expire_snapshots(now)
    other.garbage_collect(now)
    async with Repository.open(tmp_path) as repository:
        assert await official_contents(tmp_path, "main") == await contents_at(repository)
        assert (await repository.verify("length")).is_healthy
        read = zarr.open_array(theirs(tmp_path).readonly_session("main").store, path="theirs")
        assert np.array_equal(np.asarray(read[:]), [5] * 4)
        await repository.restore("side", paths=["l"])
        assert await official_contents(tmp_path, "main") == await contents_at(repository)


async def test_the_official_engine_rebases_over_a_merge(tmp_path: Path) -> None:
    """Its own conflict detection reads our transaction logs."""
    async with Repository.create(tmp_path) as repository:
        left = Story(random.Random(1), "l", moves=False, virtual=False)
        right = Story(random.Random(2), "r", virtual=False)
        await left.begin(repository)
        await right.begin(repository)
        await repository.create_branch("side", await repository.lookup_branch("main"))
        await left.commit(repository, "side", steps=6)
        session = theirs(tmp_path).writable_session("main")
        zarr.open_group(session.store, path="r").attrs["theirs"] = 1
        await repository.merge("side")
        session.commit("after the merge", rebase_with=icechunk.ConflictDetector())
        assert b"theirs" in (await contents_at(repository))["r/zarr.json"]
        assert await official_contents(tmp_path, "main") == await contents_at(repository)

"""The official engine beside sessions with leases: it does everything, and sees none of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from zarr.api import asynchronous as azarr

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.engine.leases.register import SessionState
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from pathlib import Path

SPECS = pytest.mark.parametrize("spec", [1, 2])
AGO = timedelta(days=1)


def _leases(root: Path) -> set[Path]:
    return {path for path in (root / "leases").rglob("*") if path.is_file()}


@SPECS
async def test_the_official_engine_reads_commits_expires_and_collects_beside_leases(
    tmp_path: Path, spec: int
) -> None:
    """It neither lists nor touches what is under ``leases/``; we commit over what it did."""
    async with Repository.create(tmp_path, spec_version=spec) as ours:
        first = await ours.writable_session("main")
        await azarr.create_array(first.store, name="a", shape=(8000,), chunks=(1000,), dtype="f8")
        await first.commit("an array")

        leased = await ours.writable_session("main", lease=True, owner="ours")
        array = await azarr.open_array(store=leased.store, path="a")
        await array.setitem(slice(0, 2000), 1.0)
        before = _leases(tmp_path)
        assert before

        theirs = open_official(tmp_path)
        session = theirs.writable_session("main")
        zarr.open_array(session.store, path="a")[4000:6000] = 2.0
        session.commit("theirs")
        theirs.expire_snapshots(datetime.now(UTC) - AGO)
        theirs.garbage_collect(datetime.now(UTC) - AGO)
        assert _leases(tmp_path) == before
        assert (await ours.sessions())[0].state is SessionState.LIVE

        tip = await leased.commit("ours", rebase_with=ConflictDetector())
        theirs = open_official(tmp_path)
        assert theirs.lookup_branch("main") == str(tip)
        read = zarr.open_array(theirs.readonly_session("main").store, path="a", mode="r")
        expected = np.zeros(8000)
        expected[:2000], expected[4000:6000] = 1.0, 2.0
        assert np.array_equal(np.asarray(read[:]), expected)

        session = theirs.writable_session("main")
        zarr.open_array(session.store, path="a")[6000:] = 3.0
        session.commit("theirs again")
        theirs.expire_snapshots(datetime.now(UTC))
        summary = theirs.garbage_collect(datetime.now(UTC))
        assert summary.chunks_deleted == 0
        assert _leases(tmp_path) == before
        reader = await ours.readonly_session("main")
        values = await (await azarr.open_array(store=reader.store, path="a")).getitem(...)
        expected[6000:] = 3.0
        assert np.array_equal(np.asarray(values), expected)


@SPECS
async def test_both_engines_collect_the_same_beside_a_dead_lease(tmp_path: Path, spec: int) -> None:
    """A lease that ended protects nothing."""
    async with Repository.create(tmp_path, spec_version=spec) as ours:
        leased = await ours.writable_session("main", lease=True)
        await azarr.create_array(leased.store, name="a", shape=(1000,), chunks=(1000,), dtype="f8")
        array = await azarr.open_array(store=leased.store, path="a")
        await array.setitem(slice(None), np.random.default_rng(0).random(1000))
        await ours.end_session(leased.session_id)
        dry = await ours.garbage_collect(datetime.now(UTC), dry_run=True)
        summary = icechunk.Repository.open(
            icechunk.local_filesystem_storage(str(tmp_path))
        ).garbage_collect(datetime.now(UTC))
        assert summary.chunks_deleted == dry.chunks_deleted == 1
        assert _leases(tmp_path)


@SPECS
async def test_the_official_engine_sees_one_ordinary_commit_of_forks_that_published(
    tmp_path: Path, spec: int
) -> None:
    """Nothing of it before; then it reads, commits on top, expires and collects."""
    async with Repository.create(tmp_path, spec_version=spec) as ours:
        first = await ours.writable_session("main")
        await azarr.create_array(first.store, name="a", shape=(8000,), chunks=(1000,), dtype="f8")
        await first.commit("an array")

        session = await ours.writable_session("main", lease=True)
        expected = np.zeros(8000)
        for number in range(3):  # each writes a chunk, and over one of the fork before
            fork = await session.fork()
            await fork.refresh()
            array = await azarr.open_array(store=fork.store, path="a")
            await array.setitem(slice(1000 * number, 1000 * number + 2000), number + 1.0)
            expected[1000 * number : 1000 * number + 2000] = number + 1.0
            await fork.publish()
        await session.refresh()
        theirs = open_official(tmp_path)
        assert len(list(theirs.ancestry(branch="main"))) == 2
        other = theirs.writable_session("main")
        zarr.create_group(other.store, path="theirs")
        other.commit("theirs")

        tip = await session.commit("ours", rebase_with=ConflictDetector())
        theirs = open_official(tmp_path)
        assert theirs.lookup_branch("main") == str(tip)
        assert [it.message for it in theirs.ancestry(branch="main")][:2] == ["ours", "theirs"]
        read = zarr.open_array(theirs.readonly_session("main").store, path="a", mode="r")
        assert np.array_equal(np.asarray(read[:]), expected)

        own = theirs.writable_session("main")
        zarr.open_array(own.store, path="a")[6000:] = 9.0
        own.commit("on top")
        theirs.expire_snapshots(datetime.now(UTC))
        theirs.garbage_collect(datetime.now(UTC))
        expected[6000:] = 9.0
        reader = await ours.readonly_session("main")
        values = await (await azarr.open_array(store=reader.store, path="a")).getitem(...)
        assert np.array_equal(np.asarray(values), expected)
        assert not (await ours.verify()).findings

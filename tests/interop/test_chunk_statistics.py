"""The official engine works with repositories that have statistics as with any other."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import icechunk
import numpy as np
import pytest
import zarr
from zarr.api.asynchronous import create_array, open_array

from icechunk_async import Repository
from tests.helpers import objects

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(4000.0)


async def statistics_in(root: Path) -> set[str]:
    """Return the keys of statistics."""
    async with Repository.open(root) as repository:
        return {it for it in await objects(repository.storage) if it.startswith("statistics/")}


async def sums(root: Path, **where: Any) -> tuple[float, int]:
    """Return the sum of the array, and how many chunks had to be read for it."""
    async with Repository.open(root) as repository:
        found = await (await repository.readonly_session(**where)).aggregate("a", "sum")
        return found.value, found.chunks_read


@pytest.mark.parametrize("spec", [1, 2])
async def test_what_the_official_engine_writes_is_unknown_and_the_rest_known(
    tmp_path: Path, spec: int
) -> None:
    """It reads, commits, expires and collects; statistics stay, and are never wrong."""
    root = tmp_path / "repo"
    async with Repository.create(root, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        array = await create_array(
            session.store, name="a", shape=(4000,), chunks=(500,), dtype="f8", compressors=None
        )
        await array.setitem(slice(None), VALUES)
        await session.commit("by us")
        await repository.create_tag("v1", session.snapshot_id)
        assert (await repository.analyze()).chunks == 8
    before = await statistics_in(root)

    official = icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))
    theirs = official.writable_session("main")
    seen = zarr.open_array(theirs.store, path="a")
    np.testing.assert_array_equal(seen[:], VALUES)
    seen[600:700] = -1.0
    seen.resize((4200,))
    theirs.commit("by the official engine")
    official.expire_snapshots(datetime.now(UTC))
    official.garbage_collect(datetime.now(UTC))

    assert await statistics_in(root) == before
    wanted = VALUES.sum() - VALUES[600:700].sum() - 100
    assert await sums(root, branch="main") == (wanted, 1)
    assert await sums(root, tag="v1") == (VALUES.sum(), 0)
    async with Repository.open(root) as repository:
        assert (await repository.verify()).findings == ()
        await repository.analyze()
        await repository.garbage_collect(datetime.now(UTC))
    assert await sums(root, branch="main") == (wanted, 0)
    again = official.readonly_session("main")
    np.testing.assert_array_equal(zarr.open_array(again.store, path="a", mode="r")[600:700], -1.0)


async def test_the_official_engine_keeps_the_setting_and_its_chunks_are_unknown(
    tmp_path: Path,
) -> None:
    """Commits of both in turn: ours have statistics, its have none, and no answer is wrong."""
    root = tmp_path / "repo"
    truth = VALUES.copy()
    async with Repository.create(root) as repository:
        await repository.keep_statistics()
        session = await repository.writable_session("main")
        array = await create_array(
            session.store, name="a", shape=(4000,), chunks=(500,), dtype="f8"
        )
        await array.setitem(slice(None), truth)
        await session.commit("by us")
    assert await sums(root, branch="main") == (truth.sum(), 0)

    official = icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))
    theirs = official.writable_session("main")
    zarr.open_array(theirs.store, path="a")[600:700] = truth[600:700] = -1.0
    theirs.commit("by the official engine")
    official.set_metadata({**official.get_metadata(), "owner": "somebody"})
    official.garbage_collect(datetime.now(UTC))
    assert await sums(root, branch="main") == (truth.sum(), 1)

    async with Repository.open(root) as repository:
        assert repository.keeps_statistics
        session = await repository.writable_session("main")
        array = await open_array(store=session.store, path="a", mode="r+")
        await array.setitem(slice(1200, 1300), 9.0)
        truth[1200:1300] = 9.0
        await session.commit("by us again")
    assert await sums(root, branch="main") == (truth.sum(), 1)
    seen = zarr.open_array(official.readonly_session("main").store, path="a", mode="r")
    np.testing.assert_array_equal(seen[:], truth)

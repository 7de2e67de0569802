"""The official engine works with repositories that keep checksums as with any other."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import icechunk
import numpy as np
import pytest
import zarr
from zarr.api.asynchronous import open_array

from icechunk_async import Packing, Repository
from tests.helpers import objects

if TYPE_CHECKING:
    from pathlib import Path

VALUES = np.arange(4000.0)


async def filled(root: Path, spec: int, packing: Packing | None) -> None:
    """Make a repository of two arrays with sums, in three commits, of which a tag holds one."""
    async with Repository.create(root, spec_version=spec, sums=True, packing=packing) as repository:
        for number in range(3):
            session = await repository.writable_session("main")
            for name in "ab" if number == 0 else "a":
                if number == 0:
                    array = await zarr.api.asynchronous.create_array(
                        session.store,
                        name=name,
                        shape=(4000,),
                        chunks=(500,),
                        dtype="f8",
                        compressors=None,
                    )
                else:
                    array = await open_array(store=session.store, path=name)
                await array.setitem(slice(number * 1000, None), VALUES[number * 1000 :] + number)
            await session.commit(f"{number}")
            if number == 1:
                await repository.create_tag("v1", session.snapshot_id)


def read_official(root: Path, **where: Any) -> Any:
    """Return the first array as the official engine sees it."""
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))
    return zarr.open_array(repository.readonly_session(**where).store, path="a", mode="r")[:]


async def read_verified(root: Path, **where: Any) -> tuple[Any, Any]:
    """Return the first array as we see it, and what was verified."""
    async with Repository.open(root, verify_reads=True) as repository:
        session = await repository.readonly_session(**where)
        array = await open_array(store=session.store, path="a", mode="r")
        return await array.getitem(slice(None)), repository.verified_reads


@pytest.mark.parametrize("packing", [None, Packing(20_000, 10_000)])
@pytest.mark.parametrize("spec", [1, 2])
async def test_official_engine_continues_a_repository_with_sums(
    tmp_path: Path, spec: int, packing: Packing | None
) -> None:
    """It reads, commits, expires and collects with equal results, and leaves sums alone."""
    root = tmp_path / "repo"
    await filled(root, spec, packing)
    for where in ({"branch": "main"}, {"tag": "v1"}):
        ours, counts = await read_verified(root, **where)
        np.testing.assert_array_equal(ours, read_official(root, **where))
        assert (counts.verified, counts.without_sum) == (8, 0)
    async with Repository.open(root) as repository:
        before = {it for it in await objects(repository.storage) if it.startswith("sums/")}

    official = icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))
    theirs = official.writable_session("main")
    zarr.open_array(theirs.store, path="a")[:1000] = -1.0
    theirs.commit("by the official engine")
    official.expire_snapshots(datetime.now(UTC))
    official.garbage_collect(datetime.now(UTC))

    ours, counts = await read_verified(root, branch="main")
    np.testing.assert_array_equal(ours, read_official(root, branch="main"))
    # The official engine made a new manifest, and nothing says what its chunks were.
    assert (counts.verified, counts.without_sum) == (0, 8)
    async with Repository.open(root, sums=True) as repository:
        assert {it for it in await objects(repository.storage) if it.startswith("sums/")} == before
        assert (await repository.verify()).findings == ()
        await repository.add_sums()
        session = await repository.writable_session("main")
        array = await open_array(store=session.store, path="a")
        await array.setitem(slice(0, 500), np.full(500, 7.0))
        await session.commit("by us again")
        assert (await repository.check_content()).is_right
        await repository.garbage_collect(datetime.now(UTC))
        assert (await repository.check_content()).is_right
        assert (await repository.check_content(tag="v1")).is_right
    ours, counts = await read_verified(root, branch="main")
    np.testing.assert_array_equal(ours, read_official(root, branch="main"))
    assert (counts.verified, counts.without_sum) == (8, 0)


@pytest.mark.parametrize("spec", [1, 2])
async def test_other_objects_are_the_same_with_and_without_sums(tmp_path: Path, spec: int) -> None:
    """Only ``sums/`` is added: every other folder has the same number of objects."""
    found: list[dict[str, int]] = []
    for sums in (False, True):
        root = tmp_path / str(sums)
        async with Repository.create(root, spec_version=spec, sums=sums) as repository:
            session = await repository.writable_session("main")
            array = await zarr.api.asynchronous.create_array(
                session.store, name="a", shape=(4000,), chunks=(500,), dtype="f8", compressors=None
            )
            await array.setitem(slice(None), VALUES)
            await session.commit("one")
            folders = [it.partition("/")[0] for it in await objects(repository.storage)]
            found.append({it: folders.count(it) for it in set(folders)})
    assert found[1].pop("sums") == 2
    assert found[0] == found[1]

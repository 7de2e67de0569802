"""The official engine works on a copy as on the original."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import icechunk
import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.errors import RepositoryExistsError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("spec", [1, 2])
async def test_official_engine_reads_and_continues_a_copy(tmp_path: Path, spec: int) -> None:
    """Of its own repository: same ids, same data; commits, garbage collection and checks work."""
    origin = icechunk.Repository.create(
        icechunk.local_filesystem_storage(f"{tmp_path}/origin"), spec_version=spec
    )
    session = origin.writable_session("main")
    array = zarr.group(session.store).create_array("x", shape=(1000,), chunks=(100,), dtype="i4")
    array[:] = np.arange(1000)
    first = session.commit("first")
    origin.create_tag("v1", first)
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        await repository.copy_to(f"file://{tmp_path}/copy")

    copy = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{tmp_path}/copy"))
    assert copy.list_tags() == {"v1"}
    assert [it.id for it in copy.ancestry(tag="v1")] == [it.id for it in origin.ancestry(tag="v1")]
    session = copy.writable_session("main")
    array = zarr.open_array(session.store, path="x")
    np.testing.assert_array_equal(array[:], np.arange(1000))
    array[:100] = -1
    session.commit("on the copy")
    copy.garbage_collect(datetime.now(UTC))
    np.testing.assert_array_equal(
        zarr.open_array(copy.readonly_session(tag="v1").store, path="x")[:], np.arange(1000)
    )
    async with Repository.open(f"file://{tmp_path}/copy") as repository:
        assert (await repository.check_references()).is_whole
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        with pytest.raises(RepositoryExistsError, match="changed after the last copy"):
            await repository.copy_to(f"file://{tmp_path}/copy")


@pytest.mark.parametrize("spec", [1, 2])
async def test_official_engine_works_with_copies_of_a_part(tmp_path: Path, spec: int) -> None:
    """It reads, commits on, expires and collects them, and finds the same ids and data."""
    place = icechunk.local_filesystem_storage(f"{tmp_path}/origin")
    origin = icechunk.Repository.create(place, spec_version=spec)
    ids: list[str] = []
    for number in range(5):
        session = origin.writable_session("main")
        if number == 0:
            zarr.group(session.store).create_array("x", shape=(5000,), chunks=(1000,), dtype="i4")
        zarr.open_array(session.store, path="x")[number * 1000 :] = number
        ids.append(session.commit(f"{number}"))
    origin.create_branch("dev", ids[1])
    origin.create_tag("v1", ids[2])
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        await repository.copy_to(f"file://{tmp_path}/tag", refs=["v1"])
        await repository.copy_to(f"file://{tmp_path}/late", refs=["main"], since=ids[3])

    part = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{tmp_path}/tag"))
    assert (part.list_tags(), part.list_branches()) == ({"v1"}, {"main"})
    assert [it.id for it in part.ancestry(tag="v1")] == [it.id for it in origin.ancestry(tag="v1")]

    late = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{tmp_path}/late"))
    first = [it.id for it in origin.ancestry(branch="main")][-1]
    assert [it.id for it in late.ancestry(branch="main")] == [ids[4], ids[3], first]
    for copy, tip in ((part, ids[2]), (late, ids[4])):
        theirs, ours = (it.readonly_session(snapshot_id=tip) for it in (origin, copy))
        expected = zarr.open_array(theirs.store, path="x", mode="r")[:]
        found = zarr.open_array(ours.store, path="x", mode="r")[:]
        np.testing.assert_array_equal(found, expected)
    if spec == 2:
        assert len(list(late.ops_log())) >= 2
    assert late.diff(from_snapshot_id=ids[3], to_snapshot_id=ids[4]).updated_chunks

    session = late.writable_session("main")
    zarr.open_array(session.store, path="x")[:1000] = 9
    tip = session.commit("on the copy")
    now = datetime.now(UTC)
    late.expire_snapshots(now)
    late.garbage_collect(now)
    assert zarr.open_array(late.readonly_session("main").store, path="x", mode="r")[0] == 9
    async with Repository.open(f"file://{tmp_path}/late") as repository:
        assert str(await repository.lookup_branch("main")) == tip
        assert (await repository.check_references()).is_whole


async def test_copy_is_brought_up_to_date_with_commits_of_the_official_engine(
    tmp_path: Path,
) -> None:
    """Its commits, amended and expired snapshots; nothing is listed, and all bytes are equal."""
    place = icechunk.local_filesystem_storage(f"{tmp_path}/origin")
    origin = icechunk.Repository.create(place)
    session = origin.writable_session("main")
    array = zarr.group(session.store).create_array("x", shape=(5000,), chunks=(1000,), dtype="i4")
    array[:] = 1
    session.commit("first")
    async with Repository.open(f"file://{tmp_path}/origin") as repository:
        await repository.copy_to(f"file://{tmp_path}/copy")
        for number in range(3):
            session = origin.writable_session("main")
            zarr.open_array(session.store, path="x")[number * 1000 : number * 1000 + 10] = number
            if number == 1:
                session.amend("amended")
            else:
                session.commit(f"{number}")
            await repository.copy_to(f"file://{tmp_path}/copy")
    copy = icechunk.Repository.open(icechunk.local_filesystem_storage(f"{tmp_path}/copy"))
    assert [it.id for it in copy.ancestry(branch="main")] == [
        it.id for it in origin.ancestry(branch="main")
    ]
    assert len(list(copy.ops_log())) == len(list(origin.ops_log()))
    for path in (tmp_path / "copy").rglob("*"):
        if path.is_file() and path.name != "state.json":
            theirs = tmp_path / "origin" / path.relative_to(tmp_path / "copy")
            assert theirs.read_bytes() == path.read_bytes()


_COPIES, _COMMITS = 4, 10
"""Two collections in the time of a copy, which may lose the state that it copies three times."""


@pytest.mark.parametrize("spec", [1, 2])
async def test_copies_beside_an_official_writer_and_collector_are_whole(
    tmp_path: Path, spec: int
) -> None:
    """It commits, expires and collects between and during copies; each copy shows a state whole."""
    place = icechunk.local_filesystem_storage(f"{tmp_path}/origin")
    origin = icechunk.Repository.create(place, spec_version=spec)
    session = origin.writable_session("main")
    zarr.group(session.store).create_array("x", shape=(20,), chunks=(1,), dtype="i4")
    session.commit("array")
    allowed, done = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        theirs = icechunk.Repository.open(place)
        for number in range(1, _COMMITS * _COPIES + 1):
            allowed.acquire()
            session = theirs.writable_session("main")
            zarr.open_array(session.store, path="x")[number % 20] = number
            session.commit(f"{number}")
            if number % 5 == 0:
                line = list(theirs.ancestry(branch="main"))
                theirs.expire_snapshots(line[3].written_at)
                theirs.garbage_collect(line[0].written_at)
            done.release()

    writer = asyncio.create_task(asyncio.to_thread(work))
    target = tmp_path / "copy"
    for copied in range(_COPIES):
        allowed.release(_COMMITS)
        async with Repository.open(f"file://{tmp_path}/origin") as repository:
            await repository.copy_to(f"file://{target}")
        copy = icechunk.Repository.open(icechunk.local_filesystem_storage(str(target)))
        tip, *older = list(copy.ancestry(branch="main"))[:-1]
        assert int(tip.message.replace("array", "0")) >= copied * _COMMITS
        for it in (tip, *older):
            store = copy.readonly_session(snapshot_id=it.id).store
            values = np.asarray(zarr.open_array(store, path="x", mode="r")[:])
            assert values.max() == int(it.message.replace("array", "0"))
        for _ in range(_COMMITS):
            await asyncio.to_thread(done.acquire)
    await writer
    async with Repository.open(f"file://{target}") as repository:
        assert (await repository.check_references()).is_whole

"""Plain Zarr hierarchies of one snapshot: read without Icechunk, never half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous

from icechunk_async import Packing, Repository
from icechunk_async.config import LocalFileSystemStore, RepositoryConfig, VirtualChunkContainer
from icechunk_async.errors import (
    InvalidInputError,
    NotFoundError,
    RepositoryExistsError,
    StorageUnavailableError,
    VirtualChunkError,
)
from icechunk_async.storage import open_storage
from icechunk_async.zarr.export import NOTE, export_zarr
from tests.helpers import memory_url, objects, read
from tests.unit.engine.upkeep.copying.copy_tools import Breaking

if TYPE_CHECKING:
    from pathlib import Path

ASYNC: Any = zarr.api.asynchronous
ZARR: Any = zarr


async def filled(url: str, *, packed: bool = False) -> Repository:
    """Fill a repository with a group and two arrays, one of them of inline chunks."""
    packing = Packing() if packed else None
    async with Repository.create(url, packing=packing) as repository:
        session = await repository.writable_session("main")
        root = await ASYNC.group(store=session.store, attributes={"title": "all"})
        large = await root.create_array("g/large", shape=(4000,), chunks=(1000,), dtype="i4")
        await large.setitem(slice(None), np.arange(4000))
        small = await root.create_array("small", shape=(3, 4), chunks=(1, 2), dtype="i2")
        await small.setitem((slice(0, 2), slice(None)), 7)
        await repository.create_tag("v1", await session.commit("first"))
        session = await repository.writable_session("main")
        large = await ASYNC.open_array(store=session.store, path="g/large")
        await large.setitem(0, -1)
        await session.commit("second")
        return repository


@pytest.mark.parametrize("packed", [False, True])
async def test_zarr_reads_what_was_written_without_icechunk(
    tmp_path: Path, *, packed: bool
) -> None:
    """The tip of main, or another branch or tag; stored, inline and packed chunks."""
    url = memory_url()
    await filled(url, packed=packed)
    async with Repository.open(url) as repository:
        report = await repository.copy_to(tmp_path / "main", as_zarr=True)
        await repository.copy_to(tmp_path / "v1", refs=["v1"], as_zarr=True)
        session = await repository.readonly_session("main")
        keys = {key async for key in session.store.list()}
    for name, first in (("main", -1), ("v1", 0)):
        root = ZARR.open_group(str(tmp_path / name), mode="r")
        assert root.attrs["title"] == "all"
        np.testing.assert_array_equal(root["g/large"][:], [first, *range(1, 4000)])
        assert root["small"][:].tolist() == [[7] * 4, [7] * 4, [0] * 4]
    files = {str(it.relative_to(tmp_path / "main")) for it in (tmp_path / "main").rglob("*")}
    assert {it for it in files if (tmp_path / "main" / it).is_file()} == keys
    assert report.objects_copied == len(keys)


async def test_virtual_chunks_become_files(tmp_path: Path) -> None:
    """If their container is authorized; otherwise there is no hierarchy."""
    (tmp_path / "source.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    prefix = f"{tmp_path.as_uri()}/"
    url = memory_url()
    config = RepositoryConfig().with_virtual_chunk_container(
        VirtualChunkContainer(prefix, LocalFileSystemStore(tmp_path.as_posix()))
    )
    async with Repository.create(url, config=config) as repository:
        session = await repository.writable_session("main")
        await ASYNC.create_array(
            store=session.store, name="a", shape=(10,), chunks=(10,), dtype="<i4", compressors=None
        )
        session.store.set_virtual_ref(
            "a/c/0", f"{prefix}source.bin", offset=0, length=40, validate_container=False
        )
        await session.commit("virtual")
        with pytest.raises(VirtualChunkError):
            await repository.copy_to(tmp_path / "refused", as_zarr=True)
        assert not (tmp_path / "refused" / "a" / "zarr.json").exists()
    access = {prefix: None}
    async with Repository.open(url, authorize_virtual_chunk_access=access) as repository:
        await repository.copy_to(tmp_path / "copy", as_zarr=True)
    (tmp_path / "source.bin").unlink()
    found = ZARR.open_array(str(tmp_path / "copy" / "a"), mode="r")
    assert found[:].tolist() == list(range(10))


async def test_hierarchy_killed_at_any_write_has_no_root_and_is_continued() -> None:
    """Chunks that are there are not written again, and the end is the same."""
    url, whole = memory_url(), memory_url()
    await filled(url)
    async with Repository.open(url) as repository, open_storage(whole) as complete:
        await repository.copy_to(complete, as_zarr=True)
        expected = await objects(complete)
        session = await repository.readonly_session("main")
        for writes in range(len(expected) + 1):
            async with open_storage(memory_url()) as destination:
                breaking = Breaking(destination)
                breaking.writes_left = writes
                with pytest.raises(StorageUnavailableError):
                    await export_zarr(session.store, str(session.snapshot_id), breaking)
                there = await objects(destination)
                assert ("zarr.json" in there) <= (set(there) >= set(expected))
                report = await repository.copy_to(destination, as_zarr=True)
                assert report.objects_skipped == len([key for key in there if "/c/" in key])
                assert await objects(destination) == expected


async def test_other_objects_and_other_snapshots_are_refused() -> None:
    """Nothing is written."""
    url = memory_url()
    await filled(url)
    async with Repository.open(url) as repository, open_storage(memory_url()) as destination:
        await destination.put("notes.txt", b"mine")
        with pytest.raises(RepositoryExistsError, match=r"notes\.txt"):
            await repository.copy_to(destination, as_zarr=True)
        await destination.delete(["notes.txt"])
        breaking = Breaking(destination)
        breaking.writes_left = 2
        session = await repository.readonly_session("main")
        with pytest.raises(StorageUnavailableError):
            await export_zarr(session.store, str(session.snapshot_id), breaking)
        before = await objects(destination)
        assert NOTE in before
        with pytest.raises(RepositoryExistsError, match="a part of a copy of snapshot"):
            await repository.copy_to(destination, as_zarr=True, refs=["v1"])
        assert await objects(destination) == before


async def test_part_of_a_hierarchy_has_the_groups_above_it(tmp_path: Path) -> None:
    """Zarr reads it from its root. It is continued with the same paths, and with no others."""
    url = memory_url()
    await filled(url)
    async with Repository.open(url) as repository, open_storage(tmp_path / "part") as destination:
        session = await repository.readonly_session("main")
        breaking = Breaking(destination)
        breaking.writes_left = 3
        with pytest.raises(StorageUnavailableError):
            await export_zarr(session.store, str(session.snapshot_id), breaking, paths=["/g/large"])
        breaking.writes_left = 0  # for the refusals, which write nothing
        for others in (None, ["g"]):
            with pytest.raises(RepositoryExistsError, match="a part of a copy of /g/large of"):
                await repository.copy_to(breaking, as_zarr=True, paths=others)
        await repository.copy_to(destination, as_zarr=True, paths=["g/large/"])
        whole = {
            key: await read(session, key)
            async for key in session.store.list()
            if key == "zarr.json" or key.startswith("g/")
        }
        assert await objects(destination) == whole
    root = ZARR.open_group(tmp_path / "part", mode="r")
    assert root.attrs["title"] == "all"
    assert root["g/large"][:3].tolist() == [-1, 1, 2]
    assert sorted(root.keys()) == ["g"]


async def test_combinations_that_make_no_sense_are_refused() -> None:
    """One snapshot has no history."""
    url = memory_url()
    await filled(url)
    async with Repository.open(url) as repository, open_storage(memory_url()) as destination:
        with pytest.raises(InvalidInputError, match="neither history"):
            await repository.copy_to(destination, as_zarr=True, discard_changes=True)
        with pytest.raises(InvalidInputError, match="one branch or tag"):
            await repository.copy_to(destination, as_zarr=True, refs=["main", "v1"])
        with pytest.raises(NotFoundError, match="nope"):
            await repository.copy_to(destination, as_zarr=True, refs=["nope"])
        assert not await objects(destination)

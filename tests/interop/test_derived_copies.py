"""Copies of chosen arrays, and copies without chunks: the official engine works on them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.credentials import LocalFileSystemAccess
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from pathlib import Path

ZARR: Any = zarr
KINDS: dict[str, dict[str, Any]] = {
    "shallow": {"shallow": True},
    "paths": {"paths": ["g"]},
    "both": {"paths": ["g"], "shallow": True},
}


def place(root: Path) -> Any:
    """Return a directory as the official engine's storage."""
    return icechunk.local_filesystem_storage(str(root))


def opened(root: Path, *directories: Path) -> Any:
    """Open a repository with the official engine; virtual chunks are in directories."""
    access = {f"file://{it}/": icechunk.credentials.LocalFileSystemAccess for it in directories}
    return icechunk.Repository.open(
        place(root), authorize_virtual_chunk_access=icechunk.containers_credentials(access)
    )


def written(root: Path, sources: Path, spec: int) -> Any:
    """Write a repository with the official engine: native, inline and virtual chunks, history."""
    sources.mkdir()
    (sources / "file").write_bytes(np.arange(100, dtype="i4").tobytes())
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(
            f"file://{sources}/", icechunk.local_filesystem_store(str(sources))
        )
    )
    icechunk.Repository.create(place(root), config, spec_version=spec).save_config()
    repository = opened(root, sources)
    session = repository.writable_session("main")
    group = ZARR.group(session.store, attributes={"title": "all"})
    for name in ("g/native", "other/native"):
        array = group.create_array(
            name, shape=(3000,), chunks=(1000,), dtype="i4", compressors=None
        )
        array[:] = np.arange(3000)
    small = group.create_array("g/small", shape=(4,), chunks=(2,), dtype="i4")
    small[:] = 7
    group.create_array(
        "g/virtual", shape=(100,), chunks=(100,), dtype="<i4", compressors=None, filters=None
    )
    session.store.set_virtual_ref("g/virtual/c/0", f"file://{sources}/file", offset=0, length=400)
    repository.create_tag("v1", session.commit("first", {"by": "them"}))
    for number in range(2):
        session = repository.writable_session("main")
        ZARR.open_array(session.store, path="g/native")[number] = -1
        ZARR.open_array(session.store, path="other/native")[number] = -1
        session.commit(f"change {number}")
    repository.create_branch("side", repository.lookup_tag("v1"))
    return repository


def arrays(repository: Any, snapshot_id: str, names: list[str]) -> dict[str, list[int]]:
    """Return the values of arrays."""
    store = repository.readonly_session(snapshot_id=snapshot_id).store
    return {it: ZARR.open_array(store, path=it, mode="r")[:].tolist() for it in names}


@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_official_engine_reads_commits_on_expires_and_collects_a_copy(
    tmp_path: Path, spec: int, kind: str
) -> None:
    """With the same values in every snapshot; afterwards all is whole, and the origin unchanged."""
    origin, sources, copy = tmp_path / "origin", tmp_path / "sources", tmp_path / "copy"
    theirs = written(origin, sources, spec)
    options = KINDS[kind]
    async with Repository.open(origin) as repository:
        await repository.copy_to(copy, **options)
    before = {it: it.read_bytes() for it in origin.rglob("*") if it.is_file()}
    readable = (origin, sources) if "shallow" in options else (sources,)
    ours = opened(copy, *readable)
    names = ["g/native", "g/small", "g/virtual"]
    names += [] if "paths" in options else ["other/native"]
    there = list(theirs.ancestry(branch="main"))
    here = list(ours.ancestry(branch="main"))
    assert [(it.message, it.written_at) for it in here] == [
        (it.message, it.written_at) for it in there
    ]
    if "paths" not in options:
        assert [it.id for it in here] == [it.id for it in there]
        assert ours.lookup_tag("v1") == theirs.lookup_tag("v1")
    assert (ours.list_branches(), ours.list_tags()) == ({"main", "side"}, {"v1"})
    for one, other in list(zip(here, there, strict=True))[:-1]:
        assert arrays(ours, one.id, names) == arrays(theirs, other.id, names)
    expected = theirs.diff(from_snapshot_id=there[-1].id, to_snapshot_id=there[0].id)
    found = ours.diff(from_snapshot_id=here[-1].id, to_snapshot_id=here[0].id)
    assert {it.strip("/") for it in found.new_arrays} == set(names)
    assert found.updated_chunks == {
        path: chunks for path, chunks in expected.updated_chunks.items() if path.strip("/") in names
    }

    session = ours.writable_session("main")
    ZARR.open_array(session.store, path="g/native")[2000:] = 5
    tip = session.commit("on the copy")
    now = datetime.now(UTC)
    ours.delete_branch("side")
    ours.delete_tag("v1")
    assert ours.expire_snapshots(now)
    ours.garbage_collect(now)
    values = arrays(ours, tip, ["g/native"])["g/native"]
    assert values[:2] == [-1, -1]
    assert values[2:2000] == list(range(2, 2000))
    assert set(values[2000:]) == {5}
    access = {f"file://{it}/": LocalFileSystemAccess() for it in readable}
    async with Repository.open(copy, authorize_virtual_chunk_access=access) as repository:
        assert (await repository.verify("decode")).is_healthy
        assert str(await repository.lookup_branch("main")) == tip
    assert {it: it.read_bytes() for it in before} == before


async def test_shallow_copy_follows_its_origin_when_only_the_configuration_changes(
    tmp_path: Path,
) -> None:
    """In format version 2 chunks are named by the container, whose place may be another one."""
    origin, sources, copy = tmp_path / "origin", tmp_path / "sources", tmp_path / "copy"
    written(origin, sources, 2)
    async with Repository.open(origin) as repository:
        report = await repository.copy_to(copy, shallow=True)
    moved = tmp_path / "moved"
    origin.rename(moved)
    config = icechunk.Repository.fetch_config(place(copy))
    containers = dict(config.virtual_chunk_containers)
    name = containers.pop(report.origin_prefix).name
    config.clear_virtual_chunk_containers()
    for it in containers.values():
        config.set_virtual_chunk_container(it)
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(
            f"file://{moved}/", icechunk.local_filesystem_store(str(moved)), name
        )
    )
    icechunk.Repository.open(place(copy), config).save_config()
    theirs = opened(copy, moved, sources)
    store = theirs.readonly_session(tag="v1").store
    assert ZARR.open_array(store, path="g/native", mode="r")[:5].tolist() == [0, 1, 2, 3, 4]
    access = {f"file://{it}/": LocalFileSystemAccess() for it in (moved, sources)}
    async with Repository.open(copy, authorize_virtual_chunk_access=access) as repository:
        assert (await repository.verify("decode")).is_healthy


async def test_origin_that_the_official_engine_expires_and_collects_takes_its_chunks_away(
    tmp_path: Path,
) -> None:
    """Both engines say so; what the origin still needs can be read."""
    origin, sources, copy = tmp_path / "origin", tmp_path / "sources", tmp_path / "copy"
    theirs = written(origin, sources, 2)
    async with Repository.open(origin) as repository:
        await repository.copy_to(copy, shallow=True)
    theirs.delete_branch("side")
    theirs.delete_tag("v1")
    now = datetime.now(UTC)
    theirs.expire_snapshots(now)
    theirs.garbage_collect(now)
    shown = opened(copy, origin, sources)
    assert arrays(shown, shown.lookup_branch("main"), ["g/native"])["g/native"][:2] == [-1, -1]
    with pytest.raises(icechunk.IcechunkError):
        arrays(shown, shown.lookup_tag("v1"), ["g/native"])

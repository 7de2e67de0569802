"""Copies through the facade."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import zarr

from icechunk_async.sync import (
    IcechunkError,
    Repository,
    containers_credentials,
    local_filesystem_storage,
)
from icechunk_async.sync.credentials import LocalFileSystemAccess

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async._runtime.progress import Progress

ZARR: Any = zarr


def origin(directory: Path) -> Repository:
    """Return a repository with two commits and a tag of the first."""
    repository = Repository.create(local_filesystem_storage(str(directory / "origin")))
    session = repository.writable_session("main")
    ZARR.create_array(session.store, name="a", shape=(4,), chunks=(1,), dtype="i4")[:] = 1
    repository.create_tag("v1", session.commit("ones"))
    session = repository.writable_session("main")
    ZARR.open_array(session.store, path="a")[0] = 2
    session.commit("two")
    return repository


def test_copies_block_or_are_awaited(tmp_path: Path) -> None:
    """To a storage of the facade, a path or a URL; whole or in part."""
    with origin(tmp_path) as repository:
        target = local_filesystem_storage(str(tmp_path / "copy"))
        seen: list[Progress] = []
        report = repository.copy_to(target, progress=seen.append)
        assert report.objects_copied > 5
        assert "copying snapshots" in {it.phase for it in seen}
        assert not asyncio.run(repository.copy_to_async(tmp_path / "copy")).objects_copied
        repository.copy_to(tmp_path / "part", refs=["v1"], since=datetime.now(UTC))
        with Repository.open(target) as copy, Repository.open(tmp_path / "part") as part:
            found = ZARR.open_array(copy.readonly_session("main").store, path="a", mode="r")
            assert found[:].tolist() == [2, 1, 1, 1]
            assert part.list_tags() == {"v1"}
            assert [it.id for it in part.ancestry(tag="v1")] == [
                it.id for it in repository.ancestry(tag="v1")
            ]


def test_refusals_are_errors_of_the_facade(tmp_path: Path) -> None:
    """A copy that was committed to, and a time without a zone."""
    with origin(tmp_path) as repository:
        repository.copy_to(tmp_path / "copy")
        with Repository.open(tmp_path / "copy") as copy:
            copy.create_branch("mine", copy.lookup_tag("v1"))
        repository.create_tag("v2", repository.lookup_branch("main"))
        with pytest.raises(IcechunkError, match="branch 'mine' was created"):
            repository.copy_to(tmp_path / "copy")
        assert repository.copy_to(tmp_path / "copy", discard_changes=True).discarded
        with pytest.raises(TypeError, match="time zone"):
            repository.copy_to(tmp_path / "other", since=datetime(2026, 1, 1))


def test_chosen_arrays_and_shallow_copies(tmp_path: Path) -> None:
    """The report says what readers authorize; progress is told."""
    told: list[str] = []
    with origin(tmp_path) as repository:
        report = repository.copy_to(
            tmp_path / "copy",
            paths=["a"],
            shallow=True,
            progress=lambda it: told.append(it.phase),
        )
        with pytest.raises(IcechunkError, match="Did you mean '/a'"):
            repository.copy_to(tmp_path / "other", paths=["/A"])
    assert {"reading snapshots", "writing manifests", "writing snapshots"} <= set(told)
    assert report.origin_prefix is not None
    access = containers_credentials({report.origin_prefix: LocalFileSystemAccess})
    with Repository.open(tmp_path / "copy", authorize_virtual_chunk_access=access) as copy:
        found = ZARR.open_array(copy.readonly_session("main").store, path="a", mode="r")
        assert found[:].tolist() == [2, 1, 1, 1]

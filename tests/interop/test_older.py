"""Repositories of layouts before version 1, once migrated, in the official engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.upkeep import upgrade
from tests.interop.theirs import icechunk
from tests.unit.older.draft_golden import COMMITS as DRAFT_COMMITS
from tests.unit.older.draft_golden import EXPECTED as DRAFT_EXPECTED
from tests.unit.older.draft_golden import golden_draft
from tests.unit.older.golden import COMMITS, EXPECTED, golden

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_official_engine_continues_a_migrated_first_draft(tmp_path: Path) -> None:
    """Every value, the history with its messages and times, and a commit on top of it."""
    async with open_storage(tmp_path.as_uri()) as storage:
        for key, data in golden_draft().objects.items():
            await storage.put(key, data)
        async with Repository.open(storage) as repository:
            ours = [info async for info in repository.ancestry(branch="main")]
        await upgrade(storage)
    repo = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path)))
    theirs = list(repo.ancestry(branch="main"))
    assert [it.id for it in theirs] == [str(it.id) for it in ours]
    assert [it.message for it in theirs] == [it.message for it in ours]
    assert [it.written_at for it in theirs] == [it.written_at for it in ours]
    assert [it.metadata for it in theirs] == [it.metadata for it in ours]
    assert len(theirs) == DRAFT_COMMITS
    assert (repo.list_branches(), repo.list_tags()) == ({"main", "old"}, {"v1"})
    group: Any = zarr.open_group(repo.readonly_session("main").store, mode="r")
    for path, expected in DRAFT_EXPECTED.items():
        if path != "virtual":
            assert np.asarray(group[path][...]).tobytes() == expected.tobytes()
    assert dict(group.attrs)["title"] == "Gölden"
    touched = repo.diff(from_snapshot_id=theirs[3].id, to_snapshot_id=theirs[2].id)
    assert {path: sorted(it) for path, it in touched.updated_chunks.items()} == {
        "/a/two": [[1], [2]]
    }
    session = repo.writable_session("main")
    group = zarr.open_group(session.store)
    group["a/two"][0] = 9
    tip = session.commit("theirs")
    async with Repository.open(tmp_path) as repository:
        assert str(await repository.lookup_branch("main")) == tip
        found = (await repository.verify(level="decode")).findings
        assert [it for it in found if it.kind != "virtual"] == []  # its source is nowhere


async def test_the_official_engine_continues_a_migrated_alpha(tmp_path: Path) -> None:
    """Every value, the history with its messages and times, and a commit on top of it."""
    async with open_storage(tmp_path.as_uri()) as storage:
        for key, data in golden().objects.items():
            await storage.put(key, data)
        async with Repository.open(storage) as repository:
            ours = [info async for info in repository.ancestry(branch="main")]
        await upgrade(storage)
    repo = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path)))
    theirs = list(repo.ancestry(branch="main"))
    assert [it.message for it in theirs] == [it.message for it in ours]
    assert [it.written_at for it in theirs] == [it.written_at for it in ours]
    assert [it.metadata for it in theirs] == [it.metadata for it in ours]
    assert len(theirs) == COMMITS
    assert (repo.list_branches(), repo.list_tags()) == ({"main", "old"}, {"v10"})
    group: Any = zarr.open_group(repo.readonly_session("main").store, mode="r")
    for path, expected in EXPECTED.items():
        if path != "virtual":
            assert np.asarray(group[path][...]).tobytes() == expected.tobytes()
    assert dict(group.attrs)["title"] == "Gölden"
    touched = repo.diff(
        from_snapshot_id=theirs[COMMITS - 15].id, to_snapshot_id=theirs[COMMITS - 16].id
    )
    assert {path: sorted(it) for path, it in touched.updated_chunks.items()} == {
        "/a/two": [[1], [2]]
    }
    session = repo.writable_session("main")
    group = zarr.open_group(session.store)
    group["a/two"][0] = 9
    tip = session.commit("theirs")
    async with Repository.open(tmp_path) as repository:
        assert str(await repository.lookup_branch("main")) == tip
        found = (await repository.verify(level="decode")).findings
        assert [it for it in found if it.kind != "virtual"] == []  # its source is nowhere

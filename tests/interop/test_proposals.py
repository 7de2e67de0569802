"""The official engine works with repositories that have proposals as with any other."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import icechunk
import numpy as np
import pytest
import zarr
from zarr.api.asynchronous import create_array, open_array

from icechunk_async import Repository
from icechunk_async.errors import BranchProtectedError
from tests.helpers import objects

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import SnapshotId
    from icechunk_async.proposals import Proposal
    from icechunk_async.session import Session


async def small(session: Session, proposal: Proposal) -> str | None:
    """Check that no value is above 100."""
    del proposal
    array = await open_array(store=session.store, path="a", mode="r")
    found: Any = await array.getitem(...)
    return None if found.max() <= 100 else f"{found.max()}"


async def make(root: Path, spec: int) -> None:
    """Make a repository with a branch ``side`` that changed another chunk than ``main`` will."""
    async with Repository.create(root, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await create_array(session.store, name="a", data=np.zeros(40), chunks=(10,))
        await repository.create_branch("side", await session.commit("base"))
        session = await repository.writable_session("side")
        array = await open_array(store=session.store, path="a")
        await array.setitem(slice(0, 10), 1.0)
        await session.commit("side")


def official(root: Path) -> icechunk.Repository:
    """Open it with the official engine."""
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(root)))


@pytest.mark.parametrize("spec", [1, 2])
async def test_it_reads_the_merged_state_and_what_was_accepted(tmp_path: Path, spec: int) -> None:
    """A check of another engine opens the candidate by its id; so does everyone after it."""
    root = tmp_path / "repo"
    await make(root, spec)
    async with Repository.open(root) as repository:
        proposal = await repository.propose("side", checks=[small])
        theirs = official(root)
        session = theirs.readonly_session(snapshot_id=str(proposal.candidate.snapshot_id))
        assert zarr.open_array(session.store, path="a", mode="r")[5] == 1.0
        published = await proposal.accept()
    again = official(root)
    assert again.lookup_branch("main") == str(published)
    writing = again.writable_session("main")
    zarr.open_array(writing.store, path="a")[35:] = 7.0
    writing.commit("on top")
    async with Repository.open(root) as repository:
        infos = [info.id async for info in repository.ancestry(branch="main")]
        assert published == infos[1]
        assert (await repository.merge("side")).snapshot_id is None


@pytest.mark.parametrize("spec", [1, 2])
async def test_it_commits_expires_and_collects_beside_an_open_proposal(
    tmp_path: Path, spec: int
) -> None:
    """Records stay; the merged state is gone, and is made and checked anew."""
    root = tmp_path / "repo"
    await make(root, spec)
    seen: list[SnapshotId] = []

    async def noting(session: Session, proposal: Proposal) -> str | None:
        seen.append(session.snapshot_id)
        return await small(session, proposal)

    async with Repository.open(root) as repository:
        made = await repository.propose("side", checks=[noting])
        before = {it for it in await objects(repository.storage) if it.startswith("proposals/")}
    theirs = official(root)
    session = theirs.writable_session("main")
    zarr.open_array(session.store, path="a")[30:] = 7.0
    session.commit("by the official engine")
    theirs.expire_snapshots(datetime.now(UTC))
    theirs.garbage_collect(datetime.now(UTC))
    async with Repository.open(root) as repository:
        left = await objects(repository.storage)
        assert {it for it in left if it.startswith("proposals/")} == before
        assert f"snapshots/{made.candidate.snapshot_id}" not in left
        proposal = await repository.proposal(made.id)
        published = await proposal.accept(checks=[noting])
        assert seen[-1] == published != made.candidate.snapshot_id
    reading = official(root).readonly_session("main")
    found = zarr.open_array(reading.store, path="a", mode="r")[:]
    np.testing.assert_array_equal(found, np.repeat([1.0, 0.0, 0.0, 7.0], 10))


async def test_it_does_not_know_of_protection_and_keeps_it(tmp_path: Path) -> None:
    """It commits to the branch, and this library still refuses."""
    root = tmp_path / "repo"
    await make(root, 2)
    async with Repository.open(root) as repository:
        await repository.protect_branch("main", checks=["small"])
    theirs = official(root)
    session = theirs.writable_session("main")
    zarr.open_array(session.store, path="a")[30:] = 7.0
    session.commit("direct")
    theirs.update_metadata({"title": "ours"})
    theirs.save_config()
    async with Repository.open(root) as repository:
        assert await repository.protected_branches() == {"main": frozenset({"small"})}
        with pytest.raises(BranchProtectedError):
            await repository.writable_session("main")
        proposal = await repository.propose("side", checks=[small])
        await proposal.accept()
    official(root).set_metadata({})
    async with Repository.open(root) as repository:
        assert await repository.protected_branches() == {}

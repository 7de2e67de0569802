"""An older copy of a repository that takes its place while a process has it open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import RepositoryNotFoundError, SnapshotNotFoundError
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url, objects, write
from tests.without_updates import NUMBERED

if TYPE_CHECKING:
    from icechunk_async import SnapshotId
    from icechunk_async.storage import Storage


async def _commit(repository: Repository, message: str) -> SnapshotId:
    session = await repository.writable_session("main")
    await write(session, "a/c/0", message.encode())
    return await session.commit(message)


async def test_a_commit_to_a_place_that_was_emptied_says_that_the_repository_is_gone() -> None:
    """As reading does, and nothing is published; in format 1 the branch is gone."""
    url = memory_url()
    async with open_storage(url) as storage, Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2,), (1,))
        await _replace(storage, {})
        with pytest.raises(RepositoryNotFoundError, match="was removed"):
            await session.commit("too late")
        assert "repo" not in await objects(storage)


async def _replace(storage: Storage, contents: dict[str, bytes]) -> None:
    await storage.delete(list(await objects(storage)))
    for key, data in contents.items():
        await storage.put(key, data)


@pytest.mark.parametrize("layout", ["format-2", NUMBERED, "first-draft"])
async def test_history_is_that_of_the_copy_and_commits_continue_it(layout: str) -> None:
    """The copy has a commit that the open repository never saw, and is older than what it saw."""
    url = memory_url()
    async with open_storage(url) as storage:
        async with Repository.create(storage, layout=layout) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (10,), (1,))
            await session.commit("array")
            before = await objects(storage)
            await _commit(repository, "only in the copy")
            copy = await objects(storage)
        await _replace(storage, before)
        async with Repository.open(url) as repository:
            lost = [await _commit(repository, it) for it in ("lost", "lost as well")]
            await _replace(storage, copy)
            history = [it.message async for it in repository.ancestry(branch="main")]
            assert history[:2] == ["only in the copy", "array"]
            await _commit(repository, "after")
            history = [it.message async for it in repository.ancestry(branch="main")]
            assert history[:3] == ["after", "only in the copy", "array"]
            with pytest.raises(SnapshotNotFoundError):
                await repository.readonly_session(snapshot_id=lost[-1])

"""A repository of format version 1 as objects, copies of it, and what must come out of it."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.errors import RepositoryReadOnlyError
from icechunk_async.format.operations_log import (
    BranchCreated,
    NewCommit,
    RepoInitialized,
    RepoMigrated,
    TagCreated,
    TagDeleted,
)
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["OldRepository", "check_migrated", "check_readable", "commit", "copied", "make_old"]

_KINDS = {
    RepoInitialized: 1,
    NewCommit: 3,
    BranchCreated: 1,
    TagCreated: 2,
    TagDeleted: 1,
    RepoMigrated: 1,
}


@dataclass
class OldRepository:
    """The objects of a repository, and where its refs are."""

    objects: dict[str, bytes]
    branches: dict[str, SnapshotId]
    tags: dict[str, SnapshotId]


async def commit(repository: Repository, branch: str, chunk: int) -> SnapshotId:
    """Write one chunk and commit it."""
    session = await repository.writable_session(branch)
    await write(session, f"a/c/{chunk}", bytes([chunk + 1]))
    return await session.commit(f"{branch} {chunk}", {"chunk": chunk})


async def make_old() -> OldRepository:
    """Make a repository with two branches, a tag, a deleted tag and a configuration."""
    url = memory_url()
    config = RepositoryConfig(inline_chunk_threshold_bytes=100)
    async with Repository.create(url, spec_version=1, config=config) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        first = await session.commit("first")
        await commit(repository, "main", 0)
        await repository.create_branch("side", first)
        await commit(repository, "side", 1)
        await repository.create_tag("kept", first)
        await repository.create_tag("gone", first)
        await repository.delete_tag("gone")
        branches, tags = dict(await repository.branches()), dict(await repository.tags())
    async with open_storage(url) as storage:
        return OldRepository(await objects(storage), branches, tags)


@asynccontextmanager
async def copied(old: OldRepository) -> AsyncGenerator[Storage]:
    """Open a fresh storage that holds a repository."""
    async with open_storage(memory_url()) as storage:
        for key, data in old.objects.items():
            await storage.put(key, data)
        yield storage


async def check_migrated(storage: Storage, old: OldRepository) -> None:
    """The repository is of version 2, whole, writable, and nothing of version 1 is left."""
    left = [key for key in await objects(storage) if key.startswith(("refs/", "config"))]
    assert left == []
    async with Repository.open(storage) as repository:
        assert repository.spec_version == 2
        assert repository.config.inline_chunk_threshold_bytes == 100
        assert await repository.branches() == old.branches
        assert await repository.tags() == old.tags
        kinds = Counter([type(it.detail) async for it in repository.ops_log()])
        assert kinds == _KINDS
        session = await repository.readonly_session("side")
        assert await read(session, "a/c/1") == b"\x02"
        await commit(repository, "main", 5)


async def check_readable(storage: Storage, old: OldRepository) -> None:
    """After an interrupted migration, a repository that can be opened can be read."""
    async with Repository.open(storage) as repository:
        assert await repository.branches() == old.branches
        assert await repository.tags() == old.tags
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/0") == b"\x01"
        if repository.spec_version == 2:
            status = await repository.get_status()
            if status.limited_availability_reason is not None:
                try:
                    await repository.writable_session("main")
                except RepositoryReadOnlyError:
                    return
                raise AssertionError("a migration under way does not keep writers out")

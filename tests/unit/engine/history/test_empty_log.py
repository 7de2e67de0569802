"""A ``repo`` object whose operations log is empty: odd, but the format allows it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig
from icechunk_async.errors import ChunksCollectedError, FormatError, OutcomeUnknownError
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.layout import REPO_INFO, backup_key
from icechunk_async.format.operations_log import (
    BranchCreated,
    ExpirationRan,
    GarbageCollectionRan,
    NewCommit,
    RepoInitialized,
)
from icechunk_async.format.repo_info import decode_repo_info, encode_repo_info
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Data, Expected, Storage, Version


async def replace_info(storage: Storage, **fields: object) -> RepoInfo:
    """Write the repo info anew with other fields; return what it was."""
    info = decode_repo_info(unpack((await storage.get(REPO_INFO)).data, FileType.REPO_INFO))
    changed = replace(info, **fields)  # type: ignore[arg-type]
    await storage.put(REPO_INFO, pack(encode_repo_info(changed), FileType.REPO_INFO, 2))
    return info


@asynccontextmanager
async def emptied(*, continued: bool) -> AsyncIterator[Storage]:
    """Make a repository of one commit without a log; one that continues in a backup if told so."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (4,), (1,))
            await write(session, "a/c/0", b"\x01")
            await session.commit("one")
        info = await replace_info(storage, updates=())
        if continued:
            await replace_info(storage, before_updates=info.updates[1].backup_path)
        yield storage


CONTINUED = pytest.mark.parametrize("continued", [False, True], ids=["alone", "continued"])


async def kinds(repository: Repository) -> list[type]:
    """Return the kinds of the entries of the log, newest first; its times must descend."""
    log = [it async for it in repository.ops_log()]
    times = [it.updated_at for it in log]
    assert times == sorted(set(times), reverse=True)
    return [type(it.detail) for it in log]


@CONTINUED
async def test_a_repository_with_an_empty_log_reads(*, continued: bool) -> None:
    """Its branches, history, data and files; what a backup holds of the log is shown."""
    async with emptied(continued=continued) as storage, Repository.open(storage) as repository:
        assert [it.message async for it in repository.ancestry(branch="main")] == [
            "one",
            "Repository initialized",
        ]
        assert await read(await repository.readonly_session("main"), "a/c/0") == b"\x01"
        assert await kinds(repository) == [RepoInitialized] * continued
        shown = await repository.inspect_repo_info()
        assert shown["latest_updates"] == []
        assert ("repo_before_updates" in shown) == continued
        as_of = await repository.readonly_session("main", as_of=datetime.now(UTC))
        assert as_of.snapshot_id == await repository.lookup_branch("main")


@CONTINUED
async def test_changes_begin_a_log_that_was_empty(*, continued: bool) -> None:
    """Entries follow one another from then on, and nothing of the older log is lost."""
    config = RepositoryConfig(num_updates_per_repo_info_file=2)
    async with emptied(continued=continued) as storage:
        async with Repository.open(storage, config=config) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/1", b"\x02")
            two = await session.commit("two")
            assert await kinds(repository) == [NewCommit, *[RepoInitialized] * continued]
            await repository.create_branch("side", two)
            session = await repository.writable_session("side")
            await write(session, "a/c/2", b"\x03")
            await session.commit("three")
            wanted = [NewCommit, BranchCreated, NewCommit, *[RepoInitialized] * continued]
            assert await kinds(repository) == wanted
        async with Repository.open(storage) as again:
            assert await kinds(again) == wanted
            assert (await again.verify()).findings == ()


@CONTINUED
async def test_upkeep_begins_a_log_that_was_empty(*, continued: bool) -> None:
    """Expiration and collection work, and verification finds nothing wrong before or after."""
    async with emptied(continued=continued) as storage, Repository.open(storage) as repository:
        assert (await repository.verify()).findings == ()
        await repository.expire_snapshots(datetime.now(UTC))
        assert await kinds(repository) == [ExpirationRan, *[RepoInitialized] * continued]
    async with emptied(continued=continued) as storage, Repository.open(storage) as repository:
        late = await repository.writable_session("main")
        await write(late, "a/c/1", b"\x02" * 1000)
        await repository.garbage_collect(datetime.now(UTC))
        assert await kinds(repository) == [GarbageCollectionRan, *[RepoInitialized] * continued]
        with pytest.raises(ChunksCollectedError):
            await late.commit("its chunk was collected")
        assert (await repository.verify()).findings == ()


async def test_a_copy_of_a_repository_with_an_empty_log_reads() -> None:
    """The whole repository, and a part of it."""
    for refs in (None, ["main"]):
        async with (
            emptied(continued=False) as storage,
            Repository.open(storage) as repository,
            open_storage(memory_url()) as destination,
        ):
            await repository.copy_to(destination, refs=refs)
            await repository.create_branch("side", await repository.lookup_branch("main"))
            await repository.copy_to(destination, refs=refs)
            async with Repository.open(destination) as copied:
                assert await read(await copied.readonly_session("main"), "a/c/0") == b"\x01"
                assert (await copied.verify()).findings == ()


class _Silent(WrappedStorage):
    """Loses the reply to the next write of the repo info."""

    armed = False

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        version = await self.wrapped.put(key, data, if_version=if_version)
        if key == REPO_INFO and self.armed:
            self.armed = False
            raise OutcomeUnknownError("no reply")
        return version


async def test_a_writer_recognizes_its_write_on_top_of_an_empty_log() -> None:
    """Its reply was lost; the log must name the backup that it took."""
    async with emptied(continued=False) as storage:
        silent = _Silent(storage)
        async with Repository.open(silent) as repository:
            silent.armed = True
            await repository.create_branch("side", await repository.lookup_branch("main"))
            assert await kinds(repository) == [BranchCreated]


@pytest.mark.parametrize("updates", [0, 1], ids=["empty", "with entries"])
async def test_a_log_that_continues_in_itself_is_damaged(updates: int) -> None:
    """Reading the log ends with an error, and verification reports it."""
    async with emptied(continued=False) as storage:
        if updates:
            async with Repository.open(storage) as repository:
                await repository.create_branch("side", await repository.lookup_branch("main"))
        await replace_info(storage, before_updates="repo.1.LOOP")
        await storage.put(backup_key("repo.1.LOOP"), (await storage.get(REPO_INFO)).data)
        async with Repository.open(storage) as repository:
            with pytest.raises(FormatError, match=r"circle: .overwritten/repo\.1\.LOOP."):
                await kinds(repository)
            (finding,) = (await repository.verify()).findings
            assert (finding.kind, finding.problem) == ("operations log", "disagrees")

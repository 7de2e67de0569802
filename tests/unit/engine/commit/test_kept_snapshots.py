"""The work of a commit that failed can be read, in the session and by an id in the error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import (
    ChunksCollectedError,
    ConflictError,
    IcechunkError,
    RebaseFailedError,
    SnapshotNotFoundError,
    StorageError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import read, write
from tests.unit.engine.upkeep.upkeep_tools import CHUNK, commit, littered, now

if TYPE_CHECKING:
    from icechunk_async.storage import Data, Expected, Version

DETECTOR = ConflictDetector()


async def _kept(url: str, error: IcechunkError, key: str) -> bytes | None:
    """Read a chunk of the snapshot that an error names, with another handle."""
    snapshot_id = error.context["kept_snapshot_id"]
    assert isinstance(snapshot_id, str)
    async with Repository.open(url) as repository:
        reader = await repository.readonly_session(snapshot_id=snapshot_id)
        assert reader.read_only
        return await read(reader, key)


@pytest.mark.parametrize("seen", [True, False], ids=["before storing", "while storing"])
async def test_a_lost_race_names_a_snapshot_with_the_work(spec: int, *, seen: bool) -> None:
    """Whether or not files were stored when the race was lost."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository, Repository.open(url) as other:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await commit(other, 61, "first")
        if seen:
            await repository.lookup_branch("main")
        with pytest.raises(ConflictError) as caught:
            await session.commit("late")
        assert await _kept(url, caught.value, "a/c/60") == CHUNK
        assert await _kept(url, caught.value, "a/c/61") is None
        branches = await repository.branches()
        assert caught.value.context["kept_snapshot_id"] not in [str(it) for it in branches.values()]
        await session.commit("rebased", rebase_with=DETECTOR)


async def test_a_failed_rebase_names_the_state_in_which_the_session_is(spec: int) -> None:
    """On top of the last commit that did not clash."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await commit(repository, 61, "does not clash")
        await commit(repository, 60, "clashes")
        with pytest.raises(RebaseFailedError) as caught:
            await session.commit("late", rebase_with=DETECTOR)
        assert await _kept(url, caught.value, "a/c/60") == CHUNK
        kept = await _kept(url, caught.value, "a/c/61")
        assert kept is not None
        assert kept == await read(session, "a/c/61")


async def test_a_refused_amendment_names_one_as_well() -> None:
    """As a commit does."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await commit(repository, 61, "first")
        with pytest.raises(ConflictError) as caught:
            await session.amend("late")
        assert await _kept(url, caught.value, "a/c/60") == CHUNK


async def test_what_is_left_of_a_collected_session_can_be_read(spec: int) -> None:
    """All but the chunks that the error names."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await repository.garbage_collect(now())
        await write(session, "a/c/61", CHUNK)
        with pytest.raises(ChunksCollectedError) as caught:
            await session.commit("refused")
        assert await _kept(url, caught.value, "a/c/61") == CHUNK


async def test_the_snapshot_of_a_lost_commit_can_be_collected(spec: int) -> None:
    """Once it is collected it is gone, and says so."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/60", CHUNK)
        await commit(repository, 61, "first")
        with pytest.raises(ConflictError) as caught:
            await session.commit("late")
        await repository.garbage_collect(now())
        with pytest.raises(SnapshotNotFoundError):
            await _kept(url, caught.value, "a/c/60")


async def test_a_storage_that_fails_does_not_hide_the_conflict(spec: int) -> None:
    """The error is that of the race, without an id."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(plain) as other:

        class Full(WrappedStorage):
            """Stores chunks only."""

            async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
                if not key.startswith("chunks/"):
                    raise StorageError("no")
                return await super().put(key, data, if_version=if_version)

        async with Repository.open(Full(plain)) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/60", CHUNK)
            await commit(other, 61, "first")
            await repository.lookup_branch("main")
            with pytest.raises(ConflictError) as caught:
                await session.commit("late")
            assert "kept_snapshot_id" not in caught.value.context


async def test_a_commit_that_succeeds_pays_nothing() -> None:
    """Two puts of files, one of the log, a backup and the repo info."""
    url, _ = await littered(2)
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/60", CHUNK)
            await read(session, "a/c/0")
            storage.forget()
            await session.commit("alone")
            keys = sorted(key.partition("/")[0] for _, key in storage.log)
            assert [it for it in keys if it != "digests"] == [
                "manifests",
                "overwritten",
                "repo",
                "snapshots",
                "transactions",
            ]

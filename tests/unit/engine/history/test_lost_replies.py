"""Writes whose reply was lost, and storage that cannot be trusted with commits."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig, StorageRetriesSettings, StorageSettings
from icechunk_async.engine.commit.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.errors import (
    FormatError,
    OutcomeUnknownError,
    ReadOnlyError,
    RepositoryExistsError,
    StorageUnavailableError,
    UnsafeStorageError,
)
from icechunk_async.storage import Capabilities, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async import Session
    from icechunk_async.storage import Data, Expected, RangeRequest, Retrieved, Storage, Version

REFERENCES = ("repo", "refs/branch.main/ref.json")
ONE_TRY = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))
"""For storages that stay silent: the pauses between tries take real time."""


class _Lossy(WrappedStorage):
    """Loses the reply to writes of a reference, a number of times; may go silent after."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.lose = 0
        self.apply = True
        self.silent_after = False
        self.silent = False

    async def before(self, operation: str, key: str) -> None:
        if self.silent and operation.startswith("get"):
            raise StorageUnavailableError("gone silent")

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        lost = key in REFERENCES and self.lose > 0
        if lost:
            self.lose -= 1
            if self.apply:
                await self.wrapped.put(key, data, if_version=if_version)
            self.silent = self.silent_after
            raise OutcomeUnknownError("no reply")
        return await self.wrapped.put(key, data, if_version=if_version)


async def _prepared(spec: int) -> str:
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await session.commit("first")
    return url


@asynccontextmanager
async def _losing_one(spec: int) -> AsyncGenerator[tuple[Repository, Session, _Lossy]]:
    """Yield a session with a change; the reply to its commit is lost, and nothing answers after."""
    async with open_storage(await _prepared(spec)) as plain:
        storage = _Lossy(plain)
        async with Repository.open(storage, config=ONE_TRY) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.lose, storage.silent_after = 1, True
            yield repository, session, storage


@pytest.mark.parametrize("apply", [True, False], ids=["landed", "lost"])
async def test_lost_reply_does_not_duplicate_commit(spec: int, *, apply: bool) -> None:
    """Reading back shows whether it landed; if not, it is tried again."""
    url = await _prepared(spec)
    async with open_storage(url) as plain:
        storage = _Lossy(plain)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.lose, storage.apply = 2, apply
            snapshot_id = await session.commit("second")
            history = [info.id async for info in repository.ancestry(branch="main")]
            assert history[0] == snapshot_id
            assert len(history) == 3


class _InterruptedError(BaseException):
    """An interrupt, or an error that a driver lets through."""


@pytest.mark.parametrize("error", [_InterruptedError, RuntimeError])
async def test_an_error_of_another_kind_leaves_a_commit_in_doubt(
    spec: int, error: type[BaseException]
) -> None:
    """It says nothing about what landed: the next call finds that out, and repeats nothing."""
    url = await _prepared(spec)

    class Interrupted(_Lossy):
        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            try:
                return await super().put(key, data, if_version=if_version)
            except OutcomeUnknownError:
                raise error("stop") from None

    async with open_storage(url) as plain:
        storage = Interrupted(plain)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.lose = 1
            with pytest.raises(error):
                await session.commit("second")
            snapshot_id = await session.commit("second", rebase_with=ConflictDetector())
            history = [info.id async for info in repository.ancestry(branch="main")]
            assert history[0] == snapshot_id
            assert len(history) == 3


async def test_lost_commit_is_recognised_below_a_newer_one(spec: int) -> None:
    """Another writer committed on top before we looked."""
    url = await _prepared(spec)

    class Overtaken(_Lossy):
        async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
            try:
                return await super().put(key, data, if_version=if_version)
            except OutcomeUnknownError:
                async with Repository.open(self.wrapped) as other:
                    session = await other.writable_session("main")
                    await write(session, "a/c/9", b"\x09")
                    await session.commit("on top")
                raise

    async with open_storage(url) as plain:
        storage = Overtaken(plain)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.lose = 1
            snapshot_id = await session.commit("second")
            messages = [info.message async for info in repository.ancestry(branch="main")]
            assert messages == ["on top", "second", "first", "Repository initialized"]
            assert session.snapshot_id == snapshot_id


@pytest.mark.parametrize("apply", [True, False], ids=["landed", "lost"])
async def test_a_commit_of_unknown_outcome_can_be_settled_by_committing_again(
    spec: int, *, apply: bool
) -> None:
    """While in doubt the session takes no changes; the second call finds or makes the commit."""
    url = await _prepared(spec)
    async with open_storage(url) as plain:
        storage = _Lossy(plain)
        async with Repository.open(storage, config=ONE_TRY) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.lose, storage.apply, storage.silent_after = 1, apply, True
            with pytest.raises(OutcomeUnknownError):
                await session.commit("second")
            with pytest.raises(ReadOnlyError, match="commit again to find out"):
                await write(session, "a/c/1", b"\x01")
            storage.silent = False
            snapshot_id = await session.commit("second", rebase_with=ConflictDetector())
            history = [info async for info in repository.ancestry(branch="main")]
            assert [info.message for info in history[:2]] == ["second", "first"]
            assert history[0].id == snapshot_id
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0") == b"\x01"


class _Late(WrappedStorage):
    """Delays a write of a reference, then turns every further one away."""

    late: tuple[str, bytes, Expected] | None = None
    armed = False

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        if key not in REFERENCES or not self.armed:
            return await self.wrapped.put(key, data, if_version=if_version)
        if self.late is not None:
            raise StorageUnavailableError("too busy")
        self.late = key, bytes(data), if_version
        raise OutcomeUnknownError("no reply")

    async def arrive(self) -> None:
        """Let the delayed write land."""
        assert self.late is not None
        key, data, expected = self.late
        await self.wrapped.put(key, data, if_version=expected)
        self.armed = False


async def test_refused_retry_does_not_hide_an_earlier_try_in_doubt(spec: int) -> None:
    """The first may land yet, so nobody is told that nothing was published."""
    url = await _prepared(spec)
    async with open_storage(url) as plain:
        storage = _Late(plain)
        async with Repository.open(storage, config=ONE_TRY) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/0", b"\x01")
            storage.armed = True
            with pytest.raises(OutcomeUnknownError, match="no reply") as caught:
                await session.commit("second")
            assert isinstance(caught.value.__cause__, StorageUnavailableError)
            await storage.arrive()
            snapshot_id = await session.commit("second")
            history = [info async for info in repository.ancestry(branch="main")]
            assert [info.message for info in history[:2]] == ["second", "first"]
            assert history[0].id == snapshot_id


async def test_commit_in_doubt_is_never_reported_as_failed(spec: int) -> None:
    """This holds even if a retry fails before it can look at the branch."""
    async with _losing_one(spec) as (repository, session, storage):
        for _ in range(2):
            with pytest.raises(OutcomeUnknownError):
                await session.commit("second")
        storage.silent = False
        await session.commit("second")
        messages = [info.message async for info in repository.ancestry(branch="main")]
        assert messages == ["second", "first", "Repository initialized"]


@pytest.mark.parametrize("apply", [True, False], ids=["landed", "lost"])
async def test_other_changes_of_refs_survive_lost_replies(spec: int, *, apply: bool) -> None:
    """Creating and resetting branches, tags: done once, and no false error."""
    url = await _prepared(spec)
    async with open_storage(url) as plain:
        storage = _Lossy(plain)
        async with Repository.open(storage) as repository:
            first = await repository.lookup_branch("main")
            root = [info.id async for info in repository.ancestry(branch="main")][-1]
            storage.lose, storage.apply = 1, apply
            await repository.reset_branch("main", root, from_snapshot_id=first)
            assert await repository.lookup_branch("main") == root
            if spec == 2:
                storage.lose = 1
                await repository.create_branch("dev", first)
                storage.lose = 1
                await repository.create_tag("v1", first)
                storage.lose = 1
                await repository.delete_tag("v1")
                assert await repository.list_branches() == {"main", "dev"}
                assert await repository.list_tags() == set()


async def test_creating_a_repository_survives_a_lost_reply(spec: int) -> None:
    """It is created once; one that is there already is still refused."""
    async with open_storage(memory_url()) as plain:
        storage = _Lossy(plain)
        storage.lose = 1
        async with Repository.create(storage, spec_version=spec) as repository:
            assert await repository.list_branches() == {"main"}
        with pytest.raises(RepositoryExistsError, match="there already"):
            async with Repository.create(storage, spec_version=spec):
                pass


class _Unsafe(WrappedStorage):
    """Promises less than commits need."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            conditional_update=False,
            reasons={"conditional_update": "this file system has no locks; use another"},
        )


async def test_storage_that_would_lose_commits_is_refused_before_anything_is_written(
    spec: int,
) -> None:
    """Creating, opening for writing and changing refs are refused; reading works."""
    url = await _prepared(spec)
    async with open_storage(url) as plain, Repository.open(_Unsafe(plain)) as repository:
        tip = await repository.lookup_branch("main")
        with pytest.raises(UnsafeStorageError, match="no locks; use another"):
            await repository.writable_session("main")
        with pytest.raises(UnsafeStorageError):
            await repository.create_tag("v1", tip)
        with pytest.raises(UnsafeStorageError):
            await repository.save_config()
    async with open_storage(memory_url()) as plain:
        with pytest.raises(UnsafeStorageError, match="conditional update"):
            async with Repository.create(_Unsafe(plain), spec_version=spec):
                pass
        assert [entry async for entry in plain.list_prefix()] == []


class _ReadOnly(WrappedStorage):
    @property
    def capabilities(self) -> Capabilities:
        missing = ("writable", "conditional_create", "conditional_update")
        reasons = dict.fromkeys(missing, "opened to read")
        return Capabilities(
            writable=False,
            conditional_create=False,
            conditional_update=False,
            reasons=reasons | {"conditional_update": "no locks"},
        )


async def test_refusal_lists_each_reason_once(spec: int) -> None:
    """Promises may be missing for the same one."""
    url = await _prepared(spec)
    async with open_storage(url) as plain, Repository.open(_ReadOnly(plain)) as repository:
        with pytest.raises(UnsafeStorageError) as caught:
            await repository.writable_session("main")
    assert "(opened to read; no locks)" in caught.value.message


class _Truncating(WrappedStorage):
    """Returns fewer bytes than requested."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        retrieved = await self.wrapped.get(key, byte_range)
        return replace(retrieved, data=retrieved.data[:-1])


@pytest.mark.parametrize(
    ("spec", "prefix"),
    [
        *((1, prefix) for prefix in ("refs", "snapshots", "manifests", "chunks")),
        *((2, prefix) for prefix in ("repo", "snapshots", "manifests", "chunks")),
    ],
)
async def test_truncated_objects_are_format_errors(spec: int, prefix: str) -> None:
    """Reading any object that was cut short reports damage."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", b"x" * 1000)
        await session.commit("first")
        present = {key for key in await objects(repository.storage) if key.startswith(prefix)}
    assert present

    class Cut(_Truncating):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            if key in present:
                return await super().get(key, byte_range)
            return await self.wrapped.get(key, byte_range)

    async def read_back(plain: Storage) -> None:
        async with Repository.open(Cut(plain)) as repository:
            session = await repository.readonly_session("main")
            await read(session, "a/c/0")

    async with open_storage(url) as plain:
        with pytest.raises(FormatError):
            await read_back(plain)


async def test_a_session_in_doubt_that_is_rebased_does_not_commit_twice(spec: int) -> None:
    """Rebasing moves it onto commits of which one may be its own."""
    async with _losing_one(spec) as (repository, session, storage):
        with pytest.raises(OutcomeUnknownError):
            await session.commit("second")
        storage.silent = False
        async with Repository.open(storage.wrapped) as other:
            further = await other.writable_session("main")
            await write(further, "a/c/9", b"\x09")
            await further.commit("on top")
        await session.rebase(BasicConflictSolver())
        await session.commit("second", rebase_with=BasicConflictSolver())
        messages = [info.message async for info in repository.ancestry(branch="main")]
        assert messages == ["on top", "second", "first", "Repository initialized"]

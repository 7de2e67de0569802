"""Format 2 with numbered states, on storage that creates objects safely and replaces none."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import icechunk_async.sync as icechunk
from icechunk_async import Repository, RepositoryConfig, upkeep
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.history.numbered import NumberedStorage
from icechunk_async.engine.history.numbers import encode_number
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    FormatError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryExistsError,
    RepositoryNotFoundError,
    RepositoryReadOnlyError,
    StorageUnavailableError,
    UnsafeStorageError,
    UnsupportedBySpecError,
)
from icechunk_async.format.layout import REPO_INFO, STATES
from icechunk_async.results import RepoAvailability, RepoStatus
from icechunk_async.storage import ABSENT, ObjectInfo, Version, open_storage
from icechunk_async.storage.probe import probe_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import group_document, make_array, memory_url, objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import now
from tests.without_updates import NUMBERED, WithoutUpdates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import Capabilities, Data, Expected, Storage


@pytest.fixture
async def storage() -> AsyncIterator[Storage]:
    """Open a storage without compare-and-set."""
    async with open_storage(memory_url()) as plain:
        yield WithoutUpdates(plain)


@pytest.fixture
async def repository(storage: Storage) -> AsyncIterator[Repository]:
    """Create a repository with numbered states, an array and one chunk."""
    async with Repository.create(storage, layout=NUMBERED) as repository:
        await _commit(repository, 0)
        yield repository


async def _commit(repository: Repository, number: int, branch: str = "main") -> None:
    session = await repository.writable_session(branch)
    await make_array(session, "a", (100,), (1,))
    await write(session, f"a/c/{number}", b"%d" % number * 300)
    await session.commit(f"commit {number}")


async def _messages(repository: Repository, branch: str = "main") -> list[str]:
    return [it.message async for it in repository.ancestry(branch=branch)]


async def _states(storage: Storage) -> list[str]:
    """Return the keys of the states, newest first."""
    return [it.key async for it in storage.list_prefix(STATES) if isinstance(it, ObjectInfo)]


async def test_a_numbered_repository_is_recognized_when_it_is_opened(
    storage: Storage, repository: Repository
) -> None:
    """By URL, by its handle, and in the reports."""
    assert (repository.layout, repository.spec_version) == (NUMBERED, 2)
    async with Repository.open(storage) as again:
        assert again.layout == await Repository.fetch_layout(storage) == NUMBERED
        assert await Repository.exists(storage)
        assert await _messages(again) == ["commit 0", "Repository initialized"]
        assert await read(await again.readonly_session("main"), "a/c/0") == b"0" * 300
    with pytest.raises(RepositoryExistsError):
        async with Repository.create(storage, layout=NUMBERED):
            pass
    with pytest.raises(RepositoryExistsError):
        async with Repository.create(storage, spec_version=1, check_clean_root=False):
            pass
    async with Repository.open_or_create(storage) as again:
        assert again.layout == NUMBERED


async def test_the_ordinary_layout_is_refused_there_and_names_this_one(storage: Storage) -> None:
    """Also after a trial that shows that replacing does not work."""
    with pytest.raises(UnsafeStorageError, match="layout='format-2-numbered'"):
        async with Repository.create(storage):
            pass
    found = await probe_storage(storage)
    assert not found.is_safe
    assert found.is_safe_numbered
    with pytest.raises(UnsafeStorageError, match="layout='format-2-numbered'"):
        found.check()
    async with Repository.create(storage, layout=NUMBERED, probe=True) as repository:
        await _commit(repository, 1)


class _OldClone(WrappedStorage):
    """Claims all, and ignores the condition of an update, as old services that speak S3 do."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped storage, which nobody tried."""
        return replace(self.wrapped.capabilities, verified=False)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        condition = if_version if if_version is ABSENT else None
        return await super().put(key, data, if_version=condition)


async def test_a_storage_that_ignores_conditions_of_updates_is_enough() -> None:
    """The trial at creation finds out, names this layout, and lets it be created there."""
    async with open_storage(memory_url()) as plain:
        storage = _OldClone(plain)
        with pytest.raises(UnsafeStorageError, match="layout='format-2-numbered'"):
            async with Repository.create(storage):
                pass
        assert await objects(storage) == {}
        async with Repository.create(storage, layout=NUMBERED) as repository:
            await _commit(repository, 0)
        async with Repository.open(storage) as again:
            assert await _messages(again) == ["commit 0", "Repository initialized"]


async def test_history_has_all_features_of_format_2(repository: Repository) -> None:
    """Branches, tags, amendments, metadata, status, flags, log, time travel, expiry, collection."""
    first = await repository.lookup_branch("main")
    before = now()
    await repository.create_branch("dev", first)
    await _commit(repository, 1, "dev")
    await repository.create_tag("v1", first)
    await repository.delete_tag("v1")
    session = await repository.writable_session("dev")
    await write(session, "a/c/2", b"2")
    await session.amend("amended")
    await repository.reset_branch("dev", first)
    await repository.delete_branch("dev")
    with pytest.raises(BranchNotFoundError):
        await repository.lookup_branch("dev")
    await repository.set_metadata({"by": "me"})
    await repository.set_feature_flag("move_node", setting=False)
    await repository.set_feature_flag("move_node", setting=None)
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await session.commit("root")
    moving = await repository.rearrange_session("main")
    await moving.move("/a", "/b")
    await moving.commit("moved")
    past = await repository.readonly_session("main", as_of=before)
    assert past.snapshot_id == first
    await repository.set_status(RepoStatus(RepoAvailability.READ_ONLY))
    with pytest.raises(RepositoryReadOnlyError):
        await repository.create_branch("no", first)
    await repository.set_status(RepoStatus(RepoAvailability.ONLINE))
    kinds = [type(it.detail).__name__ async for it in repository.ops_log()]
    assert kinds[-1] == "RepoInitialized"
    assert len(kinds) == len(await _states(repository.storage))
    assert await repository.expire_snapshots(now())
    report = await repository.garbage_collect(now())
    assert report.snapshots_deleted
    assert (await repository.verify("existence")).findings == ()
    assert await read(await repository.readonly_session("main"), "b/c/0") == b"0" * 300
    assert await repository.get_metadata() == {"by": "me"}


async def test_the_configuration_is_stored(storage: Storage) -> None:
    """At creation and later."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=3)
    async with Repository.create(storage, layout=NUMBERED, config=config, sums=True) as repository:
        await _commit(repository, 0)
    async with Repository.open(
        storage, config=RepositoryConfig(inline_chunk_threshold_bytes=4)
    ) as again:
        assert again.sums
        await again.save_config()
    stored = await Repository.fetch_config(storage)
    assert stored is not None
    assert stored.inline_chunk_threshold_bytes == 4


async def test_leases_are_refused_by_name(repository: Repository) -> None:
    """They are objects that are replaced all the time."""
    with pytest.raises(UnsupportedBySpecError, match=r"format-2-numbered.*leases.*copy_to"):
        await repository.writable_session("main", lease=True)
    assert await repository.sessions() == []


async def test_of_two_commits_on_one_state_one_lands(storage: Storage) -> None:
    """The other is refused, or follows it after a rebase."""
    async with Repository.create(storage, layout=NUMBERED) as first:
        await _commit(first, 0)
        async with Repository.open(WithoutUpdates(storage)) as second:
            sessions = [await it.writable_session("main") for it in (first, second)]
            for number, session in enumerate(sessions, 10):
                await write(session, f"a/c/{number}", b"x")
            await sessions[0].commit("first")
            with pytest.raises(ConflictError):
                await sessions[1].commit("second")
            await sessions[1].commit("second", rebase_with=ConflictDetector())
            assert (await _messages(first))[:2] == ["second", "first"]


async def test_collection_keeps_two_states_and_the_young_ones(
    storage: Storage, repository: Repository
) -> None:
    """However often it runs; the operations log stays whole."""
    before = now()
    for number in range(1, 4):
        await _commit(repository, number)
    states = await _states(storage)
    assert [it.removeprefix(STATES) for it in states] == [
        encode_number(number) for number in range(4, -1, -1)
    ]
    await repository.garbage_collect(now(), dry_run=True)
    assert await _states(storage) == states
    await repository.garbage_collect(before)
    assert len(await _states(storage)) == 1 + 3
    theirs = f"{STATES}zz-of-somebody-else"
    await storage.put(theirs, b"")
    for _ in range(2):
        await repository.garbage_collect(now())
        assert len(await _states(storage)) == 2 + 1
    assert theirs in await _states(storage)
    async with Repository.open(storage) as again:
        kinds = Counter([type(it.detail).__name__ async for it in again.ops_log()])
        assert kinds == {"RepoInitialized": 1, "NewCommit": 4, "GarbageCollectionRan": 3}
        assert (await again.verify("existence")).findings == ()


@pytest.mark.parametrize("rebases", [False, True])
async def test_a_writer_that_slept_over_collections_loses_nothing(
    storage: Storage, *, rebases: bool
) -> None:
    """The number that it takes was taken before, and collected; its state counts for nobody."""
    async with Repository.create(storage, layout=NUMBERED) as repository:
        await _commit(repository, 0)
        async with Repository.open(WithoutUpdates(storage)) as sleeper:
            session = await sleeper.writable_session("main")
            await write(session, "a/c/50", b"slept")
            for number in range(1, 5):
                await _commit(repository, number)
            numbers = await _states(storage)
            old = [it for it in numbers if it not in numbers[:2]]
            await storage.delete(old)  # as a collection does with old states
            if rebases:
                await session.commit("slept", rebase_with=ConflictDetector())
            else:
                with pytest.raises(ConflictError):
                    await session.commit("slept")
        expected = [f"commit {number}" for number in range(4, -1, -1)]
        expected = [*["slept"][: int(rebases)], *expected, "Repository initialized"]
        async with Repository.open(storage) as again:
            assert await _messages(again) == expected
            found = await read(await again.readonly_session("main"), "a/c/50")
            assert found == (b"slept" if rebases else None)
        assert await _messages(repository) == expected


async def test_a_state_that_came_too_late_is_in_doubt(storage: Storage) -> None:
    """It was created, and is neither the newest nor part of the sequence."""
    states = NumberedStorage(storage)
    version = await states.put(REPO_INFO, b"0", if_version=ABSENT)
    late = version
    for number in range(1, 5):
        version = await states.put(REPO_INFO, b"%d" % number, if_version=version)
    with pytest.raises(PreconditionFailedError):
        await states.put(REPO_INFO, b"late", if_version=late)
    await states.collect(now() + timedelta(hours=1))
    assert len(await _states(storage)) == 2
    with pytest.raises(OutcomeUnknownError, match="newest is number 4"):
        await states.put(REPO_INFO, b"late", if_version=late)
    with pytest.raises(OutcomeUnknownError):
        await states.put(REPO_INFO, b"late", if_version=ABSENT)
    with pytest.raises(PreconditionFailedError):
        await states.copy(REPO_INFO, "overwritten/x", if_version=Version("2"))
    found = await states.get(REPO_INFO)
    assert (bytes(found.data), found.version) == (b"4", version)
    assert await states.get_if_changed(REPO_INFO, version) is None
    changed = await states.get_if_changed(REPO_INFO, late)
    assert changed is not None
    assert bytes(changed.data) == b"4"
    await states.collect(now() + timedelta(hours=1))
    assert len(await _states(storage)) == 2
    with pytest.raises(UnsafeStorageError, match="without a condition"):
        await states.put(REPO_INFO, b"any")


async def test_a_failed_look_after_creating_a_state_is_a_doubt() -> None:
    """The state may count, so nobody is told that nothing happened."""

    class Blind(WithoutUpdates):
        def list_prefix(self, *args: Any, **more: Any) -> Any:
            raise StorageUnavailableError("it does not answer")

    async with open_storage(memory_url()) as plain:
        with pytest.raises(OutcomeUnknownError, match="does not answer"):
            await NumberedStorage(Blind(plain)).put(REPO_INFO, b"0", if_version=ABSENT)


async def test_a_gap_is_an_error_that_names_the_lost_object(
    storage: Storage, repository: Repository
) -> None:
    """The states after it may have been built on something else."""
    await _commit(repository, 1)
    lost = (await _states(storage))[1]
    await storage.delete([lost])
    with pytest.raises(FormatError, match=lost):
        async with Repository.open(storage):
            pass
    left = await objects(storage)
    for attempt in (upkeep.verify, partial(upkeep.restore_repo_object, dry_run=False)):
        with pytest.raises(FormatError, match=lost):
            await attempt(storage)
    assert await objects(storage) == left


async def test_repair_leaves_a_sound_state_alone(storage: Storage, repository: Repository) -> None:
    """There is no object ``repo``, and none is made of a backup: it would hide the states."""
    await _commit(repository, 1)
    before = await objects(storage)
    assert [it for it in before if it.startswith("overwritten/repo.")]
    assert await upkeep.restore_repo_object(storage, dry_run=False) is None
    assert await objects(storage) == before


async def test_repair_puts_the_last_backup_in_place_of_a_damaged_state(
    storage: Storage, repository: Repository
) -> None:
    """As the next state, and on a storage that replaces nothing."""
    await _commit(repository, 1)
    states = await _states(storage)
    before = bytes((await storage.get(states[1])).data)
    damaged = bytes((await storage.get(states[0])).data)[:-10]
    await storage.put(states[0], damaged)
    findings = (await upkeep.verify(storage)).findings
    assert [(it.kind, it.problem) for it in findings] == [("repo", "unreadable")]
    step = await upkeep.restore_repo_object(storage, dry_run=False)
    assert step is not None
    now = await objects(storage)
    assert REPO_INFO not in now
    assert now[(await _states(storage))[0]] == before
    assert [it for key, it in now.items() if key.startswith("quarantine/")] == [damaged]
    async with Repository.open(storage) as again:
        assert again.layout == NUMBERED
        assert await _messages(again) == ["commit 0", "Repository initialized"]
        await _commit(again, 2)
        assert (await again.verify("structure")).findings == ()


async def test_a_removed_repository_is_not_found(storage: Storage, repository: Repository) -> None:
    """By those who have it open, and by those who open it."""
    await storage.delete(await _states(storage))
    with pytest.raises(RepositoryNotFoundError):
        await repository.list_branches()
    with pytest.raises(RepositoryNotFoundError, match=STATES):
        async with Repository.open(storage):
            pass


async def test_a_foreign_repo_object_that_was_removed_leaves_nothing_behind() -> None:
    """The state that a process knows of one layout says nothing of another at the same place."""
    url, other = memory_url(), memory_url()
    async with (
        open_storage(url) as storage,
        open_storage(other) as elsewhere,
        Repository.create(url, layout=NUMBERED) as repository,
    ):
        await _commit(repository, 0)
        async with Repository.create(elsewhere) as foreign:
            await _commit(foreign, 1)  # so it is newer
        await storage.put(REPO_INFO, (await elsewhere.get(REPO_INFO)).data)
        async with Repository.open(url) as misled:
            assert misled.layout == "format-2"
            await storage.delete([REPO_INFO])
            async with Repository.open(url) as reopened:
                assert reopened.layout == NUMBERED
                for it in (reopened, repository):
                    assert await _messages(it) == ["commit 0", "Repository initialized"]
                await _commit(reopened, 2)
                assert (await _messages(repository))[:2] == ["commit 2", "commit 0"]
            with pytest.raises(RepositoryNotFoundError, match="'repo' object is gone"):
                await _messages(misled)


async def test_a_damaged_newest_state_is_reported(storage: Storage, repository: Repository) -> None:
    """Without it the repository is in the state before the last change."""
    await _commit(repository, 1)
    newest = (await _states(storage))[0]
    await storage.put(newest, bytes((await storage.get(newest)).data)[:-10])
    assert [it.kind for it in (await repository.verify("structure")).findings] == ["repo"]
    with pytest.raises(FormatError):
        async with Repository.open(storage):
            pass
    await storage.delete([newest])
    async with Repository.open(storage) as again:
        assert await _messages(again) == ["commit 0", "Repository initialized"]
        await _commit(again, 2)
        assert (await again.verify("structure")).findings == ()


async def test_a_copy_elsewhere_is_an_ordinary_repository(repository: Repository) -> None:
    """With history, refs and log; and again after further commits."""
    await repository.create_tag("v1", await repository.lookup_branch("main"))
    async with open_storage(memory_url()) as elsewhere:
        await repository.copy_to(elsewhere)
        await _commit(repository, 1)
        await repository.copy_to(elsewhere)
        async with Repository.open(elsewhere) as copied:
            assert copied.layout == "format-2"
            assert await _messages(copied) == await _messages(repository)
            assert await copied.list_tags() == {"v1"}
            assert (await copied.verify("existence")).findings == ()
            await _commit(copied, 2)
        assert await _states(elsewhere) == []


async def test_upgrading_refuses_and_changes_nothing(
    storage: Storage, repository: Repository
) -> None:
    """Where nothing can be replaced, and elsewhere; it names the copy that is of format 2."""
    before = await objects(storage)
    with pytest.raises(UnsafeStorageError):
        await upgrade(storage)
    async with open_storage(memory_url()) as able:
        for key, data in before.items():
            await able.put(key, data)
        for dry_run in (True, False):
            with pytest.raises(UnsupportedBySpecError, match="copy_to"):
                await upgrade(able, dry_run=dry_run)
        assert await objects(able) == before
    assert await objects(storage) == before
    assert await _messages(repository) == ["commit 0", "Repository initialized"]


def test_facade_and_handles_open_it(tmp_path: Path) -> None:
    """On a disk, where it is as good as any."""

    async def create() -> None:
        async with Repository.create(tmp_path, layout=NUMBERED) as repository:
            await _commit(repository, 0)

    asyncio.run(create())
    with icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path))) as repository:
        assert next(it.message for it in repository.ancestry(branch="main")) == "commit 0"
        with repository.transaction("main", message="facade") as store:
            store.delete_sync("a/c/0")
        assert next(it.message for it in repository.ancestry(branch="main")) == "facade"
    assert not (tmp_path / "repo").exists()


async def test_a_commit_costs_one_listing_more_than_in_format_2(storage: Storage) -> None:
    """It shows that the state that was created is the newest."""
    requests: dict[str, Counter[str]] = {}
    async with open_storage(memory_url()) as plain:
        for layout, below in (("format-2", plain), (NUMBERED, storage)):
            counting = LatencyStorage(below, seconds=0)
            async with Repository.create(counting, layout=layout) as repository:
                await _commit(repository, 0)
                session = await repository.writable_session("main")
                await write(session, "a/c/1", b"1" * 300)
                counting.forget()
                await session.commit("counted")
                requests[layout] = Counter(counting.requests)
    assert requests[NUMBERED] - requests["format-2"] == Counter(list_prefix=1)
    assert not requests["format-2"] - requests[NUMBERED]

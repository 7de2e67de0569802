"""Migration to format version 2: dry run, interruption anywhere, writers that do not stop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

import pytest
from anyio.lowlevel import checkpoint

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.progress import Progress
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    IcechunkError,
    OutcomeUnknownError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.layout import branch_key, snapshot_key
from icechunk_async.format.refs import encode_closed_ref, encode_ref
from icechunk_async.storage import open_storage
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import memory_url, objects, write
from tests.unit.engine.upkeep.migration.old_repository import (
    OldRepository,
    check_migrated,
    check_readable,
    commit,
    copied,
    make_old,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async import Session
    from icechunk_async.storage import (
        Data,
        Expected,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )


class _Killed(BaseException):
    """The process ends here."""


class _Dying(WrappedStorage):
    """Ends the process at one request: before it, or after it was carried out."""

    def __init__(self, storage: Storage, at: int, *, carried_out: bool) -> None:
        super().__init__(storage)
        self._left = at
        self._carried_out = carried_out
        self.died = False

    def _die(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.died = True
            raise _Killed

    async def before(self, operation: str, key: str) -> None:
        if not self._carried_out:
            self._die()

    async def after(self, operation: str, key: str) -> None:
        if self._carried_out:
            self._die()


class _Pausing(WrappedStorage):
    """Waits once before and once after each request."""

    async def before(self, operation: str, key: str) -> None:
        await checkpoint()

    async def after(self, operation: str, key: str) -> None:
        await checkpoint()


class _Interrupted(WrappedStorage):
    """Lets somebody else act before one request."""

    def __init__(self, storage: Storage, at: int, act: Callable[[], Awaitable[None]]) -> None:
        super().__init__(storage)
        self.left = at
        self._act = act
        self.acted = False

    async def before(self, operation: str, key: str) -> None:
        self.left -= 1
        if self.left < 0 and not self.acted:
            self.acted = True
            await self._act()


class _Overtaken(WrappedStorage):
    """Has somebody migrate between the looks for what version 2 and version 1 begin with."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        if key == branch_key("main"):
            await upgrade(self.wrapped)
        return await self.wrapped.get(key, byte_range)


class _Silent(WrappedStorage):
    """Loses the request or the reply of one write."""

    def __init__(self, storage: Storage, at: int, *, carried_out: bool) -> None:
        super().__init__(storage)
        self._left = at
        self._carried_out = carried_out
        self.lost = False

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        self._left -= 1
        if self._left >= 0 or self.lost:
            return await self.wrapped.put(key, data, if_version=if_version)
        self.lost = True
        if self._carried_out:
            await self.wrapped.put(key, data, if_version=if_version)
        raise OutcomeUnknownError("no reply")


@pytest.fixture
async def old() -> OldRepository:
    """Return a repository of format version 1."""
    return await make_old()


async def test_opening_finds_a_repository_that_is_migrated_just_then(old: OldRepository) -> None:
    """Of the two things that it looks for, one was not there yet and one is there no more."""
    async with copied(old) as storage, Repository.open(_Overtaken(storage)) as repository:
        assert repository.spec_version == 2
        assert await repository.branches() == old.branches


async def test_a_dry_run_reports_and_changes_nothing(old: OldRepository) -> None:
    """The report of the dry run is that of the migration."""
    counted: list[Progress] = []

    async with copied(old) as storage:
        planned = await upgrade(storage, dry_run=True, progress=counted.append)
        assert await objects(storage) == old.objects
        done = await upgrade(storage)
        assert (planned.branches, planned.tags, planned.deleted_tags) == (2, 1, 1)
        assert planned.snapshots == 4
        assert planned.unused_files[0] == "refs/branch.main/ref.json"
        assert planned.unused_files[-1] == "config.yaml"
        assert (planned.dry_run, done.dry_run) == (True, False)
        assert planned.unused_files == done.unused_files
        await check_migrated(storage, old)
        again = await upgrade(storage)
        assert (again.already_migrated, again.unused_files) == (True, ())
    assert counted == [Progress("reading snapshots", done, 4) for done in (1, 2, 3, 4)]


@pytest.mark.sampled
@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("delete", [True, False], ids=["deleting", "keeping"])
async def test_a_second_call_finishes_what_died_at_any_request(
    old: OldRepository, *, carried_out: bool, delete: bool
) -> None:
    """After any interruption the repository can be read. A second call completes the migration."""
    resumed = 0
    for at in count():
        async with copied(old) as storage:
            dying = _Dying(storage, at, carried_out=carried_out)
            try:
                await upgrade(dying, delete_unused_v1_files=delete)
            except _Killed:
                await check_readable(storage, old)
                planned = await upgrade(storage, dry_run=True)
                report = await upgrade(storage)
                assert (planned.resumed, planned.branches) == (report.resumed, 2)
                resumed += report.resumed
            if not dying.died:
                break
            await check_migrated(storage, old)
    assert resumed > 5


async def test_a_second_call_finishes_what_was_cancelled_at_any_wait(old: OldRepository) -> None:
    """Cancelling leaves a repository that can be read, and that a second call completes."""
    urls: list[str] = []

    async def start(n: int) -> None:
        del n
        async with open_storage(urls[-1]) as storage:
            await upgrade(WrappedStorage(_Pausing(storage)))

    async def prepare() -> None:
        urls.append(memory_url())
        async with open_storage(urls[-1]) as storage:
            for key, data in old.objects.items():
                await storage.put(key, data)

    await prepare()
    stages: set[bool] = set()
    async for _ in at_every_wait(start):
        async with open_storage(urls[-1]) as storage:
            await check_readable(storage, old)
            stages.add((await upgrade(storage)).resumed)
            await check_migrated(storage, old)
        await prepare()
    assert stages == {True, False}


@pytest.mark.parametrize("carried_out", [False, True], ids=["lost", "landed"])
async def test_migration_settles_lost_replies(old: OldRepository, *, carried_out: bool) -> None:
    """If the reply to any write is lost, migration finishes or reports an unknown outcome."""
    told = 0
    for at in count():
        async with copied(old) as storage:
            silent = _Silent(storage, at, carried_out=carried_out)
            try:
                await upgrade(silent)
            except OutcomeUnknownError:
                told += 1
                await upgrade(storage)
            if not silent.lost:
                break
            await check_migrated(storage, old)
    assert told == (0 if carried_out else 1)  # the write that creates the repo info


async def _commits(repository: Repository, session: Session) -> str:
    del repository
    return str(await session.commit("late"))


async def _tags(repository: Repository, session: Session) -> str:
    await repository.create_tag("late", session.snapshot_id)
    return "late"


async def _branches(repository: Repository, session: Session) -> str:
    await repository.create_branch("late", session.snapshot_id)
    return "late"


@pytest.mark.parametrize("act", [_commits, _tags, _branches])
async def test_no_write_of_version_1_is_lost_in_silence(
    old: OldRepository, act: Callable[[Repository, Session], Awaitable[str]]
) -> None:
    """Before any request of a migration another writer acts: it is refused, kept, or reported."""
    outcomes: set[str] = set()
    for at in count():
        async with copied(old) as storage, Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            await write(session, "a/c/7", b"\x07")
            made: list[str] = []

            async def late(
                repository: Repository = repository,
                session: Session = session,
                made: list[str] = made,
            ) -> None:
                try:
                    made.append(await act(repository, session))
                except IcechunkError:
                    outcomes.add("refused")

            between = _Interrupted(storage, at, late)
            try:
                await upgrade(between)
            except ConflictError as error:
                if made and made[0] in str(error.context.get("keys")):
                    outcomes.add("reported")
                    continue
                outcomes.add("undone")
                assert await repository.branches()  # version 1 still works
                assert "repo" not in await objects(storage)
                await upgrade(storage)
            if not between.acted:
                break
            async with Repository.open(storage) as migrated:
                refs = {**await migrated.branches(), **await migrated.tags()}
                ids = [str(it.id) async for it in migrated.ancestry()]
            assert {*made} <= {*ids, *refs}
            outcomes.add("kept")
    assert {"undone", "kept"} <= outcomes
    if act is _commits:
        assert outcomes == {"undone", "kept", "refused"}


async def test_a_configuration_saved_meanwhile_undoes_the_migration(old: OldRepository) -> None:
    """A change of ``config.yaml`` is noticed until the repo info can be written to."""
    undone = 0
    for at in count():
        async with copied(old) as storage, Repository.open(storage) as repository:
            await repository.save_config()

            async def save(storage: Storage = storage) -> None:
                await storage.put("config.yaml", b"inline_chunk_threshold_bytes: 5\n")

            between = _Interrupted(storage, at, save)
            try:
                await upgrade(between)
            except ConflictError:
                undone += 1
                await upgrade(storage)
                async with Repository.open(storage) as migrated:
                    assert migrated.config.inline_chunk_threshold_bytes == 5
            if not between.acted:
                break
    assert undone > 5


async def test_two_migrations_at_once_do_no_harm(old: OldRepository) -> None:
    """One of them may be told to call again; the repository comes out whole."""

    async def attempt(storage: Storage) -> bool:
        try:
            await upgrade(storage)
        except ConflictError:
            return False
        return True

    async with copied(old) as storage:
        first, second = WrappedStorage(storage), WrappedStorage(storage)
        assert any(await gather(attempt(first), attempt(second)))
        await upgrade(storage)
        await check_migrated(storage, old)


async def test_another_migration_at_any_point_does_no_harm(old: OldRepository) -> None:
    """A whole migration between two requests of another: both end, the repository is whole."""
    for at in count():
        async with copied(old) as storage:

            async def other(storage: Storage = storage) -> None:
                await upgrade(storage)

            between = _Interrupted(storage, at, other)
            try:
                await upgrade(between)
            except (ConflictError, RepositoryNotFoundError):
                await upgrade(storage)
            if not between.acted:
                break
            await check_migrated(storage, old)


async def test_kept_files_are_unchanged_and_can_be_deleted_later(old: OldRepository) -> None:
    """Keeping changes no file of version 1; the repo info alone decides."""
    async with copied(old) as storage:
        report = await upgrade(storage, delete_unused_v1_files=False)
        now = await objects(storage)
        assert {key: now[key] for key in old.objects} == old.objects
        assert set(now) - set(old.objects) == {"repo"}
        assert set(report.unused_files) < set(old.objects)
        planned = await upgrade(storage, dry_run=True)
        assert planned.unused_files == report.unused_files
        report = await upgrade(storage)
        assert report.already_migrated
        await check_migrated(storage, old)


async def test_refs_still_used_by_version_1_are_not_deleted(old: OldRepository) -> None:
    """Kept files that refer to a later commit stay, and the error names them."""
    async with copied(old) as storage, Repository.open(storage) as before:
        await upgrade(storage, delete_unused_v1_files=False)
        late = await commit(before, "side", 8)
        kept = await objects(storage)
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match="side") as caught:
                await upgrade(storage, dry_run=dry_run)
            assert caught.value.context["snapshot_id"] == str(late)
        assert await objects(storage) == kept
        assert (await upgrade(storage, delete_unused_v1_files=False)).already_migrated


async def test_open_handle_of_version_1_reports_the_migration(old: OldRepository) -> None:
    """While branches are closed a commit with version 1 is told to open the repository again."""
    async with copied(old) as storage, Repository.open(storage) as before:
        session = await before.writable_session("main")
        await write(session, "a/c/3", b"\x03")
        await _stopped_half_way(storage)
        with pytest.raises(FormatError, match="Open the repository again"):
            await session.commit("late")
        await upgrade(storage)
        await check_migrated(storage, old)


async def _stopped_half_way(storage: Storage) -> None:
    """Begin a migration, and stop it when the first branch is closed."""

    class Dying(WrappedStorage):
        async def after(self, operation: str, key: str) -> None:
            if (operation, key) == ("put", "refs/branch.main/ref.json"):
                raise _Killed

    with pytest.raises(_Killed):
        await upgrade(Dying(storage))


async def test_commits_after_an_interruption_are_migrated(old: OldRepository) -> None:
    """A branch was not closed yet: the second call starts over and includes the commit."""
    async with copied(old) as storage, Repository.open(storage) as before:
        await _stopped_half_way(storage)
        old.branches["side"] = await commit(before, "side", 8)
        assert (await upgrade(storage)).resumed
        async with Repository.open(storage) as repository:
            assert await repository.branches() == old.branches


async def test_the_second_call_may_keep_the_files(old: OldRepository) -> None:
    """Branches that the first call closed are open again."""
    async with copied(old) as storage:
        await _stopped_half_way(storage)
        assert (await upgrade(storage, delete_unused_v1_files=False)).resumed
        now = await objects(storage)
        assert {key: now[key] for key in old.objects} == old.objects


async def test_branches_overwritten_blindly_are_not_deleted_unseen(old: OldRepository) -> None:
    """Old programs overwrite files on local disks without looking: the last look sees it."""
    key, theirs = "refs/branch.side/ref.json", encode_ref(old.branches["main"])
    outcomes: set[str] = set()
    for at in count():
        async with copied(old) as storage:
            looks: list[str] = []

            async def overwrite(storage: Storage = storage, looks: list[str] = looks) -> None:
                await storage.put(key, theirs)
                looks.clear()

            class Noting(_Interrupted):
                async def before(self, operation: str, key: str, looks: list[str] = looks) -> None:
                    await super().before(operation, key)
                    looks.append(f"{operation} {key}")

            between = Noting(storage, at, overwrite)
            try:
                await upgrade(between)
            except ConflictError as error:
                outcomes.add("reported" if "keys" in error.context else "undone")
                continue
            if not between.acted:
                break
            async with Repository.open(storage) as repository:
                tip = await repository.lookup_branch("side")
            seen = f"get {key}" in looks
            assert seen or "put repo" not in looks
            assert tip == old.branches["main" if seen else "side"]
            outcomes.add("kept" if seen else "too late")
    assert outcomes == {"kept", "undone", "reported", "too late"}


async def test_main_is_deleted_before_all_other_refs(old: OldRepository) -> None:
    """The rest of an interrupted deletion does not pass for a repository."""
    deleted: list[str] = []

    class Noting(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            if operation == "delete":
                deleted.append(key)

    async with copied(old) as storage:
        await upgrade(Noting(storage))
    assert deleted[0] == "refs/branch.main/ref.json"
    assert len(deleted) == 2


async def test_closed_branches_without_a_repo_info_are_opened_again(old: OldRepository) -> None:
    """A branch that a late write closed after the migration was undone is opened again."""
    async with copied(old) as storage:
        key = "refs/branch.main/ref.json"
        await storage.put(key, encode_closed_ref(old.branches["main"]))
        with pytest.raises(FormatError, match="upgrade"):
            async with Repository.open(storage):
                pass
        assert (await upgrade(storage, dry_run=True)).resumed
        assert (await upgrade(storage)).resumed
        await check_migrated(storage, old)


async def test_a_missing_snapshot_refuses_the_migration(old: OldRepository) -> None:
    """Nothing changes if a branch cannot be read."""
    del old.objects[snapshot_key(old.branches["side"])]
    async with copied(old) as storage:
        with pytest.raises(SnapshotNotFoundError, match=str(old.branches["side"])):
            await upgrade(storage)
        assert await objects(storage) == old.objects


async def test_migration_ignores_damaged_unreachable_snapshots(old: OldRepository) -> None:
    """Garbage does not stop a migration."""
    old.objects[snapshot_key(SnapshotId.random())] = b"damaged"
    old.objects["snapshots/no-id"] = b""
    async with copied(old) as storage:
        assert (await upgrade(storage)).snapshots == 4
        await check_migrated(storage, old)


def test_snapshots_are_read_many_at_a_time() -> None:
    """A long line of commits costs a few rounds of requests, not one a commit."""

    async def scenario() -> float:
        url = memory_url()
        async with Repository.create(url, spec_version=1) as repository:
            for number in range(60):
                session = await repository.writable_session("main")
                await session.commit(f"{number}", allow_empty=True)
        async with open_storage(url) as plain:
            slow = LatencyStorage(plain, seconds=1)
            assert (await upgrade(slow)).snapshots == 61
            assert slow.requests["get"] < 61 + 20
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(scenario()) < 30


async def test_migration_of_empty_location_is_refused() -> None:
    """There is nothing to migrate."""
    for dry_run in (True, False):
        with pytest.raises(RepositoryNotFoundError):
            await upgrade(memory_url(), dry_run=dry_run)


@pytest.mark.parametrize("keep", [False, True], ids=["deleted", "kept"])
async def test_old_handle_collects_nothing_of_a_migrated_repository(*, keep: bool) -> None:
    """The old refs are gone or outdated, so they do not say which objects are needed."""
    old = await make_old()
    async with copied(old) as storage, Repository.open(storage) as before:
        await upgrade(storage, delete_unused_v1_files=not keep)
        async with Repository.open(storage) as after:
            await commit(after, "main", 6)
        contents = await objects(storage)
        with pytest.raises(ConflictError, match="migrated"):
            await before.garbage_collect(datetime.now(UTC))
        with pytest.raises(ConflictError, match="migrated"):
            await before.expire_snapshots(datetime.now(UTC), delete_expired_branches=True)
        with pytest.raises(ConflictError, match="migrated"):
            await before.chunk_storage_stats()
        assert await objects(storage) == contents


async def test_garbage_is_collected_beside_a_migration_without_harm() -> None:
    """The migration may fall between any two requests of the collection."""
    old = await make_old()
    for at in count():
        async with copied(old) as plain:

            async def migrate(storage: Storage = plain) -> None:
                await upgrade(storage)

            storage = _Interrupted(plain, 1 << 32, migrate)
            async with Repository.open(storage) as before:
                storage.left = at
                with suppress(ConflictError, FormatError):
                    await before.garbage_collect(datetime.now(UTC))
                acted = storage.acted
            if not acted:
                assert at > 10
                break
            await check_migrated(plain, old)


async def test_a_repository_that_was_removed_is_not_garbage() -> None:
    """Its ref files are gone, and perhaps they are just being moved."""
    old = await make_old()
    async with copied(old) as storage, Repository.open(storage) as before:
        await storage.delete([key for key in old.objects if key.startswith("refs/")])
        contents = await objects(storage)
        with pytest.raises(RepositoryNotFoundError, match="removed"):
            await before.garbage_collect(datetime.now(UTC))
        assert await objects(storage) == contents

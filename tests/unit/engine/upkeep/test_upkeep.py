"""Expiration and garbage collection: what goes, what stays, what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.collect import GarbageReport
from icechunk_async.errors import (
    FeatureDisabledError,
    FormatError,
    InvalidInputError,
    RepositoryReadOnlyError,
    SnapshotNotFoundError,
    TagDeletedError,
    UnsafeStorageError,
)
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.operations_log import (
    Availability,
    ExpirationRan,
    GarbageCollectionRan,
    RepoStatus,
)
from icechunk_async.format.repo_info import decode_repo_info, encode_repo_info
from icechunk_async.storage import Capabilities, ObjectInfo, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import objects, write
from tests.unit.engine.upkeep.upkeep_tools import (
    CHUNK,
    commit,
    folders,
    littered,
    now,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async._runtime.progress import Progress
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import ListEntry


async def written_at(repository: Repository, snapshot_id: SnapshotId) -> int:
    """Return when a snapshot was made, in microseconds."""
    return (await repository.lookup_snapshot(snapshot_id)).flushed_at


async def test_collection_deletes_garbage_only(spec: int) -> None:
    """Lost commits, detached and abandoned work are counted, deleted, and then gone."""
    url, _ = await littered(spec)
    before = await read_all(url)
    async with Repository.open(url) as repository:
        census = await folders(repository.storage)
        promised = await repository.garbage_collect(now(), dry_run=True)
        assert await folders(repository.storage) == census
        report = await repository.garbage_collect(now())
        assert report == promised
        left = await folders(repository.storage)
        detached = spec == 2
        assert report.snapshots_deleted == 2 + detached
        assert report.transaction_logs_deleted == 2 + detached
        assert report.manifests_deleted == 2 + detached
        assert report.chunks_deleted == 3 + detached
        assert (report.attributes_deleted, report.failures, report.skipped_phases) == (0, (), ())
        for folder, count in (
            ("snapshots", report.snapshots_deleted),
            ("transactions", report.transaction_logs_deleted),
            ("manifests", report.manifests_deleted),
            ("chunks", report.chunks_deleted),
        ):
            assert census[folder] - left[folder] == count
        assert await repository.garbage_collect(now()) == GarbageReport()
    assert await read_all(url) == before


async def test_report_counts_bytes_of_deleted_objects(spec: int) -> None:
    """The report equals the decrease of the storage."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:

        async def size() -> int:
            found = await objects(repository.storage)
            kept = ("repo", "overwritten/", "refs/")
            return sum(len(data) for key, data in found.items() if not key.startswith(kept))

        before = await size()
        report = await repository.garbage_collect(now())
        assert report.bytes_deleted == before - await size() > 0


async def test_collection_spares_objects_not_older_than_cutoff(spec: int) -> None:
    """The age of each object counts, and that of snapshots decides whether they stay known."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        cutoff = now() - timedelta(hours=1)
        before = await objects(repository.storage)
        assert await repository.garbage_collect(cutoff) == GarbageReport()
        after = await objects(repository.storage)
        assert {key for key in before if key not in after} == set()
        moment = now()
        session = await repository.writable_session("main")
        await write(session, "a/c/40", CHUNK)
        report = await repository.garbage_collect(moment)
        assert report.chunks_deleted == (4 if spec == 2 else 3)
        await session.commit("was under way")
    await read_all(url)


async def test_a_cutoff_in_the_future_is_refused(spec: int) -> None:
    """It would delete what others write at this moment, or drop history whatever its age."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        before = await objects(repository.storage)
        for dry_run in (True, False):
            with pytest.raises(InvalidInputError, match=r"is in the future.*timedelta"):
                await repository.expire_snapshots(now() + timedelta(seconds=60), dry_run=dry_run)
            with pytest.raises(InvalidInputError, match="is in the future"):
                await repository.expire_snapshots(timedelta(days=-1), dry_run=dry_run)
            with pytest.raises(InvalidInputError, match="in the future"):
                await repository.garbage_collect(now() + timedelta(seconds=60), dry_run=dry_run)
        with pytest.raises(InvalidInputError, match="at least 1"):
            await repository.garbage_collect(now(), max_snapshots_in_memory=0)
        with pytest.raises(InvalidInputError, match="at least 1"):
            await repository.chunk_storage_stats(max_concurrent_manifest_fetches=0)
        assert await objects(repository.storage) == before


class Behind(WrappedStorage):
    """Its clock goes wrong."""

    by = timedelta(hours=2)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List what is there, with its own times."""
        async for entry in super().list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            if isinstance(entry, ObjectInfo):
                yield replace(entry, last_modified=entry.last_modified - self.by)
            else:
                yield entry


async def test_a_cutoff_that_the_storage_has_not_reached_is_refused(spec: int) -> None:
    """Its clock is behind ours: what is being written would count as old."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(Behind(plain)) as repository:
        before = await objects(plain)
        with pytest.raises(InvalidInputError, match="clock of the storage"):
            await repository.garbage_collect(now() - timedelta(hours=1))
        assert await objects(plain) == before


async def test_a_collector_whose_clock_is_ahead_is_refused(spec: int) -> None:
    """A cutoff that it counts back from its time protects less than was asked for."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(Behind(plain)) as repository:
        before = await objects(plain)
        with pytest.raises(InvalidInputError, match="counted back"):
            await repository.garbage_collect(now() - timedelta(hours=2))
        assert await objects(plain) == before


async def test_clocks_may_differ_by_minutes(spec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of most machines do."""
    monkeypatch.setattr(Behind, "by", timedelta(minutes=4))
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(Behind(plain)) as repository:
        report = await repository.garbage_collect(now() - timedelta(minutes=4))
        assert report.chunks_deleted > 0


async def test_collection_leaves_foreign_objects_alone(spec: int) -> None:
    """Backups, and objects whose name is not an id."""
    url, _ = await littered(spec)
    strange = ["chunks/README", "chunks/0000000000000000000/x", "snapshots/lower", "other/1"]
    async with Repository.open(url) as repository:
        for key in strange:
            await repository.storage.put(key, b"strange")
        before = await objects(repository.storage)
        await repository.garbage_collect(now())
        after = await objects(repository.storage)
        assert set(strange) <= after.keys()
        backups = {key for key in before if key.startswith("overwritten/")}
        assert backups <= after.keys()


@pytest.mark.parametrize("refs", ["kept", "deleted"])
async def test_expiration_drops_old_snapshots_except_tips(spec: int, refs: str) -> None:
    """Dropped snapshots are in no ancestry, and the next collection deletes their objects."""
    url, line = await littered(spec)
    before = await read_all(url)
    async with Repository.open(url) as repository:
        await repository.create_tag("t", line[1])
        moment = (await repository.lookup_snapshot(line[4])).written_at
        delete = refs == "deleted"
        options = {"delete_expired_tags": delete, "delete_expired_branches": delete}
        planned = await repository.expire_snapshots(moment, dry_run=True, **options)
        assert [info.id async for info in repository.ancestry(branch="main")] == line[::-1]
        expired = await repository.expire_snapshots(moment, **options)
        assert expired == planned
        assert {line[2], line[3]} <= expired
        assert expired.isdisjoint({line[0], line[4]})
        assert (line[1] in expired) == (delete or spec == 1)
        main = [info.id async for info in repository.ancestry(branch="main")]
        assert main == [line[4], line[0]]
        tags = await repository.list_tags()
        assert tags == (set() if delete else {"t"})
        assert await repository.list_branches() == {"main", "side"}  # its tip is recent
        await repository.garbage_collect(now())
        with pytest.raises(SnapshotNotFoundError):
            await repository.readonly_session(snapshot_id=line[3])
        if delete:
            with pytest.raises(TagDeletedError):
                await repository.create_tag("t", line[4])
    after = await read_all(url)
    assert after == {snapshot: before[snapshot] for snapshot in after}
    assert str(line[4]) in after


async def test_expired_branches_are_deleted_if_asked(spec: int) -> None:
    """The branch main stays, however old it is."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository:
        await repository.create_branch("old", line[2])
        expired = await repository.expire_snapshots(now(), delete_expired_branches=True)
        assert await repository.list_branches() == {"main"}
        main = [info.id async for info in repository.ancestry(branch="main")]
        assert main == [line[4], line[0]]
        assert line[2] in expired
    await read_all(url)


async def test_commits_work_after_expiration_and_collection(spec: int) -> None:
    """From a handle that saw it all, and from one that was open before."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository, Repository.open(url) as other:
        session = await other.writable_session("main")
        await write(session, "a/c/50", CHUNK)
        await repository.expire_snapshots(now())
        await repository.garbage_collect(now() - timedelta(seconds=10))
        await session.commit("started before")
        await commit(repository, 51, "after")
        await commit(other, 52, "after")
    await read_all(url)


async def test_a_handle_from_before_follows_the_shortened_history(spec: int) -> None:
    """Its cached snapshot of format 1 names a parent that is gone."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository, Repository.open(url) as other:
        await other.readonly_session("main")
        await repository.expire_snapshots((await repository.lookup_snapshot(line[4])).written_at)
        await repository.garbage_collect(now())
        await commit(repository, 53, "after")
        seen = [info.id async for info in other.ancestry(branch="main")]
        assert seen[1:] == [line[4], line[0]]


async def test_diffs_over_the_gap_stay_right_in_format_2() -> None:
    """The logs of what expired are remembered, also by a second expiration, and kept."""
    url, line = await littered(2)
    async with Repository.open(url) as repository:
        whole = await repository.diff(from_snapshot_id=line[0], to_branch="main")
        for snapshot_id in (line[3], line[4]):
            moment = (await repository.lookup_snapshot(snapshot_id)).written_at
            await repository.expire_snapshots(moment)
            await repository.garbage_collect(now())
            now_seen = await repository.diff(from_snapshot_id=line[0], to_branch="main")
            assert now_seen.new_arrays == whole.new_arrays
            assert {path: len(it) for path, it in now_seen.updated_chunks.items()} == {"/a": 4}
        info = await repository.lookup_snapshot(line[4])
        assert info.pruned_ancestor_logs == tuple(line[1:4])


async def test_operations_log_records_expiration_and_collection() -> None:
    """Each run is an entry, also one that finds nothing."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        await repository.expire_snapshots(now())
        await repository.garbage_collect(now())
        details = [update.detail async for update in repository.ops_log()]
        assert details[:2] == [GarbageCollectionRan(), ExpirationRan()]


async def _edit(repository: Repository, **changes: Any) -> None:
    """Change the repo info as an administrator would."""
    raw = (await repository.storage.get("repo")).data
    info = replace(decode_repo_info(unpack(raw, FileType.REPO_INFO)), **changes)
    packed = pack(encode_repo_info(info), FileType.REPO_INFO, 2)
    await repository.storage.put("repo", packed)


async def test_upkeep_refuses_a_repository_that_is_not_online() -> None:
    """It refuses even a dry run. Counting works."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        await _edit(repository, status=RepoStatus(Availability.READ_ONLY, 1, "moving house"))
        before = await objects(repository.storage)
        for dry_run in (True, False):
            with pytest.raises(RepositoryReadOnlyError, match="moving house"):
                await repository.garbage_collect(now(), dry_run=dry_run)
            with pytest.raises(RepositoryReadOnlyError, match="moving house"):
                await repository.expire_snapshots(now(), dry_run=dry_run)
        assert (await repository.chunk_storage_stats()).native_bytes > 0
        assert await objects(repository.storage) == before


async def test_tags_that_may_not_be_deleted_are_not() -> None:
    """The feature flag also holds for expiration; without tags to delete it does not matter."""
    url, line = await littered(2)
    async with Repository.open(url) as repository:
        await _edit(repository, disabled_flags=(5,))
        await repository.expire_snapshots(now() - timedelta(days=1), delete_expired_tags=True)
        await repository.create_tag("t", line[2])
        with pytest.raises(FeatureDisabledError, match="delete_tag"):
            await repository.expire_snapshots(now(), delete_expired_tags=True)
        assert await repository.list_tags() == {"t"}
        await repository.expire_snapshots(now())


class _Unsafe(WrappedStorage):
    """Promises less than commits need."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_update=False, reasons={"conditional_update": "no locks"})


async def test_unsafe_storage_is_refused_unless_nothing_changes(spec: int) -> None:
    """Dry runs and counting only read."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain, Repository.open(_Unsafe(plain)) as repository:
        with pytest.raises(UnsafeStorageError):
            await repository.garbage_collect(now())
        with pytest.raises(UnsafeStorageError):
            await repository.expire_snapshots(now())
        assert (await repository.garbage_collect(now(), dry_run=True)).chunks_deleted
        assert await repository.expire_snapshots(now(), dry_run=True)


@pytest.mark.parametrize("folder", ["snapshots", "manifests"])
async def test_a_damaged_repository_is_left_alone(spec: int, folder: str) -> None:
    """Nothing is deleted if the set of needed files is unknown."""
    url, line = await littered(spec)
    async with Repository.open(url) as repository:
        keys = [key for key in await objects(repository.storage) if key.startswith(folder)]
        needed = [f"snapshots/{line[1]}"] if folder == "snapshots" else keys
        for key in needed:
            await repository.storage.delete([key])
        before = await objects(repository.storage)
        with pytest.raises((FormatError, SnapshotNotFoundError)):
            await repository.garbage_collect(now())
        assert await objects(repository.storage) == before


async def test_progress_of_each_phase_reaches_its_total(spec: int) -> None:
    """Every phase, with numbers that do not decrease and reach the total."""
    url, _ = await littered(spec)
    told: list[Progress] = []
    async with Repository.open(url) as repository:
        await repository.garbage_collect(now(), progress=told.append)
    phases = {
        "reading snapshots",
        "reading manifests",
        "deleting snapshots",
        "deleting transactions",
        "deleting manifests",
        "deleting chunks",
    }
    assert {it.phase for it in told} == phases
    for phase in phases:
        numbers = [it.done for it in told if it.phase == phase]
        assert numbers == sorted(numbers)
    last = [it for it in told if it.phase == "reading manifests"][-1]
    assert last.done == last.total

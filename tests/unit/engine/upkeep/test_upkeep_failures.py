"""Deletions that fail, replies that are lost, callers that lose patience."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig, StorageRetriesSettings, StorageSettings
from icechunk_async.errors import (
    OutcomeUnknownError,
    PermissionDeniedError,
)
from icechunk_async.format.layout import COLLECTIONS
from icechunk_async.format.operations_log import ExpirationRan, GarbageCollectionRan
from icechunk_async.storage import DeleteFailure, open_storage
from icechunk_async.storage.probe import PROBE_PREFIX
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url, objects
from tests.unit.engine.upkeep.upkeep_tools import littered, now, read_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.engine.upkeep.collect import GarbageReport
    from icechunk_async.storage import Data, Expected, Storage, Version

ONE_TRY = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))


class Stubborn(WrappedStorage):
    """Does not delete some of the objects, or answers nothing at all."""

    def __init__(self, storage: Storage, keep: Iterable[str], *, raises: bool) -> None:
        super().__init__(storage)
        self.keep = set(keep)
        self.raises = raises

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete the others."""
        doomed = list(keys)
        mine = sorted(self.keep.intersection(doomed))
        if mine and self.raises:
            raise PermissionDeniedError("no")
        await self.wrapped.delete([key for key in doomed if key not in self.keep])
        return [DeleteFailure(key, PermissionDeniedError("on hold")) for key in mine]


FOLDERS = ["snapshots", "transactions", "manifests", "chunks"]


@pytest.mark.sampled
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("raises", [False, True])
async def test_a_failed_deletion_is_reported_and_later_phases_wait(
    spec: int, folder: str, *, raises: bool
) -> None:
    """Objects that stay may refer to later folders; the next run deletes all of it."""
    url, _ = await littered(spec)
    async with Repository.open(url) as repository:
        everything = await objects(repository.storage)
        promised = await repository.garbage_collect(now(), dry_run=True)
    async with open_storage(url) as plain:
        needed = await _needed(everything, spec)
        victim = next(key for key in everything if key.startswith(folder) and key not in needed)
        storage = Stubborn(plain, [victim], raises=raises)
        async with Repository.open(storage, config=ONE_TRY) as repository:
            report = await repository.garbage_collect(now())
            failed = {it.key: it.error for it in report.failures}
            assert victim in failed
            assert raises or list(failed) == [victim]
            assert isinstance(failed[victim], PermissionDeniedError)
            place = FOLDERS.index(folder)
            assert report.skipped_phases == (*FOLDERS[place + 1 :], "sums")
            left = await objects(plain)
            for later in FOLDERS[place + 1 :]:
                before = {key for key in everything if key.startswith(later)}
                assert before == {key for key in left if key.startswith(later)}
            first_deleted = _total(report)
            await read_all(plain)
            storage.keep.clear()
            rest = await repository.garbage_collect(now())
            assert first_deleted + _total(rest) == _total(promised)
            assert report.bytes_deleted + rest.bytes_deleted == promised.bytes_deleted
            assert (rest.failures, rest.skipped_phases) == ((), ())
        await read_all(plain)


def _total(report: GarbageReport) -> int:
    return (
        report.snapshots_deleted
        + report.transaction_logs_deleted
        + report.manifests_deleted
        + report.chunks_deleted
    )


async def _needed(everything: dict[str, bytes], spec: int) -> set[str]:
    """Return the keys of a copy after it was collected."""
    del spec
    async with open_storage(memory_url()) as plain:
        for key, data in everything.items():
            await plain.put(key, data)
        async with Repository.open(plain) as repository:
            await repository.garbage_collect(now())
        return set(await objects(plain))


async def test_collection_gives_up_a_folder_full_of_failures(spec: int) -> None:
    """A million failures of one kind are not worth a million requests."""
    url, _ = await littered(spec)
    async with open_storage(url) as plain:
        strays = [f"chunks/{number:019d}0" for number in range(15_000)]
        for key in strays:
            await plain.put(key, b"")
        storage = Stubborn(plain, strays, raises=False)
        async with Repository.open(storage, config=ONE_TRY) as repository:
            report = await repository.garbage_collect(now())
        # The first ten thousand are listed before the first of them is deleted.
        assert 1000 <= len(report.failures) <= 10_000


class Lossy(WrappedStorage):
    """Loses the replies to writes of references and snapshots, a number of times."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.lose = 0
        self.apply = True

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write or not, and say nothing."""
        if self.lose and key.startswith(("repo", "snapshots/", "refs/")):
            self.lose -= 1
            if self.apply:
                await self.wrapped.put(key, data, if_version=if_version)
            raise OutcomeUnknownError("no reply")
        return await self.wrapped.put(key, data, if_version=if_version)


@pytest.mark.parametrize("apply", [True, False], ids=["landed", "lost"])
async def test_lost_replies_change_nothing(spec: int, *, apply: bool) -> None:
    """The same is dropped and deleted as without them, and the log tells of it once."""
    url, line = await littered(spec)
    async with open_storage(url) as plain:
        copy = memory_url()
        async with open_storage(copy) as second:
            for key, data in (await objects(plain)).items():
                await second.put(key, data)
            storage = Lossy(second)
            async with (
                Repository.open(plain) as calm,
                Repository.open(storage) as repository,
            ):
                for one in (calm, repository):
                    await one.create_tag("t", line[2])
                moment = (await calm.lookup_snapshot(line[4])).written_at
                expected = await calm.expire_snapshots(moment, delete_expired_tags=True)
                storage.lose, storage.apply = 1, apply
                expired = await repository.expire_snapshots(moment, delete_expired_tags=True)
                assert expired == expected
                assert storage.lose == 0
                report = await calm.garbage_collect(now())
                storage.lose = int(spec == 2)  # under spec 1 no reference is written
                again = await repository.garbage_collect(now())
                assert (again.snapshots_deleted, again.chunks_deleted) == (
                    report.snapshots_deleted,
                    report.chunks_deleted,
                )
                assert storage.lose == 0
                if spec == 2:
                    details = [type(update.detail) async for update in repository.ops_log()]
                    assert details[:2] == [GarbageCollectionRan, ExpirationRan]
                    assert details.count(GarbageCollectionRan) == 1
                    assert details.count(ExpirationRan) == 1
            assert (await objects(second)).keys() - {*_backups(await objects(second))} == (
                await objects(plain)
            ).keys() - {*_backups(await objects(plain))}
        assert await read_all(copy) == await read_all(url)


def _backups(found: dict[str, bytes]) -> list[str]:
    return [key for key in found if key.startswith(("overwritten/", COLLECTIONS))]


OTHERS = ("overwritten/", COLLECTIONS, PROBE_PREFIX)
"""Backups, notes of collections, and an object that was to tell the time when its deletion was
cancelled."""


class Slow(WrappedStorage):
    """Takes a turn of the event loop before each request is carried out, and one after."""

    async def before(self, operation: str, key: str) -> None:
        """Be on the way there."""
        await anyio.lowlevel.checkpoint()

    async def after(self, operation: str, key: str) -> None:
        """Be on the way back: what was asked for is done."""
        await anyio.lowlevel.checkpoint()


async def test_cancelled_at_any_moment_the_repository_is_whole_and_the_next_run_finishes(
    spec: int,
) -> None:
    """Expiration and collection, one after the other, on a fresh copy each time."""
    url, line = await littered(spec)
    async with open_storage(url) as plain:
        contents = await objects(plain)
    places: list[str] = []
    outcome: set[frozenset[str]] = set()

    async def begin(attempt: int) -> None:
        del attempt
        places.append(memory_url())
        async with open_storage(places[-1]) as plain:
            for key, data in contents.items():
                await plain.put(key, data)
            async with Repository.open(Slow(plain)) as repository:
                await repository.expire_snapshots(now(), delete_expired_branches=True)
                await repository.garbage_collect(now())

    async def finish() -> None:
        async with Repository.open(places[-1]) as repository:
            await repository.expire_snapshots(now(), delete_expired_branches=True)
            await repository.garbage_collect(now())
            main = [info.id async for info in repository.ancestry(branch="main")]
            assert main == [line[4], line[0]]
            left = await objects(repository.storage)
            outcome.add(frozenset(it for it in left if not it.startswith(OTHERS)))
        await read_all(places[-1])

    async for attempt in at_every_wait(begin):
        assert asyncio.all_tasks() == {asyncio.current_task()}
        if len(await _listed(places[-1])) < len(contents):
            continue  # cancelled before the copy was opened
        if attempt % 3 == 0:  # every third will do: there are hundreds
            await finish()
    await finish()
    assert len(outcome) == 1


async def _listed(url: str) -> list[str]:
    async with open_storage(url) as plain:
        return list(await objects(plain))

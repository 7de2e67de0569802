"""Remains of killed processes: a check counts them, and collection removes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.errors import StorageUnavailableError
from icechunk_async.storage import open_storage
from icechunk_async.storage.probe import PROBE_PREFIX
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import Leftovers
from tests.helpers import memory_url, objects
from tests.unit.engine.leases.lease_tools import HOUR, World
from tests.unit.engine.upkeep.copying.copy_tools import Breaking
from tests.unit.engine.upkeep.upkeep_tools import commit, littered

if TYPE_CHECKING:
    from pathlib import Path


class ReadOnly(WrappedStorage):
    """Refuses to change anything."""

    async def before(self, operation: str, key: str) -> None:
        """Refuse."""
        assert operation in ("get", "get_if_changed", "list_prefix"), (operation, key)


async def left_at(url: str) -> Leftovers:
    """Check a repository without writing to it."""
    async with open_storage(url) as storage, Repository.open(ReadOnly(storage)) as repository:
        report = await repository.check_references()
    assert report.is_whole
    return report.leftovers


@pytest.mark.parametrize("spec", [1, 2])
async def test_healthy_repositories_have_no_leftovers(spec: int) -> None:
    """Garbage does not count: a dry run of collection tells."""
    url, _ = await littered(spec)
    left = await left_at(url)
    assert left == Leftovers()
    assert left.advice == ()


async def test_unfinished_files_and_trials_are_counted_and_collected(tmp_path: Path) -> None:
    """On a local disk, whose listings do not show the former."""
    async with Repository.create(tmp_path) as repository:
        await commit(repository, 1, "one")
    (tmp_path / "manifests" / ".icechunk-tmp-x").write_bytes(bytes(100))
    (tmp_path / f"{PROBE_PREFIX}1").mkdir()
    (tmp_path / f"{PROBE_PREFIX}1" / "first").write_bytes(bytes(11))
    async with Repository.open(tmp_path) as repository:
        left = (await repository.check_references()).leftovers
    assert left == Leftovers(unfinished=2, unfinished_bytes=111)
    (advice,) = left.advice
    assert advice == (
        "2 file(s) of killed writers, 111 bytes: garbage collection removes those that are older "
        "than its cutoff"
    )
    async with Repository.open(tmp_path) as repository:
        early = await repository.garbage_collect(datetime.now(UTC) - timedelta(hours=1))
        assert (early.unfinished_deleted, early.bytes_deleted) == (0, 0)
        dry = await repository.garbage_collect(datetime.now(UTC), dry_run=True)
        done = await repository.garbage_collect(datetime.now(UTC))
    for report in (dry, done):
        assert (report.unfinished_deleted, report.bytes_deleted) == (2, 111)
    async with Repository.open(tmp_path) as repository:
        assert (await repository.check_references()).leftovers == Leftovers()


async def test_expired_sessions_are_counted_once_collection_takes_them_for_dead() -> None:
    """By this machine's clock and an hour; the storage is not written to for its own."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        await repository.writable_session("main", lease=timedelta(hours=2))
    for hours, count in ((2.9, 0), (3.1, 1)):
        world = World()
        world.now = datetime.now(UTC)
        with world.clock_wrong_by(HOUR * hours):
            left = await left_at(url)
        assert left == Leftovers(expired_sessions=count)
    assert "1 session(s) whose lease expired" in left.advice[0]


async def test_copies_that_were_stopped_are_named_and_no_others() -> None:
    """A copy that somebody committed to afterwards was not stopped."""
    url, _ = await littered(2)
    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        await copy_repository(source, destination)
        assert await left_at(copy) == Leftovers()
        async with Repository.open(url) as repository:
            await commit(repository, 9, "more")
        before = await objects(destination)
        for writes in range(100):
            breaking = Breaking(destination)
            breaking.writes_left = writes
            try:
                await copy_repository(source, breaking)
            except StorageUnavailableError:
                stopped = writes > 0  # the first write is the note
                assert await left_at(copy) == Leftovers(stopped_copies=stopped)
            else:
                break
        assert writes > 2
        assert len(await objects(destination)) > len(before)
        assert await left_at(copy) == Leftovers()
        async with Repository.open(copy) as repository:
            await commit(repository, 10, "on the copy")
        assert await left_at(copy) == Leftovers()

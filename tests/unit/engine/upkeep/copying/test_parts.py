"""Copies of chosen branches and tags, and of history from a time on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.engine.upkeep.copying.selection import Selection
from icechunk_async.errors import (
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    RepositoryExistsError,
    StorageUnavailableError,
)
from icechunk_async.storage import open_storage
from tests.helpers import memory_url, objects
from tests.unit.engine.upkeep.copying.copy_tools import Breaking, Busy, Counting, shown_by
from tests.unit.engine.upkeep.upkeep_tools import commit, littered, now, read_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.format.ids import SnapshotId


async def line_of(url: str, branch: str = "main") -> list[SnapshotId]:
    """Return the snapshots of a branch, the newest first."""
    async with Repository.open(url) as repository:
        return [it.id async for it in repository.ancestry(branch=branch)]


async def is_whole(url: str) -> bool:
    """Check a repository, and return whether a collection of its garbage finds any."""
    async with Repository.open(url) as repository:
        assert (await repository.check_references()).is_whole
        found = await repository.garbage_collect(now() + timedelta(0), dry_run=True)
        return found.chunks_deleted + found.manifests_deleted + found.snapshots_deleted == 0


async def test_copy_of_a_branch_holds_its_history_and_nothing_else(spec: int) -> None:
    """Ids and bytes are those of the source; other branches leave no object behind."""
    url, _ = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy, refs=["main"])
        assert await line_of(copy) == await line_of(url)
    async with Repository.open(copy) as repository:
        assert await repository.list_branches() == {"main"}
    async with open_storage(url) as source, open_storage(copy) as destination:
        theirs, ours = await objects(source), await objects(destination)
        shared = {key for key in ours if key.startswith(("chunks/", "manifests/", "snapshots/"))}
        assert {key: bytes(ours[key]) for key in shared} == {
            key: bytes(theirs[key]) for key in shared
        }
        assert len(shared) < len([key for key in theirs if key.partition("/")[1]])
    assert await is_whole(copy)


async def test_copy_without_main_has_main_at_the_first_snapshot(spec: int) -> None:
    """Every repository has a main."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.create_tag("v1", line[1])
        await repository.copy_to(copy, refs=("v1",))
    assert await line_of(copy) == [line[0]]
    async with Repository.open(copy) as repository:
        assert await repository.lookup_tag("v1") == line[1]
        await commit(repository, 3, "the copy takes commits")


async def test_copy_from_a_time_on_is_like_one_that_was_expired(spec: int) -> None:
    """The oldest snapshot that is kept becomes a child of the first one."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy, since=line[3])
        moment = (await repository.lookup_snapshot(line[3])).written_at
        await repository.expire_snapshots(moment)
    assert await line_of(copy) == [line[4], line[3], line[0]]
    assert await line_of(copy, "side") == await line_of(url, "side")
    shown = await read_all(copy)
    assert shown.items() <= (await read_all(url)).items()
    assert str(line[2]) not in shown
    async with Repository.open(copy) as repository:
        await repository.diff(from_snapshot_id=line[0], to_snapshot_id=line[4])
        assert (await repository.check_references()).is_whole


async def test_since_as_a_time_and_as_a_snapshot_agree(spec: int) -> None:
    """A snapshot stands for the time at which it was written."""
    url, line = await littered(spec)
    first, second = memory_url(), memory_url()
    async with Repository.open(url) as repository:
        moment = (await repository.lookup_snapshot(line[3])).written_at
        await repository.copy_to(first, since=str(line[3]))
        await repository.copy_to(second, since=moment)
    async with open_storage(first) as one, open_storage(second) as other:
        assert await objects(one) == await objects(other)


async def test_a_window_that_moves_drops_and_brings_back_history(spec: int) -> None:
    """Nightly copies of the last days; an earlier time brings older snapshots again."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy, refs=["main"], since=line[2])
        assert await line_of(copy) == [line[4], line[3], line[2], line[0]]
        await commit(repository, 40, "later")
        tip = await repository.lookup_branch("main")
        await repository.copy_to(copy, refs=["main"], since=line[4])
        assert await line_of(copy) == [tip, line[4], line[0]]
        await repository.copy_to(copy, refs=["main"])
        assert await line_of(copy) == [tip, *line[::-1]]
    assert (await read_all(copy)).items() <= (await read_all(url)).items()
    async with Repository.open(copy) as repository:
        assert (await repository.check_references()).is_whole


async def test_unchanged_part_costs_three_requests(spec: int) -> None:
    """Besides reading the references of format version 1."""
    url, _ = await littered(spec)
    selection = Selection.of(["main"], None)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        await copy_repository(source, destination, selection)
        ours, theirs = Counting(source), Counting(destination)
        report = await copy_repository(ours, theirs, selection)
        assert (report.objects_copied, report.refs) == (0, ())
        requests = [*ours.requests, *theirs.requests]
        assert {operation for operation, _ in requests} <= {"get", "list_prefix"}
        if spec == 2:
            assert len(requests) == 3


async def test_names_that_do_not_exist_are_refused_before_anything_is_written(spec: int) -> None:
    """The error lists those that do."""
    url, _ = await littered(spec)
    async with open_storage(memory_url()) as destination, Repository.open(url) as repository:
        with pytest.raises(NotFoundError, match=r"'nope' to copy.*main, side") as caught:
            await repository.copy_to(destination, refs=["main", "nope"])
        assert caught.value.context["ref"] == "nope"
        wrongs: tuple[Iterable[str], ...] = ("main", ())
        for wrong in wrongs:
            with pytest.raises(InvalidInputError, match="collection of names"):
                await repository.copy_to(destination, refs=wrong)
        with pytest.raises(InvalidInputError, match="no time zone"):
            await repository.copy_to(destination, since=datetime(2026, 1, 1))
        assert not await objects(destination)


async def test_fewer_refs_than_before_are_refused_unless_the_rest_is_to_go() -> None:
    """A backup does not lose branches because an argument was forgotten."""
    url, _ = await littered(2)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy)
        with pytest.raises(RepositoryExistsError, match=r"branches and tags all.*discard_changes"):
            await repository.copy_to(copy, refs=["main"])
        report = await repository.copy_to(copy, refs=["main"], discard_changes=True)
        assert [(it.name, it.change) for it in report.refs] == [("side", "deleted")]
        await repository.copy_to(copy)
    assert await read_all(copy) == await read_all(url)


async def test_part_killed_at_a_write_is_whole_and_continued(spec: int) -> None:
    """Every third write. The destination shows nothing until the last one."""
    url, line = await littered(spec)
    part = Selection.of(["main"], None)
    async with open_storage(url) as source:

        async def killed_after(writes: int) -> bool:
            """Copy until then; return whether it was killed."""
            copy = memory_url()
            async with open_storage(copy) as destination:
                breaking = Breaking(destination)
                breaking.writes_left = writes
                try:
                    await copy_repository(source, breaking, part)
                except StorageUnavailableError:
                    assert await shown_by(copy) == {}
                    again = await copy_repository(source, destination, part)
                    assert again.objects_copied
                    killed = True
                else:
                    killed = False
                assert await line_of(copy) == line[::-1]
                assert await is_whole(copy)
            return killed

        writes = 0
        while await killed_after(writes):
            writes += 3
        assert writes > 12


async def test_collection_meanwhile_leads_to_a_part_of_the_newer_state(spec: int) -> None:
    """Objects that vanish from the source are never referred to."""
    url, _ = await littered(spec)
    copy = memory_url()
    async with (
        open_storage(url) as source,
        open_storage(copy) as destination,
        Repository.open(url) as repository,
    ):

        async def collect() -> None:
            await repository.expire_snapshots(datetime.now(UTC))
            await repository.garbage_collect(now())

        busy = Busy(source, ("get", "chunks/"), collect)
        await copy_repository(busy, destination, Selection.of(["main"], None))
    assert await line_of(copy) == await line_of(url)
    assert (await read_all(copy)).items() <= (await read_all(url)).items()


async def test_damaged_source_is_not_shown() -> None:
    """A chunk that was lost is no reason to make the last good copy a bad one."""
    url, _ = await littered(2)
    copy = memory_url()
    async with open_storage(url) as source, Repository.open(url) as repository:
        await repository.copy_to(copy)
        before = await read_all(copy)
        chunks = {key for key in await objects(source) if key.startswith("chunks/")}
        await commit(repository, 60, "later")
        new = {key for key in await objects(source) if key.startswith("chunks/")} - chunks
        await source.delete(new)
        with pytest.raises(ObjectNotFoundError, match="is damaged"):
            await repository.copy_to(copy)
    assert await read_all(copy) == before


async def test_operations_log_of_a_part_names_no_other_branch() -> None:
    """It begins anew, and can be read."""
    url, _ = await littered(2)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy, refs=["main"])
        theirs = [str(it) async for it in repository.ops_log()]
    async with Repository.open(copy) as repository:
        ours = [str(it) async for it in repository.ops_log()]
    assert any("side" in it for it in theirs)
    assert ours
    assert not any("side" in it or "lost" in it for it in ours)

"""Copies that are repeated: what they cost, and what becomes of changes on either side."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.errors import RepositoryExistsError, StorageUnavailableError
from icechunk_async.storage import open_storage
from tests.helpers import memory_url, objects
from tests.unit.engine.upkeep.copying.copy_tools import Breaking, Busy, Counting, stored
from tests.unit.engine.upkeep.upkeep_tools import commit, littered, now, read_all

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.storage import Storage


async def requests_of(source: Storage, destination: Storage) -> list[tuple[str, str]]:
    """Copy, and return the requests to both sides."""
    ours, theirs = Counting(source), Counting(destination)
    await copy_repository(ours, theirs)
    return [*ours.requests, *theirs.requests]


async def test_new_commits_cost_what_they_added_whatever_the_history() -> None:
    """No listing, and the same number of requests after twelve commits and after twenty-five."""
    url, _ = await littered(2)
    async with (
        open_storage(url) as source,
        open_storage(memory_url()) as destination,
        Repository.open(url) as repository,
    ):
        await copy_repository(source, destination)
        counts: list[int] = []
        for _ in range(2):
            for number in range(12):
                await commit(repository, 40 + number, f"before {number}")
            await copy_repository(source, destination)
            await commit(repository, 39, "one more")
            requests = await requests_of(source, destination)
            assert not [key for operation, key in requests if operation == "list_prefix"]
            counts.append(len(requests))
        assert counts[0] == counts[1] <= 30
        written = [it for it in await requests_of(source, destination) if it[0] == "put"]
        assert not written
        # The whole log can be read at the copy: its backups came as well.
        async with Repository.open(destination) as copy:
            theirs = [str(it) async for it in copy.ops_log()]
        assert theirs == [str(it) async for it in repository.ops_log()]


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"discard_changes": True}, {"refs": ["main"]}, {"since": timedelta(days=30)}),
        *({"paths": ["a"]}, {"shallow": True}, {"paths": ["a"], "shallow": True}),
    ],
    ids=str,
)
async def test_a_sync_of_an_unchanged_repository_costs_at_most_five_requests(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Of all kinds of copies, also by an age that is another time each night; nothing is listed."""
    async with Repository.create(tmp_path / "origin") as repository:
        await commit(repository, 1, "one")
        await commit(repository, 2, "two")
    async with open_storage(memory_url()) as target, open_storage(tmp_path / "origin") as origin:
        for night in range(3):
            given = dict(options)
            if "since" in given:
                given["since"] = datetime.now(UTC) - given["since"]
            ours, theirs = Counting(origin), Counting(target)
            async with Repository.open(ours) as repository:
                ours.requests.clear()
                report = await repository.copy_to(theirs, **given)
            requests = [*ours.requests, *theirs.requests]
            if night:
                assert report.objects_copied == 0
                assert len(requests) <= 5
                assert not [key for operation, key in requests if operation == "list_prefix"]


async def test_a_commit_copies_its_chunks_and_no_others() -> None:
    """Of a manifest that holds old references and a new one, only the new chunk is read."""
    url, _ = await littered(2)
    async with (
        open_storage(url) as source,
        open_storage(memory_url()) as destination,
        Repository.open(url) as repository,
    ):
        await copy_repository(source, destination)
        before = set(await objects(source))
        await commit(repository, 60, "later")
        new = {key for key in set(await objects(source)) - before if key.startswith("chunks/")}
        requests = await requests_of(source, destination)
        assert {key for _, key in requests if key.startswith("chunks/")} == new
        assert len(new) == 1


async def test_refs_that_were_reset_and_deleted_at_the_source_are_at_the_copy(spec: int) -> None:
    """The report names them; what only they used is garbage that a collection removes."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.create_tag("v1", line[1])
        await repository.copy_to(copy)
        tip = await repository.lookup_branch("side")
        await repository.reset_branch("main", line[2])
        await repository.delete_branch("side")
        await repository.delete_tag("v1")
        await repository.create_branch("new", line[1])
        report = await repository.copy_to(copy)
        assert [(it.kind, it.name, it.change, it.before, it.after) for it in report.refs] == [
            ("branch", "main", "moved", line[4], line[2]),
            ("branch", "new", "created", None, line[1]),
            ("branch", "side", "deleted", tip, None),
            ("tag", "v1", "deleted", line[1], None),
        ]
    shown = await read_all(copy)
    assert shown == await read_all(url)
    async with Repository.open(copy) as mirror:
        assert (await mirror.garbage_collect(now())).snapshots_deleted >= 3
        assert (await mirror.check_references()).is_whole
    assert await read_all(copy) == shown


async def test_changes_at_the_copy_are_named_and_refused(spec: int) -> None:
    """Commits, and new branches and tags. Nothing is written."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy)
        async with Repository.open(copy) as mirror:
            await commit(mirror, 50, "on the copy")
            await mirror.create_branch("mine", line[1])
            await mirror.create_tag("ours", line[1])
            before = await objects(mirror.engine.storage)
        await commit(repository, 51, "on the source")
        with pytest.raises(RepositoryExistsError) as caught:
            await repository.copy_to(copy)
        for words in ("branch 'main' was moved", "branch 'mine' was", "tag 'ours' was"):
            assert words in str(caught.value)
        assert str(caught.value.context["changes"]).count(" was ") == 3
        async with open_storage(copy) as storage:
            assert await objects(storage) == before


async def test_changes_at_the_copy_are_undone_if_that_is_asked_for(spec: int) -> None:
    """The report says what was undone, and the copy is a copy again."""
    url, line = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy)
        async with Repository.open(copy) as mirror:
            await commit(mirror, 50, "on the copy")
            await mirror.create_branch("mine", line[1])
        await commit(repository, 51, "on the source")
        report = await repository.copy_to(copy, discard_changes=True)
        assert len(report.discarded) == 2
        assert await read_all(copy) == await read_all(url)
        assert not (await repository.copy_to(copy)).objects_copied


async def test_configuration_that_was_changed_at_the_copy_is_named() -> None:
    """It would be lost."""
    url, _ = await littered(2)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy)
        async with Repository.open(copy) as mirror:
            await mirror.set_metadata({"owner": "us"})
        await commit(repository, 51, "on the source")
        with pytest.raises(RepositoryExistsError, match="configuration, metadata, status or flags"):
            await repository.copy_to(copy)


async def test_repository_that_no_copy_made_is_never_replaced(spec: int) -> None:
    """Nor is a copy of another one, also if changes are to be undone."""
    url, _ = await littered(spec)
    other, _ = await littered(spec)
    copy = memory_url()
    async with Repository.open(other) as repository:
        await repository.copy_to(copy)
    before = await read_all(copy)
    async with Repository.open(url) as repository:
        with pytest.raises(RepositoryExistsError, match="a copy of another repository"):
            await repository.copy_to(copy, discard_changes=True)
        with pytest.raises(RepositoryExistsError, match="it is no copy"):
            await repository.copy_to(other, discard_changes=True)
    assert await read_all(copy) == before


async def test_upkeep_of_the_copy_is_no_change_and_its_losses_come_back(spec: int) -> None:
    """Snapshots that were expired and collected there are copied again."""
    url, _ = await littered(spec)
    copy = memory_url()
    async with Repository.open(url) as repository:
        await repository.copy_to(copy)
        async with Repository.open(copy) as mirror:
            assert await mirror.expire_snapshots(now())
            await mirror.garbage_collect(now())
        await commit(repository, 51, "later")
        await repository.copy_to(copy)
        assert await read_all(copy) == await read_all(url)
        async with Repository.open(copy) as mirror:
            assert (await mirror.check_references()).is_whole


async def test_interrupted_update_is_continued_without_writing_chunks_again() -> None:
    """Listings tell what the killed one had brought."""
    url, _ = await littered(2)
    async with (
        open_storage(url) as source,
        open_storage(memory_url()) as destination,
        Repository.open(url) as repository,
    ):
        await copy_repository(source, destination)
        for number in range(5):
            await commit(repository, 60 + number, f"later {number}")
        breaking = Breaking(destination)
        breaking.writes_left = 6  # the note, and chunks
        with pytest.raises(StorageUnavailableError):
            await copy_repository(source, breaking)
        there = set(await objects(destination))
        counting = Counting(destination)
        await copy_repository(source, counting)
        written = {key for operation, key in counting.requests if operation == "put"}
        assert len([key for key in there if key.startswith("chunks/")]) >= 5
        assert not [key for key in written & there if key.startswith("chunks/")]
        assert {k: v for k, v in (await stored(destination)).items() if k == "repo"} == {
            k: v for k, v in (await stored(source)).items() if k == "repo"
        }
    async with Repository.open(url) as repository:
        assert (await repository.check_references()).is_whole


async def test_update_beside_a_collector_at_the_source_is_whole() -> None:
    """New snapshots that vanish while they are copied are left out."""
    url, line = await littered(2)
    copy = memory_url()
    async with (
        open_storage(url) as source,
        open_storage(copy) as destination,
        Repository.open(url) as repository,
    ):
        await copy_repository(source, destination)
        await commit(repository, 60, "later")
        await commit(repository, 61, "still later")

        async def collect() -> None:
            await repository.reset_branch("main", line[4])
            await repository.garbage_collect(now())

        await copy_repository(Busy(source, ("get", "manifests/"), collect), destination)
    assert await read_all(copy) == await read_all(url)
    async with Repository.open(copy) as mirror:
        assert (await mirror.check_references()).is_whole


async def test_part_that_becomes_whole_gets_the_whole_log() -> None:
    """All branches, and all backups of the operations log."""
    url, _ = await littered(2)
    async with (
        open_storage(url) as source,
        open_storage(memory_url()) as destination,
        Repository.open(url) as repository,
    ):
        await repository.copy_to(destination, refs=["side"])
        await copy_repository(source, destination)
        ours, theirs = await stored(source), await stored(destination)
        assert {k for k in ours if k.startswith("overwritten/")} <= theirs.keys()
        assert theirs["repo"] == ours["repo"]

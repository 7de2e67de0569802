"""Copies: equal byte for byte, whole at every moment, continued after a failure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.engine.upkeep.copying.selection import WHOLE, Selection
from icechunk_async.errors import (
    ConflictError,
    ObjectNotFoundError,
    RepositoryExistsError,
    RepositoryNotFoundError,
    StorageUnavailableError,
    UnsafeStorageError,
)
from icechunk_async.storage import Capabilities, open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url, objects
from tests.unit.engine.upkeep.copying.copy_tools import (
    MARK,
    Breaking,
    Busy,
    Counting,
    shown_by,
    stored,
)
from tests.unit.engine.upkeep.upkeep_tools import commit, littered, now, read_all

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.storage import (
        RangeRequest,
        Retrieved,
    )


@pytest.mark.parametrize("spec", [1, 2])
async def test_copy_holds_the_same_objects(spec: int) -> None:
    """Garbage included: it may belong to a session that is still open."""
    url, _ = await littered(spec)
    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        report = await copy_repository(source, destination)
        there = await stored(source)
        assert await stored(destination) == there
        assert report.objects_copied == len(there)
        assert report.bytes_copied == sum(map(len, there.values()))
    assert await read_all(copy) == await read_all(url)


async def test_copy_to_a_local_disk_opens_and_takes_commits(tmp_path: Path) -> None:
    """From one kind of storage to another."""
    url, _ = await littered(2)
    target = f"file://{tmp_path}/copy"
    async with Repository.open(url) as repository:
        phases: list[str] = []
        report = await repository.copy_to(target, progress=lambda it: phases.append(it.phase))
        assert report.objects_copied > 20
        assert list(dict.fromkeys(phases)) == [
            f"copying {folder}"
            for folder in ("chunks", "manifests", "transactions", "snapshots", "overwritten")
        ]
    assert await read_all(target) == await read_all(url)
    async with Repository.open(target) as repository:
        await commit(repository, 50, "on the copy")


@pytest.mark.parametrize("spec", [1, 2])
async def test_copy_of_an_unchanged_repository_looks_at_no_other_object(spec: int) -> None:
    """At most five requests besides listing references."""
    url, _ = await littered(spec)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        await copy_repository(source, destination)
        ours, theirs = Counting(source), Counting(destination)
        report = await copy_repository(ours, theirs)
        assert report.objects_copied == report.objects_skipped == 0
        requests = [*ours.requests, *theirs.requests]
        assert not [it for it in requests if it[0] == "put"]
        looked_at = {key.partition("/")[0] for operation, key in requests if operation == "get"}
        assert looked_at <= {"repo", "refs", "config.yaml", "copies"}
        if spec == 2:
            assert len(requests) <= 5


@pytest.mark.parametrize("spec", [1, 2])
async def test_copy_again_brings_only_what_is_new(spec: int) -> None:
    """It also drops branches that were deleted."""
    url, line = await littered(spec)
    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        first = await copy_repository(source, destination)
        async with Repository.open(url) as repository:
            await commit(repository, 60, "later")
            await repository.create_tag("v1", line[1])
            await repository.delete_branch("side")
        before = set(await stored(destination))
        counting = Counting(destination)
        report = await copy_repository(source, counting)
        assert 0 < report.objects_copied < first.objects_copied
        assert (report.objects_skipped > 0) == (spec == 1)
        written = {key for operation, key in counting.requests if operation == "put"} - {MARK}
        old = {it for it in written & before if it.startswith(("chunks/", "manifests/"))}
        assert not old
        assert await stored(destination) == await stored(source)
    assert await read_all(copy) == await read_all(url)


@pytest.mark.sampled
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("spec", [1, 2])
async def test_copy_killed_at_any_write_is_whole_and_continued(spec: int, *, updated: bool) -> None:
    """First copies, and updates of one: the last writes, and every seventh before them."""
    url, _ = await littered(spec)
    async with open_storage(url) as source, open_storage(memory_url()) as earlier:
        old = await read_all(url) if updated else {}
        if updated:
            for key, data in (await objects(source)).items():
                await earlier.put(key, data)
            async with Repository.open(url) as repository:
                await commit(repository, 70, "later")
        new = await read_all(url)

        async def killed_after(writes: int) -> int:
            """Copy until then; return how many writes were left."""
            copy = memory_url()
            async with open_storage(copy) as destination:
                if updated:
                    await copy_repository(earlier, destination)
                breaking = Breaking(destination)
                breaking.writes_left = writes
                try:
                    await copy_repository(source, breaking)
                except StorageUnavailableError:
                    shown = await shown_by(copy)
                    assert shown.items() >= old.items()
                    assert shown.items() <= new.items()
                    assert spec == 1 or shown == old
                    await copy_repository(source, destination)
                assert await read_all(copy) == new
                assert await stored(destination) == await stored(source)
            return breaking.writes_left

        needed = 10_000 - await killed_after(10_000)
        kills = sorted({*range(0, needed, 7), *range(max(needed - 6, 0), needed)})
        assert len(kills) > 5
        for writes in kills:
            assert await killed_after(writes) < 0


async def test_commits_made_while_copying_are_for_the_next_copy() -> None:
    """The copy is of the state that was read first."""
    url, _ = await littered(2)
    copy = memory_url()
    before = await read_all(url)
    async with (
        open_storage(url) as source,
        open_storage(copy) as destination,
        Repository.open(url) as repository,
    ):
        busy = Busy(source, ("get", "chunks/"), lambda: commit(repository, 80, "meanwhile"))
        await copy_repository(busy, destination)
        assert await read_all(copy) == before
        await copy_repository(source, destination)
        assert await read_all(copy) == await read_all(url)


@pytest.mark.parametrize("folder", ["chunks/", "manifests/", "transactions/"])
@pytest.mark.parametrize("spec", [1, 2])
async def test_snapshots_collected_while_copying_are_left_out(spec: int, folder: str) -> None:
    """A state that lost objects, read or not yet listed, is not shown; a later whole one is."""
    url, _ = await littered(spec)
    copy = memory_url()
    async with (
        open_storage(url) as source,
        open_storage(copy) as destination,
        Repository.open(url) as repository,
    ):

        async def collect() -> None:
            await repository.delete_branch("side")
            await repository.garbage_collect(now())

        await copy_repository(Busy(source, ("get", folder), collect), destination)
    shown = await read_all(copy)
    assert shown == await read_all(url)
    async with Repository.open(copy) as repository:
        assert (await repository.check_references()).is_whole


async def test_copy_of_a_source_that_never_holds_still_gives_up() -> None:
    """It says so, and shows nothing."""
    url, line = await littered(2)

    class Losing(WrappedStorage):
        async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
            if key.startswith("chunks/"):
                async with Repository.open(url) as repository:
                    await repository.create_tag(f"t{uuid4()}", line[0])
                raise ObjectNotFoundError(key)
            return await super().get(key, byte_range)

    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        with pytest.raises(ConflictError, match="given up after 5 rounds"):
            await copy_repository(Losing(source), destination)
        with pytest.raises(RepositoryNotFoundError):
            await read_all(copy)


@pytest.mark.parametrize("spec", [1, 2])
async def test_another_repository_is_never_replaced(spec: int) -> None:
    """Nor is a copy with new commits. In both cases nothing is written."""
    url, _ = await littered(spec)
    other, _ = await littered(spec)
    async with open_storage(url) as source, open_storage(other) as destination:
        before = await objects(destination)
        with pytest.raises(RepositoryExistsError, match="it is no copy"):
            await copy_repository(source, destination)
        assert await objects(destination) == before
    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        await copy_repository(source, destination)
        async with Repository.open(copy) as repository:
            await commit(repository, 50, "on the copy")
        async with Repository.open(url) as repository:
            await commit(repository, 51, "on the source")
        before = await objects(destination)
        with pytest.raises(RepositoryExistsError, match="changed after the last copy"):
            await copy_repository(source, destination)
        assert await objects(destination) == before


async def test_a_location_that_holds_other_objects_is_refused() -> None:
    """The error names one."""
    url, _ = await littered(2)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        await destination.put("notes.txt", b"mine")
        with pytest.raises(RepositoryExistsError, match=r"notes\.txt"):
            await copy_repository(source, destination)
        assert set(await objects(destination)) == {"notes.txt"}


async def test_a_damaged_note_of_copies_counts_as_none() -> None:
    """Then the copy is like any repository, and stays."""
    url, _ = await littered(2)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        await copy_repository(source, destination)
        async with Repository.open(url) as repository:
            await commit(repository, 50, "later")
        for damage in (
            b"",
            b"[]",
            b"{",
            b'{"references": 3}',
            b'{"references": {"repo": 3}}',
            b"[" * 100_000,
        ):
            await destination.put(MARK, damage)
            with pytest.raises(RepositoryExistsError):
                await copy_repository(source, destination)


async def test_a_note_of_copies_with_a_damaged_part_counts_as_none() -> None:
    """The rest of it may be sound; no part of it is used."""
    url, _ = await littered(2)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        await copy_repository(source, destination)
        note = json.loads(bytes((await destination.get(MARK)).data))
        async with Repository.open(url) as repository:
            await commit(repository, 50, "later")
        empty: dict[str, object] = {}
        for selection in ([None, None, 3], [None, None, {"paths": 3}], [None] * 4, empty, 3):
            await destination.put(MARK, json.dumps({**note, "selection": selection}).encode())
            with pytest.raises(RepositoryExistsError, match="no copy, or the note"):
                await copy_repository(source, destination)
        await destination.put(MARK, json.dumps(note).encode())
        await copy_repository(source, destination)


async def test_of_two_copies_at_once_one_is_told_that_it_lost() -> None:
    """The slower call raises `ConflictError`. The copy holds the work of the faster one."""
    url, _ = await littered(2)
    copy = memory_url()
    async with open_storage(url) as source, open_storage(copy) as destination:
        await copy_repository(source, destination)
        async with Repository.open(url) as repository:
            await commit(repository, 50, "later")

            async def overtake() -> None:
                await commit(repository, 51, "still later")
                await copy_repository(source, destination)

            busy = Busy(destination, ("put", "repo"), overtake)
            with pytest.raises(ConflictError, match="Somebody else changed the copy"):
                await copy_repository(source, busy)
    assert await read_all(copy) == await read_all(url)


async def test_a_source_that_cannot_list_is_refused() -> None:
    """Before anything is written."""

    class Unlisted(WrappedStorage):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(listing=False, reasons={"listing": "a web server"})

    url, _ = await littered(2)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        with pytest.raises(UnsafeStorageError, match="a web server"):
            await copy_repository(Unlisted(source), destination)
        assert not await objects(destination)


@pytest.mark.parametrize("part", [False, True])
async def test_sums_travel_and_leases_stay(*, part: bool) -> None:
    """Checksums belong to manifests and snapshots; sessions are open at one place."""
    url, line = await littered(2)
    async with open_storage(url) as source, open_storage(memory_url()) as destination:
        async with Repository.open(source) as repository:
            (manifest,) = await repository.list_manifest_files(line[1])
        added = {f"sums/{line[1]}", f"sums/{manifest.id}"}
        for key in (*added, "leases/sessions/one", "leases/spills/one/two"):
            await source.put(key, b"beside")
        selection = Selection.of(["main", "side"], None) if part else WHOLE
        await copy_repository(source, destination, selection)
        assert added <= (await stored(destination)).keys()
        assert not [key for key in await stored(destination) if key.startswith("leases/")]

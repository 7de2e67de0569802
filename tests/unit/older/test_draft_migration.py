"""Migration of the first draft to format version 2: everything is kept, nothing is ever half."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository
from icechunk_async.errors import ConflictError, FormatError
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import memory_url, objects, read, write
from tests.unit.older.draft_golden import COMMITS, EXPECTED, SOURCE, VIRTUAL_URL, golden_draft
from tests.unit.older.older_tools import CONFIG, commit, contents, created, holding


@pytest.mark.parametrize("root", ["", "data/"])
async def test_everything_is_kept(root: str) -> None:
    """Snapshots, times, messages, properties, refs, nodes, documents and chunks."""
    async with holding(golden_draft(root).objects) as storage, open_storage(memory_url()) as source:
        await source.put("data", SOURCE)
        async with Repository.open(storage) as repository:
            before = await contents(repository)
        planned = await upgrade(storage, dry_run=True)
        assert await objects(storage) == golden_draft(root).objects
        report = await upgrade(storage)
        assert (report.branches, report.tags, report.snapshots) == (2, 1, COMMITS)
        assert planned.unused_files == report.unused_files
        assert report.unused_files[-1] == "state.json"
        keys = await objects(storage)
        assert {key.partition("/")[0] for key in keys} == {
            "repo", "snapshots", "manifests", "transactions", "chunks",
        }  # fmt: skip
        access = {f"{VIRTUAL_URL}/": source}
        async with Repository.open(
            storage, config=CONFIG, authorize_virtual_chunk_access=access
        ) as repository:
            assert repository.layout == "format-2"
            assert await contents(repository) == before
            assert (await repository.verify(level="decode")).findings == ()
            session = await repository.readonly_session("main")
            root_group: Any = await zarr.api.asynchronous.open_group(session.store, mode="r")
            for path, expected in EXPECTED.items():
                found = await (await root_group.getitem(path)).getitem(...)
                assert np.asarray(found).tobytes() == expected.tobytes()
            writable = await repository.writable_session("main")
            await write(writable, "a/two/c/0", b"12345678")
            await writable.commit("on top")


async def test_ids_that_fit_are_kept_whole() -> None:
    """Those that this library gives: of snapshots, manifests and chunk objects."""
    async with created("first-draft") as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/2", bytes(10_000))
        await session.commit("native")
        before = [it.id async for it in repository.ancestry(branch="main")]
        storage = repository.storage
        old = await objects(storage)
        await upgrade(storage, delete_unused_v1_files=False)
        now = await objects(storage)
        assert {key[2:] for key in old if key.startswith("c/")} == {
            key.removeprefix("chunks/") for key in now if key.startswith("chunks/")
        }
        async with Repository.open(storage) as again:
            assert [it.id async for it in again.ancestry(branch="main")] == before
        # What was left can be deleted later.
        report = await upgrade(storage)
        assert report.already_migrated
        left = await objects(storage)
        assert not [key for key in left if key[:2] in {"s/", "i/", "c/", "a/"}]
        assert "state.json" not in left


async def test_a_file_of_somebody_else_is_not_taken_for_a_leftover() -> None:
    """A repository of version 2 beside another program's ``state.json``."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage):
            pass
        others = {"state.json": b'{"version": 4}', "s/mine": b"1", "state.json.bak": b"2"}
        for key, data in others.items():
            await storage.put(key, data)
        report = await upgrade(storage)
        assert report.already_migrated
        assert others.items() <= (await objects(storage)).items()


async def test_writers_are_refused_once_it_is_frozen() -> None:
    """A commit before that is part of it; later changes of any kind are refused."""

    class ChangesMeanwhile(WrappedStorage):
        """Lets others write when the first chunk is copied, and at the end."""

        async def copy(self, source: str, target: str, **options: Any) -> Any:
            """Copy, and let the first writer commit."""
            if not followed:
                followed.append(await commit(early, 5))
            return await super().copy(source, target, **options)

        async def put(self, key: str, data: Any, **options: Any) -> Any:
            """Write, and let others try before the repo info is there."""
            if key == "repo":
                tip = followed[0]
                for change in (
                    lambda: commit(late, 6),
                    lambda: late.create_branch("late", tip),
                    lambda: late.create_tag("late", tip),
                    lambda: late.reset_branch("main", tip),
                ):
                    with pytest.raises(ConflictError, match="migrated"):
                        await change()
            return await super().put(key, data, **options)

    followed: list[Any] = []
    async with created("first-draft") as early:
        storage = early.storage
        session = await early.writable_session("main")
        await write(session, "a/c/2", bytes(10_000))
        await session.commit("native")
        async with Repository.open(storage.description.url) as late:
            await upgrade(ChangesMeanwhile(storage))
            with pytest.raises(ConflictError, match="migrated"):
                await commit(late, 7)
        async with Repository.open(storage) as repository:
            assert repository.layout == "format-2"
            assert await repository.lookup_branch("main") == followed[0]
            session = await repository.readonly_session("main")
            assert await read(session, "a/c/5") == b"\x05"


async def test_an_interrupted_migration_is_continued() -> None:
    """Wherever it ends, the old repository can be read, and a second call finishes."""

    class Ends(WrappedStorage):
        """Fails at a write."""

        left = 0

        async def put(self, key: str, data: Any, **options: Any) -> Any:
            """Write, or fail."""
            self.left -= 1
            if self.left == 0:
                raise asyncio.CancelledError
            return await super().put(key, data, **options)

    async with holding(golden_draft().objects) as storage:
        ending = Ends(storage)
        async with Repository.open(storage) as repository:
            before = await contents(repository)
        for left in range(1, 60, 7):
            ending.left = left
            try:
                await upgrade(ending)
            except asyncio.CancelledError:
                async with Repository.open(storage) as repository:
                    assert repository.layout == "first-draft"
                    assert await contents(repository) == before
            else:
                break
        else:
            pytest.fail("it never ended")
        async with Repository.open(storage) as repository:
            assert await contents(repository) == before


async def test_what_cannot_be_migrated_stays_as_it_was() -> None:
    """A snapshot whose file is damaged."""
    async with holding(golden_draft().objects) as storage:
        key = json.loads(golden_draft().objects["state.json"])["snapshots"][2]["structure-file"]
        await storage.put(f"s/{key}", b"PAR1")
        with pytest.raises(FormatError):
            await upgrade(storage)
        assert "repo" not in await objects(storage)
        async with Repository.open(storage) as repository:
            assert (await repository.branches()).keys() == {"main", "old"}

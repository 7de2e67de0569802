"""Migration of the alpha to format version 2: everything is kept, and nothing is ever half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    SnapshotNotFoundError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.helpers import memory_url, objects, read, write
from tests.unit.older.golden import COMMITS, EXPECTED, SOURCE, VIRTUAL_URL, golden
from tests.unit.older.older_tools import CONFIG, OnlyCreates, commit, contents, created, holding

if TYPE_CHECKING:
    from icechunk_async.storage import Storage


async def test_everything_is_kept() -> None:
    """Snapshots, times, messages, properties, refs, nodes, documents and chunks."""
    async with holding(golden().objects) as storage, open_storage(memory_url()) as source:
        await source.put("data", SOURCE)
        async with Repository.open(storage) as repository:
            before = await contents(repository)
        planned = await upgrade(storage, dry_run=True)
        assert await objects(storage) == golden().objects
        report = await upgrade(storage)
        assert (report.branches, report.tags, report.snapshots) == (2, 1, COMMITS)
        assert not report.already_migrated
        assert not report.resumed
        assert planned.unused_files == report.unused_files
        assert (planned.branches, planned.snapshots) == (report.branches, report.snapshots)
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
            root: Any = await zarr.api.asynchronous.open_group(session.store, mode="r")
            for path, expected in EXPECTED.items():
                found = await (await root.getitem(path)).getitem(...)
                assert np.asarray(found).tobytes() == expected.tobytes()
            writable = await repository.writable_session("main")
            await write(writable, "a/two/c/0", b"12345678")
            await writable.commit("on top")


async def test_configurations_and_attributes_in_files_are_kept() -> None:
    """Chunks that many references share are copied once."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    async with created("alpha", config=config) as repository:
        await commit(repository, 2)
        storage = repository.storage
        before = await objects(storage)
        await upgrade(storage, delete_unused_v1_files=False)
        after = await objects(storage)
        assert before.items() <= {key: after[key] for key in before}.items()
        chunks = [key for key in after if key.startswith("chunks/")]
        assert len(chunks) == len([key for key in before if key.startswith("c/")]) == 3
        async with Repository.open(storage) as again:
            assert again.layout == "format-2"
            assert again.config.effective_inline_chunk_threshold_bytes == 0
        # What was left can be deleted later.
        report = await upgrade(storage)
        assert report.already_migrated
        assert "r/" in report.unused_files
        left = await objects(storage)
        assert not [key for key in left if key[:2] in {"r/", "s/", "m/", "c/", "a/"}]
        async with Repository.open(storage) as again:
            session = await again.readonly_session("main")
            assert await read(session, "a/c/2") == b"\x02"


async def test_a_commit_beside_the_migration_is_part_of_it_or_refused() -> None:
    """Before the branches are frozen it is followed; afterwards its writer is told."""

    class CommitsMeanwhile(WrappedStorage):
        """Lets another writer commit when the first chunk is copied, and at the end."""

        def __init__(self, storage: Storage, writer: Any) -> None:
            super().__init__(storage)
            self._writer = writer
            self.outcomes: list[str] = []

        async def before(self, operation: str, key: str) -> None:
            if operation == "copy" and not self.outcomes:
                self.outcomes.append("begun")
                await self._writer("meanwhile")
            if key == "repo" and operation == "put":
                try:
                    await self._writer("too late")
                except ConflictError as error:
                    self.outcomes.append(error.message)

    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    async with created("alpha", config=config) as repository:

        async def writer(message: str) -> None:
            session = await repository.writable_session("main")
            await write(session, "a/c/9", message.encode())
            await session.commit(message)

        storage = CommitsMeanwhile(repository.storage, writer)
        await upgrade(storage, delete_unused_v1_files=False)
        assert "being migrated" in storage.outcomes[1]
        with pytest.raises(ConflictError, match="migrated"):
            await writer("much too late")
        for create in (repository.create_branch, repository.create_tag):
            with pytest.raises(ConflictError, match="migrated"):
                await create("new", await repository.lookup_branch("main"))
        async with Repository.open(repository.storage) as again:
            messages = [info.message async for info in again.ancestry(branch="main")]
            assert messages == ["meanwhile", "filled", "Repository initialized"]
            session = await again.readonly_session("main")
            assert await read(session, "a/c/9") == b"meanwhile"


@pytest.mark.parametrize("what", ["branch", "tag", "config"])
async def test_what_is_written_too_late_for_the_migration_is_not_lost_silently(what: str) -> None:
    """Nothing follows the last reading of references, so their writer is told."""

    class WritesLate(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            if key == "repo" and operation == "put":
                with pytest.raises(ConflictError, match="being migrated"):
                    await write_late()

    async with created("alpha") as repository:

        async def write_late() -> None:
            match what:
                case "branch":
                    await repository.create_branch("late", tip)
                case "tag":
                    await repository.create_tag("late", tip)
                case _:
                    await repository.save_config()

        tip = await repository.lookup_branch("main")
        await upgrade(WritesLate(repository.storage), delete_unused_v1_files=False)
        async with Repository.open(repository.storage) as again:
            assert again.layout == "format-2"
            assert "late" not in {**await again.branches(), **await again.tags()}


class _Dies(WrappedStorage):
    """Fails each change after some."""

    def __init__(self, storage: Storage, changes: int) -> None:
        super().__init__(storage)
        self.left = changes

    async def before(self, operation: str, key: str) -> None:
        if operation in {"put", "copy", "delete"}:
            self.left -= 1
            if self.left < 0:
                raise StorageError(f"{operation} {key!r}: the process is gone")


async def test_an_interrupted_migration_is_continued() -> None:
    """Wherever it ended: the repository can be read all the time, as one of its layouts."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    died = 0
    for changes in range(100):
        async with created("alpha", config=config) as repository:
            await repository.create_branch("dev", await repository.lookup_branch("main"))
            plain = repository.storage
            try:
                await upgrade(_Dies(plain, changes))
            except StorageError:
                died += 1
            else:
                break
            async with Repository.open(plain) as half:
                session = await half.readonly_session("main")
                if not (half.layout == "alpha" and not await _has(plain, "c/")):
                    assert await read(session, "a/c/1") == b"\x01"
                layout = half.layout
            report = await upgrade(plain)
            assert report.already_migrated == (layout == "format-2")
            async with Repository.open(plain) as whole:
                assert whole.layout == "format-2"
                session = await whole.readonly_session("dev")
                assert await read(session, "a/c/1") == b"\x01"
                assert (await whole.verify(level="sums")).findings == ()
                await commit(whole, 3)
            left = {key.partition("/")[0] for key in await objects(plain)}
            assert left.isdisjoint({"r", "s", "m", "c"})
    assert died > 12


async def _has(storage: Storage, prefix: str) -> bool:
    return any(key.startswith(prefix) for key in await objects(storage))


async def test_what_cannot_be_migrated_stays_as_it_was() -> None:
    """A damaged snapshot, a missing chunk, a storage that format 2 cannot use."""
    async with holding(golden().objects) as storage:
        with pytest.raises(UnsafeStorageError, match="conditional update"):
            await upgrade(OnlyCreates(storage))
        assert await objects(storage) == golden().objects
    for prefix, error in (("c/", StorageError), ("m/", FormatError), ("s/", Exception)):
        async with holding(golden().objects) as storage:
            keys = [key for key in golden().objects if key.startswith(prefix)]
            lost = keys[1] if prefix == "s/" else keys[0]
            data = golden().objects[lost]
            await storage.delete([lost])
            with pytest.raises(error):
                await upgrade(storage)
            async with Repository.open(storage) as repository:
                assert repository.layout == "alpha"
            await storage.put(lost, data)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                await write(session, "a/two/c/0", b"12345678")
                await session.commit("it can be used on")
            assert (await upgrade(storage)).snapshots == COMMITS + 1


async def test_snapshots_keep_the_beginning_of_their_ids() -> None:
    """So that what was noted somewhere can be found again."""
    async with created("alpha") as repository:
        old = await repository.lookup_branch("main")
        storage = repository.storage
        await upgrade(storage)
        async with Repository.open(storage) as again:
            new = await again.lookup_branch("main")
            assert new == SnapshotId(old[:12])
            assert str(old)[:19] == str(new)[:19]
            with pytest.raises(SnapshotNotFoundError):
                await again.lookup_snapshot(old)

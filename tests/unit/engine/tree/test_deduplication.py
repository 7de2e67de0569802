"""Sessions that upload no bytes twice: what is there already, and what they stored themselves."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous
from zarr.core.buffer import default_buffer_prototype

import icechunk_async.sync as icechunk
from icechunk_async import Packing, Repository, Transaction
from icechunk_async.config import RepositoryConfig, S3Store, VirtualChunkContainer
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.tree import deduplication
from icechunk_async.errors import (
    ChunksCollectedError,
    ConflictError,
    NothingToCommitError,
    PermissionDeniedError,
    ReadOnlyError,
    SessionStateError,
    StorageUnavailableError,
)
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.layout import chunk_key
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import make_array, memory_url, objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import now

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async import ForkSession, Session
    from icechunk_async.format.manifest.chunk import ChunkRef

PROTOTYPE = default_buffer_prototype()
ASYNC: Any = zarr.api.asynchronous
BUCKET = "s3://bucket/data/"
TINY = b"tiny"
"""A chunk that is stored in its manifest."""


def chunk(number: int) -> bytes:
    """Return a chunk that is stored in an object; all are equally long."""
    return number.to_bytes(4) * 250


@asynccontextmanager
async def counted(spec: int, **options: Any) -> AsyncGenerator[tuple[Repository, LatencyStorage]]:
    """Open a repository with four chunks in objects and one in its manifest; count requests."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, spec_version=spec, **options) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (20,), (1,))
            for number in range(4):
                await write(session, f"a/c/{number}", chunk(number))
            await write(session, "a/c/4", TINY)
            await session.commit("filled")
            storage.forget()
            yield repository, storage


def keys_of(storage: LatencyStorage, operation: str) -> list[str]:
    """Return the keys of the requests of one operation so far."""
    return [key for done, key in storage.log if done == operation]


def native(ref: ChunkRef | None) -> NativeChunk:
    """Return a reference that must be to an object."""
    assert isinstance(ref, NativeChunk)
    return ref


async def everything(session: Session | ForkSession) -> None:
    """Write what `counted` wrote."""
    await make_array(session, "a", (20,), (1,))
    for number in range(4):
        await write(session, f"a/c/{number}", chunk(number))
    await write(session, "a/c/4", TINY)


async def chunk_objects(repository: Repository) -> int:
    """Count the chunk objects of a repository."""
    return sum(key.startswith("chunks/") for key in await objects(repository.storage))


@pytest.mark.parametrize("options", [{}, {"sums": True}, {"packing": Packing()}])
async def test_writing_the_same_again_uploads_nothing_and_changes_nothing(
    spec: int, options: dict[str, Any]
) -> None:
    """The manifest is looked at once, each chunk is read once, and there is nothing to commit."""
    async with counted(spec, **options) as (repository, storage):
        session = await repository.writable_session("main", deduplicate=True)
        storage.forget()
        await everything(session)
        assert storage.requests["put"] == 0
        chunks = [key for operation, key in storage.log if key.startswith("chunks/")]
        assert len(chunks) == 4
        others = [key for operation, key in storage.log if not key.startswith("chunks/")]
        assert len(others) <= (2 if "sums" in options else 1)
        assert not session.has_uncommitted_changes
        storage.forget()
        with pytest.raises(NothingToCommitError):
            await session.commit("again")
        assert not storage.log


async def test_what_differs_is_uploaded_without_being_read_if_a_sum_or_the_length_tells() -> None:
    """Without a sum an equally long chunk is read first."""
    for options, reads in (({"sums": True}, 0), ({}, 1)):
        async with counted(2, **options) as (repository, storage):
            session = await repository.writable_session("main", deduplicate=True)
            storage.forget()
            await write(session, "a/c/0", chunk(100))
            await write(session, "a/c/1", chunk(1) * 2)
            assert sum(key.startswith("chunks/") for key in keys_of(storage, "get")) == reads
            assert storage.requests["put"] == 2
            await session.commit("two differ")
            reader = await repository.readonly_session("main")
            assert await read(reader, "a/c/0") == chunk(100)
            assert await read(reader, "a/c/1") == chunk(1) * 2


async def test_equal_sums_are_not_taken_for_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 32 bits can be that of other bytes."""
    async with counted(2, sums=True) as (repository, _):
        session = await repository.writable_session("main", deduplicate=True)
        handle = await session.workspace.find_chunk("/a", (0,))
        assert handle is not None
        base = session.workspace.in_base("/a")
        assert base is not None
        (info,) = base.candidates((0,))
        found = await session.workspace.assets.manifests.find_with_sum(
            info.id, info.size_bytes, base.node.id, (0,)
        )
        collision = native(found).sum
        assert collision
        monkeypatch.setattr(deduplication, "sum_of", lambda _: collision)
        await write(session, "a/c/0", chunk(77))
        assert await read(session, "a/c/0") == chunk(77)


@pytest.mark.parametrize("packing", [None, Packing()])
async def test_equal_chunks_of_a_session_share_an_object(packing: Packing | None) -> None:
    """Set one by one on a loop, and on threads."""
    async with Repository.create(memory_url(), packing=packing) as repository:
        session = await repository.writable_session("main", deduplicate=True)
        await make_array(session, "a", (200,), (1,))
        await write(session, "a/c/0", chunk(1))
        await asyncio.gather(*(write(session, f"a/c/{it}", chunk(1)) for it in range(1, 50)))
        value = PROTOTYPE.buffer.from_bytes(chunk(2))

        def set_one(number: int) -> None:
            session.store.set_sync(f"a/c/{number}", value)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(set_one, range(50, 200)))
        await session.commit("patterns")
        assert await chunk_objects(repository) == (2 if packing is None else 1)
        reader = await repository.readonly_session("main")
        refs = await reader.workspace.all_refs("/a")
        assert len(refs) == 200
        assert len({native(refs.ref(row)) for row in range(200)}) == 2
        assert await read(reader, "a/c/49") == chunk(1)
        assert await read(reader, "a/c/199") == chunk(2)


async def test_equal_chunks_at_once_are_stored_once() -> None:
    """Writers on a loop await the first one, writers on threads wait for it."""
    async with counted(2) as (repository, storage):
        session = await repository.writable_session("main", deduplicate=True)
        storage.forget()
        await asyncio.gather(*(write(session, f"a/c/{it}", chunk(9)) for it in range(20)))
        assert storage.requests["put"] == 1
        session.abandon()

    known, stored = deduplication.Deduplication(), []

    def store(data: Any) -> NativeChunk:
        stored.append(data)
        threading.Event().wait(0.05)  # else the second thread would come too late anyway
        return NativeChunk(ChunkId.random(), 0, len(data))

    with ThreadPoolExecutor(4) as pool:
        refs = list(pool.map(lambda _: known.store_blocking(chunk(1), store), range(4)))
    assert len(stored) == len(set(refs)) == 1


async def test_a_failed_upload_is_not_remembered() -> None:
    """Of equal chunks at once all fail; the next one is stored."""

    class Failing(LatencyStorage):
        fails = False

        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            await asyncio.sleep(0)
            if self.fails and operation == "put":
                raise StorageUnavailableError("down")

    async with open_storage(memory_url()) as plain:
        storage = Failing(plain, seconds=0)
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main", deduplicate=True)
            await make_array(session, "a", (20,), (1,))
            workspace = session.workspace
            storage.fails = True
            known = workspace.deduplication
            assert known is not None
            writes = [known.store(chunk(1), storing(storage)) for _ in range(3)]
            for it in await asyncio.gather(*writes, return_exceptions=True):
                assert isinstance(it, StorageUnavailableError)
            storage.fails = False
            await write(session, "a/c/0", chunk(1))
            await session.commit("stored")
            assert await read(session, "a/c/0") == chunk(1)


def storing(storage: LatencyStorage) -> Any:
    """Return how to store a chunk without tries again, which would take seconds."""

    async def store(data: Any) -> Any:
        await storage.put("chunks/any", data)
        raise AssertionError("it must have failed")

    return store


async def test_memory_of_what_was_stored_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that were not used for longest are forgotten, and stored once more."""
    monkeypatch.setattr(deduplication, "MAX_REMEMBERED", 3)
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main", deduplicate=True)
        await make_array(session, "a", (20,), (1,))
        for number in (0, 1, 2, 0, 3, 0, 1):  # 1 was forgotten for 3; 0 was used again
            await write(session, f"a/c/{number}", chunk(number))
        for place, number in ((10, 0), (11, 3), (12, 2)):  # 2 was forgotten
            await write(session, f"a/c/{place}", chunk(number))
        await session.commit("written")
        assert await chunk_objects(repository) == 5


@pytest.mark.parametrize("blocking", [False, True])
async def test_every_kind_of_chunk_is_compared(spec: int, *, blocking: bool) -> None:
    """Chunks in objects, in the manifest, and virtual ones, which stay virtual."""
    config = RepositoryConfig(virtual_chunk_containers=(VirtualChunkContainer(BUCKET, S3Store()),))
    async with open_storage(memory_url()) as bucket:
        await bucket.put("file.nc", chunk(9) + TINY)
        access: Any = {BUCKET: bucket}
        async with Repository.create(
            memory_url(), spec_version=spec, config=config, authorize_virtual_chunk_access=access
        ) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (20,), (1,))
            await write(session, "a/c/0", chunk(0))
            await write(session, "a/c/1", TINY)
            location = f"{BUCKET}file.nc"
            session.store.set_virtual_ref("a/c/2", location, offset=0, length=1000)
            session.store.set_virtual_ref("a/c/3", location, offset=0, length=1000)
            session.store.set_virtual_ref("a/c/4", f"{BUCKET}gone.nc", offset=0, length=1000)
            await session.commit("filled")

            async def put(key: str, data: bytes) -> None:
                if blocking:
                    session.store.set_sync(key, PROTOTYPE.buffer.from_bytes(data))
                else:
                    await write(session, key, data)

            session = await repository.writable_session("main", deduplicate=True)
            for key, data in (("0", chunk(0)), ("1", TINY), ("2", chunk(9))):
                await put(f"a/c/{key}", data)
            assert not session.has_uncommitted_changes
            await put("a/c/1", b"TINY")
            await put("a/c/3", chunk(3))
            await put("a/c/4", chunk(4))  # its source cannot be read: that must not matter
            await session.commit("three differ")
            reader = await repository.readonly_session("main")
            assert (await reader.chunk_type("a", (2,))).name == "VIRTUAL"
            assert (await reader.chunk_type("a", (4,))).name == "NATIVE"
            expected = [chunk(0), b"TINY", chunk(9), chunk(3), chunk(4)]
            assert [await read(reader, f"a/c/{it}") for it in range(5)] == expected


async def test_changes_of_the_session_itself_are_compared_too() -> None:
    """A chunk that it set, deleted or discarded is what it is now, not what the base has."""
    async with counted(2) as (repository, _):
        session = await repository.writable_session("main", deduplicate=True)
        await session.store.delete("a/c/0")
        await write(session, "a/c/0", chunk(0))
        await write(session, "a/c/1", chunk(50))
        await write(session, "a/c/1", chunk(1))
        await session.commit("there again")
        reader = await repository.readonly_session("main")
        assert [await read(reader, f"a/c/{it}") for it in range(2)] == [chunk(0), chunk(1)]


@pytest.mark.parametrize("blocking", [False, True])
async def test_deleting_what_is_not_there_is_no_change(*, blocking: bool) -> None:
    """Zarr deletes chunks that hold nothing but the fill value, wherever they are."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (20,), (1,))
        await write(session, "a/c/0", chunk(0))
        await session.commit("filled")
        session = await repository.writable_session("main", deduplicate=True)

        async def delete(key: str) -> None:
            if blocking:
                session.store.delete_sync(key)
            else:
                await session.store.delete(key)

        for key in ("a/c/1", "a/c/99", "b/c/0", "nothing"):
            await delete(key)
        assert not session.has_uncommitted_changes
        await delete("a/c/0")
        await session.commit("deleted")
        assert await read(session, "a/c/0") is None
        with pytest.raises(ValueError, match="read-only"):
            await delete("a/c/5")


@pytest.mark.parametrize("compressors", ["auto", None])
async def test_ingesting_unchanged_values_again_commits_nothing(compressors: Any) -> None:
    """Through Zarr, with chunks of fill values, in a block that then ends without a commit."""
    data = np.random.default_rng(0).integers(0, 1000, (40, 100))
    data[:20] = 0
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage) as repository:
            async with repository.transaction("main", message="first") as store:
                await ASYNC.create_array(
                    store, name="t", data=data, chunks=(10, 100), compressors=compressors
                )
            tip = await repository.lookup_branch("main")
            storage.forget()
            async with repository.transaction("main", message="again", deduplicate=True) as store:
                array = await ASYNC.open_array(store=store, path="t", mode="r+")
                await array.setitem(slice(None), data)
            assert storage.requests["put"] == 0
            assert await repository.lookup_branch("main") == tip
            assert store.read_only
            with pytest.raises(ReadOnlyError):
                store.session.discard_changes()
            data[35] += 1
            async with repository.transaction("main", message="new", deduplicate=True) as store:
                array = await ASYNC.open_array(store=store, path="t", mode="r+")
                await array.setitem(slice(None), data)
            assert sum(key.startswith("chunks/") for key in keys_of(storage, "put")) == 1
            diff = await repository.diff(from_snapshot_id=tip, to_branch="main")
            assert sum(map(len, diff.updated_chunks.values())) == 1


async def test_a_named_block_that_changed_nothing_is_recorded() -> None:
    """So that it is known to have been done."""
    async with counted(2) as (repository, _):
        for version in (1, 1, 2):
            once = Transaction("app", version)
            async with repository.transaction(
                "main", message=f"v{version}", once=once, deduplicate=True
            ) as store:
                await everything(store.session)
        messages = [it.message async for it in repository.ancestry(branch="main")]
        assert messages[:2] == ["v2", "v1"]
        assert messages[2] == "filled"


async def test_a_block_that_handed_out_forks_does_not_end_quietly() -> None:
    """Their changes would be lost."""
    async with counted(2) as (repository, _):
        with pytest.raises(SessionStateError, match="fork"):
            async with repository.transaction("main", message="m", deduplicate=True) as store:
                await store.session.fork()


async def test_the_facade_takes_the_option_too() -> None:
    """Sessions, blocks and forks."""
    url = memory_url()
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await everything(session)
        tip = str(await session.commit("filled"))

    def work() -> None:
        with icechunk.Repository.open(url) as repository:
            session = repository.writable_session("main", deduplicate=True)
            value = PROTOTYPE.buffer.from_bytes(chunk(0))
            session.store.set_sync("a/c/0", value)
            assert not session.has_uncommitted_changes
            with repository.transaction("main", message="again", deduplicate=True) as store:
                store.set_sync("a/c/0", value)
            assert repository.lookup_branch("main") == tip
            with repository.transaction("main", message="new", deduplicate=True) as store:
                store.set_sync("a/c/1", value)
            assert repository.lookup_branch("main") != tip

    await asyncio.to_thread(work)


async def test_forks_do_the_same_wherever_they_go() -> None:
    """A fork of a fork, and one that travelled, twice."""
    async with counted(2) as (repository, storage):
        session = await repository.writable_session("main", deduplicate=True)
        await write(session, "a/c/10", chunk(10))
        fork = await session.fork()
        storage.forget()
        await write(fork, "a/c/10", chunk(10))
        await write(fork, "a/c/0", chunk(0))
        assert not fork.has_uncommitted_changes
        travelled = pickle.loads(pickle.dumps(await fork.fork()))
        travelled = type(travelled).from_bytes(travelled.to_bytes())
        async with travelled.attached(storage):
            await everything(travelled)
            await write(travelled, "a/c/11", chunk(11))
            await write(travelled, "a/c/12", chunk(11))
        assert sum(key.startswith("chunks/") for key in keys_of(storage, "put")) == 1
        await fork.merge(travelled)
        await session.merge(fork)
        await session.commit("both")
        reader = await repository.readonly_session("main")
        found = [await read(reader, f"a/c/{it}") for it in (0, 10, 11, 12)]
        assert found == [chunk(0), chunk(10), chunk(11), chunk(11)]
        plain = await (await repository.writable_session("main")).fork()
        await write(plain, "a/c/0", chunk(0))
        assert plain.has_uncommitted_changes


async def test_sessions_with_leases_and_resumed_ones_do_the_same() -> None:
    """A collection spares objects that several chunks of an open session share."""
    async with counted(2) as (repository, storage):
        session = await repository.writable_session("main", lease=True, deduplicate=True)
        await everything(session)
        assert not session.has_uncommitted_changes
        await write(session, "a/c/10", chunk(10))
        await session.spill()
        await repository.garbage_collect(now())
        again = await repository.resume_session(session.session_id, deduplicate=True)
        session.abandon()
        storage.forget()
        await write(again, "a/c/10", chunk(10))
        assert storage.requests["put"] == 0
        await write(again, "a/c/11", chunk(10))
        await again.commit("resumed")
        assert [await read(again, f"a/c/{it}") for it in (10, 11)] == [chunk(10)] * 2


@pytest.mark.parametrize("blocking", [False, True])
async def test_what_a_collection_deleted_is_uploaded_again(*, blocking: bool) -> None:
    """It is neither taken for being in place, nor shared with another chunk."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main", deduplicate=True)
        await make_array(session, "a", (20,), (1,))

        async def put(number: int) -> None:
            if blocking:
                session.store.set_sync(f"a/c/{number}", PROTOTYPE.buffer.from_bytes(chunk(0)))
            else:
                await write(session, f"a/c/{number}", chunk(0))

        await put(0)
        await put(1)
        kept = {
            key: data
            for key, data in (await objects(repository.storage)).items()
            if key.startswith("chunks/")
        }
        await repository.garbage_collect(now())
        with pytest.raises(ChunksCollectedError):
            await session.commit("refused")
        for key, data in kept.items():  # as if the collection had not come to it yet
            await repository.storage.put(key, data)
        await put(0)
        await put(1)
        assert session.collected_chunks == {}
        for key in kept:
            await repository.storage.delete([key])
        await session.commit("whole")
        assert [await read(session, f"a/c/{it}") for it in range(2)] == [chunk(0)] * 2
        assert await chunk_objects(repository) == 1


async def test_an_object_lives_as_long_as_one_of_its_chunks(spec: int) -> None:
    """Expiry and collection count references, not chunks."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        async with repository.transaction("main", message="1", deduplicate=True) as store:
            await make_array(store.session, "a", (20,), (1,))
            for number in range(2):
                await write(store.session, f"a/c/{number}", chunk(0))
        async with repository.transaction("main", message="2") as store:
            await store.delete("a/c/0")
        later = now()
        await repository.expire_snapshots(later)
        await repository.garbage_collect(later)
        reader = await repository.readonly_session("main")
        assert await read(reader, "a/c/0") is None
        assert await read(reader, "a/c/1") == chunk(0)
        async with repository.transaction("main", message="3") as store:
            await store.delete("a/c/1")
        later = now()
        await repository.expire_snapshots(later)
        await repository.garbage_collect(later)
        assert await chunk_objects(repository) == 0


@pytest.mark.parametrize("verified", [False, True])
async def test_writing_a_damaged_chunk_again_mends_it(*, verified: bool) -> None:
    """A chunk that is gone or has other bytes than it had counts as different."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage, sums=True) as repository:
            session = await repository.writable_session("main")
            await everything(session)
            await session.commit("filled")
            refs = await session.workspace.all_refs("/a")
        await storage.delete([chunk_key(native(refs.ref(0)).chunk_id)])
        await storage.put(chunk_key(native(refs.ref(1)).chunk_id), bytes(1000))
        async with Repository.open(storage, verify_reads=verified) as repository:
            async with repository.transaction("main", message="m", deduplicate=True) as store:
                await everything(store.session)
            reader = await repository.readonly_session("main")
            assert [await read(reader, f"a/c/{it}") for it in range(4)] == [*map(chunk, range(4))]


async def test_a_storage_that_fails_is_an_error_and_no_difference() -> None:
    """Else a moment of silence would upload everything."""

    class Failing(LatencyStorage):
        fails = False

        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            if self.fails and key.startswith("chunks/"):
                raise PermissionDeniedError("closed")

    async with open_storage(memory_url()) as plain:
        storage = Failing(plain, seconds=0)
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            await everything(session)
            await session.commit("filled")
            session = await repository.writable_session("main", deduplicate=True)
            storage.fails = True
            storage.forget()
            with pytest.raises(PermissionDeniedError):
                await write(session, "a/c/0", chunk(0))
            assert storage.requests["put"] == 0
            assert not session.has_uncommitted_changes


async def test_chunks_left_as_they_are_conflict_with_nobody_unless_asked(
    spec: int,
) -> None:
    """Another writer's bytes stay; ``unchanged`` makes them a conflict."""
    async with counted(spec) as (repository, _):
        sessions = [await repository.writable_session("main", deduplicate=True) for _ in range(2)]
        for session in sessions:
            await write(session, "a/c/0", chunk(0))
            await write(session, f"a/c/{10 + (session is sessions[1])}", chunk(5))
        async with repository.transaction("main", message="other") as store:
            await write(store.session, "a/c/0", chunk(99))
        with pytest.raises(ConflictError):
            await sessions[0].commit("m", rebase_with=ConflictDetector(), unchanged=["/a"])
        await sessions[1].commit("m", rebase_with=ConflictDetector())
        assert await read(sessions[1], "a/c/0") == chunk(99)
        sessions[0].discard_changes()

"""The cost of hot operations, as counts that must not grow: calls, copies, objects, threads.

Requests and round trips are counted in ``tests/unit/engine/commit/test_commit_cost.py`` and
``test_upkeep_cost.py``. The bounds leave room for other versions of Python and Zarr, not for
another layer on the way to a chunk.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig
from icechunk_async.engine.changes.change_set import ArrayChanges
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId, SnapshotId
from icechunk_async.format.manifest import packed
from icechunk_async.format.manifest.chunk import Kind, NativeChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.operations_log import (
    Availability,
    NewCommit,
    RepoStatus,
    Update,
)
from icechunk_async.format.repo_info import (
    RepoInfo,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async_local import batching, filesystems
from icechunk_async_local.at_once import ReadsAtOnce
from icechunk_async_local.durability import Ledger
from tests.helpers import counted_calls, make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from icechunk_async.zarr import IcechunkStore

PROTOTYPE = default_buffer_prototype()
MIB = 1 << 20


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where a repository can be."""
    return memory_url() if request.param == "memory" else tmp_path.as_uri()


@pytest.fixture
async def store(url: str) -> AsyncGenerator[IcechunkStore]:
    """Open the store of a session that reads, with everything in memory that can be."""
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        for name, size in (("inline", 100), ("native", 10_000), ("large", MIB)):
            await make_array(session, name, (1000,), (1,))
            for number in range(20):
                await write(session, f"{name}/c/{number}", bytes(size))
        await session.commit("filled")
        reader = (await repository.readonly_session("main")).store
        for key in (*KEYS, *KEYS[:2]):  # the second time arrays are decoded
            await reader.get(key, PROTOTYPE)
        yield reader


KEYS = ("inline/c/3", "native/c/3", "large/c/3", "native/zarr.json")


async def _calls_of_get(store: IcechunkStore, key: str) -> list[str]:
    with counted_calls() as calls:
        assert await store.get(key, PROTOTYPE) is not None
    return calls


@pytest.mark.parametrize(
    ("key", "most"), [("native/zarr.json", 12), ("inline/c/3", 27), ("native/c/3", 37)]
)
async def test_read_from_memory_takes_few_calls(store: IcechunkStore, key: str, most: int) -> None:
    """Each costs about a tenth of a microsecond, and a coroutine several times that."""
    calls = await _calls_of_get(store, key)
    assert len(calls) <= most, (len(calls), calls)


@pytest.mark.parametrize(("key", "most"), [("inline/c/3", 27), ("native/c/3", 41)])
async def test_blocking_read_takes_few_calls(store: IcechunkStore, key: str, most: int) -> None:
    """Zarr's fused pipeline reads like this."""
    with counted_calls() as calls:
        assert store.get_sync(key, prototype=PROTOTYPE) is not None
    assert len(calls) <= most, (len(calls), calls)


# Some dozens more than are made: calls into packages vary with what is installed and ran before.
@pytest.mark.parametrize(("spec_version", "most"), [(1, 1250), (2, 1350)])
async def test_opening_again_for_one_chunk_takes_few_calls(
    tmp_path: Path, spec_version: int, most: int
) -> None:
    """Nothing of the directory or the settings is looked at again, and nothing fetched ahead."""
    if not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system reads without waiting")
    config = RepositoryConfig(inline_chunk_threshold_bytes=100)
    url = tmp_path.as_uri()
    async with Repository.create(url, config=config, spec_version=spec_version) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "time", (10,), (1,))  # a name of coordinates
        await write(session, "time/c/1", b"x")
        await session.commit("made")
    loop, turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    async def read() -> None:
        async with Repository.open(url) as repository:
            store = (await repository.readonly_session("main")).store
            assert await store.get("time/c/1", PROTOTYPE) is not None

    await read()
    turn()
    with counted_calls() as calls:
        await read()
    assert turns == 1  # all is in memory, so that nothing waits
    assert not {"root_of", "choose", "load_yaml", "decode_flexbuffer", "Ledger.sync"} & set(calls)
    assert len(calls) <= most, (len(calls), calls)


class _Refusing:
    """A lock that nobody may take."""

    def __enter__(self) -> None:
        raise AssertionError("reading what cannot change took a lock")

    def __exit__(self, *_: object) -> None:
        """Be a lock."""


@pytest.mark.parametrize("key", ["inline/c/3", "native/c/3", "native/c/99"])
async def test_reading_what_cannot_change_takes_no_lock(
    store: IcechunkStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr's fused pipeline reads on several threads, which would wait for one another."""
    looked_at = store.session.workspace
    expected = await store.get(key, PROTOTYPE)
    monkeypatch.setattr(looked_at, "lock", _Refusing())
    monkeypatch.setattr(looked_at.assets.manifests._cache, "_lock", _Refusing())
    for found in (await store.get(key, PROTOTYPE), store.get_sync(key, prototype=PROTOTYPE)):
        assert (found and found.to_bytes()) == (expected and expected.to_bytes())
    assert await store.exists(key) == (expected is not None)


async def test_chunk_of_an_undecoded_manifest_is_read_by_bytes_alone(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request looks up the state of its object."""
    monkeypatch.setattr(packed, "_LARGE_BYTES", 0)  # so that no lookup decodes it
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/3", bytes(10_000))
        await session.commit("filled")

    async with Repository.open(url) as repository:
        store = (await repository.readonly_session("main")).store
        files = store.session.workspace.assets
        assert files.blocking is not None
        # Bytes alone are asked of the backend, which keeps working; no storage is there for more.
        monkeypatch.setattr(files.chunks, "storage", None)
        monkeypatch.setattr(files.blocking.chunks, "storage", None)
        for found in (await store.get("a/c/3", PROTOTYPE), store.get_sync("a/c/3")):
            assert found is not None
            assert found.to_bytes() == bytes(10_000)
        cached = files.manifests._cache._entries.values()
        assert [it.columns for it, _ in cached] == [None]


async def test_reading_what_may_change_takes_the_lock(url: str) -> None:
    """The lock hides half-done changes from readers."""
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        session.workspace.lock = _Refusing()  # type: ignore[assignment]
        with pytest.raises(AssertionError, match="took a lock"):
            await session.store.get("a/c/0", PROTOTYPE)


@pytest.mark.parametrize("url", ["local"], indirect=True)
async def test_reading_what_is_in_memory_takes_no_thread(
    store: IcechunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop to a thread takes longer than all else."""
    if not ReadsAtOnce(tmp_path).active:
        pytest.skip("only Linux on a local file system reads without waiting")
    hops: list[object] = []

    async def hop(_: object, work: Callable[[], object]) -> object:
        hops.append(work)
        return work()

    monkeypatch.setattr(batching.Lane, "run", hop)
    for number in range(20):
        assert await store.get(f"native/c/{number}", PROTOTYPE) is not None
    assert hops == []


async def test_a_large_chunk_is_copied_once(store: IcechunkStore) -> None:
    """From the storage's memory into the answer, which takes no more than its bytes."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        value = await store.get("large/c/3", PROTOTYPE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value is not None
    assert len(value) == MIB
    assert peak - before < MIB + 32_768


async def test_warm_reads_leave_no_objects(store: IcechunkStore) -> None:
    """No entry, no cycle, no task is left of a thousand reads."""
    keys = ["native/c/7", "inline/c/7", "native/zarr.json"]
    for key in keys * 100:
        await store.get(key, PROTOTYPE)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            for key in keys:
                await store.get(key, PROTOTYPE)
        left = sys.getallocatedblocks() - before
        cycles = gc.collect()
    finally:
        gc.enable()
    assert left < 1000  # of 3000 reads
    assert cycles < 1000


def test_manifest_makes_no_object_per_reference() -> None:
    """A manifest of a hundred thousand takes no more Python objects than one of a hundred."""
    made: dict[int, int] = {}
    for count in (100, 100_000):
        coords = np.arange(count, dtype=np.uint32)[:, None]
        ids = np.arange(count * 12, dtype=np.uint32).astype(np.uint8).reshape(count, 12)
        refs = ChunkRefs.build(
            coords,
            Kind.NATIVE,
            objects=np.arange(count, dtype=np.uint32),
            lengths=np.full(count, 5, np.uint64),
            chunk_ids=ids,
        )
        node = NodeId(bytes(8))
        payload = encode_manifest(ManifestId(bytes(12)), {node: refs})
        gc.collect()
        before = sys.getallocatedblocks()
        manifest = decode_manifest(payload)
        assert manifest.refs(node, 1).find((count - 1,)) == count - 1
        made[count] = sys.getallocatedblocks() - before
        del manifest
    assert made[100_000] < made[100] + 200


def test_single_references_become_columns_without_a_call_for_each() -> None:
    """Pending ones are bounded in number, and turned into columns all at once."""
    ids = [ChunkId(number.to_bytes(12)) for number in range(20_000)]
    changes = ArrayChanges(1)
    gc.collect()
    before = sys.getallocatedblocks()
    for number, chunk_id in enumerate(ids):
        changes.set((number,), NativeChunk(chunk_id, 0, 5))
    assert sys.getallocatedblocks() - before < 20_000  # one each would be a tuple, and a reference
    with counted_calls() as calls:
        columns = changes.columns()
    assert len(columns) == 20_000
    assert len(calls) < 500, calls


@pytest.mark.parametrize("chunks", [1, 3000])
async def test_what_was_just_committed_is_found_without_a_request(chunks: int) -> None:
    """A session that begins on a commit of this repository, and a commit after it, read nothing."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        config = RepositoryConfig(inline_chunk_threshold_bytes=0)
        async with Repository.create(storage, config=config) as repository:
            for start in (0, chunks):
                session = await repository.writable_session("main")
                if start == 0:
                    await make_array(session, "a", (10_000,), (1,))
                for number in range(chunks):
                    await write(session, f"a/c/{start + number}", bytes(2))
                storage.forget()
                await session.commit("filled")
                assert storage.requests["get"] == 0
            store = (await repository.readonly_session("main")).store
            storage.forget()
            for number in (0, 2 * chunks - 1):
                assert await store.exists(f"a/c/{number}")
            assert not storage.requests


def test_the_history_is_written_with_few_calls_an_entry() -> None:
    """A repository is copied so; a commit copies what it does not change."""
    ids = [SnapshotId(number.to_bytes(12)) for number in range(501)]
    infos = [
        SnapshotInfo(ids[number], ids[number - 1], number, "a message", (("a", b"b"),))
        for number in range(1, 501)
    ]
    updates = [Update(NewCommit("main", it.id), it.flushed_at, "backup") for it in reversed(infos)]
    root = SnapshotInfo(ids[0], None, 0, "first")
    info = RepoInfo(
        {"main": ids[-1]},
        {},
        frozenset(),
        {it.id: it for it in (root, *infos)},
        RepoStatus(Availability.ONLINE, 0),
        tuple(updates),
    )
    with counted_calls() as calls:
        payload = encode_repo_info(info)
    assert len(calls) < 500 * 18
    found = decode_repo_info(Envelope(2, payload))
    assert found == info
    for _ in range(2):
        with counted_calls() as calls:
            encode_repo_info(replace(found, status=RepoStatus(Availability.ONLINE, 1)))
    assert len(calls) < 500  # what did not change is copied


async def test_deleting_files_takes_few_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted file takes neither a separate lock nor a sync record; eight together take one."""
    asked: list[str] = []

    def count(owner: object, name: str) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> object:
            asked.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    keys = [f"chunks/{number}" for number in range(500)]
    async with open_storage(tmp_path) as storage:
        for key in keys:
            await storage.put(key, b"x")
        count(filesystems, "try_lock")
        count(Ledger, "changed")
        assert await storage.delete(keys) == []
        assert asked.count("try_lock") <= len(keys) // 8 + 1
        assert asked.count("changed") <= len(keys) // 8 + 1
        assert [it async for it in storage.list_prefix("chunks/")] == []


async def test_a_thousand_reads_of_documents_make_no_request() -> None:
    """Nor does a lookup of a chunk, once its manifest is known."""
    url = memory_url()
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", bytes(10_000))
        await session.commit("filled")
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            store = (await repository.readonly_session("main")).store
            assert await store.exists("a/c/0")
            storage.forget()
            for _ in range(1000):
                assert await store.get("a/zarr.json", PROTOTYPE) is not None
                assert await store.exists("a/c/0")
                assert not await store.exists("a/c/1")
            assert [key async for key in store.list_prefix("")] == ["a/zarr.json", "a/c/0"]
            assert not storage.requests


async def test_a_commit_after_others_decodes_nothing_and_waits_for_few_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process knows what it wrote before; how many commits that were does not matter."""
    synced: list[int] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    made: list[list[str]] = []
    async with Repository.create(tmp_path.as_uri()) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10_000,), (1,))
        await session.commit("made")
        for number in range(30):
            with counted_calls() as begun:
                session = await repository.writable_session("main")
                await asyncio.sleep(0)
            # The snapshot and its manifests are in memory: nothing is fetched beside the ref.
            assert not {"preload", "TaskGroup.create_task"} & set(begun)
            await write(session, f"a/c/{number}", b"x")
            del synced[:]
            with counted_calls() as calls:
                await session.commit("one chunk")
            # The four files of the commit and their folders, its reference and the root. The first
            # commit makes folders, so that the root has new entries before the reference.
            assert len(synced) == (10 if number else 11), number
            made.append(calls)
    for calls in made[5:]:
        assert not {"decode_manifest", "decode_snapshot", "decode_repo_info"} & set(calls)
        # Ids are found among the columns that were decoded for the first of these commits.
        assert "SnapshotTable._row" not in calls
        # One for the files and the backup together, and one for the reference.
        assert calls.count("ThreadPoolExecutor.submit") == 2
        assert "wrap_future" not in calls  # each has one future
        # The snapshot, its log and the backup are stored beside the manifest.
        assert calls.count("TaskGroup.create_task") == 3
    assert len(made[5]) < 1500
    assert len(made[-1]) < 1750


async def test_only_manifests_that_replace_others_stay_decoded(tmp_path: Path) -> None:
    """New arrays cost nothing beyond their files; those that change are not decoded again."""
    made: list[list[str]] = []
    async with Repository.create(tmp_path.as_uri()) as repository:
        for turn in range(3):
            session = await repository.writable_session("main")
            for number in range(20):
                if turn == 0:
                    await make_array(session, f"a{number}", (10,), (1,))
                await write(session, f"a{number}/c/{turn}", b"x")
            with counted_calls() as calls:
                await session.commit("twenty arrays")
            made.append(calls)
    new, first, second = made
    assert "ChunkRefs.compact" not in new
    assert "ChunkRefs.narrow" not in new
    assert "encode_manifest" not in new + second  # no columns for so few references
    assert "ChunkRefs.concat" not in second
    assert first.count("decode_manifest") == 1  # they share it
    assert "decode_manifest" not in second


async def test_references_that_a_commit_keeps_hold_no_others(tmp_path: Path) -> None:
    """A manifest that stays decoded has none of the bytes of chunks that were deleted."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=60_000)
    async with Repository.create(tmp_path.as_uri(), config=config) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        for number in range(4):
            await write(session, f"a/c/{number}", bytes(10_000))
        await session.commit("four")
        session = await repository.writable_session("main")
        for number in range(3):
            await session.store.delete(f"a/c/{number}")
        await session.commit("one")
        held = [it for it, _ in repository._engine.assets.manifests._cache._entries.values()]
    columns = held[-1].columns
    assert columns is not None
    assert [refs.inline.nbytes for refs in columns.arrays.values()] == [10_000]

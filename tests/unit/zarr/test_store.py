"""The Icechunk store, beyond Zarr's suite of tests."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr.api.asynchronous as zarr_async
from zarr import AsyncArray
from zarr.abc.store import RangeByteRequest, SuffixByteRequest, SupportsSyncStore
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import (
    InvalidStoreKeyError,
    SessionStateError,
    UnsupportedBySpecError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import array_document, group_document, make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from zarr.core.buffer import Buffer

    from icechunk_async import Session

PROTOTYPE = default_buffer_prototype()


@pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """Begin a session with an array of three chunks: inline, native, missing."""
    async with Repository.create(memory_url(), spec_version=request.param) as repository:
        session = await repository.writable_session("main")
        await write(session, "g/zarr.json", group_document())
        await make_array(session, "g/a", (3,), (1,))
        await write(session, "g/a/c/0", b"inline")
        await write(session, "g/a/c/1", b"native" * 200)
        yield session


def _buffer(data: bytes) -> Buffer:
    return PROTOTYPE.buffer.from_bytes(data)


async def test_impossible_keys_are_refused_on_reading_and_writing(session: Session) -> None:
    """They neither exist nor need deleting."""
    store = session.store
    for key in ("foo", "g/a/c/0.0", "g/a/0"):
        with pytest.raises(InvalidStoreKeyError):
            await store.get(key, PROTOTYPE)
        with pytest.raises(InvalidStoreKeyError):
            await store.set(key, _buffer(b"x"))
        with pytest.raises(InvalidStoreKeyError):
            await store.getsize(key)
        assert not await store.exists(key)
        await store.delete(key)


async def test_documents_of_zarr_format_2_are_missing_and_cannot_be_written(
    session: Session,
) -> None:
    """Zarr looks for them; nobody should store them."""
    store = session.store
    assert await store.get(".zgroup", PROTOTYPE) is None
    assert not await store.exists("g/.zarray")
    with pytest.raises(InvalidStoreKeyError, match="zarr_format=3"):
        await store.set("g/.zarray", _buffer(b"{}"))
    await store.delete(".zattrs")


async def test_rectilinear_grids_need_format_version_2(session: Session) -> None:
    """Version 1 cannot express them, and says what can."""
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[1, 3]]}}
    document = array_document((4,), (4,), chunk_grid=grid)
    if session.spec_version == 1:
        with pytest.raises(UnsupportedBySpecError, match="format version 2"):
            await write(session, "r/zarr.json", document)
        return
    await write(session, "r/zarr.json", document)
    await write(session, "r/c/1", b"abc")
    await session.commit("rectilinear")
    assert await read(session, "r/c/1") == b"abc"


async def test_list_dir_shows_c_only_where_there_is_a_chunk(session: Session) -> None:
    """A store of plain files does the same."""
    store = session.store

    async def names(path: str) -> list[str]:
        return sorted([name async for name in store.list_dir(path)])

    assert await names("") == ["g"]
    assert await names("g") == ["a", "zarr.json"]
    assert await names("g/a") == ["c", "zarr.json"]
    assert await names("g/a/c") == ["0", "1"]
    assert await names("g/a/c/0") == []
    assert await names("nowhere") == []
    await store.delete_dir("g/a/c")
    assert await names("g/a") == ["zarr.json"]


async def test_delete_dir_follows_segment_borders(session: Session) -> None:
    """``c/1`` is not ``c/10``."""
    await make_array(session, "m", (20, 3), (1, 1))
    for i in (1, 10, 11):
        for j in (0, 2):
            await write(session, f"m/c/{i}/{j}", b"x")
    store = session.store
    await store.delete_dir("m/c/1")
    assert sorted([key async for key in store.list_prefix("m/c/")]) == [
        "m/c/10/0",
        "m/c/10/2",
        "m/c/11/0",
        "m/c/11/2",
    ]
    assert await store.getsize_prefix("m/c/10") == 2
    await store.delete_dir("m/c/1/9")
    await store.delete_dir("m/c/x")
    assert await store.getsize_prefix("m/c") == 4


async def test_ranges_of_documents_and_chunks_are_slices(session: Session) -> None:
    """Suffixes of documents too."""
    document = await read(session, "g/zarr.json")
    assert document is not None
    for key, whole in (("g/zarr.json", document), ("g/a/c/1", b"native" * 200)):
        tail = await session.store.get(key, PROTOTYPE, SuffixByteRequest(5))
        middle = await session.store.get(key, PROTOTYPE, RangeByteRequest(2, 7))
        assert tail is not None
        assert middle is not None
        assert (tail.to_bytes(), middle.to_bytes()) == (whole[-5:], whole[2:7])


async def test_neighbouring_ranges_share_a_request() -> None:
    """get_ranges of one chunk asks once for what lies close together."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (2,), (1,))
            await write(session, "a/c/0", bytes(range(256)) * 20)
            await write(session, "a/c/1", b"inline")
            storage.forget()
            ranges = [RangeByteRequest(i * 10, i * 10 + 5) for i in range(20)]
            found = [
                pair
                async for batch in session.store.get_ranges("a/c/0", ranges, prototype=PROTOTYPE)
                for pair in batch
            ]
            whole = bytes(range(256)) * 20
            assert {index: value.to_bytes() for index, value in found if value is not None} == {
                index: whole[wanted.start : wanted.end] for index, wanted in enumerate(ranges)
            }
            assert storage.requests == {"get": 1}
            batches = [
                batch
                async for batch in session.store.get_ranges(
                    "a/c/1", [RangeByteRequest(0, 2), None], prototype=PROTOTYPE
                )
            ]
            assert [
                [(index, value.to_bytes()) for index, value in batch if value is not None]
                for batch in batches
            ] == [[(0, b"in"), (1, b"inline")]]
            with pytest.raises(BaseExceptionGroup) as caught:
                _ = [
                    batch
                    async for batch in session.store.get_ranges(
                        "missing/c/0", ranges, prototype=PROTOTYPE
                    )
                ]
            assert caught.group_contains(FileNotFoundError)


async def test_one_of_racing_set_if_not_exists_wins(session: Session) -> None:
    """Between tasks of one session, for chunks and documents."""
    values = [b"%d" % number * 600 for number in range(16)]
    await bounded_map(
        lambda value: session.store.set_if_not_exists("g/a/c/2", _buffer(value)), values, limit=16
    )
    assert await read(session, "g/a/c/2") in values
    documents = [group_document(number=number) for number in range(4)]
    await bounded_map(
        lambda document: session.store.set_if_not_exists("n/zarr.json", _buffer(document)),
        documents,
        limit=4,
    )
    assert await read(session, "n/zarr.json") == documents[0]


async def test_set_many_writes_documents_before_chunks(session: Session) -> None:
    """In any order."""
    values = [
        ("new/c/0", b"x"),
        ("new/c/1", b"y" * 600),
        ("new/zarr.json", array_document((2,), (1,))),
    ]
    await session.store._set_many((key, _buffer(value)) for key, value in values)
    for key, value in values:
        assert await read(session, key) == value


async def test_the_synchronous_surface_works_while_a_loop_runs(session: Session) -> None:
    """Inline, native and missing chunks, documents, ranges."""
    store = session.store
    assert isinstance(store, SupportsSyncStore)
    assert store._supports_sync_io
    value = store.get_sync("g/a/c/1", byte_range=RangeByteRequest(0, 6))
    assert value is not None
    assert value.to_bytes() == b"native"
    store.set_sync("g/a/c/2", _buffer(b"z" * 1000))
    assert await read(session, "g/a/c/2") == b"z" * 1000
    store.delete_sync("g/a/c/2")
    assert store.get_sync("g/a/c/2") is None
    await session.commit("for a manifest")
    value = store.get_sync("g/a/c/0")
    assert value is not None
    assert value.to_bytes() == b"inline"


async def test_storage_that_waits_has_no_synchronous_surface() -> None:
    """Zarr must then use the asynchronous one."""
    async with (
        open_storage(memory_url()) as plain,
        Repository.create(LatencyStorage(plain, seconds=0)) as repository,
    ):
        session = await repository.writable_session("main")
        assert not session.store._supports_sync_io


async def test_sessions_and_stores_refuse_to_pickle(session: Session) -> None:
    """With advice: a copy could not commit, and connections do not travel."""
    for thing in (session, session.store):
        with pytest.raises(SessionStateError, match=r"open the\s+repository"):
            pickle.dumps(thing)


async def test_a_store_made_read_only_refuses_writes(session: Session) -> None:
    """Though the session would allow them."""
    store = session.store.with_read_only(read_only=True)
    with pytest.raises(ValueError, match="read-only"):
        await store.set("g/a/c/2", _buffer(b"x"))
    with pytest.raises(ValueError, match="read-only"):
        store.set_virtual_ref("g/a/c/2", "file:///x", offset=0, length=1)
    assert store != session.store
    assert session.store == session.store.with_read_only(read_only=False)
    assert hash(session.store) == hash(session.store.with_read_only(read_only=False))


async def test_zarr_writes_and_reads_arrays(session: Session) -> None:
    """With compression and sharding, in pieces, and after a commit."""
    root = await zarr_async.open_group(session.store, mode="a")
    data = np.arange(10_000, dtype="f4").reshape(100, 100)
    plain = await root.create_array("plain", shape=data.shape, chunks=(30, 30), dtype="f4")
    sharded = await root.create_array(
        "sharded", shape=data.shape, chunks=(10, 10), shards=(50, 50), dtype="f4"
    )
    for array in (plain, sharded):
        await array.setitem(slice(None), data)
        await array.setitem((slice(5, 9), 7), -1)
    data[5:9, 7] = -1
    await session.commit("arrays")
    root = await zarr_async.open_group(session.store, mode="r")
    for name in ("plain", "sharded"):
        found = await root.getitem(name)
        assert isinstance(found, AsyncArray)
        np.testing.assert_array_equal(
            await found.getitem((slice(3, 60), slice(4, 31))), data[3:60, 4:31]
        )

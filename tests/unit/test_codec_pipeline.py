"""The codec pipeline that reads many chunks with one call to the store."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as zarr_async
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, TransposeCodec, ZstdCodec
from zarr.errors import ChunkNotFoundError
from zarr.storage import LoggingStore

from icechunk_async import Packing, Repository
from icechunk_async.errors import FormatError
from icechunk_async.storage import open_storage
from icechunk_async.sync import IcechunkError
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.zarr import many
from tests.helpers import cancelled_when, examples, memory_url, read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import numpy.typing as npt
    from zarr import AsyncArray

    from icechunk_async import Session

OURS = "icechunk_async.codec_pipeline.IcechunkCodecPipeline"
ZARRS = "zarr.core.codec_pipeline.BatchedCodecPipeline"


@pytest.fixture(params=["on threads", "on the loop"])
async def session(request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    """Begin a session whose storage answers on threads, or only on an event loop."""
    async with open_storage(memory_url()) as memory:
        on_loop = request.param == "on the loop"
        storage = LatencyStorage(memory, seconds=0) if on_loop else memory
        async with Repository.create(storage) as repository:
            yield await repository.writable_session("main")


async def _created(session: Session, values: npt.NDArray[Any], **how: Any) -> None:
    """Store an array ``a`` of these values; chunks that have only zeros are left out."""
    array = await zarr_async.create_array(
        session.store, name="a", shape=values.shape, dtype=values.dtype, **how
    )
    await array.setitem(slice(None), values)


async def _opened(session: Session, pipeline: str = OURS) -> AsyncArray[Any]:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        return await zarr_async.open_array(store=session.store, path="a", mode="r")


CODECS: dict[str, dict[str, Any]] = {
    "plain": {"compressors": None},
    "zstd and a checksum": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "blosc": {"compressors": [BloscCodec()]},
    "transposed": {"filters": [TransposeCodec(order=(1, 0))], "compressors": None},
    "big-endian": {"serializer": BytesCodec(endian="big"), "compressors": None},
    "sharded": {"shards": (6, 4)},
}
TYPES = ["f4", "i2", "?", "u1", "c8", "<U3", ">i4", "M8[s]"]
SELECTIONS: dict[str, Callable[[AsyncArray[Any]], Any]] = {
    "all": lambda it: it.getitem(slice(None)),
    "steps": lambda it: it.getitem((slice(1, None, 3), slice(0, 6, 2))),
    "a row": lambda it: it.getitem((4, slice(None))),
    "a column": lambda it: it.getitem((slice(None), -1)),
    "orthogonal": lambda it: it.get_orthogonal_selection((np.array([0, 3, 9]), slice(1, 6))),
    "points": lambda it: it.get_coordinate_selection(([0, 9, 5, 5], [6, 0, 1, 1])),
    "a mask": lambda it: it.get_mask_selection(np.arange(70).reshape(10, 7) % 5 == 0),
}


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("dtype", TYPES)
async def test_any_selection_of_any_array_is_what_zarr_reads(
    session: Session, dtype: str, codecs: str
) -> None:
    """Zarr's default pipeline reads the same array, some chunks of which do not exist."""
    values = (np.arange(70).reshape(10, 7) * 7 % 11).astype("i8")
    values[:3, :2] = values[6:9, 4:6] = 0
    values = values.astype(dtype) if dtype != "M8[s]" else values.view(dtype)
    await _created(session, values, chunks=(3, 2), fill_value=values[0, 0], **CODECS[codecs])
    ours, zarrs = await _opened(session), await _opened(session, ZARRS)
    for name, selected in SELECTIONS.items():
        got, expected = await selected(ours), await selected(zarrs)
        assert got.dtype == expected.dtype, name
        assert np.array_equal(got, expected), name


@examples(120)
@given(st.data())
async def test_random_slices_are_those_of_numpy(data: st.DataObject) -> None:
    """Of arrays of up to three axes, with random chunks and steps."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    chunks = [data.draw(st.integers(1, size)) for size in sizes]
    values = np.arange(np.prod(sizes), dtype="i4").reshape(sizes)
    key = tuple(
        data.draw(st.one_of(st.slices(size).filter(lambda it: (it.step or 1) > 0), _index(size)))
        for size in sizes
    )
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await _created(session, values, chunks=tuple(chunks))
        assert np.array_equal(await (await _opened(session)).getitem(key), values[key])


def _index(size: int) -> st.SearchStrategy[int]:
    return st.integers(0, size - 1)


@pytest.mark.parametrize("empty", [False, True], ids=["without empty chunks", "with empty chunks"])
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("dtype", TYPES[::2])
async def test_what_is_written_is_what_zarr_writes(
    session: Session, dtype: str, codecs: str, *, empty: bool
) -> None:
    """Byte by byte, also where chunks are written in part, have only fill values, or both."""
    values = (np.arange(70).reshape(10, 7) * 7 % 11).astype("i8")
    values[:3, :2] = values[6:9, 4:6] = 0
    values = values.astype(dtype) if dtype != "M8[s]" else values.view(dtype)
    fill = values[0, 0]
    how: dict[str, Any] = {"chunks": (3, 2), "fill_value": fill, **CODECS[codecs]}
    for name, pipeline in (("ours", OURS), ("zarrs", ZARRS)):
        with zarr.config.set({"codec_pipeline.path": pipeline, "array.write_empty_chunks": empty}):
            array = await zarr_async.create_array(
                session.store, name=name, shape=values.shape, dtype=values.dtype, **how
            )
        await array.setitem(slice(None), values)
        await array.setitem((slice(2, 9), slice(1, 7)), values[1:8, :6])
        await array.setitem((4, slice(None)), values[0])
        await array.setitem((slice(6, 10), slice(None)), fill)
        await array.setitem((slice(None), slice(2, 4)), np.asfortranarray(values[:, :2]))
    stored = {key: await read(session, key) async for key in session.store.list_prefix("zarrs/c")}
    ours = {key: await read(session, key) async for key in session.store.list_prefix("ours/c")}
    assert ours == {key.replace("zarrs", "ours"): data for key, data in stored.items()}
    assert 0 < len(stored) <= 16


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan")])
@pytest.mark.parametrize("fill", [0.0, -0.0, float("nan")])
async def test_zeros_and_missing_values_are_fill_values_where_zarr_says_so(
    session: Session, value: float, fill: float
) -> None:
    """Zero has a sign, and NaN is not equal to itself."""
    values = np.full((4, 2), value)
    values[2:] = [1, value]
    for name, pipeline in (("ours", OURS), ("zarrs", ZARRS)):
        with zarr.config.set({"codec_pipeline.path": pipeline}):
            array = await zarr_async.create_array(
                session.store, name=name, shape=(4, 2), chunks=(1, 2), dtype="f8", fill_value=fill
            )
        await array.setitem(slice(None), values)
    ours = [key async for key in session.store.list_prefix("ours/c")]
    zarrs = [key async for key in session.store.list_prefix("zarrs/c")]
    assert ours == [key.replace("zarrs", "ours") for key in zarrs]


@pytest.mark.parametrize("length", [10, 1000], ids=["inline", "objects"])
async def test_an_array_can_be_changed_once_it_is_written(session: Session, length: int) -> None:
    """The session keeps none of its memory."""
    values = np.ones((4, length))
    with zarr.config.set({"codec_pipeline.path": OURS}):
        await _created(session, values, chunks=(1, length), compressors=None)
    values[:] = 2
    array = await _opened(session)
    assert np.array_equal(await array.getitem(slice(None)), np.ones((4, length)))


async def test_packed_chunks_and_statistics_are_written_as_by_zarr(tmp_path: Path) -> None:
    """Chunks share objects, and their statistics answer without reading them."""
    async with Repository.create(tmp_path.as_uri(), packing=Packing()) as repository:
        session = await repository.writable_session("main")
        values = np.random.default_rng(0).random((200, 100))
        with zarr.config.set({"codec_pipeline.path": OURS}):
            await _created(session, values, chunks=(1, 100), compressors=None)
            await session.commit("written")
        assert len(list((tmp_path / "chunks").iterdir())) == 1
        session = await repository.readonly_session("main")
        assert np.array_equal(await (await _opened(session)).getitem(slice(None)), values)


async def test_a_session_that_reads_refuses_to_write(session: Session) -> None:
    """Nothing is written, and the error is the one of a single chunk."""
    values = np.arange(12).reshape(6, 2)
    await _created(session, values, chunks=(1, 2))
    with zarr.config.set({"codec_pipeline.path": OURS}):
        array = await zarr_async.open_array(store=session.store, path="a", mode="r+")
    await session.commit("written")
    with pytest.raises(ValueError, match="read-only") as one:
        await session.store.set("a/c/0/0", zarr.core.buffer.cpu.Buffer.from_bytes(b"x"))
    with pytest.raises(type(one.value), match=re.escape(str(one.value))):
        await array.setitem(slice(None), values)


async def test_an_array_in_fortran_order_is_read(session: Session) -> None:
    """The result is laid out as the array's configuration says."""
    values = np.arange(70).reshape(10, 7)
    await _created(session, values, chunks=(3, 2))
    with zarr.config.set({"array.order": "F"}):
        got: Any = await (await _opened(session)).getitem(slice(None))
    assert got.flags.f_contiguous
    assert np.array_equal(got, values)


async def test_missing_chunks_are_refused_where_zarr_is_told_to(session: Session) -> None:
    """The error names the chunk."""
    await _created(session, np.array([1, 1, 0, 0, 1]), chunks=(2,))
    with zarr.config.set({"array.read_missing_chunks": False}):
        array = await _opened(session)
        with pytest.raises(ChunkNotFoundError, match="c/1"):
            await array.getitem(slice(None))


@pytest.mark.parametrize("codecs", ["plain", "zstd and a checksum"])
async def test_a_chunk_that_is_too_short_is_zarrs_error(session: Session, codecs: str) -> None:
    """So is one that does not decompress."""
    await _created(session, np.ones((4, 4)), chunks=(2, 2), **CODECS[codecs])
    await session.store.set("a/c/1/0", zarr.core.buffer.cpu.Buffer.from_bytes(b"short" * 3))
    with pytest.raises((ValueError, RuntimeError)) as expected:
        await (await _opened(session, ZARRS)).getitem(slice(None))
    with pytest.raises(type(expected.value)):
        await (await _opened(session)).getitem(slice(None))


async def test_a_chunk_whose_object_is_missing_is_a_format_error(tmp_path: Path) -> None:
    """Locally, where threads read."""
    async with Repository.create(tmp_path.as_uri()) as repository:
        session = await repository.writable_session("main")
        await _created(session, np.random.default_rng(0).random((4, 500)), chunks=(1, 500))
        os.unlink(next((tmp_path / "chunks").iterdir()))  # noqa: PTH108 -- of two, any
        with pytest.raises(FormatError, match="missing"):
            await (await _opened(session)).getitem(slice(None))


def test_the_blocking_facade_reads_by_it_and_raises_its_own_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stores are handed all chunks at once, too."""
    repository = BlockingRepository.create(tmp_path.as_uri())
    session = repository.writable_session("main")
    values = np.random.default_rng(0).random((6, 500))
    with zarr.config.set({"codec_pipeline.path": OURS}):
        array = zarr.create_array(session.store, name="a", data=values, chunks=(1, 500))
    calls: list[int] = []
    original = many.on_threads

    async def counted(work: Any, count: int, **more: Any) -> None:
        calls.append(count)
        await original(work, count, **more)

    monkeypatch.setattr(many, "on_threads", counted)
    assert np.array_equal(array[1:], values[1:])
    array[2:] = values[2:]
    assert calls == [5, 4]
    for path in (tmp_path / "chunks").iterdir():
        path.unlink()
    with pytest.raises(IcechunkError, match="missing"):
        array[:]


async def test_only_the_configuration_has_to_name_it() -> None:
    """Nothing of this library is imported by hand, and opening other arrays imports no more."""
    program = f"""
import sys, zarr
zarr.create_array({{}}, shape=(4,), dtype="i4")[:]
assert sorted(it for it in sys.modules if it.startswith("icechunk_async.")) == [
    "icechunk_async._version", "icechunk_async.codec_pipeline"
]
with zarr.config.set({{"codec_pipeline.path": {OURS!r}}}):
    array = zarr.create_array({{}}, shape=(4,), chunks=(2,), dtype="i4")
array[:] = [1, 2, 3, 4]
assert array[:].tolist() == [1, 2, 3, 4]
print(type(array._async_array.codec_pipeline).__name__)
"""
    done = await anyio.run_process([sys.executable, "-c", program])
    assert done.stdout.split() == [b"IcechunkCodecPipeline"]


async def test_a_store_around_ours_is_read_chunk_by_chunk(session: Session) -> None:
    """It may do something with each chunk, such as logging."""
    values = np.arange(12).reshape(6, 2)
    await _created(session, values, chunks=(1, 2))
    store = LoggingStore(session.store)
    with zarr.config.set({"codec_pipeline.path": OURS}):
        array = await zarr_async.open_array(store=store, path="a", mode="r")
    inner = array.store_path.store
    assert isinstance(inner, LoggingStore)
    before = sum(inner.counter.values())
    assert np.array_equal(await array.getitem(slice(None)), values)
    assert sum(inner.counter.values()) - before >= len(values)


async def test_many_requests_are_under_way_at_once() -> None:
    """More than Zarr's own limit allows; large chunks keep to that."""
    async with open_storage(memory_url()) as memory:
        storage = LatencyStorage(memory, seconds=0)
        running = peak = 0

        async def get(key: str, *args: Any, **more: Any) -> Any:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await anyio.lowlevel.checkpoint()
            running -= 1
            return await LatencyStorage.get(storage, key, *args, **more)

        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            await _created(
                session, np.arange(100 * 200.0).reshape(100, 200), chunks=(1, 200), compressors=None
            )
            array = await _opened(session)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(storage, "get", get)
                await array.getitem(slice(None))
                assert peak == 64
                peak = 0
                patch.setattr(many, "_MEMORY_BYTES", 1000)
                await array.getitem(slice(None))
                assert peak == zarr.config.get("async.concurrency")


async def _threads_of(*, waits: bool, chunk_bytes: int) -> set[int]:
    """Work on a thousand chunks; return the threads that did it."""
    done: list[int] = []
    threads: set[int] = set()

    def work(index: int) -> None:
        threads.add(threading.get_ident())
        done.append(index)
        if waits:
            time.sleep(0.0002)  # as for a disk

    await many.on_threads(work, 1000, chunk_bytes=chunk_bytes)
    assert sorted(done) == list(range(1000))
    return threads


async def test_small_chunks_in_memory_are_left_to_one_thread() -> None:
    """Several would wait for each other."""
    assert len(await _threads_of(waits=False, chunk_bytes=10_000)) == 1


async def test_threads_share_chunks_that_a_disk_is_waited_for_and_large_ones() -> None:
    """There the interpreter is free meanwhile."""
    assert len(await _threads_of(waits=True, chunk_bytes=10_000)) > 1
    assert len(await _threads_of(waits=True, chunk_bytes=1_000_000)) > 1


@pytest.mark.parametrize("chunk_bytes", [10_000, 1_000_000])
async def test_work_on_threads_can_be_cancelled(chunk_bytes: int) -> None:
    """After the chunks that are being worked on."""
    done: list[int] = []
    working = many.on_threads(done.append, 100_000, chunk_bytes=chunk_bytes)
    await cancelled_when(working, lambda: bool(done))
    assert 0 < len(done) < 100_000

"""The codec pipeline that reads many chunks with one call to the store."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

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

from icechunk_async import Repository
from icechunk_async.errors import FormatError
from icechunk_async.storage import open_storage
from icechunk_async.sync import IcechunkError
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.zarr import many
from tests.helpers import cancelled_when, examples, memory_url

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
TYPES = ["f4", "i2", "u1", "?", "c8", ">i4", "M8[s]", "<U3"]
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
    original = many.read_here

    async def counted(chunks: Any, path: str, coords: Any, *args: Any, **more: Any) -> None:
        calls.append(len(coords))
        await original(chunks, path, coords, *args, **more)

    monkeypatch.setattr(many, "read_here", counted)
    assert np.array_equal(array[1:], values[1:])
    assert calls == [5]
    os.unlink(next((tmp_path / "chunks").iterdir()))  # noqa: PTH108 -- any
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


class _Disk:
    """Chunks on a disk that has, or has not, to be waited for."""

    def __init__(self, *, waits: bool) -> None:
        self.threads: set[int] = set()
        self._waits = waits

    def read(self, _: str, coords: tuple[int, ...]) -> bytes:
        self.threads.add(threading.get_ident())
        if self._waits:
            time.sleep(0.0002)  # as a disk that has to be asked
        return bytes(coords)


async def _taken(disk: _Disk, count: int, chunk_bytes: int) -> list[bytes]:
    found: dict[int, Any] = {}
    await many.read_here(
        cast("Any", disk),
        "/a",
        [(it % 256,) for it in range(count)],
        found.__setitem__,
        chunk_bytes=chunk_bytes,
    )
    return [found[it] for it in range(count)]


@pytest.mark.parametrize(
    ("waits", "chunk_bytes", "one"),
    [(False, 10_000, True), (True, 10_000, False), (False, 1_000_000, False)],
    ids=["small chunks in memory", "small chunks on a disk", "large chunks"],
)
async def test_threads_share_the_work_where_that_is_quicker(
    *, waits: bool, chunk_bytes: int, one: bool
) -> None:
    """Small chunks in the cache of the system are read by one thread at a time."""
    disk = _Disk(waits=waits)
    assert await _taken(disk, 1000, chunk_bytes) == [bytes([it % 256]) for it in range(1000)]
    assert (len(disk.threads) == 1) is one


@pytest.mark.parametrize("chunk_bytes", [10_000, 1_000_000])
async def test_reading_can_be_cancelled(chunk_bytes: int) -> None:
    """After the chunks that are being read."""
    taken: list[int] = []
    reading = many.read_here(
        cast("Any", _Disk(waits=False)),
        "/a",
        [(0,)] * 100_000,
        lambda index, _: taken.append(index),
        chunk_bytes=chunk_bytes,
    )
    await cancelled_when(reading, lambda: bool(taken))
    assert 0 < len(taken) < 100_000

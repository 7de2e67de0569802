"""Statistics that are made as chunks are written: equal to those of `analyze`, and never needed."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as za
from hypothesis import given

from icechunk_async import Packing, Repository
from icechunk_async._runtime import clock
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import StorageUnavailableError, UnsupportedBySpecError
from icechunk_async.format.statistics import ChunkStatistics
from icechunk_async.session import ForkSession
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.zarr.queries.written import WrittenChunks
from tests.helpers import examples, memory_url, objects, write
from tests.unit.zarr.queries.test_aggregate import NO_INLINE, Case, cases
from tests.unit.zarr.queries.truth import commit_array, put_array

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from icechunk_async.storage import Storage

VALUES = np.arange(12, dtype="i8")


@pytest.fixture
async def keeping() -> AsyncIterator[Repository]:
    """Open a repository that asks for statistics with each commit."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await repository.keep_statistics()
        yield repository


async def stored(storage: Storage) -> list[str]:
    """Return the keys of statistics."""
    return [it for it in await objects(storage) if it.startswith("statistics/")]


async def total(repository: Repository, path: str = "a", branch: str = "main") -> tuple[Any, int]:
    """Return the sum of an array, and the number of chunks that had to be read."""
    found = await (await repository.readonly_session(branch)).aggregate(path, "sum")
    return found.value, found.chunks_read


async def rows_in(repository: Repository) -> dict[bytes, tuple[Any, ...]]:
    """Return all rows of statistics by their keys, bit for bit."""
    session = await repository.readonly_session("main")
    files = session.workspace.assets.statistics
    found: dict[bytes, tuple[Any, ...]] = {}
    for it in await files.find(await session.get_node_id("a")):
        data = (await repository.storage.get(f"statistics/{it}")).data
        statistics = ChunkStatistics.decode(data, it)
        for row in statistics.rows:
            found[bytes(row["key"])] = (statistics.meaning, statistics.kind, row.tobytes())
    return found


async def test_none_are_made_unless_a_repository_asks_for_them() -> None:
    """The setting is stored for all who open it, and may be taken back."""
    url = memory_url()
    async with Repository.create(url, config=NO_INLINE, packing=Packing(5_000, 2_000)) as first:
        assert not first.keeps_statistics
        await commit_array(first, VALUES, (3,))
        assert await stored(first.storage) == []
        await first.keep_statistics()
        assert first.keeps_statistics
    async with Repository.open(url, config=NO_INLINE) as second:
        assert second.keeps_statistics
        assert second.packing == Packing(5_000, 2_000)
        await commit_array(second, VALUES, (3,), path="/b")
        assert await total(second, "b") == (66, 0)
        await second.keep_statistics(enabled=False)
        await commit_array(second, VALUES, (3,), path="/c")
        assert await total(second, "c") == (66, 4)
    async with Repository.open(url, config=NO_INLINE) as third:
        assert not third.keeps_statistics


async def test_format_version_1_has_no_place_for_the_setting() -> None:
    """It says so, and nothing is made."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        with pytest.raises(UnsupportedBySpecError, match="format version 1"):
            await repository.keep_statistics()
        assert not repository.keeps_statistics


@pytest.mark.parametrize("pipeline", ["BatchedCodecPipeline", "FusedCodecPipeline"])
@examples(100)
@given(cases())
async def test_they_are_those_that_analysis_makes(pipeline: str, case: Case) -> None:
    """To the last bit, of all types, with an event loop and without; so no chunk is read."""
    with (
        warnings.catch_warnings(),
        zarr.config.set({"codec_pipeline.path": f"zarr.core.codec_pipeline.{pipeline}"}),
    ):
        warnings.simplefilter("ignore")  # of Zarr, about types without a specification
        url = memory_url()
        async with Repository.create(url, config=NO_INLINE) as repository:
            await repository.keep_statistics()
            await commit_array(
                repository, case.raw, case.chunks, attributes=case.attributes, fill=case.fill
            )
            assert (await repository.analyze()).chunks == 0
            made = await rows_in(repository)
            await repository.storage.delete(await stored(repository.storage))
        async with Repository.open(url, config=NO_INLINE) as again:
            await again.analyze()
            assert await rows_in(again) == made


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"shards": (6,)},
        {"compressors": None},
        {"config": {"write_empty_chunks": True}},
    ],
)
async def test_all_forms_of_chunks_have_them(form: dict[str, Any]) -> None:
    """Inline and in objects, packed, in shards, compressed or not."""
    for options in (
        {},
        {"config": NO_INLINE},
        {"config": NO_INLINE, "packing": Packing(5_000, 2_000)},
    ):
        async with Repository.create(memory_url(), **options) as repository:
            await repository.keep_statistics()
            await commit_array(repository, VALUES, (3,), **form)
            assert await total(repository) == (66, 0)


async def test_the_last_of_several_writes_counts(keeping: Repository) -> None:
    """Chunks written again in parts leave no rows of bytes that are gone."""
    session = await keeping.writable_session("main")
    await put_array(session, "/a", VALUES, (3,))
    array = await za.open_array(store=session.store, path="a", mode="r+")
    for at in range(12):
        await array.setitem(slice(at, at + 1), 100)
    await array.resize((14,))
    await array.setitem(slice(12, 14), 5)
    await session.commit("written again")
    assert await total(keeping) == (1210, 0)
    assert len(await rows_in(keeping)) == 5


async def test_an_array_that_grows_later_leaves_no_wrong_edge(keeping: Repository) -> None:
    """More cells of a chunk count than did when it was written: it is read."""
    session = await keeping.writable_session("main")
    await put_array(session, "/a", VALUES[:10], (4,), fill=7)
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.resize((12,))
    await session.commit("grown in the session")
    assert await total(keeping) == (59, 1)


async def test_attributes_that_change_what_is_missing_make_them_unknown(
    keeping: Repository,
) -> None:
    """A fill value that is named after the chunks were written."""
    session = await keeping.writable_session("main")
    await put_array(session, "/a", VALUES, (3,))
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.update_attributes({"_FillValue": 11})
    await session.commit("11 is missing")
    assert await total(keeping) == (55, 4)


async def test_a_lost_race_stores_them_once(keeping: Repository) -> None:
    """A commit that is tried again on top of another one has them, and so has the other."""
    await commit_array(keeping, VALUES, (3,), path="/c")
    ours, theirs = [await keeping.writable_session("main") for _ in range(2)]
    await put_array(theirs, "/b", VALUES, (3,))
    await put_array(ours, "/a", VALUES, (3,))
    await theirs.commit("first")
    await ours.commit("second", rebase_with=ConflictDetector())
    assert await total(keeping) == (66, 0)
    assert await total(keeping, "b") == (66, 0)
    assert len(await stored(keeping.storage)) == 3


async def test_amendments_flushes_and_merged_branches_have_them(keeping: Repository) -> None:
    """All that stores a snapshot."""
    await commit_array(keeping, VALUES, (3,))
    session = await keeping.writable_session("main")
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.setitem(slice(0, 3), 10)
    await session.amend("amended")
    assert await total(keeping) == (93, 0)
    await keeping.create_branch("other", session.snapshot_id)
    session = await keeping.writable_session("other")
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.setitem(slice(3, 6), 0)
    flushed = await session.flush("flushed")
    found = await (await keeping.readonly_session(snapshot_id=flushed)).aggregate("a", "sum")
    assert (found.value, found.chunks_read) == (81, 0)


async def test_forks_make_them_here_and_elsewhere(keeping: Repository) -> None:
    """Those that stay leave them to their session, those that travel store them before."""
    session = await keeping.writable_session("main")
    await put_array(session, "/a", np.zeros(12, "i8"), (3,), config={"write_empty_chunks": True})
    near, other = await session.fork(), await session.fork()
    far = ForkSession.from_bytes(other.to_bytes())
    array = await za.open_array(store=near.store, path="a", mode="r+")
    await array.setitem(slice(0, 3), 1)
    async with far.attached(keeping.storage) as attached:
        array = await za.open_array(store=attached.store, path="a", mode="r+")
        await array.setitem(slice(3, 6), 2)
    assert len(await stored(keeping.storage)) == 1
    await session.merge(near, ForkSession.from_bytes(far.to_bytes()))
    await session.commit("forks")
    assert await total(keeping) == (9, 0)


def test_threads_and_pickled_forks_of_the_facade_make_them(tmp_path: Path) -> None:
    """As tasks of Dask and Spark do; the facade has the switch."""
    import pickle

    repository = BlockingRepository.create(str(tmp_path / "r"))
    repository.keep_statistics()
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(2000,), chunks=(500,), dtype="f8")
    fork = pickle.loads(pickle.dumps(session.fork()))
    zarr.open_array(fork.store, path="a")[:1000] = 1.5
    zarr.open_array(session.store, path="a")[1000:] = 2.5
    session.merge(pickle.loads(pickle.dumps(fork)))
    session.commit("two writers", allow_missing_forks=True)
    found = repository.readonly_session("main").aggregate("a", "sum")
    assert (found.value, found.chunks_read) == (4000.0, 0)
    assert BlockingRepository.open(str(tmp_path / "r")).handle.now().keeps_statistics


async def test_values_without_order_and_bytes_that_are_no_chunk_stop_nothing(
    keeping: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no statistics, as with `analyze`."""
    session = await keeping.writable_session("main")
    await za.create_array(session.store, name="waves", data=np.array([1j, 2j]), chunks=(1,))
    await put_array(session, "/far", VALUES, (3,), attributes={"add_offset": 10**400})
    await put_array(session, "/a", VALUES, (3,), compressors=None)
    with caplog.at_level(logging.WARNING):
        await write(session, "a/c/2", b"short")
    assert "statistics of a chunk of '/a' stay unknown" in caplog.text
    await session.commit("waves, and a damaged chunk")
    found = await (await keeping.readonly_session("main")).aggregate(
        "a", "sum", region=(slice(0, 6),)
    )
    assert (found.value, found.chunks_read) == (15, 0)
    assert len(await stored(keeping.storage)) == 1


async def test_storage_that_fails_loses_statistics_and_no_commit(
    keeping: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks stay unknown, the log says so, and `analyze` makes up for it."""
    files = (await keeping.readonly_session("main")).workspace.assets.statistics

    async def fail(*_: object) -> None:
        raise StorageUnavailableError("gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(files, "put", fail)
        await commit_array(keeping, VALUES, (3,))
    assert "statistics of 4 chunk(s) stay unknown: gone" in caplog.text
    assert await total(keeping) == (66, 4)
    assert (await keeping.analyze()).chunks == 4
    assert await total(keeping) == (66, 0)


class _NoStatistics(LatencyStorage):
    """Turns away what is stored below ``statistics/``, or never answers."""

    answers = True

    async def before(self, operation: str, key: str) -> None:
        await super().before(operation, key)
        if operation == "put" and key.startswith("statistics/"):
            if not self.answers:
                await anyio.sleep_forever()
            raise StorageUnavailableError("busy")


@pytest.mark.parametrize("answers", [True, False])
def test_a_commit_waits_five_seconds_for_statistics(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """Of any number of arrays: requests are repeated for half a minute otherwise."""
    # By chance all pauses between tries may be short, so that the tries are used up before.
    monkeypatch.setattr(clock, "uniform", lambda: 1.0)

    async def seconds() -> float:
        async with open_storage(memory_url()) as plain:
            storage = _NoStatistics(plain, seconds=0)
            storage.answers = answers
            async with Repository.create(storage, config=NO_INLINE) as repository:
                await repository.keep_statistics()
                session = await repository.writable_session("main")
                for number in range(20):
                    await put_array(session, f"/a{number}", VALUES, (3,))
                began = asyncio.get_running_loop().time()
                await session.commit("twenty arrays")
                return asyncio.get_running_loop().time() - began

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(seconds()) == pytest.approx(5)
    assert "statistics of 80 chunk(s) stay unknown: storage needed more than 5 s" in caplog.text


async def test_a_commit_makes_one_request_more_for_each_array() -> None:
    """Beside its other files; no chunk is read for it, and none of an array without changes."""

    async def cost(*, keep: bool) -> tuple[int, int]:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=0)
            async with Repository.create(storage, config=NO_INLINE) as repository:
                if keep:
                    await repository.keep_statistics()
                for path in ("/a", "/b", "/c"):
                    await commit_array(repository, VALUES, (3,), path=path)
                session = await repository.writable_session("main")
                for path in ("a", "b"):
                    array = await za.open_array(store=session.store, path=path, mode="r+")
                    await array.setitem(slice(0, 3), 1)
                storage.forget()
                await session.commit("two arrays")
                return len(storage.log), sum("statistics/" in key for _, key in storage.log)

    without, none = await cost(keep=False)
    with_them, two = await cost(keep=True)
    assert (none, two) == (0, 2)
    assert with_them == without + 2


async def test_analysis_joins_what_many_commits_stored(keeping: Repository) -> None:
    """It reads no chunk for that."""
    await commit_array(keeping, VALUES, (3,))
    for number in range(17):
        session = await keeping.writable_session("main")
        array = await za.open_array(store=session.store, path="a", mode="r+")
        await array.setitem(slice(0, 3), number + 1)
        await session.commit(f"{number}")
    assert len(await stored(keeping.storage)) == 18
    analysis = await keeping.analyze()
    assert (analysis.chunks, analysis.bytes_read) == (0, 0)
    assert len(await stored(keeping.storage)) == 1
    assert await total(keeping) == (114, 0)


async def test_many_documents_and_large_tables_are_bounded(
    keeping: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append changes the document each time; an object has a limited number of rows."""
    from icechunk_async.zarr.queries import written

    monkeypatch.setattr(written, "_FORMS", 3)
    monkeypatch.setattr(written, "_ROWS", 4)
    session = await keeping.writable_session("main")
    await put_array(session, "/a", VALUES[:1], (1,))
    array = await za.open_array(store=session.store, path="a", mode="r+")
    for at in range(1, 10):
        await array.resize((at + 1,))
        await array.setitem(slice(at, at + 1), at)
    recorder = session.workspace.recorder
    assert isinstance(recorder, WrittenChunks)
    assert len(recorder._forms) <= 3
    await session.commit("appended")
    assert len(await stored(keeping.storage)) == 3
    assert await total(keeping) == (45, 0)


async def test_chunks_wait_for_the_commit_in_some_400_bytes_each(keeping: Repository) -> None:
    """They are gone with the commit."""
    count = 300
    session = await keeping.writable_session("main")
    array = await za.create_array(
        session.store, name="a", shape=(count,), chunks=(1,), dtype="i4", compressors=None
    )
    tracemalloc.start()
    try:
        await array.setitem(slice(None), np.arange(count, dtype="i4") + 1)
        recorder = session.workspace.recorder
        assert isinstance(recorder, WrittenChunks)
        before, _ = tracemalloc.get_traced_memory()
        assert sum(map(len, recorder._pending.values())) == count
        recorder._pending.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100 * count < before - after < 500 * count


@pytest.mark.parametrize("change", ["shift", "move"])
async def test_they_move_with_chunks(keeping: Repository, change: str) -> None:
    """Nothing is measured again."""
    await commit_array(keeping, VALUES, (3,))
    doing: dict[str, Callable[[], Any]] = {
        "shift": lambda: keeping.writable_session("main"),
        "move": lambda: keeping.rearrange_session("main"),
    }
    session = await doing[change]()
    if change == "shift":
        await session.shift_array("a", (1,))
        await session.commit("shifted")
        assert await total(keeping) == (36, 0)
    else:
        await session.move("/a", "/b")
        await session.commit("moved")
        assert await total(keeping, "b") == (66, 0)
    assert len(await stored(keeping.storage)) == 1

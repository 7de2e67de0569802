"""Statistics of chunks: kept with the bytes that they are about, wherever these go."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tracemalloc
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as za
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.config import (
    LocalFileSystemStore,
    RepositoryConfig,
    VirtualChunkContainer,
)
from icechunk_async.engine.upkeep.copying.copy import copy_repository
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.ids import NodeId, StatisticsId
from icechunk_async.format.statistics import ChunkStatistics, joined, row_type
from icechunk_async.storage import open_storage
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.zarr.queries import analyze as analyzing
from icechunk_async.zarr.queries.aggregate import aggregate
from tests.helpers import examples, memory_url, objects, write
from tests.unit.zarr.queries.test_aggregate import NO_INLINE
from tests.unit.zarr.queries.truth import commit_array, put_array

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async import Session
    from icechunk_async.storage import RangeRequest, Retrieved

VALUES = np.arange(12, dtype="i8")


@pytest.fixture
async def analyzed(spec: int) -> AsyncIterator[Repository]:
    """Open a repository with an array of four chunks, all analyzed."""
    async with Repository.create(memory_url(), spec_version=spec, config=NO_INLINE) as repository:
        await commit_array(repository, VALUES, (3,))
        assert (await repository.analyze()).chunks == 4
        yield repository


async def stored(repository: Repository) -> list[str]:
    """Return the keys of statistics."""
    return [it for it in await objects(repository.storage) if it.startswith("statistics/")]


async def reads(session: Session, path: str = "a") -> tuple[Any, int]:
    """Return the sum of an array, and the number of chunks that had to be read."""
    found = await session.aggregate(path, "sum")
    return found.value, found.chunks_read


async def test_second_analysis_reads_what_is_new(analyzed: Repository) -> None:
    """Statistics are found by any snapshot, tag or branch that has the chunks."""
    again = await analyzed.analyze()
    assert (again.chunks, again.known, again.bytes_read) == (0, 4, 0)
    session = await analyzed.writable_session("main")
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.setitem(slice(0, 3), -1)
    assert await reads(session) == (60, 1)
    await session.commit("one chunk is new")
    assert await reads(await analyzed.readonly_session("main")) == (60, 1)
    more = await analyzed.analyze()
    assert (more.chunks, more.known) == (1, 3)
    assert await reads(await analyzed.readonly_session("main")) == (60, 0)


async def test_statistics_move_with_chunks_and_arrays(analyzed: Repository) -> None:
    """Shifts, reindexing, moves, merges of branches and rewritten manifests read no chunk."""
    session = await analyzed.writable_session("main")
    await session.shift_array("a", (1,))
    assert await reads(session) == (36, 0)
    await session.reindex_array("a", lambda at: [3 - at[0]], lambda at: [3 - at[0]])
    assert await reads(session) == (36, 0)
    await session.commit("turned round")
    await analyzed.rewrite_manifests("rewritten", branch="main")
    assert await reads(await analyzed.readonly_session("main")) == (36, 0)
    if analyzed.spec_version > 1:
        moving = await analyzed.rearrange_session("main")
        await moving.move("/a", "/b")
        await moving.commit("moved")
        assert await reads(await analyzed.readonly_session("main"), "b") == (36, 0)


async def test_statistics_come_with_a_merged_branch(analyzed: Repository) -> None:
    """A merge takes over chunks, and with them what is known of them."""
    await analyzed.create_branch("other", await analyzed.lookup_branch("main"))
    session = await analyzed.writable_session("other")
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.setitem(slice(0, 3), 100)
    await session.commit("on the branch")
    await analyzed.analyze(branch="other")
    await analyzed.merge("other", into="main")
    assert await reads(await analyzed.readonly_session("main")) == (363, 0)


async def test_grown_array_leaves_no_wrong_edge(analyzed: Repository) -> None:
    """A chunk of which more cells count than before is unknown, though its bytes are the same."""
    session = await analyzed.writable_session("main")
    array = await za.create_array(
        session.store, name="e", shape=(4,), chunks=(3,), dtype="i8", fill_value=5
    )
    await array.setitem(slice(None), 1)
    await session.commit("an edge")
    await analyzed.analyze()
    session = await analyzed.writable_session("main")
    assert await reads(session, "e") == (4, 0)
    array = await za.open_array(store=session.store, path="e", mode="r+")
    await array.resize((6,))
    assert await reads(session, "e") == (14, 1)


async def test_edge_that_moves_to_another_edge_is_unknown() -> None:
    """As many cells of its bytes count as before, but others of them."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        values = np.arange(16, dtype="i8").reshape(4, 4)
        await commit_array(repository, values, (3, 3), fill=100)
        await repository.analyze()
        session = await repository.writable_session("main")
        await session.reindex_array("a", lambda at: [at[1], at[0]], lambda at: [at[1], at[0]])
        array = await za.open_array(store=session.store, path="a", mode="r")
        wanted = int(np.asarray(await array.getitem(slice(None))).sum())
        assert wanted != int(values.sum())
        assert await reads(session) == (wanted, 2)


async def test_inline_chunks_have_statistics_by_their_bytes() -> None:
    """They have no separate object."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, VALUES, (3,))
        assert (await repository.analyze()).chunks == 4
        session = await repository.writable_session("main")
        assert await reads(session) == (66, 0)
        array = await za.open_array(store=session.store, path="a", mode="r+")
        await array.setitem(slice(0, 3), 9)
        assert await reads(session) == (90, 1)


async def test_virtual_chunks_without_a_guard_stay_unknown(tmp_path: Path) -> None:
    """Nobody would notice if their source changed; with one, reading it would be refused."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "numbers").write_bytes(VALUES.astype("<i8").tobytes())
    url = outside.as_uri() + "/"
    container = VirtualChunkContainer(url, LocalFileSystemStore(str(outside)))
    config = RepositoryConfig().with_virtual_chunk_container(container)
    access = {url: None}
    async with Repository.create(
        tmp_path / "repo", config=config, authorize_virtual_chunk_access=access
    ) as repository:
        session = await repository.writable_session("main")
        await za.create_array(
            session.store, name="a", shape=(12,), chunks=(6,), dtype="<i8", compressors=None
        )
        guard = datetime.now(UTC)
        session.store.set_virtual_ref("a/c/0", f"{url}numbers", offset=0, length=48)
        session.store.set_virtual_ref(
            "a/c/1", f"{url}numbers", offset=48, length=48, checksum=guard
        )
        await session.commit("virtual")
        analysis = await repository.analyze()
        assert analysis.chunks == 1
        assert await reads(await repository.readonly_session("main")) == (66, 1)


async def test_collection_deletes_statistics_of_arrays_that_are_gone(analyzed: Repository) -> None:
    """Those of arrays in any snapshot that is kept stay, and so do young ones."""
    session = await analyzed.writable_session("main")
    await put_array(session, "/b", VALUES, (3,))
    await session.commit("another array")
    await analyzed.analyze()
    assert len(await stored(analyzed)) == 2
    session = await analyzed.writable_session("main")
    await session.store.delete_dir("b")
    tip = await session.commit("without it")
    kept = await analyzed.garbage_collect(datetime.now(UTC))
    assert (kept.statistics_deleted, len(await stored(analyzed))) == (0, 2)
    await analyzed.expire_snapshots(datetime.now(UTC))
    early = await analyzed.garbage_collect(datetime(2000, 1, 1, tzinfo=UTC))
    assert early.statistics_deleted == 0
    dry = await analyzed.garbage_collect(datetime.now(UTC), dry_run=True)
    assert (dry.statistics_deleted, len(await stored(analyzed))) == (1, 2)
    done = await analyzed.garbage_collect(datetime.now(UTC))
    assert (done.statistics_deleted, len(await stored(analyzed))) == (1, 1)
    assert await reads(await analyzed.readonly_session(snapshot_id=tip)) == (66, 0)


async def test_collection_leaves_names_alone_that_are_not_ours(analyzed: Repository) -> None:
    """Also if somebody could read an id in them."""
    name = str(StatisticsId.of_array(NodeId(bytes(8))))
    foreign = [f"statistics/{it}" for it in (name.lower(), f"{name}.txt", "readme")]
    for key in (f"statistics/{name}", *foreign):
        await analyzed.storage.put(key, b"not ours")
    before = await stored(analyzed)
    done = await analyzed.garbage_collect(datetime.now(UTC))
    assert done.statistics_deleted == 1
    assert await stored(analyzed) == [it for it in before if it != f"statistics/{name}"]


async def test_copies_have_statistics(analyzed: Repository) -> None:
    """A copy keeps the ids of arrays and all bytes; so it reads no chunk either."""
    target = memory_url()
    await analyzed.copy_to(target)
    async with Repository.open(target) as copy:
        assert await stored(copy) == await stored(analyzed) != []
        assert (await copy.verify()).is_healthy
        assert await reads(await copy.readonly_session("main")) == (66, 0)


@pytest.mark.parametrize("keeps", [True, False])
async def test_copies_that_follow_have_them_if_commits_make_them(*, keeps: bool) -> None:
    """Otherwise nothing is listed, and chunks that are new there are unknown."""
    target = memory_url()
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await repository.keep_statistics(enabled=keeps)
        await commit_array(repository, VALUES, (3,))
        await repository.analyze()
        await repository.copy_to(target)
        session = await repository.writable_session("main")
        array = await za.open_array(store=session.store, path="a", mode="r+")
        await array.setitem(slice(0, 3), -1)
        await session.commit("one chunk is new")
        await repository.copy_to(target)
    async with Repository.open(target) as copy:
        assert await reads(await copy.readonly_session("main")) == (60, 0 if keeps else 1)


@pytest.mark.parametrize("part", [{"refs": ["main"]}, {"paths": ["/a"]}])
async def test_copies_of_a_part_tell_nothing_of_the_rest(
    analyzed: Repository, part: dict[str, Any]
) -> None:
    """Statistics are about values, and what belongs to the part is not known."""
    target = memory_url()
    if analyzed.spec_version == 2:
        await analyzed.keep_statistics()
    await analyzed.copy_to(target, **part)
    async with Repository.open(target) as copy:
        assert await stored(copy) == []
        assert await reads(await copy.readonly_session("main")) == (66, 4)
        await copy.analyze()
        assert await reads(await copy.readonly_session("main")) == (66, 0)


class _Joining(WrappedStorage):
    """Lists statistics that are gone when they are read."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        if key.startswith("statistics/"):
            raise ObjectNotFoundError("joined with others")
        return await super().get(key, byte_range)


async def test_statistics_that_vanish_meanwhile_stop_no_copy(analyzed: Repository) -> None:
    """Of an analysis that joins them, for example."""
    target = memory_url()
    async with open_storage(target) as destination:
        await copy_repository(_Joining(analyzed.storage), destination)
    async with Repository.open(target) as copy:
        assert await reads(await copy.readonly_session("main")) == (66, 4)


async def test_many_objects_are_joined(
    analyzed: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query reads each object of an array, so analysis keeps them few; none is forgotten."""
    monkeypatch.setattr(analyzing, "_MOST_OBJECTS", 2)
    for number in range(4):
        session = await analyzed.writable_session("main")
        array = await za.open_array(store=session.store, path="a", mode="r+")
        await array.setitem(slice(0, 3), number)
        await session.commit(f"{number}")
        await analyzed.analyze()
        assert len(await stored(analyzed)) <= 3
    assert await reads(await analyzed.readonly_session("main")) == (72, 0)


async def test_interrupted_analysis_keeps_what_it_stored(
    analyzed: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one reads the rest only."""
    monkeypatch.setattr(analyzing, "_ROWS", 2)
    await commit_array(analyzed, VALUES, (2,), path="/b")

    def stop(it: Any) -> None:
        if it.done == 3:
            raise KeyError(it.done)

    with pytest.raises(KeyError):
        await analyzed.analyze(progress=stop)
    rest = await analyzed.analyze()
    assert (rest.chunks, rest.known) == (4, 6)


async def test_analysis_names_what_it_leaves_out_and_what_is_damaged(analyzed: Repository) -> None:
    """Complex numbers have none; a chunk that is gone has none either, and stops nothing."""
    session = await analyzed.writable_session("main")
    await put_array(session, "/g/b", VALUES, (3,))
    await za.create_array(session.store, name="waves", shape=(2,), chunks=(2,), dtype="c16")
    await session.commit("more")
    session = await analyzed.readonly_session("main")
    handle = await session.workspace.find_chunk("/g/b", (1,))
    assert handle is not None
    await analyzed.storage.delete([f"chunks/{handle.ref.chunk_id}"])  # type: ignore[union-attr]
    some = await analyzed.analyze(paths=["/waves"])
    assert (some.arrays, some.chunks) == (0, 0)
    done = await analyzed.analyze(paths=["g", "waves"])
    assert (done.arrays, done.chunks, len(done.left_out), len(done.unreadable)) == (1, 3, 1, 1)
    assert "'/waves' cannot be queried" in done.left_out[0]
    with pytest.raises(FormatError):
        await session.aggregate("g/b", "max")
    assert (await session.aggregate("g/b", "max", region=(slice(0, 3),))).value == 2


async def test_chunk_that_cannot_be_decoded_is_a_format_error() -> None:
    """Codecs raise anything; analysis lists the chunk, and a query that needs it says where."""
    async with Repository.create(memory_url(), config=NO_INLINE) as repository:
        await commit_array(repository, VALUES, (3,), compressors=None)
        session = await repository.writable_session("main")
        await write(session, "a/c/2", b"short")
        await session.commit("damaged")
        analysis = await repository.analyze()
        assert (analysis.chunks, len(analysis.unreadable)) == (3, 1)
        session = await repository.readonly_session("main")
        with pytest.raises(FormatError, match=r"A part of '/a', .* cannot be decoded"):
            await session.aggregate("a", "max")
        assert (await session.aggregate("a", "max", region=(slice(0, 6),))).value == 5


def test_blocking_facade_and_forks_have_both(tmp_path: Path) -> None:
    """Blocking code has them, too."""
    repository = BlockingRepository.create(str(tmp_path / "r"))
    session = repository.writable_session("main")
    import zarr

    zarr.create_array(session.store, name="a", data=VALUES, chunks=(3,))
    assert session.fork().aggregate("a", "max").value == 11
    session.commit("data")
    assert repository.analyze().chunks == 4
    found = repository.readonly_session("main").aggregate("a", "sum", where="a > 8")
    assert (found.value, found.chunks_read) == (30, 0)


async def test_statistics_take_92_bytes_a_chunk(analyzed: Repository) -> None:
    """Beside a head and a digest."""
    (key,) = await stored(analyzed)
    assert len((await objects(analyzed.storage))[key]) == 64 + 4 * 92 + 32


@pytest.mark.thorough
async def test_queries_take_some_700_bytes_a_chunk() -> None:
    """Manifests and statistics that are cached then are part of it."""
    count = 10_000
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.arange(count, dtype="i4"), (1,), compressors=None)
        await repository.analyze()
        await reads(await repository.readonly_session("main"))  # imports modules
        async with Repository.open(repository.storage) as again:
            session = await again.readonly_session("main")
            tracemalloc.start()
            try:
                found = await session.aggregate("a", "sum", where="a > 5")
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert found.chunks_read == 0
    assert peak < 800 * count


# The file


def rows_of(count: int) -> Any:
    """Return possible rows."""
    rows = np.zeros(count, row_type("i"))
    rows["key"] = [b"%040d" % it for it in range(count)]
    rows["count"], rows["high"] = 3, np.arange(count)
    return rows


ID = StatisticsId(bytes(range(12)))


@examples(200)
@given(st.data())
def test_damaged_statistics_are_format_errors(data: st.DataObject) -> None:
    """Any change of any byte, any cut and anything behind: nothing else is raised or believed."""
    whole = ChunkStatistics(b"m" * 32, "i", rows_of(4)).encode(ID)
    wrong = bytearray(whole)
    match data.draw(st.sampled_from(["flip", "cut", "more", "noise"])):
        case "flip":
            at = data.draw(st.integers(0, len(whole) - 1))
            wrong[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del wrong[data.draw(st.integers(0, len(whole) - 1)) :]
        case "more":
            wrong += data.draw(st.binary(min_size=1, max_size=200))
        case _:
            wrong = bytearray(data.draw(st.binary(max_size=300)))
    with pytest.raises(FormatError):
        ChunkStatistics.decode(bytes(wrong), ID)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows["key"].__setitem__(1, rows["key"][0]),
        lambda rows: rows["low"].__setitem__(2, 50),
        lambda rows: rows["count"].__setitem__(0, 2**63),
    ],
)
def test_impossible_statistics_with_a_right_digest_are_refused(spoil: Any) -> None:
    """Keys that are twice there, bounds in the wrong order, more cells than chunks can have."""
    rows = rows_of(4)
    spoil(rows)
    with pytest.raises(FormatError, match="cannot be those of any values"):
        ChunkStatistics.decode(ChunkStatistics(b"m" * 32, "i", rows).encode(ID), ID)


def test_statistics_with_a_huge_count_take_no_memory() -> None:
    """The number of rows must fit the bytes that are there."""
    data = bytearray(ChunkStatistics(b"m" * 32, "i", rows_of(1)).encode(ID))
    data[56:64] = (2**61).to_bytes(8, "little")
    data[-32:] = hashlib.sha256(data[:-32]).digest()
    with pytest.raises(FormatError, match="another size than"):
        ChunkStatistics.decode(bytes(data), ID)


def test_statistics_of_a_newer_version_are_refused() -> None:
    """The message says to upgrade."""
    data = bytearray(ChunkStatistics(b"m" * 32, "i", rows_of(1)).encode(ID))
    data[7:8] = b"2"
    with pytest.raises(FormatError, match="newer version"):
        ChunkStatistics.decode(bytes(data), ID)


async def test_false_statistics_are_noticed_where_cells_do_not_add_up(
    analyzed: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """A row about another number of cells is unknown; a damaged object is, with one warning."""
    session = await analyzed.readonly_session("main")
    files = session.workspace.assets.statistics
    node = await session.get_node_id("a")
    (old,) = await files.find(node)
    data = (await analyzed.storage.get(f"statistics/{old}")).data
    statistics = ChunkStatistics.decode(data, old)
    statistics.rows["count"] += 1
    fresh = StatisticsId.of_array(node)
    await analyzed.storage.put(f"statistics/{fresh}", statistics.encode(fresh))
    await analyzed.storage.put(f"statistics/{old}", b"damaged")
    async with Repository.open(analyzed.storage) as again:
        session = await again.readonly_session("main")
        with caplog.at_level(logging.WARNING):
            assert await reads(session) == (66, 4)
            assert await reads(session) == (66, 4)
    assert len([it for it in caplog.records if "taken for unknown" in it.message]) == 1


def test_joined_statistics_have_each_key_once() -> None:
    """In the order of keys, of any number of objects."""
    assert joined([rows_of(3), rows_of(5)], "i")["key"].tolist() == rows_of(5)["key"].tolist()
    assert len(joined([], "f")) == 0


async def test_ids_that_begin_alike_are_told_apart() -> None:
    """The listing of an array's statistics goes by twelve letters, and an id has more."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, VALUES, (3,))
        session = await repository.readonly_session("main")
        files = session.workspace.assets.statistics
        one, other = NodeId(bytes(8)), NodeId(bytes(7) + b"\1")
        for node in (one, other):
            await files.put(node, ChunkStatistics(b"m" * 32, "i", rows_of(1)))
        await repository.storage.put("statistics/readme", b"not ours")
        assert [it.node_id for it in await files.find(one)] == [one]
        assert [it.node_id for it in await files.find(other)] == [other]


async def test_queries_side_by_side_agree(analyzed: Repository) -> None:
    """Many at a time on one session, while statistics come and go."""
    session = await analyzed.readonly_session("main")
    keys = await stored(analyzed)

    async def disturb() -> None:
        await analyzed.storage.delete(keys)
        await analyzed.analyze()

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(aggregate(session.store, "/a", "sum", "a > 4", None))
            for _ in range(8)
        ]
        group.create_task(disturb())
    assert {it.result().value for it in tasks} == {56}

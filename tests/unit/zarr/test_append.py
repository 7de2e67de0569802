"""Two writers that both append: their blocks end up behind one another, for commits and merges."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as za

from icechunk_async import Repository
from icechunk_async.conflicts import AppendSolver, AttributesSolver
from icechunk_async.errors import MergeConflictError, RebaseFailedError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from icechunk_async import Session
    from icechunk_async.storage import Storage


@asynccontextmanager
async def begin(
    location: str | Storage, length: int, chunk: int, *, spec_version: int = 2, **options: Any
) -> AsyncGenerator[Repository]:
    """Create a repository with a series of ``length`` days, and a branch ``side``."""
    async with Repository.create(location, probe=False, spec_version=spec_version) as repository:
        await _fill(repository, length, chunk, options)
        await repository.create_branch("side", await repository.lookup_branch("main"))
        yield repository


async def _fill(repository: Repository, length: int, chunk: int, options: dict[str, Any]) -> None:
    session = await repository.writable_session("main")
    root = await za.open_group(store=session.store, mode="w")
    time = await root.create_array(
        "time", shape=(length,), chunks=(chunk,), dtype="i8", dimension_names=["time"]
    )
    await time.setitem(slice(None), np.arange(length))
    data = await root.create_array(
        "rain",
        shape=(length, 6),
        chunks=(chunk, 4),
        dtype="f8",
        dimension_names=["time", "x"],
        fill_value=-1.0,
        **options,
    )
    await data.setitem(slice(None), values(range(length)))
    await session.commit("begin")


def values(days: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the rain of some days."""
    return np.array([[day * 100.0 + x for x in range(6)] for day in days]).reshape(-1, 6)


async def append(session: Session, days: range) -> None:
    """Append days behind the present end."""
    time = await za.open_array(store=session.store, path="time")
    rain = await za.open_array(store=session.store, path="rain")
    start = time.shape[0]
    await time.resize((start + len(days),))
    await rain.resize((start + len(days), 6))
    await time.setitem(slice(start, None), np.array(days))
    await rain.setitem((slice(start, None), slice(None)), values(days))


async def series(repository: Repository) -> list[int]:
    """Return the days of ``main``, after a look at whether the rain is that of the days."""
    session = await repository.readonly_session("main")
    time = await (await za.open_array(store=session.store, path="time")).getitem(slice(None))
    rain = await (await za.open_array(store=session.store, path="rain")).getitem(slice(None))
    days: list[int] = np.asarray(time).tolist()
    expected = np.array([[day * 100.0 + x for x in range(6)] for day in days])
    assert np.array_equal(np.asarray(rain), expected)
    return days


SHAPES = [
    # elements before, chunk, appended by the branch, appended by us
    (8, 4, 4, 4),
    (8, 4, 8, 3),
    (8, 4, 4, 1),
    (6, 4, 4, 5),
    (6, 4, 8, 2),
    (6, 4, 1, 1),
    (8, 4, 3, 9),
    (5, 4, 2, 7),
    (1, 1, 1, 1),
    (0, 3, 2, 4),
]


@pytest.mark.parametrize("way", ["commit", "merge"])
@pytest.mark.parametrize(("length", "chunk", "theirs", "ours"), SHAPES)
async def test_both_appends_land_the_branch_first(
    length: int, chunk: int, theirs: int, ours: int, way: str
) -> None:
    """Every element is where concatenation puts it, wherever chunks end."""
    async with begin(memory_url(), length, chunk) as repository:
        late = await repository.writable_session("side" if way == "merge" else "main")
        await append(late, range(1000, 1000 + ours))
        early = await repository.writable_session("main")
        await append(early, range(length, length + theirs))
        await early.commit("theirs")
        if way == "merge":
            await late.commit("ours")
            await repository.merge("side", solver=AppendSolver("time"))
            assert (await repository.merge("side", solver=AppendSolver("time"))).snapshot_id is None
        else:
            await late.commit("ours", rebase_with=AppendSolver("time"))
        assert await series(repository) == [*range(length + theirs), *range(1000, 1000 + ours)]


async def test_several_appenders_follow_one_another() -> None:
    """Each waits for the others only at its commit."""
    async with begin(memory_url(), 8, 4) as repository:
        sessions = [await repository.writable_session("main") for _ in range(4)]
        for number, session in enumerate(sessions):
            await append(session, range(100 * number + 100, 100 * number + 103))
        for session in sessions:
            await session.commit("days", rebase_with=AppendSolver("time"))
        starts = [100, 200, 300, 400]
        wanted = [day for start in starts for day in range(start, start + 3)]
        assert await series(repository) == [*range(8), *wanted]


async def test_whole_chunks_are_moved_by_reference() -> None:
    """No chunk is read or written, except to compare coordinates."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with begin(storage, 800, 400, compressors=None) as repository:
            late = await repository.writable_session("side")
            await append(late, range(2000, 2400))
            await late.commit("ours")
            early = await repository.writable_session("main")
            await append(early, range(800, 1200))
            await early.commit("theirs")
            storage.forget()
            await repository.merge("side", solver=AppendSolver("time"))
            chunks = [it for it in storage.log if it[1].startswith("chunks/")]
            assert not [it for it in chunks if it[0] == "put"]
            assert (await series(repository))[-1] == 2399


@pytest.mark.parametrize("days", [range(9, 12), range(5, 9), range(10, 13)])
async def test_coordinates_that_overlap_are_a_conflict(days: range) -> None:
    """Equal days, days that the branch has already, and days before its end."""
    async with begin(memory_url(), 8, 4) as repository:
        late = await repository.writable_session("main")
        await append(late, days)
        early = await repository.writable_session("main")
        await append(early, range(8, 12))
        await early.commit("theirs")
        with pytest.raises(RebaseFailedError):
            await late.commit("ours", rebase_with=AppendSolver("time"))
        assert await series(repository) == list(range(12))
        late.discard_changes()


@pytest.mark.parametrize("kind", ["u2", "f4", "M8[D]", "<U4"])
async def test_coordinates_of_any_type_are_compared_in_their_order(kind: str) -> None:
    """Unsigned ones do not wrap around to a step ahead, and texts have an order, too."""

    async def write(branch: str, first: int) -> None:
        session = await repository.writable_session(branch)
        time = await za.open_array(store=session.store, path="time")
        await time.resize((8,))
        await time.setitem(slice(4, None), np.arange(first, first + 4).astype(kind))
        await session.commit(branch)

    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        time = await za.create_array(
            session.store,
            name="time",
            shape=(4,),
            chunks=(4,),
            dtype=kind,
            dimension_names=["time"],
        )
        await time.setitem(..., np.arange(100, 104).astype(kind))
        begun = await session.commit("begin")
        for side, first in (("overlaps", 106), ("follows", 108)):
            await repository.create_branch(side, begun)
            await write(side, first)
        await write("main", 104)
        with pytest.raises(MergeConflictError):
            await repository.merge("overlaps", solver=AppendSolver("time"))
        await repository.merge("follows", solver=AppendSolver("time"))
        found = await za.open_array(
            store=(await repository.readonly_session("main")).store, path="time"
        )
        expected = np.arange(100, 112).astype(kind)
        np.testing.assert_array_equal(np.asarray(await found.getitem(...)), expected)


async def test_what_is_no_append_is_left_to_the_other_solver() -> None:
    """Another length in one array, other attributes, a change of what was there before."""
    async with begin(memory_url(), 8, 4) as repository:
        for branch, title in (("side", "ours"), ("main", "theirs")):
            session = await repository.writable_session(branch)
            await append(session, range(8, 12) if branch == "main" else range(100, 104))
            rain = await za.open_array(store=session.store, path="rain")
            await rain.update_attributes({title: 1})
            await session.commit(title)
        with pytest.raises(MergeConflictError):
            await repository.merge("side", solver=AppendSolver("time"))
        with pytest.raises(MergeConflictError):
            await repository.merge("side", solver=AppendSolver("time", AttributesSolver()))


async def test_changes_of_what_was_there_before_clash_as_ever() -> None:
    """And land, where they do not."""
    async with begin(memory_url(), 8, 4) as repository:
        late = await repository.writable_session("main")
        await append(late, range(100, 104))
        rain = await za.open_array(store=late.store, path="rain")
        await rain.setitem((slice(0, 4), slice(0, 4)), 7.0)
        early = await repository.writable_session("main")
        await append(early, range(8, 12))
        await early.commit("theirs")
        await late.commit("ours", rebase_with=AppendSolver("time"))
        session = await repository.readonly_session("main")
        rain = await za.open_array(store=session.store, path="rain")
        found = np.asarray(await rain.getitem(slice(None)))
        assert (found[0, 0], found[8, 0], found[12, 0]) == (7.0, 800.0, 10000.0)

        late = await repository.writable_session("main")
        await append(late, range(200, 204))
        rain = await za.open_array(store=late.store, path="rain")
        await rain.setitem((slice(0, 4), slice(0, 4)), 8.0)
        early = await repository.writable_session("main")
        rain = await za.open_array(store=early.store, path="rain")
        await rain.setitem((slice(0, 4), slice(0, 4)), 9.0)
        await append(early, range(150, 154))
        await early.commit("theirs")
        with pytest.raises(RebaseFailedError):
            await late.commit("ours", rebase_with=AppendSolver("time"))
        late.discard_changes()


async def test_shards_are_appended_as_chunks() -> None:
    """A shard is what is stored as one, and is decoded as a whole."""
    async with begin(memory_url(), 6, 4, compressors=None) as repository:
        session = await repository.writable_session("main")
        root = await za.open_group(store=session.store)
        sharded = await root.create_array(
            "sharded", shape=(6,), shards=(4,), chunks=(2,), dtype="i4", dimension_names=["time"]
        )
        await sharded.setitem(slice(None), np.arange(6))
        await session.commit("a sharded array")
        late = await repository.writable_session("main")
        early = await repository.writable_session("main")
        for one, start in ((early, 6), (late, 50)):
            await append(one, range(start, start + 3))
            array = await za.open_array(store=one.store, path="sharded")
            await array.resize((9,))
            await array.setitem(slice(6, 9), np.arange(start, start + 3))
        await early.commit("theirs")
        await late.commit("ours", rebase_with=AppendSolver("time"))
        session = await repository.readonly_session("main")
        array = await za.open_array(store=session.store, path="sharded")
        found = await array.getitem(slice(None))
        assert np.asarray(found).tolist() == [*range(9), 50, 51, 52]


async def test_a_change_of_old_elements_in_the_last_chunk_is_not_lost() -> None:
    """The chunk across the seam holds elements of before: changing those as well is a conflict."""
    async with begin(memory_url(), 6, 4) as repository:
        late = await repository.writable_session("main")
        await append(late, range(100, 104))
        rain = await za.open_array(store=late.store, path="rain")
        await rain.setitem((5, 0), -7.0)
        early = await repository.writable_session("main")
        await append(early, range(6, 10))
        await early.commit("theirs")
        with pytest.raises(RebaseFailedError):
            await late.commit("ours", rebase_with=AppendSolver("time"))
        assert await series(repository) == list(range(10))
        late.discard_changes()


async def test_what_the_branch_changed_in_the_last_chunk_is_kept() -> None:
    """Elements of before come from the branch."""
    async with begin(memory_url(), 6, 4) as repository:
        late = await repository.writable_session("main")
        await append(late, range(100, 104))
        early = await repository.writable_session("main")
        await append(early, range(6, 10))
        rain = await za.open_array(store=early.store, path="rain")
        await rain.setitem((5, 0), -7.0)
        await early.commit("theirs")
        await late.commit("ours", rebase_with=AppendSolver("time"))
        session = await repository.readonly_session("main")
        rain = await za.open_array(store=session.store, path="rain")
        found = np.asarray(await rain.getitem(slice(None)))
        assert (found[5, 0], found[9, 0], found[10, 0]) == (-7.0, 900.0, 10000.0)

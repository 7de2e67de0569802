"""Statistics go with bytes that are copied: compaction leaves nothing unknown that was known."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as za
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Packing, Repository
from icechunk_async.errors import StorageFullError
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.statistics import carried, cells_within, chunk_keys, joined, row_type
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import examples, memory_url, objects
from tests.unit.zarr.queries.test_aggregate import NO_INLINE
from tests.unit.zarr.queries.truth import commit_array

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.format.manifest.chunk import ChunkRef

SMALL = Packing(target_bytes=200, max_chunk_bytes=100)
"""Four chunks of the arrays below to an object, once they are encoded."""
CELLS = 40


async def put(repository: Repository, where: slice, value: float) -> None:
    """Set some cells in a commit."""
    session = await repository.writable_session("main")
    array = await za.open_array(store=session.store, path="a", mode="r+")
    await array.setitem(where, value)
    if session.has_uncommitted_changes:  # the array may be shorter
        await session.commit("changed")


async def truth(repository: Repository) -> dict[str, Any]:
    """Return aggregates of the array as NumPy computes them."""
    session = await repository.readonly_session("main")
    array = await za.open_array(store=session.store, path="a", mode="r")
    values: Any = np.asarray(await array.getitem(slice(None)))
    there = values[~np.isnan(values)]
    none = not there.size
    return {
        "count": there.size,
        "sum": there.sum(),
        "min": None if none else there.min(),
        "max": None if none else there.max(),
    }


async def answers(repository: Repository) -> tuple[dict[str, Any], int]:
    """Return aggregates as queries answer, and the most chunks that one of them read."""
    session = await repository.readonly_session("main")
    found = {it: await session.aggregate("a", it) for it in ("count", "sum", "min", "max")}
    read = max(it.chunks_read for it in found.values())
    return {name: it.value for name, it in found.items()}, read


async def make(repository: Repository) -> None:
    """Commit an array of 14 chunks in packs, the last one with a single cell."""
    values = np.arange(CELLS, dtype="f8")
    values[7] = np.nan
    await commit_array(repository, values, (3,), fill=0)


@pytest.fixture
async def sparse(spec: int) -> AsyncIterator[Repository]:
    """Open a repository of which most objects hold garbage, and all chunks are analyzed."""
    async with Repository.create(
        memory_url(), spec_version=spec, config=NO_INLINE, packing=SMALL
    ) as repository:
        await make(repository)
        for start in range(0, CELLS, 6):
            await put(repository, slice(start, start + 3), -1.0)
        await repository.analyze()
        yield repository


async def test_compaction_keeps_what_is_known(sparse: Repository) -> None:
    """Chunks at the edge included; what was unknown stays so, and no chunk is read for it."""
    assert await answers(sparse) == (await truth(sparse), 0)
    report = await sparse.compact("main", min_live_share=1.0)
    assert report.chunks
    assert await answers(sparse) == (await truth(sparse), 0)
    await put(sparse, slice(0, 3), 5.0)
    await put(sparse, slice(9, 12), 6.0)
    assert (await sparse.compact("main", min_live_share=1.0)).chunks
    assert await answers(sparse) == (await truth(sparse), 2)


async def test_dry_run_stores_no_statistics(sparse: Repository) -> None:
    """Nor anything else."""
    before = sorted(await objects(sparse.storage))
    assert (await sparse.compact("main", min_live_share=1.0, dry_run=True)).chunks
    assert sorted(await objects(sparse.storage)) == before


class _Full(WrappedStorage):
    """A storage that takes no more statistics."""

    async def put(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.startswith("statistics/"):
            raise StorageFullError("The disk is full.")
        return await super().put(key, *args, **kwargs)


async def test_compaction_does_without_statistics_that_cannot_be_stored(
    sparse: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """They are never needed: it is logged, and the chunks are read."""
    async with Repository.open(_Full(sparse.storage), packing=SMALL) as full:
        with caplog.at_level(logging.WARNING):
            assert (await full.compact("main", min_live_share=1.0)).snapshot_id is not None
    assert "stay unknown: The disk is full." in caplog.text
    found, read = await answers(sparse)
    assert (found, read > 0) == (await truth(sparse), True)


@examples(15)
@given(data=st.data())
async def test_statistics_carried_lost_or_damaged_never_change_an_answer(
    data: st.DataObject,
) -> None:
    """Random writes, compactions, analyses, resizing and losses: NumPy agrees after each."""
    async with Repository.create(memory_url(), config=NO_INLINE, packing=SMALL) as repository:
        await make(repository)
        for _ in range(data.draw(st.integers(2, 6))):
            await _step(repository, data)
            assert (await answers(repository))[0] == await truth(repository)


async def _step(repository: Repository, data: st.DataObject) -> None:
    match data.draw(st.sampled_from(["write", "write", "compact", "analyze", "lose", "resize"])):
        case "write":
            start = data.draw(st.integers(0, CELLS))
            value = data.draw(st.sampled_from([1.0, -5.0, np.nan, 0.0, 1e9]))
            await put(repository, slice(start, start + data.draw(st.integers(1, 9))), value)
        case "compact":
            await repository.compact("main", min_live_share=1.0)
        case "analyze":
            await repository.analyze()
        case "resize":
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a", mode="r+")
            await array.resize((data.draw(st.integers(CELLS - 5, CELLS + 5)),))
            if session.has_uncommitted_changes:
                await session.commit("resized")
        case _:
            keys = [it for it in await objects(repository.storage) if it.startswith("statistics/")]
            if keys:
                key = data.draw(st.sampled_from(sorted(keys)))
                await repository.storage.put(key, data.draw(st.binary(max_size=8)))


@given(st.data())
def test_carried_rows_are_those_of_the_chunks_that_were_copied(data: st.DataObject) -> None:
    """Also of bytes that several places share, at edges, and where a chunk has no row."""
    seed = random.Random(data.draw(st.integers(0, 1 << 32)))
    count, shape, chunks = data.draw(st.integers(0, 6)), (16,), (3,)
    pool: list[ChunkRef | None] = [InlineChunk(b"inline")]
    pool += [NativeChunk(ChunkId(seed.randbytes(12)), it % 3 * 8, 8) for it in range(3)]
    old: dict[tuple[int, ...], ChunkRef | None]
    old = {(it,): data.draw(st.sampled_from(pool)) for it in range(count)}
    new: dict[tuple[int, ...], ChunkRef | None]
    new = {(it,): NativeChunk(ChunkId(seed.randbytes(12)), 0, 8) for it in range(count)}
    before, after = (ChunkRefs.from_mapping(1, it) for it in (old, new))
    within = cells_within(before.coords, shape, chunks)
    keys, _ = chunk_keys(before, within, chunks)
    rows = np.zeros(count, row_type("i"))
    rows["key"], rows["count"] = keys, np.arange(count)
    chosen = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    table = joined([rows[np.array(chosen, bool)]], "i")
    known = dict(zip(table["key"].tolist(), table["count"].tolist(), strict=True))
    expected: dict[bytes, int] = {}
    for key, copied in zip(
        keys.tolist(), chunk_keys(after, within, chunks)[0].tolist(), strict=True
    ):
        if key in known:
            expected[copied] = known[key]
    found = carried(table, before, after)
    given_rows = dict(zip(found["key"].tolist(), found["count"].tolist(), strict=True))
    assert list(given_rows) == sorted(given_rows)
    assert {key: given_rows.get(key) for key in expected} == expected
    assert len(carried(table[:0], before, after)) == 0

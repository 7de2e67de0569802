"""Differences of values: which cells changed, by how much, and what is read to find out."""

from __future__ import annotations

import math
import random
import sys
import weakref
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as za
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository
from icechunk_async.engine.versions.feed import changes_between
from icechunk_async.errors import InvalidInputError, MissingDriverError, NotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.zarr.values import CellChanges, value_diffs
from tests.helpers import memory_url

if TYPE_CHECKING:
    import numpy.typing as npt
    from zarr import AsyncArray

    from icechunk_async import Session


async def make(session: Session, values: npt.NDArray[Any], **options: Any) -> AsyncArray[Any]:
    """Create array ``a`` with some values."""
    options = {"chunks": (4,) * values.ndim, "fill_value": 0, "name": "a", **options}
    array = await za.create_array(
        session.store, shape=values.shape, dtype=values.dtype, overwrite=True, **options
    )
    await array.setitem(..., values)
    return array


async def commit(repository: Repository, values: npt.NDArray[Any], **options: Any) -> str:
    """Make a commit whose array ``a`` has some values."""
    session = await repository.writable_session("main")
    await make(session, values, **options)
    return str(await session.commit("values"))


async def change(repository: Repository, where: Any, values: Any, name: str = "a") -> str:
    """Write a part of an array, and commit."""
    session = await repository.writable_session("main")
    array = await za.open_array(store=session.store, path=name)
    await array.setitem(where, values)
    return str(await session.commit("a part"))


@pytest.mark.parametrize("spec", [1, 2])
async def test_the_cells_that_changed_are_counted_with_the_size_of_the_change(spec: int) -> None:
    """Only of arrays that changed; the first cells are listed with both values."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make(session, np.arange(10.0))
        await make(session, np.arange(10.0), name="b")
        await session.commit("begin")
        await change(repository, slice(3, 6), [3.0, 14.0, 3.0])
        (found,) = await repository.diff_values("main~1")
        assert (found.path, found.cells, found.changed, found.share) == ("/a", 10, 2, 0.2)
        assert (found.min_change, found.max_change, found.mean_change) == (-2.0, 10.0, 4.0)
        assert found.first.indices.tolist() == [[4], [5]]
        assert found.first.before.tolist() == [4.0, 5.0]
        assert found.first.after.tolist() == [14.0, 3.0]
        (back,) = await repository.diff_values("main", "main~1")
        assert (back.min_change, back.max_change) == (-10.0, 2.0)


async def test_chunks_that_were_written_again_with_equal_values_changed_nothing() -> None:
    """They are compared, and no cell is listed; NaN is equal to NaN."""
    values = np.random.default_rng(0).random(400)  # too many to be stored in the manifest
    values[::3] = np.nan
    async with Repository.create(memory_url()) as repository:
        await commit(repository, values, chunks=(400,))
        await change(repository, ..., values)
        (found,) = await repository.diff_values("main~1")
        assert (found.changed, found.chunks, found.min_change) == (0, 1, None)
        assert len(found.first) == 0
        assert [it async for it in repository.changed_cells("main~1")] == []


async def test_changes_from_and_to_nan_and_infinity_count_without_a_size() -> None:
    """Their difference is no finite number."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.array([1.0, np.nan, np.inf, 4.0]))
        await change(repository, ..., [np.nan, 2.0, -np.inf, 4.5])
        (found,) = await repository.diff_values("main~1")
        assert (found.changed, found.min_change, found.max_change) == (4, 0.5, 0.5)


@pytest.mark.parametrize("seed", range(12))
async def test_random_changes_are_found_as_numpy_finds_them(seed: int) -> None:
    """In one to three dimensions, with shards and without, growing and shrinking."""
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    rank = 1 + seed % 3
    shape = tuple(choose.randint(1, 11) for _ in range(rank))
    options: dict[str, Any] = {"shards": (8,) * rank} if seed % 2 else {}
    kind = choose.choice(["i4", "f8", "u1", "bool", "M8[s]", "complex64"])
    before = rng.integers(0, 3, shape).astype(kind)
    async with Repository.create(memory_url()) as repository:
        await commit(repository, before, **options)
        session = await repository.writable_session("main")
        array = await za.open_array(store=session.store, path="a")
        now = tuple(choose.randint(1, 14) for _ in range(rank))
        await array.resize(now)
        after = rng.integers(0, 3, now).astype(kind)
        await array.setitem(..., after)
        await session.commit("other values", allow_empty=True)
        both = tuple(slice(0, min(sizes)) for sizes in zip(shape, now, strict=True))
        expected = {tuple(it) for it in np.argwhere(before[both] != after[both]).tolist()}
        cells = [it async for it in repository.changed_cells("main~1")]
        places = [tuple(it) for part in cells for it in part.indices.tolist()]
        assert len(places) == len(set(places))
        assert set(places) == expected
        for part in cells:
            at = tuple(part.indices.T)
            np.testing.assert_array_equal(part.before, before[at])
            np.testing.assert_array_equal(part.after, after[at])
        found = await repository.diff_values("main~1")
        assert sum(it.changed for it in found) == len(expected)
        assert all(it.cells == math.prod(s.stop for s in both) for it in found)


async def test_another_fill_value_changes_the_cells_of_chunks_that_nobody_wrote() -> None:
    """All of an array is compared where bytes, or their absence, mean other values."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        array = await za.create_array(
            session.store, name="a", shape=(100,), chunks=(10,), dtype="i4", fill_value=0
        )
        await array.setitem(slice(0, 10), 7)
        await session.commit("begin")
        session = await repository.writable_session("main")
        document = await session.store.get("a/zarr.json", default_buffer_prototype())
        assert document is not None
        changed = document.to_bytes().replace(b'"fill_value":0', b'"fill_value":7')
        changed = changed.replace(b'"fill_value": 0', b'"fill_value":7')
        assert changed != document.to_bytes()
        await session.store.set("a/zarr.json", type(document).from_bytes(changed))
        await session.commit("seven where nobody wrote")
        (found,) = await repository.diff_values("main~1")
        assert (found.changed, found.chunks, found.mean_change) == (90, 10, 7.0)


async def test_another_data_type_is_compared_by_values_if_both_are_numbers() -> None:
    """An array that became text is left out: no cell of it has a counterpart."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for name in ("number", "text"):
            await make(session, np.array([1, 2, 3], "i4"), name=name)
        await session.commit("integers")
        session = await repository.writable_session("main")
        await make(session, np.array([1.0, 2.5, 3.0]), name="elsewhere")
        await make(session, np.array(["1", "2", "3"]), name="words", fill_value="")
        prototype = default_buffer_prototype()
        for name, origin in (("number", "elsewhere"), ("text", "words")):
            for part in ("zarr.json", "c/0"):
                data = await session.store.get(f"{origin}/{part}", prototype)
                assert data is not None
                await session.store.set(f"{name}/{part}", data)
        await session.commit("floats and text")
        (found,) = await repository.diff_values("main~1")
        assert (found.path, found.changed, found.mean_change) == ("/number", 1, 0.5)


async def test_a_moved_array_is_compared_with_what_it_was() -> None:
    """By its node, under the new path."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.arange(4))
        session = await repository.rearrange_session("main")
        await session.move("/a", "/b")
        await session.commit("elsewhere")
        await change(repository, 2, 9, "b")
        (found,) = await repository.diff_values("main~2")
        assert (found.path, found.changed, found.max_change) == ("/b", 1, 7.0)
        assert (await repository.diff_values("main~2", paths=["/a"])) == []


async def test_only_the_paths_that_were_asked_for_are_read() -> None:
    """An array, or all below a group; a path that is not valid is refused."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for name in ("g/a", "g/b", "gh"):
            await make(session, np.zeros(4), name=name)
        await session.commit("begin")
        session = await repository.writable_session("main")
        for name in ("g/a", "g/b", "gh"):
            array = await za.open_array(store=session.store, path=name)
            await array.setitem(..., 1)
        await session.commit("ones")
        below = await repository.diff_values("main~1", paths=["g/"])
        assert [it.path for it in below] == ["/g/a", "/g/b"]
        (one,) = await repository.diff_values("main~1", paths=["/gh"])
        assert (one.path, one.changed) == ("/gh", 4)
        with pytest.raises(InvalidInputError, match="node path"):
            await repository.diff_values("main~1", paths=["../x"])
        with pytest.raises(InvalidInputError, match="a collection of paths, not by 'gh'"):
            await repository.diff_values("main~1", paths="gh")
        with pytest.raises(InvalidInputError, match="leave the argument out"):
            await repository.diff_values("main~1", paths=[])
        with pytest.raises(NotFoundError):
            await repository.diff_values("nothing-has-this-name")


async def test_chunks_that_did_not_change_are_not_read() -> None:
    """Cost follows the difference: two chunk objects of a hundred on each side."""
    url = memory_url()
    async with Repository.create(url) as repository:
        values = np.arange(100 * 4, dtype="f8")
        await commit(repository, np.random.default_rng(0).permutation(values), chunks=(100,))
        await change(repository, slice(90, 110), -1.0)
    async with open_storage(url) as storage:
        counted = LatencyStorage(storage, seconds=0)
        async with Repository.open(counted) as repository:
            (found,) = await repository.diff_values("main~1")
    assert (found.changed, found.chunks) == (20, 2)
    assert len([key for _, key in counted.log if key.startswith("chunks/")]) <= 4


async def test_diffs_keep_nothing_of_chunks_but_the_first_cells() -> None:
    """Others are forgotten before the next array but one is compared."""
    seen: list[weakref.ref[Any]] = []

    def see(_: tuple[int, ...], cells: CellChanges) -> None:
        assert not any(it() is not None for it in seen[:-1])
        seen.append(weakref.ref(cells.before))

    async with Repository.create(memory_url()) as repository:
        for name in "abcd":
            await commit(repository, np.zeros(4_000, "i4"), chunks=(4_000,), name=name)
        before = await repository.readonly_session("main")
        session = await repository.writable_session("main")
        for name in "abcd":
            array = await za.open_array(store=session.store, path=name)
            await array.setitem(slice(None), 1)
        await session.commit("all")
        after = await repository.readonly_session("main")
        bases = (it.workspace.base for it in (before, after))
        changes = changes_between(repository.engine, *bases)
        found = await value_diffs(before.store, after.store, changes, None, see)
    assert [(it.changed, len(it.first)) for it in found] == [(4_000, 10)] * 4
    assert not any(it() is not None for it in seen)


async def test_maps_show_where_and_how_much_values_changed() -> None:
    """Over the last two axes, in bins of large arrays; the largest change of each."""
    values = np.zeros((2, 600, 3))
    async with Repository.create(memory_url()) as repository:
        await commit(repository, values, chunks=(1, 300, 3))
        values[0, 599, 2], values[1, 599, 2], values[1, 0, 1] = 1.0, -3.0, np.nan
        await change(repository, ..., values)
        (found,) = await repository.diff_values("main~1")
    assert found.map is not None
    assert found.map.change.shape == (256, 3)
    assert np.argwhere(found.map.changed).tolist() == [[0, 1], [255, 2]]
    assert (found.map.change[255, 2], np.isnan(found.map.change).sum()) == (-3.0, 256 * 3 - 1)


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 5, 6)])
async def test_pictures_are_drawn_of_arrays_of_any_rank(shape: tuple[int, ...]) -> None:
    """For light and dark pages, and nothing in a message is taken for a formula."""
    pytest.importorskip("matplotlib", reason="pictures need the extra demo")
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(shape))
        session = await repository.writable_session("main")
        array = await za.open_array(store=session.store, path="a")
        await array.setitem(..., np.random.default_rng(0).random(shape))
        await session.commit("costs $\\frac{ more\x07")
        (found,) = await repository.diff_values("main~1")
        blamed = await repository.blame("a")

    def draw() -> None:
        for shown in (found, blamed):
            assert shown.picture() != shown.picture(dark=True)
            assert shown.picture().startswith(b"\x89PNG")
            assert shown._repr_html_().count("data:image/png") == 2

    await anyio.to_thread.run_sync(draw)


async def test_pictures_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks show the numbers without it."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(3))
        await change(repository, 1, 2.0)
        (found,) = await repository.diff_values("main~1")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDriverError, match=r"icechunk-async\[demo\]"):
        found.picture()
    assert "+2" in found._repr_html_()
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(MissingDriverError, match=r"icechunk-async\[xarray\]"):
        found.first.to_xarray()


async def test_changed_cells_are_datasets() -> None:
    """A row for each cell, with its place."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros((3, 3)))
        await change(repository, (1, 2), 2.5)
        (found,) = await repository.diff_values("main~1")
    data = await anyio.to_thread.run_sync(found.first.to_xarray)
    assert (data.before.item(), data.after.item(), data.change.item()) == (0, 2.5, 2.5)
    assert (data.axis_0.item(), data.axis_1.item()) == (1, 2)


async def test_a_grid_that_is_not_regular_is_refused_by_name() -> None:
    """With what can be done."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        with zarr.config.set({"array.rectilinear_chunks": True}):
            await za.create_array(
                session.store, name="a", shape=(6,), chunks=[[1, 2, 3]], dtype="i4"
            )
            await session.commit("rectilinear")
            await change(repository, ..., 1)
        with pytest.raises(InvalidInputError, match=r"'/a'.*rectilinear.*paths="):
            await repository.diff_values("main~1")

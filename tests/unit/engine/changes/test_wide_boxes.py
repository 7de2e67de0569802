"""Splitting manifests with few references in enormous boxes."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.changes import splitting
from icechunk_async.engine.changes.splitting import (
    MOST_CELLS,
    CellPlan,
    most_cells,
    occupied_cells,
    plan_manifests,
    wide_manifests,
)
from icechunk_async.engine.commit.flush import Flusher
from icechunk_async.engine.upkeep.rewrite import RewritePlan, plan_rewriting
from icechunk_async.format.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
)
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.snapshot import ManifestRef
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.format.manifest.chunk import Extents

LAST = 2**31 - 1
CORNERS = [(0, 0), (1, 2), (5, 7), (LAST, LAST)]
"""Chunks in three cells of 4 x 4, in a box that meets 2**58."""


def _split(size: int) -> RepositoryConfig:
    axes: dict[object, int] = {ManifestSplitDimCondition.Any(): size}
    rules = ManifestSplittingConfig.from_dict({ManifestSplitCondition.any_array(): axes})  # type: ignore[dict-item]
    return RepositoryConfig(manifest=ManifestConfig(splitting=rules))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Extents]:
    """Return the boxes of all cells that are planned; too many are an error."""
    boxes: list[Extents] = []

    def counted(box: Extents, *args: Any, **kwargs: Any) -> CellPlan:
        boxes.append(box)
        assert len(boxes) <= 50, "more cells are planned than have references"
        return CellPlan(box, *args, **kwargs)

    monkeypatch.setattr(splitting, "CellPlan", counted)
    return boxes


async def _sparse(url: str) -> None:
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2**31, 2**31), (1, 1))
        for number, (row, column) in enumerate(CORNERS):
            await write(session, f"a/c/{row}/{column}", bytes([number + 1]))
        await session.commit("sparse")


async def _check(repository: Repository, expected: list[Extents]) -> None:
    session = await repository.readonly_session("main")
    node = session.workspace.array("/a")
    assert node.array is not None
    assert sorted(it.extents for it in node.array.manifests) == expected
    for number, (row, column) in enumerate(CORNERS):
        assert await read(session, f"a/c/{row}/{column}") == bytes([number + 1])


SPLIT: list[Extents] = [
    ((0, 2), (0, 3)),
    ((5, 6), (7, 8)),
    ((LAST, LAST + 1), (LAST, LAST + 1)),
]


async def test_a_commit_plans_the_cells_with_references(plans: list[Extents]) -> None:
    """The manifest is cut to the cells of its four references, and to no other."""
    url = memory_url()
    await _sparse(url)
    plans.clear()
    async with Repository.open(url, config=_split(4)) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/5/7", b"\x03")
        await write(session, "a/c/100/100", b"\x09")
        await session.commit("one more")
        assert len(plans) == 4
        await _check(repository, sorted([*SPLIT, ((100, 101), (100, 101))]))


def test_a_smaller_grid_leaves_out_what_is_beyond(plans: list[Extents]) -> None:
    """References that a resize cut off need no plan, also in a cell that reaches beyond."""
    grid, kept = (2**31, 2**31), (2**30, 6)
    ref = ManifestRef(ManifestId.random(), ((0, 2**31), (0, 2**31)))
    coords = np.array([*CORNERS, (9, 5)], np.uint32)
    assert wide_manifests(grid, (4, 4), [ref], kept=kept) == [ref.manifest_id]
    cells = {ref.manifest_id: occupied_cells(coords, (4, 4), grid, kept=kept)}
    none = np.empty((0, 2), np.uint32)
    plan = plan_manifests(grid, (4, 4), [ref], none, kept=kept, occupied=cells)
    assert plan.reused == []
    assert [it.box for it in plan.cells] == plans == [((0, 4), (0, 4)), ((8, 12), (4, 6))]


def test_references_in_cells_outside_of_the_box_are_left_out(plans: list[Extents]) -> None:
    """A snapshot may be wrong about a manifest; its box limits what belongs to the array."""
    grid = (2**31, 2**31)
    ref = ManifestRef(ManifestId.random(), ((0, 2**31), (0, 1)))
    cells = {ref.manifest_id: occupied_cells(np.array(CORNERS, np.uint32), (4, 4), grid)}
    none = np.empty((0, 2), np.uint32)
    plan_manifests(grid, (4, 4), [ref], none, occupied=cells)
    assert plans == [((0, 4), (0, 4))]


async def test_a_rewrite_plans_the_cells_with_references(plans: list[Extents]) -> None:
    """Each cell with references gets a manifest."""
    url = memory_url()
    await _sparse(url)
    plans.clear()
    async with Repository.open(url, config=_split(4)) as repository:
        await repository.rewrite_manifests("split", branch="main")
        assert len(plans) == 3
        await _check(repository, SPLIT)


async def test_tasks_rewrite_the_cells_with_references(plans: list[Extents]) -> None:
    """One task plans them, and others rewrite some each."""
    url = memory_url()
    await _sparse(url)
    plans.clear()
    async with Repository.open(url, config=_split(4)) as repository:
        base = await repository.engine.load("main")
        node = base.nodes["/a"]
        engine = repository.engine
        flusher = Flusher(engine.assets, engine.manifest_options)
        cells = await flusher.cells(node, base)
        assert len(cells) == 3
        made = [await flusher.rewrite_cells(node, base, cells[at : at + 2]) for at in (0, 2)]
        assert [ref.extents for it in made for ref in it.refs] == SPLIT
        assert len(plans) == 3


async def test_a_task_reads_the_manifests_of_its_own_cells() -> None:
    """Not those of all others, however many cells the array has in all."""
    got: list[str] = []

    class Watched(WrappedStorage):
        async def before(self, operation: str, key: str) -> None:
            if operation == "get" and key.startswith("manifests/"):
                got.append(key)

    url, count = memory_url(), MOST_CELLS + 4
    async with Repository.create(url, config=_split(count // 10)) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (count,), (1,))
        for at in range(count):
            await session.workspace.write_chunk("/a", (at,), b"x")
        await session.commit("many")
    async with open_storage(url) as plain:
        async with Repository.open(Watched(plain), config=_split(1)) as repository:
            base = await repository.engine.load("main")
            flusher = Flusher(repository.engine.assets, repository.engine.manifest_options)
            cells = pickle.loads(pickle.dumps(await flusher.cells(base.nodes["/a"], base)))
            assert len(cells) == count
            assert len(got) == len(set(got)) == 10
        got.clear()
        async with Repository.open(Watched(plain), config=_split(1)) as repository:
            flusher = Flusher(repository.engine.assets, repository.engine.manifest_options)
            made = await flusher.rewrite_cells(base.nodes["/a"], base, cells[:64])
            assert len(made.files) == 64
            assert len(got) == 1


async def test_a_rewriting_is_planned_by_numbers_of_references(plans: list[Extents]) -> None:
    """No manifest is read, and none has more cells than references."""
    url = memory_url()
    await _sparse(url)
    plans.clear()
    async with Repository.open(url, config=_split(4)) as repository:
        plan = await plan_rewriting(repository.engine, "main")
        tip = (await repository.engine.load("main")).id
        assert plan == RewritePlan(tip, arrays=1, manifests=1, manifests_after=4)
        assert plans == []


def test_boxes_alone_plan_no_more_cells_than_the_bound() -> None:
    """One cell of each manifest does not count: only divided ones are read."""

    def wide(*boxes: tuple[int, int]) -> list[int]:
        refs = [ManifestRef(ManifestId.random(), (box,)) for box in boxes]
        found = wide_manifests((10**6,), (1,), refs)
        return [number for number, ref in enumerate(refs) if ref.manifest_id in found]

    assert wide((0, MOST_CELLS)) == []
    assert wide((0, MOST_CELLS + 1)) == [0]
    assert wide((0, 1), (1, 3), (10, MOST_CELLS + 9)) == [1, 2]
    assert wide(*((at, at + 1) for at in range(MOST_CELLS + 1))) == []
    assert wide(*((at, at + 1) for at in range(MOST_CELLS)), (0, 2)) == []
    assert wide((2 * 10**6, 3 * 10**6)) == []  # outside of the grid


def test_an_empty_axis_lists_no_other() -> None:
    """A box outside of the grid along one axis meets no cell, however long the others are."""
    ref = ManifestRef(ManifestId.random(), ((0, 2**32 - 1), (5, 6)))
    none = np.empty((0, 2), np.uint32)
    plan = plan_manifests((2**32 - 1, 5), (1, 1), [ref], none)
    assert (plan.reused, plan.cells) == ([], [])


def test_cells_are_counted_up_to_the_grid() -> None:
    """Manifests of the same cells do not count them twice."""
    whole = ManifestRef(ManifestId.random(), ((0, 10),))
    assert most_cells((10,), (2,), [(whole, 3)]) == 3
    assert most_cells((10,), (2,), [(whole, 3), (whole, 9)]) == 5


@given(data=st.data())
def test_references_say_which_of_the_cells_are_planned(data: st.DataObject) -> None:
    """The plan is the one by boxes without what has no reference, in the same order."""
    rank = data.draw(st.integers(1, 3))
    axis = st.integers(1, 6)
    grid, kept, sizes = (tuple(data.draw(axis) for _ in range(rank)) for _ in range(3))
    chunk = st.tuples(*[st.integers(0, 6)] * rank)
    drawn = data.draw(st.lists(st.lists(chunk, min_size=1, max_size=5), max_size=3))
    coords = {ManifestId.random(): np.array(sorted(it), np.uint32) for it in drawn}
    old = [
        ManifestRef(key, tuple((int(it.min()), int(it.max()) + 1) for it in rows.T))
        for key, rows in coords.items()
    ]
    inside = st.tuples(*(st.integers(0, size - 1) for size in grid))
    changed = np.array(data.draw(st.lists(inside, unique=True, max_size=3)), np.uint32).reshape(
        -1, rank
    )
    rewrite_all = data.draw(st.booleans())

    def held(key: ManifestId, box: Extents) -> bool:
        limits = [(low, min(high, end)) for (low, high), end in zip(box, kept, strict=True)]
        rows: list[list[int]] = coords[key].tolist()
        return any(
            all(low <= at < high for at, (low, high) in zip(row, limits, strict=True))
            for row in rows
        )

    def cells(plan: splitting.SplitPlan) -> Iterator[tuple[Extents, list[ManifestId], list[int]]]:
        for cell in plan.cells:
            keys = [it.manifest_id for it in cell.sources if held(it.manifest_id, cell.box)]
            rows: list[int] = cell.changes.tolist()
            if keys or rows:
                yield cell.box, keys, rows

    by_boxes = plan_manifests(grid, sizes, old, changed, kept=kept, rewrite_all=rewrite_all)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "MOST_CELLS", 0)
        divided = wide_manifests(grid, sizes, old, kept=kept)
    occupied = {key: occupied_cells(coords[key], sizes, grid, kept=kept) for key in divided}
    by_refs = plan_manifests(
        grid, sizes, old, changed, kept=kept, rewrite_all=rewrite_all, occupied=occupied
    )
    assert by_refs.reused == by_boxes.reused
    # Which cell is first depends on the manifest that was seen first in it, so not on empty ones.
    assert sorted(cells(by_refs)) == sorted(cells(by_boxes))
    sources = [(it, cell.box) for cell in by_refs.cells for it in cell.sources]
    assert all(held(it.manifest_id, box) for it, box in sources if it.manifest_id in divided)

"""Cutting chunk grids into manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.changes.splitting import plan_manifests, split_sizes
from icechunk_async.format.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
)
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.snapshot import ArrayData, Dimension, ManifestRef
from tests.helpers import make_array, memory_url, read, write

if TYPE_CHECKING:
    from icechunk_async.format.manifest.chunk import Extents

ANY = ManifestSplitDimCondition.Any()
AXIS_0 = ManifestSplitDimCondition.Axis(0)
NAMED_X = ManifestSplitDimCondition.DimensionName("^x$")
UNSPLIT = (1 << 32) - 1


def _splitting(*rules: tuple[ManifestSplitCondition, dict[object, int]]) -> ManifestSplittingConfig:
    return ManifestSplittingConfig.from_dict(dict(rules))  # type: ignore[arg-type]


def _ref(*extents: tuple[int, int]) -> ManifestRef:
    return ManifestRef(ManifestId.random(), extents)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], (UNSPLIT, UNSPLIT)),
        ([(ManifestSplitCondition.any_array(), {ANY: 7})], (7, 7)),
        ([(ManifestSplitCondition.any_array(), {AXIS_0: 3})], (3, UNSPLIT)),
        ([(ManifestSplitCondition.any_array(), {AXIS_0: 3, ANY: 7})], (3, 7)),
        ([(ManifestSplitCondition.any_array(), {NAMED_X: 5})], (UNSPLIT, 5)),
        ([(ManifestSplitCondition.name_matches("other"), {ANY: 7})], (UNSPLIT, UNSPLIT)),
        (
            [
                (ManifestSplitCondition.path_matches("^/group/"), {NAMED_X: 2}),
                (ManifestSplitCondition.any_array(), {ANY: 9}),
            ],
            (9, 2),
        ),
    ],
)
def test_the_first_rule_that_fits_an_axis_decides_it(
    rules: list[tuple[ManifestSplitCondition, dict[object, int]]], expected: tuple[int, ...]
) -> None:
    """Later rules decide what earlier ones left open; what none decides is not split."""
    array = ArrayData((Dimension(10, 10), Dimension(10, 10)), (None, "x"))
    config = _splitting(*rules) if rules else None
    assert split_sizes("/group/array", array, config) == expected


EXAMPLES: dict[str, tuple[int, list[Extents], list[int], set[Extents], set[Extents]]] = {
    # name: split size, old extents, changed chunks, extents kept, boxes written
    "first commit": (4, [], [0, 1, 5, 9], set(), {((0, 4),), ((4, 8),), ((8, 10),)}),
    "one cell touched": (
        3,
        [((0, 2),), ((5, 6),), ((9, 10),)],
        [5],
        {((0, 2),), ((9, 10),)},
        {((3, 6),)},
    ),
    "cells joined": (100, [((0, 2),), ((5, 6),)], [0], set(), {((0, 10),)}),
    "a manifest across a new border": (
        2,
        [((0, 3),)],
        [9],
        set(),
        {((0, 2),), ((2, 4),), ((8, 10),)},
    ),
    "nothing touched": (5, [((0, 2),), ((6, 9),)], [], {((0, 2),), ((6, 9),)}, set()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_reuses_the_manifests_of_untouched_cells(name: str) -> None:
    """A grid of ten chunks: what stays, and what is written anew."""
    size, old, changed, kept, written = EXAMPLES[name]
    coords = np.array(changed, np.uint32).reshape(-1, 1)
    plan = plan_manifests((10,), (size,), [_ref(*box) for box in old], coords)
    assert {ref.extents for ref in plan.reused} == kept
    assert {cell.box for cell in plan.cells} == written


def test_shrinking_cuts_old_manifests_to_the_grid() -> None:
    """A manifest outside is dropped, one across the border is written anew."""
    none = np.empty((0, 1), np.uint32)
    inside, across, outside = _ref((0, 2)), _ref((3, 6)), _ref((7, 9))
    plan = plan_manifests((5,), (UNSPLIT,), [inside, across, outside], none)
    assert plan.reused == [inside]
    assert [(cell.box, cell.sources) for cell in plan.cells] == [(((0, 5),), [across])]


def test_an_array_without_axes_has_one_cell() -> None:
    """Its one chunk has no coordinates."""
    plan = plan_manifests((), (), [_ref()], np.empty((1, 0), np.uint32))
    assert [(cell.box, len(cell.sources)) for cell in plan.cells] == [((), 1)]


@given(data=st.data())
def test_every_reference_is_in_one_manifest(data: st.DataObject) -> None:
    """No chunk is lost or in two manifests, for any earlier references and any changes."""
    rank = data.draw(st.integers(1, 3))
    axis = st.integers(1, 6)
    grid = tuple(data.draw(axis) for _ in range(rank))
    old_sizes, sizes = (tuple(data.draw(axis) for _ in range(rank)) for _ in range(2))
    cells = list(np.ndindex(*(-(-a // b) for a, b in zip(grid, old_sizes, strict=True))))
    old = [
        _ref(
            *(
                (at * size, min((at + 1) * size, stop))
                for at, size, stop in zip(cell, old_sizes, grid, strict=True)
            )
        )
        for cell in cells
        if data.draw(st.booleans())
    ]
    chunks = list(np.ndindex(*grid))
    changed = data.draw(st.lists(st.sampled_from(chunks), unique=True))
    coords = np.array(changed, np.uint32).reshape(-1, rank)
    plan = plan_manifests(grid, sizes, old, coords)

    def holds(box: Extents, chunk: tuple[int, ...]) -> bool:
        return all(low <= at < high for at, (low, high) in zip(chunk, box, strict=True))

    for chunk in chunks:
        before = [ref for ref in old if holds(ref.extents, chunk)]
        homes = [ref for ref in plan.reused if holds(ref.extents, chunk)]
        rebuilt = [
            cell
            for cell in plan.cells
            if holds(cell.box, chunk) and any(holds(ref.extents, chunk) for ref in cell.sources)
        ]
        assert len(homes) + len(rebuilt) == len(before)
        if chunk in changed:
            assert not homes
            rows = [row for cell in plan.cells for row in cell.changes if holds(cell.box, chunk)]
            assert changed.index(chunk) in rows


async def test_a_split_repository_reads_as_it_was_written(spec: int) -> None:
    """Under each of several splittings in turn; extents are as tight as the chunks allow."""
    config = RepositoryConfig(
        manifest=ManifestConfig(
            splitting=_splitting((ManifestSplitCondition.any_array(), {ANY: 3}))
        )
    )
    url = memory_url()
    async with Repository.create(url, spec_version=spec, config=config) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (7, 7), (1, 1))
        for i in range(7):
            await write(session, f"a/c/{i}/{6 - i}", bytes([i + 1]))
        await session.commit("diagonal")
        node = (await repository.readonly_session("main")).workspace.array("/a")
        assert node.array is not None
        assert sorted(ref.extents for ref in node.array.manifests) == [
            ((0, 1), (6, 7)),
            ((1, 3), (4, 6)),
            ((3, 4), (3, 4)),
            ((4, 6), (1, 3)),
            ((6, 7), (0, 1)),
        ]
    other = RepositoryConfig(
        manifest=ManifestConfig(
            splitting=_splitting((ManifestSplitCondition.any_array(), {AXIS_0: 2}))
        )
    )
    async with Repository.open(url, config=other) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/0/0", b"\xff")
        await session.commit("corner")
        reader = await repository.readonly_session("main")
        for i in range(7):
            assert await read(reader, f"a/c/{i}/{6 - i}") == bytes([i + 1])
        assert await read(reader, "a/c/0/0") == b"\xff"
        assert len([key async for key in reader.store.list_prefix("a/c/")]) == 8

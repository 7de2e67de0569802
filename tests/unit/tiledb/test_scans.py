"""Scans of sparse arrays: filters drop tiles and never rows."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.errors import InvalidInputError
from icechunk_async.tiledb import open_array
from icechunk_async.tiledb.arrays.fragments import Fragment
from icechunk_async.tiledb.arrays.pruning import TileBounds, attribute_bounds
from icechunk_async.tiledb.format.schema import Attribute
from icechunk_async.tiledb.format.types import VAR, Datatype
from tests.unit.tiledb.archives import ARCHIVES, cases, files_below, filled, golden_jobs

pa = pytest.importorskip("pyarrow", reason="scans are Arrow, which is not installed")
pc = pytest.importorskip("pyarrow.compute")

if TYPE_CHECKING:
    from icechunk_async.tiledb.arrays.sparse import SparseReader

_EXPRESSIONS = 60 if os.environ.get("EXAMPLES") == "all" else 3
SPARSE = cases(lambda job: job["sparse"])


def _expression(rng: random.Random, table: Any) -> Any:
    """Return a random filter with values from a table or near them."""
    if rng.random() < 0.4:
        one, other = _expression(rng, table), _expression(rng, table)
        return rng.choice((one & other, one | other, ~one))
    usable = [
        name
        for name in table.column_names
        if not pa.types.is_nested(table.schema.field(name).type)
        and not pa.types.is_dictionary(table.schema.field(name).type)
        and not pa.types.is_fixed_size_binary(table.schema.field(name).type)
    ]
    name = rng.choice(usable)
    column = pc.field(name)
    if rng.random() < 0.1:
        return rng.choice((column.is_null(), column.is_valid()))
    value = rng.choice(table.column(name))
    if not value.is_valid:
        return column.is_null()
    if rng.random() < 0.2:
        values = [it for it in rng.choices(table.column(name), k=3) if it.is_valid]
        return column.isin(pa.array(values, value.type))
    way = rng.choice(("==", "!=", "<", "<=", ">", ">="))
    return {
        "==": column == value, "!=": column != value, "<": column < value,
        "<=": column <= value, ">": column > value, ">=": column >= value,
    }[way]  # fmt: skip


async def _table(reader: SparseReader, expression: Any = None) -> Any:
    scan = reader.scan(None, expression)
    parts = await scan.plan(part_bytes=10_000)
    batches = [it async for it in scan.batches(parts)]
    return pa.Table.from_batches(batches, reader.arrow_schema)


def _rows(table: Any) -> list[str]:
    # Moments become numbers: not all of them are moments of Python.
    plain = [it.cast(pa.int64()) if pa.types.is_temporal(it.type) else it for it in table.columns]
    names = table.column_names
    return sorted(map(repr, pa.Table.from_arrays(plain, names=names).to_pylist()))


@pytest.mark.parametrize(("archive", "job"), SPARSE)
async def test_filters_leave_the_rows_that_pass(archive: str, job: dict[str, Any]) -> None:
    """As if all rows were read and filtered: over boxes and statistics of all versions."""
    rng = random.Random(f"{archive}/{job['number']}")
    url = await filled(files_below(archive, job["number"]))
    async with open_array(url, end=job["queries"][0].get("end")) as array:
        reader = await array.sparse_reader()
        every = await _table(reader)
        if not every.num_rows:
            return
        for _ in range(_EXPRESSIONS):
            expression = _expression(rng, every)
            found = await _table(reader, expression)
            assert _rows(found) == _rows(every.filter(expression)), str(expression)


@pytest.mark.parametrize(("archive", "job"), SPARSE)
async def test_bounds_hold_for_the_cells_of_each_tile(archive: str, job: dict[str, Any]) -> None:
    """Those of the tree, and the statistics that are used."""
    from icechunk_async.tiledb.arrays.tiles import open_field

    url = await filled(files_below(archive, job["number"]))
    async with open_array(url, end=job["queries"][0].get("end")) as array:
        for fragment in array.fragments:
            tree = await fragment.rtree()
            for upper, lower in zip(tree.levels, tree.levels[1:], strict=False):
                assert len(upper) == -(-len(lower) // tree.fanout)
            if fragment.version >= 5:
                for number, it in enumerate(fragment.schema.dimensions):
                    tiles = await open_field(fragment, it)
                    for tile in range(fragment.tile_count):
                        values = (await tiles.read(tile)).to_numpy()
                        low, high = (
                            side[number][tile]
                            for side in (tree.levels[-1].lows, tree.levels[-1].highs)
                        )
                        if it.is_variable:
                            low, high = low.decode(), high.decode()
                        plain = values if it.is_variable else values.view(it.dtype)
                        assert min(plain) == low
                        assert max(plain) == high
            for attribute in fragment.schema.attributes:
                bounds = await attribute_bounds(fragment, attribute)
                if bounds is None:
                    continue
                tiles = await open_field(fragment, attribute)
                for tile in range(fragment.tile_count):
                    values = (await tiles.read(tile)).to_numpy()
                    _check_bounds(bounds, tile, values, attribute)


def _check_bounds(bounds: TileBounds, tile: int, values: Any, it: Any) -> None:
    mask = np.ma.getmaskarray(values)
    assert bounds.nulls[tile] == mask.any()
    assert bounds.only_nulls[tile] == mask.all()
    if not bounds.known[tile]:
        return
    plain = np.ma.getdata(values)[~mask]
    if it.is_variable:
        assert min(plain) == bounds.lows[tile].decode()
        assert max(plain) == bounds.highs[tile].decode()
    else:
        plain = plain.view(it.dtype) if plain.dtype.kind in "mMb" else plain
        assert not np.isnan(plain).any() if plain.dtype.kind == "f" else True
        assert (plain.min(), plain.max()) == (bounds.lows[tile], bounds.highs[tile])


async def test_coordinates_outside_of_all_boxes_read_no_tile() -> None:
    """Nor does a value that no tile has."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if "enumerations" in it)
    url = await filled(files_below(archive, job["number"]))
    async with open_array(url, end=job["queries"][0]["end"]) as array:
        reader = await array.sparse_reader()
        every = sum(it.cells for it in await reader.scan().plan())
        assert await reader.scan(None, pc.field("x") > 5000).plan() == []
        some = await reader.scan(None, pc.field("x") < 300).plan()
        assert 0 < sum(it.cells for it in some) < every


async def test_range_of_an_attribute_leaves_out_tiles_by_their_statistics() -> None:
    """Where one fragment has all cells; the rows are those that pass."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if it["number"] == "features-4")
    url = await filled(files_below(archive, job["number"]))
    written = [it["time"] for it in job["steps"] if it["op"] == "write"][-1]
    async with open_array(url, start=written, end=written) as array:
        reader = await array.sparse_reader()
        every = await _table(reader)
        greatest = max(every.column("a").to_pylist())
        assert await reader.scan(None, pc.field("a") > greatest).plan() == []
        few = pc.field("a") == greatest
        assert sum(it.cells for it in await reader.scan(None, few).plan()) < every.num_rows
        assert _rows(await _table(reader, few)) == _rows(every.filter(few))


class _StatedFragment:
    """A fragment of one tile, of which only the statistics of one attribute are asked."""

    def __init__(self, version: int, attribute: Attribute) -> None:
        self.version = version
        self.schema = SimpleNamespace(fields={attribute.name: attribute}, capacity=4)
        self.footer = SimpleNamespace(last_tile_cells=4)
        self.tile_count = 1

    async def extremes(self, _: str) -> Any:
        """Return the least text and the greatest."""
        return tuple(SimpleNamespace(items=lambda it=it: [it]) for it in (b"a", b"c"))

    async def null_counts(self, _: str) -> Any:
        """Return that one cell is null."""
        return np.array([1], np.uint64)


@pytest.mark.parametrize(
    ("version", "is_nullable", "is_trusted"),
    [(20, True, False), (21, True, True), (22, True, True), (20, False, True), (10, False, False)],
)
async def test_statistics_of_text_with_nulls_are_trusted_since_version_21(
    *, version: int, is_nullable: bool, is_trusted: bool
) -> None:
    """Before, TileDB wrote wrong ones; before version 11, none at all."""
    text = Attribute("a", Datatype.STRING_ASCII, VAR, (), b"\0", is_nullable=is_nullable)
    found = await attribute_bounds(_StatedFragment(version, text), text)  # type: ignore[arg-type]
    assert (found is not None) == is_trusted
    if found is not None:
        assert (found.lows.tolist(), found.highs.tolist()) == ([b"a"], [b"c"])
        assert found.nulls.tolist() == [is_nullable]


async def test_condition_is_not_applied_again_to_a_fragment_that_lists_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consolidation applied it already: cells of the fragment are those that were left."""
    job = next(it for it in golden_jobs(ARCHIVES[-1]) if it["number"] == "features-4")
    url = await filled(files_below(ARCHIVES[-1], job["number"]))
    written = [it["time"] for it in job["steps"] if it["op"] == "write"][-1]
    async with open_array(url, start=written) as array:
        reader = await array.sparse_reader()
        left = (await _table(reader)).num_rows
        names = frozenset(deletion.name for deletion, _ in reader.deletions)

        async def processed(_: Fragment) -> frozenset[str]:
            return names

        monkeypatch.setattr(Fragment, "processed", processed)
        assert (await _table(reader)).num_rows > left


async def test_filter_that_cannot_be_applied_is_refused() -> None:
    """By the names of the columns."""
    archive = ARCHIVES[-1]
    job = next(it for it in golden_jobs(archive) if "enumerations" in it)
    url = await filled(files_below(archive, job["number"]))
    async with open_array(url, end=job["queries"][0]["end"]) as array:
        reader = await array.sparse_reader()
        for wrong in (pc.field("none") > 5, pc.field("x") > "text"):
            with pytest.raises(InvalidInputError, match="cannot be applied"):
                reader.scan(None, wrong)
        with pytest.raises(InvalidInputError, match="no column 'none'"):
            reader.scan(["none"])


async def test_sparse_and_dense_arrays_are_not_mistaken_for_each_other() -> None:
    """The error names the method to use."""
    jobs = golden_jobs(ARCHIVES[-1])
    for job in (
        next(it for it in jobs if it["sparse"]),
        next(it for it in jobs if not it["sparse"]),
    ):
        url = await filled(files_below(ARCHIVES[-1], job["number"]))
        async with open_array(url) as array:
            if job["sparse"]:
                with pytest.raises(InvalidInputError, match="is sparse"):
                    await array.read()
            else:
                with pytest.raises(InvalidInputError, match="is dense"):
                    await array.sparse_reader()


def test_grouped_bounds_cover_their_tiles() -> None:
    """Tiles of nulls alone do not widen them, and what is unknown stays so."""
    bounds = TileBounds(
        np.array([5, 0, 7, 1, 0]),
        np.array([6, 0, 9, 2, 0]),
        np.array([True, False, True, False, False]),
        np.array([False, True, False, False, True]),
        np.array([False, True, False, False, True]),
    )
    groups = bounds.grouped(2)
    assert groups.lows.tolist()[:2] == [5, 1]
    assert groups.highs.tolist()[:2] == [6, 9]
    assert groups.known.tolist() == [True, False, True]
    assert groups.nulls.tolist() == [True, False, True]
    assert groups.only_nulls.tolist() == [False, False, True]

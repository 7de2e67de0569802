"""Any arrays, however they came about: rows are those that NumPy has.

Types, packing, ranks, chunks and coordinates are drawn; then writes, growth, and statistics that
are made and lost. After each, some columns of some rows are read, at once and in fragments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import arrow
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from tests.helpers import examples
from tests.unit.arrow.queries import random_condition, sorted_rows
from tests.unit.zarr.queries.truth import DTYPES, TIMES, decoded

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import numpy.typing as npt

NUMBERS = (0, 1, 2, 3, 5, 7, 50, 100)
WORDS = ("", "a", "ab", "b", "é", "zz")
HOURS = {"units": "hours since 2000-01-01", "calendar": "proleptic_gregorian"}
NAMES = ("x", "y", "z")


@dataclass
class Array:
    """An array of the model: the values that are stored, and what they mean."""

    dims: tuple[str, ...]
    raw: npt.NDArray[Any]
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])

    def column(self) -> list[Any]:
        """Return the values that a table shows, flat; None for a missing one."""
        if "units" in self.attributes:
            since = np.datetime64("2000-01-01", "us")
            return (since + self.raw.astype("m8[h]")).reshape(-1).tolist()
        if self.raw.dtype.kind in "mM":
            return self.raw.astype(f"{self.raw.dtype.kind}8[us]").reshape(-1).tolist()
        if self.raw.dtype.kind == "O":
            return self.raw.reshape(-1).tolist()
        found = decoded(self.raw, self.attributes)
        pairs = zip(
            found.values.reshape(-1).tolist(), found.valid.reshape(-1).tolist(), strict=True
        )
        return [value if valid else None for value, valid in pairs]


def draw_raw(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Draw values of a type; with NaN and NaT where it has them."""
    pool: list[Any] = list(NUMBERS)
    if dtype == "text":
        pool = list(WORDS)
    elif dtype == "?":
        pool = [False, True]
    elif "f" in dtype:
        pool += [np.nan, -0.0, -2.5]
    elif dtype.startswith(("M", "m")):
        pool += ["NaT"]
    elif "i" in dtype:
        pool += [-1, -100]
    size = int(np.prod(shape))
    given = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    if dtype == "text":
        return np.array(given, object).reshape(shape)
    if dtype[0] in "mM":
        unit = dtype[3:-1]
        times = [
            np.array(it).astype(f"{dtype[0]}8[s]").astype(f"{dtype[0]}8[{unit}]") for it in given
        ]
        return np.array(times, dtype).reshape(shape)
    return np.array(given).astype(dtype).reshape(shape)


@dataclass
class World:
    """A repository, and what is in it."""

    repository: Repository
    lengths: dict[str, int]
    arrays: dict[str, Array]

    def write(self, draw: st.DrawFn) -> None:
        """Replace a region of an array."""
        name = draw(st.sampled_from(sorted(it for it in self.arrays if it not in self.lengths)))
        array = self.arrays[name]
        region = tuple(
            slice(*sorted((draw(st.integers(0, it)), draw(st.integers(0, it)))))
            for it in array.raw.shape
        )
        part = draw_raw(draw, type_of(array.raw), array.raw[region].shape)
        array.raw[region] = part
        self._commit(name, region, part)

    def _commit(self, name: str, region: tuple[slice, ...], part: npt.NDArray[Any]) -> None:
        session = self.repository.writable_session("main")
        stored: Any = zarr.open_array(session.store, path=name, mode="r+")
        stored[region] = part
        if session.has_uncommitted_changes:
            session.commit("written")

    def grow(self, draw: st.DrawFn) -> None:
        """Make the first dimension longer: new cells are zeros, or what is written later."""
        more = draw(st.integers(1, 3))
        self.lengths["x"] += more
        session = self.repository.writable_session("main")
        for name, array in self.arrays.items():
            if "x" not in array.dims:
                continue
            shape = tuple(self.lengths[dim] for dim in array.dims)
            added = (more, *shape[1:])
            empty: Any = "" if array.raw.dtype.kind == "O" else np.zeros(1, array.raw.dtype)[0]
            new = np.full(added, empty, array.raw.dtype)
            if name == "x":
                new = draw_raw(draw, type_of(array.raw), added)
            array.raw = np.concatenate([array.raw, new])
            stored: Any = zarr.open_array(session.store, path=name, mode="r+")
            stored.resize(shape)
            if name == "x":
                stored[-more:] = new
        session.commit("grown")

    def lose(self, rng: random.Random, folder: Path) -> None:
        """Delete statistics at random."""
        for path in (folder / "statistics").rglob("*"):
            if path.is_file() and rng.random() < 0.5:
                path.unlink()

    def table(self, schema: pa.Schema, *, nan_as_null: bool) -> pa.Table:
        """Return all rows."""
        dims = list(self.lengths)
        columns: dict[str, list[Any]] = {}
        places = list(product(*(range(it) for it in self.lengths.values())))
        for name in schema.names:
            if name not in self.arrays:
                columns[name] = [place[dims.index(name)] for place in places]
                continue
            array = self.arrays[name]
            flat = array.column()
            if pa.types.is_floating(schema.field(name).type):
                # Also integers: those of `_Unsigned` with missing ones are doubles, as in xarray.
                missing = None if nan_as_null else np.nan
                flat = [missing if it is None else float(it) for it in flat]
            axes = [dims.index(it) for it in array.dims]
            index = [
                int(np.ravel_multi_index([place[axis] for axis in axes], array.raw.shape))
                if axes
                else 0
                for place in places
            ]
            columns[name] = [flat[it] for it in index]
        found = [pa.array(columns[it.name], it.type) for it in schema]
        return pa.Table.from_arrays(found, schema=schema)


def type_of(raw: npt.NDArray[Any]) -> str:
    """Return a type as `draw_raw` takes it."""
    return "text" if raw.dtype.kind == "O" else raw.dtype.str.lstrip("|<=")


def new_world(draw: st.DrawFn, folder: Path) -> World:
    """Draw arrays and coordinates, and commit them."""
    lengths = {
        it: draw(st.integers(0 if it == "y" else 1, 6)) for it in NAMES[: draw(st.integers(0, 3))]
    }
    arrays: dict[str, Array] = {}
    for dim, length in lengths.items():
        kind = draw(st.sampled_from(["up", "down", "any", "M8[s]", "hours", "text", "none"]))
        if kind == "none":
            continue
        dtype = {"M8[s]": kind, "text": "text", "hours": "i4"}.get(kind) or draw(
            st.sampled_from(["f4", "f8", "i2", "u1"])
        )
        raw = draw_raw(draw, dtype, (length,))
        if kind in ("up", "down"):
            raw = np.sort(raw)[:: 1 if kind == "up" else -1].copy()
        arrays[dim] = Array((dim,), raw, dict(HOURS) if kind == "hours" else {})
    dims = tuple(lengths)
    shape = tuple(lengths.values())
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        dtype = draw(st.sampled_from((*DTYPES, *TIMES, "text")))
        array = Array(dims, draw_raw(draw, dtype, shape))
        if array.raw.dtype.kind in "iu" and draw(st.booleans()):
            array.attributes["_FillValue"] = draw(st.sampled_from(NUMBERS))
        if array.raw.dtype.kind == "i" and draw(st.booleans()):
            array.attributes["_Unsigned"] = "true"
        if array.raw.dtype.kind in "iuf" and draw(st.booleans()):
            array.attributes |= {
                "scale_factor": draw(st.sampled_from([0.5, -2.0])),
                "add_offset": 1.0,
            }
        arrays[name] = array
    repository = Repository.create(
        local_filesystem_storage(str(folder)), RepositoryConfig(inline_chunk_threshold_bytes=0)
    )
    if draw(st.booleans()):
        repository.keep_statistics()
    session = repository.writable_session("main")
    for name, array in arrays.items():
        chunks = tuple(draw(st.integers(1, 4)) for _ in array.raw.shape)
        is_sharded = bool(chunks) and draw(st.booleans())
        making: Any = zarr.create_array
        stored = making(
            session.store,
            name=name,
            shape=array.raw.shape,
            chunks=chunks,
            shards=tuple(it * 2 for it in chunks) if is_sharded else None,
            dtype=str if array.raw.dtype.kind == "O" else array.raw.dtype,
            dimension_names=array.dims,
            attributes=array.attributes,
            fill_value="" if array.raw.dtype.kind == "O" else np.zeros(1, array.raw.dtype)[0],
        )
        stored[...] = array.raw
    session.commit("made")
    return World(repository, lengths, arrays)


def check(world: World, draw: st.DrawFn, rng: random.Random) -> None:
    """Compare some columns of some rows."""
    nan_as_null = draw(st.booleans())
    size = draw(st.sampled_from([1, 40, 1 << 20]))
    dataset = arrow.dataset(
        world.repository,
        nan_as_null=nan_as_null,
        fragment_bytes=size,
        batch_rows=draw(st.integers(1, 9)),
    )
    assert set(dataset.schema.names) == {*world.lengths, *world.arrays}
    table = world.table(dataset.schema, nan_as_null=nan_as_null)
    assert dataset.count_rows() == len(table)
    names = rng.sample(table.schema.names, rng.randint(1, len(table.schema.names)))
    condition = random_condition(rng, table) if len(table) else None
    expected = ds.dataset(table).to_table(filter=condition, columns=names)
    found = dataset.to_table(filter=condition, columns=names)
    assert sorted_rows(found) == sorted_rows(expected), str(condition)
    parts = [
        it.to_table(columns=names, filter=condition) for it in dataset.get_fragments(condition)
    ]
    if parts:
        found = pa.concat_tables(parts)
    assert sorted_rows(found) == sorted_rows(expected), str(condition)


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@examples(200)
@given(st.data(), st.randoms(use_true_random=False))
def test_rows_are_those_of_numpy_after_any_changes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rng: random.Random
) -> None:
    """Writes, growth, analyses and losses in any order."""
    folder = tmp_path_factory.mktemp("oracle")
    draw: Any = data.draw
    world = new_world(draw, folder)
    check(world, draw, rng)
    for _ in range(data.draw(st.integers(0, 3))):
        match data.draw(st.sampled_from(["write", "grow", "analyze", "lose"])):
            case "write":
                world.write(draw)
            case "grow" if world.lengths:
                world.grow(draw)
            case "analyze":
                world.repository.analyze()
            case _:
                world.lose(rng, folder)
        check(world, draw, rng)

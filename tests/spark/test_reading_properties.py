"""On any arrays and conditions, the rows are those that NumPy finds."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from icechunk_async.arrow.boxes import Grid, boxes_of, cut, num_chunks, num_rows, spans_of
from icechunk_async.sync import Repository
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import to_icechunk
from tests.helpers import examples
from tests.spark.tables import read

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

OPERATORS: dict[str, Any] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
FILTERS: dict[str, Any] = {
    "=": lambda name, it: EqualTo((name,), it),
    "!=": lambda name, it: Not(EqualTo((name,), it)),
    "<": lambda name, it: LessThan((name,), it),
    "<=": lambda name, it: LessThanOrEqual((name,), it),
    ">": lambda name, it: GreaterThan((name,), it),
    ">=": lambda name, it: GreaterThanOrEqual((name,), it),
}
type Case = tuple[xr.Dataset, tuple[int, ...], list[tuple[str, str, float]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a dataset, its chunks, and conditions on its coordinates."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    dims = ["x", "y", "z"][: len(shape)]
    numbers = st.sampled_from([-2.0, -1.5, 0.0, 1.0, 2.5, 4.0, math.nan])
    coords: dict[str, Any] = {}
    for dim, length in zip(dims, shape, strict=True):
        kind = draw(st.sampled_from(["ascending", "descending", "any", "none"]))
        if kind != "none":
            values = np.array(draw(st.lists(numbers, min_size=length, max_size=length)))
            ordered = np.sort(values)
            picked = {"ascending": ordered, "descending": ordered[::-1], "any": values}[kind]
            coords[dim] = (dim, picked.astype("f8"))
    size = math.prod(shape)
    cells = np.array(draw(st.lists(numbers, min_size=size, max_size=size)), "f4").reshape(shape)
    chunks = tuple(draw(st.integers(1, max(1, length))) for length in shape)
    condition = st.tuples(
        st.sampled_from(dims), st.sampled_from(sorted(OPERATORS)), st.sampled_from([-1.5, 0.0, 2.0])
    )
    conditions = draw(st.lists(condition, max_size=3))
    conditions = [(d, op, v if d in coords else int(v)) for d, op, v in conditions]
    return xr.Dataset({"v": (dims, cells)}, coords=coords), chunks, conditions


def expected(case: Case) -> list[tuple[Any, ...]]:
    """Return the rows that NumPy finds, NaN as None."""
    dataset, _, conditions = case
    values = dataset["v"].to_numpy()
    axes = [
        dataset[dim].to_numpy() if dim in dataset.coords else np.arange(length)
        for dim, length in zip(dataset["v"].dims, values.shape, strict=True)
    ]
    rows: list[tuple[Any, ...]] = []
    for place in product(*map(range, values.shape)):
        cell = [axis[index] for axis, index in zip(axes, place, strict=True)]
        at = dict(zip(dataset["v"].dims, cell, strict=True))
        if all(not np.isnan(at[d]) and OPERATORS[op](at[d], v) for d, op, v in conditions):
            rows.append(tuple(None if np.isnan(it) else float(it) for it in (*cell, values[place])))
    return rows


def stored(case: Case, directory: Path, *, scaled: bool = False) -> str:
    """Commit the dataset of a case to a new repository, with NaN or fill values."""
    dataset, chunks, _ = case
    place = directory / str(len(list(directory.iterdir())))
    repository = Repository.create(local_filesystem_storage(str(place)))
    session = repository.writable_session("main")
    packed = {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -99}
    encoding = {"chunks": chunks, **(packed if scaled else {})}
    to_icechunk(dataset, session, encoding={"v": encoding})
    session.commit("case")
    return place.as_uri()


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows as floats."""
    columns = [table[name].to_pylist() for name in table.column_names]
    return [
        tuple(None if it is None else float(it) for it in row) for row in zip(*columns, strict=True)
    ]


@settings(examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), small=st.booleans(), scaled=st.booleans())
def test_the_rows_are_those_of_numpy(
    tmp_path: Path,
    case: Case,
    small: bool,  # noqa: FBT001
    scaled: bool,  # noqa: FBT001
) -> None:
    """With the option ``where``; filters of Spark leave out no row that counts."""
    url = stored(case, tmp_path, scaled=scaled)
    wanted = expected(case)
    where = " and ".join(f"{d} {op} {v}" for d, op, v in case[2])
    sizes = {"partition_bytes": "24", "batch_rows": "3"} if small else {}
    found = rows_of(read(url, where=where, **sizes))
    assert sorted(found, key=str) == sorted(wanted, key=str)
    assert small or found == wanted
    filters = [FILTERS[op](d, v) for d, op, v in case[2]]
    filters += [In((d,), (v, 1.0)) for d, op, v in case[2] if op == "="]
    filters += [IsNotNull((d,)) for d, _, _ in case[2]]
    assert set(wanted) <= set(rows_of(read(url, filters=filters, **sizes)))


@pytest.mark.parametrize("seed", range(3))
def test_spark_agrees_with_numpy(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """Also where Spark filters by itself, with and without its filters pushed down."""
    random = np.random.default_rng(seed)
    cells = random.choice([1.0, 2.0, np.nan, -3.5], (9, 5)).astype("f4")
    down = np.sort(random.random(9))[::-1]
    down[4] = np.nan
    dataset = xr.Dataset({"v": (("x", "y"), cells)}, coords={"x": down})
    bound = float(down[6]) if seed < 2 else 7.0
    case: Case = (dataset, (2, 3), [("x", ">=", bound), ("y", "!=", 2)])
    url = stored(case, tmp_path)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for push in ("false", "true"):
        frame = spark.read.format("icechunk").option("push-filters", push).load(url)
        found = frame.where(f"x >= {bound}D and y != 2").collect()
        rows = [tuple(None if it is None else float(it) for it in row) for row in found]
        assert sorted(rows, key=str) == sorted(expected(case), key=str)
        if push == "false":
            # Spark keeps the plan of a frame's first query: nothing of it may be pruned.
            assert frame.count() == cells.size


@given(
    shape=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=3),
    max_rows=st.integers(1, 40),
    breaks=st.lists(st.integers(0, 9), max_size=3).map(sorted),
)
def test_parts_cover_a_box_once_and_cut_no_chunk(
    shape: list[tuple[int, int]], max_rows: int, breaks: list[int]
) -> None:
    """And are no larger than asked for, unless they are one chunk."""
    lengths = tuple(length for length, _ in shape)
    chunks = tuple(chunk for _, chunk in shape)
    box = tuple((0, length) for length in lengths)
    places = [it * chunks[0] for it in breaks] if chunks else []
    parts = list(cut(box, chunks, max_rows, places))
    seen = np.zeros(lengths, int)
    for part in parts:
        seen[tuple(slice(*span) for span in part)] += 1
        assert num_rows(part) <= max_rows or num_chunks([part], chunks) == 1
        assert all(start % size == 0 for (start, _), size in zip(part, chunks, strict=True))
    assert (seen == 1).all()


def test_parts_end_where_manifests_end() -> None:
    """Where that is not far from where they would end anyway."""
    parts = list(cut(((0, 100),), (1,), 30, (0, 25, 50, 75)))
    assert [part[0] for part in parts] == [(0, 25), (25, 50), (50, 75), (75, 100)]


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 5))
def test_spans_hold_every_match_and_no_chunk_without_one(given: list[bool], chunk: int) -> None:
    """And begin and end with matches."""
    mask = np.array(given, bool)
    spans = spans_of(mask, chunk)
    covered = np.zeros(len(mask), bool)
    for start, stop in spans:
        assert mask[start]
        assert mask[stop - 1]
        covered[start:stop] = True
    assert not (mask & ~covered).any()
    for start in range(0, len(mask), chunk):
        if not mask[start : start + chunk].any():
            assert not covered[start : start + chunk].any()


def test_very_many_ranges_make_a_small_plan() -> None:
    """More is read then, and nothing is lost."""
    spans = [[(it * 3, it * 3 + 1) for it in range(100)]] * 3
    boxes = boxes_of(spans)
    assert len(boxes) <= 1024
    assert boxes[0][0][0] == 0
    assert boxes[-1][0][1] == 298
    mask = np.zeros(300, bool)
    mask[::3] = True
    assert sum(map(num_rows, next(Grid((300,), (1,)).parts([mask], 10)))) == 10

"""Conditions on values: rows are those that SQL selects, and other chunks stay unread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, IsNull, LessThan, Not

from icechunk_async.arrow.boxes import num_chunks
from icechunk_async.arrow.guarantees import ChunkBounds
from icechunk_async.arrow.table import Column
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import watch_reads
from icechunk_async.spark.read.pushdown import Predicate, fulfilled, possible
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import combined
from tests.helpers import examples
from tests.spark.tables import make_reader, plan, read
from tests.spark.test_conditions import columns as column_values
from tests.unit.arrow.queries import keep_only, objects_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

NUMBERS = (-3.0, -1.5, 0.0, 0.5, 1.0, 2.5, 100.0, math.nan)
PACKINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -99},
    "reversed": {"dtype": "i2", "scale_factor": -0.5, "add_offset": 7.0, "_FillValue": -99},
}
LENGTH = 24


def stored(place: Path, values: Any, packing: str, *, statistics: str = "all") -> str:
    """Commit a line of values in chunks of four, with statistics of all chunks, some or none."""
    repository = Repository.create(
        local_filesystem_storage(str(place)), RepositoryConfig(inline_chunk_threshold_bytes=0)
    )
    if statistics == "written":
        repository.keep_statistics()
    session = repository.writable_session("main")
    dataset = xr.Dataset({"v": ("x", np.array(values, "f4"))})
    to_icechunk(dataset, session, encoding={"v": {"chunks": (4,), **PACKINGS[packing]}})
    session.commit("values")
    if statistics == "all":
        repository.analyze()
    if statistics == "some":
        repository.analyze()
        session = repository.writable_session("main")
        to_icechunk(
            dataset.isel(x=slice(0, 8)), session, region={"x": slice(0, 8)}
        )  # the same values as new objects
        session.commit("again")
    return place.as_uri()


@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.sampled_from(NUMBERS), min_size=LENGTH, max_size=LENGTH),
    stored_as=st.tuples(
        st.sampled_from(sorted(PACKINGS)), st.sampled_from(["all", "some", "none", "written"])
    ),
    nan_as_null=st.booleans(),
    literal=st.sampled_from([-1.5, 0.0, 0.5, 2.5, 3.0]),
)
def test_rows_are_those_of_all_rows_whatever_statistics_are_known(
    tmp_path: Path,
    values: list[float],
    stored_as: tuple[str, str],
    nan_as_null: bool,  # noqa: FBT001
    literal: float,
) -> None:
    """With the option ``where``, and what filters of Spark leave; sorted and unsorted values."""
    ordered = sorted(values, key=lambda it: (math.isnan(it), it))
    packing, statistics = stored_as
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    url = stored(place, ordered, packing, statistics=statistics)
    shown: dict[str, Any] = {"nan_as_null": str(nan_as_null).lower()}
    whole = read(url, **shown)
    column, rows = whole["v"].combine_chunks(), whole.to_pylist()
    for op in ("=", "!=", "<", "<=", ">", ">=", "in", "not in"):
        text = f"({literal}D, 100)" if "in" in op else f"{literal}D"
        given = (literal, 100) if "in" in op else (literal,)
        mask = fulfilled(column, Predicate("v", op, given), exact=True)
        wanted = [row for row, keeps in zip(rows, mask, strict=True) if keeps and row["x"] < 20]
        found = read(url, where=f"v {op} {text} and x < 20", **shown).to_pylist()
        found.sort(key=lambda row: row["x"])
        assert str(found) == str(wanted)  # NaN is NaN
    for it in (
        GreaterThan(("v",), literal),
        LessThan(("v",), literal),
        Not(EqualTo(("v",), literal)),
        In(("v",), (literal, 100.0)),
        IsNull(("v",)),
        IsNotNull(("v",)),
    ):
        few = read(url, filters=[it], **shown)
        predicate = make_reader(url, filters=[it], **shown).predicates[0]
        mask = fulfilled(column, predicate, exact=True)
        assert set(np.flatnonzero(mask).tolist()) <= set(few["x"].to_pylist())


def test_a_chunk_is_kept_wherever_a_value_in_it_matches() -> None:
    """All types and operators of SQL; and it is left out where the bounds exclude all literals."""
    left_out = 0
    for name, column in column_values(nan_as_null=True).items():
        literals = [it for it in column.to_pylist() if it is not None][:6]
        for start in range(0, 12, 3):
            chunk = column.slice(start, 3)
            bounds: Any = pa.compute.min_max(chunk)
            some = np.array([chunk.null_count < 3])
            known = ChunkBounds(
                Column(name, column.type, ("x",)),
                np.array([True]),
                some,
                np.array([chunk.null_count > 0]),
                pa.array([bounds["min"].as_py()], column.type),
                pa.array([bounds["max"].as_py()], column.type),
            )
            for op in ("=", "!=", "<", "<=", ">", ">=", "in", "not in"):
                for it in literals:
                    predicate = Predicate(name, op, (it, literals[0]) if "in" in op else (it,))
                    matches = fulfilled(chunk, predicate, exact=False).any()
                    kept = possible(known, predicate)[0]
                    assert kept or not matches, (name, op, it, chunk)
                    left_out += not kept
    assert left_out > 300


LAST = "\U0010ffff"
WORDS = sorted(
    ["", "a", "a\0", "a\0b", "é", "\ue000", "\U00010000", LAST, LAST * 9, "N/A", "N/B"]
    + [f"{'x' * many}{tail}" for many in (31, 40) for tail in ("", "b", "é", "1", "2")]
)


def words(place: Path, kind: str) -> str:
    """Commit texts, four to a chunk, and analyze them."""
    repository = Repository.create(
        local_filesystem_storage(str(place)), RepositoryConfig(inline_chunk_threshold_bytes=0)
    )
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store,
        name="v",
        shape=(len(WORDS),),
        chunks=(4,),
        dtype="U41" if kind == "fixed" else "str",
        dimension_names=("x",),
        attributes={"missing_value": "N/A"},
    )
    array[:] = np.array(WORDS, np.dtypes.StringDType())
    session.commit("words")
    repository.analyze()
    return place.as_uri()


@pytest.mark.parametrize("kind", ["fixed", "any"])
def test_rows_with_text_are_those_of_all_rows(tmp_path: Path, kind: str) -> None:
    """Of all comparisons with all texts; most of them need some chunks only."""
    url = words(tmp_path / "words", kind)
    whole = read(url)
    column, rows = whole["v"].combine_chunks(), whole.to_pylist()
    assert column.null_count == 1
    parts = 0
    for op in ("=", "<=", ">", "!=", "in", "not in"):
        for literal in WORDS:
            text = f"('{literal}', 'é')" if "in" in op else f"'{literal}'"
            given = (literal, "é") if "in" in op else (literal,)
            mask = fulfilled(column, Predicate("v", op, given), exact=True)
            wanted = [row for row, keeps in zip(rows, mask, strict=True) if keeps]
            reader = make_reader(url, where=f"v {op} {text}")
            parts += sum(len(part.boxes) for part in plan(reader))
            found = read(url, where=f"v {op} {text}").to_pylist()
            assert sorted(found, key=lambda row: row["x"]) == wanted, (op, literal)
    assert parts < len(WORDS) * 6 * 4


@pytest.mark.skipif(
    xr.__version__ < "2026",
    reason="xarray before 2026.1 reads whole arrays of text when it opens a dataset",
)
def test_chunks_whose_text_cannot_match_are_not_read(tmp_path: Path) -> None:
    """They are gone; nothing is known where no text follows the begin of the greatest."""
    url = words(tmp_path / "words", "any")
    at = WORDS.index("\ue000")
    repository = Repository.open(local_filesystem_storage(str(tmp_path / "words")))
    kept = objects_of(repository, "/v", lambda it: it[0] in {at // 4, len(WORDS) // 4})
    keep_only(tmp_path / "words", kept)
    assert read(url, where="v = '\ue000'")["x"].to_pylist() == [at]
    assert read(url, where=f"v >= '\ue000' and v < '{LAST}'")["x"].to_pylist() == [at, at + 1]


@pytest.fixture
def line(tmp_path: Path) -> str:
    """Return a repository with 24 ascending values, of which only the chunk of 8-11 is left."""
    url = stored(tmp_path / "line", np.arange(LENGTH), "plain")
    repository = Repository.open(local_filesystem_storage(str(tmp_path / "line")))
    session = repository.readonly_session("main").handle.now()
    native = session.workspace
    from icechunk_async._runtime.blocking.portal import run

    for at in range(LENGTH // 4):
        handle = run(native.find_chunk("/v", (at,)))
        assert handle is not None
        if at != 2:
            (tmp_path / "line" / "chunks" / str(handle.ref.chunk_id)).unlink()  # type: ignore[union-attr]
    return url


@pytest.mark.only_spark
def test_chunks_that_cannot_match_are_not_read(spark: SparkSession, line: str) -> None:
    """They are gone; by the option, and by filters of a query; and Spark is told of it."""
    planned = watch_reads(spark)
    reader = spark.read.format("icechunk")
    few = reader.option("where", "v >= 8 and v < 10").load(line)
    assert sorted(row.x for row in few.collect()) == [8, 9]
    assert few.where("x > 8").count() == 1
    read_of = planned.value[0]
    assert (read_of.chunks, read_of.all_chunks, read_of.rows) == (1, 6, 4)
    assert read_of.conditions == ("v",)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        reader = spark.read.format("icechunk")  # options stay with a reader
        pushed = reader.option("push-filters", "true").load(line)
        assert [row.x for row in pushed.where("v = 11").collect()] == [11]
        assert planned.value[-1].chunks == 1
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_columns_with_conditions_need_not_be_asked_for(line: str) -> None:
    """A schema without the column has no such column in its rows."""
    schema = pa.schema([("x", pa.int64())])
    found = read(line, where="v >= 8 and v < 10", schema=schema)
    assert found.column_names == ["x"]
    assert found["x"].to_pylist() == [8, 9]
    assert plan(make_reader(line, where="v > 1000")) == []


def test_stored_numbers_are_not_pruned_by_what_they_mean(tmp_path: Path) -> None:
    """Statistics are about values: with ``decode`` off, fill values are numbers as others."""
    url = stored(tmp_path / "a", [1.0, math.nan] * 12, "scaled")
    assert read(url, where="v = -99", decode="false").num_rows == 12
    assert read(url, where="v = 1").num_rows == 12


def test_streams_take_conditions_on_dimensions_only(line: str) -> None:
    """Their rows are counted by place."""
    from icechunk_async.spark.read.reader import IcechunkReader

    batch = make_reader(line, where="v > 1")
    stream = IcechunkReader(batch.options, make_schema(line), on_values=False)
    with pytest.raises(InvalidInputError, match="a stream takes only those on the dimensions: x"):
        stream.partitions()


def make_schema(url: str) -> Any:
    """Return the default columns of a repository, as Spark has them."""
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.read.reader import Reading

    return Reading.begin(ReadOptions.parse({"path": url})).spark_schema()


@pytest.fixture
def field(tmp_path: Path) -> str:
    """Return a field in 24 chunks with gaps, times and coordinates; it has all statistics."""
    repository = Repository.create(
        local_filesystem_storage(str(tmp_path / "field")),
        RepositoryConfig(inline_chunk_threshold_bytes=0),
    )
    rng = np.random.default_rng(3)
    values = np.sort(rng.integers(0, 99, 24 * 9)).reshape(24, 9).astype("f4")
    days = np.datetime64("2020-01-01", "ns") + np.arange(24) * np.timedelta64(1, "D")
    dataset = xr.Dataset(
        {
            "t": (("time", "lat"), np.where(values % 7 == 0, np.nan, values)),
            "u": (("time", "lat"), rng.integers(0, 5, (24, 9))),
        },
        coords={"time": days, "lat": np.linspace(-80, 80, 9)},
    )
    session = repository.writable_session("main")
    chunks = {"chunks": (3, 3)}
    to_icechunk(dataset, session, encoding={"t": chunks, "u": chunks})
    session.commit("field")
    repository.analyze()
    return (tmp_path / "field").as_uri()


_FIELD = {
    "t": ("10", "40.5", "41", "90", "-1"),
    "u": ("0", "2", "4", "7"),
    "lat": ("0", "-60", "40.0D", "81"),
    "time": ("'2020-01-05'", "DATE '2020-01-12'", "TIMESTAMP '2020-01-20 00:00:00'", "'2021'"),
}


def _conditions(rng: Any, depth: int) -> str:
    """Return random conditions on values and dimensions."""
    if depth and rng.random() < 0.7:
        joint = str(rng.choice([" and ", " or "]))
        parts = [_conditions(rng, depth - 1) for _ in range(int(rng.integers(2, 4)))]
        return f"{rng.choice(['', 'not '])}({joint.join(parts)})"
    name = str(rng.choice(list(_FIELD)))
    return f"{name} {rng.choice(['<', '>=', '=', '!=', '>'])} {rng.choice(_FIELD[name])}"


def test_rows_of_disjunctions_are_those_of_all_rows(field: str) -> None:
    """Over values and dimensions, planned and read; chunks that no part needs are left out."""
    rng = np.random.default_rng(0)
    whole = read(field)
    rows = whole.to_pylist()
    columns = {name: whole[name].combine_chunks() for name in whole.column_names}
    boxes = 0
    for _ in range(80):
        text = _conditions(rng, 2)
        mask = np.logical_and.reduce(
            [
                combined(it, lambda own: fulfilled(columns[own.column], own, exact=True))
                for it in parse_where(text)
            ]
        )
        wanted = [str(row) for row, keeps in zip(rows, mask, strict=True) if keeps]
        assert sorted(map(str, read(field, where=text).to_pylist())) == sorted(wanted), text
        few = read(field, where=text, schema=pa.schema([("u", pa.int64())]))
        assert few.num_rows == len(wanted), text
        boxes += sum(
            num_chunks(part.boxes, (3, 3)) for part in plan(make_reader(field, where=text))
        )
    assert boxes < 80 * 24 * 0.9


@pytest.mark.parametrize(
    ("where", "chunks"),
    [
        ("time < '2020-01-04' or lat > 70", 8 + 2),
        ("(time < '2020-01-04' and lat > 70) or (time >= '2020-01-22' and lat < 0)", 1 + 2),
        ("not (time >= '2020-01-04' or lat <= 70)", 1),
        ("t > 1000 or lat > 70", 8),
        ("(t > 1000 or u > 100) and lat > 0", 0),
        ("lat > 70 and lat < -70 or t > 1000", 0),
    ],
)
def test_disjunctions_leave_out_chunks_by_values_and_dimensions(
    field: str, where: str, chunks: int
) -> None:
    """Counted where Spark plans; each part is looked at in each chunk."""
    parts = plan(make_reader(field, where=where))
    assert sum(num_chunks(part.boxes, (3, 3)) for part in parts) == chunks


def test_streams_take_disjunctions_on_one_dimension(field: str) -> None:
    """A mask along it decides them; on two dimensions none does."""
    from icechunk_async.spark.read.reader import IcechunkReader

    def stream(where: str) -> IcechunkReader:
        options = make_reader(field, where=where).options
        return IcechunkReader(options, make_schema(field), on_values=False)

    found = plan(stream("time < '2020-01-03' or time = DATE '2020-01-24'"))
    assert sum(num_chunks(part.boxes, (3, 3)) for part in found) == 6
    with pytest.raises(InvalidInputError, match=r"on time, lat, but a stream .* each on one"):
        stream("time < '2020-01-03' or lat > 70").partitions()

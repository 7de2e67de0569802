"""The layout `tiledb`: cells of TileDB arrays as rows, planned in one process, read in others."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.spark import register, watch_reads
from icechunk_async.spark.options import ReadOptions, StreamOptions
from icechunk_async.spark.read.pushdown import Predicate, fulfilled
from icechunk_async.spark.read.tiledb import TileDBReader, batch_reader, pinned, spark_schema
from icechunk_async.spark.read.tiledb_columns import column_type, expression_of, to_column
from icechunk_async.sync import tiledb
from icechunk_async.zarr.queries.predicates import combined, joined
from tests.unit.tiledb.archives import ARCHIVES, golden_jobs
from tests.unit.tiledb.virtual_arrays import placed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async.tiledb.arrays.portable import PortableArray
    from icechunk_async.zarr.queries.predicates import Where

NEWEST = ARCHIVES[-1]
_PREDICATES = 200 if os.environ.get("EXAMPLES") == "all" else 8


def _jobs(*, sparse: bool) -> list[Any]:
    """Return golden jobs; by default those of one version, the others are thorough."""
    return [
        pytest.param(
            archive,
            job,
            id=f"{archive}-{job['number']}",
            marks=() if archive == NEWEST else pytest.mark.thorough,
        )
        for archive in ARCHIVES
        for job in golden_jobs(archive)
        if job["sparse"] is sparse
    ]


def _options(place: Path, **given: str) -> ReadOptions:
    named = {name.replace("_", "-"): value for name, value in given.items()}
    return ReadOptions.parse({"path": place.as_uri(), "layout": "tiledb", **named})


def test_url_says_that_an_array_is_there(tmp_path: Path) -> None:
    """Without the option `layout`; with another one it is refused, as is a cloud of TileDB's."""
    url = f"tiledb+{placed(NEWEST, 'features-0', tmp_path).as_uri()}"
    named = ReadOptions.parse({"path": url})
    assert (named.layout, named.url) == ("tiledb", url.removeprefix("tiledb+"))
    assert named == ReadOptions.parse({"path": named.url, "layout": "tiledb"})
    with pytest.raises(InvalidInputError, match="'layout' is 'rows'"):
        ReadOptions.parse({"path": url, "layout": "rows"})
    with pytest.raises(InvalidInputError, match="cloud service"):
        ReadOptions.parse({"path": "tiledb://namespace/array"})


def _reader(options: ReadOptions, array: PortableArray | None = None) -> TileDBReader:
    """Return a reader that crossed to another process."""
    seen = pinned(options) if array is None else array
    schema = spark_schema(options, seen)
    made: TileDBReader = pickle.loads(pickle.dumps(batch_reader(options, schema, seen, None)))
    return made


def _read(reader: TileDBReader) -> Any:
    """Plan, carry each part to another process, read, and return a table."""
    batches: list[Any] = []
    for part in reader.partitions():
        there: TileDBReader = pickle.loads(pickle.dumps(reader))
        batches += there.read(pickle.loads(pickle.dumps(part)))
    return pa.Table.from_batches(batches, reader.schema)


def _rows(table: Any) -> list[str]:
    plain = [
        table.column(name).cast(pa.int64()) if pa.types.is_temporal(kind) else table.column(name)
        for name, kind in zip(table.schema.names, table.schema.types, strict=True)
    ]
    rows = zip(*(it.to_pylist() for it in plain), strict=True)
    return sorted(map(repr, rows))


def _shown(table: Any) -> Any:
    """Return cells as Spark sees them."""
    columns: dict[str, Any] = {}
    for name in table.schema.names:
        values = table.column(name).combine_chunks()
        values = pa.concat_arrays(values.chunks) if hasattr(values, "chunks") else values
        columns[name] = to_column(values, column_type(values.type), nan_as_null=True)
    return pa.Table.from_pydict(columns)


@pytest.mark.parametrize(("archive", "job"), _jobs(sparse=True))
def test_rows_of_a_sparse_array_are_its_cells(
    archive: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """In partitions of any size: each cell once, the newest one, and no deleted one."""
    place = placed(archive, job["number"], tmp_path)
    with tiledb.open_array(place) as array:
        expected = _rows(_shown(array.scan().to_table()))
    for size in ("1", "2000", "1000000"):
        assert _rows(_read(_reader(_options(place, partition_bytes=size)))) == expected


def _dense_rows(place: Path) -> list[str]:
    """Return the cells in the least box around those that were written, with coordinates."""
    from icechunk_async.tiledb.arrays.arrow import to_arrow
    from icechunk_async.tiledb.arrays.cells import Cells

    with tiledb.open_array(place) as array:
        inner, schema = array.native, array.schema
        written = [it.footer.non_empty for it in inner.fragments if it.footer.non_empty]
        spans = [
            range(
                min(int(box[axis][0]) for box in written),
                max(int(box[axis][1]) for box in written) + 1,
            )
            for axis in range(len(schema.dimensions))
        ]
        from icechunk_async._runtime.blocking.portal import run

        box = tuple(
            (span.start - low, span.stop - low)
            for span, low in zip(spans, inner.grid().origin, strict=True)
        )
        cells = run(inner.read_cells(box))
        places = np.array(list(itertools.product(*spans)), np.int64)
        columns = {
            it.name: to_arrow(Cells(it, places[:, axis : axis + 1].astype(it.dtype)))
            for axis, it in enumerate(schema.dimensions)
        }
        enumerations = array.enumerations()
        columns |= {name: to_arrow(it, enumerations.get(name)) for name, it in cells.items()}
    return _rows(_shown(pa.Table.from_pydict(columns)))


@pytest.mark.parametrize(("archive", "job"), _jobs(sparse=False))
def test_rows_of_a_dense_array_are_the_cells_around_what_was_written(
    archive: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """With the fill value where nothing was written in between."""
    place = placed(archive, job["number"], tmp_path)
    expected = _dense_rows(place)
    for size in ("1", "500", "1000000"):
        assert _rows(_read(_reader(_options(place, partition_bytes=size)))) == expected


def _predicate(rng: random.Random, table: Any) -> Predicate | None:
    """Return a random predicate, as Spark pushes it, with values of a table or near them."""
    name = rng.choice(table.schema.names)
    kind = table.schema.field(name).type
    values = [it for it in table.column(name).to_pylist() if it is not None]
    op = rng.choice(("=", "<", "<=", ">", ">=", "in", "!=", "not in", "null", "not null"))
    if op in ("null", "not null"):
        return Predicate(name, op)
    if not values or isinstance(values[0], list | bytes):
        return None
    count = rng.randrange(3) if "in" in op else 1
    chosen = rng.choices(values, k=count)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        chosen = [it + rng.choice((0, 0, 1, -1, 0.5, 1e-9, 2.0**60)) for it in chosen]
    return Predicate(name, op, tuple(chosen))


def _where(rng: random.Random, table: Any, depth: int = 2) -> Where | None:
    """Return random conditions, some of which must all hold, or any."""
    if not depth or rng.random() < 0.4:
        return _predicate(rng, table)
    found = [_where(rng, table, depth - 1) for _ in range(rng.choice((1, 2, 3)))]
    parts = [it for it in found if it is not None]
    return joined(parts, is_any=rng.random() < 0.6) if parts else None


@pytest.mark.parametrize(("archive", "job"), [*_jobs(sparse=True), *_jobs(sparse=False)])
def test_conditions_leave_the_rows_that_fulfil_them(
    archive: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """As if all rows were read and filtered: what is planned holds all of them."""
    rng = random.Random(f"{archive}/{job['number']}")
    place = placed(archive, job["number"], tmp_path)
    options = _options(place, partition_bytes="500", nan_as_null=rng.choice(("true", "false")))
    array = pinned(options)
    every = _read(_reader(options, array))
    if not every.num_rows:
        return
    for _ in range(_PREDICATES):
        found = [_predicate(rng, every) for _ in range(rng.choice((0, 1, 2)))]
        given = [_where(rng, every) for _ in range(rng.choice((0, 1, 2)))]
        conditions = tuple(it for it in given if it is not None)
        reader = _reader(replace(options, where=conditions), array)
        reader.predicates = tuple(it for it in found if it is not None)
        kept = np.ones(every.num_rows, bool)
        for it in (*reader.predicates, *conditions):
            kept &= combined(
                it,
                lambda own: fulfilled(every.column(own.column).combine_chunks(), own, exact=False),
            )
        assert _rows(_read(reader)) == _rows(every.filter(pa.array(kept))), conditions


def test_moments_become_microseconds_the_earlier_one() -> None:
    """Also before 1970; what is no moment is null, and one that Spark cannot hold is an error."""

    def shown(numbers: list[int], kind: Any) -> list[int | None]:
        values = pa.array(numbers, pa.int64()).view(kind)
        found = to_column(values, column_type(kind), nan_as_null=True)
        assert found.type == column_type(kind)
        listed: list[int | None] = found.cast(pa.int64()).to_pylist()
        return listed

    never = -(2**63)
    assert shown([-1, 1, 1999, never], pa.timestamp("ns")) == [-1, 0, 1, None]
    assert shown([-1, 5, never], pa.timestamp("s")) == [-1_000_000, 5_000_000, None]
    assert shown([3, never], pa.duration("ms")) == [3000, None]
    with pytest.raises(InvalidInputError, match="292,000 years"):
        shown([2**62], pa.timestamp("ms"))
    lists = pa.array([[1500], [], None], pa.large_list(pa.timestamp("ns")))
    found = to_column(lists, column_type(lists.type), nan_as_null=True)
    assert found.cast(pa.list_(pa.int64())).to_pylist() == [[1], [], None]


def test_boxes_that_do_not_show_nan_are_not_used_where_it_would_match() -> None:
    """To Spark it is greater than all numbers, unless it is shown as null."""
    fields = pa.schema([("x", pa.float64())])
    above, below = Predicate("x", ">", (5.0,)), Predicate("x", "<", (5.0,))
    assert expression_of([above], fields, nan_as_null=False) is None
    assert expression_of([above], fields, nan_as_null=True) is not None
    assert expression_of([below], fields, nan_as_null=False) is not None
    other = Predicate("x", "!=", (5.0,))  # of which nothing is known
    either = joined([below, other], is_any=True)
    assert expression_of([either], fields, nan_as_null=True) is None
    assert (
        expression_of([joined([below, other], is_any=False)], fields, nan_as_null=True) is not None
    )
    assert (
        expression_of([joined([below, above], is_any=True)], fields, nan_as_null=True) is not None
    )


def _moved(place: Path, pattern: str, away: Path) -> list[tuple[Path, Path]]:
    away.mkdir(exist_ok=True)
    found = [(it, away / it.name) for it in sorted((place / "__commits").glob(pattern))]
    for source, target in found:
        source.rename(target)
    return found


def test_data_frame_keeps_to_the_state_that_it_found(tmp_path: Path) -> None:
    """Later writes are not seen; vacuumed fragments are an error, not fewer rows."""
    place = placed(NEWEST, "sparse-0", tmp_path)
    last = max((place / "__commits").glob("*.wrt")).name
    options = _options(place)
    (pair,) = _moved(place, last, tmp_path / "away")
    earlier = pinned(options)
    before = _rows(_read(_reader(options, earlier)))
    pair[1].rename(pair[0])
    assert _rows(_read(_reader(options, earlier))) == before
    assert _rows(_read(_reader(options))) != before
    shutil.rmtree(next((place / "__fragments").glob(f"{earlier.fragments[0].text}*")))
    with pytest.raises(FormatError, match="is gone"):
        _read(_reader(options, earlier))


def test_time_is_that_of_the_option(tmp_path: Path) -> None:
    """To the millisecond, and the end is seen."""
    place = placed(NEWEST, "sparse-0", tmp_path)
    with tiledb.open_array(place) as array:
        times = [it.name.end for it in array.native.fragments]
    assert len(set(times)) > 1
    for time in (times[0], times[0] - 1, times[-1]):
        found = pinned(_options(place, as_of_timestamp=str(time)))
        assert [it.end for it in found.fragments] == [it for it in times if it <= time]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"branch": "main"}, "'branch' is for repositories"),
        ({"decode": "false"}, "'decode' is for repositories"),
        ({"table": "refs"}, "'table' is for repositories"),
    ],
)
def test_option_of_a_repository_is_refused(
    given: Mapping[str, str], said: str, tmp_path: Path
) -> None:
    """Silently ignored it would mislead."""
    with pytest.raises(InvalidInputError, match=said):
        _options(tmp_path, **given)


def test_stream_is_refused(tmp_path: Path) -> None:
    """There are no commits to follow."""
    with pytest.raises(InvalidInputError, match="no commits"):
        StreamOptions.parse({"path": tmp_path.as_uri(), "layout": "tiledb"})


def test_unknown_attribute_or_condition_is_refused(tmp_path: Path) -> None:
    """With the names that there are."""
    place = placed(NEWEST, "features-2", tmp_path)
    options = _options(place, arrays="kinds")
    with pytest.raises(InvalidInputError, match=r"no dimension or attribute 'kinds'.*'kind'"):
        spark_schema(options, pinned(options))
    with pytest.raises(InvalidInputError, match="no dimension or attribute 'y'"):
        _reader(_options(place, where="y > 3")).partitions()
    with pytest.raises(InvalidInputError, match="compares 'size'"):
        _read(_reader(_options(place, where="size > 'b'")))


def test_spark_shows_types_conditions_and_times(spark: SparkSession, tmp_path: Path) -> None:
    """The whole way: columns in Spark's types, filters pushed down, and fewer tiles read."""
    place = placed(NEWEST, "features-2", tmp_path)
    planned = watch_reads(spark)

    def load(**options: str) -> DataFrame:
        named = {name.replace("_", "-"): value for name, value in options.items()}
        reader = spark.read.format("icechunk").option("layout", "tiledb").options(**named)
        return reader.load(place.as_uri())

    frame = load()
    assert dict(frame.dtypes) == {"x": "bigint", "kind": "string", "size": "bigint"}
    with tiledb.open_array(place) as array:
        every = array.scan().to_table().to_pylist()
    assert sorted(it.x for it in frame.collect()) == sorted(it["x"] for it in every)
    read = planned.value[-1]
    assert (read.chunks, read.rows) == (read.all_chunks, read.all_rows)
    assert read.snapshot_id is None
    assert str(read).startswith(f"TileDB array '{place.as_uri()}': {read.chunks} of ")
    limit = sorted(it["x"] for it in every)[2]
    few = load(where=f"x <= {limit}", arrays="kind")
    assert few.columns == ["x", "kind"]
    wanted = sorted((it["x"], it["kind"]) for it in every if it["x"] <= limit)
    assert sorted((it.x, it.kind) for it in few.collect()) == wanted
    assert 0 < planned.value[-1].chunks < read.chunks
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = load(push_filters="true")
        assert pushed.where(f"x <= {limit}").count() == len(wanted)
        assert planned.value[-1].chunks < read.chunks
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        register(spark)
    assert load(as_of_timestamp="1970-01-02").count() == 0

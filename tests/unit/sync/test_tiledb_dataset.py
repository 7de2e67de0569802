"""Sparse TileDB arrays as datasets of pyarrow: what DuckDB, Polars and pyarrow read of them."""

from __future__ import annotations

import asyncio
import pickle
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.errors import MissingDriverError
from icechunk_async.storage import open_storage
from icechunk_async.sync import tiledb
from icechunk_async.sync.errors import IcechunkError, InvalidInputError
from icechunk_async.testing.latency import LatencyStorage
from tests.unit.tiledb.archives import ARCHIVES, cases, files_below, filled, golden_jobs
from tests.unit.tiledb.virtual_arrays import placed

pa: Any = pytest.importorskip("pyarrow", reason="datasets are Arrow, which is not installed")
pc: Any = pytest.importorskip("pyarrow.compute")
ds: Any = pytest.importorskip("pyarrow.dataset")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


NEWEST = ARCHIVES[-1]
SPARSE = cases(lambda job: job["sparse"], quick=(ARCHIVES[0], "by-0.13.3", NEWEST))


def _rows(table: Any) -> list[str]:
    # Moments become numbers: not all of them are moments of Python.
    plain = [it.cast(pa.int64()) if pa.types.is_temporal(it.type) else it for it in table.columns]
    return sorted(map(repr, pa.Table.from_arrays(plain, names=table.column_names).to_pylist()))


def _points() -> dict[str, Any]:
    """Return the golden array with points in a plane, a number and words of an enumeration."""
    return next(it for it in golden_jobs(NEWEST) if it["sparse"] and "enumerations" in it)


@pytest.fixture
def array(tmp_path: Path) -> Iterator[tiledb.TileDBArray]:
    """Open that array."""
    job = _points()
    place = placed(NEWEST, job["number"], tmp_path)
    with tiledb.open_array(place, end=job["queries"][0]["end"]) as opened:
        yield opened


@pytest.mark.parametrize(("archive", "job"), SPARSE)
def test_dataset_has_the_rows_of_a_scan(archive: str, job: dict[str, Any], tmp_path: Path) -> None:
    """Whole, in parts, counted, in small batches; of every version of the format."""
    place = placed(archive, job["number"], tmp_path)
    with tiledb.open_array(place, end=job["queries"][0].get("end")) as array:
        expected: Any = array.scan().to_table()
        dataset: Any = array.dataset()
        assert isinstance(dataset, ds.Dataset)
        assert dataset.schema.equals(expected.schema)
        rows = _rows(expected)
        assert _rows(dataset.to_table()) == rows
        assert _rows(dataset.to_reader().read_all()) == rows
        assert _rows(dataset.scanner().to_table()) == rows
        batches = list(dataset.to_batches(batch_size=7))
        assert max((it.num_rows for it in batches), default=0) <= 7
        assert _rows(pa.Table.from_batches(batches, dataset.schema)) == rows
        parts = [it.to_table() for it in dataset.get_fragments()]
        assert _rows(pa.concat_tables([expected.slice(0, 0), *parts])) == rows
        assert dataset.count_rows() == expected.num_rows
        assert dataset.head(3).num_rows == min(3, expected.num_rows)
        assert dataset.head(0).num_rows == 0


def test_columns_and_filters_are_those_of_pyarrow(array: tiledb.TileDBArray) -> None:
    """As of a table with the same rows: names, computed columns, and filters upon filters."""
    dataset: Any = array.dataset()
    table = dataset.to_table()
    name = table.column_names[-1]
    near = pc.field("x") < 300
    for columns in (None, [name], ["x", name], {"half": pc.divide(pc.field("x"), 2)}, {}, []):
        for expression in (None, near, near & (pc.field("x") > 100), pc.field("x") < 0):
            found = dataset.to_table(columns=columns, filter=expression)
            wanted = ds.dataset(table).to_table(columns=columns, filter=expression)
            assert found.schema.names == wanted.schema.names
            assert found.num_rows == wanted.num_rows
            assert _rows(found) == _rows(wanted)
            scanned = dataset.scanner(columns, filter=expression, use_threads=False)
            assert _rows(scanned.to_table()) == _rows(wanted)
            assert dataset.count_rows(expression) == wanted.num_rows
    chosen = dataset.filter(near).filter(pc.field("x") > 100)
    wanted = table.filter(near & (pc.field("x") > 100))
    assert 0 < wanted.num_rows < table.num_rows
    assert _rows(chosen.to_table()) == _rows(wanted)
    assert chosen.count_rows() == wanted.num_rows
    fewer = wanted.filter(pc.field("x") > 200)
    assert fewer.num_rows < wanted.num_rows
    assert _rows(chosen.to_table(filter=pc.field("x") > 200)) == _rows(fewer)
    parts = [
        it.to_table(columns=["x"]) for it in dataset.get_fragments(near & (pc.field("x") > 100))
    ]
    assert _rows(pa.concat_tables(parts)) == _rows(wanted.select(["x"]))
    assert [it.count_rows(pc.field("x") < 0) for it in dataset.get_fragments()][:1] == [0]


def test_duckdb_reads_it(array: tiledb.TileDBArray) -> None:
    """By the name of a variable, and registered; with conditions, and for sums."""
    duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed")
    dataset: Any = array.dataset()
    table = dataset.to_table()
    near = table.filter((pc.field("x") >= 100) & (pc.field("x") < 300))
    query = "SELECT count(*), min(x), sum(x) FROM {} WHERE x >= 100 AND x < 300"
    x = near.column("x")
    expected = (near.num_rows, pc.min(x).as_py(), pc.sum(x).as_py())
    assert duckdb.sql(query.format("dataset")).fetchall() == [expected]
    connection = duckdb.connect()
    connection.register("points", dataset)
    assert connection.execute(query.format("points")).fetchall() == [expected]
    assert connection.execute("SELECT count(*) FROM points").fetchall() == [(table.num_rows,)]
    reader = dataset.to_reader(["x"], pc.field("x") < 300)
    found = connection.from_arrow(reader).aggregate("count(*)").fetchall()
    assert found == [(table.filter(pc.field("x") < 300).num_rows,)]


def test_polars_reads_it(array: tiledb.TileDBArray) -> None:
    """Lazily, with conditions; and readers."""
    pl: Any = pytest.importorskip("polars", reason="polars is not installed")
    dataset: Any = array.dataset()
    table = dataset.to_table()
    near = table.filter((pc.field("x") >= 100) & (pc.field("x") < 300))
    lazy = pl.scan_pyarrow_dataset(dataset)
    chosen = lazy.filter((pl.col("x") >= 100) & (pl.col("x") < 300)).select("x").collect()
    assert sorted(chosen["x"].to_list()) == sorted(near.column("x").to_pylist())
    assert lazy.collect().height == table.num_rows
    frame = pl.from_arrow(dataset.to_reader(["x"]))
    assert sorted(frame["x"].to_list()) == sorted(table.column("x").to_pylist())


@contextmanager
def _counted() -> Iterator[tuple[Any, LatencyStorage]]:
    """Open the dataset on a storage that counts requests."""
    job = _points()
    url = asyncio.run(filled(files_below(NEWEST, job["number"])))

    async def opened() -> Any:
        context = open_storage(url)
        return context, await context.__aenter__()

    context, storage = run(opened())
    counted = LatencyStorage(storage, seconds=0)
    try:
        with tiledb.open_array(counted, end=job["queries"][0]["end"]) as array:  # type: ignore[arg-type]
            yield array.dataset(), counted
    finally:
        run(context.__aexit__(None, None, None))


def _tiles_read(counted: LatencyStorage) -> int:
    """Return the number of requests for tiles since the last call."""
    found = sum(
        op == "get" and "/__fragments/" in f"/{key}" and not key.endswith("metadata.tdb")
        for op, key in counted.log
    )
    counted.log.clear()
    return found


def test_filters_of_programs_leave_tiles_unread() -> None:
    """Of coordinates, by DuckDB, Polars and pyarrow; a count reads none, and a head only some."""
    duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed")
    pl: Any = pytest.importorskip("polars", reason="polars is not installed")
    with _counted() as (dataset, counted):
        _tiles_read(counted)
        dataset.to_table()
        every = _tiles_read(counted)
        asked = duckdb.connect()
        asked.register("points", dataset)
        for most, work in (
            (every - 1, lambda: dataset.to_table(filter=pc.field("x") < 300)),
            (every - 1, lambda: asked.execute("SELECT * FROM points WHERE x < 300").fetchall()),
            (
                every - 1,
                lambda: pl.scan_pyarrow_dataset(dataset).filter(pl.col("x") < 300).collect(),
            ),
            (every - 1, lambda: dataset.to_table(["x"])),
            (0, lambda: dataset.to_table(filter=pc.field("x") > 5000)),
            (0, lambda: asked.execute("SELECT * FROM points WHERE x > 5000").fetchall()),
            (0, lambda: list(dataset.get_fragments())),
            (0, lambda: dataset.head(0)),
        ):
            work()
            assert _tiles_read(counted) <= most
        assert every > 1


def test_what_goes_around_its_methods_is_an_error(
    array: tiledb.TileDBArray, tmp_path: Path
) -> None:
    """Never other rows, nor a crash; what pyarrow does by the methods works."""
    dataset: Any = array.dataset()
    refused: list[Callable[[], Any]] = [
        lambda: ds.Scanner.from_dataset(dataset).to_table(),
        lambda: ds.dataset([dataset, dataset]).to_table(),
        lambda: dataset.join(dataset, "x").to_table(),
        lambda: dataset.sort_by("x").to_table(),
        lambda: dataset.take([0]),
        lambda: dataset.replace_schema(dataset.schema),
    ]
    for work in refused:
        with pytest.raises(NotImplementedError, match=r"to_reader\(\)|that cast|particular order"):
            work()
    with pytest.raises(TypeError, match="Pickle the URL"):
        pickle.dumps(dataset)
    ds.write_dataset(dataset, tmp_path / "written", format="parquet")
    written = ds.dataset(tmp_path / "written")
    assert _rows(written.to_table()) == _rows(dataset.to_table())


def test_every_public_method_of_pyarrow_is_accounted_for() -> None:
    """Those that read are replaced; a new one of pyarrow's fails here until it is looked at."""
    from icechunk_async.tiledb.dataset import TileDBDataset

    replaced = {
        "count_rows", "filter", "get_fragments", "head", "replace_schema", "scanner", "take",
        "to_batches", "to_table",
    }  # fmt: skip
    # By the replaced ones, or by files, and there is no file.
    safe = {"join", "join_asof", "partition_expression", "schema", "sort_by"}
    public = {it for it in dir(ds.Dataset) if not it.startswith("_")}
    assert public == replaced | safe
    for name in replaced:
        assert getattr(TileDBDataset, name) is not getattr(ds.FileSystemDataset, name)


def test_wrong_questions_are_refused(array: tiledb.TileDBArray, tmp_path: Path) -> None:
    """Before anything is read: columns, filters, arguments, and dense arrays."""
    dataset: Any = array.dataset()
    for name in ("to_table", "to_batches", "to_reader", "scanner"):
        ask = getattr(dataset, name)
        with pytest.raises(InvalidInputError, match="no column 'none'"):
            ask(["none"])
        with pytest.raises(InvalidInputError, match="cannot be applied"):
            ask(filter=pc.field("none") > 1)
        with pytest.raises(InvalidInputError, match=r"cannot be applied.*bool"):
            ask(filter=pc.field("x"))
        with pytest.raises(InvalidInputError, match="cannot be applied"):
            ask({"sum": pc.field("none")})
        with pytest.raises(InvalidInputError, match="is the text 'x'"):
            ask("x")
        with pytest.raises(TypeError, match="no argument 'column'"):
            ask(column=["x"])
    dense = placed(NEWEST, "features-0", tmp_path / "dense")
    with tiledb.open_array(dense) as opened, pytest.raises(InvalidInputError, match="is dense"):
        opened.dataset()


def test_damage_is_an_error_of_this_library(tmp_path: Path) -> None:
    """Also through readers of pyarrow, which pass it on."""
    job = _points()
    place = placed(NEWEST, job["number"], tmp_path)
    with tiledb.open_array(place, end=job["queries"][0]["end"]) as array:
        dataset: Any = array.dataset()
        for file in place.rglob("*.tdb"):
            if "__fragments" in str(file) and file.name != "__fragment_metadata.tdb":
                file.write_bytes(b"\xff" * file.stat().st_size)
        for work in (dataset.to_table, lambda: dataset.to_reader().read_all()):
            with pytest.raises(IcechunkError):
                work()


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Arrow, arrays open, and only what needs it is refused."""
    place = placed(NEWEST, _points()["number"], tmp_path)
    for name in [it for it in sys.modules if it.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("arrow", "pruning", "sparse"):
        monkeypatch.delitem(sys.modules, f"icechunk_async.tiledb.arrays.{name}", raising=False)
    with tiledb.open_array(place) as array:
        for work in (array.dataset, array.scan):
            with pytest.raises(MissingDriverError, match=r"icechunk-async\[parquet\]"):
                work()

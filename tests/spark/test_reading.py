"""Arrays as rows: what Spark gets, and what it costs."""

from __future__ import annotations

import pickle
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio.to_thread
import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
import zarr.api.asynchronous
from pyspark.sql import functions as f
from pyspark.sql.datasource import EqualTo, GreaterThan, In, LessThanOrEqual, Not

from icechunk_async import Repository as AsyncRepository
from icechunk_async.engine.files.chunks import ChunkFiles
from icechunk_async.errors import IcechunkError, InvalidInputError, NodeNotFoundError
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.spark.options import ReadOptions, WriteOptions
from icechunk_async.spark.write.plan import WritePlan
from icechunk_async.sync.xarray import to_icechunk
from tests.spark.tables import make_reader, plan, read

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async.format.ids import ChunkId
    from icechunk_async.sync import Repository

DAYS = np.datetime64("2020-01-01", "ns") + np.arange(10) * np.timedelta64(1, "D")


def climate() -> xr.Dataset:
    """Return ten days at four latitudes, with a gap."""
    values = np.arange(40, dtype="f4").reshape(10, 4)
    values[9, 3] = np.nan
    return xr.Dataset(
        {"t": (("time", "lat"), values), "height": (("lat",), np.arange(4))},
        coords={"time": DAYS, "lat": [3.0, 2, 1, 0], "name": ("lat", ["a", "b", "c", "d"])},
    )


def write(repository: Repository, dataset: xr.Dataset, **encoding: Any) -> str:
    """Commit a dataset at the root; answer the snapshot."""
    session = repository.writable_session("main")
    to_icechunk(dataset, session, mode="w", encoding=encoding)
    return str(session.commit("data"))


def commit(repository: Repository, **arrays: Any) -> str:
    """Commit plain arrays without names of dimensions, each in chunks of two."""
    session = repository.writable_session("main")
    group = zarr.open_group(session.store, mode="a")
    for name, values in arrays.items():
        chunks = (2,) * values.ndim
        group.create_array(name, data=values, chunks=chunks if values.size else "auto")
    return str(session.commit("arrays"))


def test_spark_reads_a_dataset_by_its_name(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """Columns, times in any zone of the session, gaps as null, and older states."""
    old = write(repository, climate(), t={"chunks": (2, 2)})
    repository.create_tag("v1", snapshot_id=old)
    write(repository, climate() + xr.Dataset({"t": 100.0}))
    frame = spark.read.format("icechunk").option("tag", "v1").load(url)
    assert frame.dtypes == [
        ("time", "timestamp_ntz"),
        ("lat", "double"),
        ("name", "string"),
        ("t", "float"),
    ]
    picked = frame.where("time >= timestamp_ntz'2020-01-10' and lat <= 1")
    rows = [tuple(row) for row in picked.orderBy("lat").collect()]
    day = DAYS[9].astype("M8[us]").item()
    assert rows == [(day, 0.0, "d", None), (day, 1.0, "c", 38.0)]
    now = spark.read.format("icechunk").load(url)
    chosen = now.agg(f.sum("t"), f.count("t"), f.count("*")).collect()[0]
    assert tuple(chosen) == (sum(range(39)) + 3900, 39, 40)
    # Spark keeps what the first query of a frame had planned: no later one may miss rows.
    assert frame.count() == 40


def test_spark_reads_what_one_url_names(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """A tag or a branch and a group, in `load` and in SQL; `group` begins at that of the URL."""
    old = commit(repository, **{"surface/rain": np.array([1, 2, 3])})
    repository.create_tag("v1", snapshot_id=old)
    commit(repository, **{"surface/snow": np.array([4, 5, 6])})
    repository.create_branch("fix/rain", snapshot_id=old)

    def found(place: str, **options: str) -> list[dict[str, int]]:
        rows = spark.read.format("icechunk").options(**options).load(f"{url}{place}").collect()
        return sorted((it.asDict() for it in rows), key=lambda it: it["dim_0"])

    old_rows = [{"dim_0": at, "rain": at + 1} for at in range(3)]
    new_rows = [{**it, "snow": it["rain"] + 3} for it in old_rows]
    assert found("|icechunk:@branch.main/surface") == new_rows
    assert found("/|icechunk:surface") == new_rows
    assert found("/|icechunk:@tag.v1/surface") == old_rows
    assert found("/|icechunk:@tag.v1", group="surface") == old_rows
    assert found("/|icechunk:@branch.fix%2Frain/surface") == old_rows
    assert found(f"/|icechunk:@{old}/surface") == old_rows
    place = f"{url}/|icechunk:@tag.v1/surface"
    spark.sql(f"CREATE TEMPORARY VIEW held USING icechunk OPTIONS (path '{place}')")
    assert spark.sql("SELECT sum(rain) FROM held").collect()[0][0] == 6
    with pytest.raises(Exception, match=r"no tag 'v2'\. The repository has: v1"):
        found("/|icechunk:@tag.v2/surface")


def test_spark_selects_columns_by_a_schema(
    spark: SparkSession, repository: Repository, url: str
) -> None:
    """Wider types and instants included."""
    write(repository, climate())
    reader = spark.read.format("icechunk").schema("t double, time timestamp")
    frame = reader.option("where", "time = '2020-01-02 00:00:00Z' and lat in (3, 1)").load(url)
    found = frame.select("t", f.unix_seconds("time")).orderBy("t").collect()
    assert [tuple(row) for row in found] == [(4.0, 1577923200), (6.0, 1577923200)]


@pytest.mark.only_spark
def test_secrets_are_in_no_plan(
    spark: SparkSession, repository: Repository, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor in what the reader shows of itself."""
    write(repository, climate())
    options = {"storage.durability": "none", "storage.secret_key": "hunter2"}
    assert "hunter2" not in repr(ReadOptions.parse({"path": url, **options}))
    with pytest.raises(Exception, match="secret_key") as caught:
        spark.read.format("icechunk").options(**options).load(url)
    assert "hunter2" not in str(caught.value)
    frame = spark.read.format("icechunk").option("storage.durability", "none").load(url)
    frame.explain(extended=True)
    shown = capfd.readouterr().out
    assert "BatchScan icechunk" in shown
    assert "durability" not in shown


def test_the_format_is_found_without_being_registered() -> None:
    """PySpark looks for packages of this name."""
    from pyspark_icechunk import DefaultSource

    assert DefaultSource.name() == "icechunk"


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("bool", pa.bool_()),
        ("int8", pa.int8()),
        ("uint8", pa.int16()),
        ("uint16", pa.int32()),
        ("uint32", pa.int64()),
        ("uint64", pa.decimal128(20, 0)),
        (">i4", pa.int32()),
        ("float16", pa.float32()),
        ("float64", pa.float64()),
        ("<U3", pa.string()),
    ],
)
def test_array_types_map_to_column_types(
    repository: Repository, url: str, dtype: str, wanted: pa.DataType
) -> None:
    """Each value survives, the largest included."""
    values = np.array([0, 1, 1], dtype)
    if values.dtype.kind in "ui":
        values[0] = np.iinfo(dtype).max
    write(repository, xr.Dataset({"v": ("x", values)}))
    found = read(url)
    assert found.schema.field("v").type == wanted
    assert found["v"].to_pylist() == values.tolist()
    assert found["x"].to_pylist() == [0, 1, 2]


def test_complex_numbers_are_refused(repository: Repository, url: str) -> None:
    """With a reason, and only where they are asked for."""
    commit(repository, z=np.ones(4, complex), v=np.arange(4))
    with pytest.raises(InvalidInputError, match=r"complex128.*real and imaginary"):
        read(url)
    assert read(url, arrays="v")["v"].to_pylist() == [0, 1, 2, 3]


def test_scales_and_fill_values_are_decoded_as_xarray_does(
    repository: Repository, url: str
) -> None:
    """Unless the caller opts out, of that or of null for NaN."""
    packed = xr.Dataset({"v": ("x", [1.5, np.nan, 2.5])})
    encoding = {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -9}
    write(repository, packed, v=encoding)
    assert read(url)["v"].to_pylist() == [1.5, None, 2.5]
    assert read(url, decode="false")["v"].to_pylist() == [1, -9, 3]
    kept = read(url, nan_as_null="false")["v"]
    assert kept.null_count == 0
    assert np.isnan(kept.to_pylist()[1])


def test_dates_of_other_calendars_are_text(repository: Repository, url: str) -> None:
    """Which sorts as the dates do."""
    times = xr.date_range("1850-02-29", periods=3, calendar="360_day", use_cftime=True)
    write(repository, xr.Dataset({"v": ("time", [1, 2, 3])}, coords={"time": times}))
    found = read(url)["time"].to_pylist()
    assert found == ["1850-02-29T00:00:00", "1850-02-30T00:00:00", "1850-03-01T00:00:00"]


def test_arrays_with_different_dimensions_are_refused(repository: Repository, url: str) -> None:
    """Those with the most make the table; between two of a kind the caller decides."""
    commit(repository, a=np.zeros((4, 2)), b=np.arange(4))
    assert read(url).column_names == ["dim_0", "dim_1", "a"]
    assert read(url, arrays="b").column_names == ["dim_0", "b"]
    with pytest.raises(InvalidInputError, match=r"a along \(dim_0, dim_1\); b along"):
        read(url, arrays="a,b")
    with pytest.raises(InvalidInputError, match="'c', but the group has"):
        read(url, arrays="c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"brnch": "main"}, "Unknown option 'brnch'"),
        ({"branch": "a", "tag": "b"}, "name one state each"),
        ({"tag": "b", "as_of_timestamp": "2020-01-01"}, "goes with a branch"),
        ({"as_of_timestamp": "noon"}, "ISO 8601"),
        ({"layout": "cubes"}, "one of rows, chunks"),
        ({"where": "lat > 1 or"}, "not understood at character 11"),
        ({"where": "humidity > 1"}, "a condition on 'humidity', which is no column"),
        ({"where": "t > 'warm'"}, "compares 't', which is of the type"),
        ({"where": "lat > 'north'"}, "of the type double"),
        ({"partition_bytes": "0"}, "positive number"),
        ({"from_snapshot_id": "X"}, "table 'changes'"),
    ],
)
def test_invalid_options_are_refused(
    repository: Repository, url: str, options: dict[str, str], message: str
) -> None:
    """Each is named, with what would be right."""
    write(repository, climate())
    with pytest.raises(InvalidInputError, match=message):
        read(url, **options)


def test_missing_branch_group_or_column_is_named(repository: Repository, url: str) -> None:
    """A branch, a group, a column."""
    write(repository, climate())
    with pytest.raises(IcechunkError, match="nowhere"):
        read(url, branch="nowhere")
    with pytest.raises(NodeNotFoundError, match="'group'"):
        read(url, group="deep")
    with pytest.raises(InvalidInputError, match="no column 'u'"):
        read(url, schema=pa.schema([("u", pa.float32())]))
    with pytest.raises(InvalidInputError, match="'t' as int32, but it is float"):
        read(url, schema=pa.schema([("t", pa.int32())]))


def test_as_of_timestamp_reads_the_tip_at_that_time(repository: Repository, url: str) -> None:
    """The tip at that time, given in ISO 8601 or milliseconds."""
    commit(repository, a=np.arange(2))
    moment = next(iter(repository.ancestry(branch="main"))).written_at
    commit(repository, b=np.arange(2))
    assert read(url, as_of_timestamp=moment.isoformat()).column_names == ["dim_0", "a"]
    later = str(int(moment.timestamp() * 1000) + 1)
    assert "a" in read(url, as_of_timestamp=later).column_names


def test_scalar_is_one_row_and_empty_group_an_error(repository: Repository, url: str) -> None:
    """One row, and an error that says so."""
    with pytest.raises(InvalidInputError, match="no arrays"):
        read(commit_group(repository, url))
    write(repository, xr.Dataset({"v": ((), 5)}))
    assert read(url).to_pylist() == [{"v": 5}]


def commit_group(repository: Repository, url: str) -> str:
    """Commit a root group without arrays."""
    session = repository.writable_session("main")
    zarr.open_group(session.store, mode="a")
    session.commit("group")
    return url


NAMED: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, list[Any]]]] = {
    "a dimension twice": (
        {"x": ("x",), "cov": ("x", "x")},
        {"x": [10, 10, 20, 20], "x_2": [10, 20, 10, 20], "cov": [0, 1, 2, 3]},
    ),
    "three times, and no coordinates": (
        {"u": ("x", "x", "x")},
        {"x": [0] * 4 + [1] * 4, "x_2": [0, 0, 1, 1] * 2, "x_3": [0, 1] * 4, "u": [*range(8)]},
    ),
    "an array named like its dimension": (
        {"lat": ("lat", "lon"), "lon": ("lon",), "t": ("lat", "lon")},
        {"lat_index": [0, 0, 1, 1], "lon": [10, 20] * 2, "lat": [*range(4)], "t": [*range(4)]},
    ),
    "a name that is taken": (
        {"x_2": ("x_2",), "cov": ("x", "x")},
        {"x": [0, 0, 1, 1], "x_2_": [0, 1] * 2, "cov": [*range(4)]},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_every_dimension_is_a_column_that_hides_no_array(
    repository: Repository, url: str, case: str
) -> None:
    """Names are made unique; of a dimension that is there twice each has the coordinates."""
    arrays, expected = NAMED[case]
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name, dims in arrays.items():
        data = np.arange(2 ** len(dims)).reshape((2,) * len(dims))
        data = (data + 1) * 10 if dims == (name,) else data
        made = group.create_array(
            name, shape=data.shape, chunks=data.shape, dtype="i8", dimension_names=dims
        )
        made[...] = data
    session.commit("made")
    assert read(url).to_pydict() == expected
    last = expected.copy().popitem()[0]
    few = read(url, where=f"{next(iter(expected))} > 0" if "twice" not in case else "x_2 = 20")
    assert set(few.to_pydict()[last]) < set(expected[last])


def test_arrays_without_names_are_decoded_as_others_are(repository: Repository, url: str) -> None:
    """Also where xarray wrote the fill value of floats in its own way."""
    session = repository.writable_session("main")
    xr.Dataset({"v": ("a", [1.0, np.nan, -1.0])}).to_zarr(
        session.store, zarr_format=3, consolidated=False, encoding={"v": {"_FillValue": -9.0}}
    )
    zarr.open_group(session.store, mode="a").create_array("u", shape=(3,), dtype="i4")
    session.commit("made")
    assert read(url, arrays="v")["v"].to_pylist() == [1.0, None, -1.0]


@pytest.mark.parametrize("calendar", ["proleptic_gregorian", "standard"])
def test_years_that_nanoseconds_cannot_hold_are_timestamps(
    repository: Repository, url: str, calendar: str
) -> None:
    """Also if only the ones in the middle are so far away."""
    days = [0, 1, 500_000, 2]
    attributes = {"units": "days since 1600-03-01", "calendar": calendar}
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    for name in ("time", "v"):
        array = group.create_array(
            name, shape=(4,), chunks=(1,), dtype="i8", dimension_names=["time"]
        )
        array[:] = days
    group["time"].attrs.update(attributes)
    session.commit("centuries")
    found = read(url, batch_rows="1")
    assert found.schema.field("time").type == pa.timestamp("us")
    wanted = np.datetime64("1600-03-01", "us") + np.array(days, "m8[D]")
    assert found["time"].to_pylist() == wanted.tolist()
    late = read(url, where="time > '1677-01-01'")
    assert late["v"].to_pylist() == [500_000]


@pytest.mark.parametrize(
    "attributes",
    [
        {"_FillValue": 1.5},  # xarray expects base64 of floats
        {"_FillValue": "AADAfw=="},
        {"_FillValue": "zz"},
        {"missing_value": {}},
        {"missing_value": "x"},
        {"missing_value": 10**40},
        {"scale_factor": "a"},
        {"scale_factor": [1, 2]},
        {"add_offset": {}},
    ],
)
def test_attributes_that_are_not_of_cf_are_named(
    repository: Repository, url: str, attributes: dict[str, Any]
) -> None:
    """Readers and writers say which they may be; some mean nothing to readers."""
    session = repository.writable_session("main")
    zarr.create_group(session.store).create_array(
        "v", shape=(2,), dtype="f8", dimension_names=["x"], attributes=attributes
    )
    session.commit("strange")
    options = WriteOptions(repository.storage, cores=1)
    with pytest.raises(InvalidInputError, match=r"what CF says|Correct the attribute"):
        WritePlan.begin(options, ["x", "v"], overwrite=True, repository=repository)
    if attributes not in ({"missing_value": "x"}, {"missing_value": 10**40}):
        with pytest.raises(InvalidInputError, match="Correct the attribute '_FillValue'"):
            read(url)


def test_times_in_nanoseconds_are_read(repository: Repository, url: str) -> None:
    """Those of xarray where times have them; they cannot be compared with the year 1582."""
    session = repository.writable_session("main")
    array = zarr.create_group(session.store).create_array(
        "time", shape=(2,), dtype="i8", dimension_names=["time"]
    )
    array[:] = [-1000, 2**62]
    array.attrs["units"] = "nanoseconds since 1970-01-01"
    session.commit("nanoseconds")
    given = np.array([-1000, 2**62], "M8[ns]").astype("M8[us]")
    assert read(url)["time"].to_pylist() == given.tolist()


@pytest.mark.parametrize(
    ("values", "units", "message"),
    [
        (np.array(["2000-01-01", "400000-01-01"], "M8[s]"), "", "292,000 years"),
        (np.array([0, 2**62]), "seconds since 1970-01-01", "'decode' to false"),
        (np.array([0, -200_000, 1]), "days since 2000-01-01", "1452.* of another calendar"),
    ],
)
def test_times_that_spark_has_no_type_for_are_refused(
    repository: Repository, url: str, values: npt.NDArray[Any], units: str, message: str
) -> None:
    """With what to do about them."""
    session = repository.writable_session("main")
    array = zarr.create_group(session.store).create_array(
        "t", shape=values.shape, dtype=values.dtype, dimension_names=["x"]
    )
    array[:] = values
    if units:
        array.attrs["units"] = units
    session.commit("far")
    with pytest.raises(InvalidInputError, match=message):
        read(url)


def test_a_reader_stays_with_its_snapshot(repository: Repository, url: str) -> None:
    """Commits between planning and reading do not matter."""
    commit(repository, a=np.arange(4))
    reader = make_reader(url)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a", mode="r+")[:] = -1
    session.commit("changed")
    found = [it for part in plan(reader) for it in reader.read(part)]
    assert pa.Table.from_batches(found)["a"].to_pylist() == [0, 1, 2, 3]


def chunk_files(url: str) -> dict[str, int]:
    """Return the chunk objects of a repository and their sizes."""
    directory = Path(url.removeprefix("file://")) / "chunks"
    return {path.name: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def test_filters_prune_chunks_before_a_byte_is_read(
    repository: Repository, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A selective query needs at least ten times fewer chunks; without the others it succeeds."""
    days = np.datetime64("2000-01-01", "ns") + np.arange(400) * np.timedelta64(1, "D")
    values = np.random.default_rng(1).random((400, 64))
    dataset = xr.Dataset(
        {"t": (("time", "x"), values), "u": (("time", "x"), values)}, coords={"time": days}
    )
    write(repository, dataset, t={"chunks": (10, 64)}, u={"chunks": (10, 64)})
    moment = days[200].astype("M8[us]").item()
    filters = [
        GreaterThan(("time",), moment),
        LessThanOrEqual(("time",), days[205].astype("M8[us]").item()),
    ]
    wanted = pa.schema([("t", pa.float64())])
    by_filter = make_reader(url, schema=wanted, filters=filters)
    by_option = make_reader(
        url, schema=wanted, where="time > '2000-07-19' and time <= '2000-07-24'"
    )
    whole = make_reader(url)
    caplog.set_level("INFO", "icechunk_async.spark.read.reader")
    assert [part.boxes for part in plan(by_filter)] == [(((201, 206), (0, 64)),)]
    assert "1 of 40 chunks of the grid are read, 320 of 25600 rows" in caplog.text
    needed = kept_bytes(url, by_filter)
    assert kept_bytes(url, by_option) == needed
    assert needed * 10 <= kept_bytes(url, whole)


def kept_bytes(url: str, reader: Any) -> int:
    """Return the bytes of chunks that a reader reads: those whose storage is asked for them."""
    total = 0
    real = ChunkFiles.read

    async def counted(self: ChunkFiles, chunk_id: ChunkId, start: int, stop: int) -> Any:
        nonlocal total
        total += stop - start
        return await real(self, chunk_id, start, stop)

    parts = plan(reader)
    with patch.object(ChunkFiles, "read", counted):
        for part in parts:
            assert sum(batch.num_rows for batch in reader.read(part))
    assert total
    return total


def test_filters_that_are_not_understood_lose_no_rows(repository: Repository, url: str) -> None:
    """Those on other columns, of other types, and on NaN."""
    write(repository, climate())
    for odd in (
        EqualTo(("t",), 3.0),
        EqualTo(("lat",), "text"),
        Not(GreaterThan(("lat",), 1.0)),
        EqualTo(("lat", "deep"), 1.0),
    ):
        assert read(url, filters=[odd]).num_rows == 40
    assert read(url, filters=[In(("lat",), (3.0, 0.0))]).num_rows == 20


async def test_a_large_array_is_planned_quickly_and_the_plan_is_small(url: str) -> None:
    """One hundred thousand chunks, or a thousand: plans of the same size."""
    async with AsyncRepository.create(url) as repository:
        session = await repository.writable_session("main")
        group = await zarr.api.asynchronous.open_group(session.store, mode="a")
        for name, count in (("fine", 100_000), ("coarse", 1_000)):
            chunk = 10**8 // count
            await group.create_array(name, shape=(10**8,), chunks=(chunk,), dtype="f4")
            refs = ChunkRefs.build(
                np.arange(count, dtype=np.uint32)[:, None],
                np.full(count, Kind.NATIVE, np.uint8),
                objects=np.arange(count, dtype=np.uint32),
                offsets=np.zeros(count, np.uint64),
                lengths=np.full(count, 4 * chunk, np.uint64),
                chunk_ids=np.random.default_rng(0).integers(0, 256, (count, 12), np.uint8),
            )
            session.workspace.set_refs(f"/{name}", refs)
        await session.commit("two arrays")
    sizes = await anyio.to_thread.run_sync(
        lambda: [_plan_size(url, it) for it in ("fine", "coarse")]
    )
    assert abs(sizes[0] - sizes[1]) < 100


def _plan_size(url: str, name: str) -> int:
    """Return the bytes of everything that travels to the tasks."""
    start = process_time()
    reader = make_reader(url, arrays=name)
    parts = plan(reader)
    assert process_time() - start < 20  # one by one, 100 million chunks take minutes
    assert sum(stop - begin for part in parts for ((begin, stop),) in part.boxes) == 10**8
    return len(pickle.dumps((reader, parts)))

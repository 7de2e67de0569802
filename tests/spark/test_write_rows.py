"""Rows in any order and partitions are arranged by chunk, and written."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from icechunk_async.errors import AlreadyExistsError, InvalidInputError, UnsortedCoordinatesError
from icechunk_async.spark import Transaction, repartition_by_chunk, write_rows
from icechunk_async.sync import Repository
from tests.spark.weather import commits, dataset, load, make, table

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from pyspark.sql import DataFrame, SparkSession

MONTHS = np.array(["2020-01-01", "2020-02-01", "2020-03-01"], "M8[ns]")
APRIL = np.array(["2020-04-01", "2020-05-01"], "M8[ns]")


@pytest.fixture
def place(repository: Repository, url: str) -> str:
    """Return the URL of a repository with the dataset, chunks of two by two."""
    make(repository)
    return url


@pytest.fixture
def monthly(repository: Repository, url: str) -> str:
    """Return the URL of one whose times do not follow each other in equal steps."""
    make(repository, MONTHS)
    return url


def plan_of(frame: DataFrame) -> str:
    """Return how Spark runs a query."""
    return str(frame._jdf.queryExecution().executedPlan().toString())


HOURS = np.arange("2020-03-08T00:00", "2020-03-08T08:00", dtype="M8[h]").astype("M8[us]")
AXES = {
    "f": np.linspace(0, 1, 7).astype("f4")[::-1],
    "d": np.array([0.1, 5.0, 0.3]),
    "i": np.array([30, 10, 20], "i2"),
    "s": np.array(["north", "south", "east"]),
    "t": HOURS,
    "n": HOURS,
    "none": np.arange(4),
}


@pytest.mark.only_spark
@pytest.mark.parametrize("names", [("f", "i"), ("s", "t"), ("n", "none"), ("d",)])
def test_rows_of_a_chunk_are_in_one_partition(
    spark: SparkSession, repository: Repository, names: tuple[str, ...]
) -> None:
    """For coordinates of all kinds, and across a gap of the session's time zone; one by one."""
    session = repository.writable_session("main")
    shape = tuple(len(AXES[it]) for it in names)
    coords = {it: AXES[it] for it in names if it != "none"}
    ds = xr.Dataset({"v": (names, np.arange(np.prod(shape)).reshape(shape))}, coords)
    ds.to_zarr(
        session.store,
        zarr_format=3,
        consolidated=False,
        encoding={"v": {"chunks": (2,) * len(shape)}},
    )
    session.commit("made")
    frame = ds.v.to_dataframe().reset_index().sample(frac=1, random_state=1)
    if "t" in names:  # instants
        frame["t"] = frame["t"].dt.tz_localize("UTC")
    if "n" in names:  # times without a zone, of which the session's lacks an hour
        frame["n"] = frame["n"].astype(str)
    rows = spark.createDataFrame(frame).repartition(3)
    if "n" in names:
        rows = rows.withColumn("n", rows["n"].cast("timestamp_ntz"))
    arranged = repartition_by_chunk(rows, repository, tasks=3)
    assert arranged.columns == rows.columns
    assert "Python" not in plan_of(arranged)
    found = arranged.rdd.mapPartitionsWithIndex(
        lambda at, part: [(at, int(row["v"])) for row in part]
    ).collect()
    assert sorted(value for _, value in found) == list(range(int(np.prod(shape))))
    chunks = [
        (at, tuple(int(it) // 2 for it in np.unravel_index(value, shape))) for at, value in found
    ]
    together = [chunk for k, chunk in enumerate(chunks) if k == 0 or chunks[k - 1] != chunk]
    assert len(together) == len(set(together)) == len({chunk for _, chunk in chunks})
    assert len({at for at, _ in chunks}) == min(3, len(together))


@pytest.mark.only_spark
def test_rows_to_append_are_arranged_by_chunk(spark: SparkSession, place: str) -> None:
    """In chunks of two days; a row without a place does no harm yet."""
    days = np.arange("2020-01-06", "2020-01-16", dtype="M8[D]").astype("M8[ns]")
    rows = table(spark, dataset(days)).repartition(5)
    odd = rows.limit(1).selectExpr("timestamp'2019-12-31 17:00:00' as time", "lat", "lon", "t", "p")
    arranged = repartition_by_chunk(rows.unionAll(odd), place, append_dim="time", tasks=4)
    found = arranged.rdd.mapPartitionsWithIndex(
        lambda at, part: [(at, row["time"], round(row["lat"])) for row in part]
    ).collect()
    homes: dict[tuple[int, int], set[int]] = {}
    for at, time, lat in found:
        day = (time - datetime(2019, 12, 31, 12)).days  # noon: any time zone gives this day
        homes.setdefault((day // 2, (40 - lat) // 10 // 2), set()).add(at)
    assert all(len(it) == 1 for it in homes.values())
    assert len(found) == 10 * 12 + 1


def test_rows_in_any_order_are_written_by_many_tasks(spark: SparkSession, place: str) -> None:
    """Parts of chunks too; the answer says what was committed."""
    new = dataset(seed=1)
    rows = table(spark, new.isel(time=slice(0, 3))).repartition(5)
    published = write_rows(rows, place, mode="overwrite", message="three days", metadata={"by": 1})
    expected = xr.concat([new.isel(time=slice(0, 3)), dataset().isel(time=slice(3, None))], "time")
    xr.testing.assert_equal(load(place), expected)
    tip = next(iter(Repository.open(place).ancestry(branch="main")))
    assert (tip.id, tip.message, tip.metadata["by"]) == (published.snapshot_id, "three days", 1)
    assert published.committed
    assert commits(place) == 3


def test_the_tasks_of_a_write_leave_no_snapshot_behind(
    spark: SparkSession, place: str, tmp_path: Path
) -> None:
    """However many they are: one is added, with a manifest for each array and a log."""

    def count(folder: str) -> int:
        return len(list(tmp_path.rglob(f"{folder}/*")))

    folders = ("snapshots", "manifests", "transactions")
    before = [count(it) for it in folders]
    write_rows(table(spark, dataset(seed=1)).repartition(5), place, mode="overwrite")
    added = [count(it) - old for it, old in zip(folders, before, strict=True)]
    assert added == [1, 2, 1]


def test_coordinates_to_append_are_found_among_the_rows(spark: SparkSession, monthly: str) -> None:
    """Existing ones have no equal steps; written once for a transaction."""
    new = dataset(APRIL, seed=2)
    once = Transaction("months", 1)
    for committed in (True, False):
        published = write_rows(
            table(spark, new), monthly, append_dim="time", transaction=once, tasks=2
        )
        assert published.committed == committed
    xr.testing.assert_equal(load(monthly), xr.concat([dataset(MONTHS), new], "time"))
    assert commits(monthly) == 3
    between = dataset(np.array(["2020-04-15"], "M8[ns]"))
    with pytest.raises(UnsortedCoordinatesError, match="time"):
        write_rows(table(spark, between), monthly, append_dim="time")
    with pytest.raises(Exception, match="have already"):
        write_rows(table(spark, new), monthly, append_dim="time")
    assert commits(monthly) == 3


def test_descending_coordinates_continue_downwards(spark: SparkSession, monthly: str) -> None:
    """As latitudes do."""
    session = Repository.open(monthly).writable_session("main")
    store: Any = session.store
    xr.Dataset({"v": (("lat",), [1.0, 2.0, 3.0])}, {"lat": [9.0, 5.0, 4.0]}).to_zarr(
        store, group="down", zarr_format=3, consolidated=False, encoding={"v": {"chunks": (2,)}}
    )
    session.commit("down")
    rows = spark.createDataFrame([(1.0, 5.0), (3.0, 4.0)], "lat double, v double")
    write_rows(rows, monthly, append_dim="lat", group="down")
    found = xr.open_zarr(
        Repository.open(monthly).readonly_session("main").store,
        group="down",
        consolidated=False,
        chunks=None,
    ).load()
    assert found.lat.values.tolist() == [9, 5, 4, 3, 1]
    assert found.v.values.tolist() == [1, 2, 3, 4, 5]


def test_modes_error_and_ignore_respect_existing_values(spark: SparkSession, place: str) -> None:
    """Nothing is committed where something is."""
    rows = table(spark, dataset(seed=3))
    with pytest.raises(AlreadyExistsError):
        write_rows(rows, place, mode="error")
    assert not write_rows(rows, place, mode="ignore").committed
    with pytest.raises(InvalidInputError, match="mode 'fail'"):
        write_rows(rows, place, mode="fail")  # type: ignore[arg-type]
    assert commits(place) == 2


def test_write_without_rows_makes_no_commit(spark: SparkSession, place: str) -> None:
    """Also where Spark knows, and runs no task; but a transaction is noted."""
    rows = table(spark, dataset())
    assert not write_rows(rows.limit(0), place, mode="overwrite").committed
    assert not write_rows(rows.filter("t < -1"), place, mode="overwrite").committed
    assert not write_rows(rows.filter("t < -1"), place, append_dim="time").committed
    assert commits(place) == 2
    empty = Transaction("empty", 0)
    assert write_rows(rows.limit(0), place, append_dim="time", transaction=empty).committed
    assert not write_rows(rows.limit(0), place, append_dim="time", transaction=empty).committed
    xr.testing.assert_equal(load(place), dataset())


@seed(0)
@settings(
    max_examples=5,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_random_rows_agree_with_numpy(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random grids, chunks and shards; coordinates in any order; some of the cells, or all.

    First cells are replaced, then the first dimension, which has no coordinate, becomes longer.
    """
    url = (tmp_path_factory.mktemp("rows") / "repo").as_uri()
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), "shape"))
    chunks = tuple(data.draw(st.integers(1, it), "chunk") for it in shape)
    shards = tuple(it * 2 for it in chunks) if data.draw(st.booleans(), "shards") else None
    dtype = data.draw(st.sampled_from(["f4", "f8", "i4"]), "dtype")
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), "seed"))
    names = [f"x{it}" for it in range(len(shape))]
    coords = [np.arange(shape[0]), *(rng.permutation(3 * it)[:it] / 4 for it in shape[1:])]
    expected = rng.integers(-99, 99, shape).astype(dtype)

    session = Repository.create(url).writable_session("main")
    array = zarr.create_array(
        session.store,
        name="v",
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype=dtype,
        fill_value=-7,
        dimension_names=names,
    )
    array[...] = expected
    for name, values in [*zip(names, coords, strict=True)][1:]:
        made = zarr.create_array(
            session.store, name=name, shape=values.shape, dtype="f8", dimension_names=[name]
        )
        made[:] = values
    session.commit("made")

    def write(cells: npt.NDArray[np.int64], longer: tuple[int, ...], **options: Any) -> None:
        at = np.unravel_index(cells, longer)
        along = [np.arange(longer[0]), *coords[1:]]
        values = rng.integers(-99, 99, len(cells)).astype(dtype)
        expected[at] = values
        columns = {it: pa.array(c[a]) for it, c, a in zip(names, along, at, strict=True)}
        rows = spark.createDataFrame(pa.Table.from_pydict({**columns, "v": pa.array(values)}))
        write_rows(rows.repartition(3), url, tasks=data.draw(st.integers(1, 4), "tasks"), **options)

    part = data.draw(st.sampled_from([0.3, 1.0]), "part")
    size = int(np.prod(shape))
    write(rng.permutation(size)[: max(1, int(size * part))], shape, mode="overwrite")
    np.testing.assert_array_equal(read(url), expected)

    more = data.draw(st.integers(1, 5), "more")
    new = rng.permutation(np.arange(size, size // shape[0] * (shape[0] + more)))
    new = new[: max(1, int(len(new) * part))]
    length = int(new.max()) // (size // shape[0]) + 1
    longer = (length, *shape[1:])
    fill = np.full((length - shape[0], *shape[1:]), -7, dtype)
    expected = np.concatenate([expected, fill])
    write(new, longer, append_dim=names[0])
    np.testing.assert_array_equal(read(url), expected)


def read(url: str) -> npt.NDArray[Any]:
    """Read the array of the tip."""
    store = Repository.open(url).readonly_session("main").store
    return np.asarray(zarr.open_array(store, path="v", mode="r")[...])

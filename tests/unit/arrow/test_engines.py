"""DuckDB, Polars and DataFusion query arrays, and get the rows that xarray has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from icechunk_async import arrow
from icechunk_async.sync.xarray import open_dataset
from tests.unit.arrow.queries import QUERIES, keep_only, make_weather, objects_of

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.sync import Repository

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")
polars: Any = pytest.importorskip("polars", reason="polars is not installed: see the group test")
datafusion: Any = pytest.importorskip(
    "datafusion", reason="datafusion is not installed: see the group test"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The weather, with statistics of its chunks."""
    repository = make_weather(tmp_path_factory.mktemp("weather"))
    assert repository.analyze().chunks > 0
    return repository


@pytest.fixture(scope="module")
def expected(repository: Repository) -> dict[str, list[dict[str, Any]]]:
    """The rows of each statement, by DuckDB over a data frame that xarray made."""
    frame = open_dataset(repository.readonly_session("main")).to_dataframe().reset_index()
    connection = duckdb.connect()
    connection.register("weather", pa.Table.from_pandas(frame, preserve_index=False))
    return {it: connection.sql(it).to_arrow_table().to_pylist() for it in QUERIES}


def test_duckdb_returns_the_rows_of_xarray(
    repository: Repository, expected: dict[str, list[dict[str, Any]]]
) -> None:
    """Fifty statements."""
    connection = duckdb.connect()
    connection.register("weather", arrow.dataset(repository))
    for statement in QUERIES:
        found = connection.sql(statement).to_arrow_table().to_pylist()
        assert found == expected[statement], statement


def test_datafusion_returns_the_rows_of_xarray(
    repository: Repository, expected: dict[str, list[dict[str, Any]]]
) -> None:
    """Fifty statements, over many small fragments."""
    context = datafusion.SessionContext()
    context.register_dataset("weather", arrow.dataset(repository, fragment_bytes=4096))
    for statement in QUERIES:
        batches = context.sql(statement).collect()
        found = [row for batch in batches for row in batch.to_pylist()]
        assert found == expected[statement], statement


def test_polars_returns_the_rows_of_xarray(
    repository: Repository, expected: dict[str, list[dict[str, Any]]]
) -> None:
    """Fifty statements."""
    frame = polars.scan_pyarrow_dataset(arrow.dataset(repository))
    context = polars.SQLContext(weather=frame)
    for statement in QUERIES:
        found = context.execute(statement, eager=True).to_dicts()
        assert found == expected[statement], statement


def test_pandas_and_dask_take_the_fragments(repository: Repository) -> None:
    """Each is a partition."""
    from dask.dataframe import from_map

    dataset = arrow.dataset(repository, fragment_bytes=4096)
    fragments = list(dataset.get_fragments())
    assert len(fragments) > 4
    mapped: Any = from_map
    frame = mapped(lambda fragment: fragment.to_table().to_pandas(), fragments)
    expected = dataset.to_table().to_pandas()
    assert frame["t"].sum().compute() == pytest.approx(expected["t"].sum())
    assert len(frame) == len(expected) == dataset.count_rows()


def test_two_snapshots_are_joined_in_one_query(repository: Repository) -> None:
    """Two cells differ."""
    session = repository.writable_session("main")
    import zarr

    array: Any = zarr.open_array(session.store, path="quality", mode="r+")
    array[0, 0, :2] = (array[0, 0, :2] + 1) % 8
    session.commit("Two values")
    old, new = (arrow.dataset(repository, ref=it) for it in ("main~1", "main"))
    assert old.snapshot_id != new.snapshot_id
    connection = duckdb.connect()
    connection.register("old", old)
    connection.register("new", new)
    changed = connection.sql(
        "select lon from old join new using (time, lat, lon) where old.quality <> new.quality "
        "order by lon"
    ).fetchall()
    assert changed == [(0.0,), (45.0,)]


def _matches(engine: str, dataset: arrow.ArrayDataset, condition: str) -> int:
    """Return the number of rows that an engine finds."""
    statement = f"select count(lon) from weather where {condition}"  # noqa: S608 -- of this file
    if engine == "duckdb":
        connection = duckdb.connect()
        connection.register("weather", dataset)
        found: int = connection.sql(statement).fetchall()[0][0]
    elif engine == "polars":
        frame = polars.scan_pyarrow_dataset(dataset)
        found = polars.SQLContext(weather=frame).execute(statement, eager=True).item()
    else:
        context = datafusion.SessionContext()
        context.register_dataset("weather", dataset)
        found = context.sql(statement).collect()[0].to_pylist()[0]["count(weather.lon)"]
    return found


@pytest.mark.parametrize(
    ("engine", "condition", "is_handed_over"),
    [
        ("duckdb", "time < timestamp '2020-01-08 00:00:00' and quality >= 0", True),
        ("duckdb", "lat <= -80 and quality >= 0", True),
        # NaN is greater than all numbers in DuckDB, which older versions did not consider.
        ("duckdb", "lat > 67 and quality >= 0", int(duckdb.__version__.partition(".")[0]) < 2),
        ("polars", "lat > 67 and quality >= 0", True),
        ("polars", "lat in (90, 67.5) and quality >= 0", True),
        ("datafusion", "lat > 67 and quality >= 0", True),
        ("datafusion", "lat in (90, 67.5) and quality >= 0", True),
    ],
)
def test_conditions_that_an_engine_hands_over_choose_chunks(
    tmp_path: Path, engine: str, condition: str, *, is_handed_over: bool
) -> None:
    """The page says which: without the other chunks of an array, their queries succeed."""
    repository = make_weather(tmp_path)
    dataset = arrow.dataset(repository, fragment_bytes=4096)
    expected = _matches(engine, dataset, condition)
    assert expected > 0
    sides = {"time": lambda it: it[0] == 0, "lat <=": lambda it: it[1] == 2}
    inside = next((it for name, it in sides.items() if condition.startswith(name)), None)
    keep_only(
        tmp_path,
        {
            *objects_of(repository, "/quality", inside or (lambda it: it[1] == 0)),
            *(name for it in ("time", "lat", "lon") for name in objects_of(repository, f"/{it}")),
        },
    )
    if is_handed_over:
        assert _matches(engine, arrow.dataset(repository), condition) == expected
    else:
        with pytest.raises(Exception, match=r"missing|not found|damaged"):
            _matches(engine, arrow.dataset(repository), condition)

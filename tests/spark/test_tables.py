"""Contents and history of a repository as tables, and chunks as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import xarray as xr
import zarr

from icechunk_async import Repository as AsyncRepository
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.read.chunks import SCHEMA, STATISTICS
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.tables import TABLES, read_table
from tests.spark.tables import make_reader, plan, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


@pytest.fixture
def history(repository: Repository) -> list[str]:
    """Two commits: an array with three of its four chunks, then one more chunk and a group."""
    session = repository.writable_session("main")
    root = zarr.open_group(session.store, mode="a")
    array = root.create_array("a", shape=(4, 4), chunks=(2, 2), dtype="i4", fill_value=-1)
    array[:2] = 1
    array[2:, :2] = 2
    first = str(session.commit("first", {"by": "test"}))
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="a", mode="r+")[2:, 2:] = 3
    zarr.open_group(session.store, mode="a").create_group("deep")
    second = str(session.commit("second"))
    repository.create_tag("v1", snapshot_id=first)
    return [first, second]


async def test_tables_are_read_as_arrow_without_spark(history: list[str], url: str) -> None:
    """Each as Arrow, and so for pandas, of any state."""
    first, second = history
    async with AsyncRepository.open(url) as repository:
        tables = {name: await read_table(repository, name) for name in TABLES}
        old = await read_table(repository, "chunks", tag="v1")
        net = await read_table(repository, "changes", snapshot_id=first)
        with pytest.raises(InvalidInputError, match="'files'"):
            await read_table(repository, "files")
    snapshots = tables["snapshots"].to_pydict()
    assert snapshots["snapshot_id"][:2] == [second, first]
    assert snapshots["parent_id"][0] == first
    assert snapshots["message"][:2] == ["second", "first"]
    assert snapshots["metadata"][1] == '{"by": "test"}'
    assert tables["refs"].to_pylist() == [
        {"name": "main", "type": "branch", "snapshot_id": second},
        {"name": "v1", "type": "tag", "snapshot_id": first},
    ]
    assert tables["ops"]["operation"].to_pylist()[:2] == ["TagCreated", "NewCommit"]
    nodes = tables["nodes"].to_pydict()
    assert nodes["path"] == ["/", "/a", "/deep"]
    assert nodes["shape"] == [None, [4, 4], None]
    assert nodes["num_chunks"][1] == [2, 2]
    assert sum(tables["manifests"]["num_chunk_refs"].to_pylist()) == 4
    assert tables["chunks"]["chunk"].to_pylist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert set(tables["chunks"]["kind"].to_pylist()) == {"inline"}
    assert old.num_rows == 3
    changes = tables["changes"].to_pylist()
    assert [(it["change"], it["path"], it["chunk"]) for it in changes] == [
        ("new_group", "/deep", None),
        ("updated_chunk", "/a", [1, 1]),
    ]
    assert "new_array" in net["change"].to_pylist()
    assert list(tables["refs"].to_pandas().columns) == ["name", "type", "snapshot_id"]


async def test_changes_of_any_two_snapshots_are_net(history: list[str], url: str) -> None:
    """Also backwards and between branches; what only moved with its group is not listed."""
    first, second = history
    async with AsyncRepository.open(url) as repository:

        async def changes(start: str, end: str) -> list[tuple[Any, ...]]:
            table = await read_table(repository, "changes", snapshot_id=end, from_snapshot_id=start)
            return sorted(tuple(it.values()) for it in table.to_pylist())

        back = await changes(second, first)
        await repository.create_branch("side", first)
        session = await repository.rearrange_session("side")
        await session.move("/a", "/b")
        side = str(await session.commit("moved"))
        moved = await changes(second, side)
        for _ in range(2):
            session = await repository.rearrange_session("main")
            (name,) = [it for it in session.workspace.base.nodes if it.startswith("/deep")]
            await session.move(name, f"{name}er")
            last = str(await session.commit("deeper"))
        net = await changes(second, last)
    assert back == [("deleted_group", "/deep", None, None), ("updated_chunk", "/a", None, [1, 1])]
    assert moved == [
        ("deleted_group", "/deep", None, None),
        ("moved_node", "/a", "/b", None),
        ("updated_chunk", "/b", None, [1, 1]),
    ]
    assert net == [("moved_node", "/deep", "/deeperer", None)]


def test_spark_reads_the_tables(spark: SparkSession, history: list[str], url: str) -> None:
    """With SQL, and older states by the same options as arrays."""
    first, second = history
    spark.sql(f"CREATE TEMPORARY VIEW log USING icechunk OPTIONS (path '{url}', table 'snapshots')")
    rows = spark.sql("SELECT snapshot_id FROM log WHERE message = 'first'").collect()
    assert [row.snapshot_id for row in rows] == [first]
    reader = spark.read.format("icechunk").option("table", "changes")
    changes = reader.option("from-snapshot-id", first).option("snapshot-id", second).load(url)
    assert changes.where("change = 'updated_chunk'").first()["chunk"] == [1, 1]  # type: ignore[index]


@pytest.mark.parametrize("name", TABLES)
def test_table_has_its_declared_schema(history: list[str], url: str, name: str) -> None:
    """In Spark as without."""
    assert history
    assert read(url, table=name).num_rows


def test_layout_chunks_reads_a_row_for_each_chunk_that_exists(history: list[str], url: str) -> None:
    """Those that exist, with bounds and stored bytes; decoded where the schema asks for it."""
    assert history
    found = read(url, layout="chunks", schema=SCHEMA)
    assert found["key"].to_pylist() == ["a/c/0/0", "a/c/0/1", "a/c/1/0", "a/c/1/1"]
    assert found["start"].to_pylist()[2:] == [[2, 0], [2, 2]]
    assert found["stop"].to_pylist()[2:] == [[4, 2], [4, 4]]
    sizes = [len(it) for it in found["data"].to_pylist()]
    assert sizes == found["size_bytes"].to_pylist()
    wanted = pa.schema([("chunk", pa.list_(pa.int64())), ("tensor", pa.binary())])
    decoded = read(url, layout="chunks", schema=wanted, tag="v1").to_pydict()
    assert decoded["chunk"] == [[0, 0], [0, 1], [1, 0]]
    last = np.frombuffer(decoded["tensor"][2], "i4").reshape(2, 2)
    assert last.tolist() == [[2, 2], [2, 2]]
    with pytest.raises(InvalidInputError, match="layout 'chunks'"):
        read(url, layout="chunks", where="a > 1")
    with pytest.raises(InvalidInputError, match="names 'b'"):
        read(url, layout="chunks", arrays="b")


def test_statistics_of_chunks_are_computed_on_request(repository: Repository, url: str) -> None:
    """Values as rows show them: scaled, gaps counted, times in seconds; text has no order."""
    days = np.datetime64("1970-01-02", "ns") + np.arange(4) * np.timedelta64(1, "D")
    values = np.array([[1.5, np.nan], [0.5, 1.0], [np.nan, np.nan], [2.0, 2.5]])
    names = np.array(["a", "b", "c", "d"], np.dtypes.StringDType())
    dataset = xr.Dataset(
        {"v": (("time", "x"), values), "name": ("time", names)}, coords={"time": days}
    )
    session = repository.writable_session("main")
    scaled = {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -9, "chunks": (3, 1)}
    to_icechunk(dataset, session, mode="w", encoding={"v": scaled})
    session.commit("data")
    wanted = pa.schema([("chunk", pa.list_(pa.int64())), ("statistics", STATISTICS)])

    def summed_up(name: str, **options: str) -> list[tuple[Any, ...]]:
        found = read(url, layout="chunks", schema=wanted, arrays=name, **options)
        return [tuple(it.values()) for it in found["statistics"].to_pylist()]

    assert summed_up("v") == [
        (2, 1, 0.5, 1.5, 1.0),
        (1, 2, 1.0, 1.0, 1.0),
        (1, 0, 2.0, 2.0, 2.0),
        (1, 0, 2.5, 2.5, 2.5),
    ]
    assert summed_up("v", decode="false")[0] == (3, 0, -9.0, 3.0, pytest.approx(-5 / 3))
    assert summed_up("time") == [(4, 0, 86_400.0, 4 * 86_400.0, 2.5 * 86_400)]
    assert summed_up("name") == [(4, 0, None, None, None)]


def test_bytes_of_chunks_are_read_only_if_they_are_asked_for(
    history: list[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark prunes no columns, so a query without a schema counts chunks without reading any."""
    assert history
    paths: list[str] = []
    real = Workspace.read_chunk

    async def counted(self: Workspace, path: str, *args: Any) -> Any:
        paths.append(path)
        return await real(self, path, *args)

    monkeypatch.setattr(Workspace, "read_chunk", counted)
    found = read(url, layout="chunks")
    assert found.column_names == [it for it in SCHEMA.names if it != "data"]
    assert paths == []
    with_data = read(url, layout="chunks", schema=SCHEMA)
    assert found.to_pydict() == {it: with_data[it].to_pylist() for it in found.column_names}
    assert paths == ["/a"] * 4


def test_chunks_are_divided_into_partitions_by_size(history: list[str], url: str) -> None:
    """Each chunk in one partition."""
    assert history
    reader = make_reader(url, layout="chunks", partition_bytes="16", schema=SCHEMA)
    parts = plan(reader)
    assert len(parts) == 4
    counts = [sum(batch.num_rows for batch in reader.read(part)) for part in parts]
    assert counts == [1, 1, 1, 1]

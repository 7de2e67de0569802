"""Views for SQL of all groups of a repository, and of the tables about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import xarray as xr
import zarr
from pyspark.errors import PySparkException

from icechunk_async.arrow.table import open_group, table_kinds
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import register_views
from icechunk_async.spark.options import ReadOptions, WriteOptions
from icechunk_async.sync.xarray import to_icechunk
from icechunk_async.tables import TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from icechunk_async.sync import Repository


@pytest.fixture
def two_states(repository: Repository) -> list[str]:
    """Commit arrays of several dimensions in two groups, and change one value."""
    dataset = xr.Dataset(
        {
            "t": (("x", "y"), np.arange(4.0).reshape(2, 2)),
            "height": ("x", [1, 2]),
            "z": ("x", [1j, 2]),
        },
        coords={"x": [10, 20], "area": (("x", "y"), np.ones((2, 2)))},
    )
    session = repository.writable_session("main")
    to_icechunk(dataset, session)
    to_icechunk(dataset[["height"]], session, group="by/height")
    first = str(session.commit("first"))
    repository.create_tag("v1", snapshot_id=first)
    session = repository.writable_session("main")
    zarr.open_array(session.store, path="t", mode="r+")[1, 1] = 9
    return [first, str(session.commit("second"))]


def test_views_of_two_states_are_joined(
    spark: SparkSession, repository: Repository, two_states: list[str], url: str
) -> None:
    """Each of all groups and tables, and of one snapshot."""
    assert two_states
    now = register_views(spark, url)
    old = register_views(spark, url, ref="v1", prefix="old", tables=())
    tables = {f"repo__{it}": f"table {it!r}" for it in TABLES}
    assert now == {
        "repo": "group '/': t, area",
        "repo_by_x": "group '/': height",
        "repo_by_height": "group 'by/height': height",
        **tables,
    }
    assert list(old) == ["old", "old_by_x", "old_by_height"]
    assert spark.table("repo").columns == ["x", "y", "area", "t"]
    joined = spark.sql(
        "SELECT a.x, a.y, b.t, a.t FROM repo a JOIN old b USING (x, y) WHERE a.t != b.t"
    )
    assert [tuple(it) for it in joined.collect()] == [(20, 1, 3.0, 9.0)]
    log = spark.sql("SELECT message FROM repo__snapshots ORDER BY written_at DESC LIMIT 2")
    assert [it.message for it in log.collect()] == ["second", "first"]
    spark.sql(f"CREATE TEMPORARY VIEW one USING icechunk OPTIONS (path '{url}', group 'by/height')")
    spark.sql("INSERT OVERWRITE one VALUES (20, 7)")
    changed = zarr.open_array(
        repository.readonly_session("main").store, path="by/height/height", mode="r"
    )
    assert np.array_equal(changed[...], [1, 7])
    assert [tuple(it) for it in spark.table("one").orderBy("x").collect()] == [(10, 1), (20, 2)]
    with pytest.raises(InvalidInputError, match=r"No branch, tag or snapshot.*'v2'"):
        register_views(spark, url, ref="v2")


def test_log_of_a_ref_ends_with_its_snapshot(
    spark: SparkSession, two_states: list[str], url: str
) -> None:
    """Not with the tip of main."""
    register_views(spark, url, ref="v1", prefix="older", tables=("snapshots",))
    log = spark.sql("SELECT message FROM older__snapshots WHERE parent_id IS NOT NULL")
    assert two_states
    assert [it.message for it in log.collect()] == ["first"]


def test_arrays_are_grouped_by_their_dimensions(two_states: list[str], url: str) -> None:
    """Those with the most first; without the types that have no column."""
    dataset = open_group(ReadOptions.parse({"path": url, "snapshot-id": two_states[0]}))
    assert table_kinds(dataset) == {("x", "y"): ("t", "area"), ("x",): ("height",)}
    assert table_kinds(dataset[["x"]]) == {("x",): ("x",)}


def test_statements_work_or_are_refused_as_documented(
    spark: SparkSession, repository: Repository, two_states: list[str], url: str
) -> None:
    """Those of the table in the guide to Spark; what is refused leaves no commit."""
    options = f"path '{url}', group 'by/height'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW v USING icechunk OPTIONS ({options})")
    register_views(spark, url, prefix="pinned", tables=())
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW w AS SELECT * FROM v WHERE x > 10")
    assert [it.col_name for it in spark.sql("DESCRIBE v").collect()] == ["x", "height"]
    spark.sql("CACHE TABLE v")
    spark.sql("CREATE TABLE copied USING parquet AS SELECT * FROM v")
    query = "SELECT max(x), (SELECT count(*) FROM w) FROM copied WHERE x IN (SELECT x FROM v)"
    assert [tuple(it) for it in spark.sql(query).collect()] == [(20, 1)]
    spark.sql("UNCACHE TABLE v")
    spark.sql("CREATE TABLE unreadable (x bigint, height bigint) USING icechunk")
    refused = {
        "INSERT INTO v VALUES (30, 3)": "append-dim",
        "INSERT INTO v WITH (`append-dim` = 'x') VALUES (30, 3)": "append-dim",
        "INSERT OVERWRITE pinned_by_height VALUES (20, 7)": "does not go with write",
        f"CREATE TEMPORARY VIEW a USING icechunk OPTIONS ({options}, `append-dim` 'x')": (
            "'append-dim' does not go with"
        ),
        f"CREATE TABLE t USING icechunk OPTIONS ({options})": "CREATE TEMPORARY VIEW",
        "CREATE TABLE t USING icechunk AS SELECT * FROM v": "make a temporary view",
        "SELECT * FROM unreadable": "make a temporary view",
        "SELECT * FROM v VERSION AS OF 'v1'": "TIME_TRAVEL",
        "SELECT * FROM v TIMESTAMP AS OF '2030-01-01'": "TIME_TRAVEL",
        f"TABLE icechunk.`{url}`": "UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY",
        "UPDATE v SET height = 3": "does not support UPDATE",
        "DELETE FROM v WHERE x = 10": "does not support deletes",
        "MERGE INTO v USING w ON v.x = w.x WHEN MATCHED THEN DELETE": "does not support MERGE",
        # Before Spark 4.2: catalogs have no procedures at all.
        "CALL icechunk.garbage_collect()": "UNRESOLVED_ROUTINE|PROCEDURES",
    }
    for statement, why in refused.items():
        with pytest.raises(PySparkException, match=why):
            spark.sql(statement).collect()
    spark.sql("DROP TABLE copied")
    spark.sql("DROP TABLE unreadable")
    assert str(repository.lookup_branch("main")) == two_states[-1]


def test_statements_about_views_show_no_option(
    spark: SparkSession, two_states: list[str], url: str
) -> None:
    """Options may be secrets; of the statement that makes a view Spark hides those that may."""
    assert two_states
    shown = {"storage.durability": "none"}
    register_views(spark, url, prefix="hidden", tables=("refs",), options=shown)
    statements = (
        "DESCRIBE EXTENDED {}",
        "SHOW TABLE EXTENDED LIKE '{}'",
        "EXPLAIN EXTENDED SELECT * FROM {}",
        "EXPLAIN FORMATTED SELECT * FROM {}",
        "EXPLAIN EXTENDED INSERT OVERWRITE {} SELECT * FROM {}",
    )
    for statement in statements:
        for view in ("hidden", "hidden__refs"):
            rows = spark.sql(statement.replace("{}", view)).collect()
            text = "\n".join(str(it) for row in rows for it in row)
            assert spark.table(view).columns[-1] in text
            assert "durability" not in text
    options = f"path '{url}', `storage.account_key` 'HUNTER1'"
    making = f"EXPLAIN EXTENDED CREATE TEMPORARY VIEW made USING icechunk OPTIONS ({options})"
    (row,) = spark.sql(making).collect()
    assert "storage.account_key" in row[0]
    assert "HUNTER" not in row[0]


@pytest.mark.parametrize("kind", [ReadOptions, WriteOptions])
def test_tables_of_the_catalog_are_refused_with_what_works(
    url: str, kind: type[ReadOptions | WriteOptions]
) -> None:
    """With the properties that Spark 4.3 adds to those of CREATE TABLE."""
    given = {"owner": "me", "provider": "icechunk", "option.path": url, "path": url}
    with pytest.raises(InvalidInputError, match=r"CREATE TEMPORARY VIEW.*register_views"):
        kind.parse(given)
    with pytest.raises(InvalidInputError, match="make a temporary view"):
        kind.parse({})

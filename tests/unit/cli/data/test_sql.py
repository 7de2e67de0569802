"""The command `sql`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.arrow import connect
from icechunk_async.errors import InvalidInputError
from tests.unit.arrow.queries import make_weather
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weather."""
    folder = tmp_path_factory.mktemp("weather")
    make_weather(folder)
    return str(folder)


@pytest.fixture
def sql(url: str) -> Callable[..., Outcome]:
    """Run the command."""
    return lambda statement, *arguments: run("sql", url, statement, *arguments)


def test_the_process_ends_although_most_rows_are_not_read(url: str) -> None:
    """Nothing reads on behind DuckDB."""
    command = [
        sys.executable,
        "-m",
        "icechunk_async.cli",
        "sql",
        url,
        "select lat from data limit 1",
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False)
    # Zarr waits 0.2 seconds for its own thread, and says so where a busy machine takes longer.
    errors = "" if done.stderr.startswith("Thread did not finish cleanly") else done.stderr
    assert (done.stdout.split(), errors, done.returncode) == (["lat", "90.0"], "", 0)


def test_a_statement_prints_its_rows(sql: Callable[..., Outcome]) -> None:
    """For people and as JSON."""
    done = sql("select lat, lon from data order by time, lat, lon limit 2", "--json")
    assert done.exit_code == 0, done.stderr
    assert done.json == {
        "columns": ["lat", "lon"],
        "rows": [[-90.0, 0.0], [-90.0, 45.0]],
        "more": False,
        "output": None,
    }
    assert not done.stderr
    done = sql("select lat, lon from data limit 1")
    assert done.stdout.split() == ["lat", "lon", "90.0", "0.0"]


def test_refs_can_be_queried_together(sql: Callable[..., Outcome]) -> None:
    """Under a name of the user's choice."""
    done = sql(
        "select count(*) from data join old_data using (time, lat, lon) "
        "where data.quality = old_data.quality",
        "--at",
        "old=main",
        "--json",
    )
    assert done.json["rows"] == [[24 * 9 * 8]]
    done = sql("select 1", "--at", "old")
    assert done.exit_code == 1
    assert "not of the form NAME=REF" in done.stderr
    assert "begin the names" in sql("select 1", "--at", "a b=main").stderr
    assert "is not a branch" in sql("select 1", "--ref", "mani").stderr


def test_tables_about_the_repository_are_there(sql: Callable[..., Outcome]) -> None:
    """With the prefix `icechunk_`."""
    done = sql("select message from icechunk_snapshots order by written_at", "--json")
    assert done.json["rows"] == [["Repository initialized"], ["Weather"]]


def test_coordinates_of_cells_are_columns(sql: Callable[..., Outcome]) -> None:
    """With fewer dimensions than the arrays have."""
    done = sql("describe data", "--json")
    assert [it[0] for it in done.json["rows"]] == [
        "time",
        "lat",
        "lon",
        "station",
        "quality",
        "t",
    ]


def test_more_rows_than_the_limit_are_announced(sql: Callable[..., Outcome]) -> None:
    """With the options that show them."""
    done = sql("select * from data", "--limit", "3")
    assert len(done.stdout.strip().splitlines()) == 5
    assert "--limit" in done.stdout


def test_all_rows_can_be_written_to_a_file(sql: Callable[..., Outcome], tmp_path: Path) -> None:
    """A new one, of a kind that is known."""
    for name, read in (("rows.parquet", duckdb.read_parquet), ("rows.csv", duckdb.read_csv)):
        target = tmp_path / name
        done = sql("select lat, t from data where lat > 0", "--output", str(target))
        assert done.exit_code == 0, done.stderr
        assert len(read(str(target)).fetchall()) == 24 * 4 * 8
        again = sql("select 1", "--output", str(target))
        assert again.exit_code == 1
        assert "already" in again.stderr
    assert "does not end with .parquet or .csv" in sql("select 1", "--output", "x.txt").stderr


@pytest.mark.parametrize(
    ("statement", "message"),
    [("selec 1", "syntax error"), ("select * from datta", "datta"), ("select 1; x", "x")],
)
def test_errors_of_duckdb_are_one_sentence(
    sql: Callable[..., Outcome], statement: str, message: str
) -> None:
    """With what DuckDB says."""
    done = sql(statement)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error (invalid-input): DuckDB cannot run the statement: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("more", [[], ["--output", "rows.csv"]])
@pytest.mark.parametrize("statement", ["", "/* a remark */"])
def test_a_statement_that_asks_for_nothing_is_refused(
    sql: Callable[..., Outcome],
    statement: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    done = sql(statement, *more)
    assert done.exit_code == 1
    assert "There are no rows to show or to write" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_second_ref_needs_a_name(url: str) -> None:
    """An empty one would take the place of the first ref."""
    with pytest.raises(InvalidInputError, match="begin the names"):
        connect(url, at={"": "main"})


def test_a_table_that_is_not_there_is_told_with_those_that_are(sql: Callable[..., Outcome]) -> None:
    """Of every ref; DuckDB knows only those that the statement names."""
    shown = " ".join(sql("select * from dat", "--at", "old=main").stderr.split())
    assert "dat does not exist" in shown
    assert "Tables of arrays here: data, old_data." in shown

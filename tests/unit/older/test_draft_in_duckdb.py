"""First drafts as tables: DuckDB, which knows nothing of Icechunk, reads their Parquet files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.format.draft.coordinates import encode_coords
from tests.unit.older.large_draft import (
    END,
    FIRST,
    SIDE,
    check_nodes,
    manifests,
    structure_file,
    write_large_draft,
)

if TYPE_CHECKING:
    from pathlib import Path

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")

QUERY = """
    SELECT coord, "offset", length FROM read_parquet(?)
    WHERE array_id = ? AND coord >= ? AND coord < ? ORDER BY coord
"""


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Write the draft."""
    await write_large_draft(tmp_path)
    return tmp_path


def _nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the structure file of ``main``, by path."""
    structure = duckdb.read_parquet(str(structure_file(folder)))
    rows = [dict(zip(structure.columns, row, strict=True)) for row in structure.fetchall()]
    return {row["path"]: row for row in rows}


def test_nodes_are_rows(folder: Path) -> None:
    """Ids, types, and what an array's metadata holds, as lists and structures."""
    check_nodes(_nodes(folder))


def test_a_comparison_of_coordinates_chooses_chunks(folder: Path) -> None:
    """Those of some rows of the grid and no others, with the place of each."""
    big = _nodes(folder)["/big"]
    given = [manifests(folder, big), big["id"], encode_coords(FIRST), encode_coords(END)]
    found = duckdb.execute(QUERY, given).fetchall()
    assert found == [
        (encode_coords((y, x)), y * SIDE + x, 1)
        for y in range(FIRST[0], END[0])
        for x in range(SIDE)
    ]
    # The statistics of five groups of rows say that they have none of these.
    plan = duckdb.execute(f"EXPLAIN (ANALYZE, FORMAT json) {QUERY}", given).fetchall()[0][1]
    assert re.findall(r'"total_row_groups_to_scan": *"?(\d+)', plan)[0] == "6"
    assert set(re.findall(r'"row_groups_scanned": *"?(\d+)', plan)) == {"1"}


def test_inline_chunks_are_values(folder: Path) -> None:
    """The bytes of a chunk that is in the manifest."""
    small = _nodes(folder)["/small"]
    found = duckdb.execute(
        "SELECT coord, inline_data FROM read_parquet(?) WHERE array_id = ?",
        [manifests(folder, small), small["id"]],
    ).fetchall()
    assert found == [(encode_coords((7,)), b"\x07")]

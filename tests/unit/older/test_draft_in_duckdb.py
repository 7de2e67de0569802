"""First drafts as tables: DuckDB, which knows nothing of Icechunk, reads their Parquet files."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.format.draft.coordinates import encode_coords
from icechunk_async.format.manifest.refs import ChunkRefs, Kind
from tests.helpers import make_array, write

if TYPE_CHECKING:
    from pathlib import Path

duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed: see the group test")

SIDE = 300
FIRST, END = (238, 0), (243, 0)
"""Rows of chunks whose coordinates take one byte, and two."""
QUERY = """
    SELECT coord, "offset", length FROM read_parquet(?)
    WHERE array_id = ? AND coord >= ? AND coord < ? ORDER BY coord
"""


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Write a draft with an array of 90,000 references, and another that has a chunk inline."""
    async with Repository.create(tmp_path, layout="first-draft") as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        await make_array(session, "big", (SIDE, SIDE), (1, 1))
        await make_array(session, "small", (10,), (1,))
        await write(session, "small/c/7", b"\x07")
        coords = np.indices((SIDE, SIDE)).reshape(2, -1).T.astype(np.uint32)
        refs = ChunkRefs.build(
            coords,
            Kind.NATIVE,
            objects=np.arange(SIDE * SIDE, dtype=np.uint32),
            offsets=np.arange(SIDE * SIDE, dtype=np.uint64),
            lengths=np.ones(SIDE * SIDE, np.uint64),
            chunk_ids=np.random.default_rng(1).integers(0, 256, (SIDE * SIDE, 12), np.uint8),
        )
        session.workspace.set_refs("/big", refs)
        await session.commit("filled")
    return tmp_path


def _nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the structure file of ``main``, by path."""
    state = json.loads((folder / "state.json").read_bytes())
    tip = state["refs"]["main"]["snapshot-id"]
    (name,) = [it["structure-file"] for it in state["snapshots"] if it["snapshot-id"] == tip]
    structure = duckdb.read_parquet(str(folder / "s" / name))
    rows = [dict(zip(structure.columns, row, strict=True)) for row in structure.fetchall()]
    return {row["path"]: row for row in rows}


def _manifests(folder: Path, node: dict[str, Any]) -> list[str]:
    """Return the files that the structure file names for an array."""
    return [str(folder / "i" / it["inventory_file"]) for it in node["inventories"]]


def test_nodes_are_rows(folder: Path) -> None:
    """Ids, types, and what an array's metadata holds, as lists and structures."""
    nodes = _nodes(folder)
    assert {path: row["type"] for path, row in nodes.items()} == {
        "/": "group",
        "/big": "array",
        "/small": "array",
    }
    metadata = nodes["/big"]["array_metadata"]
    assert metadata["shape"] == [SIDE, SIDE]
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [1, 1]
    assert [it["extent"] for it in nodes["/small"]["inventories"]] == [[[7, 8]]]


def test_a_comparison_of_coordinates_chooses_chunks(folder: Path) -> None:
    """Those of some rows of the grid and no others, with the place of each."""
    big = _nodes(folder)["/big"]
    given = [_manifests(folder, big), big["id"], encode_coords(FIRST), encode_coords(END)]
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
        [_manifests(folder, small), small["id"]],
    ).fetchall()
    assert found == [(encode_coords((7,)), b"\x07")]

"""First drafts as data frames: Polars knows nothing of Icechunk, and reads their Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

pl: Any = pytest.importorskip("polars", reason="polars is not installed: see the group test")
pq: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """Write the draft."""
    await write_large_draft(tmp_path)
    return tmp_path


def _nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the structure file of ``main``, by path."""
    return {row["path"]: row for row in pl.read_parquet(structure_file(folder)).to_dicts()}


def test_nodes_are_rows(folder: Path) -> None:
    """Ids, types, and what an array's metadata holds, as lists and structures."""
    check_nodes(_nodes(folder))
    lazy = pl.scan_parquet(structure_file(folder))
    chosen = lazy.filter(pl.col("type") == "array").select(pl.col("array_metadata").struct["shape"])
    assert chosen.collect().to_series().to_list() == [[SIDE, SIDE], [10]]


def test_a_comparison_of_coordinates_reads_one_group_of_rows(folder: Path) -> None:
    """The answer is the same where all other groups are damaged: nothing of them was decoded."""
    big = _nodes(folder)["/big"]
    (file,) = map(Path, manifests(folder, big))
    first, end = encode_coords(FIRST), encode_coords(END)
    is_near = (pl.col("coord") >= first) & (pl.col("coord") < end)
    columns = ["coord", "offset", "length"]
    asked = pl.scan_parquet(file).filter((pl.col("array_id") == big["id"]) & is_near)
    expected = [
        (encode_coords((y, x)), y * SIDE + x, 1)
        for y in range(FIRST[0], END[0])
        for x in range(SIDE)
    ]
    assert asked.select(columns).collect().rows() == expected
    _damage_other_groups(file, first, end)
    assert asked.select(columns).collect().rows() == expected
    with pytest.raises(pl.exceptions.PolarsError):
        pl.scan_parquet(file).select(columns).collect()


def test_groups_of_rows_are_as_the_reference_says(folder: Path) -> None:
    """At most 16,384 rows, with the statistics of ids and coordinates, in ascending order."""
    nodes = _nodes(folder)
    (file,) = map(Path, manifests(folder, nodes["/big"]))
    about = pq.ParquetFile(file).metadata
    rows: list[int] = []
    bounds: list[tuple[int, bytes]] = []
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        rows.append(group.num_rows)
        found = {
            it.path_in_schema: it.statistics for it in map(group.column, range(group.num_columns))
        }
        ids, coords = found["array_id"], found["coord"]
        bounds += [(ids.min, coords.min), (ids.max, coords.max)]
    assert max(rows) == 16_384
    assert sum(rows) == SIDE * SIDE
    assert bounds == sorted(bounds)
    for node in nodes.values():
        assert (node["attrs_reference"] or {}).get("flags") is None
        assert [it["flags"] for it in node["inventories"] or []] in ([], [None])


def _damage_other_groups(file: Path, first: bytes, end: bytes) -> None:
    """Overwrite the pages of all groups of rows but the one that has some coordinates."""
    data = bytearray(file.read_bytes())
    about = pq.ParquetFile(file).metadata
    damaged = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        columns = [group.column(at) for at in range(group.num_columns)]
        coord = next(it for it in columns if it.path_in_schema == "coord").statistics
        if coord.max >= first and coord.min < end:
            continue
        damaged += 1
        for it in columns:
            start = it.dictionary_page_offset or it.data_page_offset
            data[start : start + it.total_compressed_size] = bytes(it.total_compressed_size)
    assert (damaged, about.num_row_groups) == (5, 6)
    file.write_bytes(data)


def test_inline_chunks_are_values(folder: Path) -> None:
    """The bytes of a chunk that is in the manifest."""
    small = _nodes(folder)["/small"]
    found = pl.read_parquet(manifests(folder, small)).filter(pl.col("array_id") == small["id"])
    assert found.select("coord", "inline_data").rows() == [(encode_coords((7,)), b"\x07")]

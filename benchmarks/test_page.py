"""The page of the documentation says what was measured, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.docs import (
    ELSEWHERE,
    PAGE,
    RESULTS,
    SUMMARY,
    elsewhere_text,
    load,
    machine_text,
    ratios,
    summary,
    tables,
)
from benchmarks.report import draw_growth, grown
from benchmarks.results import OURS, ZARR_ALONE, Result

if TYPE_CHECKING:
    from pathlib import Path


def test_page_says_what_was_measured() -> None:
    """Nobody wrote into its tables, and new reasons are on it."""
    machine, results = load(RESULTS)
    others = [load(path) for path in ELSEWHERE]
    page = PAGE.read_text(encoding="utf-8")
    assert machine_text(machine, results) in page
    assert elsewhere_text(others) in page
    assert tables(results, ratios(others)) in page
    assert summary(results, ratios(others)) in SUMMARY.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (10, "| 7.50 to 9.00 | 10, missed; a store of no cost: 8.00 |"),
        (6, "| 7.50 to 9.00 | 6, missed |"),
        (4, "| 7.50 to 9.00 | 4, reached |"),
    ],
)
def test_a_row_tells_what_others_found_and_zarr_leaves(target: float, told: str) -> None:
    """A target that even a store without any cost would miss is told from one that it reaches."""
    samples = {OURS: [2.0], "official": [8.0], ZARR_ALONE: [1.0]}
    result = Result(
        "Write arrays through zarr", "write", "seconds", samples, targets={"official": target}
    )
    assert told in tables([result], {result.key: [9.0, 7.5]})


def test_workloads_of_three_sizes_are_drawn_against_size(tmp_path: Path) -> None:
    """Those that are named alike but for a number."""
    samples = {OURS: [2.0], "official": [8.0]}
    names = ["commit 1 array of 20 chunks", "commit 30 array of 20 chunks", "read 10 KB, 1 at once"]
    names += ["commit 1,000 array of 20 chunks", "read 10 KB, 64 at once", "open 1.5 of 2 files"]
    results = [Result("", name, "seconds", samples) for name in names]
    found = {name: list(sizes) for name, sizes in grown(results).items()}
    assert found == {"commit n array of 20 chunks": [1, 30, 1000]}
    draw_growth(results, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000

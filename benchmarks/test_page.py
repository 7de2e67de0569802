"""The page of the documentation says what was measured, and nothing else."""

from __future__ import annotations

import json

import pytest

from benchmarks.docs import PAGE, RESULTS, machine_text, tables
from benchmarks.results import OURS, ZARR_ALONE, Result


def test_page_says_what_was_measured() -> None:
    """Nobody wrote into its tables, and new reasons are on it."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    results = [Result(**each) for each in document["results"].values()]
    page = PAGE.read_text(encoding="utf-8")
    assert tables(results) in page
    assert machine_text(document["machine"], results) in page


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (10, "10, missed; a store of no cost: 8.00"),
        (6, "6, missed |"),
        (4, "4, reached |"),
    ],
)
def test_a_target_beyond_what_zarr_leaves_is_told(target: float, told: str) -> None:
    """Where even a store that does nothing would miss it."""
    samples = {OURS: [2.0], "official": [8.0], ZARR_ALONE: [1.0]}
    result = Result(
        "Write arrays through zarr", "write", "seconds", samples, targets={"official": target}
    )
    assert told in tables([result])

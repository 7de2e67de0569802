"""kill -9 at the requests of a leased session: nothing that was spilled is lost, once is once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.killing import run_killer

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = "tests.unit.engine.leases.kill_driver"


@pytest.mark.parametrize(
    ("spec", "first", "step"),
    [
        (2, 3, 25),
        *(
            pytest.param(spec, first, 9, marks=pytest.mark.thorough)
            for spec in (1, 2)
            for first in range(9)
        ),
    ],
)
def test_a_process_killed_at_any_request_loses_only_what_was_not_spilled(
    tmp_path: Path, spec: int, first: int, step: int
) -> None:
    """Before and after each request of beginning, spilling, resuming and committing."""
    assert int(run_killer(DRIVER, "hold", tmp_path, spec, first, step)) >= 3


@pytest.mark.parametrize("spec", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_ending_a_session_that_was_killed_ends_it_or_leaves_it_whole(
    tmp_path: Path, spec: int
) -> None:
    """Before and after its one write; to end it again ends it."""
    assert int(run_killer(DRIVER, "end", tmp_path, spec, 0, 1)) >= 2


@pytest.mark.parametrize(
    ("spec", "first", "step"),
    [
        (2, 1, 2),
        *(pytest.param(spec, 0, 1, marks=pytest.mark.thorough) for spec in (1, 2)),
    ],
)
def test_a_collection_that_was_killed_leaves_dead_leases_to_the_next_one(
    tmp_path: Path, spec: int, first: int, step: int
) -> None:
    """After each of its writes and before; no lease goes before what its session spilled."""
    assert int(run_killer(DRIVER, "collect", tmp_path, spec, first, step)) >= 3

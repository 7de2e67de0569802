"""Processes that are killed while they commit, where no object can be replaced safely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.killing import run_killer

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = "tests.histories.numbered_killer"


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(10, 0), *(pytest.param(100, seed, marks=pytest.mark.thorough) for seed in range(1, 11))],
)
def test_killed_writers_of_numbered_states_lose_nothing(
    kills: int, seed: int, tmp_path: Path
) -> None:
    """Eight processes commit and collect; every commit that was told to have landed is there."""
    landed, history, _, left = map(int, run_killer(DRIVER, tmp_path, kills, seed).split())
    assert history >= landed >= kills
    assert left == 2

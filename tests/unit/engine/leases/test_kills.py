"""kill -9 at the requests of a leased session: nothing that was spilled is lost, once is once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]


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
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.unit.engine.leases.kill_driver"),
            *(str(tmp_path), str(spec), str(first), str(step)),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3

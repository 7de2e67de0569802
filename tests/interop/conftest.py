"""Fixtures of the tests beside the official engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.wheel_1 import VARIABLE, environment

# Read by the engine when it is imported: its warnings about local disks are not news.
os.environ.setdefault("ICECHUNK_LOG", "error")
os.environ.setdefault("ICECHUNK_NO_LOGS", "1")

pytest.register_assert_rewrite(
    "tests.interop.comparing", "tests.interop.facade_pair", "tests.interop.side_views"
)

if TYPE_CHECKING:
    from tests.interop.edits import Sources

_HERE = Path(__file__).parent
_NARROW = (
    # Zarr itself stores these types; their place in the specification is not our subject.
    "ignore::zarr.errors.UnstableSpecificationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Zarr store the types that its specification does not settle."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            for line in _NARROW:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Leave watching for blocking calls to the other tests: here it takes most of the time."""


@pytest.fixture(scope="session", autouse=True)
def _originals(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the repositories a place that several tests begin with."""
    from tests.interop.steps import use_originals

    use_originals(tmp_path_factory.mktemp("originals"))


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """Return a directory of files for virtual chunks to refer to."""
    from tests.interop.edits import Sources
    from tests.interop.hierarchies import SOURCE_BYTES, SOURCE_FILES, seeded

    directory = tmp_path / "source"
    for seed, name in enumerate(SOURCE_FILES):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = seeded(seed).randbytes(SOURCE_BYTES)
        path.write_bytes(bytes(byte & 63 for byte in data))  # no signalling NaN among them
    return Sources(directory, f"{directory.as_uri()}/")


@pytest.fixture(scope="session")
def python_of_wheel_1(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Return the Python of an environment with wheel 1.x; without one, say so and skip."""
    return os.environ.get(VARIABLE) or environment(request, tmp_path_factory)

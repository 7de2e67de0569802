"""Contests for all tests of this directory, and what is said about them in the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

# Before the official engine is imported, which reads it then.
os.environ.setdefault("ICECHUNK_NO_LOGS", "1")

from benchmarks.attic import Attic
from benchmarks.contest import Contest
from benchmarks.machine import describe
from benchmarks.report import draw, print_table
from benchmarks.results import RESULTS, Result, merge
from benchmarks.s3_server import s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.s3_server import S3Server

_FOUND: Final = pytest.StashKey[list[Result]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know how large, and where the results go."""
    group = parser.getgroup("contests")
    group.addoption(
        "--size",
        choices=["quick", "full", "huge"],
        default="full",
        help="quick: once and small, to see that all works; huge: also what takes many minutes",
    )
    group.addoption(
        "--results",
        type=Path,
        default=RESULTS,
        help="JSON; newer results take the place of older ones of their kind",
    )
    group.addoption(
        "--part", action="store_true", help="print no table: there will be one for several files"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Time nothing where nobody looks at times."""
    config.stash[_FOUND] = []
    if config.getoption("size") == "quick":
        config.option.benchmark_disable = True


@pytest.fixture
def size(request: pytest.FixtureRequest) -> str:
    """Return how large."""
    name: str = request.config.getoption("size")
    return name


@pytest.fixture
def contest(request: pytest.FixtureRequest, size: str) -> Iterator[Contest]:
    """Return the contest, which times contenders beside each other."""
    document = request.module.__doc__ or ""
    found = Contest(document, size, lambda: request.getfixturevalue("benchmark"))
    yield found
    request.config.stash[_FOUND].extend(found.results)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Return a server of S3's protocol, near and far."""
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def attic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attic]:
    """Return where files go between turns that would else be deleted."""
    found = Attic(tmp_path_factory.mktemp("attic"))
    yield found
    found.clear()


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Return a path for a repository on the local disk."""
    return str(tmp_path / "repository")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table; write the JSON and the picture."""
    results = config.stash[_FOUND]
    if not results:
        return
    terminalreporter.write_line("")
    if config.getoption("size") == "quick":
        terminalreporter.write_line(
            f"{len(results)} workloads ran; times of --size quick say nothing."
        )
        return
    if not config.getoption("part"):
        print_table(results)
    path: Path = config.getoption("results")
    draw(merge(path, results, describe()), path.with_suffix(".png"))
    terminalreporter.write_line(f"{path} and {path.with_suffix('.png')} are written.")

"""Peers beside each other: every operation is timed for us and for the official engine in turn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("ICECHUNK_NO_LOGS", "1")
_BUSY_LOAD = 1.5


@pytest.fixture(params=["ours", "official"])
def engine(request: pytest.FixtureRequest) -> str:
    """Answer which engine to time."""
    name: str = request.param
    return name


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Answer a path for a repository on the local disk."""
    return str(tmp_path / "repository")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print medians and ratios, wins and losses alike."""
    session = getattr(config, "_benchmarksession", None)
    if session is None:
        return
    groups: dict[str, dict[str, float]] = {}
    for item in session.benchmarks:
        if item.stats.rounds and "engine" in item.params:
            groups.setdefault(item.group, {})[item.params["engine"]] = item.stats.median
    table = Table(title="Seconds, medians; ratio above 1: the official engine takes longer")
    for heading in ("operation", "ours", "official", "ratio"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for name, medians in groups.items():
        if {"ours", "official"} <= medians.keys():
            ratio = medians["official"] / medians["ours"]
            table.add_row(
                name, f"{medians['ours']:.6f}", f"{medians['official']:.6f}", f"{ratio:.2f}"
            )
    terminalreporter.write_line("")
    Console().print(table)
    for item in session.benchmarks:
        for name, value in item.extra_info.items():
            terminalreporter.write_line(f"{item.name}: {name.replace('_', ' ')}: {value:.0f}")
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD * (os.cpu_count() or 1):
        terminalreporter.write_line(f"The machine was busy (load {load:.1f}): take only ratios.")

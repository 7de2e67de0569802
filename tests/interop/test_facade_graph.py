"""The drawing of history, beside the official one."""

from __future__ import annotations

import icechunk_async.sync as facade
from tests.interop.facade_pair import PACKAGES


def test_history_is_drawn_with_the_same_names() -> None:
    """A graph of the class that the package names, with an SVG for notebooks."""
    for package in PACKAGES:
        repo = package.Repository.create(package.in_memory_storage())
        graph = repo.ancestry_graph(branch="main")
        assert isinstance(graph, package.AncestryGraph)
        assert repo.lookup_branch("main")[:8] in str(graph)
        assert "<svg" in graph._repr_svg_()
    assert facade.AncestryGraph is facade.snapshots.AncestryGraph
